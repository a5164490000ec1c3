"""tpk.matmul with a gate, a residual and alpha, on every CPU path, against the NumPy float64 reference."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matmul_checks import Case, check, varied_cases

import tpkernels as tpk
from tpkernels import errors
from tpkernels.ops import _gemm
from tpkernels.ops._activation import ACTIVATIONS
from tpkernels.testing import assert_close_tiles

Tensor = torch.Tensor
PATHS = ["blas", "streamk"]
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SHAPES = [
    ((37, 53), (53, 29)),
    ((1, 300), (300, 5)),
    ((2, 3, 5, 7), (7, 4)),
    ((2, 3, 5, 7), (3, 7, 4)),
    ((3, 1, 5, 7), (2, 7, 4)),
    ((5, 7), (2, 7, 4)),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("laid_out", [False, True])
def test_values_and_gradients(
    path: str, dtype: torch.dtype, gated: bool, laid_out: bool, rng: np.random.Generator
) -> None:
    for case in varied_cases(SHAPES, dtype, gated, laid_out):
        check(case, rng, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("out_dtype", [F64, F32, BF16])
def test_out_dtype(path: str, out_dtype: torch.dtype, rng: np.random.Generator) -> None:
    for gated, save_preact in itertools.product([False, True], repeat=2):
        case = Case(
            (33, 70), (70, 41), BF16, gated=gated, residual=F32, alpha=2.0, activation="silu",
            out_dtype=out_dtype, save_preact=save_preact,
        )  # fmt: skip
        check(case, rng, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("m,n,k", [s for s in itertools.product([0, 3], repeat=3) if 0 in s])
@pytest.mark.parametrize("save_preact", [True, False])
def test_empty(path: str, m: int, n: int, k: int, save_preact: bool, rng: np.random.Generator) -> None:
    for gated, lead in itertools.product([False, True], [(), (2,)]):
        case = Case(
            (*lead, m, k), (k, n), F32, gated, residual=F32, alpha=3.0, activation="gelu", save_preact=save_preact
        )  # fmt: skip
        check(case, rng, path)
    a, b, residual = torch.randn(m, k), torch.randn(k, n), torch.randn(m, n)
    y = tpk.matmul(a, b, gate=b, residual=residual, path=path, save_preact=save_preact)
    assert k > 0 or torch.equal(y, residual)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("save_preact", [True, False])
@pytest.mark.parametrize("gated", [False, True])
def test_gradcheck(path: str, activation: str, save_preact: bool, gated: bool) -> None:
    """First and second derivatives by finite differences."""
    shapes = [(4, 5), (5, 3), (5, 3) if gated else (3,), (4, 3)]
    given = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]

    def run(a: Tensor, b: Tensor, third: Tensor, residual: Tensor) -> Tensor:
        other = {"gate" if gated else "bias": third}
        return tpk.matmul(
            a, b, **other, residual=residual, alpha=0.7, activation=activation,
            save_preact=save_preact, path=path,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("save_preact", [True, False])
def test_a_gated_product_is_rounded_once(path: str, save_preact: bool) -> None:
    """With values that bfloat16 holds, the result is the correctly rounded one, kept products or not."""
    a, b = torch.full((1, 3), 1.0).bfloat16(), torch.tensor([[1.0], [2**-7], [2**-9]]).bfloat16()
    residual = torch.full((1, 1), 2.0**-9, dtype=F32)
    exact = float((a.double() @ b.double()) ** 2) + 2.0**-9
    b.requires_grad_()
    y = tpk.matmul(a, b, gate=b, residual=residual, save_preact=save_preact, path=path).detach()
    assert float(y) == float(torch.tensor(exact).bfloat16())


def test_which_products_run() -> None:
    """Forward is one call; backward four products where both are kept, six where they are computed again."""
    a, b, gate = (torch.randn(s, requires_grad=True) for s in ((4, 5), (5, 3), (5, 3)))
    for save_preact, count in ((True, 1 + 4), (False, 1 + 2 + 4)):
        with tpk.record_paths() as log:
            tpk.matmul(a, b, gate=gate, save_preact=save_preact).sum().backward()
        assert log.counts == {("matmul", "blas"): count}
    with tpk.record_paths() as log:  # the residual alone: nothing is multiplied
        residual = torch.randn(4, 3, requires_grad=True)
        tpk.matmul(a.detach(), b.detach(), residual=residual, activation="silu").sum().backward()
    assert log.counts == {("matmul", "blas"): 1}
    assert torch.equal(residual.grad, torch.ones(4, 3))


def test_the_kernel_takes_a_gate_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    op = torch.ops.tpkernels.streamk_gemm

    def spy(*args: Any, **options: Any) -> None:
        calls.append(options)
        op(*args, **options)

    monkeypatch.setattr(torch.ops.tpkernels, "streamk_gemm", spy)
    a, b, gate = (torch.randn(s, requires_grad=True) for s in ((4, 5), (5, 3), (5, 3)))
    tpk.matmul(a, b, gate=gate, path="streamk", save_preact=False)
    assert [options["gate"] is None for options in calls] == [False]
    calls.clear()
    with torch.no_grad():
        tpk.matmul(a, b, gate=gate, path="streamk")
    assert [options["gate"] is None for options in calls] == [False]
    calls.clear()
    tpk.matmul(a, b, gate=gate, path="streamk")
    assert [options["gate"] is None for options in calls] == [True, True]


def test_one_cublas_call_computes_what_the_epilogue_says() -> None:
    """The shortcut of path "cublas", on CPU tensors: the same torch operation."""
    a, b = torch.randn(2, 7, 5), torch.randn(5, 4)
    bias, residual = torch.randn(4), torch.randn(2, 4, 7).mT
    for e in (
        _gemm.Epilogue(bias=bias, alpha=0.5),
        _gemm.Epilogue(bias=bias),
        _gemm.Epilogue(alpha=3.0),
    ):
        whole = _gemm._one_cublas_call(a, b, e)
        assert whole is not None
        want = tpk.matmul(a, b, bias=e.bias, alpha=e.alpha)
        assert torch.allclose(whole, want, atol=1e-5)
    others = (
        _gemm.PLAIN,
        _gemm.Epilogue(gate=b),
        _gemm.Epilogue(residual=residual, alpha=-2.0),  # torch.addmm may round the product first
        _gemm.Epilogue(residual=residual),
        _gemm.Epilogue(bias=bias, residual=residual),
        _gemm.Epilogue(residual=residual.double()),
        _gemm.Epilogue(bias=bias, activation="relu"),
    )
    assert all(_gemm._one_cublas_call(a, b, e) is None for e in others)


A, B, X = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)


@pytest.mark.parametrize(
    "options,kind,sentence",
    [
        ({"gate": B.long()}, errors.DTypeError, "gate: expected dtype float64, float32"),
        (
            {"gate": B.half()},
            errors.DTypeError,
            "gate: expected dtype float32 as in a, got float16; convert one of them.",
        ),
        ({"gate": B.t()}, errors.ShapeError, "gate: expected 4 rows (K, the last dimension of a [3, 4])"),
        (
            {"gate": torch.randn(4, 6)},
            errors.ShapeError,
            "gate: expected the shape of b, [4, 5], got [4, 6].",
        ),
        (
            {"gate": B[None]},
            errors.ShapeError,
            "gate: expected the shape of b, [4, 5], got [1, 4, 5].",
        ),
        ({"gate": B.to("meta")}, errors.DeviceError, "gate: expected device cpu as in a, got meta"),
        (
            {"gate": B, "bias": torch.randn(5)},
            errors.ArgumentError,
            "bias: expected None where there is a gate, as it is not defined which of the two products it belongs to",
        ),
        ({"gate": 3}, errors.DTypeError, "gate"),
        (
            {"residual": X[0]},
            errors.ShapeError,
            "residual: expected at least 2 dimensions, got shape [5].",
        ),
        (
            {"residual": X[:1]},
            errors.ShapeError,
            "residual: expected the output's shape [3, 5], got [1, 5]; expand it.",
        ),
        ({"residual": X.int()}, errors.DTypeError, "residual: expected dtype float64, float32"),
        (
            {"residual": X.to("meta")},
            errors.DeviceError,
            "residual: expected device cpu as in a, got meta; move it.",
        ),
        ({"alpha": "1"}, errors.DTypeError, "alpha: expected a number, got '1'"),
        ({"alpha": True}, errors.DTypeError, "alpha: expected a number, got True"),
        ({"alpha": None}, errors.DTypeError, "alpha: expected a number, got None"),
        ({"alpha": torch.tensor(2.0)}, errors.DTypeError, "alpha: expected a number, got tensor(2.)"),
        *(
            (
                {"accumulate_into": X.clone(), **other},
                errors.ArgumentError,
                "accumulate_into: it cannot be combined with gate, bias, residual, alpha",
            )
            for other in ({"gate": B}, {"residual": X}, {"alpha": 2.0})
        ),
    ],
)
def test_wrong_arguments_are_sentences(options: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=re.escape(sentence)) as caught:
        tpk.matmul(A, B, **options)
    assert str(caught.value).rstrip().endswith(".")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_is_one_graph(gated: bool, backend: str) -> None:
    def run(a: Tensor, b: Tensor, third: Tensor, residual: Tensor) -> Tensor:
        other = {"gate" if gated else "bias": third}
        return tpk.matmul(a, b, **other, residual=residual, alpha=0.5, activation="silu").sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for m in (3, 8, 17):
        given = [
            torch.randn(s, requires_grad=True) for s in ((m, 5), (5, 4), (5, 4) if gated else (4,), (m, 4))
        ]
        out = compiled(*given)
        found = torch.autograd.grad(out, given)
        want = run(*given)
        assert torch.allclose(out, want, atol=1e-5)
        for x, y in zip(found, torch.autograd.grad(want, given), strict=True):
            assert torch.allclose(x, y, atol=1e-5)


def test_compile_with_a_factor_that_changes() -> None:
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(
        lambda a, b, alpha: tpk.matmul(a, b, alpha=alpha), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for alpha in (0.5, 0.25, 3, -1.5):
        assert torch.allclose(compiled(A, B, alpha), alpha * (A @ B), atol=1e-5)


@pytest.mark.parametrize("save_preact", [True, False])
def test_opcheck(save_preact: bool) -> None:
    shapes = ((6, 5), (5, 4), (5, 4), (6, 4))
    a, b, gate, residual = (torch.randn(s, dtype=F64, requires_grad=True) for s in shapes)
    op = torch.ops.tpkernels.matmul.default
    torch.library.opcheck(op, (a, b, gate, None, residual, 0.5, "silu", None, save_preact, "streamk"))
    bias = torch.randn(4, dtype=F64, requires_grad=True)
    torch.library.opcheck(op, (a, b, None, bias, residual, 0.5, "silu", None, save_preact, "auto"))


def test_autocast() -> None:
    """Operands are cast; the residual, which may have any dtype, is not."""
    a, b, gate, residual = (torch.randn(s, requires_grad=True) for s in ((3, 4), (4, 2), (4, 2), (3, 2)))
    with torch.autocast("cpu", dtype=BF16):
        y = tpk.matmul(a, b, gate=gate, residual=residual, activation="silu")
        wide = tpk.matmul(a, torch.zeros(4, 2), gate=gate, residual=residual, out_dtype=F32)
    assert y.dtype == BF16 and torch.equal(wide, residual)
    y.sum().backward()
    assert all(x.grad.dtype == F32 for x in (a, b, gate, residual))


def test_checkpoint_recompute() -> None:
    a = torch.randn(3, 4, dtype=F64, requires_grad=True)
    b, gate = torch.randn(2, 4, 2, dtype=F64)
    run = lambda x: tpk.matmul(x, b, gate=gate, activation="gelu")  # noqa: E731
    torch.utils.checkpoint.checkpoint(run, a, use_reentrant=False).sum().backward()
    grad, a.grad = a.grad, None
    run(a).sum().backward()
    assert torch.equal(grad, a.grad)


def test_dlpack_arrays(rng: np.random.Generator) -> None:
    a, b, residual = rng.standard_normal((3, 4)), rng.standard_normal((4, 2)), np.ones((3, 2))
    found = tpk.matmul(a, b, gate=b, residual=residual, alpha=2)
    assert np.allclose(found, (2 * a @ b) ** 2 + 1)


@pytest.mark.parametrize("path", PATHS)
def test_the_residual_is_not_written(path: str) -> None:
    """One residual for every batch, as a view with a stride of 0."""
    a, b, row = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(1, 3, 5)
    kept = row.clone()
    y = tpk.matmul(a, b, residual=row.expand(2, 3, 5), path=path)
    assert torch.equal(row, kept)
    assert_close_tiles(y, a.double() @ b.double() + row.double(), F32, k=4)
