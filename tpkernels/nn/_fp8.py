"""FP8 in linear layers: what goes with it, and the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpkernels import fp8
from tpkernels.errors import ArgumentError, DTypeError
from tpkernels.fp8.recipe import Fp8Recipe, RecipeLike, recipe_of
from tpkernels.ops import _activation

if TYPE_CHECKING:
    from tpkernels.nn._linear import ParallelLinear
    from tpkernels.nn.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["check_call", "checked_recipe", "columns", "row"]


def checked_recipe(
    recipe: RecipeLike | None, dtype: torch.dtype | None, delay_wgrad: bool
) -> Fp8Recipe | None:
    """The layer's recipe, or an error where it does not go with the other options."""
    if recipe is None:
        return None
    chosen = recipe_of(recipe)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DTypeError(
            f"recipe: a layer in FP8 has bfloat16, float16 or float32 parameters, but dtype is "
            f"{str(dtype).removeprefix('torch.')}; leave recipe out, or take another dtype."
        )
    if delay_wgrad:
        raise ArgumentError(_no_delay("True"))
    return chosen


def _no_delay(value: str) -> str:
    return (
        f"recipe: weight gradients in FP8 cannot be delayed, but delay_wgrad is {value}; make the layer without one of "
        "the two."
    )


def check_call(layer: ParallelLinear) -> None:
    """What may have changed since the layer was made."""
    if layer.recipe is None:
        return
    if layer.delay_wgrad:
        raise ArgumentError(_no_delay("set"))
    if layer.lora is not None and not layer.lora.merged:
        raise ArgumentError(refused(layer.name or type(layer).__name__))


def refused(name: str) -> str:
    """Why a layer gets no low-rank factors."""
    return (
        f"recipe: {name} multiplies in FP8 and takes no LoRA factors, whose products are in high precision; make the "
        "layer without recipe, or leave it out of the targets."
    )


def columns(
    layers: Sequence[ColumnParallelLinear], x: Tensor, shard_sizes: Sequence[int] | None
) -> list[Any]:
    """Outputs of column-parallel layers that are made alike, in front of what follows the activation."""
    first = layers[0]
    common: dict[str, Any] = {
        "recipe": first.recipe,
        "biases": [None if layer.skip_bias_add else layer._operand(layer.bias) for layer in layers],
        "main_grad_of": [layer._sink() for layer in layers],
        "path": first.path,
    }
    weights = [layer._operand(layer.weight).t() for layer in layers]
    if first.sequence_parallel:
        made = fp8.all_gather_matmul(
            x,
            weights,
            first.group_name,
            gather_dim=first.sequence_dim,
            shard_sizes=None if shard_sizes is None else list(shard_sizes),
            keep_gathered=first.keep_gathered,
            **common,
        )
    else:
        made = fp8.matmul_replicated(x, weights, first.group_name, **common)
    return [_activation.forward(y, first.activation or "none") for y in made]


def row(
    layer: RowParallelLinear,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    shard_sizes: Sequence[int] | None,
) -> Tensor:
    """Output of a row-parallel layer."""
    common: dict[str, Any] = {
        "recipe": layer.recipe,
        "bias": bias,
        "residual": residual,
        "out_dtype": out_dtype,
        "main_grad_of": layer._sink(),
        "path": layer.path,
    }
    weight = layer.weight.t()
    if not layer.sequence_parallel:
        return fp8.matmul_all_reduce(x, weight, layer.group_name, **common)
    sizes = None if shard_sizes is None else list(shard_sizes)
    return fp8.matmul_reduce_scatter(
        x, weight, layer.group_name, scatter_dim=layer.sequence_dim, shard_sizes=sizes, **common
    )
