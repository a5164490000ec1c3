"""Tensors from one layout to another, over a process group, with gradients; and blocks of whole tensors.

What must travel, and how much, is ``messages(source, target)`` and ``sent_elements``: pure, before anything moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.grids.execute import move
from tpkernels.grids.layout import Block, Layout
from tpkernels.grids.mesh import ProcessGrid

__all__ = ["redistribute", "take_block", "would_fit"]


def redistribute(
    x: Tensor,
    source: Layout,
    target: Layout,
    grid: ProcessGrid,
    *,
    target_grid: ProcessGrid | None = None,
    shape: tuple[int, int] | None = None,
) -> Tensor:
    """This rank's block in ``target`` of the tensor whose block in ``source`` is ``x``. All ranks call it.

    Args:
        x: [rows, ..., columns]; layouts cut the first and the last dimension.
        source, target: layouts of so many ranks as ``grid`` has.
        target_grid: where the ranks stand in ``target``, should a mesh have them in another order than ``grid``.
        shape: rows and columns of the whole; None: as ``x`` has them times the parts, where all blocks are equal.
    Returns:
        A new tensor, or a view of ``x`` where nothing changes. Its gradient goes the same way back: that of a
        replica is taken as complete, as everywhere in this library.
    Raises:
        ShapeError: ``x`` is not this rank's block. ArgumentError: layouts of other numbers of ranks, grids of others.
        CommTimeoutError: another rank did not come within the group's timeout.
    Source:
        The sum over ranks of what travels is PrimePar's inter-operator cost: V minus what each rank has already.
    """
    if target_grid is not None:
        target = _standing_as(target, target_grid, grid)
    for name, layout in (("source", source), ("target", target)):
        if layout.grid.world != grid.grid.world:
            raise ArgumentError(
                f"{name}: expected a layout of {grid.grid.world} ranks, as the grid has, got one of "
                f"{layout.grid.world}."
            )
    if x.dim() < 2:
        raise ShapeError(
            f"x: expected at least 2 dimensions, [rows, ..., columns], got {list(x.shape)}; pass x.unsqueeze(0)."
        )
    block = source.block(grid.position)
    whole = shape or _whole_shape(x, block)
    expected = block.shape(*whole)
    if (x.shape[0], x.shape[-1]) != expected:
        raise ShapeError(
            f"x: expected {expected[0]} rows and {expected[1]} columns, this rank's block of {list(whole)} in the "
            f"source layout ({block}), got shape {list(x.shape)}."
        )
    moved: Tensor = _Redistribute.apply(x, source, target, whole, grid)
    return moved


def _standing_as(layout: Layout, standing: ProcessGrid, grid: ProcessGrid) -> Layout:
    """``layout``, whose positions are those of ``standing``, by the positions of ``grid``."""
    here, there = grid.global_ranks, standing.global_ranks
    if set(here) != set(there):
        raise ArgumentError(
            f"target_grid: expected a grid of the same ranks, {sorted(here)}, got one of {sorted(there)}; redistribute "
            "moves blocks among the ranks of one group."
        )
    return Layout(grid.grid, tuple(layout.blocks[there.index(rank)] for rank in here))


def _whole_shape(x: Tensor, block: Block) -> tuple[int, int]:
    rows, columns = x.shape[0] / block.rows.share, x.shape[-1] / block.columns.share
    if rows.denominator != 1 or columns.denominator != 1:
        raise ShapeError(
            f"x: shape {list(x.shape)} is no block of equal ones; pass shape, that of the whole tensor."
        )
    return int(rows), int(columns)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Layout, target: Layout, shape: tuple[int, int], grid: ProcessGrid
    ) -> Tensor:
        ctx.way = source, target, shape, grid
        made = move(x, source, target, shape, grid, x, "redistribute")
        if made is None:
            return x.new_zeros(0)
        return made.view_as(made) if made is x else made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, target, shape, grid = ctx.way
        return _Redistribute.apply(grad, target, source, shape, grid), None, None, None, None


def take_block(full: Tensor, layout: Layout, position: int, *, name: str = "x") -> Tensor:
    """The block of a position of a whole tensor [rows, ..., columns], a view. No communication.

    Raises:
        ShapeError: a dimension that the layout does not cut in equal parts; the sentence has sizes that would fit.
    """
    block = layout.block(position)
    for dimension, what, span in ((0, "rows", block.rows), (-1, "columns", block.columns)):
        if full.shape[dimension] % span.parts:
            raise ShapeError(
                f"{name}: the grid of {layout.grid} ranks cuts its {what} (dimension {dimension}) in {span.parts} "
                f"equal parts, but there are {full.shape[dimension]}; "
                f"{would_fit(full.shape[dimension], span.parts)} would fit."
            )
    (a, b), (c, d) = block.rows.elements(full.shape[0]), block.columns.elements(full.shape[-1])
    return full[a:b, ..., c:d]


def would_fit(size: int, parts: int) -> str:
    """The multiples of ``parts`` next to ``size``: "8 or 12"."""
    below = size // parts * parts
    return f"{below} or {below + parts}" if below > 0 else f"{parts}"
