"""Collectives over any torch.distributed backend, with shards of unequal size.

Sums are made by their owner in rank order and in float32 (float64 for float64 tensors): the same bits on
every run, with every backend, and on every rank. That is why reduce-scatter here is an all-to-all followed
by a local sum, which moves exactly as many bytes. On CUDA the sum is one kernel, sum_ranks of ``_C_sm80``; the
formula in torch, here, has its bits, and serves elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels import _extensions
from tpkernels.ops import _nvtx
from tpkernels.ops._groups import Group, transport_of

# Below this many bytes an all-reduce gathers every partial and sums locally: one collective, not two.
ONE_SHOT_BYTES = 128 * 1024
# Blocks of an all-reduce are multiples of as many elements: of 16 bytes, whatever the dtype.
BLOCK_UNIT = 8
# What the kernel of sums takes.
DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

# torch 2.14 renamed it; both names are the same collective.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums are formed: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def all_gather(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``; rank r has ``sizes[r]`` rows. Returns a new tensor."""
    if group.world == 1:
        return x.clone(memory_format=torch.contiguous_format)
    if dim == 0 and min(sizes) == max(sizes) and x.numel() > 0:  # the collective itself, without copies
        with _phase("gather", x, group):
            gathered = x.new_empty(group.world * x.numel()).view(-1, *x.shape[1:])
            _all_gather_single(gathered, x.contiguous(), group=group.process_group)
            return gathered
    shapes = [_with_dim(x.shape, dim, size) for size in sizes]
    counts = [math.prod(shape) for shape in shapes]
    if max(counts) == 0:
        return x.new_empty(_with_dim(x.shape, dim, sum(sizes)))
    with _phase("gather", x, group):
        if min(counts) == max(counts):
            pieces = x.new_empty(group.world, *x.shape)
            _all_gather_single(pieces.view(-1), x.reshape(-1), group=group.process_group)
            return pieces.movedim(0, dim).flatten(dim, dim + 1).contiguous()
        gathered = _gather_uneven(x.reshape(-1), counts, group)
        if _is_outermost(dim, x):
            return gathered.view(_with_dim(x.shape, dim, sum(sizes)))
        shards = zip(gathered.split(counts), shapes, strict=True)
        return torch.cat([shard.view(shape) for shard, shape in shards], dim)


def _gather_uneven(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Every rank's ``x`` [counts[rank]], one behind the other."""
    if transport_of(group, x.device, "x") == "nccl":  # which sends the same rows to each rank, without copies
        gathered = x.new_empty(sum(counts))
        dist.all_to_all(list(gathered.split(list(counts))), [x] * group.world, group=group.process_group)
        return gathered
    received = x.new_empty(group.world, max(counts))  # others want equal pieces
    sent = x.new_zeros(max(counts))
    sent[: x.numel()] = x
    _all_gather_single(received.view(-1), sent, group=group.process_group)
    return torch.cat([piece[:count] for piece, count in zip(received, counts, strict=True)])


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
        pieces = _exchange(_by_owner(partial, dim, sizes, out_dtype), partial.shape, dim, sizes, group)
        with _nvtx.phase("sum"):
            return _sum_pieces(pieces, bias, residual)


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
            received = sent.new_empty(group.world, *sent.shape)
            if sent.numel() > 0:
                _all_gather_single(received.view(-1), sent.view(-1), group=group.process_group)
            with _nvtx.phase("sum"):
                return _sum_pieces(_Pieces(received), bias, residual)
        # Two steps: every rank finishes a block, then the blocks are gathered.
        sizes = block_sizes(sent.numel(), group.world)
        begin, mine = sum(sizes[: group.rank]), sizes[group.rank]
        pieces = _exchange(sent.view(-1), sent.view(-1).shape, 0, sizes, group)
        if residual is not None:
            residual = residual.reshape(-1).narrow(0, begin, mine)
        with _nvtx.phase("sum"):
            block = _sum_pieces(pieces, bias, residual, begin)
        return all_gather(block, 0, sizes, group).view(sent.shape)


def block_sizes(count: int, world: int) -> list[int]:
    """How many of ``count`` elements each rank sums in an all-reduce."""
    block = -(-count // (world * BLOCK_UNIT)) * BLOCK_UNIT
    ends = [min(count, block * rank) for rank in range(world + 1)]
    return [end - begin for begin, end in pairwise(ends)]


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


def _is_outermost(dim: int, x: Tensor) -> bool:
    """Whether shards of ``dim`` of a contiguous ``x`` lie one behind the other."""
    return math.prod(x.shape[:dim]) == 1


def _by_owner(partial: Tensor, dim: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[elements]: the rows of ``dim`` of each rank, one rank's behind the other's. May be ``partial`` itself."""
    if _is_outermost(dim, partial):
        return (partial if partial.dtype == dtype else partial.to(dtype)).contiguous().view(-1)
    sent = partial.new_empty(partial.numel(), dtype=dtype)
    if min(sizes) == max(sizes):
        shards = partial.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0)
        sent.view(shards.shape).copy_(shards)
        return sent
    rows = partial.split(list(sizes), dim)
    for shard, into in zip(rows, sent.split([shard.numel() for shard in rows]), strict=True):
        into.view(shard.shape).copy_(shard)
    return sent


class _Pieces(NamedTuple):
    """What each rank has sent of the same elements, [ranks, ...], and what this rank has of them.

    own: taken instead of ``received[rank]``, which is not filled; None: it is.
    """

    received: Tensor
    own: Tensor | None = None
    rank: int = 0


def _exchange(sent: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int], group: Group) -> _Pieces:
    """Own rows of ``shape`` from every rank; ``sent`` lies by owner."""
    counts = [math.prod(_with_dim(shape, dim, size)) for size in sizes]
    mine, rank = counts[group.rank], group.rank
    received = sent.new_empty(group.world, *_with_dim(shape, dim, sizes[rank]))
    if sent.numel() == 0:
        return _Pieces(received)
    if transport_of(group, sent.device, "partial") == "nccl":  # which need not copy what stays here
        to, into = list(sent.split(counts)), list(received.view(group.world, mine))
        own = to[rank].view(received.shape[1:])
        to[rank] = into[rank] = sent[:0]
        dist.all_to_all(into, to, group=group.process_group)
        return _Pieces(received, own, rank)
    even = min(counts) == max(counts)
    dist.all_to_all_single(
        received.view(-1),
        sent,
        output_split_sizes=None if even else [mine] * group.world,
        input_split_sizes=None if even else counts,
        group=group.process_group,
    )
    return _Pieces(received)


def _sum_pieces(
    pieces: _Pieces, bias: Tensor | None, residual: Tensor | None, first_column: int | None = None
) -> Tensor:
    """The pieces in rank order, then bias and residual; rounded once to the pieces' dtype.

    first_column: of the elements of a piece, which then is a part of flattened rows (None: it has whole rows).
    """
    received, own, rank = pieces
    if _has_kernel(received, bias):
        out = received.new_empty(received.shape[1:])
        column = 0 if bias is None else (first_column or 0) % bias.shape[0]
        terms = [term if term is None else term.contiguous() for term in (bias, residual)]
        torch.ops.tpkernels.sum_ranks(received, own, rank, *terms, out, column)
        return out
    if bias is not None and first_column is not None:
        columns = torch.arange(first_column, first_column + received.shape[1], device=bias.device)
        bias = bias[columns % bias.shape[0]]
    if own is not None:
        received[rank] = own
    return _finish(_sum_in_rank_order(received), bias, residual, received.dtype)


def _has_kernel(pieces: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel of ``_C_sm80``, one pass over memory, gives the bits of :func:`_finish`."""
    if not pieces.is_cuda or not _extensions.is_loaded("_C_sm80"):
        return False
    dtypes = DTYPES if pieces.dtype == torch.float64 else DTYPES - {torch.float64}
    known = all(x is None or x.dtype in dtypes for x in (pieces, bias))
    return known and torch.cuda.get_device_capability(pieces.device) >= (8, 0)


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


def _with_dim(shape: Sequence[int], dim: int, size: int) -> list[int]:
    out = list(shape)
    out[dim] = size
    return out
