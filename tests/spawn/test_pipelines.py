"""Tensor-parallel layers as stages of torch.distributed.pipelining, also beside data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_checks import new_group
from nn_dense import VOCAB, DenseLM, ParallelLM, assert_grads, perturb
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

TP, STAGES, MICROBATCHES, LENGTH = 2, 4, 4, 6

# Which stages the first and the second rank of a pipeline have.
SCHEDULES = {
    "ScheduleGPipe": ((0,), (1,)),
    "Schedule1F1B": ((0,), (1,)),
    "ScheduleInterleaved1F1B": ((0, 2), (1, 3)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)),
    "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
}


class Stage(nn.Module):
    """Consecutive parts of the model."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def cut(model: ParallelLM, count: int) -> list[Stage]:
    parts = [model.embed, *model.blocks, nn.Sequential(model.norm, model.head)]
    each = len(parts) // count
    return [Stage(*parts[i * each : (i + 1) * each]) for i in range(count)]


def grid(ctx: RankContext, names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Of every dimension the group that this rank is in; the last one's ranks are neighbours."""
    ranks, mine = torch.arange(ctx.world).view(sizes), {}
    for dim, name in enumerate(names):
        for members in ranks.movedim(dim, -1).reshape(-1, sizes[dim]).tolist():
            group = new_group(ctx, members)
            if ctx.rank in members:
                mine[name] = group
    return mine


def _pipeline(ctx: RankContext, name: str, delayed: bool, replicas: int = 1) -> None:
    groups = grid(ctx, ("dp", "pp", "tp"), (replicas, 2, TP))
    tp, pp = groups["tp"], groups["pp"]
    replica = dist.get_rank(groups["dp"])
    draw = torch.Generator().manual_seed(7)
    shape = (2, replicas, 2 * MICROBATCHES, LENGTH)
    ids, targets = torch.randint(0, VOCAB, shape, generator=draw)

    dense = tnn.init_weights_(DenseLM(bias=True), seed=3)
    model = tnn.init_weights_(
        ParallelLM(tp.group_name, bias=True, sequence_parallel=True, sequence_dim=1), seed=3
    )
    perturb(dense, 5)
    perturb(model, 5)
    F.cross_entropy(dense(ids.flatten(0, 1)).flatten(0, 1), targets.flatten()).backward()
    linears = [m for m in model.modules() if hasattr(m, "delay_wgrad")]
    assert len(linears) == 15
    for layer in linears:
        layer.delay_wgrad = delayed

    own = SCHEDULES[name][pp.rank()]
    pieces = cut(model, STAGES if len(own) == 2 else 2)
    stages = []
    for index in own:
        piece: nn.Module = pieces[index]
        dw = (lambda piece=piece: lambda: tnn.backward_dw(piece)) if delayed and _has_linears(piece) else None
        if replicas > 1:
            piece = DistributedDataParallel(piece, process_group=groups["dp"])
        stages.append(PipelineStage(piece, index, len(pieces), ctx.device, group=pp, dw_builder=dw))

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return tnn.vocab_parallel_cross_entropy(logits, target, tp.group_name, VOCAB)

    schedule = getattr(schedules, name)(stages if len(own) == 2 else stages[0], MICROBATCHES, loss_fn=loss_of)
    first, last = 0 in own, len(pieces) - 1 in own
    losses: list[Tensor] = []
    schedule.step(
        *((ids[replica],) if first else ()),
        **({"target": targets[replica], "losses": losses} if last else {}),
    )
    if last:
        want = F.cross_entropy(dense(ids[replica]).flatten(0, 1), targets[replica].flatten())
        torch.testing.assert_close(torch.stack(losses).mean(), want)
    assert not any(layer.pending_dw for layer in linears)
    mine = {id(p) for index in own for p in pieces[index].parameters()}
    other = [n for n, p in model.named_parameters() if id(p) not in mine]
    for absent in other:
        assert model.get_parameter(absent).grad is None, absent
    _only(model, other)
    _only(dense, other)
    assert_grads(model, dense, f"{name}, stages {own}")


def _has_linears(module: nn.Module) -> bool:
    return any(hasattr(m, "delay_wgrad") for m in module.modules())


def _only(module: nn.Module, without: list[str]) -> None:
    for name in without:
        owner, _, leaf = name.rpartition(".")
        delattr(module.get_submodule(owner), leaf)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_give_the_gradients_of_the_whole_model(ranks: RankPool, name: str) -> None:
    if name == "ScheduleZBVZeroBubble" and torch.__version__ < (2, 14):
        pytest.skip("torch 2.11 does not get through its own setup of these stages over gloo")
    ranks.run(_pipeline, name, "ZeroBubble" in name or "ZBV" in name, world=4)


def test_beside_data_parallelism(seed: int) -> None:
    with RankPool(8, "gloo", seed=seed) as pool:
        pool.run(_pipeline, "Schedule1F1B", False, 2)
