"""Arguments at the ends of 63 bits and beyond what makes sense: right answers or sentences, never a wrapped sum.

Run with a _host built with -fsanitize=undefined, these tests also show that nothing wraps on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpkernels import _host

MOST = 2**63 - 1
COUNT = 2**30
TILE = _host.TileShape(128, 128, 32)
CPU = _host.cost_constants("cpu")


@pytest.mark.parametrize("k", [MOST, MOST - 30, MOST - 31, MOST - 32])
def test_iterations_of_the_largest_k(k: int) -> None:
    plan = _host.make_plan(1, 1, k, 1, tile=TILE, kind="stream_k", cost=CPU, workers=4)
    assert plan.schedule.k_iters == -(-k // 32)
    assert sum(_host.count_work(plan.schedule, w).iterations for w in range(4)) == -(-k // 32)


def test_orders_of_the_largest_extents() -> None:
    order = _host.make_tile_order(MOST, 1, 1, TILE)
    assert order.tiles_m == -(-MOST // 128) and order.at(len(order) - 1) == (0, order.tiles_m - 1, 0)
    wide = _host.make_tile_order(1, 2**61, 1, _host.TileShape(1, 1, 1), group_m=MOST)
    assert wide.group_m == 1 and wide.at(2**61 - 1) == (0, 0, 2**61 - 1)


@pytest.mark.parametrize("group_m", [1, 3, 8, MOST])
def test_groups_larger_than_the_order(group_m: int) -> None:
    order = _host.make_tile_order(5, 3, 2, _host.TileShape(1, 1, 1), group_m=group_m)
    rows = min(group_m, 5)
    expected = [
        (b, i, j)
        for b in range(2)
        for first in range(0, 5, rows)
        for j in range(3)
        for i in range(first, min(first + rows, 5))
    ]
    assert [order.at(i) for i in range(len(order))] == expected


@pytest.mark.parametrize(
    "sizes", [[MOST], [MOST - 5, 5], [5, MOST - 5], [1, MOST - 2, 1], [2**62, 2**62 - 1]]
)
def test_sharded_orders_of_the_largest_sizes(sizes: list[int]) -> None:
    for rank in range(len(sizes)):
        for make in (_host.make_arrival_order, _host.make_departure_order):
            order, shard_tiles = make(sizes, rank, 1, 1, TILE)
            assert sum(shard_tiles) == len(order) == -(-MOST // 128)
    assert _host.shards_of_tile_row(sizes, -(-MOST // 128) - 1, 128)[1] == len(sizes)
    big_rows = _host.Chunks(sizes, 1, 2**40, 1)
    assert big_rows.rows_of_tile_row(-(-MOST // 128) - 1, 128)[1] == len(big_rows)


def test_chunks_of_the_largest_k() -> None:
    chunks = _host.Chunks([1], 2**62, 1, 1)
    assert chunks.slabs == len(chunks) == 2**62
    k_iters = -(-(2**62) // 1000)
    assert chunks.slabs_of_iters(k_iters - 1, k_iters, 1000) == (1000 * (k_iters - 1), 2**62)
    assert _host.even_shards(MOST, 64) == [2**57] * 63 + [2**57 - 1]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(_host.SCHEDULE_KINDS),
    st.sampled_from([1, 2, 1000, COUNT - 1, COUNT]),
    st.sampled_from([1, 4, COUNT]),
    st.sampled_from([0, 1, 7, 2**31 - 1, 2**40]),
    st.integers(0, 20),
    st.data(),
)
def test_schedules_of_the_largest_counts(
    kind: str, workers: int, min_iters: int, tiles: int, shift: int, data: st.DataObject
) -> None:
    k_iters = max(1, (2**61 - 1) // max(1, tiles) >> shift)
    o = dict(
        workers=workers,
        min_iters=min_iters,
        splits=1 if tiles > 1000 else data.draw(st.sampled_from([2, 2**20])),
        comm_workers=data.draw(st.sampled_from([0, 1, workers // 2, workers])),
        comm_iters=data.draw(st.sampled_from([0, 5, (2**61 - 1) // workers])),
    )
    s = _host.make_schedule(kind, tiles, k_iters, **o)
    if s.workers <= 1000:
        counts = [_host.count_work(s, w) for w in range(s.workers)]
        assert sum(c.iterations for c in counts) == tiles * k_iters
        assert sum(c.epilogues for c in counts) == tiles
    for w in {0, s.workers // 2, s.workers - 1}:
        c = _host.count_work(s, w)
        assert 0 <= c.iterations <= tiles * k_iters and 0 <= c.epilogues <= tiles
        assert 0 <= c.partials_added < max(1, s.num_slots)


def test_the_finisher_is_looked_at_among_many_tickets() -> None:
    """One tile in 20000 runs: the last ticket adds all partials, and is what the product waits for."""
    s = _host.make_schedule("split_k", 1, 1 << 20, workers=108, min_iters=4, splits=20_000)
    assert s.workers == 20_000
    added = _host.count_work(s, s.workers - 1).partials_added
    assert added == 19_999
    cost = _host.CostConstants()
    cost.partial_us = 1.0
    assert _host.predict_us(s, TILE, cost, s.workers) == added


def test_a_billion_tickets_are_counted_quickly() -> None:
    start = time.monotonic()
    s = _host.make_schedule("split_k", 1, 2**40, workers=1, splits=COUNT)
    assert _host.count_work(s, s.workers - 1).partials_added == COUNT - 1
    assert _host.predict_us(s, TILE, CPU, 1) > 0
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("tiles", [1, 3, COUNT // 2, COUNT - 1])
def test_depths_for_a_billion_workers_are_found_quickly(tiles: int) -> None:
    start = time.monotonic()
    s = _host.make_schedule("hybrid_aligned", tiles, 1 << 31, workers=COUNT, min_iters=1)
    (piece,) = s.pieces
    assert piece.granules <= 32
    assert sum(_host.count_work(s, w).iterations for w in (0, s.workers - 1)) > 0
    assert time.monotonic() - start < 1


def schedule(**changes: object) -> Callable[[], object]:
    good: dict[str, object] = dict(kind="stream_k", tiles=2, k_iters=8, workers=4)
    return lambda: _host.make_schedule(**(good | changes))


ORDER = _host.make_tile_order(256, 128, 1, TILE)
CHUNKS = _host.Chunks([10, 20], 64, 4, 16)
PLAN = dict(tile=TILE, kind="stream_k", cost=CPU, workers=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            schedule(shard_tiles=[MOST, MOST, 4]),
            r"add up to the number of tiles \(2\), but they add up to more",
        ),
        (schedule(shard_tiles=[1, 2]), "but they add up to more"),
        (schedule(shard_tiles=[1]), "but they add up to 1"),
        (schedule(workers=COUNT + 1), r"workers must lie between 1 and 2\^30, but it is 1073741825"),
        (schedule(min_iters=COUNT + 1), r"min_iters must lie between 1 and 2\^30"),
        (schedule(splits=COUNT + 1), r"splits must lie between 1 and 2\^30"),
        (schedule(k_iters=MOST), r"below 2\^61"),
        (schedule(comm_workers=1, comm_iters=MOST), "comm_iters must not be negative, nor beyond"),
        (lambda: _host.make_arrival_order([MOST, MOST, 4], 0, 1, 1, TILE), r"less than 2\^63 rows"),
        (lambda: _host.shards_of_tile_row([1, MOST], 0, 1), "shards 0 to 1 have more"),
        (lambda: _host.make_tile_order(9, 9, 1, TILE, group_m=0), "group_m must be at least 1, but it is 0"),
        (lambda: _host.make_departure_order([9], 0, 9, 1, TILE, group_m=-1), "group_m must be at least 1"),
        (lambda: _host.make_tile_order(-1, 9, 1, TILE), "m must be at least 0, but it is -1"),
        (lambda: _host.make_arrival_order([9], 0, -9, 1, TILE), "n must be at least 0"),
        (lambda: _host.make_tile_order(9, 9, -1, TILE), "batch must be at least 0"),
        (lambda: _host.make_plan(1, 1, -1, 1, **PLAN), "k must be at least 0"),
        (lambda: _host.snap_cut(5, 0, 1), "k_iters must be at least 1, but it is 0"),
        (lambda: _host.snap_cut(-5, 8, 1), "cut must be at least 0"),
        (lambda: _host.snap_cut(5, 8, MOST), "min_iters must lie between"),
        (lambda: _host.snap_slack(0, 1), "k_iters must be at least 1"),
        (lambda: _host.least_share(8, MOST), "min_iters must lie between"),
        (lambda: _host.arrival_class(0, 0, 0), "world must lie between 1 and 64, but it is 0"),
        (lambda: _host.departure_class(0, 0, 0), "world must lie between 1 and 64, but it is 0"),
        (lambda: _host.arrival_class(MOST, -MOST, 2), r"shard and rank must lie in \[0, 2\)"),
        (lambda: _host.departure_class(0, 2, 2), r"shard and rank must lie in \[0, 2\)"),
        (lambda: _host.even_shards(1, 0), "world must lie between 1 and 64"),
        (lambda: _host.even_shards(-1, 1), "total must be at least 0"),
        (lambda: CHUNKS.slabs_of_iters(0, 1, 0), "bk must lie between 1 and"),
        (lambda: CHUNKS.slabs_of_iters(0, 3, 32), "0 <= k_begin <= k_end <= 2, but they are 0 and 3"),
        (lambda: CHUNKS.slabs_of_iters(-1, 1, 32), "k_begin and k_end must be iterations"),
        (lambda: CHUNKS.slabs_of_iters(2, 1, 32), "k_begin and k_end must be iterations"),
        (lambda: _host.Chunks([1], -1, 1, 1), "k must lie between 0 and"),
        (lambda: _host.Chunks([1], MOST, 1, 1), "k must lie between 0 and"),
        (lambda: _host.Chunks([2**40], 2**40, 1, 1), "use larger chunks"),
        (
            lambda: _host.count_work(_host.make_schedule("stream_k", 2, 8, workers=2), 2),
            r"worker must lie in \[0, 2\)",
        ),
        (
            lambda: _host.count_work(_host.make_schedule("stream_k", 2, 8, workers=2), -1),
            "worker must lie in",
        ),
        (
            lambda: _host.predict_us(_host.make_schedule("stream_k", 2, 8, workers=2), TILE, CPU, 0),
            "multiprocessors must be at least 1",
        ),
    ],
)
def test_wrong_arguments_are_sentences(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("segment", "num_slots", "message"),
    [
        (_host.Segment(2, 0, 8), 0, r"positions must lie in \[0, 2\), but one is 2"),
        (_host.Segment(-1, 0, 8), 0, "positions must lie in"),
        (_host.Segment(0, 0, 4, slot=1), 1, r"slots must lie in \[0, 1\), but position 0 has slot 1"),
        (_host.Segment(0, 4, 8, first_slot=0, end_slot=2), 1, r"waits for \[0, 2\)"),
        (_host.Segment(0, 4, 8, first_slot=-2, end_slot=1), 1, "slots must lie in"),
        (_host.Segment(0, 0, 8), -1, "num_slots must not be negative"),
    ],
)
def test_programs_that_name_what_is_not_there(segment: _host.Segment, num_slots: int, message: str) -> None:
    program = _host.RankProgram([[segment]], ORDER, num_slots)
    with pytest.raises(ValueError, match=message):
        _host.simulate_progress([program], tile=TILE)


def test_ranks_with_orders_of_other_tiles() -> None:
    programs = [_host.RankProgram([], _host.make_tile_order(m, 1, 1, TILE), 0) for m in (128, 256)]
    with pytest.raises(ValueError, match="programs must have orders of the same tiles"):
        _host.simulate_progress(programs, tile=TILE, shard_sizes=[128, 128], owner_waits="tile")
