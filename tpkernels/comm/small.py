"""All-reduces so small that latency counts: one kernel behind the product (csrc/host/all_reduce.hpp). Pure decisions.

A kernel in which every rank stores its partial to all ("one-shot") is the shortest. Where many bytes would travel,
every rank sums a block and stores that to all ("two-shot"); where few do, an epoch travels beside every 4 bytes, twice
the bytes, so that nobody has to wait for a flag behind them ("packets").
"""

from __future__ import annotations

PACKETS, ONE_SHOT, TWO_SHOT = WAYS = ("packets", "one-shot", "two-shot")

MOST_BYTES = 8 << 20  # of a result; above, the product and the copy engine overlap (workspace kind "sum")
# What a rank could send in the time that a step costs, at about 350 GB/s.
# A flag behind data, the fence before it and its way. Two H200: packets of 512 KiB take longer than one shot.
FLAG_BYTES = 256 << 10
# A second exchange of data and flags. An estimate.
EXCHANGE_BYTES = 1200 << 10

PAGE_BYTES = 16384  # these two as in csrc/host/all_reduce.hpp
PACKET_BYTES = 2 << 20
# Of an allocation: two halves of packets and slots, for every size and number of ranks, so that it never grows.
# 4096: parts of a result are whole lines.
WORKSPACE_BYTES = PAGE_BYTES + 2 * (PACKET_BYTES + 2 * MOST_BYTES + 4096)


def way_of(size: int, world: int) -> str | None:
    """How ``size`` bytes are summed over ``world`` ranks; None: not in this way. Depends on these two alone."""
    if not 0 < size <= MOST_BYTES:
        return None
    to_all = (world - 1) * size
    if to_all <= FLAG_BYTES:
        return PACKETS
    blocks = 2 * to_all // world
    return ONE_SHOT if to_all <= blocks + EXCHANGE_BYTES else TWO_SHOT


def wire_bytes(way: str, size: int, world: int) -> int:
    """Bytes that a rank receives."""
    if way == TWO_SHOT:
        return 2 * (world - 1) * (-(-size // world))
    return (world - 1) * size * (2 if way == PACKETS else 1)


def describe(way: str) -> str:
    """What happens behind the product, for explain()."""
    stores = {
        PACKETS: "every rank stores its partial, an epoch beside each 4 bytes, to all, and sums",
        ONE_SHOT: "every rank stores its partial to all, and sums",
        TWO_SHOT: "every rank sums a block of what the others store to it, and stores that to all",
    }
    return f"behind the product one kernel, {way}: {stores[way]}"
