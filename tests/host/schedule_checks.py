"""What a schedule must satisfy, checked on plain lists of segments, one list per worker.

Nothing here calls the code under test: the same checks run on schedules of the library and on wrong ones built by hand.
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

Workers = Sequence[Sequence[Any]]  # lists of _host.Segment


def check_schedule(workers: Workers, tiles: int, k_iters: int, min_iters: int, num_slots: int) -> None:
    """Raise AssertionError unless the segments do every iteration once and fix up every tile as documented."""
    by_tile: dict[int, list[tuple[int, int, int, Any]]] = defaultdict(list)
    slots: list[int] = []
    for worker, segments in enumerate(workers):
        waited_in: set[int] = set()
        last_piece = 0
        for s in segments:
            assert 0 <= s.k_begin < s.k_end <= k_iters, f"worker {worker}: {s} is empty or out of range"
            assert s.piece >= last_piece, f"worker {worker}: {s} goes back in time"
            last_piece = s.piece
            if s.slot >= 0:
                slots.append(s.slot)
                assert s.piece not in waited_in, f"worker {worker}: {s} is written after a wait in its piece"
            elif s.first_slot >= 0:
                waited_in.add(s.piece)
            by_tile[s.position].append((s.k_begin, s.k_end, worker, s))
    assert sorted(by_tile) == list(range(tiles)), "some tiles have no segment, or there are too many"
    assert len(slots) == len(set(slots)), "two segments share a slot"
    assert all(0 <= slot < num_slots for slot in slots), "a slot lies outside the workspace"
    for position, parts in by_tile.items():
        _check_tile(position, sorted(parts, key=lambda part: part[0]), k_iters, min_iters)


def _check_tile(position: int, parts: list[tuple[int, int, int, Any]], k_iters: int, min_iters: int) -> None:
    edges = [0] + [end for _, end, _, _ in parts]
    assert edges[-1] == k_iters, f"tile {position}: the last iterations are missing"
    assert [begin for begin, _, _, _ in parts] == edges[:-1], (
        f"tile {position}: iterations are missing or doubled"
    )
    *others, (_, _, finisher, last) = parts
    assert last.slot < 0 and all(s.slot >= 0 for _, _, _, s in others), f"tile {position}: not one finisher"
    if not others:
        assert last.first_slot < 0 and last.end_slot < 0, f"tile {position}: waits, though it is not split"
        return
    expected = list(range(last.first_slot, last.end_slot))
    assert [s.slot for _, _, _, s in others] == expected, f"tile {position}: partials out of K order"
    assert all(worker < finisher for _, _, worker, _ in others), f"tile {position}: waits for a later ticket"
    shortest = min(end - begin for begin, end, _, _ in parts)
    assert shortest >= min_iters, f"tile {position}: a run of {shortest} iterations"


def waits_acyclic(
    ranks: Sequence[Workers],
    tile_of: Callable[[int, int], Any],
    owners_of: Callable[[Any], set[int]] | None = None,
    defer_straddlers: bool = True,
) -> bool:
    """Whether the waits of all ranks together form no cycle, every worker being resident.

    Args:
        ranks: the segments of every worker of every rank.
        tile_of: (rank, position) -> the tile, the same object on every rank.
        owners_of: tile -> ranks whose rows it holds; each owner then waits for that tile of all other ranks.
            None: no remote waits.
        defer_straddlers: tiles of several owners are waited for at the end of the worker.
    """
    graph = graphlib.TopologicalSorter[Any]()
    published: dict[tuple[int, Any], Any] = {}
    remote: list[tuple[Any, int, Any]] = []
    for rank, workers in enumerate(ranks):
        slot_node = {
            s.slot: (rank, w, i) for w, ss in enumerate(workers) for i, s in enumerate(ss) if s.slot >= 0
        }
        for w, segments in enumerate(workers):
            before: Any = None
            deferred = []
            for i, s in enumerate(segments):
                node = (rank, w, i)
                graph.add(node, *([before] if before is not None else []))
                before = node
                if s.slot >= 0:
                    continue
                for slot in range(max(s.first_slot, 0), max(s.end_slot, 0)):
                    graph.add(node, slot_node[slot])
                tile = tile_of(rank, s.position)
                published[rank, tile] = node
                owners = owners_of(tile) if owners_of else set()
                if rank not in owners:
                    continue
                if len(owners) > 1 and defer_straddlers:
                    deferred.append(tile)
                    continue
                before = (*node, "reduced")
                graph.add(before, node)
                remote.append((before, rank, tile))
            for tile in deferred:
                end = (rank, w, "deferred", tile)
                graph.add(end, *([before] if before is not None else []))
                before = end
                remote.append((end, rank, tile))
    for node, rank, tile in remote:
        graph.add(node, *(published[peer, tile] for peer in range(len(ranks)) if peer != rank))
    try:
        graph.prepare()
    except graphlib.CycleError:
        return False
    return True
