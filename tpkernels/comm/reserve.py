"""``tpk.reserve``: the memory of path "fused", before it is needed."""

from __future__ import annotations

import torch

from tpkernels.comm import conditions, ranks, runtime, small, workspace
from tpkernels.errors import ArgumentError, BackendError
from tpkernels.ops import _groups
from tpkernels.ops._groups import GroupLike


def reserve(
    group: GroupLike = None,
    *,
    max_m: int,
    k: int = 0,
    n: int = 0,
    all_reduce_n: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | None = None,
) -> None:
    """Make the memory that path "fused" uses in a group large enough, once, for everything that will be called.

    Without it the memory grows when a call needs more: all ranks stop, and it cannot happen while a CUDA graph is
    captured. It is memory apart from torch's other tensors, and is freed with the group. Collective: every rank of the
    group calls it with the same arguments. ::

        tpk.reserve(group, max_m=8192, k=hidden, n=hidden)  # both directions of a sequence-parallel block

    Args:
        group: as in :func:`tpkernels.all_gather_matmul`.
        max_m: most rows that are gathered, or scattered, in one call, of all ranks and leading dimensions together.
        k: longest rows that ``all_gather_matmul`` gathers (backward: those of ``matmul_reduce_scatter``'s result).
        n: longest rows of what ``matmul_reduce_scatter`` scatters (backward: those of ``all_gather_matmul``'s
            operand).
        all_reduce_n: longest rows of what ``matmul_all_reduce`` sums. 0 for any of these reserves nothing of its kind;
            where one is not 0, calls of few rows have their memory too, all of them.
        dtype: the widest of operands that are gathered and of results that are scattered.
        device: this rank's GPU; None means the current one.

    With unequal shards a scatter needs more: ``max_m`` as if all of them were as long as the longest.

    Raises:
        ArgumentError: a size is not an integer, or is negative.
        BackendError: path "fused" cannot run in this group, the ranks ask for different sizes, a CUDA graph is being
            captured, or there is not as much memory.
    """
    for name, value in (("max_m", max_m), ("k", k), ("n", n), ("all_reduce_n", all_reduce_n)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ArgumentError(f"{name}: expected an integer, 0 or more, got {value!r}.")
    members = _groups.resolve(_groups.group_name_of(group))
    if members.world == 1:
        return  # nothing travels
    place = device_of("reserve", device)
    gathered = dtype if dtype in conditions.DTYPES else torch.bfloat16  # what is scattered may be float32
    types = runtime.active.device_types
    reason = conditions.call_missing(place.type, gathered, dtype, members.world, types, rows=max_m)
    if reason is not None:
        raise BackendError(f"reserve: it is for path 'fused', but {reason}.")
    sizes = {}
    if max(k, n, all_reduce_n) > 0:  # any may have few rows
        sizes["small"] = small.WORKSPACE_BYTES
    if k > 0:
        sizes["gather"] = workspace.gather_bytes(max_m, k, gathered.itemsize)
    shards = [-(-max_m // members.world)] * members.world
    if n > 0:
        sizes["scatter"] = workspace.scatter_bytes(shards, n, dtype.itemsize)
    if max_m * all_reduce_n * dtype.itemsize > small.MOST_BYTES["matmul_all_reduce"]:
        sizes["sum"] = workspace.sum_bytes(shards, all_reduce_n, dtype.itemsize)
    with runtime.active.on(place):
        ranks.require(members, place)
        workspace.reserve(members, place, sizes)


def device_of(function: str, device: torch.device | str | int | None) -> torch.device:
    """With an index, as tensors name it; ``function`` is what errors name."""
    kind = runtime.active.device_types[0]
    place = torch.device(kind) if device is None else torch.device(device)
    if place != torch.device("cuda"):
        return place
    if not torch.cuda.is_available():
        raise BackendError(f"{function}: it is for path 'fused', but this process has no CUDA device.")
    return torch.device("cuda", torch.cuda.current_device())
