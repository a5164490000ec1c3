"""Options of the linear layers on NCCL ranks, one GPU each: delayed weight gradients, LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delayed_checks import check_main_grad, check_sums
from op_checks import on_device

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

pytestmark = pytest.mark.gpun

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("check", [check_sums, check_main_grad])
def test_delayed(gpu_ranks: RankPool, check: object, dtype: torch.dtype) -> None:
    gpu_ranks.run(on_device, check, dtype, world=2)


def check_lora(ctx: RankContext, kind: str, sp: bool) -> None:
    """The factors give what the merged weight gives; whole factors have one gradient on all ranks."""
    of: Any = tnn.ColumnParallelLinear if kind == "column" else tnn.RowParallelLinear
    layer = of(256, 384, group=ctx.group, dtype=BF16, device=ctx.device, sequence_parallel=sp, name="layer")
    tnn.add_lora_(layer, 8, alpha=16)
    with torch.no_grad():
        layer.lora_B.normal_(std=0.05)
        if isinstance(tnn.placement_of(layer.lora_B), tnn.Replicated):
            layer.lora_B.copy_(tpk.regions.all_reduce(layer.lora_B, ctx.group))
    torch.manual_seed(3 if kind == "column" and not sp else 3 + ctx.rank)
    x = torch.randn(128, layer.weight.shape[1], dtype=BF16)
    y = layer(x)
    y.float().square().sum().backward()
    for p in (layer.lora_A, layer.lora_B):
        if isinstance(tnn.placement_of(p), tnn.Replicated):
            every = tpk.regions.all_gather(p.grad[None], 0, ctx.group)
            assert (every == every[0]).all()
    with torch.no_grad():
        merged = tnn.merge_lora_(layer)(x)
    assert (merged.double() - y.double()).norm() < 0.01 * y.double().norm()


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("sp", [False, True])
def test_lora(gpu_ranks: RankPool, kind: str, sp: bool) -> None:
    gpu_ranks.run(on_device, check_lora, kind, sp, world=2)
