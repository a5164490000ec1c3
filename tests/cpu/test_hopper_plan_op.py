"""torch.ops.tpkernels.streamk_plan for the Hopper kernel, without a GPU; tests/host has the plans' own tests."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
import torch

from tpkernels import _host

Plan = tuple[str, list[int], float]
SHAPES = [(8192, 8192, 8192), (512, 512, 32768), (2048, 5120, 3000), (100, 70, 40), (1, 4096, 700)]


def plan(m: int, n: int, k: int, *, batch: int = 1, sms: int = 132, tile: str = "", **options: Any) -> Plan:
    schedule, splits = options.pop("schedule", "auto"), options.pop("splits", 1)
    workers, device = options.pop("workers", 0), options.pop("device", "sm90")
    gated, finishes = options.pop("gated", False), options.pop("finishes", False)
    assert not options
    found: Plan = torch.ops.tpkernels.streamk_plan(
        batch, m, n, k, device, schedule, workers, splits, sms, tile, gated, finishes
    )
    return found


def sizes(tile: str) -> tuple[tuple[int, int], tuple[int, int, int], int]:
    """(bm, bn), the cluster, and 0 or, where a CTA takes a whole tile, 1 if it is swapped and 2 if not."""
    of_cta, cluster = tile.split("/")
    bm, bn, _ = map(int, of_cta.rstrip("sw").split("x"))
    cm, cn, ck = map(int, (cluster + "x1" * (cluster.count("x") == 1)).split("x"))
    return (bm, bn), (cm, cn, ck), {"s": 1, "w": 2}.get(of_cta[-1], 0)


@pytest.mark.parametrize("sms", [2, 60, 132])
@pytest.mark.parametrize("schedule", ["auto", *_host.SCHEDULE_KINDS])
def test_numbers_of_every_tile_and_schedule(schedule: str, sms: int) -> None:
    """What the op tells is what make_schedule makes, which covers every iteration once (tests/host)."""
    for tile, (m, n, k) in itertools.product(_host.HOPPER_TILES, SHAPES[1:]):
        if sms < math.prod(sizes(tile)[1]):
            continue
        if sizes(tile)[2] and schedule not in ("auto", "data_parallel"):
            with pytest.raises(RuntimeError, match="whose CTAs take whole tiles, one each"):
                plan(m, n, k, sms=sms, tile=tile, schedule=schedule, splits=3)
            continue
        kind, numbers, predicted = plan(m, n, k, sms=sms, tile=tile, schedule=schedule, splits=3)
        bm, bn, bk, tiles, k_iters, workers, splits, partial_tiles, cm, cn, ck, whole = numbers
        assert ((bm, bn), (cm, cn, ck), whole) == sizes(tile) and bk == 64 and predicted > 0
        assert tiles == -(-m // (bm * cm)) * -(-n // (bn * cn)) and k_iters == -(-k // (64 * ck))
        if whole:
            assert (kind, workers, splits, partial_tiles) == ("data_parallel", tiles, 1, 0)
        elif schedule != "auto":
            assert kind == schedule
            s = _host.make_schedule(
                kind, tiles, k_iters, workers=sms // (cm * cn * ck), min_iters=max(1, 4 // ck), splits=3
            )
            assert (s.workers, s.num_slots) == (workers, partial_tiles)
            assert 1 <= splits <= 3
            count = [_host.count_work(s, w) for w in range(s.workers)]
            assert sum(c.iterations for c in count) == tiles * k_iters
            assert sum(c.epilogues for c in count) == tiles


@pytest.mark.parametrize("sms", [2, 60, 132])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_free_choice_is_the_fastest_by_its_own_prediction(shape: tuple[int, int, int], sms: int) -> None:
    chosen = plan(*shape, sms=sms)
    times = {}
    for tile in _host.HOPPER_TILES:
        if sms < math.prod(sizes(tile)[1]):
            continue
        named = plan(*shape, sms=sms, tile=tile)
        times[tile] = named[2]
        assert chosen[2] <= named[2]
        if sizes(tile)[2]:
            continue  # whole tiles alone
        for schedule in ("data_parallel", "hybrid_aligned"):
            assert chosen[2] <= plan(*shape, sms=sms, tile=tile, schedule=schedule)[2]
    for tile in {
        name.split("/")[0] for name in _host.HOPPER_TILES
    }:  # the name of a tile leaves the cluster open
        assert plan(*shape, sms=sms, tile=tile)[2] == min(
            us for name, us in times.items() if name.startswith(tile + "/")
        )


@pytest.mark.parametrize(("gated", "finishes"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("sms", [60, 132])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_follows_is_planned_for(
    shape: tuple[int, int, int], sms: int, gated: bool, finishes: bool
) -> None:
    """The op tells the plan that the launcher makes of a gate and an epilogue."""
    best, *_ = _host.hopper_plans(*shape, gated=gated, finishes=finishes, multiprocessors=sms)
    kind, numbers, predicted = plan(*shape, sms=sms, gated=gated, finishes=finishes)
    (bm, bn), (cm, cn, ck), whole = sizes(best.tile)
    columns = bn // 2 if gated else bn
    m, n, k = shape
    tiles = -(-m // (bm * cm)) * -(-n // (columns * cn))
    s = best.plan.schedule
    expected = [
        bm,
        bn,
        64,
        tiles,
        -(-k // (64 * ck)),
        s.workers,
        best.plan.splits,
        s.num_slots,
        cm,
        cn,
        ck,
        whole,
    ]
    assert (kind, numbers, predicted) == (best.plan.kind, expected, best.plan.predicted_us)


def test_a_gate_always_finishes() -> None:
    for shape in SHAPES:
        assert plan(*shape, gated=True) == plan(*shape, gated=True, finishes=True)


@pytest.mark.parametrize("device", ["cpu", "sm80", "sm90-portable"])
def test_other_kernels_compute_a_gate_by_a_second_product(device: str) -> None:
    for shape in SHAPES:
        kind, numbers, predicted = plan(*shape, sms=0, device=device)
        assert plan(*shape, sms=0, device=device, gated=True) == (kind, numbers, 2 * predicted)
        assert plan(*shape, sms=0, device=device, finishes=True) == (kind, numbers, predicted)


def test_a_single_multiprocessor_has_no_clusters() -> None:
    assert plan(1000, 1000, 1000, sms=1)[1][-4:-1] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="no cluster of tile '128x256x64/2x1' fits on the device"):
        plan(1000, 1000, 1000, sms=1, tile="128x256x64/2x1")


@pytest.mark.parametrize("schedule", ["auto", "data_parallel"])
def test_predicted_time_grows_with_the_product(schedule: str) -> None:
    """To a hundredth: a longer K can be cut into more pieces. Not so where cutting is asked for by name: a larger
    product may have full waves, which need no cut.
    """
    for sms, dim in itertools.product((2, 60, 132), range(3)):
        for base in ([256, 256, 512], [1024, 1024, 1024]):
            times = []
            for doubled in range(5):
                shape = list(base)
                shape[dim] <<= doubled
                times.append(plan(*shape, sms=sms, schedule=schedule)[2])
            assert all(now <= 1.01 * then for now, then in itertools.pairwise(times)), (sms, dim, base, times)
            assert times[0] < times[-1]


@pytest.mark.parametrize("sms", [2, 60, 132])
@pytest.mark.parametrize("device", ["sm90-fp8", "sm90-fp8-fast", "sm90-fp8-blocks"])
def test_plans_of_fp8(device: str, sms: int) -> None:
    """Its own tiles, 128 of K an iteration; every iteration once."""
    for tile in (f"{t}/{c}" for t in ("128x256x128", "128x128x128") for c in ("2x1", "1x2", "1x1")):
        for (m, n, k), schedule in itertools.product(SHAPES[1:], _host.SCHEDULE_KINDS):
            kind, numbers, predicted = plan(
                m, n, k, sms=sms, tile=tile, schedule=schedule, splits=3, device=device
            )
            bm, bn, bk, tiles, k_iters, workers, _, partial_tiles, cm, cn, ck, whole = numbers
            assert (
                ((bm, bn), (cm, cn, ck), whole) == sizes(tile)
                and bk == 128
                and kind == schedule
                and predicted > 0
            )
            assert tiles == -(-m // (bm * cm)) * -(-n // (bn * cn)) and k_iters == -(-k // 128)
            s = _host.make_schedule(kind, tiles, k_iters, workers=sms // (cm * cn), splits=3)
            assert (s.workers, s.num_slots) == (workers, partial_tiles)


def test_fp8_takes_less_time_than_two_bytes() -> None:
    """By prediction: fast less than two levels, those less than scales of blocks. Small products of two bytes have a
    kernel of their own, which those of one lack."""
    for m, n, k in ((8192, 8192, 8192), (4096, 7168, 2048), (256, 4096, 7168)):
        devices = ("sm90-fp8-fast", "sm90-fp8", "sm90-fp8-blocks", "sm90")
        times = [plan(m, n, k, device=device)[2] for device in devices[: 4 if m > 256 else 3]]
        assert times == sorted(times)


def test_plans_are_found_quickly() -> None:
    took = []
    for batch, (m, n, k) in itertools.product((1, 3, 16), SHAPES):
        start = time.perf_counter()
        plan(m, n, k, batch=batch)
        took.append(time.perf_counter() - start)
    assert sorted(took)[len(took) // 2] < 5e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tile="128x128x32"), "tile must be one of 128x256x64, .*, but it is '128x128x32'"),
        (dict(tile="128x256x64/2x2"), "with or without a cluster such as /2x1, or empty for the cheapest"),
        (dict(tile="128x256x64/"), "tile must be one of"),
        (dict(tile="64x64x32", device="cuda"), "tile must be one of 128x256x64"),
        (dict(tile="128x256x64", device="sm90-portable"), "tile must be 128x256x32, 128x128x32 or 64x64x32"),
        (
            dict(tile="128x192x64", gated=True),
            "tile '128x192x64' takes no gate: its columns cannot be halved",
        ),
        (dict(tile="128x256x64", device="sm90-fp8"), "tile must be one of 128x256x128, 128x128x128"),
        (dict(tile="128x256x128"), "tile must be one of 128x256x64"),
        (dict(schedule="hybrid"), "schedule must be one of .* or hybrid_aligned, but it is 'hybrid'"),
        (dict(schedule="split_k", splits=0), "splits must lie between 1 and"),
        (dict(workers=-1), "workers and multiprocessors must not be negative, but they are -1 and 132"),
        (dict(sms=-2), "workers and multiprocessors must not be negative, but they are 0 and -2"),
    ],
)
def test_wrong_arguments_are_sentences(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"streamk_plan: .*{message}"):
        plan(300, 300, 300, **change)
