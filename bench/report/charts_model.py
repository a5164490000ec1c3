"""Pictures of the layer and train suites: bars a case, a line for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records import Row
from .analysis import Group, Noise, forward_backward
from .charts_gemm import short_case, tooltip
from .draw import COLORS, Picture, color_of, figure, legend, tidy
from .table import number, percent
from .tables_gemm import variants_of

__all__ = ["layer_bars", "train_bars"]

_LINE = 17.0
_GAP = 14.0


def layer_bars(groups: Sequence[Group], noise: Noise | None) -> Picture | None:
    """Time of forward (full colour) and backward (paler) in parts of the baseline's, and peak memory."""
    lines, centers, height = _lines(groups)
    if not lines:
        return None
    ours, baseline, others = _names(groups)
    has_memory = any(row.peak_bytes for _, _, row in lines)
    label = f"Time of forward and backward against {baseline}, and peak memory"
    with figure(
        label,
        104 + height,
        columns=2,
        margins=(190, 20, 64, 36),
        width_ratios=[8, 4] if has_memory else [11.9, 0.1],
        wspace=0.42,
        sharey=True,
    ) as (picture, axes):
        time, memory = axes[0]
        longest = 1.0
        for y, group, row in lines:
            value = group.speedup(row)
            if value is None or not row.best:
                continue
            total = 1 / value
            longest = max(longest, total)
            color = color_of(row.variant, ours, baseline, others)
            forward, backward = (t or 0.0 for t in forward_backward(row))
            share = forward / (forward + backward) if forward + backward > 0 else 1.0
            tip = f"{tooltip(group, row)}\nforward {number(forward)} us, backward {number(backward)} us"
            for left, width, alpha in ((0.0, total * share, 1.0), (total * share, total * (1 - share), 0.55)):
                (bar,) = time.barh(y, width, left=left, height=_LINE - 4, color=color, alpha=alpha, zorder=2)
                picture.tip(bar, tip)
            mine = row.role == "ours"
            text = f"{number(row.best.p50)} us"
            _text(time, y, text if row.variant == baseline else f"{text}, {value:.2f}×", mine)
            if row.peak_bytes:
                gib = row.peak_bytes / 2**30
                (bar,) = memory.barh(y, gib, height=_LINE - 4, color=color, zorder=2)
                picture.tip(bar, f"{tooltip(group, row)}\npeak {gib:.2f} GiB beyond the inputs")
                _text(memory, y, f"{gib:.2f}", mine, gib)
        _lost(time, lines)
        _case_axis(time, centers, height)
        memory.tick_params(labelleft=False)
        time.axvline(1, color=COLORS["muted"], lw=1.2)
        time.set_xlim(0, longest * 1.01)
        time.set_xticks([0, 0.25, 0.5, 0.75, 1], labels=[percent(t) for t in (0, 0.25, 0.5, 0.75, 1)])
        tidy(memory)
        if has_memory:
            memory.set_xlim(0, memory.get_xlim()[1] * 1.15)
            memory.set_title("peak memory, GiB", fontsize=12, color=COLORS["muted"])
        else:
            memory.set_visible(False)
        _variants(time, ours, baseline, others, lines, height)
        legend(time, [("forward", COLORS["muted"], "bar"), ("backward (paler)", COLORS["faint"], "bar")])
    return picture


def train_bars(groups: Sequence[Group], noise: Noise | None) -> Picture | None:
    """Tokens/s of each variant in parts of the baseline's, with the figures written behind."""
    lines, centers, height = _lines(groups)
    if not lines:
        return None
    ours, baseline, others = _names(groups)
    with figure(f"Tokens/s against {baseline}", 82 + height, margins=(190, 268, 42, 36)) as (picture, axes):
        axis = axes[0, 0]
        best = 1.0
        for y, group, row in lines:
            value = group.speedup(row)
            if value is None:
                continue
            best = max(best, value)
            mine = row.role == "ours"
            (bar,) = axis.barh(
                y, value, height=_LINE - 4, color=color_of(row.variant, ours, baseline, others), zorder=2
            )
            picture.tip(bar, tooltip(group, row))
            tokens, mfu = row.extra.get("tokens_per_s"), row.extra.get("mfu")
            parts = [f"{tokens:,.0f} tokens/s"] if tokens else []
            parts += [f"MFU {100 * mfu:.1f} %"] if mfu else []
            parts += [f"{value:.2f}×"] if row.variant != baseline else []
            _text(axis, y, ", ".join(parts), mine)
        _lost(axis, lines)
        _case_axis(axis, centers, height)
        axis.axvline(1, color=COLORS["muted"], lw=1.2)
        axis.set_xlim(0, best * 1.01)
        ticks = [0, 0.25, 0.5, 0.75, 1]
        axis.set_xticks(ticks, labels=[percent(t) for t in ticks])
        _variants(axis, ours, baseline, others, lines, height, second=False)
    return picture


def _lines(groups: Sequence[Group]) -> tuple[list[tuple[float, Group, Row]], list[tuple[float, str]], float]:
    """(y, group, row) of every bar, (y, name) of every case, and the height of all."""
    lines: list[tuple[float, Group, Row]] = []
    centers = []
    y = 0.0
    for group in groups:
        if not group.baseline:
            continue
        names = variants_of([group], "peer", "ours")
        names.sort(key=lambda v: v != group.baseline_name)
        rows = [group.rows[v] for v in names if group.rows[v].status != "skipped"]
        for i, row in enumerate(rows):
            lines.append((y + i * _LINE, group, row))
        centers.append((y + (len(rows) - 1) * _LINE / 2, group.case))
        y += len(rows) * _LINE + _GAP
    return lines, centers, y - _GAP


def _names(groups: Sequence[Group]) -> tuple[list[str], str, list[str]]:
    return variants_of(groups, "ours"), groups[0].baseline_name, variants_of(groups, "peer")


def _text(axis: Any, y: float, text: str, mine: bool, x: float | None = None) -> None:
    """Text behind a bar that ends at ``x``, or beside the axis."""
    at, coordinates = ((1, y), ("axes fraction", "data")) if x is None else ((x, y), "data")
    axis.annotate(text, at, xycoords=coordinates, xytext=(6, 0), textcoords="offset points", va="center", fontsize=11,
                  weight="bold" if mine else "normal", color=COLORS["ink" if mine else "muted"])  # fmt: skip


def _lost(axis: Any, lines: Sequence[tuple[float, Group, Row]]) -> None:
    """Where a bar would be: FAILED, or why there is none."""
    for y, _, row in lines:
        if row.status != "ok":
            wrong = row.status == "failed"
            axis.text(0, y, f"  {row.variant}: {'FAILED' if wrong else row.status}", va="center", fontsize=11,
                      weight="bold" if wrong else "normal", color=COLORS["comm" if wrong else "muted"])  # fmt: skip


def _case_axis(axis: Any, centers: Sequence[tuple[float, str]], height: float) -> None:
    axis.set_yticks([c for c, _ in centers], [short_case(name, 28) for _, name in centers])
    axis.set_ylim(height, -_LINE)
    axis.tick_params(axis="y", labelcolor=COLORS["ink"])
    tidy(axis)


def _variants(
    axis: Any,
    ours: Sequence[str],
    baseline: str,
    others: Sequence[str],
    lines: Sequence[tuple[float, Group, Row]],
    height: float,
    *,
    second: bool = True,
) -> None:
    used = {row.variant for _, _, row in lines}
    order = [baseline, *(v for v in [*others, *ours] if v != baseline and v in used)]
    shift = 24 / (height + 4) if second else 0.0
    legend(axis, [(v, color_of(v, ours, baseline, others), "bar") for v in order], y=1 + shift)
    if second:
        axis.add_artist(axis.get_legend())
