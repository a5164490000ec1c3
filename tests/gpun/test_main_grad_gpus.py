"""Weight gradients in ``main_grad`` on NCCL ranks, one GPU each."""

from __future__ import annotations

import main_grad_checks as checks
import pytest
import torch
from op_checks import on_device

from tpkernels.testing import RankPool

pytestmark = pytest.mark.gpun

BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "dtype, path", [(BF16, "nccl"), (F16, "nccl+cublas"), (BF16, "auto"), (torch.float32, "auto")]
)
def test_sums(gpu_ranks: RankPool, dtype: torch.dtype, path: str) -> None:
    gpu_ranks.run(on_device, checks.check_sums, dtype, path, world=2)


@pytest.mark.parametrize(
    "check", [checks.check_several_uses, checks.check_other_gradients_alone, checks.check_megatron]
)
def test_check(gpu_ranks: RankPool, check: object) -> None:
    gpu_ranks.run(on_device, check, world=2)
