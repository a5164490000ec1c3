"""Collectives over any torch.distributed backend, with shards of unequal size.

Sums are made by their owner in rank order and in float32 (float64 for float64 tensors): the same bits on
every run, with every backend, and on every rank. That is why reduce-scatter here is an all-to-all followed
by a local sum, which moves exactly as many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.ops import _nvtx
from tpkernels.ops._groups import Group, shard_sizes, transport_of

# Below this many bytes an all-reduce gathers every partial and sums locally: one collective, not two.
ONE_SHOT_BYTES = 128 * 1024

# torch 2.14 renamed it; both names are the same collective.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums are formed: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def all_gather(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``; rank r has ``sizes[r]`` rows. Returns a new tensor."""
    if group.world == 1:
        return x.clone(memory_format=torch.contiguous_format)
    longest = max(sizes)
    if longest == 0:
        return x.new_empty(_with_dim(x.shape, dim, 0))
    with _phase("gather", x, group):
        rows = x.movedim(dim, 0).contiguous()
        if rows.shape[0] < longest:  # collectives want equal pieces
            rows = torch.cat([rows, rows.new_zeros(longest - rows.shape[0], *rows.shape[1:])])
        gathered = rows.new_empty(group.world * longest, *rows.shape[1:])
        _all_gather_single(gathered, rows, group=group.process_group)
        if any(size != longest for size in sizes):
            pieces = [gathered[r * longest : r * longest + size] for r, size in enumerate(sizes)]
            gathered = torch.cat(pieces)
        return gathered.movedim(0, dim).contiguous()


def reduce_scatter(
    partial: Tensor,
    dim: int,
    sizes: Sequence[int],
    group: Group,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Sum every rank's ``partial`` and keep ``sizes[rank]`` rows of ``dim``; then add bias and residual once.

    Partials travel in ``out_dtype``, are added in rank order in float32 (float64), and are rounded once.
    """
    if group.world == 1:  # nothing to send, hence nothing to round before the sum
        return _finish(partial.to(accumulate_dtype(out_dtype), copy=True), bias, residual, out_dtype)
    with _phase("reduce_scatter", partial, group):
        rows = partial.movedim(dim, 0).to(out_dtype).contiguous()
        mine = sizes[group.rank]
        received = rows.new_empty(group.world * mine, *rows.shape[1:])
        dist.all_to_all_single(
            received,
            rows,
            output_split_sizes=[mine] * group.world,
            input_split_sizes=list(sizes),
            group=group.process_group,
        )
        pieces = received.view(group.world, mine, *rows.shape[1:])
        with _nvtx.phase("sum"):
            return _finish(_sum_in_rank_order(pieces).movedim(0, dim), bias, residual, out_dtype)


def all_reduce_sum(
    partial: Tensor,
    group: Group,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Sum over ranks, then bias and residual once; bitwise equal on every rank and on every run."""
    if group.world == 1:
        return _finish(partial.to(accumulate_dtype(out_dtype)), bias, residual, out_dtype)
    with _phase("all_reduce", partial, group):
        sent = partial.to(out_dtype).contiguous()
        if sent.numel() * sent.element_size() <= ONE_SHOT_BYTES:
            pieces = sent.new_empty(group.world, *sent.shape)
            if sent.numel() > 0:
                _all_gather_single(pieces.view(-1), sent.view(-1), group=group.process_group)
            with _nvtx.phase("sum"):
                return _finish(_sum_in_rank_order(pieces), bias, residual, out_dtype)
        # Two steps: every rank finishes a block of rows, then the blocks are gathered.
        rows = sent.view(-1, sent.shape[-1] if sent.dim() > 1 else 1)
        sizes = shard_sizes(rows.shape[0], group.world)
        if residual is not None:
            residual = own_slice(residual.reshape(rows.shape), 0, sizes, group)
        mine = reduce_scatter(rows, 0, sizes, group, out_dtype, bias=bias, residual=residual)
        return all_gather(mine, 0, sizes, group).view(sent.shape)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Elementwise maximum over ranks (exact in any order). Returns a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    if group.world > 1 and out.numel() > 0:
        with _phase("all_reduce", x, group):
            dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group.process_group)
    return out


def own_slice(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """This rank's rows of ``dim``. Returns a new tensor."""
    begin = sum(sizes[: group.rank])
    return x.narrow(dim, begin, sizes[group.rank]).clone(memory_format=torch.contiguous_format)


def _phase(name: str, x: Tensor, group: Group) -> AbstractContextManager[None]:
    """Profiler range that tells what carries ``x``; the look-up is made only where ranges are on."""
    return _nvtx.phase(name, transport_of(group, x.device, "tensor") if _nvtx.active() else "")


def _sum_in_rank_order(pieces: Tensor) -> Tensor:
    total = pieces[0].to(accumulate_dtype(pieces.dtype), copy=True)
    for rank in range(1, pieces.shape[0]):
        total += pieces[rank]
    return total


def _finish(total: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    if bias is not None:
        total = total + bias
    if residual is not None:
        total = total + residual
    return total.to(dtype).contiguous()


def _with_dim(shape: torch.Size, dim: int, size: int) -> list[int]:
    out = list(shape)
    out[dim] = size
    return out
