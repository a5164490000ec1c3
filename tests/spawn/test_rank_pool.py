"""RankPool: results, errors, hangs, deaths and restarts; gradcheck_ranks on gradients that are right and wrong."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpkernels.testing import (
    GradcheckError,
    RankContext,
    RankDiedError,
    RankError,
    RankPool,
    RankTimeoutError,
    gradcheck_ranks,
)
from tpkernels.testing._worker import WorkerConfig, device_of
from tpkernels.testing.rank_pool import SHARED_GPU_ENV


@dataclass
class Load:
    """A class of this test file, to show that arguments and results of such types travel."""

    value: int


def describe(ctx: RankContext, load: Load) -> tuple[int, int, str, str, int, Load]:
    return (
        ctx.rank,
        ctx.world,
        ctx.device.type,
        ctx.backend,
        torch.get_num_threads(),
        Load(load.value + ctx.rank),
    )


def total(ctx: RankContext, x: torch.Tensor) -> dict[str, Any]:
    x = x.to(ctx.device) * (ctx.rank + 1)
    dist.all_reduce(x, group=ctx.group)
    named = dist.distributed_c10d._resolve_process_group(ctx.group_name)
    return {
        "sum": [x.requires_grad_() * 2],
        "size": dist.get_world_size(named),
        "check": os.environ.get("TPK_CHECK"),
    }


def draw(ctx: RankContext) -> float:
    return float(torch.rand(()))


def pid(ctx: RankContext) -> int:
    return os.getpid()


def fail_on(ctx: RankContext, rank: int, wait: bool) -> None:
    if ctx.rank == rank:
        raise KeyError("the missing thing")
    if wait:
        ctx.barrier()


def fail_everywhere(ctx: RankContext) -> None:
    raise ValueError("all of us")


def lose_cuda(ctx: RankContext) -> None:
    raise RuntimeError("CUDA error: unspecified launch failure")


def hang_on(ctx: RankContext, rank: int) -> None:
    if ctx.rank == rank:
        time.sleep(100)


def die_on(ctx: RankContext, rank: int) -> None:
    if ctx.rank == rank:
        os._exit(7)
    ctx.barrier()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_world_size(ranks: RankPool, world: int) -> None:
    out = ranks.run(describe, Load(10), world=world)
    assert out == [(r, world, "cpu", "gloo", 1, Load(10 + r)) for r in range(world)]
    sums = ranks.run(total, torch.ones(3), world=world, jitter=0.05)
    assert [s["size"] for s in sums] == [world] * world
    assert all(s["check"] == os.environ["TPK_CHECK"] for s in sums)
    assert all(torch.equal(s["sum"][0], torch.full((3,), world * (world + 1.0))) for s in sums)


def test_runs_share_processes_and_seed(ranks: RankPool) -> None:
    assert ranks.run(pid) == ranks.run(pid)
    first = ranks.run(draw, world=2)
    assert first[0] == first[1]
    assert ranks.run(draw, world=2) == first


def test_error_of_every_rank_keeps_the_pool(ranks: RankPool) -> None:
    before = ranks.run(pid)
    with pytest.raises(RankError, match=r"rank [0-3] raised ValueError: all of us") as caught:
        ranks.run(fail_everywhere)
    assert isinstance(caught.value.__cause__, ValueError)
    assert set(caught.value.failures) == {0, 1, 2, 3}
    assert ranks.run(pid) == before


def test_bad_arguments(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        ranks.run(lambda ctx: None)
    with pytest.raises(ValueError, match="world must be from 1 to the pool's size 4, got 5"):
        ranks.run(pid, world=5)
    with pytest.raises(ValueError, match="backend must be"):
        RankPool(1, "mpi")
    with pytest.raises(ValueError, match="size must be"):
        RankPool(0)
    with pytest.raises(ValueError, match="start_method must be 'spawn' or 'forkserver', got 'fork'"):
        RankPool(1, start_method="fork")
    with pytest.raises(ValueError, match="'forkserver' is for CPU ranks"):
        RankPool(1, "nccl", start_method="forkserver")


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_failure_hang_and_death_restart_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool of two through every kind of accident; each must end soon, name its rank, and leave a usable pool."""
    with RankPool(2) as pool:
        with pytest.raises(RankError, match="rank 1 raised KeyError") as failed:
            pool.run(fail_on, 1, True, grace=0.5)  # Rank 0 waits for rank 1 for ever.
        assert failed.value.rank == 1
        assert "in fail_on" in failed.value.failures[1]
        assert pool.run(pid, world=1)
        assert pool.starts == 2

        with pytest.raises(RankError, match="CUDA error"):
            pool.run(lose_cuda)  # On every rank alike, but what follows would fail too.
        assert pool.run(pid)
        assert pool.starts == 3

        with pytest.raises(RankTimeoutError, match=r"rank 1 did not finish within 0.5 s") as hung:
            pool.run(hang_on, 1, timeout=0.5)
        assert hung.value.rank == 1
        assert "in hang_on" in hung.value.failures[1]
        assert pool.run(pid, world=2)
        assert pool.starts == 4

        with monkeypatch.context() as patch:
            patch.setattr(RankPool, "_wait_for_answers", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.run(draw)  # Its answers must not be taken for those of the next run.

        with pytest.raises(RankDiedError, match=r"rank 1 died \(exit code 7\)"):
            pool.run(die_on, 1)
        assert pool.starts == 5


class ColumnProduct(torch.autograd.Function):
    """x @ w[rank] with x replicated: the gradient of x has to be summed over the ranks; ``scale`` spoils that of w."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, reduce: bool, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.group, ctx.reduce, ctx.scale = group, reduce, scale
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dx = grads[0] @ w.t()
        if ctx.reduce:
            dist.all_reduce(dx, group=ctx.group)
        return dx, ctx.scale * (x.t() @ grads[0]), None, None, None


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, factor: float) -> torch.Tensor:
        ctx.factor = factor
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0] * ctx.factor, None, None


def check_column(ctx: RankContext, seed: int, reduce: bool, scale: float, full: bool) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)  # Every rank has the run's seed, so x is replicated.
    columns = ctx.rank  # Rank 0 has an empty shard.
    w = torch.randn(4, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + ctx.rank))

    def column(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = ColumnProduct.apply(x, w, ctx.group, reduce, scale)
        assert isinstance(out, torch.Tensor)
        return out.tanh()

    x, w = x.to(ctx.device), w.to(ctx.device)
    gradcheck_ranks(column, (x, w), group=ctx.group, replicated=(True, False), full=full, seed=seed)


def check_sum(ctx: RankContext, seed: int, factor: float) -> None:
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + ctx.rank))
    gradcheck_ranks(
        lambda x: SumOfRanks.apply(x * x, ctx.group, factor), (x,), group=ctx.group, output_replicated=True
    )


def check_not_replicated(ctx: RankContext) -> None:
    x = torch.full((2,), float(ctx.rank), dtype=torch.float64)
    gradcheck_ranks(lambda x: 2 * x, (x,), group=ctx.group, replicated=True)


@pytest.mark.parametrize("full", [False, True])
def test_gradcheck_accepts_right_gradients(ranks: RankPool, seed: int, full: bool) -> None:
    ranks.run(check_column, seed, True, 1.0, full, world=3)
    ranks.run(check_sum, seed, 1.0, world=3)


def test_gradcheck_catches_wrong_gradients(ranks: RankPool, seed: int) -> None:
    with pytest.raises(RankError, match="gradient of input 0 is declared replicated") as caught:
        ranks.run(check_column, seed, False, 1.0, False, world=3)
    assert isinstance(caught.value.__cause__, GradcheckError)
    assert len(caught.value.failures) == 3
    with pytest.raises(RankError, match="input 1 moved on rank 2, random direction 0"):
        ranks.run(check_column, seed, True, 1.001, False, world=3)
    with pytest.raises(RankError, match="input 0 moved on rank 0"):
        ranks.run(check_sum, seed, 3.0, world=3)
    with pytest.raises(RankError, match="input 0 is declared replicated"):
        ranks.run(check_not_replicated, world=2)


@pytest.mark.gpun
def test_pool_of_gpus(gpu_ranks: RankPool, seed: int) -> None:
    for world in sorted({1, 2, gpu_ranks.size}):
        out = gpu_ranks.run(describe, Load(0), world=world)
        assert out == [(r, world, "cuda", "nccl", 1, Load(r)) for r in range(world)]
        sums = gpu_ranks.run(total, torch.ones(3), world=world)
        assert all(torch.equal(s["sum"][0], torch.full((3,), world * (world + 1.0))) for s in sums)
    gpu_ranks.run(check_column, seed, True, 1.0, True, world=2)
    with pytest.raises(RankError, match="gradient of input 0 is declared replicated"):
        gpu_ranks.run(check_column, seed, False, 1.0, False, world=2)


def visible_settings(ctx: RankContext) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in (*SHARED_GPU_ENV, "TPK_COMM_TIMEOUT_S")}


@pytest.mark.gpu1
def test_ranks_that_share_a_gpu() -> None:
    with RankPool(2, share_gpu=True, env={"TPK_COMM_TIMEOUT_S": "7"}) as pool:
        out = pool.run(describe, Load(0))
        assert out == [(r, 2, "cuda", "gloo", 1, Load(r)) for r in range(2)]
        assert pool.run(visible_settings) == [SHARED_GPU_ENV | {"TPK_COMM_TIMEOUT_S": "7"}] * 2
        sums = pool.run(total, torch.ones(3))  # gloo carries CUDA tensors
        assert all(torch.equal(s["sum"][0], torch.full((3,), 3.0)) for s in sums)


def test_sharing_needs_gloo_and_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"share_gpu needs the backend 'gloo', got 'nccl': NCCL refuses"):
        RankPool(2, "nccl", share_gpu=True)
    if torch.cuda.is_available():
        return
    with RankPool(1, share_gpu=True) as pool, pytest.raises(RankError, match="the start of the pool: rank 0"):
        pool.start()
    assert pool.starts == 1


@pytest.mark.parametrize(
    "backend, share_gpu, device",
    [("gloo", False, "cpu"), ("nccl", False, "cuda:3"), ("gloo", True, "cuda:0")],
)
def test_devices_of_ranks(backend: str, share_gpu: bool, device: str) -> None:
    config = WorkerConfig(3, 4, backend, share_gpu, 0, 1.0, "", {})
    assert device_of(config) == torch.device(device)
