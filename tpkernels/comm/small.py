"""Calls so small that latency counts: one kernel beside the product (csrc/host/all_reduce.hpp). Pure decisions.

Gather: in front of the product every rank stores its shard to all. Reduce-scatter: behind it every rank stores its rows
of each block to their owner, who sums. All-reduce: a kernel in which every rank stores its partial to all ("one-shot")
is the shortest. Where many bytes would travel, every rank sums a block and stores that to all ("two-shot"); where few
do, an epoch travels beside every 4 bytes, twice the bytes, so that nobody has to wait for a flag behind them
("packets").
"""

from __future__ import annotations

from collections.abc import Sequence

from tpkernels.comm import choice

SUM_WAYS = PACKETS, ONE_SHOT, TWO_SHOT = ("packets", "one-shot", "two-shot")
GATHER, SCATTER = "gather", "scatter"

# Of what is gathered, or of the partial, as if all shards were as long as the longest; above, the product and the copy
# engine overlap (workspace kinds "gather", "scatter", "sum").
MOST_BYTES = {choice.GATHER: 8 << 20, choice.SCATTER: 16 << 20, choice.SUM: 8 << 20}
# What a rank could send in the time that a step costs, at about 350 GB/s.
# A flag behind data, the fence before it and its way. Two H200: packets of 512 KiB take longer than one shot.
FLAG_BYTES = 256 << 10
# A second exchange of data and flags. An estimate.
EXCHANGE_BYTES = 1200 << 10

PAGE_BYTES = 16384  # these two as in csrc/host/all_reduce.hpp
PACKET_BYTES = 2 << 20
# Of an allocation: two halves of packets and slots, for every operation, size and number of ranks, so that it never
# grows. Two-shot has its sums behind the slots. 4096: blocks are whole lines.
WORKSPACE_BYTES = PAGE_BYTES + 2 * (PACKET_BYTES + (16 << 20) + 4096)


def way_of(op: str, rows: Sequence[int], row_bytes: int) -> str | None:
    """How a call is made by one kernel; None: not in this way. Depends on what is the same on all ranks alone.

    Args:
        op: of ``choice.OPS``.
        rows: of every rank's shard, of all leading dimensions; of an all-reduce, together those of the result.
        row_bytes: of what travels.
    """
    if op == choice.SUM:
        return _way_of_sum(sum(rows) * row_bytes, len(rows))
    size = len(rows) * max(rows) * row_bytes
    if not 0 < size <= MOST_BYTES[op]:
        return None
    return GATHER if op == choice.GATHER else SCATTER


def _way_of_sum(size: int, world: int) -> str | None:
    if not 0 < size <= MOST_BYTES[choice.SUM]:
        return None
    to_all = (world - 1) * size
    if to_all <= FLAG_BYTES:
        return PACKETS
    blocks = 2 * to_all // world
    return ONE_SHOT if to_all <= blocks + EXCHANGE_BYTES else TWO_SHOT


def wire_bytes(way: str, size: int, world: int) -> int:
    """Bytes that a rank receives in an all-reduce."""
    if way == TWO_SHOT:
        return 2 * (world - 1) * (-(-size // world))
    return (world - 1) * size * (2 if way == PACKETS else 1)


def describe(way: str) -> str:
    """What happens beside the product, for explain()."""
    stores = {
        PACKETS: "every rank stores its partial, an epoch beside each 4 bytes, to all, and sums",
        ONE_SHOT: "every rank stores its partial to all, and sums",
        TWO_SHOT: "every rank sums a block of what the others store to it, and stores that to all",
        GATHER: "every rank stores its shard to all",
        SCATTER: "every rank stores each block of its partial to its owner, and sums its own",
    }
    return f"{'in front of' if way == GATHER else 'behind'} the product one kernel, {way}: {stores[way]}"
