"""Timing of several callables beside each other, by one protocol.

CUDA: each becomes a CUDA graph of many calls that walk over its buffer sets. Graphs are replayed in turn, every
round in a new random order (the same on all ranks). Before a replay the GPU sleeps, so that everything timed is
enqueued before it starts, and a tiny all-reduce aligns the ranks. A sample is the device time between two events,
over the number of calls; of several ranks the slowest counts. What cannot be captured is enqueued call by call behind
a sleep that is long enough ("queued"); where no sleep would be, calls follow each other from an idle GPU without one
("steady"). Then the same calls one by one, launched from the host to an idle GPU: ``host_us``.

CPU: wall time of a few calls in a row, the ranks aligned by a barrier.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from .context import Context
from .records import Stats

__all__ = ["Budget", "CaptureError", "Key", "Series", "host_times", "interleave", "levelled"]

Key = tuple[str, str]  # variant, and part of it ("" for the whole)

_MAX_CALLS = 512  # of one graph
_MAX_QUEUED = 16  # calls that the host enqueues behind one sleep, where there is no graph
_STEADY_US = 300_000.0  # calls in a row where the host is slower than the GPU, 3 to 10 of them
_SLEEP_US = 200.0  # at first; doubled where the host turns out to need longer
_MAX_SLEEP_US = 20_000.0
_FEWEST_SAMPLES = 5


class CaptureError(Exception):
    """The calls cannot be captured into a CUDA graph on some rank; raised on all."""


@dataclass(frozen=True)
class Budget:
    """How long a variant is measured.

    Attributes:
        rounds: replays of each graph, at least and at most.
        round_us: a graph holds as many calls as fill this time (whole walks over the buffer sets).
        total_us: rounds go on until the slowest variant has been timed this long, within ``rounds``.
        warmup_us: untimed rounds at the beginning, for the clocks to settle under this load; at least two.
        host_rounds: calls launched from the host, at least and at most.
    """

    rounds: tuple[int, int] = (10, 30)
    round_us: float = 2_000.0
    total_us: float = 60_000.0
    warmup_us: float = 150_000.0
    host_rounds: tuple[int, int] = (7, 15)

    @classmethod
    def make(cls, *, cuda: bool, quick: bool = False, rounds: int = 0) -> Budget:
        """The usual one, about half of it (``quick``), or a given number of rounds; few on the CPU."""
        budget = cls()
        if not cuda:
            budget = cls(rounds=(3, 5), warmup_us=0.0)
        elif quick:
            budget = cls(rounds=(7, 12), total_us=25_000.0, warmup_us=50_000.0, host_rounds=(5, 7))
        given = (rounds, rounds)
        return replace(budget, rounds=given, host_rounds=given) if rounds else budget

    def timed_rounds(self, longest_us: float) -> int:
        """Rounds when the longest graph takes that long."""
        return _clamp(self.total_us / max(longest_us, 1.0), self.rounds)

    def warmup_rounds(self, all_us: float) -> int:
        """Untimed rounds when all graphs together take that long."""
        return _clamp(self.warmup_us / max(all_us, 1.0), (2, 20)) if self.warmup_us else 1


class Series:
    """Many calls that are timed as one: a CUDA graph, or a loop. Made on all ranks together.

    Attributes:
        calls: how many.
        estimate_us: of all of them, roughly.
        kind: "graph", "queued" or "steady" (see the module), or "loop" on the CPU.
    """

    def __init__(
        self,
        launch: Callable[[int], object],
        copies: int,
        context: Context,
        budget: Budget,
        *,
        capture: bool,
        pool: Any = None,
        flush: Callable[[], object] | None = None,
    ) -> None:
        """``copies``: buffer sets. ``pool``: of memory, that many short-lived graphs share (see :func:`_record`).

        ``flush``: enqueues what empties the L2 before each sample, where the buffer sets do not.
        """
        self.context, self._flush = context, flush
        # Every rank must make the same graph.
        device, host = (
            max(of_all) for of_all in zip(*context.agree(_trial(launch, copies, context)), strict=True)
        )
        self.kind, self.calls, self._sleep_us = _shape(device, host, copies, budget, context.cuda, capture)
        self.estimate_us = device * self.calls

        def run() -> None:
            for i in range(self.calls):
                launch(i % copies)

        self.run: Callable[[], object] = run
        if capture:
            graph, failure = _capture(run, pool)
            failures = [f for f in context.agree(failure) if f]  # the ranks replay together or not at all
            if graph is None or failures:
                raise CaptureError(failures[0])
            self._graph = graph  # keeps what was captured alive
            self.run = graph.replay

    def time(self) -> tuple[float, bool]:
        """us of one call, and whether the host came too late, so that they hold some of its time too."""
        if not self.context.cuda:
            self.context.align()
            start = time.perf_counter()
            self.run()
            return (time.perf_counter() - start) * 1e6 / self.calls, False
        begin, end = _events()
        if self.kind != "steady":
            torch.cuda._sleep(int(self._sleep_us * _cycles_per_us()))
        if self._flush is not None:
            self._flush()
        self.context.align()
        if self.kind == "steady":
            self.context.synchronize()
        begin.record()
        self.run()
        end.record()
        late = self.kind != "steady" and begin.query()
        end.synchronize()
        if late:
            self._sleep_us = min(2 * self._sleep_us, _MAX_SLEEP_US)
        return float(begin.elapsed_time(end)) * 1e3 / self.calls, late


def interleave(
    series: Mapping[Key, Series],
    context: Context,
    budget: Budget,
    rng: random.Random,
    at: Callable[[str], object],
    *,
    level: bool = False,
) -> dict[Key, tuple[Stats, int]]:
    """Time all series in turn. ``rng``: in the same state on every rank; ``at`` is told whose turn it is.

    ``level``: without what slowed or sped up all of a round (:func:`levelled`).

    Returns:
        Times, and how many samples hold time that the host came too late by: they are left out if five others remain.
    """
    if not series:
        return {}
    estimates = [s.estimate_us for s in series.values()]
    warmup, rounds = budget.warmup_rounds(sum(estimates)), budget.timed_rounds(max(estimates))
    samples: dict[Key, list[tuple[float, bool]]] = {key: [] for key in series}
    for i in range(warmup + rounds):
        for key in rng.sample(list(series), len(series)):
            at(key[0])
            sample = series[key].time()
            if i >= warmup:
                samples[key].append(sample)
    stats = {}
    times = {key: context.slowest([us for us, _ in values]) for key, values in samples.items()}
    for key, us in (levelled(times) if level else times).items():
        late = context.slowest([late for _, late in samples[key]])
        in_time = [one for one, was_late in zip(us, late, strict=True) if not was_late]
        enough = len(in_time) >= _FEWEST_SAMPLES
        stats[key] = (Stats.of(in_time), 0) if enough else (Stats.of(us), len(us) - len(in_time))
    return stats


def levelled(times: Mapping[Key, Sequence[float]]) -> dict[Key, list[float]]:
    """Samples of each round over how much slower that round was for the series in the middle.

    A round takes milliseconds, so a clock that wanders from one to the next wanders for all: their ratios do not.
    """
    usual = {key: statistics.median(values) for key, values in times.items()}
    rounds = range(min(map(len, times.values())))
    slower = [statistics.median(values[i] / usual[key] for key, values in times.items()) for i in rounds]
    return {key: [values[i] / slower[i] for i in rounds] for key, values in times.items()}


def host_times(
    launches: Mapping[Key, tuple[Callable[[int], object], int]],
    context: Context,
    budget: Budget,
    rng: random.Random,
    at: Callable[[str], object],
) -> dict[Key, Stats]:
    """us of single calls that the host launches while the GPU is idle: the longer of its time and the host's.

    ``launches``: function and number of buffer sets.
    """
    if not launches:
        return {}
    samples: dict[Key, list[float]] = {key: [] for key in launches}
    rounds = budget.host_rounds[1]
    i = 0
    while i <= rounds:  # the first is not counted
        for key in rng.sample(list(launches), len(launches)):
            at(key[0])
            launch, copies = launches[key]
            begin, end = _events()
            context.align()
            context.synchronize()
            begin.record()
            launch(i % copies)
            end.record()
            end.synchronize()
            if i > 0:
                samples[key].append(float(begin.elapsed_time(end)) * 1e3)
        if i == 1:
            longest = max(context.agree(max(values[0] for values in samples.values())))
            rounds = _clamp(budget.total_us / max(longest, 1.0), budget.host_rounds)
        i += 1
    return {key: Stats.of(context.slowest(values)) for key, values in samples.items()}


def _trial(launch: Callable[[int], object], copies: int, context: Context) -> tuple[float, float]:
    """us of one call on the device, and of the host for launching it; on the CPU the same twice. Rough figures."""
    if not context.cuda:
        us = min(_elapsed(lambda: launch(i % copies), context) for i in range(3))  # noqa: B023 - runs at once
        return us, us
    launch(0)
    context.synchronize()
    begin, end = _events()
    torch.cuda._sleep(int(5 * _SLEEP_US * _cycles_per_us()))
    start = time.perf_counter()
    begin.record()
    for i in range(3):
        launch(i % copies)
    end.record()
    host = (time.perf_counter() - start) * 1e6 / 3
    end.synchronize()
    return max(float(begin.elapsed_time(end)) * 1e3 / 3, 0.1), host


def _shape(
    device_us: float, host_us: float, copies: int, budget: Budget, cuda: bool, capture: bool
) -> tuple[str, int, float]:
    """Kind of a series, number of calls, and the sleep in us before them."""
    if not cuda:
        return "loop", _clamp(2000 / device_us, (1, 3)), 0.0
    if capture:
        return "graph", _calls(device_us, copies, budget.round_us), _SLEEP_US
    calls = _clamp(budget.round_us / device_us, (2, _MAX_QUEUED))
    sleep = 1.5 * host_us * calls + _SLEEP_US
    if sleep <= _MAX_SLEEP_US:
        return "queued", calls, sleep
    return "steady", _clamp(_STEADY_US / device_us, (3, 10)), 0.0


def _calls(once_us: float, copies: int, round_us: float) -> int:
    """Whole walks over the buffer sets that fill ``round_us``, at least one, without exceeding the largest graph."""
    walks = math.ceil(round_us / max(once_us, 1.0) / copies)
    return copies * max(1, min(walks, _MAX_CALLS // copies))


def _clamp(value: float, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(bounds[1], math.ceil(value)))


def _capture(run: Callable[[], object], pool: Any = None) -> tuple[torch.cuda.CUDAGraph | None, str]:
    """A graph of what ``run`` enqueues on the current stream, or why there is none."""
    graph = torch.cuda.CUDAGraph()
    try:
        if pool is None:
            _record(graph, run)
        else:
            _record_into(graph, run, pool)
    except Exception as error:
        # The first cause says more than the invalid capture that followed from it.
        cause = error.__context__ if isinstance(error.__context__, Exception) else error
        first_line = str(cause).strip().partition("\n")[0]
        _repair()
        return None, f"{type(cause).__name__}: {first_line}"
    return graph, ""


def _record(graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
    # On the current stream: autograd's accumulation nodes stay on the stream where they first ran. Thread-local: other
    # threads (NCCL's watchdog) may call CUDA meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        run()


def _record_into(graph: torch.cuda.CUDAGraph, run: Callable[[], object], pool: Any) -> None:
    """The same without what torch.cuda.graph does about memory: a garbage collection and an empty cache, 30 ms.

    ``pool``: of torch.cuda.graph_pool_handle(). Graphs that share one must be replayed one after the other.
    """
    torch.cuda.synchronize()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    finally:
        graph.capture_end()


def _repair() -> None:
    """After a failed capture random generators believe that one is under way; another capture ends that."""
    torch.cuda.synchronize()
    gc.collect()
    _record(torch.cuda.CUDAGraph(), lambda: torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


def _elapsed(run: Callable[[], object], context: Context) -> float:
    """us of ``run`` with everything that it left on the device; a rough figure."""
    context.synchronize()
    start = time.perf_counter()
    run()
    context.synchronize()
    return max((time.perf_counter() - start) * 1e6, 0.1)


def _events() -> Sequence[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]


@cache
def _cycles_per_us() -> float:
    """How many cycles of torch.cuda._sleep make a microsecond, at the present clock."""
    cycles = 5_000_000
    torch.cuda._sleep(cycles)
    begin, end = _events()
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (float(begin.elapsed_time(end)) * 1e3)
