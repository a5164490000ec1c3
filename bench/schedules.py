"""What the best schedule of a fused product would take: a timeline of one rank, nothing measured. Pure.

All ranks do the same, turned by one. A rank's product is cut into tiles and its tiles into iterations of K;
multiprocessors take segments of them in an order that is also the order in which shards arrive or leave. A copy engine
carries the shards, in one copy or several, one copy at a time, and takes no multiprocessor.

    gather    a tile waits for the copy that its rows are in; the own shard is there at once
    scatter   a copy leaves when all its tiles are done; the owner adds what the others sent, tile by tile
    sums      (all-reduce) as a scatter; then the sums of a copy's rows go to all others over the same link

It is optimistic: copies run at full speed beside the product and do not slow it, ranks start together, what is added
costs the tile it is added to and no later one. What is left is what dependencies force on any order.

Times in us, sizes in bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

__all__ = [
    "CUTS",
    "SCHEDULES",
    "TILE",
    "Best",
    "Costs",
    "Link",
    "Op",
    "Tiles",
    "alone_us",
    "best",
    "fused_us",
]

Op = Literal["gather", "scatter", "sums"]

WORKERS = 132  # multiprocessors of an H100 or H200 (SXM)
TILE = (128, 256, 64)

# Tiles in time order, in pieces: "waves" deals out whole tiles, "streamed" cuts what it has evenly over all workers.
SCHEDULES = (
    "waves",
    "streamed",
    "streamed first",
    "streamed last",
    "own first",
    "4 groups",
    "8 groups",
)
CUTS = (1, 2, 4, 8)  # copies of a shard


@dataclass(frozen=True)
class Costs:
    """Of the product, for one tile of :data:`TILE`; only their ratios count where the product's time is known.

    Attributes:
        iteration: 64 of K.
        epilogue: of a tile, as far as it is not hidden.
        write, add: a partial of a tile that several workers share, written by one and added by another.
    """

    iteration: float
    epilogue: float
    write: float
    add: float

    def times(self, factor: float) -> Costs:
        """All of them so many times as long."""
        return Costs(*(factor * c for c in (self.iteration, self.epilogue, self.write, self.add)))


@dataclass(frozen=True)
class Link:
    """Of one rank, all ranks at once.

    Attributes:
        rate: bytes a us.
        copy: a copy beside its bytes, its flag included.
        start: from when a copy may begin to when it does.
        seen: from its end to when the reader knows.
        add: the owner of a sum reads and adds one tile of one peer.
    """

    rate: float
    copy: float
    start: float
    seen: float
    add: float = 0.0


@dataclass(frozen=True)
class Tiles:
    """Tiles of a product over ``world`` shards: ``rows`` x ``columns`` of each shard, ``depth`` iterations each."""

    world: int
    rows: int
    columns: int
    depth: int

    @classmethod
    def of(cls, world: int, m: int, n: int, k: int) -> Tiles:
        """Of [m, k] x [k, n], m being the rows of all shards, which are of equal size; all from 1 up."""
        shard = -(-m // world)
        return cls(world, -(-shard // TILE[0]), -(-n // TILE[1]), -(-k // TILE[2]))

    @property
    def of_shard(self) -> int:
        return self.rows * self.columns

    @property
    def count(self) -> int:
        return self.world * self.of_shard


@dataclass(frozen=True)
class Best:
    """``us`` that ``schedule`` takes with so many ``copies`` of a shard: less than any other here."""

    us: float
    schedule: str
    copies: int


@lru_cache(maxsize=512)
def best(
    op: Op,
    tiles: Tiles,
    shard_bytes: float,
    product_us: float,
    costs: Costs,
    link: Link,
    cuts: tuple[int, ...] = CUTS,
) -> Best:
    """The best of all schedules, cuts and, for sums, orders of tiles.

    Args:
        op: what travels.
        tiles: of one rank's product.
        shard_bytes: of what travels to one peer.
        product_us: what the product takes alone; ``costs`` are scaled so that the best schedule takes as long.
        costs, link: constants.
        cuts: numbers of copies of a shard to try; more than a shard has rows of tiles become so many.
    """
    found = [
        Best(us, schedule, copies)
        for schedule in SCHEDULES
        for copies in sorted({min(cut, tiles.rows) for cut in cuts})
        for us in _orders_us(
            op, tiles, shard_bytes, _scaled(tiles, product_us, costs), link, schedule, copies
        )
    ]
    return min(found, key=lambda b: b.us)


def _orders_us(
    op: Op, tiles: Tiles, shard_bytes: float, costs: Costs, link: Link, schedule: str, copies: int
) -> Iterator[float]:
    yield fused_us(op, tiles, shard_bytes, costs, link, schedule, copies)
    if op == "sums":
        yield fused_us(op, tiles, shard_bytes, costs, link, schedule, copies, in_turn=True)


def _scaled(tiles: Tiles, product_us: float, costs: Costs) -> Costs:
    """Times without waits are proportional to the costs."""
    return costs.times(product_us / alone_us(tiles, costs))


def alone_us(tiles: Tiles, costs: Costs) -> float:
    """The product by the best of the schedules, waiting for nothing."""
    nothing = (0.0,) * tiles.count
    return min(max(_run(s, tiles, costs, nothing)) for s in SCHEDULES)


def fused_us(
    op: Op,
    tiles: Tiles,
    shard_bytes: float,
    costs: Costs,
    link: Link,
    schedule: str,
    copies: int,
    *,
    in_turn: bool = False,
) -> float:
    """One schedule, one cut; ``in_turn``: copy by copy of all shards in turn, instead of shard by shard."""
    blocks = _blocks(op, tiles, copies, in_turn=in_turn)
    sizes = [shard_bytes * (b.end - b.begin) / tiles.rows for b in blocks]
    if op == "gather":
        return max(_run(schedule, tiles, costs, _arrivals(blocks, sizes, tiles, link)))
    done = _run(schedule, tiles, costs, (0.0,) * tiles.count)
    return max(max(done), _departed(op, blocks, sizes, tiles, link, done))


# --- what travels --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Rows [begin, end) of tiles of a shard, carried by one copy.

    ``turn``: whose shard, in time order; ``own``: this rank's.
    """

    turn: int
    copy: int
    begin: int
    end: int
    own: bool

    def tiles(self, columns: int) -> int:
        return (self.end - self.begin) * columns


def _blocks(op: Op, tiles: Tiles, copies: int, *, in_turn: bool) -> list[_Block]:
    """In the order in which their tiles are computed: own ones first in a gather, else last."""
    edges = [round(tiles.rows * i / copies) for i in range(copies + 1)]
    own = 0 if op == "gather" else tiles.world - 1
    found = [
        _Block(turn, copy, edges[copy], edges[copy + 1], turn == own)
        for turn in range(tiles.world)
        for copy in range(copies)
    ]
    if in_turn:  # own ones one step behind, so that what peers computed of them is there
        found.sort(key=lambda b: (b.copy + b.own, b.own, b.turn))
    return found


def _arrivals(
    blocks: Sequence[_Block], sizes: Sequence[float], tiles: Tiles, link: Link
) -> tuple[float, ...]:
    """When each tile may begin."""
    times: list[float] = []
    landed = link.start
    for block, size in zip(blocks, sizes, strict=True):
        if not block.own:
            landed += link.copy + size / link.rate
        times += [0.0 if block.own else landed + link.seen] * block.tiles(tiles.columns)
    return tuple(times)


def _departed(
    op: Op, blocks: Sequence[_Block], sizes: Sequence[float], tiles: Tiles, link: Link, done: Sequence[float]
) -> float:
    """When the last sum is where it belongs."""
    ends: dict[tuple[int, int], list[float]] = {}
    position = 0
    for block in blocks:
        count = block.tiles(tiles.columns)
        ends[block.turn, block.copy] = list(done[position : position + count])
        position += count
    others = [(b, size) for b, size in zip(blocks, sizes, strict=True) if not b.own]
    own = {b.copy: (b, size) for b, size in zip(blocks, sizes, strict=True) if b.own}
    missing = dict.fromkeys(own, tiles.world - 1)
    sums: list[tuple[float, int]] = []  # ready to be sent to all: when, which copy
    free = end = 0.0
    while others or sums:
        ready = link.start + max(ends[others[0][0].turn, others[0][0].copy]) if others else math.inf
        if sums and sums[0][0] <= ready:
            when, copy = sums.pop(0)
            free = max(free, when) + (tiles.world - 1) * (link.copy + own[copy][1] / link.rate)
            end = max(end, free + link.seen)
            continue
        block, size = others.pop(0)
        free = max(free, ready) + link.copy + size / link.rate
        missing[block.copy] -= 1
        if missing[block.copy] == 0:  # the last of the peers', by symmetry
            mine = own[block.copy][0]
            added = (
                max(max(t, free + link.seen) for t in ends[mine.turn, mine.copy])
                + (tiles.world - 1) * link.add
            )
            end = max(end, added)
            if op == "sums":
                sums = sorted([*sums, (added + link.start, block.copy)])
    return end


# --- the product ---------------------------------------------------------------------------------------------

_Segment = tuple[int, int, int]  # position of a tile in time order, iterations [begin, end)


def _pieces(schedule: str, tiles: Tiles) -> list[tuple[bool, int]]:
    """(streamed or not, number of tiles), in time order."""
    count = tiles.count
    full = count // WORKERS
    if schedule == "waves":
        return [(False, count)]
    if schedule == "streamed":
        return [(True, count)]
    if schedule == "streamed first":  # up to two waves, unless whole waves come out even
        return [(False, count)] if count % WORKERS == 0 else _streamed_and_waves(count)
    if schedule == "streamed last":
        waves = min(full, max(1, full - 1)) * WORKERS
        return [(False, waves), (True, count - waves)]
    if schedule == "own first":
        rest = count - tiles.of_shard
        return [(True, tiles.of_shard), (False, rest - rest % WORKERS), (True, rest % WORKERS)]
    groups = int(schedule.split()[0])
    edges = [round(count * i / groups) for i in range(groups + 1)]
    return [p for a, b in itertools.pairwise(edges) for p in _streamed_and_waves(b - a)]


def _streamed_and_waves(count: int) -> list[tuple[bool, int]]:
    waves = max(0, count // WORKERS - 1) * WORKERS
    return [(True, count - waves), (False, waves)]


@lru_cache(maxsize=64)
def _segments(schedule: str, tiles: Tiles) -> tuple[tuple[_Segment, ...], ...]:
    """What each worker does, in time order."""
    of: list[list[_Segment]] = [[] for _ in range(WORKERS)]
    first = 0
    for streamed, count in _pieces(schedule, tiles):
        if streamed:
            total, at = count * tiles.depth, 0
            for w in range(WORKERS):
                until = at + total // WORKERS + (w < total % WORKERS)
                while at < until:
                    tile, begin = divmod(at, tiles.depth)
                    end = min(tiles.depth, begin + until - at)
                    of[w].append((first + tile, begin, end))
                    at += end - begin
        else:
            for i in range(count):
                of[i % WORKERS].append((first + i, 0, tiles.depth))
        first += count
    return tuple(tuple(segments) for segments in of)


@lru_cache(maxsize=64)
def _run(schedule: str, tiles: Tiles, costs: Costs, ready: tuple[float, ...]) -> tuple[float, ...]:
    """When each tile is done, if it may begin at ``ready``.

    Who has the first iterations of a shared tile finishes it: they stand last in that worker's piece, the others'
    stand first in theirs.
    """
    work = _segments(schedule, tiles)
    depth = tiles.depth
    parts = [0] * tiles.count  # of others, not written yet
    for segments in work:
        for tile, begin, _ in segments:
            parts[tile] += begin > 0
    written: dict[int, list[float]] = {}
    done = [0.0] * tiles.count
    now, at = [0.0] * WORKERS, [0] * WORKERS
    waiting = list(range(WORKERS))
    while waiting:
        still, steps = [], sum(at)
        for w in reversed(waiting):  # later workers write what earlier ones add
            t, i, segments = now[w], at[w], work[w]
            while i < len(segments):
                tile, begin, end = segments[i]
                if begin == 0 and parts[tile]:
                    break
                t = max(t, ready[tile]) + (end - begin) * costs.iteration
                if begin > 0:
                    t += costs.write
                    parts[tile] -= 1
                    written.setdefault(tile, []).append(t)
                else:
                    for part in sorted(written.get(tile, ())) if end < depth else ():
                        t = max(t, part) + costs.add
                    t += costs.epilogue
                    done[tile] = t
                i += 1
            now[w], at[w] = t, i
            if i < len(segments):
                still.append(w)
        assert not still or sum(at) > steps, f"{schedule} of {tiles}: segments wait for each other"
        waiting = sorted(still)
    return tuple(done)
