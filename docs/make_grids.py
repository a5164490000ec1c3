"""Draws docs/grids.md: which blocks each rank multiplies at each step, and costs. Needs a built tpkernels.

PYTHONPATH=. python docs/make_grids.py     writes the pictures and the tables of the page

Everything is read off ``tpkernels.grids``: the layouts and programs that the layers run, and the formulas that tests
hold against them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tpkernels.grids import (
    Layout,
    Method,
    Pass,
    Sizes,
    Span,
    backward,
    column_parallel,
    formula,
    forward,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    predict,
    row_parallel,
    spatial_temporal,
    summa,
    three_d,
)
from tpkernels.grids.program import Exchange, Product, Program
from tpkernels.planner import TOPOLOGIES

FOLDER = Path(__file__).resolve().parent
PICTURES = FOLDER / "grids"
PAGE = FOLDER / "grids.md"

METHODS: dict[str, Callable[[], Method]] = {
    "2d": lambda: summa(grid_2d(9)),
    "2p5d": lambda: summa(grid_2p5d(8, 2)),
    "3d": lambda: three_d(grid_3d(8)),
    "spatial_temporal": lambda: spatial_temporal(grid_spatial_temporal(16)),
}
CAPTIONS = {
    "2d": "SUMMA on 3 x 3 ranks",
    "2p5d": "2.5-D on 2 x 2 x 2 ranks, the depths beside one another",
    "3d": "3-D on 2 x 2 x 2 ranks, the planes of the last axis beside one another",
    "spatial_temporal": "The spatial-temporal primitive on 4 x 4 ranks",
}

# Colours that are legible on light and on dark pages. Hue follows the part of the summed dimension.
HUES = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7")
TEXT, LINE, RESULT = "#7d8590", "#9aa3ad", "#8250df"
THUMB, GAP, CELL_W, CELL_H, HEAD = 22, 5, 92, 50, 18


class Panel(NamedTuple):
    """One product of all ranks. ``came``, ``goes``: by operand and rank, from and to whom."""

    kind: Pass
    step: int
    work: Product
    came: dict[str, dict[int, list[int]]]
    goes: dict[int, list[int]]


def panels(program: Program) -> Iterator[Panel]:
    """The products of a program, with the messages that brought their blocks and take their results away."""
    counts: dict[Pass, int] = {}
    last = {w.into: w for step in program.steps for w in step.work if isinstance(w, Product)}
    exchanges = list(program.exchanges)
    shown: set[str] = set()  # what is there already has not come again
    for step in program.steps:
        for work in step.work:
            if isinstance(work, Product):
                number = counts.setdefault(work.kind, 0)
                counts[work.kind] += 1
                came = {
                    operand: _others(
                        (e for e in exchanges if e.target.buffer == buffer and buffer not in shown), to=True
                    )
                    for operand, buffer in ((work.kind.left, work.left), (work.kind.right, work.right))
                }
                shown |= {work.left, work.right}
                ends = last[work.into] is work
                gone = (e for e in exchanges if ends and e.source.buffer == work.into)
                yield Panel(work.kind, number, work, came, _others(gone, to=False))


def _others(exchanges: Iterator[Exchange], to: bool) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for exchange in exchanges:
        for m in exchange.messages:
            if m.source != m.target:
                one, other = (m.target, m.source) if to else (m.source, m.target)
                found.setdefault(one, []).append(other)
    return found


def _held(method: Method) -> dict[str, Layout]:
    outputs = forward(method).outputs
    return {o: outputs[o].layout for o in ("X", "W") if o in outputs}


def picture(name: str) -> str:
    """The SVG: a row for each pass, a panel for each step, a cell for each rank."""
    method = METHODS[name]()
    every = [*panels(forward(method)), *panels(backward(method, held=_held(method)))]
    rows, columns = method.grid.shape[:2]
    planes = method.grid.shape[2] if len(method.grid.shape) == 3 else 1
    width = planes * columns * CELL_W + (planes - 1) * GAP * 2
    height = HEAD + rows * CELL_H
    parts: list[str] = []
    for line, kind in enumerate(Pass):
        for panel in (p for p in every if p.kind is kind):
            x, y = 10 + panel.step * (width + 26), 10 + line * (height + 22)
            parts += _panel(method, panel, x, y)
    total_w, total_h = 10 + method.steps * (width + 26), 10 + 3 * (height + 22)
    style = f"text{{font:9px sans-serif;fill:{TEXT}}}.h{{font-size:11px}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w} {total_h}" width="{total_w}">'
        f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(method: Method, panel: Panel, x: int, y: int) -> Iterator[str]:
    kind = panel.kind
    title = f"{kind.value}: {kind.result} of {kind.left}, {kind.right}"
    steps = f", step {panel.step}" if method.steps > 1 else ""
    yield f'<text class="h" x="{x}" y="{y + 10}">{title}{steps}</text>'
    for position, at in enumerate(method.grid.coordinates):
        plane = at[2] if len(at) == 3 else 0
        left = x + plane * (method.grid.shape[1] * CELL_W + GAP * 2) + at[1] * CELL_W
        yield from _cell(method, panel, position, left, y + HEAD + at[0] * CELL_H)


def _cell(method: Method, panel: Panel, position: int, x: int, y: int) -> Iterator[str]:
    kind = panel.kind
    yield f'<rect x="{x}" y="{y}" width="{CELL_W - 3}" height="{CELL_H - 3}" fill="none" stroke="{LINE}" rx="3"/>'
    summed: Span = getattr(method.spans(kind, panel.step)[position], kind.summed)
    hue = HUES[summed.start % len(HUES)]
    for number, operand in enumerate((kind.left, kind.right, kind.result)):
        block = method.layout(kind, operand, panel.step).block(position)
        left, top = x + 4 + number * (THUMB + GAP + 1), y + 4
        colour = RESULT if operand == kind.result else hue
        yield f'<rect x="{left}" y="{top}" width="{THUMB}" height="{THUMB}" fill="none" stroke="{LINE}"/>'
        a, b = _pixels(block.rows), _pixels(block.columns)
        yield (
            f'<rect x="{left + b[0]}" y="{top + a[0]}" width="{b[1] - b[0]}" height="{a[1] - a[0]}" fill="{colour}"/>'
        )
        if operand == kind.result:
            others, arrow = panel.goes.get(position, []), "→"
        else:
            others, arrow = panel.came[operand].get(position, []), "←"
        if others:
            who = (
                "".join(map(str, method.grid.coordinates[others[0]]))
                if len(others) == 1
                else f"{len(others)}"
            )
            yield f'<text x="{left}" y="{top + THUMB + 12}">{arrow}{who}</text>'


def _pixels(span: Span) -> tuple[int, int]:
    return span.start * THUMB // span.parts, span.stop * THUMB // span.parts


def captions() -> dict[str, str]:
    """By picture; the words beneath it."""
    return {name: f"{text}: {_moved(METHODS[name]())}." for name, text in CAPTIONS.items()}


def _moved(method: Method) -> str:
    programs = forward(method), backward(method, held=_held(method))
    sent = sum(m.source != m.target for p in programs for e in p.exchanges for m in e.messages)
    return f"{sent / method.grid.world:g} messages a rank, forward and backward"


# A layer of a large model: hidden 12288, its MLP 4 times as wide.
HIDDEN = 12288
TOKENS = (2048, 16384, 131072)


class Row(NamedTuple):
    """A method on a number of ranks: the two layers of an MLP, and how they are called."""

    name: str
    layers: tuple[Method, Method]


@cache
def rows(world: int) -> tuple[Row, ...]:
    """Every method that has so many ranks."""
    line = grid_1d(world)
    found = [Row("1-D, sequence parallel", (column_parallel(line), row_parallel(line)))]
    for name, make in (
        ("2-D", lambda: summa(grid_2d(world))),
        *((f"2.5-D, depth {d}", lambda d=d: summa(grid_2p5d(world, d))) for d in (2, 4)),
        ("3-D", lambda: three_d(grid_3d(world))),
        ("spatial-temporal", lambda: spatial_temporal(grid_spatial_temporal(world))),
    ):
        try:
            method = make()
        except ValueError:
            continue
        found.append(Row(name, (method, method)))
    return tuple(found)


def received(row: Row, tokens: int, kept: bool = False) -> Fraction:
    """Elements that a rank receives for one MLP, forward and backward."""
    shapes = Sizes(tokens, HIDDEN, 4 * HIDDEN), Sizes(tokens, 4 * HIDDEN, HIDDEN)
    total = Fraction(0)
    for method, sizes in zip(row.layers, shapes, strict=True):
        volume = formula(method, sizes, kept=kept)
        total += volume["forward"] + volume["input_grad"] + volume["weight_grad"]
    return total


def table() -> str:
    """GB that a rank receives for one MLP, by method, ranks and tokens."""
    head = (
        "| ranks | method | "
        + " | ".join(f"{t:,} tokens" for t in TOKENS)
        + " | weights at rest | x and y at rest |"
    )
    lines = [head, "|" + " --- |" * (4 + len(TOKENS))]
    for world in (4, 8, 16, 64):
        best = [min(received(row, t) for row in rows(world)) for t in TOKENS]
        for row in rows(world):
            cells = []
            for tokens, least in zip(TOKENS, best, strict=True):
                gb = f"{float(received(row, tokens)) * 2 / 1e9:.2f}"
                cells.append(f"**{gb}**" if received(row, tokens) == least else gb)
            copies = row.layers[0].home("W").replicas
            weights = f"1/{world // copies}"
            lines.append(f"| {world} | {row.name} | " + " | ".join(cells) + f" | {weights} | 1/{world} |")
    return "\n".join(lines)


# Described, not measured as a whole.
CLUSTER = TOPOLOGIES["h200"].cluster


def predicted_ms(row: Row, tokens: int, fused: bool) -> float:
    """Of one MLP, forward and backward."""
    shapes = Sizes(tokens, HIDDEN, 4 * HIDDEN), Sizes(tokens, 4 * HIDDEN, HIDDEN)
    return sum(
        predict(method, program, sizes, CLUSTER, fused=fused).us / 1e3
        for method, sizes in zip(row.layers, shapes, strict=True)
        for program in (forward(method), backward(method))
    )


def times() -> str:
    """Milliseconds of one MLP, predicted, by method, ranks and tokens."""
    lines = ["| ranks | method | " + " | ".join(f"{t:,} tokens" for t in TOKENS) + " |"]
    lines.append("|" + " --- |" * (2 + len(TOKENS)))
    for world in (4, 8, 16, 64):
        # One dimension on path "fused", and not; the others overlap by themselves.
        ways = [(row, False) for row in rows(world)]
        ways.insert(1, (ways[0][0], True))
        told = [[predicted_ms(row, t, fused) for t in TOKENS] for row, fused in ways]
        best = [min(column) for column in zip(*told, strict=True)]
        for (row, fused), line in zip(ways, told, strict=True):
            cells = [
                f"**{ms:.1f}**" if ms == least else f"{ms:.1f}" for ms, least in zip(line, best, strict=True)
            ]
            lines.append(f"| {world} | {row.name}{', fused' if fused else ''} | " + " | ".join(cells) + " |")
        alone = [2 * 3 * 2 * t * HIDDEN * 4 * HIDDEN / world / CLUSTER.flops_per_us / 1e3 for t in TOKENS]
        lines.append(f"| {world} | *products alone* | " + " | ".join(f"{ms:.1f}" for ms in alone) + " |")
    return "\n".join(lines)


def made() -> dict[str, str]:
    """What the script writes into the page, by the name behind ``<!-- made:``."""
    found = {"table": table(), "times": times()}
    for name, text in captions().items():
        found[f"figure {name}"] = f"![{text}](grids/{name}.svg)\n\n*{text}*"
    return found


def page_text(text: str) -> str:
    """The page with all that is made in its place."""
    for name, content in made().items():
        pattern = rf"(<!-- made: {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{PAGE.name}: expected one place for {name!r}, found {count}")
    return text


def main() -> None:
    """Writes everything."""
    PICTURES.mkdir(exist_ok=True)
    for name in METHODS:
        (PICTURES / f"{name}.svg").write_text(picture(name))
    PAGE.write_text(page_text(PAGE.read_text()))


if __name__ == "__main__":
    main()
