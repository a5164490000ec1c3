"""A product whose factors lie in blocks on all ranks of a grid, as one launch a rank, for path "fused".

Who takes whose blocks is told by tables that all ranks have alike; the blocks travel by the copy engine, straight from
their owners, while what has come is multiplied: csrc/ops/block_pushes.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch import dtype as Dtype

from tpkernels.comm import fused, ranks, runtime, workspace
from tpkernels.comm.choice import MOST_PAIRS
from tpkernels.comm.conditions import MAX_RANKS
from tpkernels.comm.faults import Reported, timeout_s
from tpkernels.ops import _nvtx
from tpkernels.ops._groups import Group

MAX_STEPS = MOST_PAIRS
_SLOT = 256  # bytes that a block in the buffer is a multiple of

Table = Sequence[Sequence[int]]  # [rank][step]: whose block that rank takes


def block_matmul(
    group: Group,
    left: Tensor,
    right: Tensor,
    left_from: Table,
    right_from: Table,
    *,
    left_sums_rows: bool,
    right_sums_rows: bool,
    bias: Tensor | None,
    out_dtype: Dtype,
    what: str,
) -> Tensor:
    """This rank's [M, N]: the sum over steps of a left block [M, K] times a right block [K, N], plus bias [N].

    Args:
        left, right: this rank's own blocks as they are stored, [M, K] and [N, K], or, where they sum rows, [K, M] and
            [K, N]; of the same shape on every rank, without an empty dimension.
        left_from, right_from: the same on every rank; up to ``MAX_STEPS`` steps of up to ``MAX_RANKS`` ranks.
        what: who calls, for messages.
    Raises:
        BackendError: path "fused" cannot run here. CommTimeoutError: a rank did not come.
    """
    assert 1 <= len(left_from[0]) <= MAX_STEPS and group.world <= MAX_RANKS
    device = left.device
    with Reported(what, group), runtime.active.on(device):
        ranks.require(group, device)
        timeout = timeout_s(group, device)
        size = workspace_bytes((left, left_from), (right, right_from))
        space = workspace.ensure(group, device, "blocks", size)
        m, n = (x.shape[rows] for x, rows in ((left, left_sums_rows), (right, right_sums_rows)))
        out = left.new_empty(m, n, dtype=out_dtype)
        with _nvtx.phase("blocks and product", "fused"), runtime.active.chained(device):
            runtime.active.multiply_blocks(
                _loadable(left),
                _loadable(right),
                left_sums_rows,
                right_sums_rows,
                _flat(left_from),
                _flat(right_from),
                bias,
                out,
                group.rank,
                list(space.addresses),
                timeout,
                "auto",
                "",
                runtime.active.multiprocessors(device),
            )
    return out


def workspace_bytes(*sides: tuple[Tensor, Table]) -> int:
    """Size of an allocation for all blocks that the rank which is sent most is sent."""
    return workspace.PAGE_BYTES + sum(slots(table) * _slot_bytes(x) for x, table in sides)


def slots(table: Table) -> int:
    """The most blocks that a rank takes of others."""
    return max(sum(owner != rank for owner in owners) for rank, owners in enumerate(table))


def _slot_bytes(x: Tensor) -> int:
    rows, columns = x.shape
    return -(-rows * workspace.pitch(columns, x.element_size()) * x.element_size() // _SLOT) * _SLOT


def _flat(table: Table) -> list[int]:
    return [owner for owners in table for owner in owners]


def _loadable(x: Tensor) -> Tensor:
    """Columns contiguous, rows at multiples of 16 bytes: as TMA and the copy engine take it."""
    return fused.loadable(x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous(), by_columns=False)
