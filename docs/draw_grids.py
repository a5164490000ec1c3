"""The pictures of docs/grids/: which blocks each rank has at rest and multiplies at each step; run make_grids.py.

Everything is read off the layouts and programs that the layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from grid_costs import programs

from tpkernels.grids import (
    Block,
    Method,
    Pass,
    Span,
    column_parallel,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    row_parallel,
    spatial_temporal,
    summa,
    three_d,
)
from tpkernels.grids.program import Exchange, Product, Program

METHODS: dict[str, Callable[[], Method]] = {
    "1d_column": lambda: column_parallel(grid_1d(4)),
    "1d_row": lambda: row_parallel(grid_1d(4)),
    "2d": lambda: summa(grid_2d(9)),
    "2p5d": lambda: summa(grid_2p5d(8, 2)),
    "3d": lambda: three_d(grid_3d(8)),
    "spatial_temporal": lambda: spatial_temporal(grid_spatial_temporal(16)),
}
CAPTIONS = {
    "1d_column": "1-D, column-parallel, on 4 ranks",
    "1d_row": "1-D, row-parallel, on 4 ranks",
    "2d": "SUMMA on 3 x 3 ranks",
    "2p5d": "2.5-D on 2 x 2 x 2 ranks, the depths beside one another",
    "3d": "3-D on 2 x 2 x 2 ranks, the planes of the last axis beside one another",
    "spatial_temporal": "The spatial-temporal primitive on 4 x 4 ranks",
}

# Colours that are legible on light and on dark pages. Hue follows the part of the summed dimension.
HUES = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7")
TEXT, LINE, RESULT = "#7d8590", "#9aa3ad", "#8250df"
THUMB, GAP, CELL_W, CELL_H, HEAD = 22, 5, 92, 50, 18

Others = dict[int, list[int]]  # by rank


class Panel(NamedTuple):
    """One product of all ranks. ``came``, ``goes``: by operand and rank, from and to whom."""

    kind: Pass
    step: int
    work: Product
    came: dict[str, Others]
    goes: Others


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


def sums(program: Program) -> Iterator[tuple[Exchange, Others, Others]]:
    """Exchanges of sums that are behind all products, an all-reduce's two halves; from whom and to whom."""
    for exchange in program.exchanges:
        if "/" in exchange.source.buffer:
            yield exchange, _others([exchange], to=True), _others([exchange], to=False)


def _others(exchanges: Iterable[Exchange], to: bool) -> Others:
    found: Others = {}
    for exchange in exchanges:
        for m in exchange.messages:
            if m.source != m.target:
                one, other = (m.target, m.source) if to else (m.source, m.target)
                found.setdefault(one, []).append(other)
    return found


def messages_each(method: Method) -> str:
    """How many messages a rank gets, forward and backward, in the mean."""
    sent = sum(m.source != m.target for p in programs(method) for e in p.exchanges for m in e.messages)
    return f"{sent / method.grid.world:g} messages a rank, forward and backward"


def captions() -> dict[str, str]:
    """By picture; the words beneath it."""
    return {name: f"{text}: {messages_each(METHODS[name]())}." for name, text in CAPTIONS.items()}


# A panel's title and, by rank, what is in its cell.
Thumb = tuple[int, Block, str, str]  # place, block, colour, note beneath it
Drawn = tuple[str, Callable[[int], Iterator[Thumb]]]


def picture(name: str) -> str:
    """The SVG: a row for what is at rest, one for each pass, a panel for each step, a cell for each rank."""
    method = METHODS[name]()
    both = programs(method)
    every = [panel for program in both for panel in panels(program)]
    lines: list[list[Drawn]] = [[_at_rest(method)]]
    lines += [[_product(method, p) for p in every if p.kind is kind] for kind in Pass]
    behind = [_sum(method, *s) for s in sums(both[1])]
    lines += [behind] if behind else []
    rows, columns = _shape(method)
    planes = method.grid.shape[2] if len(method.grid.shape) == 3 else 1
    width = planes * columns * CELL_W + (planes - 1) * GAP * 2
    height = HEAD + rows * CELL_H
    parts: list[str] = []
    for line, drawn in enumerate(lines):
        for column, panel in enumerate(drawn):
            parts += _panel(method, panel, 10 + column * (width + 26), 10 + line * (height + 22))
    total_w = 10 + max(map(len, lines)) * (width + 26)
    total_h = 10 + len(lines) * (height + 22)
    style = f"text{{font:9px sans-serif;fill:{TEXT}}}.h{{font-size:11px}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w} {total_h}" width="{total_w}">'
        f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _shape(method: Method) -> tuple[int, int]:
    shape = method.grid.shape
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def who(method: Method, position: int) -> str:
    """A rank's name in pictures and tables: its coordinates."""
    return "".join(map(str, method.grid.coordinates[position]))


def _note(method: Method, arrow: str, others: list[int]) -> str:
    if not others:
        return ""
    return arrow + (who(method, others[0]) if len(others) == 1 else str(len(others)))


def _at_rest(method: Method) -> Drawn:
    parts = method.work(Pass.FORWARD, method.grid.coordinates[0], 0).k.parts

    def cell(position: int) -> Iterator[Thumb]:
        for place, operand in enumerate("XWY"):
            block = method.home(operand).block(position)
            k = block.columns.start * parts // block.columns.parts
            yield place, block, RESULT if operand == "Y" else HUES[k % len(HUES)], ""

    return "at rest: X, W, Y", cell


def _product(method: Method, panel: Panel) -> Drawn:
    kind = panel.kind

    def cell(position: int) -> Iterator[Thumb]:
        summed: Span = getattr(method.spans(kind, panel.step)[position], kind.summed)
        hue = HUES[summed.start % len(HUES)]
        for place, operand in enumerate((kind.left, kind.right)):
            note = _note(method, "←", panel.came[operand].get(position, []))
            yield place, method.layout(kind, operand, panel.step).block(position), hue, note
        result = method.layout(kind, kind.result, panel.step).block(position)
        yield 2, result, RESULT, _note(method, "→", panel.goes.get(position, []))

    steps = f", step {panel.step}" if method.steps > 1 else ""
    return f"{kind.value}: {kind.result} of {kind.left}, {kind.right}{steps}", cell


def _sum(method: Method, exchange: Exchange, came: Others, goes: Others) -> Drawn:
    def cell(position: int) -> Iterator[Thumb]:
        note = f"{_note(method, '←', came[position])} {_note(method, '→', goes[position])}"
        yield 0, exchange.target.layout.block(position), RESULT, note

    what = "slices of the sum" if "/" in exchange.target.buffer else "the slices to all"
    return f"over depths: {exchange.operand}, {what}", cell


def _panel(method: Method, panel: Drawn, x: int, y: int) -> Iterator[str]:
    title, cell = panel
    yield f'<text class="h" x="{x}" y="{y + 10}">{title}</text>'
    columns = _shape(method)[1]
    for position, at in enumerate(method.grid.coordinates):
        plane = at[2] if len(at) == 3 else 0
        row, column = (0, at[0]) if len(at) == 1 else at[:2]
        left = x + plane * (columns * CELL_W + GAP * 2) + column * CELL_W
        yield from _cell(cell(position), left, y + HEAD + row * CELL_H)


def _cell(thumbs: Iterator[Thumb], x: int, y: int) -> Iterator[str]:
    yield f'<rect x="{x}" y="{y}" width="{CELL_W - 3}" height="{CELL_H - 3}" fill="none" stroke="{LINE}" rx="3"/>'
    for place, block, colour, note in thumbs:
        left, top = x + 4 + place * (THUMB + GAP + 1), y + 4
        yield f'<rect x="{left}" y="{top}" width="{THUMB}" height="{THUMB}" fill="none" stroke="{LINE}"/>'
        a, b = _pixels(block.rows), _pixels(block.columns)
        yield (
            f'<rect x="{left + b[0]}" y="{top + a[0]}" width="{b[1] - b[0]}" height="{a[1] - a[0]}" fill="{colour}"/>'
        )
        if note:
            yield f'<text x="{left}" y="{top + THUMB + 12}">{note}</text>'


def _pixels(span: Span) -> tuple[int, int]:
    return span.start * THUMB // span.parts, span.stop * THUMB // span.parts
