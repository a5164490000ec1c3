"""Who moves rows that leave a fused product: decisions, and what all ranks are told."""

from __future__ import annotations

import pytest
import torch

from tpkernels.comm import choice, departures
from tpkernels.comm.conditions import RankFacts, ranks_missing

MIB = 1 << 20


@pytest.mark.parametrize(
    "op,rows,row_bytes,environment,stores",
    [
        (choice.SUM, [1024, 1024], 8192, {}, True),
        (choice.SUM, [1536, 1536], 8192, {}, True),
        (choice.SUM, [1536, 1537], 8192, {}, False),
        (choice.SUM, [0, 0], 8192, {}, False),
        (choice.SUM, [1024, 1024], 8192, {"TPK_DEPARTURE": ""}, True),
        (choice.SUM, [1024, 1024], 8192, {"TPK_DEPARTURE": "auto"}, True),
        (choice.SUM, [1024, 1024], 8192, {"TPK_DEPARTURE": "copies"}, False),
        (choice.SUM, [8192, 8192], 8192, {"TPK_DEPARTURE": "stores"}, True),
        (choice.SCATTER, [1024, 1024], 8192, {}, False),
        (choice.SCATTER, [1024, 1024], 8192, {"TPK_DEPARTURE": "stores"}, True),
        (choice.SUM, [1024, 1024], 8192, {"TPK_TRANSPORT": "nvshmem"}, False),
        (choice.SUM, [1024, 1024], 8192, {"TPK_TRANSPORT": "nvshmem", "TPK_DEPARTURE": "stores"}, False),
    ],
)
def test_who_moves_rows(op, rows, row_bytes, environment, stores):
    assert departures.stores(op, rows, row_bytes, environment) is stores


def test_what_is_no_way_is_refused_on_all_ranks():
    reason = departures.missing({departures.DEPARTURE: "pigeons"})
    assert reason == "TPK_DEPARTURE: expected one of auto, copies, stores, got 'pigeons'; unset it for auto"
    assert departures.missing({}) is None and departures.missing({departures.DEPARTURE: "copies"}) is None
    told = ranks_missing([RankFacts("node", "GPU-0", {}), RankFacts("node", "GPU-1", {}, reason)])
    assert told is not None and told.startswith("rank 1 cannot: TPK_DEPARTURE: expected")


def test_plans_of_what_is_stored_have_other_chunks():
    """Two shards of 12 MiB: three chunks of 512 rows where the product stores, two of 768 where copies move them."""
    op = torch.ops.tpkernels.streamk_plan
    size = {
        "collective": "matmul_all_reduce",
        "shard_rows": [1536, 1536],
        "rank": 0,
        "tile": "192x192x64/1x1",
    }
    copied, stored = (op(1, 3072, 4096, 2048, "sm90", **size, stored=way)[1][3] for way in (False, True))
    columns = -(-4096 // 192)
    assert copied == 2 * 2 * 4 * columns  # rows of tiles begin anew with every chunk
    assert stored == 2 * 3 * 3 * columns
