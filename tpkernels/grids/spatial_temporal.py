"""The spatial-temporal primitive P_{2^k x 2^k} of PrimePar (Wang et al., ASPLOS 2024): no all-reduce, no replica.

The rank (r, c) of q x q multiplies at step t = 0 .. q-1 the blocks (all modulo q)

    pass           m        k                       n
    FORWARD        r        r + c + t               c
    INPUT_GRAD     r        r + c - 1               c + t
    WEIGHT_GRAD    r + t    r + c - 1 + delta       c - 1 + delta        delta = 1 at t = q-1, else 0

(the paper calls k "N" and n "K"). The summed dimension takes all its values in time on one rank. Every block is
passed on from step to step, one message a rank and operand, as in Cannon's algorithm; where a pass ends the next
one begins: W from FORWARD to INPUT_GRAD, X from FORWARD to WEIGHT_GRAD, dY from INPUT_GRAD to WEIGHT_GRAD, and dW
ends where W began.

Two things are different in a layer. X comes, and Y leaves, as in 2-D, rows r and columns c, so that layers, norms
and residuals fit one another: X moves to (r, r + c) first, and dX from (r, r + c - 1) last. And W stays in the
parameter while copies travel: in the paper it moves home in the last step of INPUT_GRAD, here it moves to where
FORWARD would have left it before the first. The bytes are the same, and a parameter never moves.

The formulas hold for every q; the paper's notation, and ``grid_spatial_temporal``, want a power of 2.
"""

from __future__ import annotations

from functools import lru_cache

from tpkernels.grids.features import features_home
from tpkernels.grids.grid import Coordinates, Grid
from tpkernels.grids.layout import from_blocks
from tpkernels.grids.method import Method, Pass, Work
from tpkernels.grids.spans import part

__all__ = ["spatial_temporal"]


@lru_cache(maxsize=64)
def spatial_temporal(grid: Grid) -> Method:
    """On a grid of 2 equal axes."""
    q = grid.shape[0]

    def work(kind: Pass, at: Coordinates, t: int) -> Work:
        r, c = at
        if kind is Pass.FORWARD:
            return Work(part(r, q), part(r + c + t, q), part(c, q))
        if kind is Pass.INPUT_GRAD:
            return Work(part(r, q), part(r + c - 1, q), part(c + t, q))
        delta = 1 if t == q - 1 else 0
        return Work(part(r + t, q), part(r + c - 1 + delta, q), part(c - 1 + delta, q))

    tokens = from_blocks(grid, lambda r, c: (part(r, q), part(c, q)))
    w = from_blocks(grid, lambda r, c: (part(c, q), part(r + c, q)))
    homes = {"X": tokens, "W": w, "Y": tokens, "B": features_home(grid, tokens)}
    return Method(
        "spatial_temporal", "spatial-temporal", grid, q, work, homes, (spatial_temporal, (grid,)), rings=True
    )
