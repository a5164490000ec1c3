"""What ``explain()`` says about path "fused". Nothing is communicated."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tpkernels.comm import conditions, departures, ranks, runtime, small
from tpkernels.comm.auto import Asked, Decision
from tpkernels.errors import BackendError
from tpkernels.ops._groups import Group
from tpkernels.ops._paths import FUSED, Request

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def transfers(
    asked: Asked,
    rows: Sequence[int],
    request: Request,
    group: Group,
    device: torch.device,
    decision: Decision | None,
) -> str:
    """How rows travel where "fused" was asked for, or is what "auto" takes; else whether it could be.

    Args:
        rows: of every rank's shard.
        decision: what "auto" comes to; None where it does not choose.

    Raises:
        BackendError: it was asked for and cannot run, as far as this rank knows.
    """
    compared, reason = _missing(group, device, (asked.dtype, asked.out_dtype), sum(rows))
    if request.transport != FUSED and not (decision is not None and decision.fused):
        return f"cannot run: {reason}" if reason else "path='fused' can be asked for"
    if reason is not None:
        raise BackendError(f"{request.source}: 'fused' was asked for, but {reason}; use 'auto'.")
    peers = group.world - 1
    way = asked.way(rows)
    if way is not None:
        how = small.describe(way)
    elif asked.op == "all_gather_matmul":
        how = (
            f"the copy engine pushes each shard to {peers} peers in chunks of rows; a tile of the {sum(rows)} rows "
            "waits for its chunks only"
        )
    elif departures.stores(asked.op, rows, asked.ns[0] * asked.out_dtype.itemsize, os.environ):
        how = (
            f"rows of {peers} peers are computed and stored in their memory by the product itself, chunk by chunk; "
            "what comes is added when this rank's own chunks are stored"
            + (", here and in the memory of all" if asked.op == "matmul_all_reduce" else "")
        )
    elif asked.op == "matmul_all_reduce":
        how = (
            f"chunk by chunk, rows of {peers} peers are computed, and pushed by the copy engine while the next are "
            "computed; what comes is added when this rank's own chunks are stored, and pushed to all"
        )
    else:
        how = (
            f"rows of {peers} peers are computed first, and pushed by the copy engine peer by peer while the next are "
            "computed; what comes is added when this rank's own rows are stored"
        )
    return how if compared else f"{how}; the first call finds out whether all ranks can"


def _missing(
    group: Group, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], rows: int
) -> tuple[bool, str | None]:
    """Whether the ranks have compared themselves, and what is known to be missing."""
    reason = conditions.call_missing(
        device.type, *dtypes, group.world, runtime.active.device_types, rows=rows
    )
    if reason is not None:
        return False, reason
    compared, reason = ranks.known(group, device)
    if not compared:
        reason = runtime.active.facts(device).missing or None
    return compared, reason
