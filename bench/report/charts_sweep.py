"""Pictures of the sweep, as in the Stream-K paper: speed-ups and achieved rates against arithmetic intensity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..records import Row
from .analysis import Group, Noise, intensity, noise_floor, plan_of, waves
from .charts_gemm import log_ticks, tooltip
from .draw import COLORS, Picture, figure, legend, ratio_axis, tidy
from .sweep import COMPUTE_BOUND, OURS, Statistics, predicted_us, ratios, roofs
from .table import number
from .tables_gemm import split

__all__ = ["figures", "model_scatter", "speedups", "utilisation", "waves_scatter"]

Point = tuple[float, float, Group, Row]


def figures(rows: Sequence[Row]) -> dict[str, Callable[[], Picture | None]]:
    """Pictures for documents by name, each dtype's; each is drawn when it is called."""
    from .analysis import group_cases

    found: dict[str, Callable[[], Picture | None]] = {}
    for dtype, groups in split(group_cases(rows, "sweep"), lambda g: g.dtype).items():
        noise = noise_floor(groups)
        found |= {
            f"sweep-speedup-{dtype}": lambda groups=groups, noise=noise: speedups(groups, noise),  # type: ignore[misc]
            f"sweep-utilisation-{dtype}": lambda groups=groups: utilisation(groups, rows),  # type: ignore[misc]
            f"sweep-waves-{dtype}": lambda groups=groups, noise=noise: waves_scatter(groups, noise),  # type: ignore[misc]
            f"sweep-model-{dtype}": lambda groups=groups: model_scatter(groups),  # type: ignore[misc]
        }
    return found


def speedups(groups: Sequence[Group], noise: Noise | None) -> Picture | None:
    """Ours over cuBLAS, and over its own data-parallel schedule with the same tile, against arithmetic intensity."""
    baseline = next((g.baseline_name for g in groups if g.baseline_name), "the baseline")
    panels = {
        f"against {baseline}": _points(groups, OURS, "cublas"),
        "against our data-parallel schedule, same tile": _points(groups, OURS, "same tile"),
    }
    panels = {title: points for title, points in panels.items() if points}
    if not panels:
        return None
    told = "; ".join(f"{title}: {_told(points)}" for title, points in panels.items())
    with figure(f"Speed-up of ours by shape: {told}", 420, columns=len(panels), margins=(56, 96, 52, 48),
                wspace=0.34) as (picture, axes):  # fmt: skip
        for axis, (title, points) in zip(axes[0], panels.items(), strict=True):
            values = [p[1] for p in points]
            ratio_axis(axis, min(values), max(values), which="y", noise=noise.floor if noise else 0.0)
            _dots(picture, axis, points, "ours")
            _intensity_axis(axis, points, groups[0].dtype)
            _marks(axis, values)
            axis.set_title(f"{title}, {len(points):,} shapes", pad=14)
            tidy(axis, grid="both")
    return picture


def utilisation(groups: Sequence[Group], rows: Sequence[Row]) -> Picture | None:
    """Rate in parts of the matrix units' against arithmetic intensity, cuBLAS beside ours, under the roof."""
    baseline = next((g.baseline_name for g in groups if g.baseline_name), "")
    sides = {baseline: "baseline", OURS: "ours"}
    if not any(g.timed(name) for g in groups for name in sides):
        return None
    top, slope, known = roofs(groups, rows)
    label = f"Roofline: part of {number(top)} TFLOP/s that {baseline} and ours reach"
    with figure(label, 420, columns=2, margins=(64, 20, 52, 48), wspace=0.06, sharey=True) as (picture, axes):
        for axis, (name, color) in zip(axes[0], sides.items(), strict=True):
            points = [
                (x, 100 * row.tflops / top, g, row)
                for g in groups
                if (row := g.timed(name)) and row.tflops and (x := intensity(row))
            ]
            if not points:
                continue
            low, high = min(p[0] for p in points) / 1.15, max(p[0] for p in points) * 1.15
            corner = top / slope
            axis.plot(
                [low, corner, high],
                [100 * low * slope / top, 100, 100],
                color=COLORS["muted"],
                lw=1.4,
                zorder=1,
            )
            _dots(picture, axis, points, color)
            _intensity_axis(axis, points, groups[0].dtype)
            axis.set_ylim(0, 106)
            axis.set_title(f"{'ours' if name == OURS else name}, {len(points):,} shapes", pad=14)
            tidy(axis, grid="both")
        axes[0, 0].set_ylabel(f"% of {number(top)} TFLOP/s" + ("" if known else " (the highest here)"))
        axes[0, 1].tick_params(labelleft=False)
    return picture


def waves_scatter(groups: Sequence[Group], noise: Noise | None) -> Picture | None:
    """The same ratios against waves of tiles: what a last wave costs, and what launching does."""
    panels = {
        "against the baseline": _points(groups, OURS, "cublas", waves),
        "against data-parallel, same tile": _points(groups, OURS, "same tile", waves),
    }
    panels = {title: points for title, points in panels.items() if points}
    if not panels:
        return None
    with figure("Speed-up of ours against waves of its tiles", 420, columns=len(panels), margins=(56, 96, 52, 48),
                wspace=0.34) as (picture, axes):  # fmt: skip
        for axis, (title, points) in zip(axes[0], panels.items(), strict=True):
            values = [p[1] for p in points]
            ratio_axis(axis, min(values), max(values), which="y", noise=noise.floor if noise else 0.0)
            _by_schedule(picture, axis, points)
            axis.set_xscale("log")
            log_ticks(axis, min(p[0] for p in points) / 1.2, max(p[0] for p in points) * 1.2, "x")
            axis.set_xlabel("waves: tiles / thread blocks at once")
            axis.set_title(title, pad=34)
            tidy(axis, grid="both")
    return picture


def model_scatter(groups: Sequence[Group]) -> Picture | None:
    """Predicted over measured time of our plans, against measured time."""
    points = [
        (row.us.p50, p / row.us.p50, g, row)
        for g in groups
        if (row := g.timed(OURS)) and row.us and (p := predicted_us(row))
    ]
    if not points:
        return None
    with figure("Predicted over measured time of our plans", 380, margins=(60, 96, 52, 48)) as (
        picture,
        axes,
    ):
        axis = axes[0, 0]
        values = [p[1] for p in points]
        ratio_axis(axis, min(values), max(values), which="y")
        _by_schedule(picture, axis, points)
        axis.set_xscale("log")
        log_ticks(axis, min(p[0] for p in points) / 1.2, max(p[0] for p in points) * 1.2, "x")
        axis.set_xlabel("measured, us")
        axis.set_title("predicted / measured", pad=34)
        tidy(axis, grid="both")
    return picture


def _points(
    groups: Sequence[Group], ours: str, against: str, x_of: Callable[[Row], float | None] = intensity
) -> list[Point]:
    rows = [(g, value, g.rows[ours]) for g, value in ratios(groups, ours, against)]
    return [(x, value, g, row) for g, value, row in rows if (x := x_of(row))]


def _told(points: Sequence[Point]) -> str:
    stats = Statistics.of([p[1] for p in points])
    assert stats is not None
    return f"geometric mean {stats.geomean:.2f}, 5th percentile {stats.p5:.2f}, from {stats.min:.2f} to {stats.max:.2f}"


def _dots(picture: Picture, axis: Any, points: Sequence[Point], color: str) -> None:
    """One object for all: a thousand with tooltips would be a megabyte. Invisible ones over the extremes have them."""
    axis.scatter(
        [p[0] for p in points], [p[1] for p in points], s=11, lw=0, color=COLORS[color], alpha=0.55, zorder=2
    )
    ranked = sorted(points, key=lambda p: p[1])
    for x, y, group, row in ranked[:20] + ranked[20:][-20:]:
        (dot,) = axis.plot([x], [y], "o", ms=5, mew=0, color=COLORS[color], alpha=0, zorder=3)
        picture.tip(dot, tooltip(group, row))


def _by_schedule(picture: Picture, axis: Any, points: Sequence[Point]) -> None:
    """Whole tiles in one colour, cut ones in another."""
    kinds: Mapping[str, tuple[str, list[Point]]] = {"whole tiles": ("peer1", []), "tiles cut": ("ours", [])}
    for point in points:
        cut = (plan_of(point[3]).get("partial_tiles") or 0) > 0
        kinds["tiles cut" if cut else "whole tiles"][1].append(point)
    for color, some in kinds.values():
        if some:
            _dots(picture, axis, some, color)
    legend(axis, [(name, COLORS[color], "dot") for name, (color, some) in kinds.items() if some])


def _intensity_axis(axis: Any, points: Sequence[Point], dtype: str) -> None:
    low, high = min(p[0] for p in points), max(p[0] for p in points)
    axis.set_xscale("log")
    log_ticks(axis, low / 1.15, high * 1.15, "x")
    axis.set_xlabel("arithmetic intensity, flop/byte")
    bound = COMPUTE_BOUND.get(dtype)
    if bound and low < bound < high:
        axis.axvline(bound, color=COLORS["faint"], lw=1, ls=(0, (3, 3)), zorder=1)


def _marks(axis: Any, values: Sequence[float]) -> None:
    """Lines at the mean and the percentiles, written beside the axis; those that would overlap move apart."""
    stats = Statistics.of(values)
    assert stats is not None
    axis.axhline(stats.geomean, color=COLORS["ours4"], lw=1.6, zorder=4)
    marks = {"95th pct.": stats.p95, "geomean": stats.geomean, "5th pct.": stats.p5}
    low, high = axis.get_ylim()
    room = (high / low) ** (16 / 320)  # a line of text, of the height of the axis
    at = stats.geomean
    places = {"95th pct.": max(stats.p95, at * room), "geomean": at, "5th pct.": min(stats.p5, at / room)}
    for name, value in marks.items():
        if name != "geomean":
            axis.axhline(value, color=COLORS["muted"], lw=1, ls=(0, (2, 2)), zorder=4)
        axis.annotate(f"{name} {value:.2f}", (1, places[name]), xycoords=("axes fraction", "data"), xytext=(6, 0),
                      textcoords="offset points", va="center", fontsize=11,
                      color=COLORS["ours4" if name == "geomean" else "muted"])  # fmt: skip
