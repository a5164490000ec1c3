"""Plain modules of torch, unsharded: for ``parallelize_module``, and for the twin that judges training.

The way torch's own examples write them: separate projections, residuals added outside. Activations [S, B,
hidden]. The number of heads is read off the projections' outputs, so that the modules also run on a rank's part
of the heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpkernels.nn import apply_rotary, rotary_tables

from ..models import Model
from .shapes import Layer, Size

__all__ = [
    "EPS",
    "MLP",
    "Attention",
    "Block",
    "LanguageModel",
    "Rotary",
    "attend",
    "build",
    "norm_of",
    "rotary_of",
]

EPS = 1e-5
Rotary = tuple[Tensor, Tensor]


def rotary_of(model: Model, seq: int, device: torch.device) -> Rotary:
    """Cosine and sine of a whole sequence."""
    return rotary_tables(seq, model.head_dim, device=device)


def norm_of(model: Model, **place: Any) -> nn.Module:
    """LayerNorm or RMSNorm; ``place``: dtype and device."""
    return (nn.LayerNorm if model.biases else nn.RMSNorm)(model.hidden, eps=EPS, **place)


def attend(q: Tensor, k: Tensor, v: Tensor, head_dim: int, rotary: Rotary) -> Tensor:
    """Causal attention of projections [S, B, heads x head_dim] -> the shape of q; k, v may have fewer heads."""
    q, k, v = (t.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3) for t in (q, k, v))
    q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    """q_proj, k_proj, v_proj, o_proj; rotary positions, grouped queries."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj = nn.Linear(model.hidden, width, bias=model.biases)
        self.k_proj = nn.Linear(model.hidden, kv_width, bias=model.biases)
        self.v_proj = nn.Linear(model.hidden, kv_width, bias=model.biases)
        self.o_proj = nn.Linear(width, model.hidden, bias=model.biases)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.head_dim, (cos, sin))
        out: Tensor = self.o_proj(y)
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu_tanh(up(x))) where the model is not gated."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden, model.ffn, bias=model.biases) if model.gated else None
        self.up_proj = nn.Linear(model.hidden, model.ffn, bias=model.biases)
        self.down_proj = nn.Linear(model.ffn, model.hidden, bias=model.biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            inner = F.gelu(self.up_proj(x), approximate="tanh")
        else:
            inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(inner)
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm = norm_of(model)
        self.attention = Attention(model)
        self.mlp_norm = norm_of(model)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def build(layer: Layer) -> nn.Module:
    """The module of a layer; "mlp" takes x, the others x and the rotary tables."""
    return {"mlp": MLP, "attention": Attention, "block": Block}[layer.part](layer.model)


class LanguageModel(nn.Module):
    """Token ids [B, S] to logits [S, B, vocab]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = size.model
        self.embed = nn.Embedding(size.vocab, size.model.hidden)
        self.layers = nn.ModuleList(Block(size.model) for _ in range(size.model.layers))
        self.norm = norm_of(size.model)
        self.head = nn.Linear(size.model.hidden, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary_of(self.model, tokens.shape[1], tokens.device)
        x = self.embed(tokens.t())
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits
