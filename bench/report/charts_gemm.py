"""Pictures of the gemm suite."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..records import Row
from .analysis import (
    Group,
    Noise,
    constant,
    intensity,
    is_foreign,
    spread,
    stream_k_gain,
    waves,
)
from .draw import COLORS, HALF, Picture, figure, legend, ratio_axis, tidy
from .table import number
from .tables_gemm import SAME_TILE, forces_tile, shape_text

__all__ = ["roofline", "speedup_bars", "stream_k_waves", "sweep_scatter"]

_ROW = 24.0
_MANY = 1500  # points beyond which they are drawn as one object, without tooltips


def short_case(case: str, limit: int = 26) -> str:
    """A label, cut to what fits."""
    return case if len(case) <= limit else case[: limit - 1] + "…"


def case_labels(groups: Sequence[Group]) -> list[str]:
    """Names without the set and, where that leaves them different, without the size."""
    names = [g.case.removeprefix(g.first.shape_set).strip() or g.case for g in groups]
    shorter = [re.sub(r"\s*\b\d+x\d+x\d+$", "", name) for name in names]
    if all(shorter) and len(set(shorter)) == len(shorter):
        names = shorter
    return [short_case(name) for name in names]


def speedup_bars(
    groups: Sequence[Group], noise: Noise | None, title: str, limits: tuple[float, float] | None = None
) -> Picture | None:
    """A bar for what ``auto`` takes, and a tick for each forced schedule, against the baseline; None without ratios.

    ``limits``: of the axis, so that several pictures have the same; what lies beyond is a triangle at its end.
    """
    shown = [g for g in groups if g.speedup(g.ours) or (g.ours and g.ours.status != "ok")]
    if not any(g.speedup(g.ours) for g in shown):
        return None
    low, high = limits or bar_limits(shown)
    baseline = shown[0].baseline_name
    label = f"Speed-up of this package over {baseline}: {title}"
    labels = case_labels(shown)
    height = 66 + _ROW * len(shown)
    room = max(90.0, 22 + 7.0 * max(map(len, labels)))
    with figure(label, height, width=HALF, margins=(room, 44, 34, 28)) as (picture, axes):
        axis = axes[0, 0]
        ratio_axis(axis, low, high, noise=noise.floor if noise else 0.0)
        for y, group in enumerate(shown):
            _bar(picture, axis, group, y)
        axis.set_yticks(range(len(shown)), labels)
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.tick_params(axis="y", labelcolor=COLORS["ink"])
        tidy(axis)
        entries = [("ours (auto)", COLORS["ours"], "bar")]
        if any(_forced(g) for g in shown):
            entries += [
                ("schedules forced", COLORS["ours2"], "line"),
                ("best of them", COLORS["ours4"], "tick"),
            ]
        legend(axis, entries, x=-max(0.0, room - 150) / (HALF - room - 44))
    return picture


def bar_limits(groups: Sequence[Group]) -> tuple[float, float]:
    """Lowest and highest speed-up of ours, and at least a fifth to both sides of 1."""
    values = [s for g in groups if (s := g.speedup(g.ours))]
    return min([1 / 1.2, *values]) / 1.04, max([1.2, *values]) * 1.04


def _forced(group: Group) -> list[tuple[float, Row]]:
    """Speed-ups of the forced schedules, ascending."""
    rows = [
        r
        for r in group.of_role("ours")
        if r.variant not in ("streamk", SAME_TILE) and r is not group.ours and not forces_tile(r.variant)
    ]
    return sorted(((s, r) for r in rows if (s := group.speedup(r))), key=lambda pair: pair[0])


def _bar(picture: Picture, axis: Any, group: Group, y: int) -> None:
    own = group.ours
    value = group.speedup(own)
    if value is None:
        status = own.status if own else "missing"
        wrong = status == "failed"
        axis.text(1, y, "  FAILED" if wrong else f"  {status}", va="center", color=COLORS["comm" if wrong else "muted"],
                  weight="bold" if wrong else "normal")  # fmt: skip
    else:
        (bar,) = axis.barh(y, value - 1, left=1, height=0.56, color=COLORS["ours"], zorder=2)
        picture.tip(bar, tooltip(group, own))
        axis.annotate(f"{value:.2f}", (1, y), xycoords=("axes fraction", "data"), xytext=(38, 0), ha="right",
                      textcoords="offset points", va="center", weight="bold")  # fmt: skip
    forced = _forced(group)
    if not forced:
        return
    low, high = axis.get_xlim()
    worst, (best, best_row) = forced[0][0], forced[-1]
    (line,) = axis.plot([max(worst, low), min(max(best, low), high)], [y, y], color=COLORS["ours2"], lw=2, zorder=3,
                        solid_capstyle="butt")  # fmt: skip
    picture.tip(line, "\n".join(f"{r.variant}: {s:.3f}" for s, r in forced))
    if worst < low:
        axis.plot([low], [y], "<", ms=5, mew=0, color=COLORS["ours2"], zorder=3)
    (tick,) = axis.plot(
        [min(max(best, low), high)], [y], "|", ms=13, mew=2.4, color=COLORS["ours4"], zorder=4
    )
    picture.tip(tick, tooltip(group, best_row))


def tooltip(group: Group, row: Row | None) -> str:
    """Case, variant, time, ratio."""
    if row is None:
        return group.case
    parts = [f"{group.case}, {shape_text(group.first)}", row.variant]
    if row.best:
        parts.append(f"{number(row.best.p50)} us" + ("" if row.us else " (launched from the host)"))
    if row.tflops:
        parts.append(f"{number(row.tflops)} TFLOP/s")
    s = group.speedup(row)
    if s:
        parts.append(f"{s:.3f} × {group.baseline_name}")
    return "\n".join(parts)


def sweep_scatter(groups: Sequence[Group], noise: Noise | None) -> Picture | None:
    """Speed-up of ours over the baseline against arithmetic intensity, and how it is distributed."""
    points = [
        (x, s, g)
        for g in groups
        if (s := g.speedup(g.ours)) and g.ours and (x := intensity(g.ours)) is not None
    ]
    found = spread(v for _, v, _ in points)
    if found is None:
        return None
    label = (
        f"Sweep of {found.n} shapes: geometric mean {found.geomean:.2f}, "
        f"5th percentile {found.p5:.2f}, 95th {found.p95:.2f}"
    )
    with figure(
        label,
        400,
        columns=2,
        margins=(60, 110, 20, 48),
        width_ratios=[4, 1],
        wspace=0.03,
        sharey=True,
    ) as (picture, axes):
        scatter, side = axes[0]
        for axis in axes[0]:
            ratio_axis(axis, found.min, found.max, which="y", noise=noise.floor if noise else 0.0)
        if len(points) > _MANY:
            scatter.scatter(
                [p[0] for p in points], [p[1] for p in points], s=9, lw=0, color=COLORS["ours"], alpha=0.5
            )
        else:
            for x, y, group in points:
                (dot,) = scatter.plot([x], [y], "o", ms=5.5, mew=0, color=COLORS["ours"], alpha=0.75)
                picture.tip(dot, tooltip(group, group.ours))
        scatter.set_xscale("log")
        low, high = min(p[0] for p in points), max(p[0] for p in points)
        log_ticks(scatter, low / 1.15, high * 1.15, "x")
        scatter.set_xlabel("arithmetic intensity, flop/byte")
        tidy(scatter, grid="both")
        logs = [math.log(v) for _, v, _ in points]
        lo, hi = math.log(found.min), math.log(found.max)
        count = max(6, min(28, round(math.sqrt(found.n) * 1.6)))
        step = (hi - lo) / count or 0.01
        bins = [
            sum(lo + i * step <= v < lo + (i + 1) * step or (i == count - 1 and v >= hi) for v in logs)
            for i in range(count)
        ]
        edges = [math.exp(lo + i * step) for i in range(count + 1)]
        for i, n in enumerate(bins):
            side.fill_betweenx([edges[i], edges[i + 1] / 1.002], 0, n, color=COLORS["ours3"], lw=0)
        side.set_xticks([])
        side.spines["left"].set_visible(False)
        side.spines["bottom"].set_visible(False)
        side.grid(visible=False)
        side.tick_params(labelleft=False)
        marks = {"95th": found.p95, "median": found.p50, "5th": found.p5}
        for name, value in marks.items():
            side.axhline(value, color=COLORS["muted"], lw=1, ls=(0, (2, 2)))
            side.annotate(f"{name} {value:.2f}", (1, value), xycoords=("axes fraction", "data"), xytext=(8, 0),
                          textcoords="offset points", va="center", color=COLORS["muted"])  # fmt: skip
        scatter.axhline(found.geomean, color=COLORS["ours"], lw=1.6)
        scatter.annotate(f"geomean {found.geomean:.2f}", (1, found.geomean), xycoords=("axes fraction", "data"),
                         xytext=(-4, 5), textcoords="offset points", ha="right", color=COLORS["ours"],
                         weight="bold")  # fmt: skip
    return picture


def stream_k_waves(groups: Sequence[Group], noise: Noise | None) -> Picture | None:
    """Stream-K's gain over data-parallel with the same tile, against how full the last wave is and against waves."""
    points = [
        (w, gain, g)
        for g in groups
        if (gain := stream_k_gain(g)) and (w := waves(g.ours)) is not None and w > 0
    ]
    if not points:
        return None
    label = "Speed-up of Stream-K over the data-parallel schedule with the same tile, against waves of tiles"
    with figure(label, 380, columns=2, margins=(60, 20, 40, 48), wspace=0.06, sharey=True) as (picture, axes):
        left, right = axes[0]
        for axis in axes[0]:
            ratio_axis(axis, min(p[1] for p in points), max(p[1] for p in points), which="y",
                       noise=noise.floor if noise else 0.0)  # fmt: skip
            tidy(axis, grid="both")
        right.tick_params(labelleft=False)
        top = max(2.0, max(p[0] for p in points))
        bands = [("up to 1 wave", "ours"), ("1 to 4 waves", "ours2"), ("more", "ours3")]
        for w, gain, group in points:
            color = COLORS[bands[0 if w <= 1 else 1 if w <= 4 else 2][1]]
            full = w - math.floor(w) or 1.0
            for axis, x in ((left, full), (right, w)):
                (dot,) = axis.plot([x], [gain], "o", ms=6.5, mew=0, color=color, alpha=0.85, zorder=3)
                picture.tip(
                    dot, f"{tooltip(group, group.ours)}\n{w:.2f} waves, {gain:.3f} × data-parallel, same tile"
                )
        xs = [0.02 * 1.01**i for i in range(1200) if 0.02 * 1.01**i < top * 1.1]
        right.plot(xs, [math.ceil(x) / x for x in xs], color=COLORS["faint"], lw=1.2, zorder=1)
        right.set_xscale("log")
        log_ticks(right, min(min(p[0] for p in points) / 1.2, 0.5), top * 1.2, "x")
        left.set_xlim(0, 1.03)
        left.set_xticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "¼", "½", "¾", "full"])
        left.set_xlabel("how full the last wave is")
        right.set_xlabel("waves: tiles / thread blocks at once")
        legend(left, [(text, COLORS[c], "dot") for text, c in bands])
        legend(right, [("if only whole waves counted: ⌈w⌉ / w", COLORS["faint"], "line")])
    return picture


def roofline(groups: Sequence[Group], rows: Sequence[Row]) -> Picture | None:
    """Rate against arithmetic intensity under the measured ceilings of memory and matrix units.

    ``rows``: of all suites; the link suite's constants are the ceilings where they are there.
    """
    baseline = next((g.baseline_name for g in groups if g.baseline_name), "")
    points = []
    for group in groups:
        for row in (group.baseline, group.ours):
            if row and row.status == "ok" and not is_foreign(row) and row.tflops and (x := intensity(row)):
                points.append((x, row.tflops, group, row))
    if not points:
        return None
    dtype = groups[0].dtype
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
    peak = constant(rows, f"peak_tflops_{short}")
    hbm = constant(rows, "hbm_gbps")
    top = peak or max(p[1] for p in points)
    slope = hbm / 1000 if hbm else max(p[1] / p[0] for p in points)  # TFLOP/s for each flop/byte
    label = f"Roofline: up to {max(p[1] for p in points):.0f} TFLOP/s against arithmetic intensity"
    with figure(label, 400, width=HALF, margins=(56, 20, 36, 48)) as (picture, axes):
        axis = axes[0, 0]
        xs = [p[0] for p in points]
        low, high = min(xs) / 1.4, max(max(xs), top / slope) * 1.5
        corner = top / slope
        axis.plot([low, corner, high], [low * slope, top, top], color=COLORS["muted"], lw=1.5, zorder=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        for x, y, group, row in points:
            mine = row.role == "ours"
            (dot,) = axis.plot([x], [y], "o", ms=5.5 if mine else 4.5, mew=0, alpha=0.8, zorder=3 if mine else 2,
                               color=COLORS["ours" if mine else "baseline"])  # fmt: skip
            picture.tip(dot, f"{tooltip(group, row)}\n{x:.0f} flop/byte")
        log_ticks(axis, low, high, "x")
        log_ticks(axis, min(p[1] for p in points) / 1.5, top * 2.2, "y")
        axis.set_xlabel("arithmetic intensity, flop/byte")
        axis.set_title("TFLOP/s", fontsize=12, color=COLORS["muted"], loc="left", x=-0.1, pad=14)
        kind = "" if peak else ", the highest here"
        axis.annotate(f"{number(top)} TFLOP/s{kind}", (high, top), xytext=(-4, 9), textcoords="offset points",
                      ha="right", color=COLORS["muted"])  # fmt: skip
        name = f"HBM {number(hbm)} GB/s" if hbm else "steepest here"
        middle = math.sqrt(low * corner)
        axis.annotate(name, (middle, middle * slope), xytext=(10, -12), textcoords="offset points", ha="left",
                      color=COLORS["muted"])  # fmt: skip
        tidy(axis, grid="both")
        legend(axis, [("ours", COLORS["ours"], "dot"), (baseline, COLORS["baseline"], "dot")], x=0.55)
    return picture


def log_ticks(axis: Any, low: float, high: float, which: str) -> None:
    """Limits and plain ticks (1, 3, 10, 30, ...) of a logarithmic axis."""
    getattr(axis, f"set_{which}lim")(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 2.2 else (1, 3) if math.log10(high / low) < 4 else (1,)
    ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
    side = getattr(axis, f"{which}axis")
    side.set_ticks(ticks, labels=[f"{t:,.10g}" for t in ticks])
    side.set_ticks([], minor=True)


def sets_of(groups: Sequence[Group]) -> Mapping[str, list[Group]]:
    """Groups by shape set, the sweep left out."""
    sets: dict[str, list[Group]] = {}
    for group in groups:
        if group.first.shape_set != "sweep":
            sets.setdefault(group.first.shape_set or "gemm", []).append(group)
    return sets
