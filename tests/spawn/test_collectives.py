"""The collectives below the operations on gloo ranks, bit for bit; the checks are in tests/collective_checks.py."""

from __future__ import annotations

import collective_checks
import pytest
import torch
import torch.distributed as dist
from op_checks import on_device

from tpkernels.ops import _collectives

CHECKS = [
    collective_checks.check_reduce_scatter,
    collective_checks.check_all_reduce,
    collective_checks.check_all_gather,
]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("check", CHECKS)
def test_bits(ranks, seed, check, dtype, world):
    ranks.run(on_device, check, dtype, seed, world=world)


def _all_to_all(into, to, group):
    """Of lists, which gloo does not have."""
    rank, works = group.rank(), []
    assert all(x.is_contiguous() for x in (*into, *to))
    for peer in range(group.size()):
        if peer == rank:
            into[peer].copy_(to[peer])
            continue
        where = dist.get_global_rank(group, peer)
        works.append(dist.isend(to[peer].clone(), where, group=group))
        works.append(dist.irecv(into[peer], where, group=group))
    for work in works:
        work.wait()


def _as_nccl(ctx, check, *args):
    usual = _collectives.transport_of, dist.all_to_all
    _collectives.transport_of, dist.all_to_all = (lambda *_: "nccl"), _all_to_all
    try:
        check(ctx, *args)
    finally:
        _collectives.transport_of, dist.all_to_all = usual


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_bits_where_nccl_carries(ranks, seed, check, world):
    """Where what stays on a rank does not travel, and shards of unequal size need no padding."""
    ranks.run(on_device, _as_nccl, check, torch.bfloat16, seed, world=world)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("count", [1, 7, 8, 1000, 128, 100_003])
def test_blocks_of_an_all_reduce(count, world):
    sizes = _collectives.block_sizes(count, world)
    assert len(sizes) == world and sum(sizes) == count and min(sizes) >= 0
    ends = [sum(sizes[: rank + 1]) for rank in range(world)]
    assert all(end % 8 == 0 or end == count for end in ends), "blocks begin at units of 16 bytes"
    assert max(sizes) < count / world + 8
