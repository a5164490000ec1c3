"""Who moves rows that leave a product on path "fused" (docs/overlap.md). Pure.

Copies: tiles are stored in this rank's memory, and a copy engine sends them, block by block, while the next ones are
multiplied. Stores: the product stores its tiles in the memory of whoever waits for them. Nothing stands between a tile
and its owner then, but multiprocessors have to wait for the link, so that this is for what travels for a short time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpkernels.comm import choice, nvshmem

DEPARTURE = "TPK_DEPARTURE"
COPIES, STORES = WAYS = ("copies", "stores")

# Of the result, up to which products store. Two H200: bench/results/2026-11-30_h200x2_departures.json.
MOST_BYTES = {choice.SCATTER: 0, choice.SUM: 24 << 20}


def asked(environment: Mapping[str, str]) -> str:
    """What ``TPK_DEPARTURE`` asks for: "auto", "copies" or "stores"."""
    return environment.get(DEPARTURE) or "auto"


def missing(environment: Mapping[str, str]) -> str | None:
    """Why a rank cannot take part, in words that follow "it cannot"; all ranks are told."""
    way = asked(environment)
    if way in (*WAYS, "auto"):
        return None
    return f"{DEPARTURE}: expected one of auto, {', '.join(WAYS)}, got {way!r}; unset it for auto"


def stores(op: str, rows: Sequence[int], row_bytes: int, environment: Mapping[str, str]) -> bool:
    """Whether the product stores tiles in other ranks' memory. From what is the same on all ranks.

    Args:
        op: a reduce-scatter or an all-reduce of ``choice.OPS``.
        rows: of every rank's shard.
        row_bytes: of the result.
        environment: of the process; ranks compare what it says about this.
    """
    if nvshmem.transport(environment) != "copy":
        return False  # its kernels carry all rows
    way = asked(environment)
    return way == STORES or (way == "auto" and 0 < sum(rows) * row_bytes <= MOST_BYTES[op])
