"""FP8 on a GPU: quantisation has the CPU's bits, products are those of the operands on every path, layers train."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import tpkernels as tpk
from tpkernels.errors import BackendError
from tpkernels.fp8 import _product
from tpkernels.fp8._quantize import DTYPES, SCALINGS, Quantized

pytestmark = pytest.mark.gpu1
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PATHS = ("auto", "cublas", "streamk")
# (M, N, K): whole tiles, K of 16-byte rows of scales (512 at a time), odd everywhere, one row, small.
SHAPES = [(256, 384, 1024), (129, 208, 640), (77, 53, 301), (1, 512, 512), (16, 16, 16)]
SCALED = [
    ("tensorwise", "tensorwise"),
    ("rowwise", "rowwise"),
    ("tensorwise", "rowwise"),
    ("blockwise_1x128", "blockwise_128x128"),
    ("blockwise_1x128", "blockwise_1x128"),
    ("rowwise", "blockwise_128x128"),
]


def uneven(m: int, n: int) -> Tensor:
    x = torch.randn(m, n, device="cuda") * 2.0 ** torch.randint(-3, 3, (m, 1), device="cuda")
    return x * 2.0 ** torch.randint(-2, 2, (n,), device="cuda")


def needs(path: str) -> None:
    missing = _product.streamk_missing(torch.device("cuda")) if path == "streamk" else None
    if missing is not None:
        pytest.skip(missing)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_quantised_bits_are_those_of_the_cpu(scaling: str) -> None:
    """Which the reference of tests/cpu/test_fp8_quantize.py has."""
    sources, formats = (torch.bfloat16, torch.float16, torch.float32), DTYPES
    for source, dtype, shape in itertools.product(sources, formats, [(256, 384), (130, 200), (1, 129)]):
        x = uneven(*shape).to(source)
        x[0, :7] = 0
        for power, transpose in itertools.product((False, True), repeat=2):
            options = {"transpose": transpose, "round_scales_to_power_of_2": power}
            mine, wanted = (tpk.quantize(t, scaling, dtype, **options) for t in (x, x.cpu()))
            assert torch.equal(mine.scale.cpu(), wanted.scale)
            assert torch.equal(mine.data.view(torch.uint8).cpu(), wanted.data.view(torch.uint8))
        turned = tpk.quantize(x, scaling, dtype, round_scales_to_power_of_2=True).transposed(
            round_scales_to_power_of_2=True
        )
        wanted = tpk.quantize(x.cpu(), scaling, dtype, round_scales_to_power_of_2=True).transposed(
            round_scales_to_power_of_2=True
        )
        assert torch.equal(turned.data.view(torch.uint8).cpu(), wanted.data.view(torch.uint8))
    x[0, 0] = torch.inf
    assert tpk.quantize(x, scaling).dequantize()[0, 0].isnan()


def product(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """In float64 on the GPU, and of absolute values."""
    left, right = (q.dequantize().double() for q in (a, b))
    return left @ right, left.abs() @ right.abs()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scalings", SCALED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, scalings, path) -> None:
    needs(path)
    m, n, k = shape
    for (of_a, of_b), out_dtype in itertools.product(
        [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)],
        [torch.bfloat16, torch.float16, torch.float32],
    ):
        aq, bq = (
            tpk.quantize(uneven(m, k), scalings[0], of_a),
            tpk.quantize(uneven(n, k), scalings[1], of_b).t(),
        )
        bias = torch.randn(n, device="cuda").to(torch.bfloat16)
        wanted, size = product(aq, bq)
        for given, addend in ((None, 0.0), (bias, bias.double())):
            y = tpk.scaled_matmul(aq, bq, bias=given, out_dtype=out_dtype, path=path)
            assert y.shape == (m, n) and y.dtype == out_dtype
            # Hopper's FP8 sums have some 14 bits, and each of the four steps between two promotions may lose 2^-13.
            allowed = 2.0**-11 * size
            error = (y.double() - wanted - addend).abs()
            ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}[out_dtype]
            assert (error <= allowed + 1.01 * ulp * (wanted + addend).abs() + 1e-6).all(), (
                tpk.last_path(),
                float((error / size.clamp_min(1e-30)).max()),
            )
    if path != "auto":
        assert tpk.last_path().path == path


def test_fast_accumulation_is_less_exact() -> None:
    """Where the promotion matters: long sums of one sign."""
    a, b = (tpk.quantize(torch.rand(n, 16384, device="cuda")) for n in (128, 256))
    wanted, _ = product(a, b.t())
    errors = {}
    for fast in (False, True):
        y = tpk.scaled_matmul(a, b.t(), out_dtype=torch.float32, fast_accumulation=fast, path="cublas")
        errors[fast] = float(((y.double() - wanted) / wanted).abs().max())
    assert errors[False] < 2e-3
    assert errors[False] <= errors[True]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_gradients_are_near_those_of_the_cpu(recipe: str) -> None:
    x, w = uneven(256, 512).to(torch.bfloat16), uneven(384, 512).to(torch.bfloat16)
    dy, results = torch.randn(256, 384, device="cuda").to(torch.bfloat16), []
    for place in ("cuda", "cpu"):
        xi, wi = (t.detach().to(place).requires_grad_() for t in (x, w))
        y = tpk.fp8.matmul(xi, wi.t(), recipe=recipe)
        y.backward(dy.to(place))
        results.append([t.detach().cpu() for t in (y, xi.grad, wi.grad)])
    for mine, wanted in zip(*results, strict=True):
        assert (mine - wanted).float().norm() < 5e-3 * wanted.float().norm()  # 14 bits of sums, rounding to 8


def test_captured_and_compiled() -> None:
    x, w = torch.randn(128, 256, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda").bfloat16()

    def call(x: Tensor) -> Tensor:
        power = {"round_scales_to_power_of_2": True}  # whose reciprocals are exact in compiled graphs too
        return tpk.scaled_matmul(tpk.quantize(x, "rowwise", **power), tpk.quantize(w, "rowwise", **power).t())

    eager = call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)
    compiled = torch.compile(call, fullgraph=True)(x)
    assert (compiled - eager).float().norm() < 1e-2 * eager.float().norm()  # a tie that falls the other way


def test_streamk_refused_where_it_cannot_run() -> None:
    missing = _product.streamk_missing(torch.device("cuda"))
    if missing is None:
        pytest.skip("it runs here")
    q = tpk.quantize(torch.randn(16, 32, device="cuda"))
    with pytest.raises(BackendError, match="'streamk' was asked for"):
        tpk.scaled_matmul(q, q.t(), path="streamk")
