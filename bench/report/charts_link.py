"""Pictures of the link suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records import Row
from .draw import COLORS, Picture, figure, legend, legend_lines, tidy
from .table import number, percent, size
from .tables_link import TRANSFERS, slowdown, transport_of

__all__ = ["bandwidth_curves", "beside_bars"]

_SHADES = ("ours4", "ours", "ours2", "ours3")
_KINDS = {"engine": "peer1", "lsu": "peer2", "torch": "peer4", "gloo": "baseline", "nccl": "baseline"}
_MOST = 9  # curves that can still be told apart
_TIMES = {
    "gemm_alone_us": "GEMM alone",
    "transport_alone_us": "transport alone",
    "together_us": "both together",
}


def bandwidth_curves(rows: Sequence[Row]) -> Picture | None:
    """GB/s against size, a panel for each transfer, a curve for each transport.

    Bulk copies have a shade for each number of SMs; transports in chunks or with flags are left to the table.
    """
    moves = [r for r in rows if r.op in TRANSFERS and r.status == "ok" and r.gbps and r.params.get("bytes")]
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in moves:
        if transport_of(row).plain:
            curves.setdefault((row.op, row.variant), []).append(row)
    curves = {key: part for key, part in curves.items() if len(part) > 1}
    ops = [op for op in TRANSFERS if any(key[0] == op for key in curves)]
    if not ops:
        return None
    colors = _colors([part[0] for part in curves.values()])
    curves = {key: part for key, part in curves.items() if key[1] in colors}
    columns = len(ops) if len(ops) <= 4 else 3
    lines = -(-len(ops) // columns)
    top = max(r.gbps or 0 for part in curves.values() for r in part)
    label = f"Bandwidth of each transport against size, up to {top:.0f} GB/s"
    entries = [(v, c, "dashed" if "SMs" not in v else "line") for v, c in colors.items()]
    above = 60 + 18.0 * legend_lines(entries)
    with figure(
        label,
        4 + above + 212.0 * lines,
        rows=lines,
        columns=columns,
        margins=(52, 20, above, 28),
        wspace=0.08,
        hspace=0.32,
        sharey=True,
    ) as (picture, axes):
        panels = list(axes.flat)
        for panel in panels[len(ops) :]:
            panel.set_visible(False)
        for axis, op in zip(panels, ops, strict=False):
            for (of, variant), part in curves.items():
                if of == op:
                    _curve(picture, axis, part, colors[variant])
            axis.set_title(op.replace("_", "-"), fontsize=12.5)
            axis.set_xscale("log")
            sizes = sorted({r.params["bytes"] for (of, _), part in curves.items() if of == op for r in part})
            axis.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
            keep = sizes[:: -(-len(sizes) // 4)]
            axis.set_xticks(keep, labels=[size(b) for b in keep])
            axis.set_xticks([], minor=True)
            axis.set_ylim(0, top * 1.06)
            tidy(axis, grid="y")
        panels[0].annotate("GB/s of a rank", (0, 1), xytext=(-44, 26), textcoords="offset points",
                           xycoords="axes fraction", color=COLORS["muted"])  # fmt: skip
        legend(panels[0], entries, x=0.36 if columns > 1 else 0.12, y=1.24)
    return picture


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each transport that is drawn, in the order of the legend."""
    kinds = {row.variant: transport_of(row) for row in rows}
    bulk = sorted((v for v, t in kinds.items() if t.kind not in _KINDS), key=lambda v: kinds[v].sms or 10**6)
    chosen = [v for v, t in kinds.items() if t.kind in _KINDS]
    if len(chosen) + len(bulk) > _MOST:  # one of the loads and stores is enough
        chosen = [v for v in chosen if kinds[v].kind != "lsu" or kinds[v].sms == 16]
    step = max(1, len(bulk) - 1)
    shades = {v: _SHADES[round((len(bulk) - 1 - i) * (len(_SHADES) - 1) / step)] for i, v in enumerate(bulk)}
    colors = {v: COLORS[_KINDS[kinds[v].kind]] for v in chosen}
    if sum(kinds[v].kind == "engine" for v in chosen) > 1:
        colors |= {v: COLORS["peer3"] for v in chosen if kinds[v].kind == "engine" and "pull" in v}
    return {**colors, **{v: COLORS[s] for v, s in shades.items()}}


def _curve(picture: Picture, axis: Any, rows: Sequence[Row], color: str) -> None:
    ordered = sorted(rows, key=lambda r: float(r.params["bytes"]))
    solid = "SMs" in rows[0].variant
    axis.plot([r.params["bytes"] for r in ordered], [r.gbps for r in ordered], color=color, lw=2,
            ls="-" if solid else (0, (3, 1.5)))  # fmt: skip
    for row in ordered:
        (dot,) = axis.plot([row.params["bytes"]], [row.gbps], "o", ms=4, mew=0, color=color)
        us = number(row.best.p50) if row.best else ""
        picture.tip(dot, f"{row.case}\n{row.variant}: {number(row.gbps)} GB/s, {us} us")


def beside_bars(rows: Sequence[Row]) -> Picture | None:
    """By how much a GEMM slows down beside each transport."""
    shown = [
        (row, s)
        for row in rows
        if row.op == "beside" and row.status == "ok" and (s := slowdown(row)) is not None
    ]
    if not shown:
        return None
    label = "Slow-down of a GEMM beside each transport"
    with figure(label, 66 + 24.0 * len(shown), margins=(330, 90, 30, 34)) as (picture, axes):
        axis = axes[0, 0]
        for y, (row, slower) in enumerate(shown):
            (bar,) = axis.barh(y, 100 * slower, height=0.56, color=COLORS["comm"], zorder=2)
            times = (f"{text} {number(row.extra.get(name))} us" for name, text in _TIMES.items())
            picture.tip(bar, "\n".join([row.case, row.variant, *times]))
            sign = "+" if slower >= 0 else ""
            axis.annotate(f"{sign}{percent(slower)}", (100 * max(slower, 0), y), xytext=(6, 0),
                          textcoords="offset points", va="center", color=COLORS["ink"])  # fmt: skip
        axis.set_yticks(
            range(len(shown)), [f"{r.case.removeprefix('beside ')}, {r.variant}" for r, _ in shown]
        )
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.tick_params(axis="y", labelcolor=COLORS["ink"])
        axis.set_title("the GEMM takes longer by, %", fontsize=12, color=COLORS["muted"])
        axis.set_xlim(
            min(0, *(100 * s for _, s in shown)) * 1.1, max(1.0, *(100 * s for _, s in shown)) * 1.08
        )
        tidy(axis)
    return picture
