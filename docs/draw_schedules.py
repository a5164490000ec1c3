"""The pictures of docs/schedules.md; run make_schedules.py.

Time runs to the right, a row is a cluster. Hue follows the tile's position in the tile order; parts of split tiles are
strong and outlined, whole tiles pale. SVG for light and for dark pages, the same bytes on every run.
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import make_schedules as made
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, Patch, PathPatch
from matplotlib.path import Path as Outline

Box = tuple[float, float, float, float]  # x0, x1, y0, y1

COLOURS = {
    "light": {"text": "#1f2328", "soft": "#59636e", "line": "#ffffff", "edge": "#1f2328", "idle": "#f0c9c4",
              "idle_back": "#fdf3f1", "epilogue": "#59636e", "fixup": "#b3007a", "wait": "#ff8c42"},
    "dark": {"text": "#e6edf3", "soft": "#9198a1", "line": "#0d1117", "edge": "#f0f6fc", "idle": "#6b3a36",
             "idle_back": "#241516", "epilogue": "#9aa3ad", "fixup": "#ff6ac1", "wait": "#ffa657"},
}  # fmt: skip


def tile_colour(tile: int, tiles: int, split: bool, theme: str) -> str:
    """Hue by position, neighbours told apart by lightness; whole tiles pale."""
    hue = 0.10 + 0.72 * tile / tiles  # yellow to violet: red is for what is lost
    if theme == "light":
        lightness, saturation = (0.60, 0.62) if split else (0.86, 0.40)
    else:
        lightness, saturation = (0.52, 0.58) if split else (0.27, 0.28)
    lightness += 0.035 if tile % 2 else -0.035
    return matplotlib.colors.to_hex(colorsys.hls_to_rgb(hue, lightness, saturation))


@contextmanager
def style() -> Iterator[None]:
    with plt.rc_context({
        "svg.hashsalt": "tpkernels", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 8.5,
        "hatch.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    }):  # fmt: skip
        yield


def save(figure: Any, name: str, path: Path) -> None:
    """Writes the picture, with the digest of what it shows."""
    metadata = {"Date": None, "Creator": None, "Description": f"{made.captions()[name]} {made.digest(name)}"}
    kind = path.suffix[1:]
    figure.savefig(path, format=kind, transparent=kind == "svg", metadata=metadata if kind == "svg" else None,
                   facecolor="none" if kind == "svg" else "#0d1117" if "dark" in path.name else "white",
                   dpi=130)  # fmt: skip
    plt.close(figure)
    if kind == "svg":
        path.write_text(compact(path.read_text()))


def compact(svg: str) -> str:
    """Coordinates to a hundredth of a point, and paths on one line: half the size, the same picture."""

    def outline(match: re.Match[str]) -> str:
        points = re.sub(
            r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), match[1]
        )
        return f'd="{" ".join(points.split())}"'

    return re.sub(r'\bd="([^"]*)"', outline, svg)


def add_boxes(axes: Any, boxes: Iterable[Box], **look: Any) -> None:
    """Many rectangles as one path: a tenth of the size of as many patches."""
    vertices: list[tuple[float, float]] = []
    codes: list[Any] = []
    for x0, x1, y0, y1 in boxes:
        vertices += [(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]
        codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    if vertices:
        axes.add_patch(PathPatch(Outline(vertices, codes), clip_on=False, **look))


def finish_axes(axes: Any, colours: dict[str, str]) -> None:
    for spine in axes.spines.values():
        spine.set_color(colours["soft"])
        spine.set_linewidth(0.7)
    axes.tick_params(colors=colours["soft"], width=0.7, length=3)
    axes.xaxis.label.set_color(colours["text"])
    axes.yaxis.label.set_color(colours["text"])


def draw_bars(axes: Any, rows: Any, tiles: int, end: float, theme: str, gap: float) -> None:
    """All that the clusters do, and what they do not, until ``end``."""
    colours = COLOURS[theme]
    by_look: dict[tuple[int, bool], list[Box]] = {}
    lost: dict[str, list[Box]] = {"epilogue": [], "fixup": [], "wait": [], "idle": []}
    for y, row in enumerate(rows):
        low, high = y + gap, y + 1 - gap
        for bar in row:
            by_look.setdefault((bar.tile, bar.split), []).append((bar.start, bar.products_end, low, high))
            lost["fixup"].append((bar.products_end, bar.write_end, low, high))
            lost["wait"].append((bar.write_end, bar.wait_end, low, high))
            lost["fixup"].append((bar.wait_end, bar.fixup_end, low, high))
            lost["epilogue"].append((bar.fixup_end, bar.end, low, high))
        lost["idle"].append((row[-1].end if row else 0, end, y, y + 1))
    idle = [box for box in lost["idle"] if box[1] - box[0] > 0.5]
    add_boxes(
        axes, idle, facecolor=colours["idle_back"], edgecolor=colours["idle"], hatch="////", linewidth=0
    )
    for (tile, split), boxes in sorted(by_look.items()):
        add_boxes(axes, boxes, facecolor=tile_colour(tile, tiles, split, theme), linewidth=0.45 if split else 0.25,
                  edgecolor=colours["edge" if split else "line"])  # fmt: skip
    for what in ("epilogue", "fixup", "wait"):
        add_boxes(axes, (box for box in lost[what] if box[1] > box[0]), facecolor=colours[what], linewidth=0)


def legend_patches(colours: dict[str, str], theme: str, tiles: int, waits: bool) -> list[Any]:
    middle = tiles // 2
    patches = [
        Patch(facecolor=tile_colour(middle, tiles, False, theme), label="whole tile"),
        Patch(facecolor=tile_colour(middle, tiles, True, theme), edgecolor=colours["edge"], linewidth=0.6,
              label="part of a split tile"),
        Patch(facecolor=colours["epilogue"], label="epilogue"),
        Patch(facecolor=colours["fixup"], label="fix-up"),
        Patch(facecolor=colours["idle_back"], edgecolor=colours["idle"], hatch="////", linewidth=0, label="idle"),
    ]  # fmt: skip
    return patches + ([Patch(facecolor=colours["wait"], label="wait for a partial")] if waits else [])


def draw_timeline(kind: str, theme: str, path: Path) -> None:
    """One schedule, all clusters."""
    colours, line, facts = COLOURS[theme], made.timeline(kind), made.facts(kind)
    tiles = len(made.plan(kind, line.splits).order)
    right = max(made.timeline(other).end for other in made.KINDS)  # one scale for all pictures
    with style():
        figure, axes = plt.subplots(figsize=(8.6, 3.7))
        figure.subplots_adjust(left=0.065, right=0.985, top=0.82, bottom=0.125)
        draw_bars(axes, line.rows, tiles, line.end, theme, 0.0)
        axes.axvline(facts["even"], color=colours["text"], linewidth=0.9, linestyle=(0, (4, 3)))
        axes.text(facts["even"], -0.7, "even share of the products", ha="center", va="bottom", color=colours["text"],
                  fontsize=7.5)  # fmt: skip
        first = made.timeline("data_parallel").end
        if line.end < 0.9 * right:
            text = f"ends at {line.end:.0f},\n{line.end / first:.2f} of\ndata_parallel"
            axes.text(line.end + 6, len(line.rows) / 2, text, va="center", color=colours["text"], fontsize=9,
                      linespacing=1.5)  # fmt: skip
        axes.set_facecolor("none")
        axes.set(xlim=(0, right * 1.002), ylim=(len(line.rows), 0), ylabel="cluster")
        axes.set_xlabel("time, in iterations")
        axes.set_yticks([0, 20, 40, 60])
        finish_axes(axes, colours)
        left = axes.get_position().x0
        figure.text(left, 0.945, kind, color=colours["text"], fontsize=11.5, fontweight="bold")
        text = f"{facts['multiplying']:.0%} of the time multiplying,  {facts['partials']} partial tiles"
        figure.text(0.985, 0.945, text, ha="right", color=colours["text"], fontsize=10)
        patches = legend_patches(colours, theme, tiles, facts["waits"] > 0)
        figure.legend(handles=patches, loc="upper left", ncols=6, frameon=False,
                      bbox_to_anchor=(left - 0.008, 0.94), labelcolor=colours["soft"], fontsize=8,
                      handlelength=1.4, columnspacing=1.4, borderpad=0)  # fmt: skip
        save(figure, kind, path)


def add_arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A partial, from where it is written to where it is added."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, linewidth=1.1, color=colour,
                                   connectionstyle="arc3,rad=0", shrinkA=0, shrinkB=0, zorder=5))  # fmt: skip


def draw_zoom(theme: str, path: Path) -> None:
    """A few clusters of the hybrid, with every partial and where it goes."""
    colours, line = COLOURS[theme], made.timeline("hybrid_first")
    tiles, rows = len(made.plan("hybrid_first").order), line.rows[:5]
    with style():
        figure, axes = plt.subplots(figsize=(8.6, 2.9))
        figure.subplots_adjust(left=0.085, right=0.985, top=0.98, bottom=0.165)
        draw_bars(axes, rows, tiles, line.end, theme, 0.13)
        partials = {}
        for y, row in enumerate(rows):
            for bar in row:
                text = f"tile {bar.tile}"
                length = bar.products_end - bar.start
                if length > 40:
                    text += f"\nK {bar.k_begin}–{bar.k_end}" if bar.split else "\nwhole"
                if length > 9:
                    axes.text((bar.start + bar.products_end) / 2, y + 0.5, text, ha="center", va="center", fontsize=7.5,
                              color="#0d1117" if bar.split else colours["text"],
                              rotation=0 if length > 20 else 90)  # fmt: skip
                if bar.writes:
                    partials[bar.tile] = (bar.write_end, y)
                elif bar.split and bar.tile in partials:
                    x, source = partials[bar.tile]
                    add_arrow(axes, (x, source + 0.87), (bar.wait_end, y + 0.13), colours["fixup"])
        axes.set_facecolor("none")
        axes.set(xlim=(0, line.end), ylim=(len(rows), 0), ylabel="ticket", xlabel="time, in iterations")
        axes.set_yticks([y + 0.5 for y in range(len(rows))], [str(y) for y in range(len(rows))])
        finish_axes(axes, colours)
        save(figure, "zoom", path)


def draw_divided(theme: str, path: Path) -> None:
    """One split tile whose clusters finish it together, and what one of them adds."""
    colours, bars = COLOURS[theme], made.first_split()
    tiles, end = len(made.plan("hybrid_aligned").order), max(bar.end for bar in bars)
    middle = len(bars) // 2
    with style():
        figure, axes = plt.subplots(figsize=(8.6, 2.9))
        figure.subplots_adjust(left=0.085, right=0.985, top=0.88, bottom=0.165)
        draw_bars(axes, [[bar] for bar in bars], tiles, end, theme, 0.13)
        for y, bar in enumerate(bars):
            axes.text((bar.start + bar.products_end) / 2, y + 0.5, f"tile {bar.tile}\nK {bar.k_begin}–{bar.k_end}",
                      ha="center", va="center", fontsize=7.5, color="#0d1117")  # fmt: skip
            axes.text((bar.wait_end + bar.fixup_end) / 2, y + 0.5, f"adds 1/{len(bars)}", ha="center", va="center",
                      fontsize=7, color=colours["line"], zorder=6)  # fmt: skip
            if y != middle:
                edge = -0.37 if y > middle else 0.37  # the side that faces the other
                add_arrow(axes, (bar.write_end, y + 0.5 + edge), (bars[middle].wait_end, middle + 0.5 - edge),
                          colours["fixup"])  # fmt: skip
        axes.set_facecolor("none")
        axes.set(xlim=(min(bar.start for bar in bars), end), ylim=(len(bars), 0), ylabel="cluster",
                 xlabel="time, in iterations")  # fmt: skip
        axes.set_yticks([y + 0.5 for y in range(len(bars))], [str(bar.ticket) for bar in bars])
        finish_axes(axes, colours)
        patches = legend_patches(colours, theme, tiles, True)
        figure.legend(handles=patches[1:4] + patches[5:], loc="upper left", ncols=6, frameon=False,
                      bbox_to_anchor=(axes.get_position().x0 - 0.008, 1.0), labelcolor=colours["soft"], fontsize=8,
                      handlelength=1.4, columnspacing=1.4, borderpad=0.3)  # fmt: skip
        save(figure, "divided", path)


def draw_order(theme: str, path: Path) -> None:
    """The output matrix: the position of every tile, and where a wave ends and the next begins."""
    colours, order = COLOURS[theme], made.plan("data_parallel").order
    tiles, wave = len(order), made.clusters()
    with style():
        figure, axes = plt.subplots(figsize=(4.6, 4.3))
        figure.subplots_adjust(left=0.12, right=0.98, top=0.90, bottom=0.02)
        places = {order.at(i)[1:]: i for i in range(tiles)}
        for (m, n), i in places.items():
            add_boxes(axes, [(n, n + 1, m, m + 1)], facecolor=tile_colour(i, tiles, False, theme),
                      edgecolor=colours["line"], linewidth=0.8)  # fmt: skip
            axes.text(n + 0.5, m + 0.5, str(i), ha="center", va="center", fontsize=7, color=colours["text"])
            for step, edge in (
                ((0, 1), ((n + 1, n + 1), (m, m + 1))),
                ((1, 0), ((n, n + 1), (m + 1, m + 1))),
            ):
                after = places.get((m + step[0], n + step[1]))
                if after is not None and after // wave != i // wave:
                    axes.plot(*edge, color=colours["edge"], linewidth=1.6, solid_capstyle="round", zorder=4)
        axes.set_facecolor("none")
        axes.set(xlim=(0, order.tiles_n), ylim=(order.tiles_m, 0))
        axes.set_xticks([i + 0.5 for i in range(order.tiles_n)], [str(i) for i in range(order.tiles_n)])
        axes.set_yticks([i + 0.5 for i in range(order.tiles_m)], [str(i) for i in range(order.tiles_m)])
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set(xlabel="column of tiles", ylabel="row of tiles")
        finish_axes(axes, colours)
        save(figure, "order", path)
