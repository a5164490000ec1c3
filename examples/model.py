"""A small Llama for bytes in plain PyTorch. It knows nothing of tensor parallelism: see plan.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    width: int = 128
    intermediate: int = 384
    heads: int = 8
    layers: int = 2
    vocabulary: int = 256


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.width // c.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(c.width, c.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # -1: under tensor parallelism a rank has some of the heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.width, c.intermediate, bias=False)
        self.w3 = nn.Linear(c.width, c.intermediate, bias=False)
        self.w2 = nn.Linear(c.intermediate, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(c.width), nn.RMSNorm(c.width)
        self.attention, self.feed_forward = Attention(c), FeedForward(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Bytes [batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocabulary, c.width)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width)
        self.output = nn.Linear(c.width, c.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.output(self.norm(x))
        return out


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) of [batch, heads, sequence, head_dim]."""
    length, size = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)
