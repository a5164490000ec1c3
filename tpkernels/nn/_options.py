"""Keyword arguments of linear layers that attention, MLP and block hand on to them."""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from tpkernels.fp8.recipe import RecipeLike
from tpkernels.nn.sharding import GroupLike

__all__ = ["LayerOptions", "ModelOptions", "column", "joined", "row"]


class LayerOptions(TypedDict, total=False):
    """As in ``ColumnParallelLinear``, which has what they are when left out."""

    group: GroupLike
    sequence_parallel: bool
    sequence_dim: int
    seed: int
    init_std: float | None
    name: str
    dtype: torch.dtype | None
    device: torch.device | str | None
    path: str
    gradient_accumulation_fusion: bool | None
    delay_wgrad: bool
    recipe: RecipeLike | None


class ModelOptions(LayerOptions, total=False):
    """Of modules that have several layers. ``keep_gathered``: of their column-parallel ones."""

    keep_gathered: bool


def joined(options: ModelOptions, key: str) -> ModelOptions:
    """The options with ``key`` added to the name: of a module below."""
    name = options.get("name", "")
    return ModelOptions(**{**options, "name": f"{name}.{key}" if name else key})


def column(options: ModelOptions, key: str) -> ModelOptions:
    """Those of a column-parallel layer below."""
    return joined(options, key)


def row(options: ModelOptions, key: str) -> LayerOptions:
    """Those of a row-parallel layer below, which gathers nothing."""
    own: Any = dict(joined(options, key))
    own.pop("keep_gathered", None)
    made: LayerOptions = own
    return made
