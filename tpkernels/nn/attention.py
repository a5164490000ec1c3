"""Causal self-attention with the heads cut over a process group.

q, k and v share one gather of the sequence (``column_parallel``); every rank computes attention for its heads over
the whole sequence; the output projection is row-parallel. Grouped queries: a rank needs the k and v of its own q
heads, so the kv heads are cut too, into as many parts as divide both them and the ranks. Where those are fewer parts
than ranks, several ranks in a row hold one (``shared_columns``): they have the kv heads of all their q heads, and the
gradients of these weights are summed over them.

    4 kv heads on 2 ranks: 2 parts of 2        2 on 4: 2 parts of 1, on 2 ranks each
    2 on 3: 1 part of 2, on all                4 on 6: 2 parts of 2, on 3 ranks each

The core is torch's scaled-dot-product attention. With dropout of the probabilities it is written out, since torch's
draws from its own generator, and the mask would depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from tpkernels.errors import ArgumentError
from tpkernels.nn import _options
from tpkernels.nn._checks import agreed
from tpkernels.nn._options import ModelOptions
from tpkernels.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from tpkernels.nn.masks import Step, apply_mask, check_name, check_probability, check_step, keep_mask
from tpkernels.nn.recompute import recomputed
from tpkernels.nn.rotary import apply_rotary, rotary_tables
from tpkernels.nn.shared_columns import SharedColumnParallelLinear
from tpkernels.ops._groups import group_name_of, resolve

__all__ = ["ParallelAttention"]


def _check_heads(hidden: int, heads: int, kv_heads: int, head_dim: int, rotary: bool, world: int) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ArgumentError(
            f"kv_heads: the {heads} heads must be a multiple of it, so that every kv head serves equally many, "
            f"but it is {kv_heads}."
        )
    if heads % world:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ArgumentError(
            f"heads: they are shared out evenly over the group, but {heads} heads cannot be shared by {world} ranks; "
            f"the group may have {', '.join(map(str, fits))} ranks."
        )
    if head_dim < 1 or (rotary and head_dim % 2):
        raise ArgumentError(
            f"head_dim: it must be positive, and even for rotary positions, but it is {head_dim} "
            f"(hidden {hidden} / {heads} heads unless given)."
        )


def queries_of(heads: int, kv_heads: int, rank: int, world: int) -> tuple[int, ...]:
    """How many of a rank's q heads use each of the kv heads that it holds.

    >>> [queries_of(12, 2, rank, 3) for rank in range(3)]
    [(4, 0), (2, 2), (0, 4)]
    """
    parts = math.gcd(kv_heads, world)
    held, own = kv_heads // parts, heads // world
    first = rank // (world // parts) * held
    used = [q * kv_heads // heads - first for q in range(rank * own, (rank + 1) * own)]
    return tuple(used.count(head) for head in range(held))


def for_queries(x: Tensor, queries: Sequence[int]) -> Tensor:
    """[B, kv heads held, S, D] -> those that a rank's q heads use, in equal groups. Mostly a view.

    ``queries``: of ``queries_of``. Copies are made by expand and cat, whose gradients are sums in a fixed order.
    """
    used = [head for head, count in enumerate(queries) if count]
    counts = [queries[head] for head in used]
    x = x.narrow(1, used[0], len(used))
    if min(counts) == max(counts):
        return x
    each = [head.expand(-1, count, -1, -1) for head, count in zip(x.split(1, 1), counts, strict=True)]
    return torch.cat(each, 1)


def _written_out(q: Tensor, k: Tensor, v: Tensor, causal: bool, keep: Tensor, p: float) -> Tensor:
    """softmax(q k^T / sqrt(D)) with dropout, times v: [B, heads, S, D], k and v [B, kv heads, S, D] -> as q."""
    batch, heads, length, size = q.shape
    grouped = (batch, k.shape[1], -1, size)
    scores = (q * size**-0.5).reshape(grouped) @ k.mT
    scores = scores.view(batch, heads, length, k.shape[2])
    if causal:  # added, not filled in: an addition keeps nothing for the backward pass
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = apply_mask(scores.softmax(-1), keep, p)
    return (weights.view(batch, k.shape[1], -1, k.shape[2]) @ v).view(batch, heads, length, v.shape[-1])


class ParallelAttention(nn.Module):
    """Self-attention: q_proj, k_proj, v_proj column-parallel, o_proj row-parallel.

    Args:
        hidden: features of x.
        heads, kv_heads: of the whole layer; kv_heads None: as many as heads. heads must divide by the world.
        head_dim: elements of a head; None: hidden / heads.
        causal: every position sees itself and those before it.
        rotary_base: base of the rotary positions; None: no positions.
        bias: of q_proj, k_proj, v_proj; ``out_bias`` of o_proj.
        dropout: part of the attention probabilities that is dropped in training, see ``tpkernels.nn.masks``;
            forward then needs ``step``, and the layer a ``name``.
        recompute_core: compute the core again in the backward pass, see ``tpkernels.nn.recompute``.
        options: as in ``ColumnParallelLinear``. sequence_dim also says how x lies when sequence_parallel is off.
    Shape:
        x: [S, B, hidden] (sequence_dim 0) or [B, S, hidden] (sequence_dim 1) -> the same; under
            sequence_parallel this rank's part of the sequence, in and out.
    Raises:
        ArgumentError: head counts that do not divide, naming them; x of another shape; dropout without name or step.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        causal: bool = True,
        rotary_base: float | None = 10000.0,
        bias: bool = False,
        out_bias: bool = False,
        dropout: float = 0.0,
        recompute_core: bool = False,
        **options: Unpack[ModelOptions],
    ) -> None:
        super().__init__()
        sequence_dim = options.get("sequence_dim", 0)
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
        check_probability(dropout, "dropout")
        self.name = options.get("name", "")
        check_name(dropout, self.name)
        self.head_dim = hidden // heads if head_dim is None else head_dim
        group = resolve(group_name_of(options.get("group")))
        _check_heads(hidden, heads, kv_heads, self.head_dim, rotary_base is not None, group.world)
        self.heads = heads
        self.kv_heads = kv_heads
        self.local_heads = heads // group.world
        parts = math.gcd(kv_heads, group.world)
        self.local_kv_heads = kv_heads // parts
        self.queries = queries_of(heads, kv_heads, group.rank, group.world)
        self.first_head = group.rank * self.local_heads
        self.causal = causal
        self.rotary_base = rotary_base
        self.dropout = dropout
        self.recompute_core = recompute_core
        self.sequence_dim = sequence_dim
        self.seed = options.get("seed", 0)

        def key_value(key: str) -> ColumnParallelLinear:
            features, own = kv_heads * self.head_dim, _options.column(options, key)
            if parts != group.world:
                return SharedColumnParallelLinear(hidden, features, parts, bias=bias, **own)
            return ColumnParallelLinear(hidden, features, bias=bias, **own)

        self.q_proj = ColumnParallelLinear(
            hidden, heads * self.head_dim, bias=bias, **_options.column(options, "q_proj")
        )
        self.k_proj = key_value("k_proj")
        self.v_proj = key_value("v_proj")
        self.o_proj = RowParallelLinear(
            heads * self.head_dim, hidden, bias=out_bias, **_options.row(options, "o_proj")
        )

    def _split_heads(self, y: Tensor, count: int) -> Tensor:
        """[S, B, count * D] or [B, S, count * D] -> [B, count, S, D], a view."""
        y = y.unflatten(-1, (count, self.head_dim))
        return y.permute(1, 2, 0, 3) if self.sequence_dim == 0 else y.transpose(1, 2)

    def _check_input(self, x: Tensor, step: Step | None) -> None:
        if x.dim() != 3:
            raise ArgumentError(
                f"x: attention takes three dimensions, {'[S, B, H]' if self.sequence_dim == 0 else '[B, S, H]'}, "
                f"but its shape is {list(x.shape)}."
            )
        if self._drops:
            check_step(step)

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _core(self, q: Tensor, k: Tensor, v: Tensor, step: Step | None) -> Tensor:
        """[B, heads, S, D], k and v [B, kv heads, S, D], all local -> as q."""
        if not self._drops:
            gqa = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=gqa)
        keep = keep_mask(
            (*q.shape[:3], k.shape[2]),
            self.dropout,
            seed=self.seed,
            name=f"{self.name}.probabilities",
            step=check_step(step),
            starts=(0, self.first_head, 0, 0),
            device=q.device,
        )
        return _written_out(q, k, v, self.causal, keep, self.dropout)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        step: Step | None = None,
    ) -> Tensor:
        """Attention output (+ residual, of its shape).

        ``shard_sizes``: sequence rows of every rank where they are not equal. ``rotary``: tables of
        ``rotary_tables`` for the whole sequence, so that layers may share them; None: made here. ``step``: see
        ``tpkernels.nn.masks``.
        """
        agreed(
            type(self).__name__,
            self.q_proj.group_name,
            x,
            lambda: self._check_input(x, step),
            lambda: {"step": int(check_step(step))} if self._drops else {},
        )
        q, k, v = column_parallel((self.q_proj, self.k_proj, self.v_proj), x, shard_sizes)
        q = self._split_heads(q, self.local_heads)
        k = self._split_heads(k, self.local_kv_heads)
        v = self._split_heads(v, self.local_kv_heads)
        if self.rotary_base is not None:
            if rotary is None:
                rotary = rotary_tables(q.shape[2], self.head_dim, base=self.rotary_base, device=x.device)
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        k, v = for_queries(k, self.queries), for_queries(v, self.queries)
        if self.recompute_core:
            y = recomputed(self._core, q, k, v, step, keep_random_state=False)
        else:
            y = self._core(q, k, v, step)
        y = y.permute(2, 0, 1, 3) if self.sequence_dim == 0 else y.transpose(1, 2)
        out: Tensor = self.o_proj(y.flatten(2), residual=residual, shard_sizes=shard_sizes)
        return out

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, local heads={self.local_heads}, "
            f"local kv_heads={self.local_kv_heads}, head_dim={self.head_dim}, causal={self.causal}, "
            f"rotary_base={self.rotary_base}, dropout={self.dropout}, sequence_dim={self.sequence_dim}"
        )
