"""Pictures of the overlap suite, one set for each operation and world."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..records import Row
from .analysis import Group, Noise, spread
from .charts_gemm import log_ticks, short_case, tooltip
from .draw import COLORS, Picture, color_of, figure, legend, ratio_axis, tidy
from .table import hidden_text, number, percent
from .tables_gemm import variants_of

__all__ = ["anatomy", "families", "representative", "speedup_by_rows"]

_LINE = 17.0  # height of one bar and its gap
_GAP = 15.0  # between cases
_PREFERRED_ROWS = (8192, 2048, 32768, 512, 4096, 1024, 16384, 128, 16)


def families(groups: Sequence[Group]) -> Mapping[str, list[Group]]:
    """Cases that differ in M alone, by what is left of the name without it."""
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(re.sub(r"\s*\bM\d+\b", "", group.case), []).append(group)
    return parts


def _plain(case: str) -> str:
    """Without the operation, which is in the title of the picture."""
    return re.sub(r"^(AG|RS|AR) ", "", case)


def representative(groups: Sequence[Group], limit: int = 10) -> list[Group]:
    """At most about ``limit`` cases: all with the usual values of M, in the order of the suite."""
    if len(groups) <= limit:
        return list(groups)
    kept: set[int] = set()
    for rows in _PREFERRED_ROWS:
        more = {i for i, g in enumerate(groups) if g.first.params.get("m") == rows}
        if more and (not kept or len(kept | more) <= limit):
            kept |= more
    chosen = [g for i, g in enumerate(groups) if i in kept] or list(groups)
    return chosen[:: -(-len(chosen) // (2 * limit))]


def shown_variants(groups: Sequence[Group]) -> list[str]:
    """Peers but for the baseline, and then ours, that have a speed-up anywhere."""
    names = variants_of(groups, "peer", "ours")
    baseline = groups[0].baseline_name
    return [v for v in names if v != baseline and any(g.speedup(g.rows.get(v)) for g in groups)]


def speedup_by_rows(groups: Sequence[Group], noise: Noise | None) -> Picture | None:
    """Speed-up over the baseline against M, a panel for each projection of a model; None below three values of M."""
    parts = {name: part for name, part in families(groups).items() if len(part) >= 3}
    variants = shown_variants(groups)
    values = [s for g in groups for v in variants if (s := g.speedup(g.rows.get(v)))]
    if not parts or not values:
        return None
    columns = min(len(parts), 4 if len(parts) % 5 else 5)
    rows = -(-len(parts) // columns)
    ours = variants_of(groups, "ours")
    baseline = groups[0].baseline_name
    label = f"Speed-up over {baseline} against M"
    with figure(
        label,
        64 + 172.0 * rows,
        rows=rows,
        columns=columns,
        margins=(52, 16, 56, 44),
        wspace=0.1,
        hspace=0.42,
        sharex=True,
        sharey=True,
    ) as (picture, axes):
        panels = list(axes.flat)
        for panel in panels[len(parts) :]:
            panel.set_visible(False)
        ms = [g.first.params["m"] for part in parts.values() for g in part]
        for i, (axis, (name, part)) in enumerate(zip(panels, parts.items(), strict=False)):
            ratio_axis(axis, min(values), max(values), which="y", noise=noise.floor if noise else 0.0, most=5)
            axis.set_xscale("log")
            for variant in variants:
                _line(
                    picture, axis, part, variant, color_of(variant, ours, baseline, variants), variant in ours
                )
            axis.set_title(_plain(name), fontsize=12.5, pad=6)
            tidy(axis, grid="y")
            log_ticks(axis, min(ms) / 1.3, max(ms) * 1.3, "x")
            marks = [m for m in (16, 128, 1024, 8192) if min(ms) <= m <= max(ms)] or sorted(set(ms))
            axis.set_xticks(marks, labels=[str(m) for m in marks])
            axis.tick_params(labelleft=i % columns == 0, labelbottom=i + columns >= len(parts))
        panels[0].annotate("M", (1, 0), xycoords="figure fraction", xytext=(-16, 8), textcoords="offset points",
                           ha="right", color=COLORS["muted"])  # fmt: skip
        entries = [
            (v, color_of(v, ours, baseline, variants), "line" if v in ours else "dashed") for v in variants
        ]
        legend(panels[0], entries, y=1.16)
    return picture


def _line(picture: Picture, axis: Any, part: Sequence[Group], variant: str, color: str, mine: bool) -> None:
    points = [(g.first.params["m"], s, g) for g in part if (s := g.speedup(g.rows.get(variant)))]
    points.sort(key=lambda p: p[0])
    if not points:
        return
    axis.plot([p[0] for p in points], [p[1] for p in points], color=color, lw=2.2 if mine else 1.6,
              ls="-" if mine else (0, (3, 1.5)), zorder=3 if mine else 2)  # fmt: skip
    for m, s, group in points:
        (dot,) = axis.plot([m], [s], "o", ms=5 if mine else 4, mew=0, color=color, zorder=4 if mine else 2)
        picture.tip(dot, tooltip(group, group.rows[variant]))


def anatomy(groups: Sequence[Group], noise: Noise | None) -> Picture | None:
    """For each case and variant: speed-up over the baseline, and where its time goes: the GEMM, and what is exposed.

    Times are in parts of the baseline's; the ceiling is a mark across the variants of a case.
    """
    lines: list[tuple[float, Group, Row]] = []
    centers: list[tuple[float, str]] = []
    y = 0.0
    for group in groups:
        names = [group.baseline_name, *shown_variants([group])] if group.baseline else []
        rows = [group.rows[v] for v in names if group.speedup(group.rows.get(v))]
        failed = [r for r in group.of_role("ours") if r.status == "failed"]
        if not rows and not failed:
            continue
        start = y
        for row in [*rows, *failed]:
            lines.append((y, group, row))
            y += _LINE
        centers.append(((start + y - _LINE) / 2, short_case(_plain(group.case), 30)))
        y += _GAP
    values = [s for _, g, r in lines if (s := g.speedup(r))]
    if not values:
        return None
    known = [g for _, g, _ in lines]
    ours = variants_of(known, "ours")
    baseline = known[0].baseline_name
    others = variants_of(known, "peer")
    found = spread(v for g in groups if (v := g.speedup(g.ours)))
    label = f"Speed-up over {baseline} and exposed communication" + (
        f", geometric mean {found.geomean:.2f}" if found else ""
    )
    room = max(110.0, 24 + 7.2 * max(len(name) for _, name in centers))
    with figure(
        label,
        104 + y,
        columns=2,
        margins=(room, 166, 64, 36),
        width_ratios=[5, 8],
        wspace=0.08,
        sharey=True,
    ) as (picture, axes):
        left, right = axes[0]
        ratio_axis(
            left,
            min(values) / (1.15 if min(values) < 1 else 1),
            max(values),
            noise=noise.floor if noise else 0.0,
            most=7,
        )
        longest = max([1.0, *(1 / v for v in values)])
        for at, group, row in lines:
            color = color_of(row.variant, ours, baseline, others)
            _speedup(picture, left, at, group, row, color)
            _stack(picture, right, at, group, row, longest)
        for axis in axes[0]:
            axis.set_ylim(y - _GAP, -_LINE)
            axis.tick_params(labelleft=False)
            tidy(axis)
        left.set_yticks([c for c, _ in centers], [name for _, name in centers])
        left.tick_params(axis="y", labelleft=True, labelcolor=COLORS["ink"])
        right.set_xlim(0, longest * 1.02)
        ticks = [t for t in (0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3) if t <= longest]
        right.set_xticks(ticks, labels=[percent(t) for t in ticks])
        used = {r.variant for _, _, r in lines}
        order = [baseline, *(v for v in [*others, *ours] if v != baseline and v in used)]
        legend(
            left,
            [(v, color_of(v, ours, baseline, others), "bar") for v in order],
            x=-(room - 24) / 280,
            y=1 + 24 / (y + 4),
        )
        entries = [("GEMM alone", COLORS["gemm"], "bar"), ("exposed communication", COLORS["comm"], "bar")]
        entries.append(("ceiling", COLORS["ink"], "tick"))
        legend(right, entries)
    return picture


def _speedup(picture: Picture, axis: Any, y: float, group: Group, row: Row, color: str) -> None:
    value = group.speedup(row)
    if value is None:
        axis.text(1, y, "  FAILED", va="center", color=COLORS["comm"], weight="bold", fontsize=11)
        return
    (bar,) = axis.barh(y, value - 1, left=1, height=_LINE - 4, color=color, zorder=2)
    picture.tip(bar, tooltip(group, row))
    if row.variant == group.baseline_name:
        axis.plot([1], [y], "o", ms=5, mew=0, color=color, zorder=3)
        return
    mine = row.role == "ours"
    axis.annotate(f"{value:.2f}", (value, y), xytext=(5 if value >= 1 else -5, 0), textcoords="offset points",
                  va="center", ha="left" if value >= 1 else "right", fontsize=11, weight="bold" if mine else "normal",
                  color=COLORS["ink" if mine else "muted"])  # fmt: skip


def _stack(picture: Picture, axis: Any, y: float, group: Group, row: Row, longest: float) -> None:
    value = group.speedup(row)
    if value is None or row.best is None:
        return
    total = 1 / value
    exposed = group.exposed(row)
    mine = row.role == "ours"
    text = f"{number(row.best.p50)} us"
    if exposed is None:
        (bar,) = axis.barh(y, total, height=_LINE - 4, color=COLORS["other"], zorder=2)
        picture.tip(bar, tooltip(group, row))
    else:
        part = min(1.0, max(0.0, exposed.exposed / row.best.p50))
        (bar,) = axis.barh(y, total * (1 - part), height=_LINE - 4, color=COLORS["gemm"], zorder=2)
        (rest,) = axis.barh(
            y, total * part, left=total * (1 - part), height=_LINE - 4, color=COLORS["comm"], zorder=2
        )
        tip = f"{tooltip(group, row)}\nexposed {number(exposed.exposed)} us, hidden {hidden_text(exposed.hidden)}"
        for artist in (bar, rest):
            picture.tip(artist, tip)
        if exposed.hidden == exposed.hidden:
            text += f", {hidden_text(exposed.hidden)} hidden" if row.variant != group.baseline_name else ""
    ceiling = group.timed("ceiling")
    base = group.baseline
    if ceiling and base and ceiling.us and base.us and row.us:
        at = ceiling.us.p50 / base.us.p50
        axis.plot(
            [at, at],
            [y - _LINE / 2, y + _LINE / 2],
            color=COLORS["ink"],
            lw=1.6,
            solid_capstyle="butt",
            zorder=4,
        )
    axis.annotate(text, (1, y), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points",
                  va="center", fontsize=11, weight="bold" if mine else "normal",
                  color=COLORS["ink" if mine else "muted"])  # fmt: skip
