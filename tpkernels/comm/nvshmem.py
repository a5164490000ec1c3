"""NVSHMEM in path "fused": as the allocator of shared memory, and as what carries rows in place of the copy engine.

``TPK_SYMMETRIC_BACKEND=NVSHMEM`` asks for the first alone; ``TPK_TRANSPORT=nvshmem`` for both. See docs/nvshmem.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpkernels.errors import BackendError
from tpkernels.ops._groups import Group

TRANSPORT = "TPK_TRANSPORT"
TRANSPORTS = ("copy", "nvshmem")
BACKEND = "TPK_SYMMETRIC_BACKEND"


def transport(environment: Mapping[str, str]) -> str:
    """What is to carry rows to other ranks: "copy", the copy engine, unless something else is asked for."""
    return environment.get(TRANSPORT) or "copy"


def backend(environment: Mapping[str, str]) -> str:
    """Which of torch's allocators of symmetric memory is asked for."""
    implied = "NVSHMEM" if transport(environment) == "nvshmem" else "CUDA"
    return environment.get(BACKEND) or implied


def missing(environment: Mapping[str, str], not_loaded: str, alone: bool) -> str | None:
    """Why this rank cannot use NVSHMEM as it is asked to, in words that follow "rank 1 cannot:"; None if it can.

    ``not_loaded``: why ``_C_nvshmem`` is not, empty if it is. ``alone``: the group has all ranks of the job.
    """
    wanted, memory = transport(environment), backend(environment)
    if wanted not in TRANSPORTS:
        return f"{TRANSPORT}: expected one of {', '.join(TRANSPORTS)}, got {wanted!r}"
    if wanted == "nvshmem" and not_loaded:
        return f"{TRANSPORT}=nvshmem needs _C_nvshmem, which is not loaded: {not_loaded}"
    if wanted == "nvshmem" and memory != "NVSHMEM":
        return (
            f"{TRANSPORT}=nvshmem needs memory of NVSHMEM, but {BACKEND} is {memory!r}; set it to NVSHMEM, or leave "
            "it unset"
        )
    if memory == "NVSHMEM" and not alone:
        return (
            "all ranks of the job allocate memory of NVSHMEM together, but the group has only some of them; unset "
            f"{TRANSPORT} and {BACKEND}"
        )
    return None


def prepare(environment: Any) -> None:
    """What NVSHMEM reads when torch starts it, at the first allocation: one host, and no NVLink multicast."""
    environment["NVSHMEM_DISABLE_NVLS"] = "1"
    environment.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")


def world_ranks(group: Group) -> list[int]:
    """Ranks of the group by their number in the job, which is their PE: torch starts NVSHMEM with the default group."""
    return [int(rank) for rank in dist.get_process_group_ranks(group.process_group)]


def connect(addresses: Sequence[int], pes: Sequence[int], rank: int, size: int) -> None:
    """Let rows to these allocations, one of every rank, be carried by NVSHMEM from now on."""
    ops = torch.ops.tpkernels
    try:
        ops.nvshmem_map(list(addresses), list(pes), rank, size)
        ops.attach_transport(ops.nvshmem_transport())
    except RuntimeError as error:
        raise BackendError(f"{TRANSPORT}=nvshmem: {str(error).splitlines()[0]}") from error
