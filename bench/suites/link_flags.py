"""Round trips of a flag between ranks 0 and 1; other ranks stand by."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from ..context import Context
from ..kernels import link_kernels
from ..suite import Check, Runnable, Workload
from .link_exchange import Exchange

__all__ = ["FlagWorkload"]

_SAMPLES = 20
_ROUNDS = 500  # round trips a sample on a GPU
_CPU_ROUNDS = 20


class FlagWorkload(Workload):
    """On GPUs one thread on each side stores with release and polls with acquire; on the CPU gloo sends a word."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.plays = context.rank < 2
        self.epoch = 0  # of the last round trip, the same on all ranks

    def prepare(self, variant: str) -> Runnable:
        rounds = _ROUNDS if self.context.cuda else _CPU_ROUNDS
        if self.context.cuda:
            self._set_up_cuda()

        def sample() -> list[float]:
            self._trip(rounds)  # warm
            return [self._trip(rounds) / rounds for _ in range(_SAMPLES)]

        def check() -> Check:  # after the samples
            right = not self.plays or self._last_seen() == self.epoch
            return Check(0.0 if right else math.inf, 0.0)

        return Runnable(lambda i: None, check=check, sample=sample, graph=False)

    def _set_up_cuda(self) -> None:
        context = self.context
        assert context.device.index is not None
        self.kernels = link_kernels(context.device.index)
        # Nothing is exchanged but flags: word `sender` of set 0.
        self.exchange = Exchange("push", 256, "flags", context, symmetric=True, copies=1)
        self.late = torch.zeros(1, dtype=torch.int32, device=context.device)
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.epoch = 0
        self.exchange.poison()

    def _trip(self, rounds: int) -> float:
        """us of some round trips; 0 on ranks that stand by. All ranks call it together."""
        first, self.epoch = self.epoch + 1, self.epoch + rounds
        if not self.context.cuda:
            return self._gloo_trip(rounds, first)
        self.context.align()
        if not self.plays:
            return 0.0
        me, other = self.context.rank, 1 - self.context.rank
        mine, theirs = self.exchange.flags()[0, other], self.exchange.flags(other)[0, me]
        self.begin.record()
        self.kernels.round_trips(
            mine.data_ptr(), theirs.data_ptr(), rounds, first, leads=me == 0, late=self.late.data_ptr()
        )
        self.end.record()
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) * 1e3

    def _gloo_trip(self, rounds: int, first: int) -> float:
        import time

        self.context.align()
        if not self.plays:
            return 0.0
        group, other = self.context.group, 1 - self.context.rank
        word = torch.zeros(1, dtype=torch.int32)
        start = time.perf_counter()
        for epoch in range(first, first + rounds):
            if self.context.rank == 0:
                dist.send(word.fill_(epoch), group=group, group_dst=other)
                dist.recv(word, group=group, group_src=other)
            else:
                dist.recv(word, group=group, group_src=other)
                dist.send(word, group=group, group_dst=other)
        self.word = word
        return (time.perf_counter() - start) * 1e6

    def _last_seen(self) -> int:
        """The last epoch that came from the other side; -1 if a wait expired."""
        if not self.context.cuda:
            return int(self.word)
        return int(self.exchange.flags()[0, 1 - self.context.rank]) if int(self.late) == 0 else -1
