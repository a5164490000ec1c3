"""The tables of docs/grids/ that follow one rank through all passes; run make_grids.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

from draw_grids import METHODS, who
from grid_costs import programs

from tpkernels.grids import Layout, Method, Pass, Span
from tpkernels.grids.method import dimensions
from tpkernels.grids.program import Exchange, Held, Product, Program

# Whom each table follows.
RANKS = {"1d_column": 1, "1d_row": 1, "2d": 5, "2p5d": 5, "3d": 3, "spatial_temporal": 9}


class Names:
    """Short names of a method's blocks: X[m1,k0] is the block of X in row part 1 and column part 0 of those that
    products have; m1.0 is the first part of that part, m all of it."""

    def __init__(self, method: Method) -> None:
        works = [w for kind in Pass for step in range(method.steps) for w in method.spans(kind, step)]
        self.parts = {d: math.lcm(*(getattr(w, d).parts for w in works)) for d in "mkn"}

    def span(self, dimension: str, span: Span) -> str:
        """A part of m, k or n."""
        parts = self.parts[dimension]
        if span.parts == 1:
            return dimension
        first = span.start * math.lcm(parts, span.parts) // span.parts
        inside = math.lcm(parts, span.parts) // parts
        if inside == 1:
            return f"{dimension}{first}"
        return f"{dimension}{first}" if parts == 1 else f"{dimension}{first // inside}.{first % inside}"

    def block(self, operand: str, rows: Span, columns: Span) -> str:
        """Of a matrix."""
        row, column = dimensions(operand)
        return f"{operand}[{self.span(row, rows)},{self.span(column, columns)}]"

    def held(self, operand: str, layout: Layout, position: int) -> str:
        """The block that a rank has."""
        return self.block(operand, *layout.block(position)[:2])


def at_rest(name: str) -> str:
    """In words, what the rank has between passes."""
    method, position = METHODS[name](), RANKS[name]
    names = Names(method)
    found = [names.held(operand, method.home(operand), position) for operand in "XWY"]
    return f"Rank {who(method, position)} has at rest {found[0]}, {found[1]} and {found[2]}."


def table(name: str, position: int | None = None) -> str:
    """What the rank does in each step of its programs."""
    method = METHODS[name]()
    position = RANKS[name] if position is None else position
    lines = ["| pass | multiplies | into | meanwhile comes | meanwhile goes |", "|" + " --- |" * 5]
    for program, what in zip(programs(method), ("forward", "backward"), strict=True):
        lines += [f"| {' | '.join(cells)} |" for cells in _rows(method, program, position, what)]
    return "\n".join(lines)


def _rows(method: Method, program: Program, position: int, what: str) -> Iterator[tuple[str, ...]]:
    names = Names(method)
    seen = False
    for step in program.steps:
        label, factors, into = f"{'after' if seen else 'before'} {what}", "", ""
        for work in step.work:
            assert isinstance(work, Product)
            kind, seen = work.kind, True
            label = f"{kind.value} {work.step}" if method.steps > 1 else kind.value
            left, right = (
                names.held(operand, method.layout(kind, operand, work.step), position)
                for operand in (kind.left, kind.right)
            )
            factors, into = f"{left} {right}", names.held(kind.result, work.layout, position)
        comes = "; ".join(t for e in step.exchanges if (t := _moved(method, names, e, position, True)))
        goes = "; ".join(t for e in step.exchanges if (t := _moved(method, names, e, position, False)))
        yield label, factors, into, comes, goes


def _moved(method: Method, names: Names, exchange: Exchange, position: int, comes: bool) -> str:
    """What an exchange brings the rank, or takes from it."""
    found: dict[str, list[str]] = {}
    for m in exchange.messages:
        one, other = (m.target, m.source) if comes else (m.source, m.target)
        if one == position != other:
            plus = "+" if _is_addend(exchange.source, m.source) else ""
            block = plus + names.block(exchange.operand, m.rows, m.columns)
            found.setdefault(block, []).append(who(method, other))
    word = "from" if comes else "to"
    return ", ".join(f"{block} {word} {', '.join(others)}" for block, others in found.items())


def _is_addend(held: Held, position: int) -> bool:
    return held.layout.block(position).terms[0].share < 1
