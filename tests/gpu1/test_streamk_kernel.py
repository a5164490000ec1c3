"""The portable Stream-K kernel (torch.ops.tpkernels.streamk_gemm on CUDA) against float64: values in every form."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from streamk_cases import (
    ACTIVATIONS,
    DTYPES,
    FAST,
    OUT_DTYPES,
    SCHEDULES,
    SLOW,
    TILES,
    check,
    embed,
    gemm,
    output,
    randn,
)

from tpkernels import _extensions
from tpkernels.testing import canary_view

pytestmark = pytest.mark.gpu1


SHAPES = [
    (1, 1, 1),
    (5, 7, 3),
    (64, 64, 32),
    (128, 128, 64),
    (129, 257, 100),
    (300, 200, 520),
    (1000, 72, 1031),
]


@pytest.mark.parametrize("layout_b", FAST)
@pytest.mark.parametrize("layout_a", FAST)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_layouts(dtype: torch.dtype, layout_a: str, layout_b: str, generator: torch.Generator) -> None:
    for m, n, k in SHAPES:
        a = embed(randn(1, m, k, dtype=dtype, generator=generator), layout_a)
        b = embed(randn(1, k, n, dtype=dtype, generator=generator), layout_b)
        # data_parallel over few and over many tiles picks the two tile sizes; stream_k goes through the fix-up.
        for schedule in ("data_parallel", "stream_k"):
            check(a, b, output((1, m, n), dtype), schedule=schedule)


@pytest.mark.parametrize("layout_b", FAST + SLOW)
@pytest.mark.parametrize("layout_a", FAST + SLOW)
def test_any_strides_and_alignment(layout_a: str, layout_b: str, generator: torch.Generator) -> None:
    for dtype, (m, n, k) in zip(itertools.cycle(DTYPES), SHAPES, strict=False):
        a = embed(randn(2, m, k, dtype=dtype, generator=generator), layout_a)
        b = embed(randn(2, k, n, dtype=dtype, generator=generator), layout_b)
        check(a, b, output((2, m, n), dtype), schedule="hybrid_first")


@pytest.mark.parametrize("out_layout", ["rows", "rows_odd", "cols", "strided"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_epilogues(out_dtype: torch.dtype, out_layout: str, generator: torch.Generator) -> None:
    m, n, k = 150, 203, 96
    for dtype, activation, accumulate, schedule in itertools.product(
        DTYPES, ACTIVATIONS, [False, True], ["data_parallel", "split_k"]
    ):
        a = randn(2, m, k, dtype=dtype, generator=generator) / 4
        b = randn(2, k, n, dtype=dtype, generator=generator) / 4
        out, preact = output((2, m, n), out_dtype, out_layout), output((2, m, n), out_dtype, out_layout)
        if accumulate:
            out.tensor.copy_(randn(2, m, n, dtype=out_dtype, generator=generator))
        check(
            a,
            b,
            out,
            bias=randn(n, dtype=out_dtype, generator=generator),
            preact=preact,
            activation=activation,
            accumulate=accumulate,
            schedule=schedule,
            splits=3,
        )


@pytest.mark.parametrize("bias_dtype", OUT_DTYPES, ids=str)
def test_bias_of_any_dtype_and_stride(bias_dtype: torch.dtype, generator: torch.Generator) -> None:
    for n in (1, 3, 64, 130):
        bias = randn(n, 3, dtype=bias_dtype, generator=generator)[:, 1]
        a = randn(1, 70, 40, dtype=torch.bfloat16, generator=generator)
        b = randn(1, 40, n, dtype=torch.bfloat16, generator=generator)
        check(a, b, output((1, 70, n), torch.float32), bias=bias)
        check(a, b, output((1, 70, n), torch.float32), bias=bias[:1].expand(n))


@pytest.mark.parametrize("part", range(4))
def test_random_problems(part: int, seed: int, generator: torch.Generator) -> None:
    pick = random.Random(seed)
    for _ in range(60):
        dtype, out_dtype = pick.choice(DTYPES), pick.choice(OUT_DTYPES)
        batch = pick.choice([1, 1, 2, 5])
        m, n, k = (round(math.exp(pick.uniform(0, math.log(700)))) for _ in range(3))
        k = pick.choice([k, 8 * k, 0]) if pick.random() < 0.5 else k
        a = embed(randn(batch, m, k, dtype=dtype, generator=generator), pick.choice(FAST + FAST + SLOW))
        b = embed(randn(batch, k, n, dtype=dtype, generator=generator), pick.choice(FAST + FAST + SLOW))
        out = output((batch, m, n), out_dtype, pick.choice(["rows", "rows", "rows_odd", "cols", "strided"]))
        accumulate = pick.random() < 0.3
        if accumulate:
            out.tensor.copy_(randn(batch, m, n, dtype=out_dtype, generator=generator))
        check(
            a,
            b,
            out,
            preact=output((batch, m, n), out_dtype) if pick.random() < 0.3 else None,
            bias=randn(n, dtype=dtype, generator=generator) if pick.random() < 0.5 else None,
            activation=pick.choice(ACTIVATIONS),
            accumulate=accumulate,
            schedule=pick.choice(SCHEDULES),
            workers=pick.choice([0, 0, 1, 7, 100, 1000]),
            splits=pick.choice([1, 2, 5]),
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_workers_and_splits(schedule: str, generator: torch.Generator) -> None:
    for m, n, k in [(300, 520, 1000), (64, 64, 8192), (512, 1024, 256), (40, 3000, 2050)]:
        a = randn(1, m, k, dtype=torch.bfloat16, generator=generator)
        b = randn(1, n, k, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
        for workers in (0, 1, 2, 7, 132, 5000):  # 5000: far more tickets than CTAs
            for splits in (1, 2, 3, 16) if schedule == "split_k" else (1,):
                check(
                    a, b, output((1, m, n), torch.float32), schedule=schedule, workers=workers, splits=splits
                )


@pytest.mark.parametrize("tile", TILES)
def test_tiles_by_name(tile: str, generator: torch.Generator) -> None:
    a = embed(randn(1, 700, 2100, dtype=torch.bfloat16, generator=generator), "rows")
    odd = embed(a, "rows_odd")
    b = embed(randn(1, 2100, 400, dtype=torch.bfloat16, generator=generator), "cols")
    for schedule in SCHEDULES:
        for operand in (a, odd):
            check(operand, b, output((1, 700, 400), torch.bfloat16), schedule=schedule, splits=3, tile=tile)


def test_a_tile_that_is_named_is_taken(generator: torch.Generator) -> None:
    """The bits of a streamed product tell its tile: another size cuts K in other places."""
    a = randn(1, 1408, 4096, dtype=torch.bfloat16, generator=generator)
    b = randn(1, 4096, 3840, dtype=torch.bfloat16, generator=generator)
    outs = {}

    def run(tile: str) -> torch.Tensor:
        if tile not in outs:
            outs[tile] = torch.full((1, 1408, 3840), math.nan, device="cuda")
            gemm(a, b, outs[tile], schedule="stream_k", tile=tile)
        return outs[tile]

    properties = torch.cuda.get_device_properties(0)
    hopper = (properties.major, properties.minor) == (9, 0) and _extensions.is_loaded("_C_sm90a")
    device = "sm90" if hopper else "sm80" if properties.major == 8 else "sm90-portable"
    count = properties.multi_processor_count
    plan = torch.ops.tpkernels.streamk_plan(1, 1408, 3840, 4096, device, "stream_k", 0, 1, count)
    bm, bn, bk, *_, cluster_m, cluster_n, _, whole = plan[1]
    assert not whole
    cluster = f"/{cluster_m}x{cluster_n}" if hopper else ""
    assert torch.equal(run(""), run(f"{bm}x{bn}x{bk}{cluster}"))
    if hopper:
        assert not torch.equal(run("128x256x64/2x1"), run("128x128x64/2x1"))
    run(TILES[0]), run(TILES[1])
    assert not torch.equal(outs[TILES[0]], outs[TILES[1]])


def test_partials_are_fp32(generator: torch.Generator) -> None:
    """Halves of K that cancel: partials of 16 bits would leave errors of a thousandth of them."""
    m, n, k = 128, 128, 4096
    half = randn(1, m, k // 2, dtype=torch.bfloat16, generator=generator).abs()
    a = torch.cat([half, -half], 2)
    b = randn(1, k // 2, n, dtype=torch.bfloat16, generator=generator).abs().repeat(1, 2, 1)
    out = output((1, m, n), torch.float32)
    gemm(a, b, out.tensor, schedule="split_k", splits=2)
    scale = float((half.double() @ b[:, : k // 2].double()).abs().max())
    assert float(out.tensor.abs().max()) < 2e-5 * scale


@pytest.mark.parametrize("layout", ["rows", "rows_odd"])
def test_batch_with_broadcast_and_permuted_strides(layout: str, generator: torch.Generator) -> None:
    m, n, k, batch = 70, 90, 130, 6
    one_a = embed(randn(1, m, k, dtype=torch.bfloat16, generator=generator), layout)
    one_b = embed(randn(1, k, n, dtype=torch.bfloat16, generator=generator), layout)
    a = embed(randn(batch, m, k, dtype=torch.bfloat16, generator=generator), layout)
    b = embed(randn(batch, k, n, dtype=torch.bfloat16, generator=generator), layout)
    check(one_a.expand(batch, m, k), b, output((batch, m, n), torch.bfloat16))
    check(a, one_b.expand(batch, k, n), output((batch, m, n), torch.bfloat16))
    interleaved = randn(m, batch, 136, dtype=torch.bfloat16, generator=generator)[..., :k].transpose(0, 1)
    check(interleaved, b, output((batch, m, n), torch.bfloat16), schedule="stream_k")
    out = canary_view((batch, m, n), torch.bfloat16, "cuda", order=[1, 0, 2], pad=4, offset=8)
    check(a, b, out, schedule="stream_k")
    # Broadcast rows and columns: strides of 0 within a matrix.
    check(a[:, :1].expand(batch, m, k), b[:, :, :1].expand(batch, k, n), output((batch, m, n), torch.float32))
    # More batches than a grid's z dimension would take.
    many = randn(70_000, 1, 8, dtype=torch.bfloat16, generator=generator)
    other = randn(70_000, 8, 2, dtype=torch.bfloat16, generator=generator)
    check(many, other, output((70_000, 1, 2), torch.float32))


@pytest.mark.parametrize("schedule", ["auto", "stream_k", "split_k"])
def test_empty_extents(schedule: str, generator: torch.Generator) -> None:
    for batch, m, n, k in itertools.product((0, 2), (0, 3), (0, 5), (0, 4)):
        a = randn(batch, m, k, dtype=torch.bfloat16, generator=generator)
        b = randn(batch, k, n, dtype=torch.bfloat16, generator=generator)
        bias = randn(n, dtype=torch.float32, generator=generator)
        for accumulate in (False, True):
            out = output((batch, m, n), torch.float32)
            if accumulate:
                out.tensor.fill_(3.0)
            options = {"bias": bias, "activation": "silu", "accumulate": accumulate, "schedule": schedule}
            if out.tensor.numel():
                check(a, b, out, **options)
            else:
                gemm(a, b, out.tensor, **options)
                out.check("out")
