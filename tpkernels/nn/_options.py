"""Keyword arguments of linear layers that attention, MLP and block hand on to them."""

from __future__ import annotations

from typing import TypedDict

import torch

from tpkernels.fp8.recipe import RecipeLike
from tpkernels.nn.sharding import GroupLike

__all__ = ["LayerOptions", "joined"]


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


def joined(options: LayerOptions, key: str) -> LayerOptions:
    """The options with ``key`` added to the name."""
    name = options.get("name", "")
    return LayerOptions(**{**options, "name": f"{name}.{key}" if name else key})
