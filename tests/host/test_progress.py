"""Waits: fix-up, arrival and departure of all ranks together, with few and with all workers resident."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import waits_acyclic

from tpkernels import _host

TILE = _host.TileShape(4, 4, 32)
KINDS = st.sampled_from(_host.SCHEDULE_KINDS)


@settings(max_examples=150, deadline=None)
@given(
    KINDS, st.integers(0, 200), st.integers(1, 30), st.integers(1, 300), st.integers(1, 6), st.integers(1, 5)
)
def test_any_number_of_resident_workers_finishes(
    kind: str, tiles: int, k_iters: int, workers: int, splits: int, resident: int
) -> None:
    s = _host.make_schedule(kind, tiles, k_iters, workers=workers, splits=splits, min_iters=2)
    program = _host.RankProgram(s, _host.make_tile_order(4 * tiles, 4, 1, TILE))
    report = _host.simulate_progress([program], tile=TILE, resident=resident)
    assert report.finished, report.blocked
    assert waits_acyclic([[s.segments(w) for w in range(s.workers)]], lambda _, position: position)


Order = Callable[..., tuple[_host.TileOrder, list[int]]]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[int], str, dict[str, int], int]:
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(0, 24)), min_size=1, max_size=16))
    numbers = dict(workers=draw(st.integers(1, 40)), min_iters=2, splits=draw(st.integers(1, 4)))
    return sizes, draw(KINDS), numbers, draw(st.integers(1, 9))


def plan_ranks(
    make_order: Order, sizes: list[int], kind: str, numbers: dict[str, int], n: int
) -> tuple[list[_host.Schedule], list[_host.TileOrder], list[list[int]]]:
    ordered = [make_order(sizes, rank, n, 1, TILE, group_m=2) for rank in range(len(sizes))]
    schedules = [_host.make_schedule(kind, len(o), 8, shard_tiles=shards, **numbers) for o, shards in ordered]
    return schedules, [o for o, _ in ordered], [shards for _, shards in ordered]


@settings(max_examples=100, deadline=None)
@given(groups(), st.integers(1, 3), st.integers(1, 4))
def test_arrival_by_workers_needs_only_the_senders_resident(
    group: tuple[list[int], str, dict[str, int], int], comm: int, resident: int
) -> None:
    """Tickets that send are the first to start and wait for nobody before they have sent."""
    sizes, kind, numbers, n = group
    schedules, orders, _ = plan_ranks(_host.make_arrival_order, sizes, kind, numbers, n)
    programs = [_host.RankProgram(s, o) for s, o in zip(schedules, orders, strict=True)]
    report = _host.simulate_progress(
        programs, tile=TILE, shard_sizes=sizes, resident=max(resident, comm), comm_workers=comm
    )
    assert report.finished, report.blocked


def owners(sizes: list[int]) -> Callable[[tuple[int, int, int]], set[int]]:
    def of(tile: tuple[int, int, int]) -> set[int]:
        begin, end = _host.shards_of_tile_row(sizes, tile[1], TILE.bm)
        return {s for s in range(begin, end) if sizes[s]}

    return of


@settings(max_examples=120, deadline=None)
@given(groups(), st.booleans())
def test_departure_is_acyclic_where_own_tiles_stand_apart(
    group: tuple[list[int], str, dict[str, int], int], defer: bool
) -> None:
    """The simulator agrees with a graph of all waits, and with own tiles apart there is no cycle."""
    sizes, kind, numbers, n = group
    schedules, orders, shards = plan_ranks(_host.make_departure_order, sizes, kind, numbers, n)
    programs = [_host.RankProgram(s, o) for s, o in zip(schedules, orders, strict=True)]
    report = _host.simulate_progress(
        programs, tile=TILE, shard_sizes=sizes, resident=1 << 40, owner_waits="tile", defer_straddlers=defer
    )
    segments = [[s.segments(w) for w in range(s.workers)] for s in schedules]
    assert report.finished == waits_acyclic(segments, lambda r, p: orders[r].at(p), owners(sizes), defer)
    apart = all(
        _host.tiles_apart(s, len(o) - x[-1]) for s, o, x in zip(schedules, orders, shards, strict=True)
    )
    if apart and defer:
        assert report.finished, report.blocked
        whole = _host.simulate_progress(
            programs, tile=TILE, shard_sizes=sizes, resident=1 << 40, owner_waits="shard"
        )
        assert whole.finished, whole.blocked


@settings(max_examples=60, deadline=None)
@given(groups())
def test_every_shard_and_data_parallel_keep_tiles_apart(
    group: tuple[list[int], str, dict[str, int], int],
) -> None:
    sizes, _, numbers, n = group
    for kind in ("every_shard", "data_parallel"):
        schedules, orders, shards = plan_ranks(_host.make_departure_order, sizes, kind, numbers, n)
        for s, o, x in zip(schedules, orders, shards, strict=True):
            assert _host.tiles_apart(s, len(o) - x[-1])


@settings(max_examples=120, deadline=None)
@given(groups(), st.integers(1, 3))
def test_own_tiles_in_a_turn_of_their_own_need_no_worker_resident(
    group: tuple[list[int], str, dict[str, int], int], resident: int
) -> None:
    """With own tiles put behind all others any number of workers finishes, one too; nothing is lost."""
    sizes, kind, numbers, n = group
    sizes = [4 * size for size in sizes]  # no straddlers
    schedules, orders, shards = plan_ranks(_host.make_departure_order, sizes, kind, numbers, n)
    first_own = [len(o) - x[-1] for o, x in zip(orders, shards, strict=True)]
    if not all(_host.tiles_apart(s, first) for s, first in zip(schedules, first_own, strict=True)):
        return
    late = [_host.start_turn(s, first) for s, first in zip(schedules, first_own, strict=True)]
    for s, o, first in zip(late, orders, first_own, strict=True):
        segments = [s.segments(t) for t in range(s.tickets)]
        assert sum(x.k_end - x.k_begin for some in segments for x in some) == len(o) * s.k_iters
        owned = [x.position >= first for some in segments for x in some]  # by ticket
        assert owned == sorted(owned), "an own tile has a ticket before one of another rank's"
    programs = [_host.RankProgram(s, o) for s, o in zip(late, orders, strict=True)]
    report = _host.simulate_progress(
        programs, tile=TILE, shard_sizes=sizes, resident=resident, owner_waits="tile"
    )
    assert report.finished, report.blocked


def test_a_shape_on_which_another_library_hung() -> None:
    """[8192, 16384] gathered, times [16384, 53248 / 8]; and back, [8192, 53248 / 8] times [53248 / 8, 16384]."""
    sizes, tile = [1024] * 8, _host.TileShape(128, 256, 64)
    for resident in (1, 66, 132):
        for kind in ("stream_k", "data_parallel"):
            ordered = [_host.make_arrival_order(sizes, rank, 6656, 1, tile) for rank in range(8)]
            programs = [
                _host.RankProgram(_host.make_schedule(kind, len(o), 256, shard_tiles=x, workers=132), o)
                for o, x in ordered
            ]
            report = _host.simulate_progress(programs, tile=tile, resident=resident)
            assert report.finished, report.blocked
        late = []
        for rank in range(8):
            o, x = _host.make_departure_order(sizes, rank, 16384, 1, tile)
            schedule = _host.make_schedule("data_parallel", len(o), 104, shard_tiles=x, workers=132)
            late.append(_host.RankProgram(_host.start_turn(schedule, len(o) - x[-1]), o))
        report = _host.simulate_progress(
            late, tile=tile, shard_sizes=sizes, resident=resident, owner_waits="tile"
        )
        assert report.finished, report.blocked


# The simulator must be able to say no.


def departure(kind: str, sizes: list[int], workers: int) -> list[_host.RankProgram]:
    numbers = dict(workers=workers, min_iters=2)
    schedules, orders, _ = plan_ranks(_host.make_departure_order, sizes, kind, numbers, 4)
    return [_host.RankProgram(s, o) for s, o in zip(schedules, orders, strict=True)]


def test_remote_waits_need_resident_workers() -> None:
    """Ticket 0 of each rank waits, in an own tile, for a tile that ticket 1 of the other computes."""
    programs = departure("data_parallel", [8, 8], workers=3)
    for resident in (1, 3):
        report = _host.simulate_progress(
            programs, tile=TILE, shard_sizes=[8, 8], resident=resident, owner_waits="tile"
        )
        assert report.finished == (resident == 3)
        assert len(report.blocked) == (0 if report.finished else 2)
        assert all("waits for the partial of rank" in line for line in report.blocked)


def test_a_share_of_own_and_other_tiles_deadlocks() -> None:
    """Shares are walked backwards: an own tile comes before the tile that the other rank waits for."""
    programs = departure("stream_k", [8, 8], workers=1)
    report = _host.simulate_progress(programs, tile=TILE, shard_sizes=[8, 8], resident=9, owner_waits="tile")
    assert not report.finished and len(report.blocked) == 2


def test_straddlers_must_not_be_waited_for_at_once() -> None:
    """Three ranks, each first computing a tile that it shares with the next: a ring of waits, unless deferred."""
    sizes = [6, 4, 4, 6]
    programs = departure("data_parallel", sizes, workers=1)
    for defer in (False, True):
        report = _host.simulate_progress(
            programs, tile=TILE, shard_sizes=sizes, resident=1, owner_waits="tile", defer_straddlers=defer
        )
        assert report.finished == defer, report.blocked


def test_a_wait_for_a_later_ticket_deadlocks_with_one_resident() -> None:
    """Cutting so that the first K finishes (the paper's way round) needs all workers resident."""
    order = _host.make_tile_order(4, 4, 1, TILE)
    first_k_finishes = [
        [_host.Segment(0, 0, 4, first_slot=0, end_slot=1)],
        [_host.Segment(0, 4, 8, slot=0)],
    ]
    program = _host.RankProgram(first_k_finishes, order, 1)
    assert not _host.simulate_progress([program], tile=TILE, resident=1).finished
    assert _host.simulate_progress([program], tile=TILE, resident=2).finished


def test_a_cycle_of_fix_ups_is_found() -> None:
    """Two workers that wait for each other's partial before writing their own."""
    order = _host.make_tile_order(8, 4, 1, TILE)
    workers = [
        [_host.Segment(0, 4, 8, first_slot=1, end_slot=2), _host.Segment(1, 0, 4, slot=0)],
        [_host.Segment(1, 4, 8, first_slot=0, end_slot=1), _host.Segment(0, 0, 4, slot=1)],
    ]
    report = _host.simulate_progress([_host.RankProgram(workers, order, 2)], tile=TILE, resident=2)
    assert not report.finished and "partial slot" in report.blocked[0]
    assert not waits_acyclic([workers], lambda _, position: position)
