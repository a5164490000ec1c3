"""Process grids as pure data: how many ranks lie along each axis, and which coordinates a rank has.

Contract: positions 0 .. world-1 of a grid are the ranks of a process group in its order. ``Grid`` knows nothing of
processes; ``tpkernels.grids.mesh`` binds one to a group.

    grid                     axes                     world    used by
    grid_1d                  rank                     p        column- and row-parallel layers
    grid_2d                  row, column              q q      SUMMA (Optimus)
    grid_2p5d                row, column, depth       q q d    2.5-D (Tesseract)
    grid_3d                  i, j, l                  q q q    3-D
    grid_spatial_temporal    row, column              4^k      PrimePar's P_{2^k x 2^k}
    with_replicas            data, and another's      d n      copies of a grid, for data parallelism

Positions count row by row, the last axis fastest, as in a DeviceMesh. Two grids count otherwise, so that what moves
most stays in a host: ``grid_2p5d`` has the depth slowest, since between depths only the weight's gradient is summed;
``grid_spatial_temporal`` takes the bits of a rank alternately, the first for the row (PrimePar, section 3): ranks 0 to
3 are a 2 x 2 corner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tpkernels.errors import GroupError

__all__ = ["Grid", "grid_1d", "grid_2d", "grid_2p5d", "grid_3d", "grid_spatial_temporal", "with_replicas"]

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """``shape[a]`` ranks along axis ``axes[a]``.

    digits: how positions count, the slowest digit first: the number of its axis, and how many values it has. The
        digits of an axis together are its coordinate. Empty: one digit for each axis, in their order.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    digits: tuple[tuple[int, int], ...] = ()

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def coordinates(self) -> tuple[Coordinates, ...]:
        """Coordinates of every position."""
        return tuple(self._coordinates_of(position) for position in range(self.world))

    @cached_property
    def _positions(self) -> dict[Coordinates, int]:
        return {coordinates: position for position, coordinates in enumerate(self.coordinates)}

    def position(self, *coordinates: int) -> int:
        """Where the rank with these coordinates, each modulo its axis, stands."""
        return self._positions[tuple(c % n for c, n in zip(coordinates, self.shape, strict=True))]

    def distance(self, a: int, b: int) -> int:
        """In how many axes two positions differ."""
        return sum(x != y for x, y in zip(self.coordinates[a], self.coordinates[b], strict=True))

    def _coordinates_of(self, position: int) -> Coordinates:
        found, weights = [0] * len(self.axes), [1] * len(self.axes)
        for axis, size in reversed(self.digits or tuple(enumerate(self.shape))):
            position, digit = divmod(position, size)
            found[axis] += digit * weights[axis]
            weights[axis] *= size
        return tuple(found)

    def __str__(self) -> str:
        return " x ".join(map(str, self.shape))


def grid_1d(world: int) -> Grid:
    """``world`` ranks in a row."""
    _check_world(world)
    return Grid(("rank",), (world,))


def grid_2d(world: int) -> Grid:
    """q x q ranks.

    Raises:
        GroupError: ``world`` is no square.
    """
    _check_world(world)
    q = math.isqrt(world)
    if q * q != world:
        raise GroupError(
            f"group: a 2-D grid has q x q ranks, a square number, but the group has {world}; make a group of "
            f"{q * q} or {(q + 1) ** 2} ranks{_other_grids(world)}."
        )
    return Grid(("row", "column"), (q, q))


def grid_2p5d(world: int, depth: int) -> Grid:
    """q x q ranks at each of ``depth`` depths, one depth after another. The paper has depth <= q, which nothing here
    needs.

    Raises:
        GroupError: ``depth`` does not leave a square number of ranks.
    """
    _check_world(world)
    fitting = [d for d in range(1, world + 1) if world % d == 0 and math.isqrt(world // d) ** 2 == world // d]
    if depth not in fitting:
        would = ", ".join(f"{d} ({_across(world, d)} x {_across(world, d)} x {d})" for d in fitting)
        raise GroupError(
            f"depth: a 2.5-D grid has q x q x depth ranks, but {world} ranks and depth {depth} leave no square "
            f"for each depth; of {world} ranks these depths would fit: {would}."
        )
    q = _across(world, depth)
    return Grid(("row", "column", "depth"), (q, q, depth), ((2, depth), (0, q), (1, q)))


def grid_3d(world: int) -> Grid:
    """q x q x q ranks.

    Raises:
        GroupError: ``world`` is no cube.
    """
    _check_world(world)
    q = next(n for n in range(1, world + 1) if (n + 1) ** 3 > world)
    if q**3 != world:
        raise GroupError(
            f"group: a 3-D grid has q x q x q ranks, a cube, but the group has {world}; make a group of {q**3} or "
            f"{(q + 1) ** 3} ranks{_other_grids(world)}."
        )
    return Grid(("i", "j", "l"), (q, q, q))


def grid_spatial_temporal(world: int) -> Grid:
    """2^k x 2^k ranks.

    Raises:
        GroupError: ``world`` is no power of 4.
    """
    _check_world(world)
    k = (world.bit_length() - 1) // 2
    if 4**k != world:
        raise GroupError(
            f"group: the spatial-temporal primitive has 2^k x 2^k ranks, a power of 4, but the group has {world}; make "
            f"a group of {4**k} or {4 ** (k + 1)} ranks{_other_grids(world)}."
        )
    return Grid(("row", "column"), (2**k, 2**k), ((0, 2), (1, 2)) * k)


def with_replicas(grid: Grid, replicas: int) -> Grid:
    """``replicas`` copies of ``grid``, one behind another: the ranks of each are consecutive.

    Raises:
        GroupError: less than one.
    """
    if replicas < 1:
        raise GroupError(f"replicas: a grid needs at least 1 copy, but it is {replicas}.")
    digits = tuple((axis + 1, size) for axis, size in grid.digits)
    return Grid(("data", *grid.axes), (replicas, *grid.shape), ((0, replicas), *digits) if digits else ())


def _across(world: int, depth: int) -> int:
    return math.isqrt(world // depth)


def _check_world(world: int) -> None:
    if world < 1:
        raise GroupError(f"world: a grid needs at least 1 rank, but it is {world}.")


def _other_grids(world: int) -> str:
    """What else the world would do for: ", or use 2.5-D with depth 2, or 1-D"."""
    depths = [d for d in range(2, world) if world % d == 0 and _across(world, d) ** 2 * d == world]
    fits = [f"2.5-D with depth {d} ({_across(world, d)} x {_across(world, d)} x {d})" for d in depths]
    return (
        f", or use {' or '.join(fits)}"
        if fits
        else ", or use the layers of one dimension, which take any number"
    )
