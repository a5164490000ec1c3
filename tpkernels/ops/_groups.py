"""Process groups by name, and how a dimension is cut into shards.

Operations carry the name of a group, never the object: names can stand in operator schemas and in
compiled graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.errors import ArgumentError, DeviceError, GroupError

GroupLike: TypeAlias = ProcessGroup | DeviceMesh | str | None


# Untyped on purpose: torch has renamed the type of group names.
_resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]


class Group(NamedTuple):
    """A process group as seen by one of its ranks."""

    name: str
    rank: int
    world: int
    process_group: ProcessGroup


def group_name_of(group: object) -> str:
    """Name of a process group (a ``GroupLike``; anything else raises).

    ``None`` means the default group, a device mesh with one dimension means its group.
    """
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            raise GroupError(
                "group: no default process group exists; call torch.distributed.init_process_group() first "
                "(torchrun sets the environment that it needs)."
            )
        return str(dist.distributed_c10d._get_default_group().group_name)
    if isinstance(group, ProcessGroup):
        return str(group.group_name)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise GroupError(
                f"group: expected a device mesh with one dimension, got {group.ndim}; "
                "pass one dimension of it, such as mesh['tp']."
            )
        return str(group.get_group().group_name)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(
            "group: this rank is not a member of the given process group; call the operation only on its members."
        )
    raise GroupError(
        f"group: expected a ProcessGroup, a DeviceMesh, a group name or None, got {type(group).__name__}."
    )


def resolve(name: str) -> Group:
    """Look up a group by name."""
    try:
        process_group = _resolve(name)
    except (RuntimeError, KeyError, ValueError) as error:
        raise GroupError(
            f"group: no process group named {name!r} exists in this process; "
            "pass a group that this rank has created or joined."
        ) from error
    return Group(name, process_group.rank(), process_group.size(), process_group)


def transport_of(group: Group, device: torch.device, argument: str) -> str:
    """Backend ("gloo", "nccl", ...) that carries tensors of this device type in the group."""
    if device.type == "meta":
        return "none"
    try:
        return str(group.process_group._get_backend(device).name())
    except RuntimeError as error:
        config = dist.get_backend(group.process_group)
        raise DeviceError(
            f"{argument}: it is on {device}, but group {group.name!r} communicates through {config}, which does not "
            f"carry {device.type} tensors; move the tensor, or create the group with a backend for {device.type} "
            "(gloo for cpu, nccl for cuda)."
        ) from error


def shard_sizes(total: int, world: int) -> list[int]:
    """Cut ``total`` rows for ``world`` ranks as :func:`torch.chunk` does: equal, but the last ranks may get fewer.

    >>> shard_sizes(10, 4)
    [3, 3, 3, 1]
    >>> shard_sizes(2, 4)
    [1, 1, 0, 0]
    """
    if world < 1:
        raise ArgumentError(f"world: expected at least 1, got {world}.")
    if not isinstance(total, (int, torch.SymInt)) or total < 0:
        raise ArgumentError(f"total: expected an integer, 0 or more, got {total!r}.")
    if total % world == 0:  # kept apart so that a traced size stays a simple expression
        return [total // world] * world
    chunk = (total + world - 1) // world
    return [_between(0, total - rank * chunk, chunk) for rank in range(world)]


def _between(low: int, value: Any, high: Any) -> int:
    """``value`` within bounds; values are integers, or SymInts in a traced graph."""
    clamped: Any
    if isinstance(value, torch.SymInt) or isinstance(high, torch.SymInt):
        clamped = torch.sym_max(torch.sym_min(value, high), low)
    else:  # Dynamo of torch 2.11 cannot trace sym_min of integers
        clamped = max(low, min(value, high))
    return clamped  # type: ignore[no-any-return]


def gather_sizes(mine: int, sizes: Sequence[int] | None, group: Group, argument: str) -> list[int]:
    """Rows of every rank in an all-gather; ``None`` means that all ranks have as many as this one."""
    if sizes is None:
        return [mine] * group.world
    _check_sizes(sizes, group)
    if sizes[group.rank] != mine:
        raise ArgumentError(
            f"shard_sizes: entry {group.rank} (this rank) is {sizes[group.rank]}, but {argument} has {mine} rows "
            "in the gathered dimension; pass one size per rank, the same list on every rank."
        )
    return list(sizes)


def scatter_sizes(total: int, sizes: Sequence[int] | None, group: Group, argument: str) -> list[int]:
    """Rows that every rank receives in a reduce-scatter; ``None`` means :func:`shard_sizes`."""
    if sizes is None:
        return shard_sizes(total, group.world)
    _check_sizes(sizes, group)
    if sum(sizes) != total:
        raise ArgumentError(
            f"shard_sizes: the sizes {list(sizes)} sum to {sum(sizes)}, but {argument} has {total} rows in the "
            "scattered dimension; they must be equal."
        )
    return list(sizes)


def _check_sizes(sizes: Sequence[int], group: Group) -> None:
    if len(sizes) != group.world:
        raise ArgumentError(
            f"shard_sizes: expected one size per rank, {group.world} in all, got {len(sizes)}: {list(sizes)}."
        )
    for rank, size in enumerate(sizes):
        if size < 0:
            raise ArgumentError(f"shard_sizes: entry {rank} is {size}; sizes are 0 or more.")
