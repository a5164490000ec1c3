"""Timing of a few callables beside each other.

Everyone runs a few calls in every round, in an order that changes, so that clocks and other processes meet all alike; a
time is the median over the rounds. On the CPU a round tells the fastest of its calls, as others are interrupted by
whoever else runs. Who is far behind after a round is not run again. Operands are taken in turn from as many
copies as the cache of the device cannot hold, since in use they come from memory.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpkernels.tune import machine

_ROUNDS = 7
_HOPELESS = (2.0, 1.3, 1.15)  # times the best so far, after the first rounds: not run again
_ROUND_US = 1500.0  # of calls in a row, for each
_BUDGET_S = 10.0  # of the rounds of one product: fewer where a call takes long
_MOST_COPIES = 32
_AHEAD_CYCLES = 150_000  # of the GPU, about 80 us: what the host needs for a call, and more

Measure = Callable[[], float]  # runs once, tells microseconds


def race(measures: Sequence[Measure], *, keep: Sequence[int] = (), rounds: int = _ROUNDS) -> list[float]:
    """Median microseconds of each; of those that fall behind, over the rounds that they ran.

    keep: indices of those that run in every round. What raises a RuntimeError (no memory, say) counts as infinitely
    slow; if all do, the last one's is raised.
    """
    times: list[list[float]] = [[] for _ in measures]
    running = list(range(len(measures)))
    start = time.monotonic()
    failure: RuntimeError | None = None
    for done in range(rounds):
        began = time.monotonic()
        for i in running if done % 2 == 0 else reversed(running):
            try:
                times[i].append(measures[i]())
            except RuntimeError as error:
                times[i], failure = [math.inf], error
        medians = [statistics.median(t) for t in times]
        best = min(medians)
        if best == math.inf and failure is not None:
            raise failure
        limit = best * _HOPELESS[min(done, len(_HOPELESS) - 1)]
        running = [i for i in running if medians[i] <= (sys.float_info.max if i in keep else limit)]
        now = time.monotonic()
        if now - start + (now - began) > _BUDGET_S:
            break
    return [statistics.median(t) for t in times]


def measure(call: Callable[[int], object], copies: int, device: torch.device) -> Measure:
    """``call(i)`` runs once with the i-th copy of its operands. It is run once here, untimed."""
    turn = 0

    def step() -> None:
        nonlocal turn
        call(turn % copies)
        turn += 1

    calls: int | None = None  # in a row, once it is known how long one takes

    def once() -> float:
        nonlocal calls
        if calls is None:
            step()
            estimate = _elapsed_us(step, 1, device)
            calls = max(3, min(20, math.ceil(_ROUND_US / max(estimate, 1.0))))
        return _elapsed_us(step, calls, device)

    return once


def copies_of(tensors: Sequence[Tensor | None], device: torch.device) -> list[list[Tensor | None]]:
    """The tensors themselves and copies that lie in memory as they do, together more than twice the cache."""
    size = sum(x.numel() * x.element_size() for x in tensors if x is not None)
    count = max(1, min(_MOST_COPIES, math.ceil(2 * machine.cache_bytes(device) / max(1, size))))
    return [
        list(tensors),
        *([None if x is None else copy_alike(x) for x in tensors] for _ in range(count - 1)),
    ]


def copy_alike(x: Tensor) -> Tensor:
    """The same elements, strides and place within 16 bytes."""
    if x.numel() == 0:
        return x.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    before = x.data_ptr() % 16 // x.element_size()
    memory = x.new_empty(before + span)[before:]
    memory.copy_(x.as_strided((span,), (1,)))
    return memory.as_strided(x.shape, x.stride(), before)


def _elapsed_us(step: Callable[[], None], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES * (calls + 2))  # in which the host enqueues them
        begin.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls
    fastest = math.inf
    for _ in range(calls):
        start = time.perf_counter()
        step()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest * 1e6
