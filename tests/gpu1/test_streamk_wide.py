"""The portable Stream-K kernel on float64 and float32, with and without TF32: integers, tight bounds, gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from streamk_cases import (
    ACTIVATIONS,
    FAST,
    PLANS,
    SLOW,
    activate,
    bits,
    check,
    embed,
    gemm,
    integers,
    output,
    randn,
)

import tpkernels as tpk
from tpkernels.ops import _plans
from tpkernels.testing import assert_close_tiles

pytestmark = pytest.mark.gpu1
Tensor = torch.Tensor

# Names of torch.ops.tpkernels.streamk_plan, and what the op is told.
KINDS: dict[str, dict[str, Any]] = {"float64": {}, "float32": {}, "tf32": {"allow_tf32": True}}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32}
TILES = [(kind, tile) for kind in KINDS for tile in _plans.WIDE_TILES[kind]]
EVERY_DTYPE = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (5, 7, 3), (64, 64, 32), (129, 257, 100), (300, 200, 520), (200, 72, 1031)]


@pytest.fixture
def precision() -> Iterator[None]:
    """Sets torch's switch for TF32 back."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize(("kind", "tile"), TILES)
@pytest.mark.parametrize("layout_b", FAST + SLOW)
@pytest.mark.parametrize("layout_a", FAST + SLOW)
def test_integers_are_exact(
    kind: str, tile: str, layout_a: str, layout_b: str, generator: torch.Generator
) -> None:
    """Every plan of every tile, from every layout, to the bit; outputs and what lies around operands are NaN."""
    dtype = DTYPES[kind]
    for (m, n, k), plan in zip(SHAPES * 2, itertools.cycle(PLANS), strict=False):
        a = integers(2, m, k, dtype=dtype, generator=generator)
        b = integers(2, k, n, dtype=dtype, generator=generator)
        out = output((2, m, n), dtype)
        gemm(embed(a, layout_a), embed(b, layout_b), out.tensor, tile=tile, **plan, **KINDS[kind])
        want = (a.cpu().double() @ b.cpu().double()).to(dtype)
        assert torch.equal(out.tensor.cpu(), want), f"{m} x {n} x {k}, {plan}"
        out.check("out")


@pytest.mark.parametrize("tile", _plans.WIDE_TILES["float64"])
def test_float64_against_numpy(tile: str, seed: int) -> None:
    """As near to sums in extended precision as any order of float64 sums must be."""
    draw = np.random.default_rng(seed)
    for (m, n, k), plan in zip([(70, 90, 1), (65, 130, 777), (200, 129, 2048)], PLANS[1:], strict=False):
        a, b = draw.standard_normal((m, k)), draw.standard_normal((k, n))
        out = torch.full((1, m, n), math.nan, dtype=torch.float64, device="cuda")
        gemm(torch.from_numpy(a).cuda()[None], torch.from_numpy(b).cuda()[None], out, tile=tile, **plan)
        want = a.astype(np.longdouble) @ b.astype(np.longdouble)
        size = np.abs(a) @ np.abs(b)
        error = np.abs(out[0].cpu().numpy() - want)
        # The worst case is k u |a| |b|; errors of signs at random grow with its root.
        assert float((error / size).max()) < 4 * math.sqrt(k) * 2.0**-53 + 2.0**-53


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize("out_layout", ["rows", "rows_odd", "cols", "strided"])
def test_epilogues(kind: str, out_layout: str, generator: torch.Generator) -> None:
    dtype = DTYPES[kind]
    m, n, k = 150, 203, 96
    for i, (out_dtype, activation, accumulate) in enumerate(
        itertools.product(EVERY_DTYPE, ACTIVATIONS, [False, True])
    ):
        a = randn(2, m, k, dtype=dtype, generator=generator) / 4
        b = randn(2, k, n, dtype=dtype, generator=generator) / 4
        out, preact = output((2, m, n), out_dtype, out_layout), output((2, m, n), out_dtype, out_layout)
        if accumulate:
            out.tensor.copy_(randn(2, m, n, dtype=out_dtype, generator=generator))
        bias = randn(n, dtype=EVERY_DTYPE[i % 4], generator=generator)
        plan = PLANS[i % len(PLANS)]
        check(
            a,
            b,
            out,
            bias=bias,
            preact=preact if i % 3 else None,
            activation=activation,
            accumulate=accumulate,
            **plan,
        )


@pytest.mark.parametrize(("kind", "tile"), TILES)
def test_gate_residual_and_alpha(kind: str, tile: str, generator: torch.Generator) -> None:
    dtype = DTYPES[kind]
    for i, (m, n, k) in enumerate([(200, 264, 520), (129, 131, 96), (64, 40, 1000), (256, 128, 0)]):
        # Eighths of small integers: exact in every type, so that TF32 has the bounds of float32.
        a, b, gate = (
            integers(2, *shape, dtype=dtype, generator=generator) / 8 for shape in ((m, k), (k, n), (k, n))
        )
        residual = randn(2, m, n, dtype=EVERY_DTYPE[i % 4], generator=generator)
        activation = ACTIVATIONS[i % len(ACTIVATIONS)]
        out = output((2, m, n), dtype)
        gemm(
            a,
            b,
            out.tensor,
            gate=gate,
            residual=residual,
            alpha=0.75,
            activation=activation,
            tile=tile,
            **KINDS[kind],
        )
        product, gated = 0.75 * (a.double() @ b.double()), 0.75 * (a.double() @ gate.double())
        want = activate(gated, activation) * product + residual.double()
        size = (product.abs() + 1) * (gated.abs() + 1) + residual.double().abs()
        assert_close_tiles(out.tensor, want, dtype, k=max(1, 2 * k), magnitude=size, name="out")
        out.check("out")


@pytest.mark.parametrize("kind", KINDS)
def test_empty_extents(kind: str, generator: torch.Generator) -> None:
    dtype = DTYPES[kind]
    for m, n, k in itertools.product((0, 3), (0, 5), (0, 4)):
        a, b = (integers(1, *shape, dtype=dtype, generator=generator) for shape in ((m, k), (k, n)))
        out = output((1, m, n), dtype)
        gemm(a, b, out.tensor, **KINDS[kind])
        assert torch.equal(out.tensor, (a.double() @ b.double()).to(dtype))
        out.check("out")


@pytest.mark.parametrize("tile", _plans.WIDE_TILES["tf32"])
def test_error_of_tf32(tile: str, generator: torch.Generator) -> None:
    """Factors rounded to the nearest number of 11 bits, sums in float32; infinities and NaN stay what they are."""
    m, n, k = 300, 200, 1031
    for layout in FAST + ["strided"]:
        a = embed(randn(1, m, k, dtype=torch.float32, generator=generator), layout)
        b = embed(randn(1, k, n, dtype=torch.float32, generator=generator), layout)
        out = output((1, m, n), torch.float32)
        gemm(a, b, out.tensor, tile=tile, schedule="stream_k", allow_tf32=True)
        size = a.double().abs() @ b.double().abs()
        error = (out.tensor.double() - a.double() @ b.double()).abs() / size
        assert float(error.max()) < 2.0**-10  # two factors, each off by 2^-11 at most
        # Rounded, not cut off: then errors would be one-sided, and twice as large.
        assert float(error.mean()) < 2.0**-15
        cut = lambda x: (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).double()  # noqa: E731
        of_cut = (cut(a) @ cut(b) - a.double() @ b.double()).abs() / size
        assert float(error.mean()) < 0.75 * float(of_cut.mean())
    a, b = torch.ones(1, 64, 64, device="cuda"), torch.ones(1, 64, 64, device="cuda")
    a[0, 3, 5], a[0, 7, 9] = math.inf, -math.inf
    a[0, 11, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    a[0, 12, 1] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    got = torch.empty(1, 64, 64, device="cuda")
    gemm(a, b, got, tile=tile, allow_tf32=True)
    assert bool((got[0, 3] == math.inf).all()) and bool((got[0, 7] == -math.inf).all())
    assert bool(got[0, 11:13].isnan().all()) and bool((got[0, 0] == 64).all())


def test_tf32_is_torchs_decision(precision: None) -> None:
    """By each of its switches: 1 + 2^-12 is 1 in TF32, and itself in float32."""
    a = torch.full((96, 256), 1 + 2.0**-12, device="cuda")
    b = torch.ones(256, 64, device="cuda")
    exact, rounded = 256 * (1 + 2.0**-12), 256.0
    acc = torch.zeros(96, 64, device="cuda")

    def results() -> set[float]:
        acc.zero_()
        tpk.matmul(a, b, accumulate_into=acc, path="streamk")
        return {float(x) for out in (tpk.matmul(a, b, path="streamk"), acc) for x in out.unique()}

    for name, off, on in (("fp32_precision", "ieee", "tf32"), ("allow_tf32", False, True)):
        for value, want in ((off, exact), (on, rounded), (off, exact)):
            setattr(torch.backends.cuda.matmul, name, value)
            assert results() == {want}, (name, value)
            assert tpk.explain("matmul", a, b).plan["tile"][2] == 16
    assert float(tpk.matmul(a.double(), b.double(), path="streamk")[0, 0]) == exact
    out = torch.empty(1, 96, 64, device="cuda")
    gemm(a[None], b[None], out)  # the op itself never asks torch
    assert float(out[0, 0, 0]) == exact


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_in_float64(activation: str | None, generator: torch.Generator) -> None:
    a = randn(3, 70, 40, dtype=torch.float64, generator=generator).requires_grad_()
    b = randn(40, 33, dtype=torch.float64, generator=generator).requires_grad_()
    bias = randn(33, dtype=torch.float64, generator=generator).requires_grad_()
    with tpk.record_paths() as log:
        assert torch.autograd.gradcheck(
            lambda *x: tpk.matmul(x[0], x[1], bias=x[2], activation=activation, path="streamk"),
            (a, b, bias),
            fast_mode=True,
        )
    assert {path for _, path in log.counts} == {"streamk"}


def test_float32_as_in_torch(generator: torch.Generator) -> None:
    a = randn(256, 300, dtype=torch.float32, generator=generator).requires_grad_()
    b = randn(300, 520, dtype=torch.float32, generator=generator).requires_grad_()
    dy = randn(256, 520, dtype=torch.float32, generator=generator)
    tpk.matmul(a, b, path="streamk").backward(dy)
    assert_close_tiles(a.grad, dy.double() @ b.detach().double().t(), torch.float32, k=520)
    assert_close_tiles(b.grad, a.detach().double().t() @ dy.double(), torch.float32, k=256)


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_every_time(kind: str, generator: torch.Generator) -> None:
    a = randn(1, 500, 3000, dtype=DTYPES[kind], generator=generator)
    b = randn(1, 3000, 700, dtype=DTYPES[kind], generator=generator)
    outs = [torch.full((1, 500, 700), math.nan, dtype=DTYPES[kind], device="cuda") for _ in range(20)]
    for out in outs:
        gemm(a, b, out, schedule="stream_k", **KINDS[kind])
    assert all(torch.equal(bits(out), bits(outs[0])) for out in outs)


@pytest.mark.parametrize("kind", KINDS)
def test_replays_find_no_flag_of_the_replay_before(kind: str, generator: torch.Generator) -> None:
    """Nothing clears flags in front of a launch: one that was left raised would let old partials through."""
    dtype = DTYPES[kind]
    a, b = (torch.zeros(1, *shape, dtype=dtype, device="cuda") for shape in ((200, 1500), (1500, 136)))
    plans = [plan for plan in PLANS if plan["schedule"] in ("stream_k", "split_k", "hybrid_aligned")]
    outs = [torch.full((1, 200, 136), math.nan, dtype=dtype, device="cuda") for _ in plans]

    def run() -> None:
        for out, plan in zip(outs, plans, strict=True):
            gemm(a, b, out, **plan, **KINDS[kind])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(30):
        a.copy_(integers(1, 200, 1500, dtype=dtype, generator=generator))
        b.copy_(integers(1, 1500, 136, dtype=dtype, generator=generator))
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        want = (a.cpu().double() @ b.cpu().double()).to(dtype)
        for out, plan in zip(outs, plans, strict=True):
            assert torch.equal(out.cpu(), want), plan


def test_tiles_of_other_types() -> None:
    a, out = torch.zeros(1, 64, 64, dtype=torch.float64, device="cuda"), torch.zeros(1, 64, 64, device="cuda")
    for tile in ("128x128x32", "64x64x8"):
        with pytest.raises(
            RuntimeError, match=r"tile must be 128x128x16, .* or 32x32x16, or empty for the cheapest"
        ):
            gemm(a, a.clone(), out, tile=tile)
    with pytest.raises(RuntimeError, match="tile '128x256x64/2x1' is one of the Hopper kernel"):
        gemm(a, a.clone(), out, tile="128x256x64/2x1")
