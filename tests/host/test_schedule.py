"""Property tests of schedules: every decomposition, from nothing to more iterations than 32 bits can count."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_checks import check_schedule

from tpkernels import _host

KINDS = st.sampled_from(_host.SCHEDULE_KINDS)


@st.composite
def options(draw: st.DrawFn, max_tiles: int, max_iters: int) -> dict[str, object]:
    tiles = draw(st.integers(0, max_tiles))
    workers = draw(st.integers(1, 300))
    shards = draw(st.integers(0, 16))
    cuts = sorted(draw(st.lists(st.integers(0, tiles), min_size=shards, max_size=shards)))
    edges = [0, *cuts, tiles]
    return {
        "tiles": tiles,
        "k_iters": draw(st.integers(1, max_iters)),
        "workers": workers,
        "min_iters": draw(st.integers(1, 9)),
        "splits": draw(st.integers(1, 12)),
        "comm_workers": draw(st.sampled_from([0, 1, workers // 4, workers])),
        "comm_iters": draw(st.integers(0, 3 * max_iters)),
        "shard_tiles": [b - a for a, b in itertools.pairwise(edges)] if shards else [],
    }


def all_segments(s: _host.Schedule) -> list[list[_host.Segment]]:
    return [s.segments(w) for w in range(s.workers)]


@settings(max_examples=250, deadline=None)
@given(KINDS, options(max_tiles=400, max_iters=40))
@example("split_k", dict(tiles=2, k_iters=26, workers=132, splits=3))
@example("stream_k", dict(tiles=7, k_iters=8, workers=6, min_iters=4, comm_workers=2, comm_iters=1))
def test_every_iteration_once_and_fixed_up_in_k_order(kind: str, o: dict) -> None:
    s = _host.make_schedule(kind, **o)
    check_schedule(all_segments(s), o["tiles"], o["k_iters"], s.min_iters, s.num_slots)


@settings(max_examples=150, deadline=None)
@given(KINDS, options(max_tiles=400, max_iters=60))
def test_pieces_tile_the_order_and_fit_their_table(kind: str, o: dict) -> None:
    s = _host.make_schedule(kind, **o)
    assert len(s.pieces) <= _host.MAX_PIECES
    position = 0
    for p in s.pieces:
        assert p.first_tile == position and p.num_tiles > 0
        position += p.num_tiles
        if p.kind == "streamed":
            assert p.first_worker >= 0 and p.first_worker + p.workers <= s.workers
    assert position == o["tiles"]
    assert s.num_slots == sum(p.workers for p in s.pieces if p.kind == "streamed")


def check_shares(s: _host.Schedule) -> None:
    """Shares are even, less the handicap, to within one iteration and the slack of snapping."""
    slack = _host.snap_slack(s.k_iters, s.min_iters)
    least = _host.least_share(s.k_iters, s.min_iters)
    for index, p in enumerate(s.pieces):
        if p.kind != "streamed":
            continue
        total = p.num_tiles * s.k_iters
        bounds = s.share_bounds(index)
        assert bounds[0] == 0 and bounds[-1] == total
        if p.granules:
            check_granules(s, p, bounds)
            continue
        quotient = (total + p.handicapped * p.handicap) // p.workers
        assert quotient - (p.handicap if p.handicapped else 0) >= least or p.workers == 1
        for i in range(p.workers):
            even = quotient - (p.handicap if i < p.handicapped else 0)
            assert even - slack <= bounds[i + 1] - bounds[i] <= even + 1 + slack
        for bound in bounds:
            assert bound == _host.snap_cut(bound, s.k_iters, s.min_iters), "a cut is not snapped"


def check_granules(s: _host.Schedule, p: _host.Piece, bounds: list[int]) -> None:
    """Cuts lie at multiples of K / granules, which are no shorter than a run may be; shares differ by one of them."""
    assert p.handicapped == 0 and s.k_iters // p.granules >= s.min_iters
    indices = []
    for bound in bounds:
        tile, within = divmod(bound, s.k_iters)
        granule = -(-within * p.granules // s.k_iters)
        assert within == granule * s.k_iters // p.granules, "a cut lies between two depths"
        indices.append(tile * p.granules + granule)
    shares = [b - a for a, b in itertools.pairwise(indices)]
    assert max(shares) - min(shares) <= 1 and min(shares) >= 1


@settings(max_examples=150, deadline=None)
@given(KINDS, options(max_tiles=1000, max_iters=100))
def test_shares_keep_their_bound(kind: str, o: dict) -> None:
    check_shares(_host.make_schedule(kind, **o))


@settings(max_examples=150, deadline=None)
@given(KINDS, options(max_tiles=1000, max_iters=100))
def test_work_is_even_over_all_workers(kind: str, o: dict) -> None:
    """Without communication, workers differ by one tile (data-parallel) or by one iteration and the slack."""
    o = o | {"comm_workers": 0, "shard_tiles": []}
    s = _host.make_schedule(kind, **o)
    work = [_host.count_work(s, w).iterations for w in range(s.workers)]
    assert sum(work) == o["tiles"] * o["k_iters"]
    whole_tiles = kind == "data_parallel" or s.k_iters < 2 * s.min_iters or not s.num_slots
    bound = s.k_iters if whole_tiles else 1 + 2 * _host.snap_slack(s.k_iters, s.min_iters)
    granules = max((p.granules for p in s.pieces), default=0)
    if granules:  # or by one granule, and the rounding of two cuts
        bound = -(-s.k_iters // granules) + 1
    assert max(work) - min(work) <= bound


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 50), st.integers(1, 200), st.integers(1, 16), st.integers(1, 6))
def test_split_k_cuts_every_tile_alike(tiles: int, k_iters: int, splits: int, min_iters: int) -> None:
    s = _host.make_schedule("split_k", tiles, k_iters, workers=7, splits=splits, min_iters=min_iters)
    effective = min(splits, k_iters // (2 * min_iters))
    if effective <= 1:
        assert [p.kind for p in s.pieces] == ["waves"]
        return
    assert s.workers == tiles * effective, "one ticket for every (tile, split)"
    for w in range(s.workers):
        (segment,) = s.segments(w)
        assert segment.position == w // effective


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 2000), st.integers(8, 64))
def test_hybrid_streams_under_two_waves(workers: int, tiles: int, k_iters: int) -> None:
    for kind, order in (("hybrid_first", ["streamed", "waves"]), ("hybrid_last", ["waves", "streamed"])):
        s = _host.make_schedule(kind, tiles, k_iters, workers=workers, min_iters=4)
        if tiles % workers == 0:
            assert [p.kind for p in s.pieces] == ["waves"]
            continue
        streamed = next(p for p in s.pieces if p.kind == "streamed")
        assert streamed.num_tiles < 2 * workers and (tiles - streamed.num_tiles) % workers == 0
        assert [p.kind for p in s.pieces] == (order if tiles > 2 * workers else ["streamed"])


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 60), st.integers(20, 100), st.integers(1, 400))
def test_communicating_workers_are_charged(
    workers: int, comm: int, waves: int, k_iters: int, iters: int
) -> None:
    comm = min(comm, workers - 1)
    tiles = waves * workers
    s = _host.make_schedule(
        "hybrid_first", tiles, k_iters, workers=workers, min_iters=4, comm_workers=comm, comm_iters=iters
    )
    (streamed,) = [p for p in s.pieces if p.kind == "streamed"]
    work = [_host.count_work(s, w).iterations for w in range(workers)]
    charged = [n + iters for n in work[:comm]] + work[comm:]
    slack = 1 + 2 * _host.snap_slack(k_iters, 4)
    if streamed.handicapped:
        assert max(charged) - min(charged) <= slack
    else:  # too much to charge even with all tiles streamed: the communicating workers get no iteration
        assert work[:comm] == [0] * comm
        assert max(work) - min(work[comm:]) <= slack or streamed.workers < workers - comm


@settings(max_examples=150, deadline=None)
@given(KINDS, options(max_tiles=300, max_iters=40))
def test_counts_equal_walked_segments(kind: str, o: dict) -> None:
    s = _host.make_schedule(kind, **o)
    for w, segments in enumerate(all_segments(s)):
        c = _host.count_work(s, w)
        assert c.iterations == sum(x.k_end - x.k_begin for x in segments)
        assert c.epilogues == sum(x.finishes for x in segments)
        assert c.partials_written == sum(not x.finishes for x in segments)
        assert c.partials_added == sum(x.end_slot - x.first_slot for x in segments)


MOST_SHARES = 32


def check_divided(s: _host.Schedule) -> None:
    """What the kernel relies on where all workers of a split tile finish it together."""
    parts: dict[int, list[tuple[int, _host.Segment]]] = {}
    for worker, segments in enumerate(all_segments(s)):
        assert not any(x.is_split for x in segments[:-1]), f"worker {worker}: split work before its last"
        for x in segments:
            parts.setdefault(x.position, []).append((worker, x))
    split = {position: found for position, found in parts.items() if found[0][1].is_split}
    assert 2 <= s.divided_shares <= MOST_SHARES and s.num_slots == len(split) * s.divided_shares
    first = min(split)
    assert sorted(split) == list(range(first, first + len(split)))
    for position, found in split.items():
        found.sort(key=lambda part: part[1].k_begin)
        workers = [worker for worker, _ in found]
        begin = (position - first) * s.divided_shares
        slots = list(range(begin, begin + s.divided_shares))
        assert workers == slots, "a worker has the slot of its number"
        *others, last = [x for _, x in found]
        assert [x.slot for x in others] == slots[:-1], "consecutive slots, in the order of K"
        assert (last.first_slot, last.end_slot) == (slots[0], slots[-1]), (
            "the last slot is the finisher's own"
        )


@settings(max_examples=250, deadline=None)
@given(KINDS, options(max_tiles=400, max_iters=80))
@example("split_k", dict(tiles=3, k_iters=500, workers=7, min_iters=2, splits=33))
@example("split_k", dict(tiles=0, k_iters=500, workers=7, min_iters=2, splits=3))
@example("hybrid_aligned", dict(tiles=144, k_iters=112, workers=66))
@example("hybrid_aligned", dict(tiles=1, k_iters=400, workers=300, min_iters=1))
@example("hybrid_aligned", dict(tiles=70, k_iters=40, workers=66, splits=17))
def test_divided_fixup_has_one_last_run_for_each_worker(kind: str, o: dict) -> None:
    s = _host.make_schedule(kind, **o)
    if s.divided_shares:
        assert kind in ("split_k", "hybrid_aligned")
        check_divided(s)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 400), st.integers(2, 80), st.integers(1, 9), st.integers(2, 300))
@example(tiles=7 * 64 + 32, k_iters=8, min_iters=4, workers=64)  # just half a wave, and just two runs
@example(tiles=1, k_iters=64, min_iters=1, workers=300)  # more workers than shares
def test_a_remainder_of_half_a_wave_is_divided(
    tiles: int, k_iters: int, min_iters: int, workers: int
) -> None:
    s = _host.make_schedule("hybrid_aligned", tiles, k_iters, workers=workers, min_iters=min_iters)
    rest = tiles % workers
    if k_iters < 2 * min_iters or not 0 < rest <= workers // 2:
        assert s.divided_shares == 0
        return
    assert s.divided_shares == min(workers // rest, MOST_SHARES, k_iters // min_iters)
    assert sum(p.num_tiles for p in s.pieces if p.kind == "streamed") == rest
    check_divided(s)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(2, 80), st.integers(2, 300), st.integers(2, 40))
def test_depths_that_are_asked_for_are_divided_where_they_fit(
    tiles: int, k_iters: int, workers: int, depths: int
) -> None:
    s = _host.make_schedule("hybrid_aligned", tiles, k_iters, workers=workers, min_iters=1, splits=depths)
    rest, depths = tiles % workers, min(depths, k_iters)
    fits = 0 < rest * depths <= workers and depths <= MOST_SHARES
    assert s.divided_shares == (depths if fits else 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 300), st.integers(1, 40), st.integers(1, 4), st.integers(1, 20))
@example(tiles=2, k_iters=64, splits=32, min_iters=1, workers=1)
@example(tiles=2, k_iters=66, splits=33, min_iters=1, workers=1)
def test_split_k_is_divided_up_to_the_most_shares(
    tiles: int, k_iters: int, splits: int, min_iters: int, workers: int
) -> None:
    s = _host.make_schedule("split_k", tiles, k_iters, workers=workers, splits=splits, min_iters=min_iters)
    effective = min(splits, k_iters // (2 * min_iters))
    assert s.divided_shares == (effective if 2 <= effective <= MOST_SHARES else 0)
    if s.divided_shares:
        check_divided(s)


@settings(max_examples=200, deadline=None)
@given(KINDS, options(max_tiles=1 << 40, max_iters=1 << 20), st.data())
def test_counts_beyond_32_bits(kind: str, o: dict, data: st.DataObject) -> None:
    if kind == "split_k":
        o |= {"tiles": o["tiles"] >> 30, "shard_tiles": []}
    s = _host.make_schedule(kind, **o)
    check_shares(s)
    workers = range(s.workers)
    if s.workers <= 300:
        counts = [_host.count_work(s, w) for w in workers]
        assert sum(c.iterations for c in counts) == o["tiles"] * o["k_iters"]
        assert sum(c.epilogues for c in counts) == o["tiles"]
    w = data.draw(st.integers(0, s.workers - 1))
    for x in s.segments(w, limit=5):
        p = s.pieces[x.piece]
        assert p.first_tile <= x.position < p.first_tile + p.num_tiles
        assert 0 <= x.k_begin < x.k_end <= s.k_iters
        if p.kind == "streamed":
            begin, end = s.share_bounds(x.piece)[w - p.first_worker : w - p.first_worker + 2]
            at = (x.position - p.first_tile) * s.k_iters
            assert begin <= at + x.k_begin and at + x.k_end <= end
        else:
            assert (x.position - p.first_tile) % s.workers == w


def test_wrong_arguments_are_sentences() -> None:
    wrong = [
        (dict(kind="nonsense"), "schedule must be one of"),
        (dict(tiles=-1), "tiles must not be negative"),
        (dict(k_iters=0), "k_iters must be at least 1"),
        (dict(workers=0), "workers must lie between"),
        (dict(min_iters=0), "min_iters must lie between"),
        (dict(splits=0), "splits must lie between"),
        (dict(comm_workers=9), "comm_workers must lie between 0 and workers"),
        (dict(comm_iters=-1), "comm_iters must not be negative"),
        (dict(shard_tiles=[1, 2]), "add up to the number of tiles"),
        (dict(shard_tiles=[11, -1]), "shard_tiles must not be negative"),
        (dict(tiles=1 << 40, k_iters=1 << 40), "below 2\\^61"),
        (dict(kind="split_k", tiles=1 << 30, k_iters=100, splits=4), "tiles \\* splits below 2\\^31"),
    ]
    good = dict(kind="stream_k", tiles=10, k_iters=8, workers=4)
    _host.make_schedule(**good)
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            _host.make_schedule(**(good | change))


# The checker itself must be able to fail: each of these is one step away from a right schedule.


def rebuilt(s: _host.Segment, **changes: int) -> _host.Segment:
    fields = ("position", "k_begin", "k_end", "piece", "slot", "first_slot", "end_slot")
    return _host.Segment(**({f: getattr(s, f) for f in fields} | changes))


def mutations() -> dict[str, tuple[str, list[list[_host.Segment]]]]:
    s = _host.make_schedule("stream_k", 3, 16, workers=4, min_iters=2)
    right = all_segments(s)  # worker 1: [0, 8) of tile 1, then [12, 16) of tile 0
    check_schedule(right, 3, 16, 2, s.num_slots)

    def change(worker: int, segments: list[_host.Segment]) -> list[list[_host.Segment]]:
        return [segments if w == worker else list(x) for w, x in enumerate(right)]

    head, tail = right[1]
    return {
        "dropped segment": ("missing", change(1, [tail])),
        "iteration twice": ("doubled", change(1, [head, rebuilt(tail, k_begin=tail.k_begin - 1)])),
        "waits before it writes": ("after a wait", change(1, [tail, head])),
        "slot out of K order": ("out of K order", change(1, [head, rebuilt(tail, first_slot=1, end_slot=2)])),
        "two finishers": ("not one finisher", change(1, [rebuilt(head, slot=-1), tail])),
        "slot beyond the workspace": ("outside", change(1, [rebuilt(head, slot=99), tail])),
        "finisher is not the last ticket": ("later ticket", [right[1], right[0], right[2], right[3]]),
    }


@pytest.mark.parametrize("which", list(mutations()))
def test_checker_rejects_wrong_schedules(which: str) -> None:
    message, wrong = mutations()[which]
    with pytest.raises(AssertionError, match=message):
        check_schedule(wrong, 3, 16, 2, 4)
