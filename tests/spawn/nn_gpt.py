"""A small model in the style of GPT: plain torch, and from our layers under the same names. Both drop alike."""

from __future__ import annotations

import math

import torch
from nn_dense import VOCAB, WIDTH, DenseMLP
from torch import Tensor, nn
from torch.nn import functional as F

from tpkernels import nn as tnn

HEADS, FFN, LENGTH, SEED = 12, 37, 16, 4


def drop(x: Tensor, p: float, name: str, step: int) -> Tensor:
    """What the package's dropout is to do, from its mask for the whole tensor alone."""
    if p == 0:
        return x
    return x * tnn.keep_mask(x.shape, p, seed=SEED, name=name, step=step, device=x.device) / (1 - p)


class DenseGPTAttention(nn.Module):
    """x [B, S, H]; without positions."""

    def __init__(self, heads: int, kv_heads: int, p: float, name: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.p, self.name = heads, kv_heads, WIDTH // heads, p, name
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, kv_heads * self.size)
        self.v_proj = nn.Linear(WIDTH, kv_heads * self.size)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            p(x).view(b, s, -1, self.size).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        weights = drop(weights, self.p if self.training else 0.0, f"{self.name}.probabilities", step)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, s, -1))


class DenseGPTBlock(nn.Module):
    def __init__(self, heads: int, kv_heads: int, p: float, attention_p: float, name: str) -> None:
        super().__init__()
        self.p, self.name = p, name
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = DenseGPTAttention(heads, kv_heads, attention_p, f"{name}.attention")
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = DenseMLP("gelu", True)

    def forward(self, x: Tensor, step: int) -> Tensor:
        p = self.p if self.training else 0.0
        x = x + drop(self.attention(self.attention_norm(x), step), p, f"{self.name}.attention_dropout", step)
        return x + drop(self.mlp(self.mlp_norm(x)), p, f"{self.name}.mlp_dropout", step)


class DenseGPT(nn.Module):
    """Ids [B, S] to logits [B, S, VOCAB]; the embedding is the output projection too."""

    def __init__(
        self, kv_heads: int = HEADS, p: float = 0.0, attention_p: float = 0.0, layers: int = 2
    ) -> None:
        super().__init__()
        self.p = p
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            DenseGPTBlock(HEADS, kv_heads, p, attention_p, f"blocks.{i}") for i in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, ids: Tensor, step: int = 0) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = drop(x, self.p if self.training else 0.0, "embed", step)
        for block in self.blocks:
            x = block(x, step)
        return F.linear(self.norm(x), self.embed.weight)


class ParallelGPT(nn.Module):
    """The same from our layers; logits [B, S, local] or [S, B, local] as sequence_dim says."""

    def __init__(
        self,
        group: str,
        kv_heads: int = HEADS,
        p: float = 0.0,
        attention_p: float = 0.0,
        layers: int = 2,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        recompute: str = "none",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        layout = {"group": group, "sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        self.embed = tnn.VocabParallelEmbedding(VOCAB, WIDTH, dtype=dtype, **layout)
        self.positions = tnn.PositionEmbedding(LENGTH, WIDTH, dtype=dtype, **layout)
        self.embed_dropout = tnn.Dropout(p, name="embed", seed=SEED, **layout)
        self.blocks = nn.ModuleList(
            tnn.ParallelTransformerBlock(
                WIDTH,
                FFN,
                HEADS,
                kv_heads,
                norm="layer",
                activation="gelu",
                bias=True,
                rotary_base=None,
                dropout=p,
                attention_dropout=attention_p,
                recompute=recompute,
                name=f"blocks.{i}",
                seed=SEED,
                dtype=dtype,
                **layout,
            )
            for i in range(layers)
        )
        self.norm = tnn.LayerNorm(WIDTH, group=group, sequence_parallel=sequence_parallel, dtype=dtype)

    def forward(self, ids: Tensor, sizes: list[int] | None = None, step: int = 0) -> Tensor:
        ids = ids.t() if self.sequence_dim == 0 else ids
        x = self.embed(ids, sizes) + self.positions(ids, sizes)
        x = self.embed_dropout(x, step, sizes)
        for block in self.blocks:
            x = block(x, sizes, step=step)
        return self.embed.logits(self.norm(x), sizes)
