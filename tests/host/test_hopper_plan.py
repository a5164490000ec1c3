"""Plans of the Hopper kernel: what they cover, what they cost, and the sentences for what makes no sense."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_checks import check_schedule

from tpkernels import _host

TILES = _host.HOPPER_TILES
WALKING = ("128x256x64", "256x128x64", "256x192x64", "128x192x64", "128x128x64", "192x192x64")
NO_GATE = ("256x192x64", "128x192x64", "192x192x64", "64x128x64w", "128x192x64w", "128x64x64s")
SIZES = st.integers(1, 3000)
MULTIPROCESSORS = st.sampled_from([1, 2, 3, 16, 66, 78, 114, 131, 132, 264])


def shape_of(tile: str) -> tuple[int, int, tuple[int, int, int]]:
    """Rows and columns of a tile, and its cluster."""
    sizes, cluster = tile.split("/")
    bm, bn, _ = map(int, sizes.rstrip("sw").split("x"))
    cm, cn, *depth = map(int, cluster.split("x"))
    return bm, bn, (cm, cn, *depth) if depth else (cm, cn, 1)


def resident(tile: str, sms: int) -> int:
    """Clusters that run at once; groups of multiprocessors hold no more than 30 of 4 CTAs, 15 of 8, on 132."""
    size = math.prod(shape_of(tile)[2])
    return sms // size if size < 4 else sms * (120 // size) // 132


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def whole_names() -> set[str]:
    """Tiles whose CTAs take whole ones: rows of wgmma and its columns, swapped (s) and not (w), in clusters of which
    each CTA loads whole groups of 8 rows; those along K for tiles of up to 128x128."""
    kernels = [(64, 16, 128), (64, 144, 256), (128, 16, 128), (128, 144, 256), (192, 80, 192)]
    planes = [(2, 1), (1, 2), (1, 1), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)]
    deep = [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 4), (2, 1, 4), (1, 2, 4), (1, 1, 8)]
    found = set()
    for (rows, first, last), (m, n, *k) in itertools.product(kernels, planes + deep):
        cluster = "x".join(map(str, (m, n, *k)))
        for columns in range(first, last + 1, 16):
            if k and rows * columns > 128 * 128:
                continue
            if columns // n % 8 == 0:
                found.add(f"{columns}x{rows}x64s/{cluster}")
            if columns // m % 8 == 0:
                found.add(f"{rows}x{columns}x64w/{cluster}")
    return found


def test_names_of_tiles() -> None:
    walking = {f"{tile}/{cluster}" for tile in WALKING for cluster in ("2x1", "1x2", "1x1")}
    assert set(TILES) == walking | whole_names() and len(TILES) == len(set(TILES))
    for tile in TILES:
        assert _host.is_hopper_tile(tile) and _host.is_hopper_tile(tile.split("/")[0])
    wrong = [
        "",
        "128x256",
        "128x128x32",
        "128x256x64/",
        "128x256x64/2x2",
        "128x256x64/1",
        "/2x1",
        "64x128x64",
    ]
    for text in [
        *wrong,
        "128x256x64/1x1x2",
        "48x128x64s/1x4",
        "64x128x64s/1x1x1",
        "192x192x64w/1x1x2",
        "208x192x64s",
        "24x64x64s",
        "64x24x64w",
        "64x256x64s",
        "256x256x64w",
        "64x128x64s/",
        "64x128x64v",
    ]:
        assert not _host.is_hopper_tile(text)


@settings(max_examples=200, deadline=None)
@given(
    SIZES,
    SIZES,
    st.integers(0, 4000),
    st.integers(1, 3),
    st.sampled_from(["auto", *_host.SCHEDULE_KINDS]),
    st.sampled_from(TILES),
    MULTIPROCESSORS,
    st.integers(1, 9),
    st.booleans(),
)
def test_every_iteration_of_every_tile_once(
    m: int, n: int, k: int, batch: int, schedule: str, tile: str, sms: int, splits: int, gated: bool
) -> None:
    bm, bn, (cm, cn, ck) = shape_of(tile)
    assume(resident(tile, sms) > 0)
    gated = gated and bn % 128 == 0 and "w/" not in tile
    whole = "s/" in tile or "w/" in tile
    schedule = "data_parallel" if whole and schedule != "auto" else schedule
    (found,) = _host.hopper_plans(
        m, n, k, batch, schedule=schedule, splits=splits, tile=tile, gated=gated, multiprocessors=sms
    )
    plan = found.plan
    assert (found.tile, found.cluster) == (tile, (cm, cn, ck))
    columns = bn // 2 if gated else bn
    rows, cols = ceil_div(m, bm * cm), ceil_div(n, columns * cn)
    s, tiles, k_iters = plan.schedule, batch * rows * cols, max(1, ceil_div(k, 64 * ck))
    assert (len(plan.order), s.k_iters) == (tiles, k_iters)
    check_schedule([s.segments(w) for w in range(s.workers)], tiles, k_iters, s.min_iters, s.num_slots)
    places = {plan.order.at(i) for i in range(tiles)}
    assert places == set(itertools.product(range(batch), range(rows), range(cols)))
    if whole:
        assert s.workers == max(1, tiles), "a worker for every tile"
    elif schedule != "split_k":
        assert s.workers <= resident(tile, sms), "more clusters than run at once"
    assert plan.predicted_us > 0


@settings(max_examples=150, deadline=None)
@given(
    SIZES, SIZES, st.integers(64, 30000), st.sampled_from(["auto", *_host.SCHEDULE_KINDS]), MULTIPROCESSORS
)
def test_the_workers_that_are_looked_at_tell_of_all(m: int, n: int, k: int, schedule: str, sms: int) -> None:
    """Seven workers stand for all: the longest is missed by two granules, or runs of min_iters, at most."""
    bare = {name: 0.0 if "iter_us" not in name else cost for name, cost in _host.hopper_cost().items()}
    bare |= {"bytes_per_us": 1e30, "l2_bytes": 1e30, "split_per_us": 1e30}
    for found in _host.hopper_plans(m, n, k, schedule=schedule, splits=3, multiprocessors=sms):
        if "s/" in found.tile or "w/" in found.tile:
            continue  # has a model of its own
        s = found.plan.schedule
        iters = max(_host.count_work(s, w).iterations for w in range(s.workers))
        turns = ceil_div(s.workers, min(s.workers, resident(found.tile, sms)))
        told = _host.hopper_predict_us(m, n, k, plan=found, multiprocessors=sms, cost=bare)
        told /= bare[f"iter_us {found.tile}"] * turns
        granules = max((p.granules for p in s.pieces), default=0)
        slack = 2 * max(s.min_iters, ceil_div(s.k_iters, granules) if granules else 0)
        assert iters - slack <= told + 1e-6 and told <= iters + 1e-6


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES, st.integers(64, 20000), MULTIPROCESSORS, st.booleans(), st.booleans())
def test_the_cheapest_plan_comes_first(m: int, n: int, k: int, sms: int, gated: bool, finishes: bool) -> None:
    ask = dict(gated=gated, finishes=finishes, multiprocessors=sms)
    plans = _host.hopper_plans(m, n, k, **ask)
    times = [p.plan.predicted_us for p in plans]
    assert times == sorted(times) and len({p.tile for p in plans}) == len(plans)
    for found in plans:
        (alone,) = _host.hopper_plans(m, n, k, tile=found.tile, **ask)
        assert (alone.plan.kind, alone.plan.predicted_us) == (found.plan.kind, found.plan.predicted_us)
        told = _host.hopper_predict_us(
            m, n, k, plan=found, finishes=finishes, multiprocessors=sms, cost=_host.hopper_cost()
        )
        assert told == found.plan.predicted_us
        (whole,) = _host.hopper_plans(m, n, k, tile=found.tile, schedule="data_parallel", **ask)
        assert found.plan.predicted_us <= whole.plan.predicted_us, "auto is worse than whole tiles"


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, st.integers(64, 20000), st.sampled_from([16, 66, 132]), st.integers(0, 3))
def test_more_work_does_not_take_less_time(m: int, n: int, k: int, sms: int, which: int) -> None:
    """Roughly: a shape may happen to fit better, by the cost of cutting tiles, so a fifth is allowed."""
    larger = [m, n, k]
    if which < 3:
        larger[which] *= 2
    now = _host.hopper_plans(m, n, k, multiprocessors=sms)[0].plan.predicted_us
    then = _host.hopper_plans(*larger, multiprocessors=sms if which < 3 else sms // 2)[0].plan.predicted_us
    assert then >= now * 0.8


def test_a_plan_is_made_quickly() -> None:
    times = []
    for n in range(4000, 4020):  # other shapes: nothing is remembered here, but let nothing be
        start = time.perf_counter()
        _host.hopper_plans(2048, n, 8192)
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 2e-3  # about 0.2 ms; the launcher remembers plans


@pytest.mark.parametrize("tile", NO_GATE)
def test_a_gate_needs_columns_that_can_be_halved(tile: str) -> None:
    with pytest.raises(ValueError, match="takes no gate: its columns cannot be halved"):
        _host.hopper_plans(512, 512, 512, tile=tile, gated=True)
    assert not {p.tile.split("/")[0] for p in _host.hopper_plans(512, 512, 512, gated=True)} & set(NO_GATE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(m=-1), "m must be at least 0, but it is -1"),
        (dict(n=-1), "n must be at least 0"),
        (dict(k=-1), "k must be at least 0"),
        (dict(batch=-1), "batch must be at least 0"),
        (dict(tile="128x128x32"), r"tile must be one of 128x256x64, .* but it is '128x128x32'"),
        (dict(tile="128x256x64/2x2"), "with or without a cluster such as /2x1"),
        (dict(schedule="nonsense"), "schedule must be one of data_parallel"),
        (dict(schedule="split_k", splits=0), "splits must lie between 1"),
        (dict(workers=2**30 + 1), "workers must lie between 1"),
        (dict(multiprocessors=0), "multiprocessors must lie between 1"),
        (dict(multiprocessors=1, tile="128x256x64/2x1"), "no cluster of tile '128x256x64/2x1' fits"),
    ],
)
def test_wrong_arguments_are_sentences(change: dict, message: str) -> None:
    good = dict(m=300, n=300, k=300)
    assert _host.hopper_plans(**good)
    with pytest.raises(ValueError, match=message):
        _host.hopper_plans(**(good | change))


def test_costs_have_the_names_of_the_model() -> None:
    cost = _host.hopper_cost()
    (plan, *_) = _host.hopper_plans(300, 300, 300)
    with pytest.raises(ValueError, match="cost must have 'launch_us', but it has not"):
        _host.hopper_predict_us(
            300, 300, 300, plan=plan, cost={k: v for k, v in cost.items() if k != "launch_us"}
        )
    with pytest.raises(ValueError, match="and no others"):
        _host.hopper_predict_us(300, 300, 300, plan=plan, cost=cost | {"launch": 1.0})
