"""A gather beneath another call of path "fused": its rows travel by the copy engine, which needs no multiprocessor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tpkernels.comm import fused, runtime, workspace
from tpkernels.comm.faults import Reported, timeout_s
from tpkernels.ops._groups import Group


def fits(group: Group, x: Tensor, dim: int, sizes: Sequence[int]) -> bool:
    """Whether the memory for it is there, from a gather before, say; the same on all ranks."""
    total, k = sum(_rows(x, dim, sizes)), x.shape[-1]
    needed = workspace.gather_bytes(total, k, x.element_size())
    return x.element_size() == 2 and total * k > 0 and workspace.present(group, x.device, "gather") >= needed


@contextmanager
def gathered(group: Group, x: Tensor, dim: int, sizes: Sequence[int]) -> Iterator[Tensor]:
    """What :func:`shaped` makes the gathered tensor of, complete behind the context. Collective; see :func:`fits`."""
    device, active = x.device, runtime.active
    rows = _rows(x, dim, sizes)
    shard = fused.pushable(fused.as_rows(x, dim, rows[group.rank]))
    with Reported("all_gather", group), active.on(device), active.chained(device):
        timeout = timeout_s(group, device)
        space = workspace.ensure(
            group, device, "gather", workspace.gather_bytes(sum(rows), shard.shape[1], 2)
        )
        place = (list(rows), group.rank, list(space.addresses), timeout)
        out = shard.new_empty(sum(rows), shard.shape[1])
        active.begin_gather(shard, *place)
        try:
            yield out
        finally:
            active.end_gather(shard, out, *place)


def shaped(rows: Tensor, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The gathered rows in the shape of ``x``."""
    return fused.from_rows(rows, dim, sum(sizes), fused.inner_shape(x.shape, dim))


def _rows(x: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    others = math.prod(fused.inner_shape(x.shape, dim))
    return [size * others for size in sizes]
