"""The CPU executor through its op: types, strides, schedules, epilogues, conversions and errors against float64."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest
import torch

import tpkernels  # noqa: F401  (loads the ops)
from tpkernels import _host

OPS = torch.ops.tpkernels
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of the output, relative to the sum of magnitudes.
ROUNDING = {torch.float64: 0.0, torch.float32: 6e-8, torch.bfloat16: 4e-3, torch.float16: 5e-4}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def any_strides(rng: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A random tensor whose dimensions lie in memory in any order, padded."""
    order = rng.sample(range(3), 3)
    padded = torch.randn([shape[d] + rng.choice([0, 0, 3]) for d in order], dtype=torch.float64).to(dtype)
    cut = padded[tuple(slice(0, shape[d]) for d in order)]
    return cut.permute([order.index(d) for d in range(3)])


@pytest.mark.parametrize("seed", range(150))
def test_products_against_float64(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, m = rng.choice([1, 1, 2, 3]), rng.choice([0, 1, 5, 33, 130, 300])
    n, k = rng.choice([0, 1, 7, 64, 200, 270]), rng.choice([0, 1, 9, 128, 700, 2000])
    dtype, out_dtype = rng.choice(DTYPES), rng.choice(DTYPES)
    a, b = any_strides(rng, [batch, m, k], dtype), any_strides(rng, [batch, k, n], dtype)
    if rng.random() < 0.2:
        b = b[:1].expand(batch, k, n)
    bias = torch.randn(2 * n, dtype=rng.choice(DTYPES))[::2] if rng.random() < 0.5 else None
    out = any_strides(rng, [batch, m, n], out_dtype)
    preact = any_strides(rng, [batch, m, n], out_dtype) if rng.random() < 0.5 else None
    accumulate = rng.random() < 0.3
    old = out.to(torch.float64, copy=True) if accumulate else torch.zeros(batch, m, n, dtype=torch.float64)
    for poisoned in [preact] if accumulate else [preact, out]:
        if poisoned is not None:
            poisoned.fill_(float("nan"))
    activation = rng.choice(list(ACTIVATIONS))
    schedule = rng.choice(["auto", *_host.SCHEDULE_KINDS])
    workers, splits = rng.choice([0, 0, 1, 3, 7, 30]), rng.choice([1, 2, 5])
    OPS.streamk_gemm(a, b, bias, out, preact, activation, accumulate, schedule, workers, splits)

    z = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs() + old.abs() + 1e-3
    if bias is not None:
        z, size = z + bias.double(), size + bias.double().abs()
    bound = ROUNDING[out_dtype] * 1.01 + (1e-13 if dtype == torch.float64 else 1e-6)
    assert bool(((out.double() - (ACTIVATIONS[activation](z) + old)).abs() <= bound * size).all())
    if preact is not None:
        assert bool(((preact.double() - z).abs() <= bound * size).all())


def test_same_bits_with_any_number_of_threads() -> None:
    a, b = torch.randn(1, 100, 3000), torch.randn(1, 3000, 90)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            out = torch.empty(1, 100, 90)
            OPS.streamk_gemm(a, b, None, out, None, "none", False, "stream_k", 7)
            results.append(out)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_are_those_of_torch(dtype: torch.dtype) -> None:
    """Every half value read; rounding of all of them, of the midpoints between them and of random floats."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    read = torch.empty(1, 65536, 1)
    OPS.streamk_gemm(every.view(1, -1, 1), torch.ones(1, 1, 1, dtype=dtype), None, read, None, "none", False)
    assert torch.equal(torch.nan_to_num(read.view(-1), nan=7.0), torch.nan_to_num(every.float(), nan=7.0))
    x = every.float()
    noise = torch.randint(-(2**31), 2**31, (500_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = torch.cat([x, (x[:-1] + x[1:]) / 2, torch.nextafter(x, torch.tensor(float("inf"))), noise])
    rounded = torch.empty(1, x.numel(), 1, dtype=dtype)
    OPS.streamk_gemm(x.view(1, -1, 1), torch.ones(1, 1, 1), None, rounded, None, "none", False)
    got, expected = rounded.view(-1), x.to(dtype)
    assert bool(((got == expected) | (got.isnan() & expected.isnan())).all())


def test_plan_says_what_would_run() -> None:
    kind, numbers, predicted = OPS.streamk_plan(1, 64, 64, 4096, "cpu", "split_k", 4, 3)
    bm, bn, bk, tiles, k_iters, workers, splits, partials, *cluster, whole = numbers
    assert cluster == [1, 1, 1] and not whole
    assert kind == "split_k" and splits == 3 and workers == partials == tiles * splits
    assert tiles == -(-64 // bm) * -(-64 // bn) and k_iters == -(-4096 // bk) and predicted > 0
    # More splits than K allows: what would run is said, not what was asked for.
    assert OPS.streamk_plan(1, 64, 64, 128, "cpu", "split_k", 4, 3)[1][6] == 1
    kind, numbers, _ = OPS.streamk_plan(1, 2048, 3584, 8192, "cuda")
    bm, bn, bk, tiles, k_iters, clusters, _, _, cluster_m, cluster_n, cluster_k, whole = numbers
    assert cluster_k == 1 and whole in (0, 1, 2)
    name = f"{bm}x{bn}x{bk}{('', 's', 'w')[whole]}/{cluster_m}x{cluster_n}"
    assert name in _host.HOPPER_TILES and kind in _host.SCHEDULE_KINDS
    assert tiles == -(-2048 // (bm * cluster_m)) * -(-3584 // (bn * cluster_n)) and k_iters == 8192 // 64
    assert (
        clusters == tiles if whole else 1 <= clusters * cluster_m * cluster_n <= 132
    )  # workers are clusters


PORTABLE_TILES = ["128x256x32", "128x128x32", "64x64x32"]
CPU_TILES = ["256x256x128", "128x128x128", "64x64x128", "32x256x128", "16x64x128"]


@pytest.mark.parametrize(
    ("device", "tiles"),
    [("cpu", CPU_TILES), ("sm80", PORTABLE_TILES), ("sm90-portable", PORTABLE_TILES)],
)
def test_a_plan_has_the_tile_that_is_named(device: str, tiles: list[str]) -> None:
    size, schedules = (1, 1408, 3840, 4096), ["auto", *_host.SCHEDULE_KINDS]
    chosen = set()
    for schedule in schedules:
        free = OPS.streamk_plan(*size, device, schedule, 0, 2, 0)
        assert free == OPS.streamk_plan(*size, device, schedule, 0, 2, 0, "")
        plans = {tile: OPS.streamk_plan(*size, device, schedule, 0, 2, 0, tile) for tile in tiles}
        for tile, (kind, numbers, _) in plans.items():
            assert "x".join(map(str, numbers[:3])) == tile
            assert numbers[3] == -(-1408 // numbers[0]) * -(-3840 // numbers[1])
            assert schedule in ("auto", kind)
        assert free == min(plans.values(), key=lambda plan: plan[2])  # the first of equals
        chosen.add(tuple(free[1][:3]))
    assert device != "sm90-portable" or len(chosen) > 1  # forcing a schedule alone may change the tile


def test_the_product_is_computed_with_the_tile_that_is_named() -> None:
    """Tiles sum K in other places, so their last bits differ; those of one tile and schedule are the same."""
    a, b = torch.randn(1, 100, 3000), torch.randn(1, 3000, 90)
    results = {}
    for tile in CPU_TILES:
        out, again = torch.full((2, 1, 100, 90), float("nan"))
        OPS.streamk_gemm(a, b, None, out, None, "none", False, "stream_k", 7, 1, tile)
        OPS.streamk_gemm(a, b, None, again, None, "none", False, schedule="stream_k", workers=7, tile=tile)
        assert torch.equal(out, again)
        assert torch.allclose(out.double(), a.double() @ b.double(), atol=1e-3)
        results[tile] = out
    assert not torch.equal(results["16x64x128"], results["256x256x128"])


@pytest.mark.parametrize("schedule", ["auto", "stream_k"])
@pytest.mark.parametrize("tile", ["128x128x32", "64x64", "x", "64x64x128 "])
def test_tiles_that_the_cpu_has_not_are_refused(tile: str, schedule: str) -> None:
    a, b, out = torch.ones(1, 2, 3), torch.ones(1, 3, 5), torch.zeros(1, 2, 5)
    sentence = (
        "tile must be 256x256x128, 128x128x128, 64x64x128, 32x256x128 or 16x64x128, or empty for the cheapest, "
        f"but it is '{tile}'."
    )
    with pytest.raises(RuntimeError, match="streamk_gemm: " + re.escape(sentence)):
        OPS.streamk_gemm(a, b, None, out, None, "none", False, schedule, 0, 1, tile)
    assert not bool(out.any())
    with pytest.raises(RuntimeError, match="streamk_plan: " + re.escape(sentence)):
        OPS.streamk_plan(1, 2, 5, 3, "cpu", schedule, 0, 1, 0, tile)
    with pytest.raises(
        RuntimeError, match="streamk_plan: tile must be 128x256x32, 128x128x32 or 64x64x32, or empty"
    ):
        OPS.streamk_plan(1, 2, 5, 3, "sm90-portable", schedule, 0, 1, 0, "128x256x64")
    with pytest.raises(RuntimeError, match="streamk_plan: tile must be one of 128x256x64, 256x128x64"):
        OPS.streamk_plan(1, 2, 5, 3, "sm90", schedule, 0, 1, 0, "128x128x32")


def test_build_info_is_json() -> None:
    info = json.loads(OPS.build_info())
    assert info["target_torch"] == "2.11.0" and info["compiler"] and "_C" in info["extensions"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.ones(1, 4, 5)}, "b must have as many rows as a has columns .K = 3., but it has 4."),
        ({"b": torch.ones(2, 3, 5)}, "b must have the batch size of a, 1, but it has 2: expand it"),
        ({"a": torch.ones(2, 3)}, "a must have shape .batch, M, K., but it has shape .2, 3."),
        ({"b": torch.ones(1, 3, 5).double()}, "b must have the dtype of a, Float, but it is Double"),
        (
            {"out": torch.ones(1, 1, 5).expand(1, 2, 5)},
            "out must not be broadcast .its stride along dimension 1 is 0.",
        ),
        ({"out": torch.ones(1, 2, 6)}, "out must have shape"),
        ({"bias": torch.ones(4)}, "bias must have shape .N. = .5., but it has shape .4."),
        ({"preact": torch.ones(1, 2, 5).half()}, "preact must have the dtype of out"),
        ({"activation": "swish"}, "activation must be one of none, relu"),
        ({"schedule": "foo"}, "schedule must be one of data_parallel"),
        ({"workers": -1}, "workers must be 0 .as many as fit. or more, but it is -1."),
        ({"schedule": "split_k", "splits": 0}, "splits must (lie between 1 and|be at least 1)"),
        ({"a": torch.ones(1, 2, 3).int(), "b": torch.ones(1, 3, 5).int()}, "a must be float64, float32"),
    ],
)
def test_wrong_arguments_are_sentences(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "a": torch.ones(1, 2, 3),
        "b": torch.ones(1, 3, 5),
        "bias": None,
        "out": torch.ones(1, 2, 5),
        "preact": None,
        "activation": "none",
        "accumulate": False,
    }
    OPS.streamk_gemm(**good)
    with pytest.raises(RuntimeError, match=message):
        OPS.streamk_gemm(**(good | change))


def test_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPK_NUM_THREADS", "3")
    assert OPS.streamk_plan(1, 4000, 4000, 4000, "cpu", "stream_k")[1][5] == 3
    monkeypatch.setenv("TPK_NUM_THREADS", "many")
    with pytest.raises(
        RuntimeError, match="TPK_NUM_THREADS must be a number from 1 to 4096, but it is 'many'"
    ):
        OPS.streamk_plan(1, 8, 8, 8, "cpu")
