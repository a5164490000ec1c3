"""Three dimensions (arXiv 2105.14450): q x q x q ranks, everything at rest cut over all of them.

The rank (i, j, l) has

    X, dX    rows (i, j), the j-th of q parts of the i-th of q parts; columns l of q
    W, dW    input features (l, i), output features j of q
    Y, dY    rows (i, l), columns j of q

and makes the one product x[i, l] w[l, j]: X is gathered along j, W along i, and Y is reduced along l; dX = dY W
gathers dY along l and is reduced along j, dW is reduced along i. The paper cuts the output features of W once more
where ColossalAI's code cuts the input features; this is as that code has it.

Y lies otherwise than X: j and l have changed places. ``swapped`` is the same method with them exchanged: two
layers, one of each, end where they began, and only tensors of one layout may be added.
"""

from __future__ import annotations

from functools import lru_cache

from tpkernels.grids.features import features_home
from tpkernels.grids.grid import Coordinates, Grid
from tpkernels.grids.layout import from_blocks
from tpkernels.grids.method import Method, Pass, Work
from tpkernels.grids.spans import Span, part

__all__ = ["three_d"]


@lru_cache(maxsize=64)
def three_d(grid: Grid, swapped: bool = False) -> Method:
    """3-D on a grid of 3 equal axes; ``swapped``: with the last two axes exchanged, for what follows a layer
    without."""
    q = grid.shape[0]

    def roles(at: Coordinates) -> tuple[int, int, int]:
        i, j, k = at
        return (i, k, j) if swapped else (i, j, k)

    def work(kind: Pass, at: Coordinates, step: int) -> Work:
        i, j, k = roles(at)
        return Work(part(i, q), part(k, q), part(j, q))

    def x(*at: int) -> tuple[Span, Span]:
        i, j, k = roles(at)
        return part(i * q + j, q * q), part(k, q)

    def w(*at: int) -> tuple[Span, Span]:
        i, j, k = roles(at)
        return part(j, q), part(k * q + i, q * q)

    def y(*at: int) -> tuple[Span, Span]:
        i, j, k = roles(at)
        return part(i * q + k, q * q), part(j, q)

    made = from_blocks(grid, y)
    homes = {"X": from_blocks(grid, x), "W": from_blocks(grid, w), "Y": made, "B": features_home(grid, made)}
    return Method(
        "three_d", "3-D, swapped" if swapped else "3-D", grid, 1, work, homes, (three_d, (grid, swapped))
    )
