"""Cross-entropy of logits on a grid: rows cut over some ranks, the vocabulary over others; never gathered.

What ``tpkernels.nn.loss`` does in one dimension, among the ranks that share rows: three numbers a row, one message
to each. The mean over all rows is one more, of two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, DTypeError, ShapeError
from tpkernels.grids.layout import Layout
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.nn import loss as one_d
from tpkernels.nn._checks import agreed, check_indices, digest
from tpkernels.nn.grids._distribution import Distribution

__all__ = ["cross_entropy"]


class _CrossEntropy(one_d._CrossEntropy):
    """The gradient is that of one dimension; what the ranks exchange for the loss is not."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        mine: Tensor,
        valid: Tensor,
        distribution: Any,
        sizes: Sequence[int],
        smoothing: float,
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = one_d._local_terms(wide, target, mine, smoothing).flatten(1)
        terms = distribution.over_features(own.t().contiguous()).permute(2, 1, 0)
        loss, top, log_total = one_d._loss(terms.unflatten(-1, target.shape), sizes, smoothing)
        ctx.save_for_backward(logits, target, mine, valid, top, log_total)
        ctx.smoothing, ctx.vocab = smoothing, sum(sizes)
        return torch.where(valid, loss, 0.0)


class _Total(torch.autograd.Function):
    """Sums over all rows of [n], this rank's: the same on every rank, and so is their gradient."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, distribution: Distribution) -> Tensor:
        return distribution.over_rows(sums).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab: int,
    *,
    layout: Layout,
    grid: ProcessGrid,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits of which every rank has a block.

    Args:
        logits: [rows here, ..., vocabulary here], floating point.
        targets: [rows, ...], all of them on every rank, int64 or int32.
        vocab: size of the whole vocabulary.
        layout, grid: how the logits lie: ``output_layout`` and ``process_grid`` of the layer that made them.
        reduction: "mean" over all targets that are not ignored, or "none".
        ignore_index, label_smoothing: as in ``vocab_parallel_cross_entropy``.
    Returns:
        A float32 (float64) scalar, the same bits on every rank, or [rows here, ...] for "none". Its gradient must be
        equal on every rank too.
    Raises:
        ArgumentError: a vocabulary that the grid does not cut evenly, a target out of range. ShapeError: rows, or
            shapes, that do not fit. DTypeError: no floating-point logits, no integer targets.
    """
    distribution = Distribution(layout, grid, vocab, "vocab")

    def check() -> None:
        if reduction not in ("mean", "none"):
            raise ArgumentError(f'reduction: it must be "mean" or "none", but it is {reduction!r}.')
        if not 0.0 <= label_smoothing <= 1.0:
            raise ArgumentError(f"label_smoothing: it must be from 0 to 1, but it is {label_smoothing}.")
        if not logits.dtype.is_floating_point:
            raise DTypeError(f"logits: they must have a floating-point type, but it is {logits.dtype}.")
        expected = [*distribution.take_rows(targets, "targets").shape, distribution.local]
        if list(logits.shape) != expected:
            raise ShapeError(
                f"logits: expected {expected}, this rank's rows of the targets {list(targets.shape)} and its part of "
                f"{vocab} entries, got {list(logits.shape)}."
            )
        check_indices(targets, vocab, "targets", ignore_index)

    def facts() -> dict[str, object]:
        return {
            "vocab": vocab,
            "reduction": reduction,
            "label_smoothing": float(label_smoothing),
            "ignore_index": int(ignore_index),
            "checksum of targets": digest(targets),
        }

    agreed("cross_entropy", grid.group_name, logits, check, facts)
    loss: Tensor = _applied(logits, targets, distribution, ignore_index, float(label_smoothing), reduction)
    return loss


@torch.compiler.disable(reason="tpkernels' grids send point to point, which no compiled graph can hold")
def _applied(
    logits: Tensor,
    targets: Tensor,
    distribution: Distribution,
    ignore_index: int,
    smoothing: float,
    reduction: str,
) -> Tensor:
    every = targets
    targets = distribution.take_rows(targets, "targets").to(torch.int64)
    valid = targets != ignore_index
    begin, end = distribution.layout.block(distribution.grid.position).columns.elements(distribution.features)
    local = targets - begin
    mine = valid & (local >= 0) & (local < end - begin)
    local = torch.where(mine, local, 0)
    parts = distribution.features // distribution.local
    loss: Tensor = _CrossEntropy.apply(
        logits, local, mine, valid, distribution, (distribution.local,) * parts, smoothing
    )
    if reduction == "none":
        return loss
    total: Tensor = _Total.apply(loss.sum().view(1), distribution)
    return total[0] / (every != ignore_index).sum()
