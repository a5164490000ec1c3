"""A grid bound to processes: which rank of a process group stands where.

Contract: a ``ProcessGrid`` has the group's name, not the object, so it can be pickled. All messages travel within
that one group, point to point; no group is made for rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.errors import GroupError
from tpkernels.grids.grid import Grid
from tpkernels.ops._groups import Group, GroupLike, group_name_of, resolve

__all__ = ["GridGroupLike", "ProcessGrid", "bind"]


@dataclass(frozen=True)
class ProcessGrid:
    """``members[position]`` is the rank in the group of who stands there; this process stands at ``position``."""

    grid: Grid
    group_name: str
    position: int
    members: tuple[int, ...]

    @property
    def group(self) -> Group:
        """The process group.

        Raises:
            GroupError: this process has none of that name.
        """
        return resolve(self.group_name)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Of the job's ranks, who stands at each position."""
        ranks = dist.get_process_group_ranks(self.group.process_group)
        return tuple(ranks[member] for member in self.members)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Of this process."""
        return self.grid.coordinates[self.position]


# A mesh may have as many dimensions as the grid.
GridGroupLike: TypeAlias = GroupLike | ProcessGrid


def bind(make: Callable[[int], Grid], group: GridGroupLike = None) -> ProcessGrid:
    """The grid that ``make`` has for the group's number of ranks, bound to them.

    Args:
        make: such as ``grid_2d``.
        group: ``ProcessGroup``, its name, ``DeviceMesh`` or None for the default group: its ranks in the order that
            the grid counts positions. A mesh of several dimensions must have the grid's shape, its dimensions are the
            grid's axes, and its ranks stand where they stand in the mesh, in whatever order. A ``ProcessGrid`` is taken
            as it is.
    Raises:
        GroupError: no such group, not a member of it, a number of ranks or a mesh that is no such grid.
    """
    if isinstance(group, ProcessGrid):
        if make(group.grid.world).shape != group.grid.shape:
            raise GroupError(
                f"group: expected a grid of {make(group.grid.world)} ranks, got one of {group.grid}; pass its group."
            )
        return group
    if isinstance(group, DeviceMesh) and group.ndim > 1:
        return _of_mesh(make, group)
    info = resolve(group_name_of(group))
    return ProcessGrid(make(info.world), info.name, info.rank, tuple(range(info.world)))


def _of_mesh(make: Callable[[int], Grid], mesh: DeviceMesh) -> ProcessGrid:
    shape = tuple(mesh.shape)
    grid = make(mesh.size())
    if grid.shape != shape:
        raise GroupError(
            f"group: expected a device mesh of {grid}, got {' x '.join(map(str, shape))}; make it so, or pass a mesh "
            "of one dimension, or a group, whose ranks are then taken in order."
        )
    ranks: list[int] = mesh.mesh.flatten().tolist()
    name = _group_of(mesh, ranks)
    info = resolve(name)
    of_group = dist.get_process_group_ranks(info.process_group)
    members = tuple(of_group.index(rank) for rank in ranks)
    # The mesh's own order, row by row, in place of the grid's.
    return ProcessGrid(replace(grid, digits=()), name, members.index(info.rank), members)


def _group_of(mesh: DeviceMesh, ranks: Sequence[int]) -> str:
    """A group with all of the mesh's ranks: the default one where it has them, else one that the mesh makes."""
    if len(ranks) == dist.get_world_size():
        return group_name_of(None)
    return group_name_of(mesh._flatten().get_group())
