"""The pictures of docs/overlap.md; run make_overlap.py. Helpers are those of draw_schedules.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import draw_schedules as base
import make_overlap as made
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

RANKS = {
    "light": ("#8fbcea", "#f2b880", "#a6d49f", "#c9a7e0"),
    "dark": ("#2f6ea8", "#a8672a", "#3f8a4a", "#7d52a3"),
}
# Who writes: a rank itself, its copy stream, others.
WRITERS = {
    "light": {"enter": "#c9d1d9", "product": "#f2b880", "peer": "#8fbcea", "none": "none"},
    "dark": {"enter": "#57606a", "product": "#a8672a", "peer": "#2f6ea8", "none": "none"},
}
Point = tuple[float, float]


def save(figure: Any, name: str, path: Path) -> None:
    """Writes the picture, with the digest of what it shows."""
    kind = path.suffix[1:]
    metadata = {"Date": None, "Creator": None, "Description": f"{made.captions()[name]} {made.digest(name)}"}
    figure.savefig(path, format=kind, transparent=kind == "svg", metadata=metadata if kind == "svg" else None,
                   facecolor="none" if kind == "svg" else "#0d1117" if "dark" in path.name else "white",
                   dpi=130)  # fmt: skip
    plt.close(figure)
    if kind == "svg":
        path.write_text(base.compact(path.read_text()))


def canvas(width: float, height: float, xlim: Point, ylim: Point) -> tuple[Any, Any]:
    """A figure of nothing but what is drawn."""
    figure, axes = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01)
    axes.set(xlim=xlim, ylim=ylim)
    axes.set_axis_off()
    axes.set_facecolor("none")
    return figure, axes


def box(axes: Any, x0: float, x1: float, y0: float, y1: float, **look: Any) -> None:
    look = {"linewidth": 0.7, "clip_on": False} | look
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, **look))


def arrow(axes: Any, start: Point, end: Point, colour: str, bend: float = 0.0) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, linewidth=1.1, color=colour,
                                   connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0, zorder=5))  # fmt: skip


def draw_page(theme: str, path: Path) -> None:
    """Words that are used, those between them, and the buffer."""
    colours, fill = base.COLOURS[theme], WRITERS[theme]
    words = {word.constant: made.span(word) for word in made.WORDS}
    said = {
        "kArrived": ("arrived(i)", "peers'\ncopy streams", "peer"),
        "kEntered": ("entered(p)", "peers'\nenter kernels", "peer"),
        "kEpoch": ("epoch()", "my enter\nkernel", "enter"),
        "kTicket": ("ticket()", "my product\n0: my enter\nkernel", "product"),
        "kBells": ("bell(c)", "1: my product\n0: my copy\nstreams", "product"),
        "kCounters": ("counter(c)", "my product", "product"),
        "kSums": ("sums(c)", "peers'\ncopy streams", "peer"),
    }
    cells: list[tuple[str, str, str, str, float]] = []
    at = 0
    for constant, (first, last) in sorted(words.items(), key=lambda item: item[1]):
        if first > at:
            cells.append(("", "", "none", "", 0.35))
        name, who, kind = said[constant]
        cells.append((name, who, kind, f"{first}" if first == last else f"{first}–{last}", 1.25))
        at = last + 1
    cells.append(("", "", "none", "", 0.35))
    cells.append(("buffer", "peers' copy streams", "peer", f"from byte {made.constants()['kBytes']}", 1.9))
    width = sum(cell[-1] for cell in cells)
    with base.style():
        figure, axes = canvas(8.6, 1.35, (0, width), (2.05, -0.15))
        x = 0.0
        for name, who, kind, place, wide in cells:
            box(axes, x + 0.015, x + wide - 0.015, 0.5, 1.35, facecolor=fill[kind], edgecolor=colours["soft"],
                linestyle="-" if name else (0, (2, 2)))  # fmt: skip
            middle = x + wide / 2
            axes.text(middle, 0.92, name, ha="center", va="center", color=colours["text"], fontsize=9.5)
            axes.text(middle, 0.36, place, ha="center", va="bottom", color=colours["soft"], fontsize=8)
            axes.text(middle, 1.48, who, ha="center", va="top", color=colours["soft"], fontsize=7.8)
            x += wide
        axes.text(0.02, 0.0, "word", ha="left", va="center", color=colours["soft"], fontsize=8)
        save(figure, "page", path)


def step_text(step: made.Step) -> str:
    if step.what == "push":
        return f"to {step.to}"
    if step.what == "product":
        return "own" if step.of == step.rank else f"of {step.of}"
    return {"sum": "+", "enter": "E", "own": "c"}.get(step.what, "")


def draw_timeline(name: str, theme: str, path: Path) -> None:
    """A call of all ranks: three streams each."""
    colours, hues = base.COLOURS[theme], RANKS[theme]
    steps = made.gather_timeline() if name == "gather" else made.scatter_timeline()
    right = max(step.end for step in steps)

    apart, high = 3.5, 0.92

    def y_of(step: made.Step) -> Point:
        low = apart * step.rank + 1.02 * made.LANES.index(step.lane)
        return low, low + high

    with base.style():
        figure, axes = canvas(8.6, 5.6, (-1.75, right + 0.05), (apart * made.WORLD + 0.1, -1.0))
        for rank in range(made.WORLD):
            y = apart * rank
            box(axes, -1.72, -1.42, y, y + 2.96, facecolor=hues[rank], edgecolor="none")
            axes.text(
                -1.57, y + 1.48, str(rank), ha="center", va="center", color=colours["text"], fontsize=11
            )
            for i, text in enumerate(made.LANES):
                axes.text(-0.1, y + 0.46 + 1.02 * i, text, ha="right", va="center", color=colours["soft"],
                          fontsize=8)  # fmt: skip
        for step in steps:
            low, top = y_of(step)
            if step.what in ("wait", "bell"):
                box(axes, step.begin, step.end, low, top, facecolor="none", edgecolor=colours["wait"],
                    hatch="////", linewidth=0)  # fmt: skip
                continue
            face = colours["epilogue"] if step.of < 0 else hues[step.of]
            box(axes, step.begin, step.end, low, top, facecolor=face, edgecolor=colours["edge"])
            colour = colours["line"] if step.of < 0 else colours["text"]
            axes.text((step.begin + step.end) / 2, (low + top) / 2, step_text(step), ha="center", va="center",
                      color=colour, fontsize=8)  # fmt: skip
        draw_what_rank_0_waits_for(axes, steps, y_of, colours["fixup"])
        axes.text(right, -0.5, "time →", ha="right", va="center", color=colours["soft"], fontsize=8)
        figure.legend(handles=timeline_legend(name, theme), loc="upper left", ncols=4, frameon=False,
                      bbox_to_anchor=(0.0, 1.005), labelcolor=colours["soft"], fontsize=8, handlelength=1.4,
                      columnspacing=1.6, borderpad=0.2)  # fmt: skip
        save(figure, name, path)


def timeline_legend(name: str, theme: str) -> list[Any]:
    colours = base.COLOURS[theme]
    ends = Patch(facecolor=colours["epilogue"], edgecolor=colours["edge"], linewidth=0.6, label="E: enter")
    what = (
        "products with a shard; copies (c: of own rows)"
        if name == "gather"
        else "products of a rank's rows; copies"
    )
    rows = Patch(facecolor=RANKS[theme][0], edgecolor=colours["edge"], linewidth=0.6, label=what)
    waits = Patch(facecolor="none", edgecolor=colours["wait"], hatch="////", linewidth=0, label="waits")
    return [ends, rows, waits]


def draw_what_rank_0_waits_for(axes: Any, steps: Sequence[made.Step], y_of: Any, colour: str) -> None:
    """Arrows from copies to rank 0, to where it reads what they bring."""
    reads = {step.of: step for step in steps if step.rank == 0 and step.what in ("product", "sum")}
    added = next((step for step in steps if step.rank == 0 and step.what == "sum"), None)
    for step in steps:
        if step.what == "push" and step.to == 0:
            to = added or reads[step.rank]
            into = to.begin if added is None else to.begin + 0.15 * step.rank
            arrow(axes, (step.end, y_of(step)[0]), (max(into, to.begin), y_of(to)[1]), colour)


def draw_order(name: str, theme: str, path: Path) -> None:
    """The rows of M, and for each rank in which order it takes their tiles."""
    colours, hues = base.COLOURS[theme], RANKS[theme]
    rows_of = made.gather_rows if name == "gather_order" else made.scatter_rows
    total = sum(made.SHARDS)
    with base.style():
        figure, axes = canvas(6.2, 4.6, (-1.15, 5.35), (total * 1.02, -total * 0.09))
        for r, begin in enumerate(made.begins()[:-1]):
            end = begin + made.SHARDS[r]
            box(axes, 0.0, 0.55, begin, end, facecolor=hues[r], edgecolor=colours["edge"])
            axes.text(0.275, (begin + end) / 2, f"of {r}\n{end - begin}", ha="center", va="center",
                      color=colours["text"], fontsize=8)  # fmt: skip
            axes.text(-0.06, begin, str(begin), ha="right", va="center", color=colours["soft"], fontsize=7.5)
            axes.plot(
                (0.55, 5.3), (begin, begin), color=colours["soft"], linewidth=0.6, linestyle=(0, (3, 3))
            )
        axes.text(-0.06, total, str(total), ha="right", va="center", color=colours["soft"], fontsize=7.5)
        axes.text(-0.95, total / 2, "row of M", ha="center", va="center", rotation=90, color=colours["text"],
                  fontsize=8.5)  # fmt: skip
        for rank in range(made.WORLD):
            x = 0.85 + 1.12 * rank
            axes.text(x + 0.5, -total * 0.045, f"rank {rank}", ha="center", va="center", color=colours["text"],
                      fontsize=9.5)  # fmt: skip
            for row in rows_of(rank):
                draw_tile_row(axes, row, x, hues, colours)
        save(figure, name, path)


def draw_tile_row(
    axes: Any, row: made.TileRow, x: float, hues: Sequence[str], colours: dict[str, str]
) -> None:
    """A box in the colours of the shards that it waits for, as high as its rows."""
    gap = 5
    for i, shard in enumerate(row.shards):
        part = 1.0 / len(row.shards)
        box(axes, x + i * part, x + (i + 1) * part, row.begin + gap, row.end - gap, facecolor=hues[shard],
            edgecolor="none")  # fmt: skip
    box(axes, x, x + 1.0, row.begin + gap, row.end - gap, facecolor="none", edgecolor=colours["edge"],
        linewidth=1.4 if len(row.shards) > 1 else 0.6)  # fmt: skip
    axes.text(x + 0.5, (row.begin + row.end) / 2, str(row.place), ha="center", va="center", color=colours["text"],
              fontsize=9 if row.end - row.begin > 40 else 7)  # fmt: skip


# Node -> column and line; lines of the peer are below.
PLACES = {
    "join n - 1": (0, 0.5), "here n": (1, 0.5), "peer here n": (1, 3.0), "all here n": (2, 0.5),
    "others' tiles n": (3, 0.5), "pushes n": (4, 0), "product n": (4, 1), "own tiles n": (4, 1), "join n": (5, 0.5),
    "peer pushes n": (4, 3.0),
}  # fmt: skip


def draw_waits(theme: str, path: Path) -> None:
    """What of a rank has to wait for what, of its own and of a peer."""
    colours, hues = base.COLOURS[theme], RANKS[theme]
    with base.style():
        figure, axes = canvas(8.6, 4.1, (-0.75, 5.6), (8.0, -0.75))
        for down, (kind, edges) in zip((0.0, 4.3), made.WAITS.items(), strict=True):
            axes.text(-0.72, down - 0.55, kind, ha="left", va="center", color=colours["text"], fontweight="bold",
                      fontsize=10)  # fmt: skip
            places = {node: (PLACES[node][0], PLACES[node][1] + down) for edge in edges for node in edge}
            for node, (x, y) in places.items():
                peer = node.startswith("peer ")
                box(axes, x - 0.36, x + 0.36, y - 0.33, y + 0.33, facecolor=hues[1 if peer else 0],
                    edgecolor=colours["edge"])  # fmt: skip
                axes.text(x, y, node.replace("peer ", "peer's\n"), ha="center", va="center", color=colours["text"],
                          fontsize=7.8)  # fmt: skip
            for before, after in edges:
                (x0, y0), (x1, y1) = places[before], places[after]
                colour = colours["fixup"] if before.startswith("peer ") else colours["soft"]
                if x0 == x1:  # from the peer, in the same column
                    arrow(axes, (x0, y0 - 0.35), (x1, y1 + 0.35), colour)
                else:
                    arrow(axes, (x0 + 0.37, y0), (x1 - 0.37, y1), colour)
        save(figure, "waits", path)


def draw(name: str, theme: str, path: Path) -> None:
    if name == "page":
        draw_page(theme, path)
    elif name == "waits":
        draw_waits(theme, path)
    elif name in ("gather", "scatter"):
        draw_timeline(name, theme, path)
    else:
        draw_order(name, theme, path)
