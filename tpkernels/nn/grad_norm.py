"""Gradient clipping over a tensor-parallel group.

The norm of the whole model is that of the unsharded one: shards of all ranks add up, a replicated parameter
counts once, as does a shard that several ranks hold. Only rank 0 of the group contributes the replicated part, and
the sum is formed in rank order, so that all ranks clip by the same bits even if their replicated gradients should
differ. One all-reduce of one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

import tpkernels as tpk
from tpkernels.errors import ArgumentError, GroupError
from tpkernels.nn.sharding import BlockShard, GroupLike, Shard, placement_of
from tpkernels.ops._groups import group_name_of, resolve

__all__ = ["clip_grad_norm_", "grad_norm"]


def _local_norm(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Norm of all elements together, as float64; each tensor's own in float32 at least."""
    norms: list[Tensor] = []
    for g in gradients:
        if g.numel() > 0:  # the infinity norm of nothing has no value in torch
            wide = torch.promote_types(g.dtype, torch.float32)
            norm: Tensor = torch.linalg.vector_norm(g, norm_type, dtype=wide)
            # float64 from here on: powers of a large norm must not overflow, and these are single numbers.
            norms.append(norm.to(device=device, dtype=torch.float64))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _gradient(p: Tensor) -> Tensor | None:
    """``p.main_grad`` where the gradient was added to it (``ops._main_grad``), else ``p.grad``."""
    main_grad: Tensor | None = getattr(p, "main_grad", None)
    if main_grad is None or p.grad is None:
        return p.grad if main_grad is None else main_grad
    if getattr(p, "grad_added_to_main_grad", False) and not getattr(p, "zero_out_wgrad", False):
        return main_grad  # p.grad only stands for it
    raise ArgumentError(
        f"parameters: one of shape {list(p.shape)} has a gradient in grad and in main_grad; "
        "add one to the other and set grad to None, or delete main_grad if nothing is added to it."
    )


def _group_of(parameters: list[Tensor], group: GroupLike) -> str:
    """Name of the group to sum over; the same on every rank, whichever parameters have gradients there."""
    placements = [placement for p in parameters if (placement := placement_of(p)) is not None]
    shards = list(dict.fromkeys(p.group_name for p in placements if isinstance(p, (Shard, BlockShard))))
    if group is None:
        names = shards or list(dict.fromkeys(p.group_name for p in placements))
        if len(names) > 1:
            raise GroupError(
                f"parameters: they must be laid out over one group, but there are {', '.join(map(repr, names))}; "
                "take the norm of each group's parameters by itself."
            )
        return names[0] if names else group_name_of(None)
    name = group_name_of(group)
    others = [other for other in shards if other != name]
    if others:
        raise GroupError(
            f"group: it must be the group that the parameters are cut over, {others[0]!r}, but it is {name!r}; "
            "leave it out to take the parameters' own."
        )
    return name


@torch.no_grad()
def grad_norm(
    parameters: Iterable[Tensor] | Tensor, group: GroupLike = None, *, norm_type: float = 2.0
) -> Tensor:
    """Norm of the gradients of the whole model, a scalar with the same bits on every rank of the group.

    Args:
        parameters: as for ``torch.nn.utils.clip_grad_norm_``; those with a ``Shard`` add up over the group,
            others count once. Parameters without a gradient are left out. The gradient of one with
            ``main_grad`` is that. All ranks must pass the same parameters.
        group: the tensor-parallel group; None: the one that the parameters' placements name, and the default
            group where no parameter has a placement.
        norm_type: 1 or more, or ``math.inf``.
    Raises:
        GroupError: a parameter is cut over another group than ``group``, or, without it, over another than the
            rest.
        ArgumentError: a norm_type below 1; a parameter with gradients in both ``grad`` and ``main_grad``.
    """
    if norm_type < 1:
        raise ArgumentError(f"norm_type: it must be 1 or more, or infinity, but it is {norm_type}.")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    info = resolve(_group_of(listed, group))
    gradients = [(p, g) for p in listed if (g := _gradient(p)) is not None]
    device = gradients[0][1].device if gradients else listed[0].device if listed else torch.device("cpu")
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    for p, g in gradients:
        placement = placement_of(p)
        if not isinstance(placement, (Shard, BlockShard)):
            replicated.append(g)
        elif placement.counts:
            sharded.append(g)
    shards = _local_norm(sharded, norm_type, device)
    whole = _local_norm(replicated, norm_type, device)
    if math.isinf(norm_type):
        local = torch.maximum(shards, whole) if info.rank == 0 else shards
        return tpk.regions.all_reduce(local, info.name, op="max")
    local = shards**norm_type
    if info.rank == 0:
        local = local + whole**norm_type
    return tpk.regions.all_reduce(local, info.name) ** (1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    group: GroupLike = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients in place so that their norm is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, see ``grad_norm`` for the arguments. The
    factor is min(1, max_norm / (norm + 1e-6)). No synchronisation with a GPU unless ``error_if_nonfinite``.

    Raises:
        ArgumentError: a norm_type below 1, or, if asked for, a norm that is not finite.
        GroupError: as in ``grad_norm``.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = grad_norm(listed, group, norm_type=norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise ArgumentError(
            f"parameters: the norm of their gradients must be finite, but it is {norm.item()}; "
            "pass error_if_nonfinite=False to scale anyway."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in listed:
        if (g := _gradient(p)) is not None:
            g.mul_(factor.to(g.device))  # a scalar tensor does not widen the gradient
    return norm
