"""A gather beneath another call of path "fused": its rows travel by the copy engine, which needs no multiprocessor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from tpkernels.comm import fused, runtime, workspace
from tpkernels.comm.faults import Reported, timeout_s
from tpkernels.comm.gathered import Gathered, Use
from tpkernels.ops._groups import Group


def fits(group: Group, x: Tensor, dim: int, sizes: Sequence[int]) -> bool:
    """Whether the memory for it is there, from a gather before, say; the same on all ranks."""
    total, k = sum(_rows(x, dim, sizes)), x.shape[-1]
    needed = workspace.gather_bytes(total, k, x.element_size())
    return x.element_size() == 2 and total * k > 0 and workspace.present(group, x.device, "gather") >= needed


@contextmanager
def gathered(group: Group, x: Tensor, dim: int, sizes: Sequence[int], use: Use) -> Iterator[None]:
    """At its end all rows are here, and ``use`` is called with them. Collective; see :func:`fits`."""
    device, active = x.device, runtime.active
    rows, k = _rows(x, dim, sizes), x.shape[-1]
    total = sum(rows)
    shard = fused.pushable(fused.as_rows(x, dim, rows[group.rank]))
    with Reported("all_gather", group), active.on(device), active.chained(device):
        timeout = timeout_s(group, device)
        space = workspace.ensure(group, device, "gather", workspace.gather_bytes(total, k, 2))
        place = (list(rows), group.rank, list(space.addresses), timeout)
        active.begin_gather(shard, *place)
        try:
            yield
        finally:
            active.end_gather(shard, *place)
        here = workspace.gathered_rows(space, total, k, x.dtype)
        use(Gathered(here, partial(fused.as_rows, dim=dim, rows=total)))


def _rows(x: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    others = math.prod(fused.inner_shape(x.shape, dim))
    return [size * others for size in sizes]
