"""Gathers by the schedules that only an arrival has: remainders of several shards, or chunks, cut along K in turn.

Ranks are streams of one process on one GPU, see virtual_ranks.py. How many pieces such a plan has depends on
predicted times; cmake/tests/sm90a_arrival_plan_test.cpp looks at many more.
"""

from __future__ import annotations

import pytest
import torch
from streamk_cases import CLUSTERS, HOPPER_TILES, hopper_only
from virtual_ranks import Ranks, split, whole

pytestmark = [pytest.mark.gpu1, hopper_only]

SCHEDULES = ["own_first", "every_shard", "auto"]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("tile", [t + c for t in HOPPER_TILES for c in CLUSTERS])
def test_remainders_of_several_shards(tile: str, world: int, generator: torch.Generator) -> None:
    """Up to four, each of them split: a worker writes partials, and finishes tiles, in one after the other."""
    total, k, n = 1152, 2048, 520
    ranks = Ranks(world, 5 << 20)
    for uneven in (False, True):
        rows = split(total, world, uneven)
        a, b = whole(total, k, generator=generator), whole(k, n, generator=generator)
        want = a.double() @ b.double()
        shards = [s.clone() for s in a.split(rows)]
        for schedule in SCHEDULES:
            for _ in range(3):
                ranks.poison()
                outs, gathered = ranks.gather(
                    shards, [b], tile=tile, schedule=schedule, out_dtype=torch.float32
                )
                for rank in range(world):
                    what = f"rank {rank} of {world}, {rows} rows, {schedule}"
                    assert torch.equal(outs[rank][0].double(), want), what
                    assert torch.equal(gathered[rank], a), what


@pytest.mark.parametrize("rows", [[1024, 1024], [700, 1400, 900]])
@pytest.mark.parametrize("tile", ["128x256x64/2x1", "256x128x64/1x2", "128x128x64/1x2", ""])
def test_chunks_of_shards_and_several_weights(tile: str, rows: list[int], generator: torch.Generator) -> None:
    """Shards of two and more chunks; the weights behind the first have plans of products that wait for nothing."""
    total, k = sum(rows), 8192
    ranks = Ranks(len(rows), total * k * 2)
    a = whole(total, k, generator=generator)
    bs = [whole(k, n, generator=generator) for n in (1040, 264)]
    want = [a.double() @ b.double() for b in bs]
    shards = [s.clone() for s in a.split(rows)]
    for schedule in SCHEDULES:
        ranks.poison()
        outs, _ = ranks.gather(shards, bs, tile=tile, schedule=schedule, out_dtype=torch.float32)
        for rank, products in enumerate(outs):
            for product, expected in zip(products, want, strict=True):
                assert torch.equal(product.double(), expected), f"rank {rank} of {rows}, {schedule}"


@pytest.mark.parametrize("schedule", ["own_first", "every_shard"])
def test_the_same_bits_every_time(schedule: str, generator: torch.Generator) -> None:
    """Partials are added in the order of K, whenever rows come."""
    rows = [256, 512, 384]
    ranks = Ranks(len(rows), 5 << 20)
    a = torch.randn(1152, 2048, device="cuda", dtype=torch.bfloat16, generator=generator)
    b = torch.randn(2048, 520, device="cuda", dtype=torch.bfloat16, generator=generator)
    shards = [s.clone() for s in a.split(rows)]
    first, _ = ranks.gather(shards, [b], tile="128x128x64/1x2", schedule=schedule)
    for turn in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]):
        ranks.poison()
        outs, _ = ranks.gather(shards, [b], tile="128x128x64/1x2", schedule=schedule, order=turn)
        assert all(torch.equal(out[0], want[0]) for out, want in zip(outs, first, strict=True))
