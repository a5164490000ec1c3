"""``keep_gathered`` of attention, MLP and block: the same numbers, one gather less for each in the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

F64 = torch.float64
WIDTH, HEADS = 24, 12


def gathers(log: tpk.PathLog) -> int:
    """Those for gradients of weights, which are operations of their own."""
    return sum(count for (op, _), count in log.counts.items() if op == "all_gather")


def kinds(ctx: RankContext) -> dict[str, Any]:
    options: dict[str, Any] = dict(group=ctx.group_name, sequence_parallel=True, dtype=F64, seed=3, name="b")
    block = tnn.ParallelTransformerBlock
    return {
        "attention": lambda keep: tnn.ParallelAttention(WIDTH, HEADS, 4, keep_gathered=keep, **options),
        "attention, shared heads": lambda keep: tnn.ParallelAttention(
            WIDTH, HEADS, 1, keep_gathered=keep, **options
        ),
        "swiglu": lambda keep: tnn.ParallelMLP(WIDTH, 30, keep_gathered=keep, **options),
        "gelu": lambda keep: tnn.ParallelMLP(WIDTH, 30, activation="gelu", keep_gathered=keep, **options),
        "block": lambda keep: block(WIDTH, 30, HEADS, 2, keep_gathered=keep, **options),
        "recomputed": lambda keep: block(
            WIDTH, 30, HEADS, 2, keep_gathered=keep, recompute="selective", **options
        ),
    }


def check(ctx: RankContext, kind: str) -> None:
    results, counts = [], []
    for keep in (False, True):
        layer = kinds(ctx)[kind](keep)
        for module in layer.modules():
            if isinstance(module, tnn.ColumnParallelLinear):
                assert module.keep_gathered is keep
        torch.manual_seed(5 + ctx.rank)
        x = torch.randn(2, 3, WIDTH, dtype=F64, requires_grad=True)
        y = layer(x)
        with tpk.record_paths() as log:
            y.square().sum().backward()
        counts.append(gathers(log))
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    parts = 2 if kind in ("block", "recomputed") else 1
    assert counts == [parts, 0], (kind, counts)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "kind", ["attention", "attention, shared heads", "swiglu", "gelu", "block", "recomputed"]
)
def test_the_same_with_a_gather_less(ranks: RankPool, kind: str, world: int) -> None:
    ranks.run(check, kind, world=world)


def refused(ctx: RankContext) -> None:
    for make in (
        lambda: tnn.ParallelMLP(8, 16, keep_gathered=True, group=ctx.group_name),
        lambda: tnn.ParallelAttention(8, 2, keep_gathered=True, group=ctx.group_name),
        lambda: tnn.ParallelTransformerBlock(8, 16, 2, keep_gathered=True, group=ctx.group_name),
    ):
        with pytest.raises(tpk.errors.ArgumentError, match=r"keep_gathered: only a layer with sequence_para"):
            make()


def test_without_sequence_parallelism_there_is_nothing_to_keep(ranks: RankPool) -> None:
    ranks.run(refused, world=2)
