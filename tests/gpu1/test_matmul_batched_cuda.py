"""Batched products on CUDA, both operands and gradients: tests/cpu/test_matmul_batched.py on a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from matmul_checks import Case, check

import tpkernels as tpk

pytestmark = pytest.mark.gpu1

SHAPES = [
    ((4, 130, 72), (4, 72, 136)),
    ((2, 3, 64, 72), (2, 1, 72, 136)),  # heads that share keys
    ((2, 3, 64, 72), (3, 72, 136)),
    ((64, 72), (3, 72, 136)),
]


@pytest.mark.parametrize("path", ["streamk", "cublas"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_operands_batched(
    path: str, dtype: torch.dtype, rng: np.random.Generator, cublas_sums_in_fp32: None
) -> None:
    kinds = itertools.cycle([None, dtype, torch.float32])
    for (a, b), gated, laid_out in itertools.product(SHAPES, [False, True], [False, True]):
        case = Case(
            a, b, dtype, gated=gated, bias=not gated, residual=next(kinds), activation="silu", laid_out=laid_out,
            save_preact=not laid_out,
        )  # fmt: skip
        check(case, rng, path, "cuda")


def test_shared_keys_are_read_where_they_are(generator: torch.Generator) -> None:
    """Heads of one key are one matrix: nothing is allocated but the result."""
    q = torch.randn(4, 8, 256, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    keys = torch.randn(4, 1, 512, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    tpk.matmul(q, keys.mT, path="streamk")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = tpk.matmul(q, keys.expand(4, 8, 512, 128).mT, path="streamk")
    assert torch.cuda.max_memory_allocated() - before <= 1.5 * out.numel() * 2
    want = q.double() @ keys.double().mT
    assert float((out.double() - want).norm() / want.norm()) < 4e-3
