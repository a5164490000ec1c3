"""The layers of ``tpkernels.nn``, and the demo's model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tpkernels.nn import ParallelAttention, ParallelMLP, ParallelTransformerBlock

from ..context import Context
from ..models import Model
from .dense import EPS, rotary_of
from .implementation import Implementation, parts_of
from .shapes import Layer, Size

__all__ = ["language_model", "layer"]


def layer(
    shape: Layer, context: Context, dtype: torch.dtype, *, path: str, keep_gathered: bool = False
) -> Implementation:
    """A layer of the layer suite; ``path`` as in ``tpkernels.matmul``."""
    model = shape.model
    common: dict[str, Any] = {
        "group": context.group,
        "sequence_parallel": True,
        "dtype": dtype,
        "device": context.device,
        "path": path,
        "keep_gathered": keep_gathered,
    }
    activation = "swiglu" if model.gated else "gelu_tanh"
    module: nn.Module
    if shape.part == "mlp":
        module = ParallelMLP(model.hidden, model.ffn, activation=activation, bias=model.biases, **common)
    elif shape.part == "attention":
        module = _attention(model, common)
    else:
        module = ParallelTransformerBlock(
            model.hidden,
            model.ffn,
            model.heads,
            model.kv_heads,
            activation=activation,
            norm="layer" if model.biases else "rms",
            bias=model.biases,
            eps=EPS,
            **common,
        )
        if model.heads * model.head_dim != model.hidden:  # the block takes hidden / heads
            module.attention = _attention(model, common)
    arguments = {"rotary": rotary_of(model, shape.tokens.seq, context.device)} if shape.has_attention else {}
    parts = parts_of(module, shape.weights, context.rank, context.world)
    return Implementation(module, lambda x: module(x, **arguments), parts)


def _attention(model: Model, common: dict[str, Any]) -> ParallelAttention:
    return ParallelAttention(
        model.hidden,
        model.heads,
        model.kv_heads,
        head_dim=model.head_dim,
        bias=model.biases,
        out_bias=model.biases,
        **common,
    )


def language_model(size: Size, context: Context, dtype: torch.dtype, *, path: str) -> Implementation:
    """The demo's model, over the default group, which the engine makes of all ranks."""
    from tpkernels.demo.dense import ModelConfig
    from tpkernels.demo.model import ParallelModel

    model = size.model
    config = ModelConfig(
        model.hidden,
        model.layers,
        model.heads,
        model.kv_heads,
        model.ffn,
        size.vocab,
        norm_eps=EPS,
        dtype=str(dtype).removeprefix("torch."),
        max_seq=size.tokens.seq,
    )
    module = ParallelModel(config, sequence_parallel=True, path=path, device=context.device)
    return Implementation(module, module.loss, parts_of(module, size.weights, context.rank, context.world))
