"""SUMMA in two dimensions (Optimus, arXiv 2104.05343) and 2.5-D (Tesseract, arXiv 2105.14500).

With q x q ranks at each of d depths, the rank (r, c, p) has

    X, dX    rows r of q of depth p's share of the rows, columns c of q
    Y, dY    the same of the output features
    W, dW    input features r of q, output features c of q: the same at every depth

and multiplies x[r, s] with w[s, c] for every s of q, one a step, in all three passes:

    FORWARD       x from (r, s), w from (s, c); Y stays
    INPUT_GRAD    w from (s, c); dX of (r, s) is the sum over row r
    WEIGHT_GRAD   x from (r, s); dW of (s, c) is the sum over column c, and then over depths

with s = r + c + step. The papers have s = step, where one rank of each line sends its block to all the others, or gets
the addends of all, while the other links idle. Here all ranks of a line are at another s, so that at each step a rank
sends one block of each operand, or one addend, and gets one: as many in all, and no broadcast or reduction. With
q = 2 the gradients have s = r + step and s = c + step: a line has one addend to send in any case, and its operand then
moves in one step for all.

Without the last sum each depth would have the gradient of its own rows. It is made as an all-reduce is: every depth
sums a slice, then gathers the others.

d = 1 is 2-D, and what ``summa`` makes of a grid with two axes.
"""

from __future__ import annotations

from functools import lru_cache

from tpkernels.grids.features import features_home
from tpkernels.grids.grid import Coordinates, Grid
from tpkernels.grids.layout import Layout, from_blocks
from tpkernels.grids.method import Method, Pass, Work
from tpkernels.grids.spans import Span, part

__all__ = ["summa"]


@lru_cache(maxsize=64)
def summa(grid: Grid) -> Method:
    """2-D on a grid of 2 axes, 2.5-D on one of 3, the last of which is the depth."""
    q = grid.shape[0]
    d = 1 if len(grid.shape) == 2 else grid.shape[2]

    def rows(at: Coordinates) -> Span:
        return part(at[0], q) if d == 1 else part(at[2] * q + at[0], d * q)

    def work(kind: Pass, at: Coordinates, step: int) -> Work:
        row, column = at[:2]
        first = row + column
        if q == 2:
            first = {Pass.FORWARD: first, Pass.INPUT_GRAD: row, Pass.WEIGHT_GRAD: column}[kind]
        return Work(rows(at), part(first + step, q), part(column, q))

    def tokens(*at: int) -> tuple[Span, Span]:
        return rows(at), part(at[1], q)

    w = from_blocks(grid, lambda *at: (part(at[1], q), part(at[0], q)))
    y = from_blocks(grid, tokens)
    homes = {"X": y, "W": w, "Y": y, "B": features_home(grid, y)}
    name = "2-D SUMMA" if len(grid.shape) == 2 else "2.5-D"
    return Method(
        "summa",
        name,
        grid,
        q,
        work,
        homes,
        (summa, (grid,)),
        sums={"dW": _over_depths(grid, w)} if d > 1 else {},
    )


def _over_depths(grid: Grid, w: Layout) -> tuple[Layout, ...]:
    """dW of each depth's rows; then a slice of the whole sum at each depth."""
    d = grid.shape[2]
    depth = [at[2] for at in grid.coordinates]
    of_depth = w.partial(lambda position: (part(depth[position], d),))
    slices = (
        block._replace(rows=block.rows.cut(depth[position], d)) if block is not None else None
        for position, block in enumerate(w.blocks)
    )
    return of_depth, Layout(grid, tuple(slices))
