"""A transformer block in the style of Llama, tensor parallel.

    h = x + attention(attention_norm(x));  y = h + mlp(mlp_norm(h))

Both sums are the ``residual`` of a row-parallel product: added once, in float32, before the one rounding of
its output. Under sequence parallelism x, h and y are this rank's part of the sequence; the block then has two
gathers and two reduce-scatters forward, and the weights of the norms get their complete gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tpkernels.nn.attention import ParallelAttention
from tpkernels.nn.mlp import ParallelMLP
from tpkernels.nn.norm import RMSNorm
from tpkernels.nn.sharding import GroupLike

__all__ = ["ParallelTransformerBlock"]


class ParallelTransformerBlock(nn.Module):
    """attention_norm, attention, mlp_norm, mlp (SwiGLU unless told otherwise).

    Args and shapes: those of ``ParallelAttention`` and ``ParallelMLP``; ``eps`` of the norms.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        group: GroupLike = None,
        activation: str = "swiglu",
        bias: bool = False,
        eps: float = 1e-5,
        rotary_base: float | None = 10000.0,
        causal: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        seed: int = 0,
        init_std: float | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        path: str = "auto",
        gradient_accumulation_fusion: bool | None = None,
    ) -> None:
        super().__init__()
        before = f"{name}." if name else ""
        self.attention_norm = RMSNorm(
            hidden, group=group, eps=eps, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )
        self.attention = ParallelAttention(
            hidden,
            heads,
            kv_heads,
            group=group,
            causal=causal,
            rotary_base=rotary_base,
            bias=bias,
            out_bias=bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            seed=seed,
            init_std=init_std,
            name=before + "attention",
            dtype=dtype,
            device=device,
            path=path,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
        )
        self.mlp_norm = RMSNorm(
            hidden, group=group, eps=eps, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )
        self.mlp = ParallelMLP(
            hidden,
            intermediate,
            group=group,
            activation=activation,
            bias=bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            seed=seed,
            init_std=init_std,
            name=before + "mlp",
            dtype=dtype,
            device=device,
            path=path,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
        )

    def forward(
        self,
        x: Tensor,
        shard_sizes: Sequence[int] | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[S, B, hidden] or [B, S, hidden] -> the same; arguments as in ``ParallelAttention.forward``."""
        h = self.attention(self.attention_norm(x), residual=x, shard_sizes=shard_sizes, rotary=rotary)
        y: Tensor = self.mlp(self.mlp_norm(h), residual=h, shard_sizes=shard_sizes)
        return y
