"""Our styles with FSDP2, DDP, recomputation, loss_parallel and clipping: five steps beside the dense model, float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from fused_checks import count_groups_alike
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch_plans import dense_llama, full, loss_of, mesh_of, parallelized, tokens

import tpkernels as tpk
from tpkernels.testing import RankContext, RankPool

STEPS, BATCH, ROWS, CLIP = 5, 4, 8, 0.5


def train(
    model: nn.Module,
    parameters: list[nn.Parameter],
    seed: int,
    mine: Callable[[Tensor], Tensor] = lambda t: t,
    context: Callable[[], object] = nullcontext,
    clip: Callable[[list[nn.Parameter]], Tensor] = lambda parameters: clip_grad_norm_(parameters, CLIP),
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradient norms of every step."""
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        ids, targets = (mine(t) for t in tokens(seed + step, BATCH, ROWS))
        optimizer.zero_grad()
        with context():
            loss = loss_of(model, ids, targets)
            loss.backward()
        losses.append(full(loss.detach()))
        norms.append(full(clip(parameters)))
        optimizer.step()
    return losses, norms


def check(
    ctx: RankContext,
    seed: int,
    model: nn.Module,
    parameters: Callable[[], list[nn.Parameter]],
    *,
    mine: Callable[[Tensor], Tensor] = lambda t: t,
    mean: Callable[[Tensor], Tensor] = lambda t: t,
    context: Callable[[], object] = nullcontext,
    clip: Callable[[list[nn.Parameter]], Tensor] = lambda parameters: clip_grad_norm_(parameters, CLIP),
    weights: Callable[[], dict[str, Tensor]] | None = None,
) -> None:
    dense = dense_llama(seed)
    losses, norms = train(dense, list(dense.parameters()), seed)
    assert min(norms) > CLIP, "clipping has to matter"
    with tpk.record_paths() as log:
        got, got_norms = train(model, parameters(), seed, mine, context, clip)
    assert {"all_gather_matmul", "matmul_reduce_scatter"} <= {op for op, _ in log.counts}, log
    for step in range(STEPS):
        torch.testing.assert_close(mean(got[step]), losses[step], msg=lambda m, s=step: f"loss {s}: {m}")
        torch.testing.assert_close(got_norms[step], norms[step], msg=lambda m, s=step: f"norm {s}: {m}")
    expected = dense.state_dict()
    final = weights() if weights else {n: full(p) for n, p in model.state_dict().items()}
    assert final.keys() == expected.keys()
    for name, value in final.items():
        torch.testing.assert_close(
            value, expected[name], msg=lambda m, n=name: f"{n}: {m}", rtol=1e-6, atol=1e-8
        )


def fsdp(ctx: RankContext, seed: int, gather_once: bool) -> None:
    count_groups_alike(ctx)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(dense_llama(seed), mesh["tp"], gather_once=gather_once)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    start = dense_llama(seed).state_dict()
    for name, p in model.named_parameters():
        assert p.device_mesh.ndim == 2
        assert torch.equal(p.full_tensor(), start[name]), name
    rank = mesh["dp"].get_local_rank()
    check(
        ctx,
        seed,
        model,
        lambda: list(model.parameters()),
        mine=lambda t: t.chunk(2)[rank],
        mean=lambda t: sum_over(mesh["dp"], t) / 2,
    )


def sum_over(mesh: DeviceMesh, t: Tensor) -> Tensor:
    return tpk.regions.all_reduce(t.reshape(1), mesh)[0]


@pytest.mark.parametrize("gather_once", [False, True])
def test_fsdp_over_tp(ranks: RankPool, seed: int, gather_once: bool) -> None:
    ranks.run(fsdp, seed, gather_once, world=4)


def ddp(ctx: RankContext, seed: int, gather_once: bool) -> None:
    """As torch's own tensor parallelism goes under DDP, which gets plain tensors; the DTensors are views of them."""
    count_groups_alike(ctx)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(dense_llama(seed), mesh["tp"], gather_once=gather_once)
    names = {name: (p.placements, p.shape, p.stride()) for name, p in model.named_parameters()}
    _pre_dp_module_transform(model)
    local = dict(model.named_parameters())  # later the module has DTensors in their place
    both = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    rank = mesh["dp"].get_local_rank()

    def weights() -> dict[str, Tensor]:
        return {
            name: DTensor.from_local(
                p.detach(), mesh["tp"], names[name][0], shape=names[name][1], stride=names[name][2]
            ).full_tensor()
            for name, p in local.items()
        }

    def norm(parameters: list[nn.Parameter]) -> Tensor:
        """Of the whole gradients: those of sharded parameters are parts."""
        squares = [(p.grad.square().sum(), isinstance(names[name][0][0], Shard)) for name, p in local.items()]
        cut = torch.stack([value for value, sharded in squares if sharded]).sum()
        rest = torch.stack([value for value, sharded in squares if not sharded]).sum()
        total = (sum_over(mesh["tp"], cut) + rest).sqrt()
        for p in parameters:
            p.grad.mul_(torch.clamp(CLIP / (total + 1e-6), max=1.0))
        return total

    check(
        ctx,
        seed,
        both,
        lambda: list(local.values()),
        mine=lambda t: t.chunk(2)[rank],
        mean=lambda t: sum_over(mesh["dp"], t) / 2,
        weights=weights,
        clip=norm,
    )


@pytest.mark.parametrize("gather_once", [False, True])
def test_ddp_beside_tp(ranks: RankPool, seed: int, gather_once: bool) -> None:
    ranks.run(ddp, seed, gather_once, world=4)


def recomputed(ctx: RankContext, seed: int) -> None:
    for gather_once in (False, True):
        model = parallelized(dense_llama(seed), mesh_of(ctx), gather_once=gather_once)
        model.recompute = True
        check(ctx, seed, model, lambda model=model: list(model.parameters()))


def parallel_loss(ctx: RankContext, seed: int) -> None:
    model = parallelized(dense_llama(seed), mesh_of(ctx), loss_parallel=True)
    assert isinstance(model(tokens(seed, BATCH, ROWS)[0]), DTensor)
    check(ctx, seed, model, lambda: list(model.parameters()), context=loss_parallel)


def plain(ctx: RankContext, seed: int) -> None:
    for kind in ({}, {"local": False}, {"gather_once": True}):
        model = parallelized(dense_llama(seed), mesh_of(ctx), **kind)
        check(ctx, seed, model, lambda model=model: list(model.parameters()))


RUNS = {f.__name__: f for f in (recomputed, parallel_loss, plain)}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_training(ranks: RankPool, world: int, name: str, seed: int) -> None:
    ranks.run(RUNS[name], seed, world=world)
