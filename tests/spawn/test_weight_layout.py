"""The gradient of a weight lies in memory as the weight does, so that autograd need not copy it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpkernels as tpk
from tpkernels.testing import RankContext, RankPool


def _layout(ctx: RankContext, stored: str) -> None:
    rows, k, n = 4 * ctx.world, 6, 10

    def weight() -> tuple[torch.Tensor, torch.Tensor]:
        """As it is stored, and as an operation takes it."""
        w = torch.randn((n, k) if stored == "[N, K]" else (k, n), requires_grad=True)
        return w, w.t() if stored == "[N, K]" else w

    x, shard = torch.randn(rows, k, requires_grad=True), torch.randn(4, k, requires_grad=True)
    ops: dict[str, Any] = {
        "matmul": lambda b: tpk.matmul(x, b, activation="silu"),
        "gated": lambda b: tpk.matmul(x, b, gate=b, activation="silu"),
        "gather": lambda b: tpk.all_gather_matmul(shard, b, ctx.group),
        "gather, kept": lambda b: tpk.all_gather_matmul(shard, b, ctx.group, keep_gathered=True),
        "replicated": lambda b: tpk.matmul_replicated(x, b, ctx.group),
        "scatter": lambda b: tpk.matmul_reduce_scatter(x, b, ctx.group),
        "reduce": lambda b: tpk.matmul_all_reduce(x, b, ctx.group),
    }
    for name, op in ops.items():
        w, b = weight()
        y = op(b)
        for wanted in ((w,), (w, x, shard)):
            (grad, *_) = torch.autograd.grad(
                y, wanted, torch.ones_like(y), retain_graph=True, allow_unused=True
            )
            assert grad.stride() == w.stride(), f"{name}: {grad.stride()} beside {w.stride()}"


@pytest.mark.parametrize("stored", ["[N, K]", "[K, N]"])
@pytest.mark.parametrize("world", [1, 2])
def test_gradient_lies_as_the_weight(ranks: RankPool, world: int, stored: str) -> None:
    ranks.run(_layout, stored, world=world)
