"""Checks of plans: what a style is made with, and what it is applied to."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpkernels.errors import ArgumentError, DTypeError, GroupError

_NAMES = {Replicate: "Replicate()", Shard: "Shard(dim)", Partial: "Partial()"}


def check_layout(style: str, argument: str, layout: object, kinds: tuple[type[Placement], ...]) -> None:
    """One of torch's placements, of a kind that the style takes there."""
    if layout is None or type(layout) in kinds:
        return
    raise ArgumentError(
        f"{argument}: {style} takes one of {', '.join(_NAMES[kind] for kind in kinds)} there, a placement for the one "
        f"dimension of its mesh, but it is {layout!r}."
    )


def check_sequence_dim(sequence_dim: object) -> None:
    if isinstance(sequence_dim, int) and not isinstance(sequence_dim, bool) and sequence_dim >= 0:
        return
    raise ArgumentError(
        f"sequence_dim: it counts from the front and must be an integer, 0 or more, but it is {sequence_dim!r}; "
        "take 0 for [sequence, batch, features] and 1 for [batch, sequence, features]."
    )


def check_mesh(style: str, mesh: DeviceMesh) -> None:
    if mesh.ndim == 1:
        return
    names = mesh.mesh_dim_names
    shape = " x ".join(str(size) for size in mesh.shape)
    pick = f"mesh[{names[-1]!r}]" if names else "mesh['tp'], of a mesh made with mesh_dim_names"
    raise GroupError(
        f"device_mesh: {style} takes a mesh with 1 dimension, but this one has {mesh.ndim} ({shape}"
        f"{', ' + ', '.join(names) if names else ''}); pass one dimension of it, such as {pick}."
    )


def check_module(style: str, module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    if isinstance(module, kinds):
        return
    expected = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
    inside = sum(isinstance(child, kinds) for child in module.modules())
    raise DTypeError(
        f"parallelize_plan: {style} is for {expected}, but its entry names a {type(module).__name__}, "
        f"which has {inside} such modules inside; name those instead."
    )


def row_dim(layout: Placement, ndim: int, argument: str) -> int | None:
    """The dimension of rows that ``layout`` cuts in a tensor of ``ndim`` dimensions; None if it cuts no rows."""
    if type(layout) is not Shard:
        return None
    dim = shard_dim(layout, ndim, argument)
    return None if dim == ndim - 1 else dim


def shard_dim(layout: Shard, ndim: int, argument: str) -> int:
    """The dimension that ``layout`` cuts, counted from the front."""
    if not -ndim <= layout.dim < ndim:
        raise ArgumentError(
            f"{argument}: Shard({layout.dim}) names a dimension that the tensor does not have; it has {ndim}, so "
            f"{-ndim} to {ndim - 1} can be named."
        )
    return layout.dim % ndim
