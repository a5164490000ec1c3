"""Tensor parallelism inside data parallelism: hooks, local SGD and optimizers of others, unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nn_dense import VOCAB, DenseLM, ParallelLM, shard_of
from test_pipelines import grid
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_plans import dense_llama, full, loss_of, mesh_of, parallelized, tokens

from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

STEPS, RATE = 12, 0.5


def _data(replicas: int) -> tuple[Tensor, Tensor]:
    """What follows each id is a rule, which a model can learn."""
    ids = torch.randint(0, VOCAB, (replicas, 4, 6), generator=torch.Generator().manual_seed(3))
    return ids, (ids * 5 + 1) % VOCAB


def _dense() -> tuple[DenseLM, list[float]]:
    """The unsharded model after plain steps on the whole batch, and its losses."""
    model, losses = tnn.init_weights_(DenseLM(), seed=3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ids, targets = (t.flatten(0, 1) for t in _data(2))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    return model, losses


def _train(ctx: RankContext, prepare: Any) -> tuple[nn.Module, list[float], Any]:
    """A tensor-parallel model in DDP; ``prepare(ddp, dp)`` gives the optimizer. Losses are of all replicas."""
    groups = grid(ctx, ("dp", "tp"), (2, 2))
    tp, dp = groups["tp"].group_name, groups["dp"]
    model = tnn.init_weights_(ParallelLM(tp, sequence_parallel=True, sequence_dim=1), seed=3)
    ddp = DistributedDataParallel(model, process_group=dp)
    optimizer = prepare(ddp, dp)
    ids, targets = (t[dp.rank()] for t in _data(2))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = tnn.vocab_parallel_cross_entropy(ddp(ids), targets, tp, VOCAB)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=dp)
        losses.append(total.item() / 2)
    return model, losses, dp


def _compare(model: nn.Module, dense: nn.Module, **tolerance: float) -> None:
    full = dict(dense.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, shard_of(p, full[name]), msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def _plain(ddp: DistributedDataParallel, dp: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=RATE)


def _half(ddp: DistributedDataParallel, dp: Any) -> torch.optim.Optimizer:
    ddp.register_comm_hook(dp, default_hooks.fp16_compress_hook)
    return _plain(ddp, dp)


def _power(ddp: DistributedDataParallel, dp: Any) -> torch.optim.Optimizer:
    state = powerSGD_hook.PowerSGDState(dp, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _plain(ddp, dp)


def _local(warmup: int, period: int) -> Any:
    def prepare(ddp: DistributedDataParallel, dp: Any) -> Any:
        # Averages over the data-parallel group only: replicas of the same shard.
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        state = post_localSGD_hook.PostLocalSGDState(dp, alone, start_localSGD_iter=warmup)
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=period, warmup_steps=warmup, process_group=dp)
        return PostLocalSGDOptimizer(optim=_plain(ddp, dp), averager=averager)

    return prepare


def _exact(ctx: RankContext, hook: str) -> None:
    dense, losses = _dense()
    model, found, _ = _train(ctx, {"none": _plain, "every step": _local(2, 1)}[hook])
    assert found == pytest.approx(losses, rel=1e-9)
    _compare(model, dense, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("hook", ["none", "every step"])
def test_equal_to_the_unsharded_model(ranks: RankPool, hook: str) -> None:
    """Also local SGD that averages after every step, since a step of SGD is linear."""
    ranks.run(_exact, hook, world=4)


def _near(ctx: RankContext, hook: str) -> None:
    _, losses = _dense()
    prepare, near = {"fp16": (_half, 2e-3), "PowerSGD": (_power, 0.1), "local SGD": (_local(2, 3), 0.1)}[hook]
    model, found, dp = _train(ctx, prepare)
    assert found[0] == pytest.approx(losses[0], rel=1e-9)
    assert sum(found) == pytest.approx(sum(losses), rel=near), (found, losses)
    assert found != pytest.approx(losses, rel=1e-12), "the hook did nothing"
    for p in model.parameters():  # replicas agree: the last step averaged
        copies = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(copies, p.detach(), group=dp)
        torch.testing.assert_close(*copies, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("hook", ["fp16", "PowerSGD", "local SGD"])
def test_converges_like_the_unsharded_model(ranks: RankPool, hook: str) -> None:
    if hook == "PowerSGD" and torch.cuda.is_available():
        pytest.skip("torch's hook waits for a GPU where there is one, also for tensors on the CPU")
    ranks.run(_near, hook, world=4)


def _lamb(ctx: RankContext) -> None:
    """LAMB scales by norms of whole weights: those of DTensors are."""
    from timm.optim import Lamb

    dense = dense_llama(5)
    sharded = parallelized(copy.deepcopy(dense), mesh_of(ctx))
    ids, targets = tokens(6, 2, 4 * ctx.world)
    for model in (dense, sharded):
        optimizer = Lamb(model.parameters(), lr=0.05)
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model, ids, targets).backward()
            optimizer.step()
    for (name, want), got in zip(dense.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(got), want, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world", [2, 4])
def test_lamb_of_timm(ranks: RankPool, world: int) -> None:
    pytest.importorskip("timm", reason="needs timm: pip install timm")
    ranks.run(_lamb, world=world)
