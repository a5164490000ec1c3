"""Quantisation to FP8: bit for bit what the NumPy reference makes, which itself equals torch's casts on all values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tpkernels as tpk
from tpkernels.errors import ArgumentError, DTypeError, ShapeError
from tpkernels.fp8._quantize import DTYPES, SCALINGS
from tpkernels.reference import fp8 as ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2"}
# Whole blocks, parts of blocks, one row, one column, less than a block.
SHAPES = [(256, 384), (130, 200), (1, 129), (257, 1), (5, 16)]


def same(actual: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal values, signs of zeros and NaNs included."""
    a = actual.to(torch.float64).numpy()
    return bool(
        a.shape == expected.shape
        and np.array_equal(a, expected, equal_nan=True)
        and np.array_equal(np.signbit(a) & ~np.isnan(a), np.signbit(expected) & ~np.isnan(expected))
    )


def quantities(x: torch.Tensor, scaling: str, dtype: torch.dtype, power: bool, transpose: bool):
    mine = tpk.quantize(x, scaling, dtype, transpose=transpose, round_scales_to_power_of_2=power)
    source = x.to(torch.float32)
    source = source.flatten(0, -2).t() if transpose else source
    return mine, ref.quantize(source.numpy(), scaling, NAMES[dtype], power_of_two=power)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_rounds_as_torch_does(dtype: torch.dtype) -> None:
    """Every bfloat16 and float16 value within range, every value of the format, and every tie between two."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64)
    finite = codes[torch.isfinite(codes)].sort().values
    assert same(finite.to(torch.float32).to(dtype), ref.round_to_fp8(finite.numpy(), NAMES[dtype]))
    ties = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20)]).to(torch.float32)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    wide = [every.view(kind).to(torch.float32) for kind in (torch.bfloat16, torch.float16)]
    for values in (near, *wide):
        values = values[values.isnan() | (values.abs() <= DTYPES[dtype])]
        assert same(values.to(dtype), ref.round_to_fp8(values.numpy(), NAMES[dtype]))
    beyond = np.array([449.0, 1e9, np.inf, -np.inf]) * (1 if dtype == E4M3 else 128)
    assert np.array_equal(np.abs(ref.round_to_fp8(beyond, NAMES[dtype])), np.full(4, DTYPES[dtype]))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equals_the_reference(scaling, dtype, power, transpose, source, generator_of_rows) -> None:
    for shape in SHAPES:
        x = generator_of_rows(shape).to(source)
        mine, wanted = quantities(x, scaling, dtype, power, transpose)
        assert mine.data.dtype == dtype and mine.data.is_contiguous()
        assert np.array_equal(mine.scale.numpy(), wanted.scale), shape
        assert same(mine.data, wanted.data), shape
        if power:
            assert np.array_equal(np.log2(wanted.scale) % 1, np.zeros(wanted.scale.shape))


@pytest.fixture
def generator_of_rows(seed):
    """Rows and columns of very different size, some zero: scales matter."""
    generator = torch.Generator().manual_seed(seed)

    def make(shape):
        x = torch.randn(shape, generator=generator)
        x *= 10 ** torch.empty(shape[0], 1).uniform_(-4, 4, generator=generator)
        x *= 10 ** torch.empty(1, shape[1]).uniform_(-2, 2, generator=generator)
        x = x.clamp(-6e4, 6e4)
        x[0] *= torch.rand(shape[1], generator=generator) > 0.5
        if shape[0] > 128:
            x[:128] = 0  # whole blocks of zeros
        return x

    return make


def test_strides_leading_dimensions_and_float64(generator_of_rows) -> None:
    x = generator_of_rows((48, 260)).to(torch.bfloat16)
    for scaling in SCALINGS:
        plain = tpk.quantize(x, scaling)
        for view in (x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0], x.double()):
            again = tpk.quantize(view, scaling)
            assert torch.equal(again.data.view(torch.uint8), plain.data.view(torch.uint8))
            assert torch.equal(again.scale, plain.scale)
        if scaling != "blockwise_128x128":
            cube = tpk.quantize(x.view(4, 12, 260), scaling)
            assert torch.equal(cube.data.view(torch.uint8).view(48, 260), plain.data.view(torch.uint8))
            assert cube.scale.shape == ((1,) if scaling == "tensorwise" else (4, 12, plain.scale.shape[1]))
            turned = tpk.quantize(x.view(4, 12, 260), scaling, transpose=True)
            assert turned.data.shape == (260, 48)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_elements(scaling: str, shape: tuple[int, int]) -> None:
    for transpose in (False, True):
        q = tpk.quantize(torch.empty(shape), scaling, transpose=transpose)
        m, k = shape[::-1] if transpose else shape
        sizes = {
            "tensorwise": [1],
            "rowwise": [m, 1],
            "blockwise_1x128": [m, -(-k // 128)],
            "blockwise_128x128": [-(-m // 128), -(-k // 128)],
        }
        assert list(q.data.shape) == [m, k] and list(q.scale.shape) == sizes[scaling]
        assert torch.equal(q.scale, torch.ones_like(q.scale))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zero_tiny_and_not_finite(scaling: str) -> None:
    x = torch.zeros(130, 260)
    q = tpk.quantize(x, scaling)
    assert torch.equal(q.scale, torch.ones_like(q.scale)) and not q.data.view(torch.uint8).any()
    for tiny in (1e-45, 1e-38):
        x[1, 2] = tiny
        mine, wanted = quantities(x, scaling, E4M3, False, False)
        assert np.array_equal(mine.scale.numpy(), wanted.scale) and same(mine.data, wanted.data)
        assert mine.scale[(0,) * mine.scale.dim()] >= 2.0**-126
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(130, 260)
        x[129, 259] = bad
        mine, wanted = quantities(x, scaling, E4M3, False, False)
        assert np.array_equal(mine.scale.numpy(), wanted.scale, equal_nan=True) and same(
            mine.data, wanted.data
        )
        assert mine.dequantize()[129, 259].isnan()  # shown, not clamped
        if scaling != "tensorwise":  # and by nobody else's fault
            assert not mine.dequantize()[0].isnan().any()


def test_amax_of_the_caller(generator_of_rows) -> None:
    x = generator_of_rows((20, 40))
    whole = tpk.quantize(x)
    given = tpk.quantize(x, amax=x.abs().amax())
    assert torch.equal(given.data.view(torch.uint8), whole.data.view(torch.uint8))
    small = tpk.quantize(x, amax=x.abs().amax() / 16)  # of an earlier step: what is larger is clamped
    wanted = ref.quantize(x.numpy(), "tensorwise", amax=np.asarray([x.abs().amax() / 16], np.float32))
    assert same(small.data, wanted.data) and small.data.float().abs().max() == 448


@pytest.mark.parametrize("scaling", SCALINGS)
def test_error_is_within_half_a_step(scaling: str, generator_of_rows) -> None:
    """|x - dequantised| is at most half a unit in the last place, or half of the smallest subnormal times the scale."""
    x = generator_of_rows((256, 384))
    for dtype, bits, smallest in ((E4M3, 4, 2.0**-9), (E5M2, 3, 2.0**-16)):
        q = tpk.quantize(x, scaling, dtype)
        spread = torch.as_tensor(np.array(ref.spread(q.scale.numpy(), tuple(x.shape))))
        error = (q.dequantize(torch.float32).double() - x.double()).abs()
        allowed = torch.maximum(x.abs().double() * 2.0**-bits, spread.double() * smallest / 2) * (1 + 1e-5)
        assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_transposed_copies(scaling: str, dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(140, 200, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    x[1] *= 1000
    q = tpk.quantize(x, scaling, dtype, round_scales_to_power_of_2=True)
    turned = q.transposed(round_scales_to_power_of_2=True)
    assert turned.data.shape == (200, 140) and turned.data.is_contiguous()
    if scaling in ("tensorwise", "blockwise_128x128"):
        assert torch.equal(turned.data.view(torch.uint8), q.data.view(torch.uint8).t())
        again = tpk.quantize(x, scaling, dtype, transpose=True, round_scales_to_power_of_2=True)
        assert torch.equal(turned.data.view(torch.uint8), again.data.view(torch.uint8))
        assert torch.equal(turned.scale, again.scale)
        return
    wanted = ref.quantize(q.dequantize().t().numpy(), scaling, NAMES[dtype], power_of_two=True)
    assert np.array_equal(turned.scale.numpy(), wanted.scale) and same(turned.data, wanted.data)
    # Powers of two: nothing is rounded a second time but what is subnormal beside its new neighbours.
    spread = torch.as_tensor(np.array(ref.spread(turned.scale.numpy(), (200, 140))))
    normal = q.dequantize().t().abs() >= spread * (2.0**-6 if dtype == E4M3 else 2.0**-14)
    assert normal.float().mean() > 0.2
    assert torch.equal(turned.dequantize()[normal], q.dequantize().t()[normal])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_both_at_once(scaling: str, generator_of_rows) -> None:
    x = generator_of_rows((140, 200)).to(torch.bfloat16)
    for dtype, power in ((E4M3, True), (E5M2, False)):
        options = {"round_scales_to_power_of_2": power}
        made = tpk.fp8.quantize_both(x, scaling, dtype, **options)
        for mine, turned in zip(made, (False, True), strict=True):
            wanted = tpk.quantize(x, scaling, dtype, transpose=turned, **options)
            assert torch.equal(mine.data.view(torch.uint8), wanted.data.view(torch.uint8))
            assert (
                mine.data.is_contiguous()
                and torch.equal(mine.scale, wanted.scale)
                and mine.scaling == scaling
            )
    if scaling == "tensorwise":
        given = x.abs().amax().float() / 16
        (_, turned), wanted = (
            tpk.fp8.quantize_both(x, amax=given),
            tpk.quantize(x, amax=given, transpose=True),
        )
        assert torch.equal(turned.data.view(torch.uint8), wanted.data.view(torch.uint8))
    if scaling != "blockwise_128x128":
        cube, turned = tpk.fp8.quantize_both(x.view(7, 20, 200), scaling)
        assert cube.data.shape == (7, 20, 200) and turned.data.shape == (200, 140)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(140, 200), (0, 5)])
def test_operations_of_the_dispatcher(scaling: str, shape: tuple[int, int], seed: int) -> None:
    """Which CUDA runs: schemas, fakes, and on the CPU the formula."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    ops, tests = torch.ops.tpkernels, ("test_faketensor",)
    for plain, turned in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(ops.quantize, (x, scaling, E4M3, True, plain, turned, None), test_utils=tests)
    data, scale, data_t, scale_t = ops.quantize(x, scaling, E4M3, True, True, True, None)
    torch.library.opcheck(ops.requantize_transposed, (data, scale, scaling, True), test_utils=tests)
    assert torch.equal(scale, tpk.quantize(x, scaling, round_scales_to_power_of_2=True).scale)
    again = tpk.quantize(x, scaling, transpose=True, round_scales_to_power_of_2=True)
    assert torch.equal(data_t.view(torch.uint8), again.data.view(torch.uint8)) and torch.equal(
        scale_t, again.scale
    )
    torch.library.opcheck(ops.largest, ([x, 2 * x],), test_utils=tests)
    sizes = [float(t.abs().max()) if t.numel() else 0.0 for t in (x, 2 * x)]
    assert ops.largest([x, 2 * x]).tolist() == sizes


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("shape", [(128, 256), (140, 137)])
def test_compiled_gives_the_same_bits(shape, backend, generator_of_rows) -> None:
    x = generator_of_rows(shape)

    def all_ways(x: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for scaling in SCALINGS:
            for transpose in (False, True):
                q = tpk.quantize(x, scaling, transpose=transpose, round_scales_to_power_of_2=True)
                out += [q.data.view(torch.uint8), q.scale]
        return out

    torch._dynamo.reset()
    for mine, wanted in zip(
        torch.compile(all_ways, fullgraph=True, backend=backend)(x), all_ways(x), strict=True
    ):
        assert torch.equal(mine, wanted)


def test_refusals() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ArgumentError, match=r"scaling: expected one of tensorwise, rowwise, .*, got 'row'"):
        tpk.quantize(x, "row")
    with pytest.raises(DTypeError, match=r"dtype: expected torch.float8_e4m3fn or .*, got torch.int8"):
        tpk.quantize(x, dtype=torch.int8)
    with pytest.raises(DTypeError, match=r"x: expected dtype float64, .*, got int64"):
        tpk.quantize(x.long())
    with pytest.raises(ShapeError, match="x: expected at least 2 dimensions"):
        tpk.quantize(x[0])
    with pytest.raises(ShapeError, match="blockwise_128x128 takes two dimensions"):
        tpk.quantize(x[None], "blockwise_128x128")
    with pytest.raises(ArgumentError, match="amax: expected one element, with scaling='tensorwise'"):
        tpk.quantize(x, "rowwise", amax=torch.ones(1))
    with pytest.raises(DTypeError, match=r"x: expected a torch.Tensor or an array"):
        tpk.quantize("x")
