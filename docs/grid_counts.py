"""What a method moves and holds on its page's example, counted, and the formulas beside it, for docs/grids/.

Counted is read off the messages and buffers of the programs that the executor runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from grid_costs import HIDDEN, programs

from tpkernels.grids import (
    Method,
    Pass,
    Sizes,
    at_rest,
    column_parallel,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    peak,
    row_parallel,
    spatial_temporal,
    summa,
    three_d,
)
from tpkernels.grids.program import Exchange, Product, Program

TOKENS = 16384
UP = Sizes(TOKENS, HIDDEN, 4 * HIDDEN)
DOWN = Sizes(TOKENS, 4 * HIDDEN, HIDDEN)


class Example(NamedTuple):
    """A layer whose costs are counted. ``name``: of its row among ``grid_costs.rows``."""

    make: Callable[[], Method]
    name: str
    sizes: Sizes


EXAMPLES = {
    "1d_column": Example(lambda: column_parallel(grid_1d(4)), "1-D, sequence parallel", UP),
    "1d_row": Example(lambda: row_parallel(grid_1d(4)), "1-D, sequence parallel", DOWN),
    "2d": Example(lambda: summa(grid_2d(16)), "2-D", UP),
    "2p5d": Example(lambda: summa(grid_2p5d(64, 4)), "2.5-D, depth 4", UP),
    "3d": Example(lambda: three_d(grid_3d(8)), "3-D", UP),
    "spatial_temporal": Example(lambda: spatial_temporal(grid_spatial_temporal(16)), "spatial-temporal", UP),
}

FORTH, BACK, WEIGHT = Pass
# Elements that a rank receives in the mean, by pass and what moves; q along an axis, p ranks in a line, d depths.
FORMULAS: dict[str, dict[tuple[Pass, str], str]] = {
    "1d_column": {
        (FORTH, "X gathered"): "(p-1)/p mk",
        (BACK, "dX summed"): "(p-1)/p mk",
        (WEIGHT, "X gathered"): "(p-1)/p mk",
    },
    "1d_row": {
        (FORTH, "Y summed"): "(p-1)/p mn",
        (BACK, "dY gathered"): "(p-1)/p mn",
    },
    "2d": {
        (FORTH, "X"): "(q-1) mk/q^2",
        (FORTH, "W"): "(q-1) kn/q^2",
        (BACK, "W"): "(q-1) kn/q^2",
        (BACK, "dX summed"): "(q-1) mk/q^2",
        (WEIGHT, "X"): "(q-1) mk/q^2",
        (WEIGHT, "dW summed"): "(q-1) kn/q^2",
    },
    "2p5d": {
        (FORTH, "X"): "(q-1) mk/(dq^2)",
        (FORTH, "W"): "(q-1) kn/q^2",
        (BACK, "W"): "(q-1) kn/q^2",
        (BACK, "dX summed"): "(q-1) mk/(dq^2)",
        (WEIGHT, "X"): "(q-1) mk/(dq^2)",
        (WEIGHT, "dW summed"): "(q-1) kn/q^2",
        (WEIGHT, "dW over depths"): "2 (d-1)/d kn/q^2",
    },
    "3d": {
        (FORTH, "X gathered"): "(q-1) mk/q^3",
        (FORTH, "W gathered"): "(q-1) kn/q^3",
        (FORTH, "Y summed"): "(q-1) mn/q^3",
        (BACK, "dY gathered"): "(q-1) mn/q^3",
        (BACK, "W gathered"): "(q-1) kn/q^3",
        (BACK, "dX summed"): "(q-1) mk/q^3",
        (WEIGHT, "X gathered"): "(q-1) mk/q^3",
        (WEIGHT, "dW summed"): "(q-1) kn/q^3",
    },
    "spatial_temporal": {
        (FORTH, "X, its way in"): "(q-1)/q mk/q^2",
        (FORTH, "X"): "(q-1) mk/q^2",
        (FORTH, "W"): "(q-1) kn/q^2",
        (BACK, "W, to its first place"): "kn/q^2",
        (BACK, "W"): "(q-1) kn/q^2",
        (BACK, "dY"): "(q-1) mn/q^2",
        (BACK, "dX, its way out"): "(q-1)/q mk/q^2",
        (WEIGHT, "dY"): "(q-1) mn/q^2",
        (WEIGHT, "X"): "(q-1) mk/q^2",
        (WEIGHT, "dW under way"): "kn/q^2",
    },
}
# What a pass has in buffers at most, in blocks x, w and y at rest: forward, and the largest of these backward.
BUFFERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "1d_column": ("px + y", ("2px + x + w",)),
    "1d_row": ("py + y", ("py + x + w",)),
    "2d": ("2x + 2w + y", ("5x + w", "3x + 4w")),
    "2p5d": ("2x + 2w + y", ("5x + w", "3x + 4w")),
    "3d": ("q (x + w + y)", ("q (2x + w + y) + x", "q (x + w + y) + w")),
    "spatial_temporal": ("2x + 2w + y", ("2x + 3w + y", "x + 2w + 2y", "3x + w + 2y")),
}


def value(text: str, numbers: dict[str, int]) -> Fraction:
    """Of a formula as the pages write it: letters side by side are factors."""
    tokens = re.findall(r"\d+|[a-z]|\S", text)
    code = ""
    for before, token in zip(["", *tokens], tokens, strict=False):
        factor = (before.isalnum() or before == ")") and (token.isalnum() or token == "(")
        code += "*" * factor + {"^": "**"}.get(token, token)
    return Fraction(eval(re.sub(r"\d+", r"F(\g<0>)", code), {"F": Fraction}, dict(numbers)))


def letters(method: Method, sizes: Sizes) -> dict[str, int]:
    """What the formulas' letters stand for."""
    side = method.grid.shape[0]
    held_at_rest = at_rest(method, sizes, 0)
    blocks = {name.lower(): held_at_rest[name] for name in "XWY"}
    return {**sizes._asdict(), "p": side, "q": side, "d": method.grid.world // side**2, **blocks}


Counted = dict[tuple[Pass, str], tuple[Fraction, Fraction]]


def counted(method: Method, sizes: Sizes) -> Counted:
    """By pass and what moves: elements and messages that a rank receives in the mean."""
    found: Counted = {}
    for program in programs(method):
        for exchange in program.exchanges:
            kind = _pass(program, exchange)
            number = sum(m.source != m.target for m in exchange.messages)
            key = kind, _what(method, kind, exchange)
            elements, before = found.get(key, (Fraction(0), Fraction(0)))
            found[key] = (
                elements + Fraction(exchange.sent_elements(sizes), method.grid.world),
                before + Fraction(number, method.grid.world),
            )
    return {key: counts for key, counts in found.items() if counts[1]}


def _pass(program: Program, exchange: Exchange) -> Pass:
    """Whose product it is for, or of."""
    if exchange.result:
        return next(kind for kind in Pass if kind.result == exchange.operand)
    products = [w for step in program.steps for w in step.work if isinstance(w, Product)]
    later = _reach(program, exchange.target.buffer)
    return next(w.kind for w in products if later & {w.left, w.right})


def _reach(program: Program, buffer: str) -> set[str]:
    """The buffer, or where nothing multiplies it, those that are made of it."""
    products = [w for step in program.steps for w in step.work if isinstance(w, Product)]
    if any(buffer in (w.left, w.right) for w in products):
        return {buffer}
    return {e.target.buffer for e in program.exchanges if e.source.buffer == buffer}


def _what(method: Method, kind: Pass, exchange: Exchange) -> str:
    operand = exchange.operand
    if "/" in exchange.source.buffer:
        return f"{operand} over depths"
    if method.rings:
        if operand == "dW":
            return "dW under way"
        ends = {"X": (FORTH, "its way in"), "W": (BACK, "to its first place"), "dX": (BACK, "its way out")}
        where, words = ends.get(operand, (None, ""))
        moves = exchange.source.buffer == operand or exchange.result
        return f"{operand}, {words}" if moves and kind is where else operand
    if exchange.result:
        return f"{operand} summed"
    return f"{operand} gathered" if method.gathers else operand


def peaks(method: Method, sizes: Sizes) -> list[int]:
    """The most elements that a rank has in buffers, forward and backward."""
    every = range(method.grid.world)
    return [max(peak(program, sizes, p).elements for p in every) for program in programs(method)]
