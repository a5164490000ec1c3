"""Path "fused" and "auto" while another communicator is at work on the same GPUs, as in training with FSDP.

Ranks enqueue the two kinds of work in different orders. So a kernel may hold all multiprocessors of one GPU while it
waits for a rank whose kernel cannot start, because NCCL's, which holds multiprocessors there, waits for the first GPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_behaviour import differs, unchecked
from fused_checks import FUSED, new_group
from gemm_checks import randn
from hopper_gpus import COUNT, hopper_gpus
from op_checks import on_device

import tpkernels as tpk
from tpkernels.testing import RankPool, poison_

Tensor = torch.Tensor
BF16 = torch.bfloat16
LIMIT = "30"  # seconds until a wait inside a kernel is an error, which says who waits for whom
NCCL_SIZES = [1 << 10, 3 << 12, 1 << 16, 5 << 17, 1 << 21, 3 << 22, 1 << 24]  # of 4 bytes
FEW_ROUNDS = 20  # between two moments at which a rank waits for its device

# Else streams share hardware queues, and what one of them waits for delays the others.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
# NCCL as it comes, and with many CTAs, so that few multiprocessors are left.
ENVIRONMENTS = {"usual": QUEUES, "wide": {**QUEUES, "NCCL_MIN_CTAS": "32", "NCCL_MAX_CTAS": "32"}}


pytestmark = [*hopper_gpus(), pytest.mark.timeout(600)]


def _pool(env: dict[str, str]) -> RankPool:
    return RankPool(COUNT, "nccl", timeout=240.0, env={"TPK_CHECK": "0", "TPK_COMM_TIMEOUT_S": LIMIT, **env})


@pytest.fixture(scope="module", params=list(ENVIRONMENTS))
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with _pool(ENVIRONMENTS[request.param]) as ranks:
        yield ranks


def _calls(ctx: Any, path: str, seed: int) -> list[Callable[[], Tensor]]:
    """All three operations: so large that they overlap, and so small that they are one kernel beside the product."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    make = lambda *shape: randn(ctx.world, *shape, dtype=BF16, generator=generator)[ctx.rank]  # noqa: E731
    calls: list[Callable[[], Tensor]] = []
    for rows, n, k in ((8192, 2048, 4096), (64, 1024, 2048)):
        for op, m in (
            (tpk.all_gather_matmul, rows // ctx.world),
            (tpk.matmul_reduce_scatter, rows // ctx.world * ctx.world),
            (tpk.matmul_all_reduce, rows),
        ):
            x, w = make(m, k), make(k, n)
            calls.append(lambda op=op, x=x, w=w: op(x, w, ctx.group, path=path))
    return calls


class _Fused:
    """The calls, each against what it gave when nothing else ran."""

    def __init__(self, ctx: Any, path: str, seed: int) -> None:
        self.calls = _calls(ctx, path, seed)
        self.firsts = [call() for call in self.calls]
        for call, first in zip(_calls(ctx, "nccl+cublas", seed), self.firsts, strict=True):
            other = call().float()
            error = (first.float() - other).abs().max() / other.abs().max()
            assert float(error) < 2.0**-6, f"not the product: {float(error):.4f}"
        self.wrong = torch.zeros(len(self.calls), dtype=torch.int64)
        self.together = random.Random(seed)

    def enqueue(self) -> None:
        pick = self.together.randrange(len(self.calls))
        out = self.calls[pick]()
        self.wrong[pick] += differs(out, self.firsts[pick])
        poison_(out)


class _Beside:
    """Collectives of another group over the same ranks, on a stream of their own."""

    KINDS = ("all_reduce", "all_gather", "reduce_scatter")

    def __init__(self, ctx: Any, seed: int) -> None:
        self.ctx, self.group = ctx, new_group(ctx, list(range(ctx.world)))
        self.side, self.together = torch.cuda.Stream(), random.Random(seed + 1)
        # Made once: allocating may wait for the device.
        self.whole, self.part = torch.zeros(max(NCCL_SIZES)), torch.zeros(max(NCCL_SIZES) // ctx.world)
        everyone = torch.arange(1.0, ctx.world + 1)
        self.each, self.sum, self.wrong = everyone, everyone.sum(), torch.zeros((), dtype=torch.int64)
        torch.cuda.synchronize()

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.side)

    def enqueue(self, kind: str = "", size: int = 0) -> None:
        kind = kind or self.together.choice(self.KINDS)
        size = (size or self.together.choice(NCCL_SIZES)) // self.ctx.world
        whole, part = self.whole[: size * self.ctx.world], self.part[:size]
        with self.stream():
            (part if kind == "all_gather" else whole).fill_(self.ctx.rank + 1.0)
            if kind == "all_gather":
                dist.all_gather_into_tensor(whole, part, group=self.group)
                self.wrong += (whole.view(-1, size) != self.each.unsqueeze(1)).any()
            elif kind == "all_reduce":
                dist.all_reduce(whole, group=self.group)
                self.wrong += (whole != self.sum).any()
            else:
                dist.reduce_scatter_tensor(part, whole, group=self.group)
                self.wrong += (part != self.sum).any()

    def warm_up(self) -> None:
        """What loads code, connects, or takes memory of the device happens now, not among kernels that wait."""
        for kind in self.KINDS:
            for size in NCCL_SIZES:
                self.enqueue(kind, size)
                torch.cuda.synchronize()


def _prepared(ctx: Any, path: str, seed: int) -> tuple[_Fused, _Beside]:
    beside = _Beside(ctx, seed)
    beside.warm_up()
    fused = _Fused(ctx, path, seed)
    for _ in range(2 * len(fused.calls)):
        fused.enqueue()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    ctx.barrier()
    torch.cuda.synchronize()
    return fused, beside


def _judge(fused: _Fused, beside: _Beside, rounds: int) -> None:
    torch.cuda.synchronize()
    tpk.synchronize()
    wrong = fused.wrong.tolist()
    assert not any(wrong), f"wrong results of {rounds} rounds, by kind of call: {wrong}"
    assert not int(beside.wrong), f"{int(beside.wrong)} wrong results of the other communicator"


def _orders(draw: random.Random, most_ahead: int = 5) -> Iterator[bool]:
    """FEW_ROUNDS of each kind, neither of them far ahead: whether the next one is fused."""
    done = [0, 0]
    while sum(done) < 2 * FEW_ROUNDS:
        fused = draw.random() < 0.5
        if done[fused] == FEW_ROUNDS or done[fused] - done[not fused] >= most_ahead:
            fused = not fused
        done[fused] += 1
        yield fused


def _any_order(ctx: Any, path: str, rounds: int, seed: int, alike: bool = False) -> None:
    """Each kind of work in one order on all ranks, and the two in any order, host and device late now and then.

    alike: all in one order on all ranks.
    """
    with unchecked():
        fused, beside = _prepared(ctx, path, seed)
        alone = random.Random(seed + 100 + ctx.rank)
        order = random.Random(seed + 2) if alike else alone
        for _ in range(rounds // FEW_ROUNDS):
            for is_fused in _orders(order):
                if alone.random() < 0.1:
                    time.sleep(alone.uniform(0, 0.003))
                work = fused if is_fused else beside
                with torch.cuda.stream(None) if is_fused else beside.stream():
                    if alone.random() < 0.2:
                        torch.cuda._sleep(alone.randrange(1_000_000))
                work.enqueue()
            torch.cuda.synchronize()  # every rank has enqueued as much
        _judge(fused, beside, rounds)


def _opposite_orders(ctx: Any, path: str, rounds: int, seed: int) -> None:
    """On one half of the ranks NCCL's kernel already waits when the call begins, on the other half the call does."""
    with unchecked():
        fused, beside = _prepared(ctx, path, seed)
        for i in range(rounds):
            works = [fused, beside] if (i + ctx.rank) % 2 == 0 else [beside, fused]
            for work in works:
                work.enqueue()
                time.sleep(0.002)  # what was enqueued has begun, and waits
            if i % FEW_ROUNDS == 0:
                torch.cuda.synchronize()
        _judge(fused, beside, rounds)


def _a_rank_late(ctx: Any, path: str, rounds: int, seed: int) -> None:
    """NCCL's kernels fill what they can on all ranks but one, long before that one comes with both kinds of work."""
    with unchecked():
        fused, beside = _prepared(ctx, path, seed)
        for i in range(rounds):
            if ctx.rank == i % ctx.world:
                time.sleep(0.01)
            for work in [beside, fused, fused, beside][:: 1 if ctx.rank % 2 else -1]:
                work.enqueue()
            torch.cuda.synchronize()
        _judge(fused, beside, rounds)


@pytest.mark.parametrize("path", [FUSED, "auto"])
def test_any_order(pool, seed, path):
    pool.run(on_device, _any_order, path, 400, seed)


@pytest.mark.parametrize("path", [FUSED, "auto"])
def test_opposite_orders(pool, seed, path):
    pool.run(on_device, _opposite_orders, path, 300, seed)


@pytest.mark.parametrize("path", [FUSED, "auto"])
def test_a_rank_late(pool, seed, path):
    pool.run(on_device, _a_rank_late, path, 100, seed)


@pytest.mark.parametrize("path", [FUSED, "auto"])
def test_one_hardware_queue(seed, path):
    """As training frameworks set it that rely on the order in which kernels are enqueued, the same on all ranks."""
    with _pool({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) as ranks:
        ranks.run(on_device, _any_order, path, 200, seed, True)
