"""How much is moved and held: counted from programs, and as closed formulas.

Counted figures hold for any sizes. The formulas are for sizes that the method cuts evenly, in elements that one
rank receives on average; P ranks, q along an axis. Passes of Y [m, n] = X [m, k] W^T:

    method              FORWARD                    INPUT_GRAD                  WEIGHT_GRAD
    1-D column          (p-1)/p mk                 (p-1)/p mk                  (p-1)/p mk, or 0 where X is kept
    1-D row             (p-1)/p mn                 (p-1)/p mn                  0, dY being there
    1-D column, whole   0                          2 (p-1)/p mk                0       without sequence parallelism:
    1-D row, whole      2 (p-1)/p mn               0                           0       X, or Y, is whole everywhere
    2-D                 (q-1)(mk + kn)/q^2         the same                    the same
    2.5-D               (q-1)(mk/d + kn)/q^2       the same                    the same, + 2 (d-1)/d kn/q^2
    3-D                 (q-1)(mk + kn + mn)/q^3    (q-1)(mn + mk + kn)/q^3     (q-1)(kn + mk)/q^3; where X and W
                                                   (of it kn for W again)      are kept: less what is "again"
    spatial-temporal    (q-1)(mk + kn)/q^2         ((q-1)(mn + kn) + kn)/q^2   ((q-1)(mk + mn) + kn)/q^2
                        + (q-1)/q mk/q^2 for X     + (q-1)/q mk/q^2 for dX

The last line's second row is the way from and to the layout of 2-D. A bias costs n (1/q - 1/P) in FORWARD, and
again for its gradient (where Y is whole, which needs no sum within a copy, (D-1) n/P). D data-parallel copies of a
method have m/D rows each, and WEIGHT_GRAD 2 (D-1)/D more of what a rank has of W. Sources: the papers named in the
methods' modules; 2.5-D with the sum of dW over depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from tpkernels.grids.method import Method, Sizes
from tpkernels.grids.program import Exchange, Program

__all__ = ["Memory", "at_rest", "formula", "peak"]

# Elements by pass; "bias": of bringing the bias, "bias_grad": of summing its gradient.
Volume = Mapping[str, Fraction]


def formula(method: Method, sizes: Sizes, *, kept: bool = False) -> Volume:
    """Elements that a rank receives on average, by pass: "forward", "input_grad", "weight_grad", "bias",
    "bias_grad".

    Args:
        kept: what forward gathered of X and W is kept for backward (1-D column, 3-D).
    """
    q, world = method.grid.shape[0], method.grid.world
    bias = sizes.n * (Fraction(1, method.cuts.n) - Fraction(1, world))
    row_spans = len({rows for rows, _ in method.home("Y").holders})
    of_bias = {"bias": bias, "bias_grad": Fraction((row_spans - 1) * sizes.n, world)}
    if method.family == "data":
        inner: Any
        replicas: Any
        inner, replicas = method.made_by[1]
        own = formula(inner, sizes._replace(m=sizes.m // replicas), kept=kept)
        of_weight = method.home("W").block(0)
        w = Fraction(sizes.n) * of_weight.rows.share * sizes.k * of_weight.columns.share
        over_copies = Fraction(2 * (replicas - 1), replicas) * w
        return {**own, "weight_grad": own["weight_grad"] + over_copies, **of_bias}
    forward, input_grad, weight_grad = _FORMULAS[method.family](q, world, sizes, not kept)
    return {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, **of_bias}


_Three = tuple[Fraction, Fraction, Fraction]


def _column(p: int, world: int, sizes: Sizes, again: bool) -> _Three:
    x = Fraction(p - 1, p) * sizes.m * sizes.k
    return x, x, x * again


def _row(p: int, world: int, sizes: Sizes, again: bool) -> _Three:
    y = Fraction(p - 1, p) * sizes.m * sizes.n
    return y, y, Fraction(0)


def _column_whole(p: int, world: int, sizes: Sizes, again: bool) -> _Three:
    return Fraction(0), Fraction(2 * (p - 1), p) * sizes.m * sizes.k, Fraction(0)


def _row_whole(p: int, world: int, sizes: Sizes, again: bool) -> _Three:
    return Fraction(2 * (p - 1), p) * sizes.m * sizes.n, Fraction(0), Fraction(0)


def _summa(q: int, world: int, sizes: Sizes, again: bool) -> _Three:
    d = world // q**2
    x, w = Fraction(sizes.m * sizes.k, world), Fraction(sizes.k * sizes.n, q * q)
    each = (q - 1) * (x + w)
    return each, each, each + Fraction(2 * (d - 1), d) * w


def _three_d(q: int, world: int, sizes: Sizes, again: bool) -> _Three:
    x, w, y = (Fraction((q - 1) * a * b, world) for a, b in (sizes.of(o) for o in "XWY"))
    return x + w + y, y + x + w * again, w + x * again


def _spatial_temporal(q: int, world: int, sizes: Sizes, again: bool) -> _Three:
    x, w, y = (Fraction(a * b, world) for a, b in (sizes.of(o) for o in "XWY"))
    way, turn = Fraction(q - 1, q) * x, w * (q > 1)
    return (q - 1) * (x + w) + way, (q - 1) * (y + w) + turn + way, (q - 1) * (x + y) + turn


_FORMULAS: Mapping[str, Callable[[int, int, Sizes, bool], _Three]] = {
    "column": _column,
    "row": _row,
    "column, whole": _column_whole,
    "row, whole": _row_whole,
    "summa": _summa,
    "three_d": _three_d,
    "spatial_temporal": _spatial_temporal,
}


class Memory(NamedTuple):
    """Most elements that a program has in buffers of its own on one rank, in which step, and in which buffers."""

    elements: int
    step: int
    buffers: Mapping[str, int]


def at_rest(method: Method, sizes: Sizes, position: int) -> dict[str, int]:
    """Elements of "X", "W", "Y" and "B" that the rank has between passes."""
    found = {}
    for operand, layout in method.homes.items():
        rows, columns = layout.block(position).shape(*sizes.of(operand))
        found[operand] = rows * columns
    return found


def peak(program: Program, sizes: Sizes, position: int) -> Memory:
    """The step with most in buffers, those given to the program apart; double buffers are in it under their
    names."""
    own = _buffers(program, sizes, position)
    best = Memory(0, 0, {})
    for number, step in enumerate(program.steps):
        alive = {
            name: elements
            for name, (born, elements) in own.items()
            if elements and born <= number <= program.last_use[name]
        }
        for name in {e.target.buffer for e in step.exchanges} & {w.into for w in step.work}:
            alive[f"{name}, arriving"] = own[name][1]  # and added when product and message are there
        for exchange in step.exchanges:
            name = exchange.target.buffer
            if exchange.adds and own[name][0] < number and not _has_it(exchange, position):
                alive[f"{name}, arriving"] = own[name][1]
        if sum(alive.values()) > best.elements:
            best = Memory(sum(alive.values()), number, alive)
    return best


def _has_it(exchange: Exchange, position: int) -> bool:
    """Whether all that the rank gets is a block of its own."""
    given = [m for m in exchange.messages if m.target == position]
    return len(given) == 1 and given[0].source == position


def _buffers(program: Program, sizes: Sizes, position: int) -> dict[str, tuple[int, int]]:
    """By name, the step in which the rank gets or makes the buffer, and its elements; 0 where it looks at a block
    that it has already."""
    found: dict[str, tuple[int, int]] = {}
    for number, step in enumerate(program.steps):
        for exchange in step.exchanges:
            block = exchange.target.layout.blocks[position]
            if block is not None and not (exchange.adds and exchange.target.buffer in found):
                seen = _has_it(exchange, position) and not exchange.adds
                rows, columns = (0, 0) if seen else block.shape(*sizes.of(exchange.operand))
                found[exchange.target.buffer] = number, rows * columns
        for work in step.work:
            if work.into not in found:
                rows, columns = work.layout.block(position).shape(*sizes.of(work.operand))
                found[work.into] = number, rows * columns
    return found
