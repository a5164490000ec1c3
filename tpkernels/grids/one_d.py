"""One dimension (Megatron-LM, arXiv 1909.08053), and its sequence parallelism (arXiv 2205.05198), in the notation of
the other methods.

    column    X rows cut, gathered; W rows (output features) cut; Y columns cut. dX reduce-scattered.
    row       X columns cut; W columns (input features) cut; Y reduce-scattered over rows. dY gathered.

Without sequence parallelism, X of column and Y of row are whole on every rank: nothing is gathered, and dX, or Y, is
all-reduced.

The layers of this method are ``ColumnParallelLinear`` and ``RowParallelLinear``; here it is for comparison and
planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from tpkernels.grids.features import features_home
from tpkernels.grids.grid import Coordinates, Grid
from tpkernels.grids.layout import Layout, from_blocks, rows_over, whole
from tpkernels.grids.method import Method, Pass, Work
from tpkernels.grids.spans import WHOLE, part

__all__ = ["column_parallel", "row_parallel"]


@lru_cache(maxsize=64)
def column_parallel(grid: Grid, sequence_parallel: bool = True) -> Method:
    """Output features cut over ``grid``, of one axis; ``sequence_parallel``: the rows of X, too."""
    (p,) = grid.shape

    def work(kind: Pass, at: Coordinates, step: int) -> Work:
        return Work(WHOLE, WHOLE, part(at[0], p))

    y = from_blocks(grid, lambda r: (WHOLE, part(r, p)))
    homes = {
        "X": rows_over(grid) if sequence_parallel else whole(grid),
        "W": from_blocks(grid, lambda r: (part(r, p), WHOLE)),
        "Y": y,
        "B": features_home(grid, y),
    }
    made_by = (column_parallel, (grid, sequence_parallel))
    family, name = _called("column", sequence_parallel)
    return Method(family, name, grid, 1, work, homes, made_by, sums=_slices("dX", grid, sequence_parallel))


@lru_cache(maxsize=64)
def row_parallel(grid: Grid, sequence_parallel: bool = True) -> Method:
    """Input features cut over ``grid``, of one axis; ``sequence_parallel``: the rows of Y, too."""
    (p,) = grid.shape

    def work(kind: Pass, at: Coordinates, step: int) -> Work:
        return Work(WHOLE, part(at[0], p), WHOLE)

    y = rows_over(grid) if sequence_parallel else whole(grid)
    homes = {
        "X": from_blocks(grid, lambda r: (WHOLE, part(r, p))),
        "W": from_blocks(grid, lambda r: (WHOLE, part(r, p))),
        "Y": y,
        "B": features_home(grid, y),
    }
    made_by = (row_parallel, (grid, sequence_parallel))
    family, name = _called("row", sequence_parallel)
    return Method(family, name, grid, 1, work, homes, made_by, sums=_slices("Y", grid, sequence_parallel))


def _called(which: str, sequence_parallel: bool) -> tuple[str, str]:
    """Family and name."""
    if sequence_parallel:
        return which, f"1-D, {which}-parallel"
    return f"{which}, whole", f"1-D, {which}-parallel, no sequence parallelism"


def _slices(result: str, grid: Grid, sequence_parallel: bool) -> Mapping[str, tuple[Layout, ...]]:
    """An all-reduce's first half: every rank has the sum of a slice of the rows."""
    return {} if sequence_parallel or grid.world == 1 else {result: (rows_over(grid),)}
