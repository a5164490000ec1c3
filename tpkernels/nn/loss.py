"""Cross-entropy of logits whose vocabulary is cut over a process group, without ever gathering them.

With m_r, s_r the maximum and the sum of exp(x - m_r) over rank r's vocabulary, and t the logit of the target:

    loss = (m - t) + log(sum_r s_r exp(m_r - m)),    m = max_r m_r

so every rank sends three numbers a token (m_r, s_r, and t or 0) in ONE all-gather, and all ranks compute the
same bits. Megatron-LM and torch's loss_parallel take three all-reduces. Backward has no communication:
softmax of the local logits, minus one at the target.

Label smoothing e takes a part e of the target's weight and spreads it over the V entries of the whole vocabulary:

    loss = (1 - e) (L - t) + e / V sum_v (L - x_v),    L = m + log(sum_r s_r exp(m_r - m))

for which every rank sends a fourth number, sum_v (m_r - x_v): small terms of one sign, so nothing cancels.

Saved for backward are the logits as they came and the log-sum-exp; the softmax is computed again, which costs
one exp an element and saves a float32 copy of the logits. Computation is in float32 (float64 for float64
logits). Subtracting the maximum first keeps huge logits finite. A rank without vocabulary contributes m_r =
-inf, s_r = 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import tpkernels as tpk
from tpkernels.errors import ArgumentError, DTypeError, ShapeError
from tpkernels.nn._checks import agreed, check_indices, digest
from tpkernels.nn.sharding import GroupLike
from tpkernels.ops._groups import group_name_of, resolve

__all__ = ["vocab_parallel_cross_entropy"]


@torch.compiler.assume_constant_result
def _rank_and_world(group_name: str) -> tuple[int, int]:
    """Constants of a compiled graph: a group does not change while it exists."""
    info = resolve(group_name)
    return info.rank, info.world


def _local_terms(wide: Tensor, target: Tensor, mine: Tensor, smoothing: float) -> Tensor:
    """[3 or 4, *tokens]: this rank's maximum, its sum of exp(x - maximum), the target's logit or 0, and, with
    smoothing, its sum of maximum - x."""
    if wide.shape[-1] == 0:
        zero = torch.zeros(target.shape, dtype=wide.dtype, device=wide.device)
        return torch.stack((zero - float("inf"), zero, zero, *([zero] if smoothing else [])))
    top = wide.amax(-1)
    # A row of nothing but -inf has no finite maximum; its sum is then zero, not nan.
    shift = torch.where(top == float("-inf"), 0.0, top)
    below = wide - shift.unsqueeze(-1)
    spread = [below.sum(-1).neg_()] if smoothing else []
    picked = torch.where(mine, wide.gather(-1, target.unsqueeze(-1)).squeeze(-1), 0.0)
    return torch.stack((top, below.exp_().sum(-1), picked, *spread))


def _loss(terms: Tensor, sizes: Sequence[int], smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, maximum and log of the sum behind it from [world, 3 or 4, *tokens]."""
    tops, totals, picked = terms.unbind(1)[:3]
    top = tops.amax(0)
    log_total = (totals * (tops - top).exp()).sum(0).log()
    loss = (top - picked.sum(0)) + log_total
    if smoothing:
        # Each rank's sum of L - x: its own of maximum - x, and L - maximum for each of its entries.
        lifts = [size * ((top - tops[rank]) + log_total) for rank, size in enumerate(sizes) if size > 0]
        spread = (terms[:, 3].sum(0) + torch.stack(lifts).sum(0)) / sum(sizes)
        loss = (1.0 - smoothing) * loss + smoothing * spread
    return loss, top, log_total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        mine: Tensor,
        valid: Tensor,
        group_name: str,
        sizes: Sequence[int],
        smoothing: float,
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = _local_terms(wide, target, mine, smoothing)
        loss, top, log_total = _loss(
            tpk.regions.all_gather(own.unsqueeze(0), 0, group_name), sizes, smoothing
        )
        ctx.save_for_backward(logits, target, mine, valid, top, log_total)
        ctx.smoothing, ctx.vocab = smoothing, sum(sizes)
        return torch.where(valid, loss, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, mine, valid, top, log_total = ctx.saved_tensors
        if logits.shape[-1] == 0:
            return torch.zeros_like(logits), *(None,) * 6
        d = logits.to(grad.dtype).sub(top.unsqueeze(-1)).sub_(log_total.unsqueeze(-1)).exp_()
        at_target = mine.to(d.dtype).unsqueeze(-1)
        if ctx.smoothing:
            d.sub_(ctx.smoothing / ctx.vocab)
            at_target = at_target * (1.0 - ctx.smoothing)
        d.scatter_add_(-1, target.unsqueeze(-1), -at_target)
        d.mul_(torch.where(valid, grad, 0.0).unsqueeze(-1))
        return d.to(logits.dtype), *(None,) * 6


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: GroupLike,
    vocab_sizes: int | Sequence[int],
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits of which every rank has a part of the vocabulary.

    Args:
        logits: [..., this rank's vocabulary], floating point: the output of a ``ColumnParallelLinear``, not
            gathered.
        targets: [...], int64 or int32 ids in the whole vocabulary, equal on every rank.
        group: ``ProcessGroup``, one-dimensional ``DeviceMesh``, group name, or None for the default group.
        vocab_sizes: size of the whole vocabulary, cut as ``tpk.shard_sizes`` does it, or the size on every
            rank.
        reduction: "mean" over the targets that are not ignored (nan if there are none, as in torch), or
            "none".
        ignore_index: targets of this value have no loss and no gradient.
        label_smoothing: from 0 to 1, the part of the target's weight that all entries of the whole vocabulary share.
    Returns:
        A float32 (float64) scalar, or [...] for "none"; the same bits on every rank. Natural logarithm. Its
        gradient must be equal on every rank too.
    Raises:
        ArgumentError: shapes or vocabulary that do not fit, an id out of range (on the CPU; on a GPU under
            ``TPK_CHECK=1``).
        MismatchError: under ``TPK_CHECK=1``, targets that are not equal on every rank.
        DTypeError: logits that are not floating point, or targets that are not integers.
    """
    group_name = group_name_of(group)
    rank, world = _rank_and_world(group_name)
    sizes: list[int] = []

    def check() -> None:
        sizes.extend(_sizes_of(vocab_sizes, world))
        if not 0.0 <= label_smoothing <= 1.0:
            raise ArgumentError(f"label_smoothing: it must be from 0 to 1, but it is {label_smoothing}.")
        _check_arguments(logits, targets, sizes, rank, world, reduction, ignore_index)

    agreed(
        "vocab_parallel_cross_entropy",
        group_name,
        logits,
        check,
        lambda: {
            "vocab_sizes": sizes,
            "reduction": reduction,
            "ignore_index": int(ignore_index),
            "label_smoothing": float(label_smoothing),
            "shape of targets": list(targets.shape),
            "checksum of targets": digest(targets),
        },
    )
    held = sizes[rank]
    targets = targets.to(torch.int64)
    valid = targets != ignore_index
    local = targets - sum(sizes[:rank])
    mine = valid & (local >= 0) & (local < held)
    local = torch.where(mine, local, 0)
    loss: Tensor = _CrossEntropy.apply(
        logits, local, mine, valid, group_name, tuple(sizes), float(label_smoothing)
    )
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum()


def _is_integer(value: object) -> bool:
    """Whether it is an int or one of NumPy's integers."""
    return isinstance(value, (int, Integral))


def _sizes_of(vocab_sizes: int | Sequence[int], world: int) -> list[int]:
    if isinstance(vocab_sizes, int):
        return tpk.shard_sizes(vocab_sizes, world)
    if isinstance(vocab_sizes, Integral):
        return tpk.shard_sizes(int(vocab_sizes), world)
    sizes = list(vocab_sizes) if isinstance(vocab_sizes, Iterable) else [vocab_sizes]
    if not all(_is_integer(size) for size in sizes):
        raise ArgumentError(
            "vocab_sizes: it must be the size of the whole vocabulary, or a list with an integer for every rank, "
            f"but it is {vocab_sizes!r}."
        )
    return [size if isinstance(size, int) else int(size) for size in sizes]


def _check_arguments(
    logits: Tensor,
    targets: Tensor,
    sizes: Sequence[int],
    rank: int,
    world: int,
    reduction: str,
    ignore_index: int,
) -> None:
    if reduction not in ("mean", "none"):
        raise ArgumentError(f'reduction: it must be "mean" or "none", but it is {reduction!r}.')
    if not _is_integer(ignore_index):
        raise ArgumentError(
            f"ignore_index: it must be an integer, but it is {ignore_index!r}; leave it out, or pass a value that "
            "no target has, to ignore none."
        )
    if not logits.dtype.is_floating_point:
        raise DTypeError(f"logits: they must have a floating-point type, but it is {logits.dtype}.")
    if len(sizes) != world:
        raise ArgumentError(
            f"vocab_sizes: the group has {world} ranks, but there are {len(sizes)} sizes: {sizes}."
        )
    if logits.dim() != targets.dim() + 1 or logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"targets: they must have the shape of logits without its last dimension, {list(logits.shape[:-1])}, "
            f"but it is {list(targets.shape)}."
        )
    held = sizes[rank]
    if logits.shape[-1] != held:
        raise ShapeError(
            f"logits: rank {rank} has {held} of the {sum(sizes)} vocabulary entries, but the last dimension of "
            f"logits is {logits.shape[-1]}; pass the output of the column-parallel head without gathering it."
        )
    check_indices(targets, sum(sizes), "targets", ignore_index)
