"""Delayed weight gradients with data parallelism outside: DistributedDataParallel sums them, fully_shard is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_dense import WIDTH
from test_pipelines import grid
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool


def block(tp: str, delay: bool, kv_heads: int = 4) -> tnn.ParallelTransformerBlock:
    return tnn.ParallelTransformerBlock(
        WIDTH,
        30,
        12,
        kv_heads,
        bias=True,
        group=tp,
        sequence_parallel=True,
        delay_wgrad=delay,
        seed=3,
        name="b",
    )


def steps(ctx: RankContext, kv_heads: int, parts: int) -> None:
    """Steps of ``parts`` micro-batches, of which the last one is summed: the same bits as without delay."""
    groups = grid(ctx, ("dp", "tp"), (2, 2))
    trained = []
    for delay in (False, True):
        model = block(groups["tp"].group_name, delay, kv_heads)
        ddp = DistributedDataParallel(model, process_group=groups["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5 + ctx.rank)

        def part() -> None:
            ddp(torch.randn(3, 2, WIDTH)).square().mean().backward()  # noqa: B023
            if delay:  # noqa: B023
                tnn.backward_dw(model)  # noqa: B023

        for _ in range(3):
            optimizer.zero_grad()
            with ddp.no_sync():
                for _ in range(parts - 1):
                    part()
            part()
            optimizer.step()
        trained.append({name: p.detach() for name, p in model.named_parameters()})
        for name, p in trained[-1].items():
            for other in gathered(p, groups["dp"]):
                assert torch.equal(other, p), f"{name} differs between replicas"
    for name, p in trained[0].items():
        assert torch.equal(trained[1][name], p), name


def gathered(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    out = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(out, x.contiguous(), group=group)
    return out


@pytest.mark.parametrize(("kv_heads", "parts"), [(4, 1), (4, 3), (1, 2)])
def test_replicas_sum_delayed_gradients(ranks: RankPool, kv_heads: int, parts: int) -> None:
    ranks.run(steps, kv_heads, parts, world=4)


def two_left(ctx: RankContext) -> None:
    """A sum is started by the first gradient of a weight: a second one would be left out of it."""
    groups = grid(ctx, ("dp", "tp"), (2, 2))
    kinds = dict(group=groups["tp"].group_name, delay_wgrad=True)
    refusal = pytest.raises(tpk.errors.ArgumentError, match="delay_wgrad: a weight gradient is pending still")
    for layer in (tnn.ColumnParallelLinear(4, 6, **kinds), tnn.SharedColumnParallelLinear(4, 6, 1, **kinds)):
        ddp = DistributedDataParallel(layer, process_group=groups["dp"])
        with ddp.no_sync():
            first, second = ddp(torch.randn(3, 4)), ddp(torch.randn(3, 4))  # as a pipeline does
            first.sum().backward()
            with refusal:
                second.sum().backward()
        with refusal:
            ddp(torch.randn(3, 4))
        layer.backward_dw()
        ddp(torch.randn(3, 4)).sum().backward()
        assert layer.pending_dw == 1
        layer.backward_dw()
        layer(torch.randn(3, 4)).sum().backward()  # by itself it may leave as many as it likes
        layer(torch.randn(3, 4)).sum().backward()
        assert layer.pending_dw == 2


def test_two_gradients_in_one_sum_are_refused(ranks: RankPool) -> None:
    ranks.run(two_left, world=4)


def sharded(ctx: RankContext) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    for reshard in (True, False):
        model = nn.Sequential(
            tnn.ColumnParallelLinear(8, 12, group=mesh["tp"], delay_wgrad=True, name="up"),
            tnn.RowParallelLinear(12, 8, group=mesh["tp"], delay_wgrad=True, name="down"),
        )
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard)
        x = torch.randn(3, 8)
        for _ in range(2):
            with pytest.raises(
                tpk.errors.ArgumentError, match=r"delay_wgrad: the weight of .*'up' is a tensor .*fully_shard"
            ):
                model(x)
        with torch.no_grad():
            model(x)
        for layer in model:
            layer.delay_wgrad = False
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_fully_shard_is_refused(ranks: RankPool) -> None:
    ranks.run(sharded, world=4)
