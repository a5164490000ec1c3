"""Data parallelism around any method: copies of its grid, each with rows of its own, and the same block of a weight.

The rank ``at`` of copy d of D does what the method does there, with the d-th of D parts of the rows. dW is what the
method makes of those rows, summed over the copies behind it as an all-reduce is made: every copy sums a slice, then
gathers the others.

The copies' ranks are consecutive, so where a copy fits into a host all its exchanges stay there. ``summa`` with a depth
is the same as copies of it without: equal blocks and messages on the same ranks of a group.
"""

from __future__ import annotations

from functools import lru_cache

from tpkernels.grids.features import features_home
from tpkernels.grids.grid import Coordinates, with_replicas
from tpkernels.grids.layout import Block, Layout
from tpkernels.grids.method import Method, Pass, Work
from tpkernels.grids.spans import Span, part

__all__ = ["data_parallel", "repeated", "side_by_side"]


@lru_cache(maxsize=512)
def data_parallel(method: Method, replicas: int) -> Method:
    """``method`` on each of ``replicas`` copies of its grid; the method itself for 1."""
    if replicas == 1:
        return method
    grid = with_replicas(method.grid, replicas)

    def work(kind: Pass, at: Coordinates, step: int) -> Work:
        inner = method.work(kind, at[1:], step)
        return inner._replace(m=_within(at[0], replicas, inner.m))

    x, y = (side_by_side(method.home(operand), replicas) for operand in "XY")
    w = repeated(method.home("W"), replicas)
    sums = {
        operand: tuple(side_by_side(layout, replicas) for layout in path)
        for operand, path in method.sums.items()
        if operand != "dW"
    }
    inner_sums = tuple(
        _of_rows(repeated(layout, replicas), replicas, method.grid.world)
        for layout in method.sums.get("dW", ())
    )
    sums["dW"] = (*inner_sums, *_over_copies(w, replicas, method.grid.world))
    homes = {"X": x, "W": w, "Y": y, "B": features_home(grid, y)}
    return Method(
        "data",
        f"{replicas} x {method.name}",
        grid,
        method.steps,
        work,
        homes,
        (data_parallel, (method, replicas)),
        rings=method.rings,
        sums=sums,
    )


def side_by_side(layout: Layout, replicas: int) -> Layout:
    """Of a tensor whose rows the copies share: each has its part in ``layout``."""
    blocks = (
        block and block._replace(rows=_within(copy, replicas, block.rows))
        for copy in range(replicas)
        for block in layout.blocks
    )
    return Layout(with_replicas(layout.grid, replicas), tuple(blocks))


def repeated(layout: Layout, replicas: int) -> Layout:
    """Of a tensor that every copy has in ``layout``."""
    return Layout(with_replicas(layout.grid, replicas), layout.blocks * replicas)


def _within(copy: int, replicas: int, span: Span) -> Span:
    """The part ``span`` of the copy's rows, as a part of all."""
    own = part(copy, replicas)
    return (
        own
        if span.share == 1
        else Span(copy * span.parts + span.start, copy * span.parts + span.stop, replicas * span.parts)
    )


def _of_rows(layout: Layout, replicas: int, each: int) -> Layout:
    """Sums over rows (``terms``) of each copy's own."""
    blocks = (
        block and block._replace(terms=tuple(_within(position // each, replicas, t) for t in block.terms))
        for position, block in enumerate(layout.blocks)
    )
    return Layout(layout.grid, tuple(blocks))


def _over_copies(w: Layout, replicas: int, each: int) -> tuple[Layout, Layout]:
    """dW of each copy's rows; then a slice of the whole sum on every copy."""
    of_copy = w.partial(lambda position: (part(position // each, replicas),))
    slices: list[Block | None] = [
        block and block._replace(rows=block.rows.cut(position // each, replicas))
        for position, block in enumerate(w.blocks)
    ]
    return of_copy, Layout(w.grid, tuple(slices))
