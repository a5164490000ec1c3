"""Dropout that drops what the unsharded model drops, whatever the number of ranks.

Whether an element is dropped depends on (seed, name, step) and its position in the global tensor, and on nothing else:
no generator, no state. So

- a replicated activation has one mask on every rank, a sharded one (heads, parts of the sequence) that of its part;
- a sharded model equals the unsharded one, ``dropout`` with the same names, at every tensor-parallel size;
- recomputation in the backward pass, by ``torch.utils.checkpoint`` or otherwise, finds the same mask, in any order of
  micro-batches, and what else draws random numbers changes nothing;
- a run that goes on from a checkpoint needs no random state: it passes the next step.

``step`` is the caller's: an integer that no other forward pass of the training run has, equal on the ranks of the
tensor-parallel group and different for micro-batches and data-parallel replicas, such as
``(optimizer_step * micro_batches + micro_batch) * replicas + replica``. A 0-d int64 tensor serves too; it spares a
compiled graph one guard.

Design: a row (all dimensions but the last) gets 64 bits from SplitMix64, one link for each dimension, as the starting
values do (``tpkernels.nn.init``). Columns mix them with their index by two rounds of a 32-bit hash, some 20
operations in int32: half the memory traffic of 64 bits, and a mask needs no more. No total size enters, so padding
a batch does not move a mask. The hash is "lowbias32" of Wellons, "Prospecting for hash functions" (2018).

Tried and rejected: Philox by position (100 operations), torch's generators (their order of draws depends on the
device, on the shape and on who else draws), a counter of calls (a recomputed call is counted again).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.nn._checks import agreed, check_counts_from_front
from tpkernels.nn.init import random_bits, stream_key
from tpkernels.nn.sharding import GroupLike, ParallelModule

__all__ = ["Dropout", "check_probability", "dropout", "keep_mask"]

Step = int | Tensor


def check_probability(p: float, argument: str) -> None:
    """ArgumentError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise ArgumentError(
            f"{argument}: the part that is dropped must be 0 or more and below 1, but it is {p}."
        )


def check_name(p: float, name: str) -> None:
    """ArgumentError for dropout without a name."""
    if p > 0 and not name:
        raise ArgumentError(
            "name: dropout needs one, since layers of one name drop the same elements, but it is empty; pass what the "
            'layer is called in the model, such as "blocks.3".'
        )


def check_step(step: Step | None) -> Step:
    """The step, or an ArgumentError."""
    whole = isinstance(step, (int, torch.SymInt)) and not isinstance(step, bool)
    if whole or (isinstance(step, Tensor) and step.dim() == 0 and step.dtype == torch.int64):
        return step  # type: ignore[return-value]
    given = f"{list(step.shape)} of {step.dtype}" if isinstance(step, Tensor) else repr(step)
    raise ArgumentError(
        "step: dropout in training takes the number of this forward pass, an int or a 0-d int64 tensor that no other "
        f"micro-batch of the run has, but it is {given}; pass step= to forward, or call eval()."
    )


@torch.compiler.assume_constant_result
def _key(seed: int, name: str) -> int:
    """``stream_key``, a constant of a compiled graph."""
    return stream_key(seed, name)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


_MULTIPLIERS = _signed(0x7FEB352D), _signed(0x846CA68B)


def _mix(z: Tensor) -> Tensor:
    """lowbias32 of int32 seen as uint32, in place; a logical shift is an arithmetic one and a mask."""
    z ^= (z >> 16).bitwise_and_(0xFFFF)
    z *= _MULTIPLIERS[0]
    z ^= (z >> 15).bitwise_and_(0x1FFFF)
    z *= _MULTIPLIERS[1]
    z ^= (z >> 16).bitwise_and_(0xFFFF)
    return z


def keep_mask(
    shape: Sequence[int],
    p: float,
    *,
    seed: int,
    name: str,
    step: Step,
    starts: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Bool tensor of ``shape``: False, with probability p, where an element is dropped.

    Args:
        shape: of this rank's part, of dimensions that mean the same everywhere, such as [batch, head, query, key].
        p: 0 <= p < 1, to within 2**-31.
        seed, name, step: see the module.
        starts: global index of the part's first element in every dimension; None: zeros.
    """
    offsets = [0] * len(shape) if starts is None else list(starts)
    key = _key(seed, name)
    row = torch.as_tensor(step, dtype=torch.int64, device=device)
    row = random_bits(row, key)
    for size, start in zip(shape[:-1], offsets[:-1], strict=True):
        index = torch.arange(size, dtype=torch.int64, device=device) + start
        row = random_bits(row.unsqueeze(-1) + index, key)
    column = torch.arange(shape[-1], dtype=torch.int32, device=device) + offsets[-1]
    low = ((row << 32) >> 32).to(torch.int32)
    high = (row >> 32).to(torch.int32)
    bits = _mix(low.unsqueeze(-1) + column)
    bits ^= high.unsqueeze(-1)
    threshold = min(round(p * 2**31), 2**31 - 1)
    return _mix(bits).bitwise_and_(0x7FFFFFFF) >= threshold


def apply_mask(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """x / (1 - p) where it is kept, else 0; saves the mask, one byte an element, and nothing else."""
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)


def dropout(
    x: Tensor,
    p: float,
    *,
    seed: int,
    name: str,
    step: Step | None,
    starts: Sequence[int] | None = None,
) -> Tensor:
    """x with a part p of its elements zeroed and the others divided by 1 - p, for models of any layers.

    Args:
        x: one dimension at least, floating point; this rank's part, whose first element is ``starts`` in the whole.
        p, seed, name, step, starts: as in ``keep_mask``; p = 0 returns x.
    Raises:
        ArgumentError: p out of range, no name, no step.
    """
    check_probability(p, "p")
    check_name(p, name)
    if p == 0:
        return x
    if x.dim() == 0:
        raise ShapeError("x: dropout takes at least 1 dimension, but x is a single number.")
    step = check_step(step)
    keep = keep_mask(x.shape, p, seed=seed, name=name, step=step, starts=starts, device=x.device)
    return apply_mask(x, keep, p)


class Dropout(ParallelModule):
    """Dropout of activations [..., features] outside of the matrix products; nothing in ``eval()``.

    Args:
        p: the part that is dropped.
        name: what it is called in the model; two of one name and seed drop alike.
        sequence_parallel: x is this rank's part of the sequence; otherwise it is equal on every rank.
        sequence_dim: which dimension of x is the sequence, 0 or 1. A position has one mask in both layouts.
        group, seed: as in ``ColumnParallelLinear``.
    Equal to the unsharded ``dropout`` of x as [batch, sequence, features].
    """

    def __init__(
        self,
        p: float,
        *,
        name: str,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(group)
        check_probability(p, "p")
        check_name(p, name)
        check_counts_from_front(sequence_dim)
        self.p = p
        self.name = name
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.seed = seed

    @property
    def active(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and self.p > 0

    def forward(
        self, x: Tensor, step: Step | None = None, shard_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """See the class; ``step``: see the module; ``shard_sizes``: sequence rows of every rank where they differ."""
        if not self.active:
            return x

        def check() -> None:
            check_step(step)
            self._check_sequence_dim(x, self.sequence_dim)
            if self.sequence_parallel and shard_sizes is not None:
                self._check_rows(x.shape[self.sequence_dim], list(shard_sizes))

        def facts() -> dict[str, object]:
            equal = self.sequence_parallel and shard_sizes is None
            rows = x.shape[self.sequence_dim] if equal else None
            return {"step": int(check_step(step)), "rows of the sequence, without shard_sizes": rows}

        agreed(type(self).__name__, self.group_name, x, check, facts)
        whole = x.movedim(self.sequence_dim, -2)
        starts = [0] * whole.dim()
        if self.sequence_parallel:
            rows = whole.shape[-2]
            starts[-2] = rows * self.rank if shard_sizes is None else sum(shard_sizes[: self.rank])
        kept = dropout(whole, self.p, seed=self.seed, name=self.name, step=step, starts=starts)
        return kept.movedim(-2, self.sequence_dim)

    def _check_rows(self, rows: int, sizes: list[int]) -> None:
        if len(sizes) != self.world or sizes[self.rank] != rows:
            raise ShapeError(
                f"shard_sizes: they must be the rows of the sequence of each of the {self.world} ranks, and x has "
                f"{rows} on rank {self.rank}, but they are {sizes}."
            )

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}, sequence_parallel={self.sequence_parallel}, {self._group_repr()}"
