"""tpk.matmul on CUDA rounds once, behind the bias, whatever computes the product."""

from __future__ import annotations

import random

import pytest
import torch
from gemm_checks import Failures

import tpkernels as tpk

pytestmark = [pytest.mark.gpu1, pytest.mark.usefixtures("cublas_sums_in_fp32")]


@pytest.mark.parametrize("path", ["cublas", "streamk", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [1.0, 0.75])
def test_rounds_once(path: str, dtype: torch.dtype, alpha: float, generator: torch.Generator) -> None:
    """Sizes at which torch.addmm splits K, and at which there are too many tiles for that."""
    pick = random.Random(generator.initial_seed())
    unit = torch.finfo(dtype).eps / 2
    with Failures() as failures:
        for case in range(120):
            most = (900, 400, 500) if case % 3 else (4000, 2500, 1500)
            m, n, k = (pick.randint(1, size) for size in most)
            with failures.case(f"{m}x{n}x{k}"):
                x, w = (
                    torch.randn(*shape, device="cuda", generator=generator).to(dtype)
                    for shape in ((m, k), (k, n))
                )
                bias = (4 * torch.randn(n, device="cuda", generator=generator)).to(dtype)
                got = tpk.matmul(x, w, bias=bias, alpha=alpha, path=path).double()
                product = alpha * (x.double() @ w.double())
                want = product + bias.double()
                # Sums in float32 of terms that are exact in it; 2 % for what they move across where rounding turns.
                allowed = 1.02 * unit * want.abs() + 2e-5 * product.abs().max()
                wrong = int(((got - want).abs() > allowed).sum())
                assert wrong == 0, f"{wrong} of {m * n} elements are not the exact sum rounded once"
