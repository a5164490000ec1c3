"""Products of FP8 operands, and FP8 linear layers on one rank: values, gradients, paths, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tpkernels as tpk
from tpkernels.errors import ArgumentError, BackendError, DeviceError, DTypeError, ShapeError
from tpkernels.fp8 import _product
from tpkernels.fp8._quantize import Quantized
from tpkernels.ops._paths import parse
from tpkernels.reference import fp8 as ref
from tpkernels.testing import assert_close_tiles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("tensorwise", "rowwise", "blockwise")
A_SCALINGS = ("tensorwise", "rowwise", "blockwise_1x128")
B_SCALINGS = (*A_SCALINGS, "blockwise_128x128")
SHAPES = [(130, 200, 300), (37, 53, 29), (1, 1, 1), (128, 144, 256), (5, 16, 128)]


def uneven(*shape: int) -> Tensor:
    """Rows of different size, so that scales matter."""
    return torch.randn(shape) * 2.0 ** torch.randint(-3, 4, (shape[0], *[1] * (len(shape) - 1)))


def exact(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """The product of what the operands stand for, by the reference, and of their absolute values."""
    pairs = [ref.Fp8Array(q.data.double().numpy(), q.scale.numpy()) for q in (a, b)]
    sizes = [ref.Fp8Array(np.abs(p.data), p.scale) for p in pairs]
    return torch.as_tensor(ref.scaled_matmul(*pairs)), torch.as_tensor(ref.scaled_matmul(*sizes))


@pytest.mark.parametrize("scalings", list(itertools.product(A_SCALINGS, B_SCALINGS)), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, scalings) -> None:
    m, n, k = shape
    formats = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
    for (of_a, of_b), out_dtype in zip(
        formats, (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16), strict=True
    ):
        aq = tpk.quantize(uneven(m, k), scalings[0], of_a)
        bq = tpk.quantize(uneven(n, k), scalings[1], of_b).t()
        bias = torch.randn(n).to(torch.bfloat16)
        wanted, size = exact(aq, bq)
        for given, addend in ((None, 0.0), (bias, bias.double())):
            y = tpk.scaled_matmul(aq, bq, bias=given, out_dtype=out_dtype)
            assert y.dtype == out_dtype and y.is_contiguous()
            assert_close_tiles(y, wanted + addend, out_dtype, k=k, magnitude=size + abs(addend))
    record = tpk.last_path()
    assert record.op == "scaled_matmul" and record.path == "blas" and "float8_e5m2" in record.detail


def test_leading_dimensions_strides_and_no_elements() -> None:
    x, w = uneven(6, 5, 200), uneven(72, 200)
    for of_x, of_w in zip(A_SCALINGS, (*A_SCALINGS[:2], "blockwise_128x128"), strict=True):
        wq = tpk.quantize(w, of_w).t()
        cube, flat = tpk.quantize(x, of_x), tpk.quantize(x.flatten(0, 1), of_x)
        y = tpk.scaled_matmul(cube, wq)
        assert y.shape == (6, 5, 72) and torch.equal(y.flatten(0, 1), tpk.scaled_matmul(flat, wq))
        lines = Quantized(flat.data.t().contiguous().t(), flat.scale.t().contiguous().t(), flat.scaling)
        assert torch.equal(tpk.scaled_matmul(lines, wq), y.flatten(0, 1))
        for m, n, k in itertools.product((0, 3), repeat=3):
            out = tpk.scaled_matmul(
                tpk.quantize(torch.randn(m, k), of_x),
                tpk.quantize(torch.randn(n, k), of_w).t(),
                bias=torch.full((n,), 2.0),
            )
            assert out.shape == (m, n) and out.dtype == torch.bfloat16
            if k == 0:
                assert torch.equal(out, torch.full_like(out, 2.0))


def test_paths_and_explain(monkeypatch) -> None:
    aq, bq = tpk.quantize(torch.randn(4, 32)), tpk.quantize(torch.randn(16, 32)).t()
    told = tpk.explain("scaled_matmul", aq, bq)
    assert told.path == "blas" and "M=4 N=16 K=32 float8_e4m3fn x float8_e4m3fn" in str(told)
    tpk.scaled_matmul(aq, bq, path="blas")
    with pytest.raises(
        BackendError, match="'streamk' was asked for, but the cpu Stream-K kernel takes no FP8"
    ):
        tpk.scaled_matmul(aq, bq, path="streamk")
    with pytest.raises(ArgumentError, match="'cublas' is not a path on cpu"):
        tpk.scaled_matmul(aq, bq, path="cublas")
    monkeypatch.setenv("TPK_PATH", "gloo")  # a transport alone
    tpk.scaled_matmul(aq, bq)
    assert tpk.last_path().path == "blas"


def test_what_the_library_takes() -> None:
    """Where torch._scaled_mm serves on a GPU; each reason against it is a sentence about it."""
    hopper, cuda = (9, 0), (13, 0)

    def layout(**changes: object) -> _product.Layout:
        plain = _product.Layout(E4M3, E4M3, "tensorwise", "tensorwise", 100, 40, torch.float32, True)
        return plain._replace(**changes)  # type: ignore[arg-type]

    blockwise = {"a_scaling": "1x128", "b_scaling": "128x128", "k": 512, "fast_accumulation": False}
    for fit in (
        layout(),
        layout(b_dtype=E5M2),
        layout(a_scaling="rowwise", b_scaling="rowwise"),
        layout(a_scaling="rowwise"),
        layout(**blockwise),
        layout(**{**blockwise, "b_scaling": "1x128", "k": 640}),
    ):
        assert _product.library_missing(fit, hopper, cuda) is None, fit
    for unfit, reason in (
        (layout(a_dtype=E5M2, b_dtype=E5M2), "e5m2 by e5m2"),
        (layout(**{**blockwise, "k": 640}), "rows of 16 bytes"),
        (layout(**{**blockwise, "k": 500}), "rows of 16 bytes"),
        (layout(**{**blockwise, "m": 129}), "multiple of 16 rows"),
        (layout(**{**blockwise, "a_scaling": "rowwise"}), "does not take rowwise by 128x128"),
        (layout(**{**blockwise, "fast_accumulation": True}), "no fast accumulation"),
        (layout(**{**blockwise, "out_dtype": torch.float16}), "no float16 output"),
    ):
        assert reason in str(_product.library_missing(unfit, hopper, cuda)), unfit
    assert "compute capability 8.9" in str(_product.library_missing(layout(), (8, 0), cuda))
    assert "compute capability 9.0" in str(_product.library_missing(layout(**blockwise), (10, 0), cuda))
    assert "CUDA 12.9" in str(_product.library_missing(layout(**blockwise), hopper, (12, 8)))


def test_choice_on_a_gpu(monkeypatch) -> None:
    """cuBLAS where it can, else our kernel where it runs, else converted operands; a named path holds."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_product, "cuda_version", lambda: (13, 0))
    fit = _product.Layout(E4M3, E4M3, "rowwise", "rowwise", 64, 64, torch.bfloat16, False)
    unfit = fit._replace(a_dtype=E5M2, b_dtype=E5M2)

    def path(name: str, layout: _product.Layout) -> tuple[str, str]:
        choice = _product.choose(parse(name, "cuda", distributed=False), gpu, layout)
        return choice.gemm, choice.why

    for there in (False, True):
        missing = None if there else "it is not there"
        monkeypatch.setattr(_product, "streamk_missing", lambda device, missing=missing: missing)
        assert path("auto", fit)[0] == "cublas"
        gemm, why = path("auto", unfit)
        assert gemm == ("streamk" if there else "cublas") and "e5m2 by e5m2" in why
        assert path("cublas", unfit) == (
            "cublas",
            f"operands converted: {_product.library_missing(unfit, (9, 0))}",
        )
        if there:
            assert path("streamk", fit) == ("streamk", "asked for")
        else:
            with pytest.raises(BackendError, match="but it is not there"):
                path("streamk", fit)


def test_opcheck() -> None:
    """Without opcheck's test of the schema, which compares arguments in a way that torch has not for FP8."""
    op = torch.ops.tpkernels.scaled_matmul.default
    for scaling in A_SCALINGS:
        a, b = tpk.quantize(uneven(5, 140), scaling), tpk.quantize(uneven(7, 140), scaling).t()
        for bias in (None, torch.randn(7)):
            arguments = (a.data, b.data, a.scale, b.scale, bias, torch.float32, False, "auto")
            before = [x.clone() for x in arguments[:4]]
            torch.library.opcheck(op, arguments, test_utils=("test_autograd_registration", "test_faketensor"))
            for x, was in zip(arguments[:4], before, strict=True):
                assert torch.equal(x.float(), was.float())


# Layers on one rank


def dequantised(x: Tensor, w: Tensor, dy: Tensor, recipe: tpk.Fp8Recipe) -> dict[str, Tensor]:
    """The three products of what the quantised operands stand for, in float64, by the reference's quantisation."""
    power, forward, back = recipe.power_of_2, "float8_e4m3fn", str(recipe.grad_dtype).removeprefix("torch.")

    def stands_for(t: Tensor, scaling: str, dtype: str) -> Tensor:
        q = ref.quantize(t.float().numpy(), scaling, dtype, power_of_two=power)
        return torch.as_tensor(ref.dequantize(q))

    rows, squares = recipe.operand_scaling, recipe.weight_scaling
    xq = stands_for(x, rows, forward)
    x_t = stands_for(xq.t(), rows, forward) if recipe.scaling != "tensorwise" else xq.t()
    return {
        "y": xq @ stands_for(w, squares, forward).t(),
        "x": stands_for(dy, rows, back) @ stands_for(w.t(), squares, forward).t(),
        "w": stands_for(dy.t(), rows, back) @ x_t.t(),
    }


@pytest.mark.parametrize(
    "recipe",
    [
        *RECIPES,
        tpk.Fp8Recipe("tensorwise", backward_dtype=E4M3, round_scales_to_power_of_2=True),
        tpk.Fp8Recipe("rowwise", fast_accumulation=True, round_scales_to_power_of_2=False),
        tpk.Fp8Recipe("blockwise", backward_dtype=E5M2),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(48, 200, 130), (5, 3, 7), (128, 128, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_what_the_operands_stand_for(recipe, shape, dtype) -> None:
    m, n, k = shape
    x, w = (uneven(*size).to(dtype).requires_grad_() for size in ((m, k), (n, k)))
    bias = torch.randn(n).requires_grad_()
    y = tpk.fp8.matmul(x, w.t(), bias=bias, recipe=recipe)
    dy = uneven(m, n).to(dtype)
    y.backward(dy)
    chosen = recipe if isinstance(recipe, tpk.Fp8Recipe) else tpk.Fp8Recipe(recipe)
    wanted = dequantised(x.detach(), w.detach(), dy, chosen)
    wanted["y"] = wanted["y"] + bias.detach().double()
    for name, value, terms in (("y", y, k), ("x", x.grad, n), ("w", w.grad, m)):
        assert value.dtype == dtype
        assert_close_tiles(value.detach(), wanted[name], dtype, k=terms, slack=4.0, name=name)
    torch.testing.assert_close(bias.grad, dy.float().sum(0))
    assert w.grad.is_contiguous()


def test_master_weights_frozen_parts_and_autocast() -> None:
    """A float32 weight under a bfloat16 input gets a float32 gradient; nothing is made that nobody wants."""
    x, w = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(48, 64, requires_grad=True)
    y = tpk.fp8.matmul(x, w.t(), recipe="rowwise")
    assert y.dtype == torch.bfloat16
    with tpk.record_paths() as log:
        y.float().square().sum().backward()
    assert w.grad.dtype == torch.float32 and sum(log.counts.values()) == 1
    frozen = w.detach()
    xi = x.clone().requires_grad_()
    with tpk.record_paths() as log:
        tpk.fp8.matmul(xi, frozen.t(), recipe="rowwise").float().sum().backward()
    assert xi.grad is not None and sum(log.counts.values()) == 2
    with torch.autocast("cpu", torch.bfloat16):
        z = tpk.fp8.matmul(x.float(), w.t(), recipe="rowwise")
    assert z.dtype == torch.bfloat16 and torch.equal(z, y)
    y = tpk.fp8.matmul(xi, w.t(), recipe="rowwise")
    (grad,) = torch.autograd.grad(y.float().square().sum(), xi, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.float().sum().backward()


def test_saved_for_backward_is_fp8() -> None:
    """Of the input one byte an element is kept."""
    x, w = torch.randn(256, 512, requires_grad=True), torch.randn(64, 512, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tpk.fp8.matmul(x, w.t(), recipe="blockwise")
    others = [t for t in kept if t.untyped_storage().data_ptr() != w.untyped_storage().data_ptr()]
    assert sum(t.numel() * t.element_size() for t in others) == 256 * 512 + 256 * 4 * 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad(recipe: str) -> None:
    x = torch.randn(32, 64)
    weight = torch.nn.Parameter(torch.randn(48, 64).to(torch.bfloat16))
    tpk.fp8.matmul(x, weight.t(), recipe=recipe).sum().backward()
    plain = weight.grad.float()
    weight.grad, weight.main_grad = None, torch.ones(48, 64)
    weight.grad_added_to_main_grad = False
    for _ in range(2):
        tpk.fp8.matmul(x, weight.t(), recipe=recipe, main_grad_of=weight).sum().backward()
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad, 1 + 2 * plain, rtol=2.0**-7, atol=1e-2)
    del weight.main_grad
    with pytest.raises(ArgumentError, match="main_grad, but that is missing"):
        tpk.fp8.matmul(x, weight.t(), recipe=recipe, main_grad_of=weight)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph(backend: str) -> None:
    x, w, v = (torch.randn(size, requires_grad=True) for size in ((48, 256), (128, 256), (64, 128)))

    def loss(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = torch.relu(tpk.fp8.matmul(x, w.t(), recipe="blockwise"))
        return tpk.fp8.matmul(h, v.t(), recipe="rowwise").square().mean()

    torch._dynamo.reset()
    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        value = run(x, w, v)
        results.append([value, *torch.autograd.grad(value, (x, w, v))])
    for eager, compiled in zip(*results, strict=True):
        assert (eager - compiled).norm() <= 1e-3 * eager.norm()


@pytest.mark.parametrize("flag", [False, True])
def test_one_graph_into_main_grad(flag: bool) -> None:
    """Two passes in flight, for each of two weights; the sums and gradients of eager calls."""
    x = torch.randn(48, 256, requires_grad=True)
    weights: list[Any] = [torch.nn.Parameter(torch.randn(size)) for size in ((128, 256), (64, 128))]

    def loss(x: Tensor) -> Tensor:
        w, v = weights
        h = torch.relu(tpk.fp8.matmul(x, w.t(), recipe="blockwise", main_grad_of=w))
        return tpk.fp8.matmul(h, v.t(), recipe="rowwise", main_grad_of=v).square().mean()

    torch._dynamo.reset()
    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        for p in weights:
            p.grad, p.main_grad = None, torch.ones_like(p)
            if flag:
                p.grad_added_to_main_grad = False
        first, second = run(x), run(x.detach() * 2)
        second.backward()
        first.backward()
        for p in weights:
            assert (p.grad is not None) == flag and getattr(p, "grad_added_to_main_grad", False) == flag
        results.append([first, x.grad, *(p.main_grad - 1 for p in weights)])
        x.grad = None
    for eager, compiled in zip(*results, strict=True):
        assert eager.norm() > 0
        assert (eager - compiled).norm() <= 1e-3 * eager.norm()


def test_refusals() -> None:
    a, b = tpk.quantize(torch.randn(4, 200)), tpk.quantize(torch.randn(6, 200)).t()
    ones = torch.ones(1)
    for call, error, words in (
        (
            lambda: tpk.scaled_matmul(torch.randn(4, 4), b),
            DTypeError,
            "a: expected what tpkernels.quantize returns",
        ),
        (lambda: tpk.scaled_matmul(a, b.t()), ShapeError, r"expected \[..., K\] and \[K, N\].* its .t\(\)"),
        (
            lambda: tpk.scaled_matmul(a, b, out_dtype=torch.float64),
            DTypeError,
            "out_dtype: expected bfloat16",
        ),
        (lambda: tpk.scaled_matmul(a, b, out_dtype="bf16"), DTypeError, "out_dtype: expected a torch.dtype"),
        (lambda: tpk.scaled_matmul(a, b, bias=torch.ones(5)), ShapeError, r"bias: expected shape \[6\]"),
        (
            lambda: tpk.scaled_matmul(a, b, bias=ones.to("meta").expand(6)),
            DeviceError,
            "bias: expected device cpu",
        ),
        (lambda: tpk.scaled_matmul(a._replace(data=a.data.float()), b), DTypeError, "a: expected float8"),
        (
            lambda: tpk.scaled_matmul(a._replace(scale=ones.double()), b),
            DTypeError,
            "a: expected scales in float32",
        ),
        (
            lambda: tpk.scaled_matmul(a._replace(scale=torch.ones(4, 3)), b),
            ShapeError,
            r"\[..., 1\] or \[..., 2\]",
        ),
        (
            lambda: tpk.scaled_matmul(a, b._replace(scale=torch.ones(3, 6))),
            ShapeError,
            r"\[2, 6\] or \[2, 1\]",
        ),
        (
            lambda: tpk.scaled_matmul(a, Quantized(b.data.to("meta"), ones, "tensorwise")),
            DeviceError,
            "b: expected",
        ),
        (
            lambda: tpk.Fp8Recipe("tensor"),
            ArgumentError,
            "scaling: expected one of tensorwise, rowwise, blockwise",
        ),
        (
            lambda: tpk.Fp8Recipe(forward_dtype=torch.int8),
            DTypeError,
            "forward_dtype: expected torch.float8_e4m3fn",
        ),
        (
            lambda: tpk.Fp8Recipe("blockwise", fast_accumulation=True),
            ArgumentError,
            "fast_accumulation: blockwise",
        ),
        (lambda: tpk.Fp8Recipe(forward_dtype=E5M2), ArgumentError, "no tensor core multiplies e5m2 by e5m2"),
        (lambda: wide(recipe="fp8"), ArgumentError, "recipe: expected one of 'tensorwise', .* got 'fp8'"),
        (lambda: wide(x=torch.randn(4, 8).double()), DTypeError, "a: expected bfloat16, float16 or float32"),
        (lambda: wide(w=torch.randn(7, 5)), ShapeError, r"b: expected \[K, N\] with 8 rows .* weight.t\(\)"),
        (lambda: wide(w=torch.randn(8)), ShapeError, "b: expected at least 2 dimensions"),
        (lambda: wide(w="w"), DTypeError, "b: expected a torch.Tensor, got str"),
        (lambda: wide(w=torch.randn(8, 5, device="meta")), DeviceError, "b: expected device cpu as in a"),
        (
            lambda: wide(out_dtype=torch.float64),
            DTypeError,
            "out_dtype: expected bfloat16, float16 or float32",
        ),
        (lambda: wide(path=3), DTypeError, "path: expected str, got 3"),
    ):
        with pytest.raises(error, match=words):
            call()


def wide(x=None, w=None, recipe="rowwise", **options):
    return tpk.fp8.matmul(
        torch.randn(4, 8) if x is None else x, torch.randn(8, 5) if w is None else w, recipe=recipe, **options
    )
