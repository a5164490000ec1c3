"""Collectives with gradients, as functions: the edges of sharded regions in a model.

Replicated values get their complete gradient, equal on every rank; sharded values get their shard's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.ops._arrays import tensor
from tpkernels.ops._groups import GroupLike, group_name_of


def copy_to_group(x: Tensor, group: GroupLike = None) -> Tensor:
    """A replicated ``x`` (any floating point tensor) enters sharded computation: its gradient is summed over ranks."""
    out: Tensor = torch.ops.tpkernels.copy_to_group(tensor("x", x), group_name_of(group))
    return out


def all_reduce(x: Tensor, group: GroupLike = None, op: str = "sum") -> Tensor:
    """Sum (or ``op="max"``) over the group; the result is replicated, so its gradient passes unchanged.

    Sums are formed in rank order in float32 (float64): bitwise equal on every rank and on every run.
    ``op="max"`` has no gradient.
    """
    out: Tensor = torch.ops.tpkernels.all_reduce(tensor("x", x), op, group_name_of(group))
    return out


def all_gather(
    x: Tensor,
    dim: int = 0,
    group: GroupLike = None,
    *,
    shard_sizes: Sequence[int] | None = None,
    replicated_grad: bool = False,
) -> Tensor:
    """Concatenate the shards of ``x`` along ``dim``.

    Args:
        x: this rank's shard, any dtype; ``shard_sizes[rank]`` rows in ``dim``.
        dim: gathered dimension.
        group: process group.
        shard_sizes: rows of every rank; None if all have as many.
        replicated_grad: True if every rank computes the *same* with the result (the gradient is then this
            rank's slice); False if each rank computes its own part (gradients are summed and scattered).
    """
    out: Tensor = torch.ops.tpkernels.all_gather(
        tensor("x", x), dim, shard_sizes, group_name_of(group), replicated_grad
    )
    return out


def reduce_scatter(
    x: Tensor, dim: int = 0, group: GroupLike = None, *, shard_sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum ``x`` over the group and keep this rank's ``shard_sizes[rank]`` rows of ``dim`` (None: ceil-split)."""
    out: Tensor = torch.ops.tpkernels.reduce_scatter(tensor("x", x), dim, shard_sizes, group_name_of(group))
    return out


def split(
    x: Tensor, dim: int = 0, group: GroupLike = None, *, shard_sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's rows of a replicated ``x`` along ``dim``; the gradient is gathered (None: ceil-split)."""
    out: Tensor = torch.ops.tpkernels.split(tensor("x", x), dim, shard_sizes, group_name_of(group))
    return out
