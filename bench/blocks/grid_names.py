"""Variants on grids of ranks that a run of so many can have. No torch."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["GridVariant", "grid_variants"]


class GridVariant(NamedTuple):
    """A method of ``tpkernels.nn.grids.GridStrategy`` on a grid. ``path``: of its linear layers."""

    variant: str
    method: str
    depth: int | None
    grid: str
    path: str = "auto"


def grid_variants(world: int) -> tuple[GridVariant, ...]:
    """Those whose grid the ranks fill, of two along a side at least; 2.5-D with the fewest depths beyond one.

    On path "fused" spatial-temporal is 2-D with other blocks of the weight: the same bytes and messages.
    """
    found = []
    side = math.isqrt(world)
    square = side * side == world and side > 1
    if square:
        found.append(GridVariant("ours-2d", "2d", None, f"{side} x {side}"))
    for depth in range(2, world // 4 + 1):
        across = math.isqrt(world // depth)
        if across * across * depth == world:
            found.append(GridVariant("ours-2.5d", "2.5d", depth, f"{across} x {across} x {depth}"))
            break
    found += [
        one._replace(variant=f"{one.variant}:fused", path="fused")
        for one in found
        if _is_launched(one, world)
    ]
    edge = round(world ** (1 / 3))
    if edge > 1 and edge**3 == world:
        found.append(GridVariant("ours-3d", "3d", None, f"{edge} x {edge} x {edge}"))
    if square and side & (side - 1) == 0:
        found.append(GridVariant("ours-spatial-temporal", "spatial_temporal", None, f"{side} x {side}"))
    return tuple(found)


def _is_launched(one: GridVariant, world: int) -> bool:
    """Whether a pass can be one launch: csrc/host/protocol.hpp and kernels/gemm_hooks.hpp have the bounds."""
    return world <= 16 and int(one.grid.partition(" ")[0]) <= 4
