"""One dimension with sequence parallelism (Megatron-LM, arXiv 2205.05198), in the notation of the other methods.

    column    X rows cut, gathered; W rows (output features) cut; Y columns cut. dX reduce-scattered.
    row       X columns cut; W columns (input features) cut; Y reduce-scattered over rows. dY gathered.

The layers of this method are ``ColumnParallelLinear`` and ``RowParallelLinear``; here it is for comparison and
planning.
"""

from __future__ import annotations

from functools import lru_cache

from tpkernels.grids.features import features_home
from tpkernels.grids.grid import Coordinates, Grid
from tpkernels.grids.layout import from_blocks
from tpkernels.grids.method import Method, Pass, Work
from tpkernels.grids.spans import WHOLE, part

__all__ = ["column_parallel", "row_parallel"]


@lru_cache(maxsize=64)
def column_parallel(grid: Grid) -> Method:
    """Output features cut over ``grid``, of one axis."""
    (p,) = grid.shape

    def work(kind: Pass, at: Coordinates, step: int) -> Work:
        return Work(WHOLE, WHOLE, part(at[0], p))

    y = from_blocks(grid, lambda r: (WHOLE, part(r, p)))
    homes = {
        "X": from_blocks(grid, lambda r: (part(r, p), WHOLE)),
        "W": from_blocks(grid, lambda r: (part(r, p), WHOLE)),
        "Y": y,
        "B": features_home(grid, y),
    }
    return Method("column", "1-D, column-parallel", grid, 1, work, homes, (column_parallel, (grid,)))


@lru_cache(maxsize=64)
def row_parallel(grid: Grid) -> Method:
    """Input features cut over ``grid``, of one axis."""
    (p,) = grid.shape

    def work(kind: Pass, at: Coordinates, step: int) -> Work:
        return Work(WHOLE, part(at[0], p), WHOLE)

    y = from_blocks(grid, lambda r: (part(r, p), WHOLE))
    homes = {
        "X": from_blocks(grid, lambda r: (WHOLE, part(r, p))),
        "W": from_blocks(grid, lambda r: (WHOLE, part(r, p))),
        "Y": y,
        "B": features_home(grid, y),
    }
    return Method("row", "1-D, row-parallel", grid, 1, work, homes, (row_parallel, (grid,)))
