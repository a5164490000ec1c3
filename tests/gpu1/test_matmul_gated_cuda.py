"""tpk.matmul with a gate, a residual and alpha on CUDA, forward and backward, against the NumPy float64 reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from matmul_checks import Case, arguments, check, varied_cases

import tpkernels as tpk

pytestmark = [pytest.mark.gpu1, pytest.mark.usefixtures("cublas_sums_in_fp32")]
PATHS = ["streamk", "cublas"]
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SHAPES = [
    ((300, 520), (520, 264)),
    ((37, 53), (53, 29)),
    ((2, 3, 65, 96), (96, 136)),
    ((2, 3, 65, 96), (3, 96, 136)),
    ((3, 1, 40, 64), (2, 64, 72)),
    ((640, 1024), (1024, 768)),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("laid_out", [False, True])
def test_values_and_gradients(
    path: str, dtype: torch.dtype, gated: bool, laid_out: bool, rng: np.random.Generator
) -> None:
    for case in varied_cases(SHAPES, dtype, gated, laid_out):
        check(case, rng, path, "cuda")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("residual", [None, BF16, F32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_without_activation(
    path: str, residual: torch.dtype | None, bias: bool, alpha: float, rng: np.random.Generator
) -> None:
    """What cuBLAS does in one call, and what it does not."""
    for shape in ((200, 136), (2, 100, 136)):
        case = Case(shape, (136, 72), BF16, bias=bias, residual=residual, alpha=alpha)
        check(case, rng, path, "cuda")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("save_preact", [True, False])
def test_wide_output(path: str, save_preact: bool, rng: np.random.Generator) -> None:
    for gated in (False, True):
        case = Case(
            (129, 200), (200, 72), BF16, gated=gated, residual=F32, alpha=2.0, activation="silu",
            out_dtype=F32, save_preact=save_preact,
        )  # fmt: skip
        check(case, rng, path, "cuda")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("m,n,k", [s for s in itertools.product([0, 8], repeat=3) if 0 in s])
def test_empty(path: str, m: int, n: int, k: int, rng: np.random.Generator) -> None:
    for gated, save_preact in itertools.product([False, True], repeat=2):
        case = Case(
            (m, k), (k, n), F16, gated=gated, residual=F16, alpha=3.0, activation="gelu",
            save_preact=save_preact,
        )  # fmt: skip
        check(case, rng, path, "cuda")


@pytest.mark.parametrize("dtype", [F64, F32])
def test_wide_operands(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """torch's product alone takes them."""
    case = Case((70, 90), (90, 50), dtype, gated=True, residual=BF16, alpha=0.5, activation="silu")
    check(case, rng, "cublas", "cuda")


@pytest.mark.parametrize("path", PATHS)
def test_the_products_kept_or_not_give_the_same(path: str, rng: np.random.Generator) -> None:
    """One call of the kernel and two: the order of the sums may differ, what is computed may not."""
    case = Case((256, 512), (512, 384), BF16, gated=True, residual=BF16, activation="silu")
    given = arguments(case, rng, "cuda")
    kept = tpk.matmul(**given, activation="silu", path=path)
    again = tpk.matmul(**given, activation="silu", path=path, save_preact=False)
    assert torch.allclose(kept, again, rtol=2**-7, atol=2**-12)
    dy = torch.randn_like(kept)
    for x, y in zip(
        torch.autograd.grad(kept, list(given.values()), dy),
        torch.autograd.grad(again, list(given.values()), dy),
        strict=True,
    ):
        assert float((x - y).norm()) <= 1e-2 * float(x.norm())


@pytest.mark.parametrize("path", PATHS)
def test_compile(path: str, rng: np.random.Generator) -> None:
    case = Case((64, 96), (96, 72), BF16, gated=True, residual=BF16, activation="silu")
    given = arguments(case, rng, "cuda")

    def run(a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return tpk.matmul(a, b, gate=gate, residual=residual, alpha=0.5, activation="silu", path=path)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    want, found = run(**given), compiled(**given)
    assert torch.equal(want, found)
    dy = torch.randn_like(want)
    leaves = list(given.values())
    for x, y in zip(
        torch.autograd.grad(want, leaves, dy), torch.autograd.grad(found, leaves, dy), strict=True
    ):
        assert float((x - y).norm()) <= 1e-2 * float(x.norm())


@pytest.mark.parametrize("path", PATHS)
def test_autocast(path: str) -> None:
    a, b, gate, residual = (
        torch.randn(s, device="cuda", requires_grad=True) for s in ((32, 64), (64, 48), (64, 48), (32, 48))
    )
    with torch.autocast("cuda", dtype=BF16):
        y = tpk.matmul(a, b, gate=gate, residual=residual, activation="silu", path=path)
    assert y.dtype == BF16
    y.sum().backward()
    for x in (a, b, gate, residual):
        assert x.grad is not None and x.grad.dtype == F32


def test_explain_shows_the_plan_of_the_call() -> None:
    """On Hopper a gated tile has half as many columns of the output."""
    a = torch.empty(2048, 4096, device="cuda", dtype=BF16)
    b = torch.empty(4096, 3584, device="cuda", dtype=BF16)
    plan = tpk.explain("matmul", a, b, gate=b, activation="silu", path="streamk").plan
    assert plan is not None
    (bm, bn, bk), (cm, cn) = plan["tile"], plan["cluster"]
    columns = bn // 2 if bk == 64 else bn  # the portable kernel's tiles have 32 of K
    assert plan["tiles"] == -(-2048 // (bm * cm)) * -(-3584 // (columns * cn))
