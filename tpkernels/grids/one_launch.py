"""Passes of a grid's linear layer as one launch each, path "fused": whose blocks a rank takes, and the call.

A pass whose result stays (``stationary``) sums products of whole blocks, which their owners have. So each rank makes it
by one launch of the Hopper kernel: blocks travel by the copy engine while those that are there are multiplied, and sums
stay in the accumulators of a tile until it is done. The executor (``execute``) does the same a step at a time, with
messages of the process group, sums in memory, on any backend.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.comm import blocks
from tpkernels.comm.conditions import MAX_RANKS
from tpkernels.grids.execute import note_sent
from tpkernels.grids.layout import messages
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.grids.method import Method, Pass
from tpkernels.grids.stationary import stationary

__all__ = ["Owners", "multiply", "one_launch_missing", "owners"]

Table = tuple[tuple[int, ...], ...]  # [position][step]: whose block that rank takes then


class Owners(NamedTuple):
    """Whose left, and whose right block each rank multiplies at each step."""

    left: Table
    right: Table


@lru_cache(maxsize=256)
def owners(method: Method, kind: Pass) -> Owners:
    """Of a method whose results stay: the nearest of those that have the block."""

    def table(operand: str) -> Table:
        steps = [
            {m.target: m.source for m in messages(method.home(operand), method.layout(kind, operand, step))}
            for step in range(method.steps)
        ]
        return tuple(tuple(step[position] for step in steps) for position in range(method.grid.world))

    return Owners(table(kind.left), table(kind.right))


def one_launch_missing(method: Method) -> str | None:
    """Why a method's passes cannot be one launch each, in words that follow "but"; None: they can."""
    still = stationary(method)
    if still is None:
        return f"{method.name} gathers blocks that no rank has whole"
    if method.grid.world > MAX_RANKS:
        return f"a group may have {MAX_RANKS} ranks, not {method.grid.world}"
    if still.steps > blocks.MAX_STEPS:
        return f"a pass may have {blocks.MAX_STEPS} steps, not {still.steps}"
    return None


def multiply(
    method: Method,
    kind: Pass,
    left: Tensor,
    right: Tensor,
    grid: ProcessGrid,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    what: str,
) -> Tensor:
    """This rank's block of a pass's result, of its own blocks of the factors.

    Args:
        method: of ``stationary``.
        left, right: blocks at home of ``kind.left`` and ``kind.right``, [rows, columns], without an empty dimension.
        bias: [columns of the result].
        what: who calls, for messages.
    Raises:
        BackendError: path "fused" cannot run here. CommTimeoutError: a rank did not come.
    """
    table = owners(method, kind)
    note_sent([(table.left, left), (table.right, right)], grid)
    return blocks.block_matmul(
        grid.group,
        left,
        right,
        _of_ranks(table.left, grid),
        _of_ranks(table.right, grid),
        left_sums_rows=kind is Pass.WEIGHT_GRAD,
        right_sums_rows=kind is not Pass.FORWARD,
        bias=bias,
        out_dtype=out_dtype,
        what=what,
    )


def _of_ranks(table: Table, grid: ProcessGrid) -> list[list[int]]:
    """By rank of the group, in ranks of the group."""
    positions = sorted(range(len(table)), key=lambda position: grid.members[position])
    return [[grid.members[owner] for owner in table[position]] for position in positions]
