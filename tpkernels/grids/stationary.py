"""Any method's blocks, multiplied where the result is at rest: factors travel straight from home, sums never do.

``stationary(method)`` has the homes of ``method``. In every pass a rank makes its own block of the result,

    result[rows, columns] = sum over s of left[rows, s] right[s, columns]

one s a step, of factors that their owners send it: q - 1 blocks of each side, or q where it owns none. That is what
SUMMA's forward pass and the passes of the spatial-temporal primitive do; for the gradients of 2-D it moves dY where
SUMMA moves sums of dX and dW. Nothing is added up outside of a product, so that each pass can be one launch
(``one_launch``).

Contract: ``stationary`` returns None where blocks do not match: one dimension (sequence parallel) and 3-D cut an
operand finer than their products take it. 2.5-D's dW is of each depth's rows, and is then summed over depths as before.

At step t a rank (r, c, ...) multiplies s = r + c + t, so that at each step a factor goes to one rank only; steps for
which it has both factors, or one, come first.
"""

from __future__ import annotations

from functools import lru_cache

from tpkernels.grids.grid import Coordinates
from tpkernels.grids.layout import Block, Layout
from tpkernels.grids.method import Method, Pass, Work, dimensions
from tpkernels.grids.spans import Span, within

__all__ = ["stationary"]


@lru_cache(maxsize=64)
def stationary(method: Method) -> Method | None:
    """``method`` with results that stay where they are made; None: its blocks do not match."""
    steps = {len(spans) for kind in Pass for spans in _summed(method, kind)}
    if len(steps) != 1 or 0 in steps:
        return None

    def work(kind: Pass, at: Coordinates, step: int) -> Work:
        position = method.grid.position(*at)
        result = _result(method, kind).block(position)
        rows, columns = dimensions(kind.result)
        spans = {
            rows: result.rows,
            columns: result.columns,
            kind.summed: _summed(method, kind)[position][step],
        }
        return Work(**spans)

    return Method(
        "stationary",
        f"{method.name}, results stay",
        method.grid,
        steps.pop(),
        work,
        method.homes,
        (_again, (method,)),
        sums=method.sums,
    )


def _again(method: Method) -> Method:
    found = stationary(method)
    assert found is not None
    return found


def _result(method: Method, kind: Pass) -> Layout:
    """Where a pass leaves its result: at home, or, with replicas, the sums that these are made of."""
    return (*method.sums.get(kind.result, ()), method.home(kind.result))[0]


@lru_cache(maxsize=256)
def _summed(method: Method, kind: Pass) -> tuple[tuple[Span, ...], ...]:
    """For every position the parts of the summed dimension, in the order of its steps; () where blocks do not
    match."""
    left, right, result = method.home(kind.left), method.home(kind.right), _result(method, kind)
    return tuple(
        () if block is None else _in_order(position, block, kind, left, right)
        for position, block in enumerate(result.blocks)
    )


def _in_order(position: int, block: Block, kind: Pass, left: Layout, right: Layout) -> tuple[Span, ...]:
    """See the module; () unless all parts of the sum have both factors at rest."""
    sides = ((kind.left, left, block.rows), (kind.right, right, block.columns))
    spans = {_along(kind, kind.left, b) for b in left.blocks if b is not None}

    def holders(span: Span) -> list[tuple[int, ...]]:
        return [layout.holders.get(_rectangle(kind, name, kept, span), ()) for name, layout, kept in sides]

    found = [span for span in sorted(spans, key=lambda s: s.start / s.parts) if within((span,), block.terms)]
    if not all(all(holders(span)) for span in found):
        return ()
    if sum(span.share for span in found) != sum(term.share for term in block.terms):
        return ()
    first, count = sum(left.grid.coordinates[position]), len(found)
    turns = {span: (index - first) % count for index, span in enumerate(found)}
    return tuple(sorted(found, key=lambda s: (sum(position not in h for h in holders(s)), turns[s])))


def _along(kind: Pass, operand: str, block: Block) -> Span:
    """The part of the summed dimension that a block of a factor has."""
    return block.rows if dimensions(operand)[0] == kind.summed else block.columns


def _rectangle(kind: Pass, operand: str, kept: Span, summed: Span) -> tuple[Span, Span]:
    """Rows and columns of the factor's block."""
    return (summed, kept) if dimensions(operand)[0] == kind.summed else (kept, summed)
