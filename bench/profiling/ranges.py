"""Time of named ranges: on the host, and on the GPU by what was launched inside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import intervals

__all__ = ["Launch", "Range", "RangeTotal", "totals"]


@dataclass(frozen=True)
class Range:
    """One range on the host; times in microseconds."""

    name: str
    start: float
    end: float
    thread: Any


@dataclass(frozen=True)
class Launch:
    """A call of the CUDA runtime or driver; ``key`` is that of the activities that it launched."""

    start: float
    thread: Any
    key: Hashable


@dataclass(frozen=True)
class RangeTotal:
    """All ranges of one name, in microseconds; ``gpu_us`` is None where there is no GPU."""

    name: str
    count: int
    host_us: float
    gpu_us: float | None = None


def totals(
    ranges: Iterable[Range],
    launches: Iterable[Launch],
    activities: Mapping[Hashable, Sequence[intervals.Interval]] | None,
) -> list[RangeTotal]:
    """Add up ranges by name.

    The GPU time of a range is that in which activities ran that its thread launched while it was open,
    whenever they ran. ``activities``: times by key of the launch; None: there is no GPU.
    """
    by_thread: dict[Any, list[Launch]] = {}
    for launch in sorted(launches, key=lambda launch: launch.start):
        by_thread.setdefault(launch.thread, []).append(launch)
    starts = {thread: [launch.start for launch in calls] for thread, calls in by_thread.items()}
    host: dict[str, list[float]] = {}
    busy: dict[str, list[intervals.Interval]] = {}
    for r in ranges:
        host.setdefault(r.name, []).append(r.end - r.start)
        at = starts.get(r.thread, [])
        for launch in by_thread.get(r.thread, [])[bisect_left(at, r.start) : bisect_left(at, r.end)]:
            busy.setdefault(r.name, []).extend((activities or {}).get(launch.key, []))
    return [
        RangeTotal(
            name,
            len(times),
            sum(times),
            None if activities is None else intervals.length(intervals.union(busy.get(name, []))),
        )
        for name, times in host.items()
    ]
