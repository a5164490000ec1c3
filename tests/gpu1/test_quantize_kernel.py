"""The kernels that quantise: the bits of PyTorch's formula, on any shape, stride and value."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tpkernels as tpk
from tpkernels import _extensions
from tpkernels.fp8 import _formula, _kernels
from tpkernels.fp8._formula import DTYPES, SCALINGS

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not _extensions.is_loaded("_C_sm80"), reason="_C_sm80 was not built or not loaded"),
]
OPS: Any = torch.ops.tpkernels
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SOURCES = (BF16, F16, F32)
# Whole tiles, parts of tiles, one row, one column, less than a block, rows of 16 bytes of every source, none of them.
SHAPES = [(256, 384), (130, 200), (1, 129), (257, 1), (5, 16), (300, 264), (128, 131), (3, 1000), (1000, 20)]
LAYOUTS = ("contiguous", "padded", "odd", "offset", "columns", "strided")
GUARD = 64


def uneven(m: int, k: int, generator: torch.Generator) -> Tensor:
    """Rows and columns of very different size, zeros of both signs, a block of zeros: float32."""
    x = torch.randn(m, k, device="cuda", generator=generator)
    x *= 10 ** torch.empty(m, 1, device="cuda").uniform_(-4, 4, generator=generator)
    x *= 10 ** torch.empty(1, k, device="cuda").uniform_(-2, 2, generator=generator)
    x = x.clamp(-6e4, 6e4)
    x[0] *= (torch.rand(k, device="cuda", generator=generator) > 0.5).float()
    if m > 128:
        x[:128, :128] = -0.0
    return x


def laid(x: Tensor, layout: str) -> Tensor:
    """The same values; NaN where the view has gaps."""
    m, k = x.shape
    pad = {"padded": 16, "odd": 3}.get(layout, 0)
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "strided":
        wide = torch.full((m, k, 2), math.nan, dtype=x.dtype, device="cuda")
        wide[..., 0] = x
        return wide[..., 0]
    flat = torch.full((m * (k + pad) + 1,), math.nan, dtype=x.dtype, device="cuda")
    start = int(layout == "offset")
    view = flat[start : start + m * (k + pad)].view(m, k + pad)[:, :k]
    view.copy_(x)
    return view


def bits(t: Tensor) -> Tensor:
    """Bytes of FP8, NaN of either sign made one; of scales too."""
    if t.dtype == F32:
        return torch.where(t.isnan(), math.nan, t).view(torch.int32).cpu()
    return torch.where(t.float().isnan(), 0x7F, t.view(torch.uint8)).cpu()


def check(made: list[Tensor], wanted: list[Tensor], *where: object) -> None:
    assert len(made) == len(wanted)
    for i, (mine, expected) in enumerate(zip(made, wanted, strict=True)):
        assert mine.shape == expected.shape and mine.dtype == expected.dtype and mine.is_contiguous()
        same = bits(mine) == bits(expected)
        wrong = (~same).nonzero()[:4].tolist()
        assert same.all(), (where, "output", i, "wrong at", wrong, int((~same).sum()), "of", same.numel())


def run(x: Tensor, scaling: str, dtype: torch.dtype, power: bool, plain: bool, turned: bool) -> list[Tensor]:
    assert _kernels.run(x)
    return OPS.quantize(x, scaling, dtype, power, plain, turned, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_bits_are_those_of_the_formula(scaling: str, source, dtype, generator) -> None:
    """On the GPU, and on the CPU, which has those of the reference (tests/cpu/test_fp8_quantize.py)."""
    for shape, power in itertools.product(SHAPES, (False, True)):
        x = uneven(*shape, generator).to(source)
        for plain, turned in ((True, False), (False, True), (True, True)):
            wanted = _formula.make(x.cpu(), scaling, dtype, power, None, plain, turned)
            check(_formula.make(x, scaling, dtype, power, None, plain, turned), wanted, "formula", shape)
            for layout in LAYOUTS:
                made = run(laid(x, layout), scaling, dtype, power, plain, turned)
                check(made, wanted, shape, power, plain, turned, layout)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_long_rows_and_columns(source: torch.dtype, generator: torch.Generator) -> None:
    """Each kernel of rows, and what no thread's registers hold; strips of one group, and of several."""
    vector = 16 // source.itemsize
    for k in (256 * vector + 1, 1024 * vector, 4096 * vector, 4096 * vector + 24, 5000 * vector + 3):
        x = uneven(3, k, generator).to(source)
        check(
            run(x, "rowwise", E4M3, False, True, False),
            _formula.make(x, "rowwise", E4M3, False, None, True, False),
            k,
        )
        x = uneven(k, 5, generator).to(source)
        check(
            run(x, "rowwise", E4M3, False, False, True),
            _formula.make(x, "rowwise", E4M3, False, None, False, True),
            k,
        )
    for m, k in ((8192, 2000), (2048, 4096), (20000, 777)):
        x = uneven(m, k, generator).to(source)
        wanted = _formula.make(x, "rowwise", E4M3, True, None, True, True)
        for _ in range(5):  # the order in which CTAs run is another each time
            check(run(x, "rowwise", E4M3, True, True, True), wanted, m, k)


def test_every_value(generator: torch.Generator) -> None:
    """All of bfloat16 and float16, subnormal and not finite too, and float32 around every tie, by any amax."""
    every = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16)
    for dtype in DTYPES:
        codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype).float()
        finite = codes[codes.isfinite()].sort().values
        ties = (finite[1:] + finite[:-1]) / 2
        near = torch.cat([ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20), torch.zeros(3, device="cuda")])
        for x in (every.view(BF16).view(256, 256), every.view(F16).view(256, 256), near[None]):
            for amax in (None, 0.0, -0.0, 1.0, 448.0, 57344.0, 1e-45, 1e-38, 3e38, math.inf, math.nan):
                given = None if amax is None else torch.tensor([amax], device="cuda")
                made = OPS.quantize(x, "tensorwise", dtype, False, True, True, given)
                check(
                    made,
                    _formula.make(
                        x.cpu(),
                        "tensorwise",
                        dtype,
                        False,
                        None if given is None else given.cpu(),
                        True,
                        True,
                    ),
                    amax,
                )
            for scaling in SCALINGS[1:]:
                check(
                    run(x, scaling, dtype, False, True, True),
                    _formula.make(x.cpu(), scaling, dtype, False, None, True, True),
                    scaling,
                )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_not_finite(bad: float, generator: torch.Generator) -> None:
    """It makes its own scale NaN, in both directions, and no other."""
    for source, scaling in itertools.product(SOURCES, SCALINGS):
        x = uneven(260, 392, generator).to(source)
        x[200, 300] = bad
        made = run(x, scaling, E4M3, True, True, True)
        check(made, _formula.make(x.cpu(), scaling, E4M3, True, None, True, True), source, scaling)
        assert int(made[1].isnan().sum()) == 1 and int(made[3].isnan().sum()) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_transposed_copies_of_fp8(scaling: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    for shape, power in itertools.product([*SHAPES, (2048, 1100)], (False, True)):
        x = uneven(*shape, generator)
        if shape == (300, 264):
            x[7, 9] = math.nan
        data, scale = run(x, scaling, dtype, power, True, False)
        m, k = shape
        wide = torch.full((m, k + 3), 0x7F, dtype=torch.uint8, device="cuda")
        wide[:, :k] = data.view(torch.uint8)
        for given in (data, wide.view(dtype)[:, :k]):
            made = OPS.requantize_transposed(given, scale, scaling, power)
            check(made, _formula.turn(data.cpu(), scale.cpu(), scaling, power), shape, power)
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype).view(16, 16)
    (turned,) = OPS.requantize_transposed(codes, torch.ones(1, device="cuda"), "tensorwise", False)
    assert torch.equal(turned.view(torch.uint8), codes.view(torch.uint8).t())  # NaNs as they are


def test_largest(generator: torch.Generator) -> None:
    for source, shape, layout in itertools.product(SOURCES, SHAPES, LAYOUTS):
        x = uneven(*shape, generator).to(source)
        y = x.clone()
        y[-1, -1] = random.choice([math.inf, -math.inf, math.nan])
        found = OPS.largest([laid(x, layout), laid(y, layout), torch.empty(0, 3, device="cuda"), -x])
        assert found.tolist() == [float(x.abs().max()), math.inf, 0.0, float(x.abs().max())], (shape, layout)
    x = torch.randn(40, 70, 90, device="cuda", generator=generator)
    assert tpk.fp8._quantize.largest_of([x]).item() == float(x.abs().max())
    x = torch.zeros(3000, 4000, device="cuda", dtype=BF16)
    for _ in range(10):
        i, j = random.randrange(3000), random.randrange(4000)
        x[i, j] = -3.0
        assert OPS.largest([x]).item() == 3.0, (i, j)
        x[i, j] = 0.0


def test_writes_nothing_else(generator: torch.Generator) -> None:
    """Outputs amid guards, at every alignment, NaN before."""
    for shape, offset, scaling in itertools.product(SHAPES, (0, 1, 4), SCALINGS):
        x = uneven(*shape, generator).to(BF16)
        wanted = _formula.make(x, scaling, E4M3, False, None, True, True)
        buffers, outs = [], []
        for t in wanted:
            start = GUARD + (offset if t.dtype == E4M3 else 4 * offset)
            size = t.numel() * t.element_size()
            buffer = torch.full((size + 2 * GUARD + 16,), 0xFF, dtype=torch.uint8, device="cuda")
            outs.append(buffer[start : start + size].view(t.dtype).view(t.shape))
            buffers.append((buffer, start, size))
        amax = OPS.largest([x]) if scaling == "tensorwise" else None
        OPS.quantize_fp8(x, None, amax, *outs, scaling, False)
        check([o.clone() for o in outs], wanted, shape, offset, scaling)
        for buffer, start, size in buffers:
            assert (buffer[:start] == 0xFF).all() and (buffer[start + size :] == 0xFF).all()


def test_public_functions(generator: torch.Generator) -> None:
    """Leading dimensions, float64, and no elements; without synchronising."""
    x = uneven(48, 260, generator).to(BF16)
    given = x.abs().max()[None].float() / 16
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = {s: tpk.fp8.quantize_both(x, s) for s in SCALINGS}
        cubes = {s: tpk.fp8.quantize_both(x.view(4, 12, 260), s) for s in SCALINGS[:3]}
        clamped = tpk.quantize(x, amax=given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for scaling, (of_x, of_x_t) in made.items():
        wanted = _formula.make(x.cpu(), scaling, E4M3, False, None, True, True)
        check([*of_x[:2], *of_x_t[:2]], wanted, scaling)
        again = tpk.quantize(x.double(), scaling, transpose=True)
        check([*again[:2]], wanted[2:], scaling)
        if scaling in cubes:
            cube, turned = cubes[scaling]
            assert cube.data.shape == (4, 12, 260) and cube.scale.dim() == (
                1 if scaling == "tensorwise" else 3
            )
            check([cube.data.view(48, 260), cube.scale.reshape(wanted[1].shape), *turned[:2]], wanted, "cube")
    wanted = _formula.make(x.cpu(), "tensorwise", E4M3, False, given.cpu(), True, False)
    check([*clamped[:2]], wanted)
    assert clamped.data.float().abs().max() == 448
    for shape, scaling in itertools.product([(0, 5), (5, 0), (0, 0)], SCALINGS):
        for mine, cpu in zip(
            tpk.fp8.quantize_both(torch.empty(shape, device="cuda"), scaling),
            tpk.fp8.quantize_both(torch.empty(shape), scaling),
            strict=True,
        ):
            check([*mine[:2]], [*cpu[:2]], shape, scaling)


def test_captured_and_replayed(generator: torch.Generator) -> None:
    """In a graph, for other values; strips count from zero again each time."""
    x = uneven(1030, 2056, generator).to(BF16)

    def call() -> list[Tensor]:
        made = [t for s in SCALINGS for q in tpk.fp8.quantize_both(x, s) for t in (q.data, q.scale)]
        q = tpk.quantize(x, "rowwise").transposed()
        return [*made, q.data, q.scale]

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        x.copy_(uneven(1030, 2056, generator).to(BF16))
        for t in out:
            t.view(torch.uint8).fill_(0xFF)
        graph.replay()
        check(out, call())


def test_compiled(generator: torch.Generator) -> None:
    """As operations, so that reciprocals are exact: the same bits without powers of two too."""
    x = uneven(300, 520, generator).to(BF16)

    def call(x: Tensor) -> list[Tensor]:
        made = [t for s in SCALINGS for q in tpk.fp8.quantize_both(x, s) for t in (q.data, q.scale)]
        q = tpk.quantize(x, "blockwise_1x128").transposed()
        return [*made, q.data, q.scale]

    for dynamic in (False, True):
        torch._dynamo.reset()
        check(list(torch.compile(call, fullgraph=True, dynamic=dynamic)(x)), call(x))
    tests = ("test_faketensor",)
    torch.library.opcheck(OPS.quantize, (x, "rowwise", E4M3, True, True, True, None), test_utils=tests)
    data, scale = run(x, "rowwise", E4M3, True, True, False)
    torch.library.opcheck(OPS.requantize_transposed, (data, scale, "rowwise", True), test_utils=tests)
    torch.library.opcheck(OPS.largest, ([x, x],), test_utils=tests)


def test_gradients_have_the_formulas_bits(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's three products, with and without the kernels."""
    x, w = (uneven(*shape, generator).to(BF16) for shape in ((256, 512), (384, 512)))
    dy = torch.randn(256, 384, device="cuda", generator=generator).to(BF16)
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        results = []
        for kernels in (True, False):
            with monkeypatch.context() as patch:
                if not kernels:
                    patch.setattr(_kernels, "_BUILT", False)
                xi, wi = (t.clone().requires_grad_() for t in (x, w))
                y = tpk.fp8.matmul(xi, wi.t(), recipe=recipe)
                y.backward(dy)
                results.append((y.detach(), xi.grad, wi.grad))
        for mine, wanted in zip(*results, strict=True):
            assert torch.equal(mine, wanted), recipe


def test_refusals() -> None:
    x = torch.zeros(8, 256, device="cuda")
    data, scale = torch.empty(8, 256, dtype=E4M3, device="cuda"), torch.empty(8, 2, device="cuda")
    good: dict[str, Any] = {
        "x": x, "x_scale": None, "amax": None, "plain": data, "plain_scale": scale, "turned": None,
        "turned_scale": None, "scaling": "blockwise_1x128", "power_of_2": False,
    }  # fmt: skip
    OPS.quantize_fp8(**good)
    for sentence, change in {
        "x must have contiguous columns": {"x": torch.zeros(256, 8, device="cuda").t()},
        "x must be a CUDA tensor": {"x": x[0]},
        "x must be bfloat16, float16, float32, float8": {"x": x.double()},
        "scaling must be tensorwise, rowwise": {"scaling": "row"},
        "plain or turned must be given": {"plain": None},
        "plain must be None: x is in FP8": {"x": data.clone()},
        "plain_scale must be given": {"plain_scale": None},
        "plain_scale must have shape": {"plain_scale": scale[:, :1].contiguous()},
        "plain must have shape": {"plain": data[:4]},
        "plain must be float8_e4m3fn or float8_e5m2": {"plain": x.clone()},
        "plain must be contiguous": {"plain": torch.empty(256, 8, dtype=E4M3, device="cuda").t()},
        "plain must be on the device": {"plain": data.cpu()},
        "x must not share memory with plain": {"plain": x.view(-1)[:512].view(E4M3).view(8, 256)},
        "amax must be given": {"scaling": "tensorwise"},
        "x_scale must be None: x is not in FP8": {"x_scale": scale},
    }.items():
        with pytest.raises(RuntimeError, match=rf"quantize_fp8: .*{sentence}"):
            OPS.quantize_fp8(**(good | change))
    with pytest.raises(RuntimeError, match=r"find_largest: .*amax must have shape"):
        OPS.find_largest(x, torch.empty(2, device="cuda"))
    with pytest.raises(RuntimeError, match=r"find_largest: .*x must be bfloat16, float16 or float32"):
        OPS.find_largest(data, torch.empty(1, device="cuda"))
