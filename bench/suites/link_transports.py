"""Launching transfers: by the copy engine, by SMs, by torch.distributed; as ``launch(i)`` for buffer set i."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..context import Context
from ..kernels import JOB_WORDS, LinkKernels, link_kernels
from ..suite import Check, Skip
from .link_cases import Transport
from .link_exchange import Exchange, Move, agreed

__all__ = ["SmCopies", "by_collectives", "by_engine", "kernels_for"]

Launch = Callable[[int], object]


def kernels_for(transport: Transport, context: Context) -> tuple[LinkKernels, int]:
    """Our kernels on this rank's GPU, and how many CTAs the transport has there.

    Raises:
        Skip: no CuPy, too old a GPU, or one with fewer SMs.
    """
    assert context.device.index is not None
    kernels = link_kernels(context.device.index)
    if transport.kind == "bulk" and not kernels.has_bulk:
        raise Skip("bulk copies need a GPU of compute capability 9.0 or newer")
    if transport.sms > kernels.sms:
        raise Skip(f"{transport.sms} SMs asked for, the GPU has {kernels.sms}")
    return kernels, transport.sms or kernels.sms


def by_engine(exchange: Exchange, transport: Transport) -> Launch:
    """Copies of torch: between contiguous tensors of one dtype they are cudaMemcpyAsync, hence the copy engine's.

    Chunks go round robin over the peers: the first chunk of every piece, then the second.
    """
    plans: list[list[tuple[Tensor, Tensor]]] = []
    for i in range(exchange.copies):
        epoch = exchange.epochs[i : i + 1]
        cut = [_chunks(move, transport.chunks) for move in exchange.moves(i, pull=transport.pull)]
        plan: list[tuple[Tensor, Tensor]] = []
        for of_peers in zip(*cut, strict=True):
            for move in of_peers:
                plan.append((move.dst, move.src))
                if transport.flag:
                    plan.append((move.flag, epoch))
        plans.append(plan)

    def launch(i: int) -> None:
        for dst, src in plans[i % len(plans)]:
            dst.copy_(src)

    return launch


def _chunks(move: Move, count: int) -> list[Move]:
    """``count`` moves of nearly equal size; every one but the last a multiple of 256 bytes."""
    elements = max(128, -(-move.src.numel() // count // 128) * 128)
    ends = zip(move.dst.split(elements), move.src.split(elements), strict=True)
    return [Move(dst, src, move.flag) for dst, src in ends]


class SmCopies:
    """Copies by our kernels: a table of jobs a buffer set on the device, and the counters of one variant.

    Args:
        sets: for every buffer set (destination, source, flag or None), all of equally many bytes.
        context: of this rank.
        transport: kind "bulk" or "lsu".

    Raises:
        Skip: see :func:`kernels_for`.
    """

    def __init__(
        self, sets: list[list[tuple[Tensor, Tensor, Tensor | None]]], context: Context, transport: Transport
    ) -> None:
        self.kernels, self.sms = kernels_for(transport, context)
        self.context, self.transport = context, transport
        words = [
            [
                (dst.data_ptr(), src.data_ptr(), flag.data_ptr() if flag is not None else 0)
                for dst, src, flag in jobs
            ]
            for jobs in sets
        ]
        self.table = torch.tensor(words, dtype=torch.int64, device=context.device)
        assert self.table.shape[2] == JOB_WORDS
        self.count = self.table.shape[1]
        self.nbytes = sets[0][0][1].nbytes
        self.spread = self.count > 1 and all(len({src for _, src, _ in jobs}) == 1 for jobs in words)
        self.counters = torch.zeros(2, dtype=torch.int32, device=context.device)  # finished, late
        self._kept = sets  # the table holds addresses

    @classmethod
    def of(cls, exchange: Exchange, transport: Transport) -> SmCopies:
        """The copies of an exchange."""
        sets = [
            [
                (m.dst, m.src, m.flag if transport.flag else None)
                for m in exchange.moves(i, pull=transport.pull)
            ]
            for i in range(exchange.copies)
        ]
        return cls(sets, exchange.context, transport)

    def launch(self, i: int) -> None:
        """Do the copies of set i; raise flags to epoch i + 1."""
        i %= self.table.shape[0]
        jobs = self.table.data_ptr() + i * self.count * JOB_WORDS * 8
        finished, late = self.counters.data_ptr(), self.counters.data_ptr() + 4
        how: dict[str, Any] = {"spread": self.spread, "sms": self.sms, "epoch": i + 1, "finished": finished}
        if self.transport.kind == "bulk":
            self.kernels.bulk(jobs, self.count, self.nbytes, **how, late=late)
        else:
            self.kernels.lsu(jobs, self.count, self.nbytes, **how)

    def in_time(self, check: Check) -> Check:
        """``check``, or an infinite error if a wait of a kernel expired; of all ranks."""
        return agreed(self.context, check if int(self.counters[1]) == 0 else Check(math.inf, 0.0))


def by_collectives(exchange: Exchange, context: Context) -> Launch:
    """The same transfer by torch.distributed (NCCL or gloo); buffers need not be symmetric."""
    group, rank, world = context.group, context.rank, context.world
    assert group is not None
    op = exchange.op
    sources, targets = exchange.sources().unbind(), exchange.targets().unbind()

    def ring(i: int) -> None:
        step = 1 if op == "push" else -1
        ends = [
            dist.P2POp(dist.isend, sources[i], group=group, group_peer=(rank + step) % world),
            dist.P2POp(dist.irecv, targets[i], group=group, group_peer=(rank - step) % world),
        ]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    calls: dict[str, Launch] = {
        "push": ring,
        "pull": ring,
        "all_gather": lambda i: dist.all_gather_into_tensor(targets[i], sources[i], group=group),
        "scatter": lambda i: dist.all_to_all_single(targets[i], sources[i], group=group),
        "reduce_scatter": lambda i: dist.reduce_scatter_tensor(targets[i], sources[i], group=group),
        # In place: of the maximum a second call on the same set changes nothing. It takes as long as a sum.
        "all_reduce": lambda i: dist.all_reduce(targets[i], dist.ReduceOp.MAX, group=group),
    }
    call = calls[op]
    return lambda i: call(i % exchange.copies)
