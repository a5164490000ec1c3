"""Summary of the profile of all ranks: how much communication is hidden behind compute, as JSON and as tables.

With ``C`` the time in which a rank communicates (the union of its communication activities over all streams)
and ``K`` that in which it computes: ``overlap_fraction`` = |C ∩ K| / |C| and ``exposed`` = |C \\ K|. A
communication kernel that waits for other ranks is communicating all that time, so a late rank shows as
exposed communication of the others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import intervals
from .classify import CATEGORIES, Category
from .ranges import RangeTotal

__all__ = [
    "MAX_EVENTS",
    "SHOWN_STEPS",
    "Event",
    "RankProfile",
    "build",
    "read_json",
    "tables",
    "write",
    "write_json",
]

SCHEMA = 1
SHOWN_STEPS = 2  # of the timeline
MAX_EVENTS = 400  # of the timeline of one rank
RANGE_LIMIT = 20
LATE = 0.2  # ranks' communication times that differ by more need an explanation


@dataclass(frozen=True)
class Event:
    """One activity of one rank; times in microseconds."""

    name: str
    start: float
    end: float
    category: Category
    stream: str


@dataclass
class RankProfile:
    """What one rank did, in microseconds on its own clock.

    ``clock_ns``: what to add (in ns) to compare ranks of one host; ``begin``: when its GPU began with the steps,
    None: with the first event.
    """

    rank: int
    events: list[Event]
    ranges: list[RangeTotal] = field(default_factory=list)
    steps: int = 1
    clock_ns: int = 0
    begin: float | None = None

    def covered(self, category: Category) -> list[intervals.Interval]:
        return intervals.union((e.start, e.end) for e in self.events if e.category == category)


def build(profiles: Sequence[RankProfile], title: str, *, tool: str) -> dict[str, Any]:
    """The ``trace_summary`` object that ``bench report`` draws.

    Totals are over all steps; the events are those of the first steps, on one time axis that begins at 0, where
    the first rank begins. ``warning`` is a sentence if the ranks' communication times tell of a late one, else "".
    """
    base = min((p.clock_ns for p in profiles), default=0)
    shifts = {p.rank: (p.clock_ns - base) / 1000 for p in profiles}
    begins = [
        shifts[p.rank] + (min(e.start for e in p.events) if p.begin is None else p.begin)
        for p in profiles
        if p.events
    ]
    origin = min(begins, default=0.0)
    steps = max((p.steps for p in profiles), default=0)
    ranks = [_rank(p, shifts[p.rank] - origin) for p in sorted(profiles, key=lambda p: p.rank)]
    return {
        "schema": SCHEMA,
        "kind": "trace_summary",
        "title": title,
        "tool": tool,
        "steps": steps,
        "warning": _late_rank(ranks, max(1, steps)),
        "ranks": ranks,
    }


def _late_rank(ranks: Sequence[Mapping[str, Any]], steps: int) -> str:
    """A warning if a rank communicates much less than another: the others wait in their communication for it."""
    if not ranks:
        return ""
    least, most = (choose(ranks, key=lambda r: r["communication_us"]) for choose in (min, max))
    low, high = least["communication_us"] / steps, most["communication_us"] / steps
    if high - low <= LATE * low:
        return ""
    return (
        f"warning: communication takes {high:.1f} us a step on rank {most['rank']} and {low:.1f} us on rank "
        f"{least['rank']}, which seems late; waiting for it counts as communication of the others."
    )


def _rank(profile: RankProfile, shift: float) -> dict[str, Any]:
    compute, communication = profile.covered("compute"), profile.covered("communication")
    total = intervals.length(communication)
    hidden = intervals.length(intervals.intersection(communication, compute))
    streams: dict[str, list[Event]] = {}
    for event in _first_steps(profile):
        streams.setdefault(event.stream, []).append(event)
    return {
        "rank": profile.rank,
        "streams": [
            {
                "name": name,
                "events": [
                    {
                        "name": e.name,
                        "start_us": round(e.start + shift, 3),
                        "dur_us": round(e.end - e.start, 3),
                        "category": e.category,
                    }
                    for e in events
                ],
            }
            for name, events in sorted(streams.items(), key=lambda item: item[1][0].start)
        ],
        "overlap_fraction": round(hidden / total, 6) if total > 0 else 0.0,
        "compute_us": round(intervals.length(compute), 3),
        "communication_us": round(total, 3),
        "exposed_us": round(intervals.length(intervals.difference(communication, compute)), 3),
    }


def _first_steps(profile: RankProfile) -> list[Event]:
    """Events of the first steps: every step launches the same, so a share of each stream's events."""
    streams: dict[str, list[Event]] = {}
    for event in sorted(profile.events, key=lambda e: e.start):
        streams.setdefault(event.stream, []).append(event)
    share = min(1.0, SHOWN_STEPS / max(1, profile.steps))
    kept = [e for events in streams.values() for e in events[: max(1, round(len(events) * share))]]
    return sorted(kept, key=lambda e: e.start)[:MAX_EVENTS]


def tables(summary: Mapping[str, Any], profiles: Sequence[RankProfile]) -> str:
    """The summary, the longest activities and the ranges as plain text."""
    steps = max(1, summary["steps"])
    rows = [
        [
            str(r["rank"]),
            f"{r['compute_us'] / steps:.1f}",
            f"{r['communication_us'] / steps:.1f}",
            f"{r['exposed_us'] / steps:.1f}",
            f"{100 * r['overlap_fraction']:.1f}" if r["communication_us"] else "-",
        ]
        for r in summary["ranks"]
    ]
    head = ["rank", "compute us", "communication us", "exposed us", "hidden %"]
    parts = [
        f"{summary['title'] or 'profile'} ({summary['tool']}, {steps} steps, per step)",
        _grid(head, rows),
    ]
    if summary.get("warning"):
        parts.append(summary["warning"])
    for profile in profiles[:1]:
        parts += [f"rank {profile.rank}: activities", _activities(profile)]
        if profile.ranges:
            parts += [f"rank {profile.rank}: ranges", _ranges(profile.ranges)]
    return "\n\n".join(parts) + "\n"


def _activities(profile: RankProfile) -> str:
    totals: dict[tuple[str, Category], list[float]] = {}
    for event in profile.events:
        entry = totals.setdefault((event.name, event.category), [0.0, 0.0])
        entry[0] += 1
        entry[1] += event.end - event.start
    order = sorted(totals.items(), key=lambda item: (CATEGORIES.index(item[0][1]), -item[1][1]))
    rows = [
        [name[:70], category, str(int(count)), f"{time:.1f}", f"{time / count:.1f}"]
        for (name, category), (count, time) in order
    ]
    return _grid(["name", "category", "count", "total us", "mean us"], rows, left=2)


def _ranges(ranges: Iterable[RangeTotal]) -> str:
    longest = sorted(ranges, key=lambda r: -(r.gpu_us or r.host_us))[:RANGE_LIMIT]
    rows = [
        [r.name[:90], str(r.count), f"{r.host_us:.1f}", "-" if r.gpu_us is None else f"{r.gpu_us:.1f}"]
        for r in longest
    ]
    return _grid(["range", "count", "host us", "GPU us"], rows, left=1)


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """Aligned columns, the first ``left`` of them to the left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * w for w in widths], *rows]:
        cells = [
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write(profiles: Sequence[RankProfile], out: Path, title: str, *, tool: str) -> Path:
    """Write OUT/trace_summary.json and OUT/summary.txt; returns the path of the first."""
    summary = build(profiles, title, tool=tool)
    path = out / "trace_summary.json"
    path.write_text(json.dumps(summary), encoding="utf-8")
    (out / "summary.txt").write_text(tables(summary, profiles), encoding="utf-8")
    return path


def read_json(path: Path) -> Any:
    """A JSON file, compressed or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def write_json(value: Any, path: Path) -> None:
    """Write JSON, compressed if the name ends in .gz."""
    data = json.dumps(value).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
