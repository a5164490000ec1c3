"""Trace summaries (:mod:`bench.profiling` writes them) and their picture: what each rank's streams did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BenchError
from .draw import COLORS, Picture, figure, legend
from .table import Cell, Column, Table, number, percent

__all__ = ["SCHEMA", "TraceSummary", "parse_trace", "timeline", "trace_table"]

SCHEMA = 1
_CATEGORIES = {"compute": "gemm", "communication": "comm", "copy": "copy", "other": "other"}
_LANE = 18.0
_MAX_RANKS = 4
_MAX_EVENTS = 1500  # of one stream, drawn


@dataclass(frozen=True)
class TraceSummary:
    """One trace. ``ranks``: as in the file; ``steps``: over how many steps the totals go; ``warning``: or ""."""

    title: str
    ranks: list[dict[str, Any]]
    steps: int = 1
    warning: str = ""


def parse_trace(data: Mapping[str, Any], path: Path) -> TraceSummary:
    """Check what was read from a file; BenchError in a sentence if it is not a trace summary of this schema."""
    if data.get("schema") != SCHEMA:
        raise BenchError(
            f"{path}: a trace summary of schema {data.get('schema')!r}, this version reads schema {SCHEMA}; "
            "profile again."
        )
    try:
        ranks = [dict(rank) for rank in data["ranks"]]
        for rank in ranks:
            int(rank["rank"])
            for name in ("overlap_fraction", "compute_us", "communication_us", "exposed_us"):
                float(rank[name])
            for stream in rank["streams"]:
                str(stream["name"])
                for event in stream["events"]:
                    float(event["start_us"]), float(event["dur_us"]), str(event["name"])
        steps = max(1, int(data.get("steps") or 1))
        return TraceSummary(str(data.get("title") or path.stem), ranks, steps, str(data.get("warning") or ""))
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BenchError(f"{path}: a trace summary in which something is missing ({reason}).") from None


def trace_table(traces: Sequence[TraceSummary]) -> Table:
    """Times of a step and rank, and how much of the communication is behind computation."""
    columns = [
        Column("trace", numeric=False),
        Column("rank"),
        Column("compute, us"),
        Column("communication, us"),
    ]
    columns += [Column("exposed, us"), Column("hidden")]
    table = Table(
        "traces", columns, caption="Times of one step, from a profile: profiled kernels run a little slower."
    )
    for trace in traces:
        note = table.note(trace.warning) if trace.warning else 0
        for rank in trace.ranks:
            times = [rank[name] / trace.steps for name in ("compute_us", "communication_us", "exposed_us")]
            hidden = rank["overlap_fraction"] if rank["communication_us"] else None
            cells = [Cell(number(t), sort=t) for t in times]
            table.rows.append(
                [
                    Cell(trace.title, note=note),
                    Cell(str(rank["rank"])),
                    *cells,
                    Cell(percent(hidden), sort=hidden),
                ]
            )
    return table


def timeline(traces: Sequence[TraceSummary]) -> Picture | None:
    """The traces one above the other, each beginning at 0, on the same time scale; the first ranks of each."""
    shown = [
        (t, t.ranks[:_MAX_RANKS]) for t in traces if any(s["events"] for r in t.ranks for s in r["streams"])
    ]
    if not shown:
        return None
    heights = [_LANE * sum(len(r["streams"]) for r in ranks) + 8 * len(ranks) for _, ranks in shown]
    spans = [_span(ranks) for _, ranks in shown]
    longest = max(end - begin for begin, end in spans)
    label = "; ".join(
        f"{t.title}: {number(end - begin)} us" for (t, _), (begin, end) in zip(shown, spans, strict=True)
    )
    total = sum(heights) + 52.0 * len(shown) + 62
    with figure(
        f"Timeline. {label}",
        total,
        rows=len(shown),
        margins=(190, 24, 58, 44),
        hspace=52.0 / (sum(heights) / len(heights)),
        height_ratios=heights,
        sharex=True,
    ) as (picture, axes):
        for (trace, ranks), (begin, end), height, axis in zip(shown, spans, heights, axes[:, 0], strict=True):
            _lanes(picture, axis, ranks, begin, height)
            axis.set_title(trace.title, fontsize=12.5, weight="bold", pad=8)
            axis.axvline(end - begin, color=COLORS["ink"], lw=1.2)
            right = end - begin > 0.85 * longest
            axis.annotate(f"{number(end - begin)} us", (end - begin, height), xytext=(-5 if right else 5, 6),
                          textcoords="offset points", ha="right" if right else "left", weight="bold",
                          annotation_clip=False)  # fmt: skip
            axis.set_xlim(0, longest * 1.005)
            for spine in ("left", "bottom"):
                axis.spines[spine].set_visible(False)
            axis.grid(visible=False, axis="y")
        axes[-1, 0].set_xlabel("us")
        entries = [(name, COLORS[c], "bar") for name, c in _CATEGORIES.items()]
        legend(axes[0, 0], entries, x=0.0, y=1 + 26 / heights[0])
    return picture


def _lanes(
    picture: Picture, axis: Any, ranks: Sequence[Mapping[str, Any]], begin: float, height: float
) -> None:
    y = height
    ticks, names = [], []
    for rank in ranks:
        for i, stream in enumerate(rank["streams"]):
            y -= _LANE
            ticks.append(y + _LANE / 2)
            text = str(stream["name"])
            names.append(
                (f"rank {rank['rank']}   " if i == 0 else "") + (text if len(text) < 18 else text[:16] + "…")
            )
            for event in sorted(stream["events"], key=lambda e: -e["dur_us"])[:_MAX_EVENTS]:
                color = COLORS[_CATEGORIES.get(event.get("category"), "other")]
                (bar,) = axis.barh(y + _LANE / 2, event["dur_us"], left=event["start_us"] - begin, height=_LANE - 5,
                                   color=color, lw=0)  # fmt: skip
                picture.tip(
                    bar,
                    f"{event['name']}\n{number(event['dur_us'])} us from {number(event['start_us'] - begin)} us on",
                )
        y -= 8
    axis.set_yticks(ticks, labels=names)
    axis.tick_params(axis="y", labelcolor=COLORS["muted"], labelsize=11)
    axis.set_ylim(0, height)


def _span(ranks: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    events = [e for r in ranks for s in r["streams"] for e in s["events"]]
    return min(e["start_us"] for e in events), max(e["start_us"] + e["dur_us"] for e in events)
