"""torch's symmetric memory: its fused operations and its all-reduces, and buffers that peers can write.

Operations on NVLink multicast (``multimem_*``) are left out: a fault in one can take down every GPU of the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..suite import Runnable, Skip
from ..suites.overlap_problem import fill_nan
from ..suites.overlap_shapes import AG

if TYPE_CHECKING:
    from ..suites.overlap_problem import Problem

__all__ = ["Symmetric", "enable", "prepare", "symmetric"]


@dataclass(frozen=True)
class Symmetric:
    """An allocation of every rank: ``of_rank[r]`` is rank r's, flat, mapped here. It lives as long as this object."""

    local: Tensor
    of_rank: Sequence[Tensor]
    handle: Any


def enable(group: dist.ProcessGroup) -> str:
    """Make a group usable by ``torch.ops.symm_mem``, for torch versions that ask for it; returns its name."""
    import torch.distributed._symmetric_memory as symm_mem

    name: str = group.group_name
    register = getattr(symm_mem, "enable_symm_mem_for_group", None)
    if register is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated where it is no longer needed
            register(name)
    return name


def symmetric(group: dist.ProcessGroup, size: int, dtype: torch.dtype, device: torch.device) -> Symmetric:
    """Allocate ``size`` elements of symmetric memory and map the peers'. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    enable(group)
    local = symm_mem.empty(size, dtype=dtype, device=device)
    handle = symm_mem.rendezvous(local, group)
    of_rank = [
        local if rank == group.rank() else handle.get_buffer(rank, (size,), dtype)
        for rank in range(group.size())
    ]
    return Symmetric(local, of_rank, handle)


def prepare(problem: Problem, variant: str) -> Runnable:
    """Collective."""
    if variant == "symm_mem":
        return _fused(problem)
    return _all_reduce(problem, one_shot=variant == "symm_mem:one_shot")


def _fused(p: Problem) -> Runnable:
    """The result is allocated in the call; the workspace for the peers grows in the first one, before any capture."""
    ops, name = torch.ops.symm_mem, enable(p.group)
    outputs: list[Tensor | None] = [None] * p.copies

    def launch(i: int) -> None:
        i %= p.copies
        if p.op == AG:
            outputs[i] = ops.fused_all_gather_matmul(p.x[i], [p.w[i].t()], 0, name, return_A=False)[1][0]
        else:
            outputs[i] = ops.fused_matmul_reduce_scatter(p.x[i], p.w[i].t(), "sum", 0, name)

    launch(0)
    return Runnable(launch, p.copies, check=lambda: p.check(outputs), poison=fill_nan(outputs))


def _all_reduce(p: Problem, *, one_shot: bool) -> Runnable:
    if p.dtype not in (torch.bfloat16, torch.float32):
        raise Skip(f"torch's symmetric-memory all-reduces take bfloat16 and float32, not {p.dtype}.")
    if p.m * p.n * p.dtype.itemsize % 4:
        raise Skip("torch's symmetric-memory all-reduces take multiples of four bytes.")
    ops, name = torch.ops.symm_mem, enable(p.group)
    # One allocation per buffer set: not every version finds a buffer by an address inside it.
    memory = [symmetric(p.group, p.m * p.n, p.dtype, p.context.device) for _ in range(p.copies)]
    partial = [each.local.view(p.m, p.n) for each in memory]
    out = p.outputs() if one_shot else partial

    def launch(i: int) -> None:
        i %= p.copies
        torch.mm(p.x[i], p.w[i].t(), out=partial[i])
        if one_shot:
            ops.one_shot_all_reduce_out(partial[i], "sum", name, out[i])
        else:
            ops.two_shot_all_reduce_(partial[i], "sum", name)

    # Both operations begin and end with a barrier between the ranks, so nobody reads or writes a buffer meanwhile.
    launch(0)
    return Runnable(
        launch,
        p.copies,
        check=lambda: p.check(out),
        poison=fill_nan(partial, out),
        close=memory.clear,
    )
