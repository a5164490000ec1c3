"""Memory that every rank of a group can write: one adapter over torch's symmetric memory.

Never with multicast: a fault in it can take down every GPU of the host.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm import nvshmem
from tpkernels.errors import ArgumentError, BackendError
from tpkernels.ops._groups import Group

BACKENDS = ("CUDA", "NVSHMEM")
_LEAST = 4096  # bytes
_mapped = 0


@dataclass(frozen=True)
class Mapping:
    """Where every rank's allocation lies in this process. It stays so as long as this object and the memory live."""

    addresses: tuple[int, ...]
    handle: Any = None


def allocate(size: int, device: torch.device) -> Tensor:
    """Bytes that can be mapped into other ranks. They belong to this rank alone so far."""
    symm_mem = _module(device)
    # Not symm_mem.empty: newer versions cut that from a pool, at places that need not be the same on every rank,
    # and keep it when it is freed.
    make: Any = vars(symm_mem)["_SymmetricMemory"].empty_strided_p2p
    try:
        memory: Tensor = make((size,), (1,), torch.uint8, device)
    except RuntimeError:  # torch's other allocator may hold what is free
        torch.cuda.empty_cache()
        memory = make((size,), (1,), torch.uint8, device)
    return memory


def map_ranks(memory: Tensor, group: Group, name: str, most: int) -> Mapping:
    """Map every rank's allocation of the same size. Collective, over the group itself.

    ``name``: the same on all ranks, never used before. torch keeps what it knows of a group by its name, also when the
    group is gone and another one has the name. ``most``: the largest :func:`mapped` of the ranks.
    """
    symm_mem = _module(memory.device)
    if backend_name() == "NVSHMEM":
        handle, bases = _map_job(symm_mem, memory, group)
    else:
        c10d: Any = vars(dist.distributed_c10d)
        while _mapped < most:
            _map_alone(symm_mem, memory.device, f"{name}, {_mapped}")
        store: Any = vars(dist)["PrefixStore"](name, c10d["_get_process_group_store"](group.process_group))
        handle = _rendezvous(symm_mem, memory, name, group.process_group, group.rank, group.world, store)
        bases = [int(base) for base in handle.buffer_ptrs]
    unreachable = [rank for rank, base in enumerate(bases) if base == 0]
    if unreachable:
        raise BackendError(f"memory of ranks {unreachable} cannot be mapped into rank {group.rank}.")
    offset = memory.data_ptr() - bases[group.rank]
    if offset != 0:
        raise BackendError(
            f"symmetric memory of group {group.name!r} begins {offset} bytes behind what was mapped; this version of "
            "torch is not known to tpkernels."
        )
    if nvshmem.transport(os.environ) == "nvshmem":
        nvshmem.connect(bases, nvshmem.world_ranks(group), group.rank, memory.numel())
    return Mapping(tuple(bases), handle)


def mapped() -> int:
    """How often this process has mapped memory.

    torch names what ranks tell each other while they map memory by a count of the process, over all groups. Ranks that
    were in different groups before, say two of four, would look for each other under different names.
    """
    return _mapped


def _map_alone(symm_mem: Any, device: torch.device, name: str) -> None:
    """Count one more, as a group of one rank, which waits for nobody."""
    store: Any = vars(dist)["HashStore"]()
    alone: Any = vars(dist)["ProcessGroup"](store, 0, 1)
    memory = allocate(_LEAST, device)
    _rendezvous(symm_mem, memory, name, alone, 0, 1, store)


def _map_job(symm_mem: Any, memory: Tensor, group: Group) -> tuple[Any, list[int]]:
    """With NVSHMEM: under the name of the default group, whose ranks the group has in any order.

    A name of its own would cost a team of NVSHMEM, which has few, and memory for torch's signals that is never freed.
    """
    everyone: Any = dist.group.WORLD
    handle = vars(symm_mem)["_SymmetricMemory"].rendezvous(memory, everyone.group_name)
    bases = [int(base) for base in handle.buffer_ptrs]
    return handle, [bases[rank] for rank in nvshmem.world_ranks(group)]


def _rendezvous(
    symm_mem: Any, memory: Tensor, name: str, process_group: Any, rank: int, world: int, store: Any
) -> Any:
    global _mapped
    implementation: Any = vars(symm_mem)["_SymmetricMemory"]
    c10d: Any = vars(dist.distributed_c10d)
    c10d["_register_process_group"](name, process_group)  # torch 2.11 looks for the group, too
    implementation.set_group_info(name, rank, world, store)
    _mapped += 1
    return implementation.rendezvous(memory, name)


def backend_name() -> str:
    """Backend of symmetric memory that the environment asks for."""
    name = nvshmem.backend(os.environ)
    if name not in BACKENDS:
        raise ArgumentError(f"TPK_SYMMETRIC_BACKEND: expected one of {', '.join(BACKENDS)}, got {name!r}.")
    return name


def _module(device: torch.device) -> Any:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read at the first allocation
    wanted = backend_name()
    if wanted == "NVSHMEM":
        nvshmem.prepare(os.environ)
    import torch.distributed._symmetric_memory as symm_mem

    _select(symm_mem, wanted, device)
    return symm_mem


def _select(symm_mem: Any, wanted: str, device: torch.device) -> None:
    """Make ``wanted`` the backend of all symmetric memory of this process; torch has one."""
    current = getattr(symm_mem, "get_backend", lambda _: "CUDA")(device)
    if current == wanted:
        return
    if wanted == "NVSHMEM" and not getattr(symm_mem, "is_nvshmem_available", lambda: False)():
        raise BackendError(
            f"TPK_SYMMETRIC_BACKEND: 'NVSHMEM' was asked for, but torch {torch.__version__} has it not or does not "
            "find its library; leave the variable unset."
        )
    try:
        symm_mem.set_backend(wanted)
    except (AttributeError, RuntimeError) as error:
        raise BackendError(
            f"TPK_SYMMETRIC_BACKEND: {wanted!r} is wanted, but symmetric memory of this process uses {current!r} "
            f"({str(error).splitlines()[0]}); choose before the first use."
        ) from error
