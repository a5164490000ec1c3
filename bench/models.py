"""Sizes of the models whose projections are measured, from their published configurations."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """Transformer sizes. ``gated``: SwiGLU with gate and up weights, else one weight into the MLP. ``biases``: of every
    linear layer, and LayerNorm in place of RMSNorm."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    gated: bool = True
    biases: bool = False

    @property
    def qkv(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def up(self) -> int:
        """Columns of the projection into the MLP (gate and up together)."""
        return self.ffn * (2 if self.gated else 1)


MODELS = {
    "llama8b": Model(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, layers=32),
    "llama70b": Model(hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, layers=80),
    "llama405b": Model(hidden=16384, ffn=53248, heads=128, kv_heads=8, head_dim=128, layers=126),
    "gpt3": Model(hidden=12288, ffn=49152, heads=96, kv_heads=96, head_dim=128, layers=96, gated=False),
    "qwen32b": Model(hidden=5120, ffn=25600, heads=64, kv_heads=8, head_dim=128, layers=64),
}
