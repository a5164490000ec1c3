"""A linear layer with LoRA's factors, unsharded, and our layers beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext

WORLDS = (1, 2, 3, 4)
F64 = torch.float64
INSIDE, OUTSIDE, RANK, ALPHA = 10, 7, 3, 4.5


class DenseLoRA(nn.Module):
    """nn.Linear with the factors, under the names that our layers give them."""

    def __init__(self, inside: int, outside: int, bias: bool, rank: int = RANK, alpha: float = ALPHA) -> None:
        super().__init__()
        kinds: dict[str, Any] = {"dtype": F64}
        self.weight = nn.Parameter(torch.empty(outside, inside, **kinds))
        self.bias = nn.Parameter(torch.empty(outside, **kinds)) if bias else None
        self.lora_A = nn.Parameter(torch.empty(rank, inside, **kinds))
        self.lora_B = nn.Parameter(torch.empty(outside, rank, **kinds))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.scale * self.lora_B @ self.lora_A, self.bias)


def set_alike(layer: nn.Module, dense: nn.Module) -> None:
    """Random values in both, the same on every rank: ranks draw alike."""
    with torch.no_grad():
        for p in dense.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    tnn.load_full_state_dict(layer, dense.state_dict())


def make(
    ctx: RankContext, kind: str, *, freeze: bool = True, dtype: torch.dtype = F64, **options: Any
) -> tuple[Any, DenseLoRA]:
    of = tnn.ColumnParallelLinear if kind == "column" else tnn.RowParallelLinear
    layer = of(INSIDE, OUTSIDE, group=ctx.group, dtype=dtype, name="layer", **options)
    assert tnn.add_lora_(layer, RANK, alpha=ALPHA, freeze=freeze) is layer
    dense = DenseLoRA(INSIDE, OUTSIDE, options.get("bias", True))
    set_alike(layer, dense)
    for name, p in layer.named_parameters():
        assert p.requires_grad == (not freeze or name.startswith("lora_"))
        dense.get_parameter(name).requires_grad_(p.requires_grad)
    return layer, dense


def assert_equal_on_ranks(ctx: RankContext, module: nn.Module, note: str) -> None:
    """What is replicated has the same gradient on every rank, bit for bit."""
    for name, p in module.named_parameters():
        if p.grad is not None and isinstance(tnn.placement_of(p), tnn.Replicated):
            every = tpk.regions.all_gather(p.grad[None], 0, ctx.group)
            assert (every == every[0]).all(), f"{note}: {name} differs between ranks"


def travelled(log: tpk.PathLog) -> dict[str, int]:
    """Calls that move something, by op; two names are products with a gather or a reduction in them."""
    local = ("matmul", "matmul_accumulate", "matmul_replicated")
    counts: dict[str, int] = {}
    for (op, _), n in log.counts.items():
        if op not in local:
            counts[op] = counts.get(op, 0) + n
    return counts
