"""Causal self-attention with the heads cut over a process group.

q, k and v share one gather of the sequence (``column_parallel``); every rank runs torch's scaled-dot-product
attention on its heads over the whole sequence; the output projection is row-parallel. Grouped queries: a rank
needs the k and v of its own q heads, so the kv heads are cut too, and their number must divide by the world.
Replicating kv heads on several ranks, for a world larger than their number, is not offered: the message says
so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpkernels.errors import ArgumentError
from tpkernels.nn._checks import agreed
from tpkernels.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from tpkernels.nn.rotary import apply_rotary, rotary_tables
from tpkernels.nn.sharding import GroupLike
from tpkernels.ops._groups import group_name_of, resolve

__all__ = ["ParallelAttention"]


def _check_heads(hidden: int, heads: int, kv_heads: int, head_dim: int, rotary: bool, world: int) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ArgumentError(
            f"kv_heads: the {heads} heads must be a multiple of it, so that every kv head serves equally many, "
            f"but it is {kv_heads}."
        )
    for argument, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % world:
            fits = [n for n in range(1, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0]
            raise ArgumentError(
                f"{argument}: they are shared out evenly over the group, but {count} {argument} cannot be shared by "
                f"{world} ranks; with {heads} heads and {kv_heads} kv_heads the group may have "
                f"{', '.join(map(str, fits))} ranks."
            )
    if head_dim < 1 or (rotary and head_dim % 2):
        raise ArgumentError(
            f"head_dim: it must be positive, and even for rotary positions, but it is {head_dim} "
            f"(hidden {hidden} / {heads} heads unless given)."
        )


class ParallelAttention(nn.Module):
    """Self-attention: q_proj, k_proj, v_proj column-parallel, o_proj row-parallel.

    Args:
        hidden: features of x.
        heads, kv_heads: of the whole layer; kv_heads None: as many as heads. Both must divide by the world.
        head_dim: elements of a head; None: hidden / heads.
        causal: every position sees itself and those before it.
        rotary_base: base of the rotary positions; None: no positions.
        bias: of q_proj, k_proj, v_proj; ``out_bias`` of o_proj.
        The others: as in ``ColumnParallelLinear``. sequence_dim also says how x lies when sequence_parallel
            is off.
    Shape:
        x: [S, B, hidden] (sequence_dim 0) or [B, S, hidden] (sequence_dim 1) -> the same; under
            sequence_parallel this rank's part of the sequence, in and out.
    Raises:
        ArgumentError: head counts that do not divide, naming them; x of another shape.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        group: GroupLike = None,
        head_dim: int | None = None,
        causal: bool = True,
        rotary_base: float | None = 10000.0,
        bias: bool = False,
        out_bias: bool = False,
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
        if sequence_dim not in (0, 1):
            raise ArgumentError(
                f"sequence_dim: attention takes 0 for [S, B, H] or 1 for [B, S, H], but it is {sequence_dim}."
            )
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1:
            raise ArgumentError(f"heads: attention needs at least 1, but it is {heads}.")
        if head_dim is None and hidden % heads:
            raise ArgumentError(
                f"heads: {hidden} hidden features are not a multiple of {heads} heads; give head_dim."
            )
        self.head_dim = hidden // heads if head_dim is None else head_dim
        world = resolve(group_name_of(group)).world
        _check_heads(hidden, heads, kv_heads, self.head_dim, rotary_base is not None, world)
        self.heads = heads
        self.kv_heads = kv_heads
        self.local_heads = heads // world
        self.local_kv_heads = kv_heads // world
        self.causal = causal
        self.rotary_base = rotary_base
        self.sequence_dim = sequence_dim
        before = f"{name}." if name else ""

        def column(key: str, count: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden,
                count * self.head_dim,
                group=group,
                bias=bias,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                seed=seed,
                init_std=init_std,
                name=before + key,
                dtype=dtype,
                device=device,
                path=path,
                gradient_accumulation_fusion=gradient_accumulation_fusion,
            )

        self.q_proj = column("q_proj", heads)
        self.k_proj = column("k_proj", kv_heads)
        self.v_proj = column("v_proj", kv_heads)
        self.o_proj = RowParallelLinear(
            heads * self.head_dim,
            hidden,
            group=group,
            bias=out_bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            seed=seed,
            init_std=init_std,
            name=before + "o_proj",
            dtype=dtype,
            device=device,
            path=path,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
        )

    def _split_heads(self, y: Tensor, count: int) -> Tensor:
        """[S, B, count * D] or [B, S, count * D] -> [B, count, S, D], a view."""
        y = y.unflatten(-1, (count, self.head_dim))
        return y.permute(1, 2, 0, 3) if self.sequence_dim == 0 else y.transpose(1, 2)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 3:
            raise ArgumentError(
                f"x: attention takes three dimensions, {'[S, B, H]' if self.sequence_dim == 0 else '[B, S, H]'}, "
                f"but its shape is {list(x.shape)}."
            )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention output (+ residual, of its shape).

        ``shard_sizes``: sequence rows of every rank where they are not equal. ``rotary``: tables of
        ``rotary_tables`` for the whole sequence, so that layers may share them; None: made here.
        """
        agreed(type(self).__name__, self.q_proj.group_name, x, lambda: self._check_input(x))
        q, k, v = column_parallel((self.q_proj, self.k_proj, self.v_proj), x, shard_sizes)
        q = self._split_heads(q, self.local_heads)
        k = self._split_heads(k, self.local_kv_heads)
        v = self._split_heads(v, self.local_kv_heads)
        if self.rotary_base is not None:
            if rotary is None:
                rotary = rotary_tables(q.shape[2], self.head_dim, base=self.rotary_base, device=x.device)
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.local_heads != self.local_kv_heads
        )
        y = y.permute(2, 0, 1, 3) if self.sequence_dim == 0 else y.transpose(1, 2)
        out: Tensor = self.o_proj(y.flatten(2), residual=residual, shard_sizes=shard_sizes)
        return out

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, local heads={self.local_heads}, "
            f"local kv_heads={self.local_kv_heads}, head_dim={self.head_dim}, causal={self.causal}, "
            f"rotary_base={self.rotary_base}, sequence_dim={self.sequence_dim}"
        )
