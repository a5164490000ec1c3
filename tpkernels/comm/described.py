"""What ``explain()`` says about path "fused". Nothing is communicated."""

from __future__ import annotations

import torch

from tpkernels.comm import conditions, ranks, runtime
from tpkernels.errors import BackendError
from tpkernels.ops._groups import Group
from tpkernels.ops._paths import FUSED, Request

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def transfers(
    op: str,
    request: Request,
    group: Group,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    rows: int,
) -> str:
    """How rows travel where "fused" was asked for, else whether it could be.

    Args:
        dtypes: of the operands, and of the result.
        rows: of the whole product.

    Raises:
        BackendError: it was asked for and cannot run, as far as this rank knows.
    """
    compared, reason = _missing(group, device, dtypes)
    if request.transport != FUSED:
        return (
            f"cannot run: {reason}"
            if reason
            else "path='fused' can be asked for; 'auto' does not take it yet"
        )
    if reason is not None:
        raise BackendError(f"{request.source}: 'fused' was asked for, but {reason}; use 'auto'.")
    peers = group.world - 1
    if op == "all_gather_matmul":
        how = (
            f"the copy engine pushes each shard to {peers} peers in chunks of rows; a tile of the {rows} rows waits "
            "for its chunks only"
        )
    else:
        how = (
            f"rows of {peers} peers are computed first, and pushed by the copy engine peer by peer while the next are "
            "computed; what comes is added when this rank's own rows are stored"
        )
        if op == "matmul_all_reduce":
            how += ", and pushed to all"
    return how if compared else f"{how}; the first call finds out whether all ranks can"


def _missing(
    group: Group, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[bool, str | None]:
    """Whether the ranks have compared themselves, and what is known to be missing."""
    reason = conditions.call_missing(device.type, *dtypes, group.world, runtime.active.device_types)
    if reason is not None:
        return False, reason
    compared, reason = ranks.known(group, device)
    if not compared:
        reason = runtime.active.facts(device).missing or None
    return compared, reason
