"""Draws docs/schedules.md: how each schedule cuts one real product.

PYTHONPATH=. python docs/make_schedules.py     writes the pictures and the table of the page
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tpkernels import _extensions

_host = _extensions.host()
FOLDER = Path(__file__).resolve().parent
M, N, K = 2048, 5120, 8192
BM, BN, BK = 256, 256, 64  # a cluster of two CTAs of 128 x 256
WORKERS = 66  # such clusters on 132 multiprocessors
KINDS = {
    "data_parallel": (1, "Every tile whole: the third wave is half empty."),
    "split_k": (2, "Every tile in two: finer, but every tile pays for a partial."),
    "stream_k": (
        1,
        "All tiles end to end, cut into equal shares: even, but every worker at another depth of K.",
    ),
    "hybrid_first": (
        1,
        "The paper's two-tile hybrid: the remainder and one wave streamed, then a whole wave.",
    ),
    "hybrid_aligned": (
        1,
        "Whole waves, then the remainder, cut at multiples of K / n only: nearly even, and few depths of K.",
    ),
}


def schedule(kind: str) -> Any:
    """The schedule of one kind, as the kernel would walk it."""
    tiles = -(-M // BM) * -(-N // BN)
    return _host.make_schedule(kind, tiles, -(-K // BK), workers=WORKERS, splits=KINDS[kind][0])


def timelines(kind: str) -> list[list[tuple[int, int, int, bool]]]:
    """Of each of the 66 clusters: (start, iterations, tile, is split), in iterations; later tickets take turns."""
    s = schedule(kind)
    rows: list[list[tuple[int, int, int, bool]]] = [[] for _ in range(WORKERS)]
    free = [0] * WORKERS
    for worker in range(s.workers):
        row = min(range(WORKERS), key=lambda i: (free[i], i))
        for x in s.segments(worker):
            rows[row].append((free[row], x.k_end - x.k_begin, x.position, x.is_split))
            free[row] += x.k_end - x.k_begin
    return rows


def facts(kind: str) -> dict[str, float]:
    """Length of the schedule in iterations, how busy clusters are, partial tiles, depths of K at which work begins."""
    s, rows = schedule(kind), timelines(kind)
    work = sum(x[1] for row in rows for x in row)
    longest = max(sum(x[1] for x in row) for row in rows)
    depths = {x.k_begin for worker in range(s.workers) for x in s.segments(worker)}
    return {
        "iterations": longest,
        "busy": work / (longest * WORKERS),
        "partials": sum(x.slot >= 0 for worker in range(s.workers) for x in s.segments(worker)),
        "depths": len(depths),
    }


def table() -> str:
    """The page's table."""
    lines = [
        "| schedule | longest worker, iterations | busy | partial tiles | depths of K |",
        "| --- | --: | --: | --: | --: |",
    ]
    for kind in KINDS:
        f = facts(kind)
        lines.append(f"| `{kind}` | {f['iterations']} | {f['busy']:.0%} | {f['partials']} | {f['depths']} |")
    return "\n".join(lines)


def draw(kind: str, path: Path) -> None:
    """One picture: time to the right, a line for each cluster, a colour for each tile, split tiles hatched."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tpkernels"
    from matplotlib import pyplot as plt

    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    figure, axes = plt.subplots(figsize=(7.2, 2.6))
    for y, row in enumerate(timelines(kind)):
        for start, length, tile, split in row:
            edge = "black" if split else "white"
            axes.barh(
                y, length, left=start, height=1, color=colours[tile % 20], edgecolor=edge, linewidth=0.3
            )
    axes.set(xlim=(0, 400), ylim=(WORKERS, 0), xlabel="iterations of 64 along K", ylabel="cluster")
    axes.set_title(f"{kind}: {facts(kind)['busy']:.0%} busy; tiles with black edges are split", fontsize=9)
    for item in (
        axes.title,
        axes.xaxis.label,
        axes.yaxis.label,
        *axes.get_xticklabels(),
        *axes.get_yticklabels(),
    ):
        item.set_color("#808080")  # readable on light and dark pages
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Writes the pictures and the table between the page's markers."""
    for kind in KINDS:
        draw(kind, FOLDER / f"schedule-{kind}.svg")
    page = FOLDER / "schedules.md"
    text = re.sub(
        r"(<!-- table -->\n).*?(\n<!-- end -->)", rf"\g<1>{table()}\g<2>", page.read_text(), flags=re.S
    )
    page.write_text(text)


if __name__ == "__main__":
    main()
