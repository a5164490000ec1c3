"""Draws docs/schedules.md: how each schedule cuts one real product. Needs matplotlib and a built tpkernels.

PYTHONPATH=. python docs/make_schedules.py     writes the pictures, their captions and the tables of the page

All numbers come from the schedules that the kernel walks (``_host``) or from a file of measurements. Time is counted in
iterations; epilogues and fix-up take what the Hopper cost model charges for them (csrc/kernels/sm90a/cost.hpp).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tpkernels import _extensions

_host = _extensions.host()
FOLDER = Path(__file__).resolve().parent
PICTURES = FOLDER / "schedules"
PAGE = FOLDER / "schedules.md"
RESULTS = FOLDER.parent / "bench/results/2026-11-28_h100x1_hopper.jsonl"
THEMES = ("light", "dark")

M, N, K = 4096, 2112, 7168
TILE, CLUSTER = "128x256x64", "2x1"  # of a CTA; two of them share the columns of B
MULTIPROCESSORS = 132

# Kind -> what its picture shows, in the caption before the numbers.
KINDS = {
    "data_parallel": "Data-parallel: whole tiles, one wave after another.",
    "split_k": "Split-K: every tile in {splits} runs of K (the best of 2 to 8), one ticket each.",
    "stream_k": "Textbook Stream-K: all tiles end to end, cut into equal shares.",
    "hybrid_first": "Hybrid, streamed first: the remainder and one wave are cut, then whole tiles.",
    "hybrid_last": "Remainder last: a wave of whole tiles, then the same cut.",
    "hybrid_aligned": "Remainder last, at few depths: all whole waves, then every tile left in equal runs of K.",
}
MEASURED = ((M, N, K), (2048, 5120, 8192), (8192, 8192, 8192))


@dataclass(frozen=True)
class Bar:
    """What one cluster does from ``start``, in iterations: a segment, and what it costs to end it."""

    ticket: int
    tile: int  # position in the tile order
    k_begin: int
    k_end: int
    split: bool
    writes: bool  # a partial
    finishes: float  # how much of the tile, up to 1
    start: float
    products_end: float
    write_end: float  # until here it writes its partial
    wait_end: float  # until here it waits for the partials of others
    fixup_end: float  # until here it adds partials
    end: float  # after the epilogue of what it finishes


@dataclass(frozen=True)
class Timeline:
    """A schedule as drawn: one row for each cluster that runs."""

    kind: str
    splits: int
    rows: list[list[Bar]]

    @property
    def bars(self) -> list[Bar]:
        return [bar for row in self.rows for bar in row]

    @property
    def end(self) -> float:
        return max(bar.end for bar in self.bars)


def costs() -> dict[str, float]:
    """In microseconds, of a cluster with this tile."""
    c = _host.hopper_cost()
    names = {"iter": f"iter_us {TILE}/{CLUSTER}", "epilogue": f"epilogue_us {TILE}", "publish": "publish_us",
             "add": "add_us", "exchange": "exchange_us", "launch": "launch_us", "split_launch": "split_launch_us",
             "divided_launch": "divided_us"}  # fmt: skip
    return {short: c[name] for short, name in names.items()}


def in_iterations(*names: str) -> list[float]:
    """Costs as the pictures count time."""
    c = costs()
    return [c[name] / c["iter"] for name in names]


@cache
def plan(kind: str, splits: int = 1) -> Any:
    """The plan of the Hopper kernel for this product."""
    return _host.hopper_plans(
        M, N, K, schedule=kind, splits=splits, tile=f"{TILE}/{CLUSTER}", multiprocessors=MULTIPROCESSORS
    )[0].plan


def clusters() -> int:
    """How many run at once."""
    return MULTIPROCESSORS // 2


def is_divided(s: Any) -> bool:
    """Each worker ends a share: where no cluster has a second worker. Else the last to write ends the whole tile."""
    return bool(s.divided_shares) and s.workers <= clusters()


def simulate(kind: str, splits: int = 1) -> Timeline:
    """When each cluster does what."""
    s = plan(kind, splits).schedule
    return Timeline(kind, splits, divided_rows(s) if is_divided(s) else rows_of_finishers(s))


def rows_of_finishers(s: Any) -> list[list[Bar]]:
    """One worker finishes a split tile. Tickets in order are enough: it waits for lower ones only."""
    epilogue, publish, add = in_iterations("epilogue", "publish", "add")
    rows: list[list[Bar]] = [[] for _ in range(clusters())]
    free = [(0.0, row) for row in range(len(rows))]
    published: dict[int, float] = {}
    for ticket in range(s.workers):
        now, row = heapq.heappop(free)
        for x in s.segments(ticket):
            products_end = now + x.k_end - x.k_begin
            write_end = products_end + (0 if x.finishes else publish)
            if not x.finishes:
                published[x.slot] = write_end
            slots = range(x.first_slot, x.end_slot) if x.finishes and x.is_split else range(0)
            wait_end = max([write_end, *(published[slot] for slot in slots)])
            fixup_end = wait_end + add * len(slots)
            end = fixup_end + (epilogue if x.finishes else 0)
            rows[row].append(Bar(ticket, x.position, x.k_begin, x.k_end, x.is_split, not x.finishes, float(x.finishes),
                                 now, products_end, write_end, wait_end, fixup_end, end))  # fmt: skip
            now = end
        heapq.heappush(free, (now, row))
    return rows


def divided_rows(s: Any) -> list[list[Bar]]:
    """All workers of a split tile write, and each finishes a share (csrc/kernels/sm90a/divided.cuh).

    A cluster has one worker, whose last work is its part of a split tile. The model's exchange is drawn as writing a
    partial and then adding a share.
    """
    epilogue, publish, exchange = in_iterations("epilogue", "publish", "exchange")
    rows: list[list[Bar]] = [[] for _ in range(clusters())]
    for worker, row in enumerate(rows[: s.workers]):
        now = 0.0
        for x in s.segments(worker):
            products_end = now + x.k_end - x.k_begin
            write_end = products_end + (publish if x.is_split else 0)
            row.append(Bar(worker, x.position, x.k_begin, x.k_end, x.is_split, x.is_split, float(not x.is_split), now,
                           products_end, write_end, write_end, write_end, write_end + epilogue))  # fmt: skip
            now = row[-1].end
    written: dict[int, float] = defaultdict(float)  # split tile -> when all its partials are there
    for bar in (bar for row in rows for bar in row if bar.split):
        written[bar.tile] = max(written[bar.tile], bar.write_end)
    for row in rows:
        if row and row[-1].split:
            wait_end, part = written[row[-1].tile], 1 / s.divided_shares
            fixup_end = wait_end + exchange - publish
            row[-1] = replace(row[-1], finishes=part, wait_end=wait_end, fixup_end=fixup_end,
                              end=fixup_end + epilogue * part)  # fmt: skip
    return rows


@cache
def timeline(kind: str) -> Timeline:
    """The timeline that is drawn; of split-K the shortest."""
    if kind != "split_k":
        return simulate(kind)
    return min((simulate(kind, splits) for splits in range(2, 9)), key=lambda t: t.end)


def facts(kind: str) -> dict[str, Any]:
    """The numbers of one schedule."""
    t, c = timeline(kind), costs()
    s = plan(kind, t.splits).schedule
    work = sum(bar.k_end - bar.k_begin for bar in t.bars)
    longest = max(sum(bar.k_end - bar.k_begin for bar in row) for row in t.rows)
    split = {bar.tile for bar in t.bars if bar.split}
    launch = c["launch"]
    if split:
        launch += c["divided_launch" if is_divided(s) else "split_launch"]
    return {
        "iterations": longest,
        "even": work / clusters(),
        "even_share": work / (longest * clusters()),
        "multiplying": work / (t.end * clusters()),
        "tickets": s.workers,
        "split": len(split),
        "partials": sum(bar.writes for bar in t.bars),
        "depths": depths(s),
        "waits": sum(bar.wait_end - bar.write_end for bar in t.bars),
        "end": t.end,
        "us": launch + t.end * c["iter"],
    }


def shape_text() -> str:
    """The product in one paragraph."""
    p = plan("data_parallel")
    tiles, k_iters = len(p.order), p.schedule.k_iters
    bm, bn, bk = p.tile.bm, p.tile.bn, p.tile.bk
    even = tiles * k_iters / clusters()
    return (
        f"- The product: M x N x K = {M} x {N} x {K}, bf16.\n"
        f"- The tile of a cluster: {bm} x {bn}, {bk} of K an iteration (about {costs()['iter']:.2f} us). That makes "
        f"{p.order.tiles_m} x {p.order.tiles_n} = {tiles} tiles\n  of {k_iters} iterations.\n"
        f"- The machine: {MULTIPROCESSORS} multiprocessors, {clusters()} clusters at once. So there are "
        f"{tiles / clusters():.2f} waves of tiles, and {even:.1f} iterations for\n"
        "  each cluster if they were evenly divided."
    )


def table_text() -> str:
    lines = [
        "| schedule | iterations of the busiest cluster | even share / that | time spent multiplying | tiles split "
        "| partial tiles | depths of K | model, us |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for kind in KINDS:
        f = facts(kind)
        lines.append(
            f"| `{kind}` | {f['iterations']} | {f['even_share']:.0%} | {f['multiplying']:.0%} | {f['split']} "
            f"| {f['partials']} | {f['depths']} | {f['us']:.0f} |"
        )
    return "\n".join(lines)


def caption(kind: str) -> str:
    """What a picture says in words and numbers."""
    t, f = timeline(kind), facts(kind)
    text = KINDS[kind].format(splits=t.splits)
    return (
        f"{text} Ends after {f['end']:.0f} iterations, {f['multiplying']:.0%} of the time spent multiplying; "
        f"{f['partials']} partial tiles."
    )


def order_caption() -> str:
    o = plan("data_parallel").order
    rows, columns = wave_footprint(o)
    wide = _host.TileShape(256, 256, 64)
    walks = {
        group: wave_footprint(_host.make_tile_order(16 * 256, 64 * 256, 1, wide, group))
        for group in (1, o.group_m)
    }
    return (
        f"Tile order: {o.tiles_m} x {o.tiles_n} tiles in groups of {o.group_m} rows, column by column. The first "
        f"{clusters()} positions touch {rows} rows and {columns} columns of tiles. With 64 columns of tiles they would "
        f"touch {walks[o.group_m][0]} + {walks[o.group_m][1]}, and row by row {walks[1][0]} + {walks[1][1]}."
    )


def wave_footprint(order: Any) -> tuple[int, int]:
    """Rows and columns of tiles that the first wave touches: what it reads of A and of B."""
    places = [order.at(i) for i in range(clusters())]
    return len({m for _, m, _ in places}), len({n for _, _, n in places})


def zoom_caption() -> str:
    return (
        "The first five clusters of the hybrid: a share is walked from its last tile to its first. Arrows: a partial, "
        "from where it is written to where it is added."
    )


def first_split() -> list[Bar]:
    """The parts of the first split tile of hybrid_aligned, in the order of K."""
    bars = [bar for bar in timeline("hybrid_aligned").bars if bar.split]
    first = min(bar.tile for bar in bars)
    return sorted((bar for bar in bars if bar.tile == first), key=lambda bar: bar.k_begin)


def divided_caption() -> str:
    n = len(first_split())
    return (
        f"A split tile of hybrid_aligned, after the whole ones: its {n} clusters write their partials, then each "
        f"finishes a share of it. Arrows: what one of them adds, 1/{n} of every partial."
    )


def captions() -> dict[str, str]:
    """Picture -> caption."""
    others = {"zoom": zoom_caption(), "divided": divided_caption(), "order": order_caption()}
    return {kind: caption(kind) for kind in KINDS} | others


def depths(s: Any) -> int:
    """Different depths of K at which the schedule starts a segment."""
    return len({x.k_begin for worker in range(s.workers) for x in s.segments(worker)})


def measured_rows(case: str) -> dict[str, dict[str, Any]]:
    """Variant -> row of the first bf16 case of that name: one run, hence comparable."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        if (row.get("kind"), row.get("suite"), row.get("status")) != ("row", "gemm", "ok"):
            continue
        if row["dtype"] == "bfloat16" and row["case"].split()[-1] == case:
            found.setdefault((row["case"], row["run"]), {})[row["variant"]] = row
    return next(rows for rows in found.values() if "streamk:stream_k" in rows)


def measured_text() -> str:
    """Schedules measured on one tile each, with the depths of K at which each starts."""
    kinds = ("data_parallel", "stream_k", "hybrid_aligned")
    lines = [
        "| product | tile, cluster | " + " | ".join(f"`{kind}`, us" for kind in kinds) + " | cuBLAS, us |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for m, n, k in MEASURED:
        rows = measured_rows(f"{m}x{n}x{k}")
        tile = rows["streamk"]["extra"]["plan"]["tile_name"]
        cells = []
        for kind in kinds:
            row = rows["streamk:dp-same-tile" if kind == "data_parallel" else f"streamk:{kind}"]
            assert row["extra"]["plan"]["tile_name"] == tile, f"{kind} was measured on another tile"
            starts = depths(_host.hopper_plans(m, n, k, schedule=kind, tile=tile)[0].plan.schedule)
            cells.append(f"{row['us']['p50']:,.0f} ({starts})")
        lines.append(
            f"| {m} x {n} x {k} | {tile} | {' | '.join(cells)} | {rows['cublas']['us']['p50']:,.0f} |"
        )
    return "\n".join(lines)


def digest(name: str) -> str:
    """Changes when what a picture shows does: written into its description, so that a test sees an old picture."""
    shown: Any
    if name == "order":
        shown = [plan("data_parallel").order.at(i) for i in range(len(plan("data_parallel").order))]
    elif name == "zoom":
        shown = timeline("hybrid_first").rows[:5]
    elif name == "divided":
        shown = first_split()
    else:
        shown = timeline(name).rows
    return hashlib.sha256(repr((shown, captions()[name])).encode()).hexdigest()[:16]


def picture_file(name: str, theme: str) -> Path:
    return PICTURES / (f"{name}.svg" if theme == "light" else f"{name}-dark.svg")


def figure_text(name: str) -> str:
    text = captions()[name]
    light, dark = (picture_file(name, theme).relative_to(FOLDER) for theme in THEMES)
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'  <img src="{light}" alt="{text}">\n</picture>\n\n*{text}*'
    )


def page_text(old: str) -> str:
    """The page with every generated part written anew."""
    parts = {"shape": shape_text, "table": table_text, "measured": measured_text}

    def part(match: re.Match[str]) -> str:
        name = match[1]
        text = figure_text(name.removeprefix("figure ")) if name.startswith("figure ") else parts[name]()
        return f"<!-- made: {name} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- made: ([^>]*?) -->\n.*?<!-- end -->", part, old, flags=re.S)


def main() -> None:
    """Writes the pictures and the generated parts of the page."""
    import draw_schedules  # beside this file: matplotlib only for who draws

    PICTURES.mkdir(exist_ok=True)
    for theme in THEMES:
        for kind in KINDS:
            draw_schedules.draw_timeline(kind, theme, picture_file(kind, theme))
        draw_schedules.draw_zoom(theme, picture_file("zoom", theme))
        draw_schedules.draw_divided(theme, picture_file("divided", theme))
        draw_schedules.draw_order(theme, picture_file("order", theme))
    PAGE.write_text(page_text(PAGE.read_text()))


if __name__ == "__main__":
    main()
