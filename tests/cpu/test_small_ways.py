"""Which calls are small, by which way they go, and that the memory is enough: tpkernels/comm/small.py."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tpkernels.comm import choice, conditions, small
from tpkernels.comm.choice import GATHER, SCATTER, SUM

HEADER = (Path(__file__).parents[2] / "csrc/host/all_reduce.hpp").read_text()
WORLDS = range(2, conditions.MAX_RANKS + 1)


def sizes(op: str) -> list[int]:
    draw, most = random.Random(len(op)), small.MOST_BYTES[op]
    some = [draw.randrange(1, 1 << draw.randrange(1, 25)) for _ in range(2000)]
    return sorted({1, most, *(size for size in some if size <= most)})


def way_of_sum(size: int, world: int) -> str | None:
    return small.way_of(SUM, [size] + [0] * (world - 1), 1)


def test_constants_of_the_header():
    assert re.search(rf"kBytes = {small.PAGE_BYTES};", HEADER)
    assert re.search(r"kPacketBytes = 2 << 20;", HEADER) and small.PACKET_BYTES == 2 << 20
    assert "enum class Way : int32_t { kPackets, kOneShot, kTwoShot, kGather, kScatter };" in HEADER


def needed(way: str, size: int, world: int) -> int:
    """Of a half: Call::fits() of the header, in other words. ``size``: of all shards; the longest counts for each."""
    units = -(-size // 16)
    if way == small.PACKETS:
        assert world * 2 * units * 16 <= small.PACKET_BYTES
        return small.PACKET_BYTES
    block = -(-units // (world * 8)) * 8 * 16  # whole lines
    slots = world * (units * 16 if way == small.ONE_SHOT else block)
    return small.PACKET_BYTES + slots + (units * 16 if way == small.TWO_SHOT else 0)


@pytest.mark.parametrize("op", choice.OPS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_call_fits(world, op):
    half = (small.WORKSPACE_BYTES - small.PAGE_BYTES) // 2 // 128 * 128
    for size in sizes(op):
        way = way_of_sum(size, world) if op == SUM else small.way_of(op, [size // world] * world, 1)
        if op != SUM and size < world:
            assert way is None
            continue
        assert way is not None and needed(way, size, world) <= half, (size, way)


@pytest.mark.parametrize("world", WORLDS)
def test_ways_follow_one_another(world):
    """With growing sizes: packets, one-shot, two-shot; never back. Two ranks have nothing to share in two steps."""
    order = [small.SUM_WAYS.index(way_of_sum(size, world)) for size in sizes(SUM)]
    assert order == sorted(order)
    assert set(order) == ({0, 1} if world == 2 else {0, 1, 2})


def test_what_is_not_small():
    for size in (0, small.MOST_BYTES[SUM] + 1):
        assert way_of_sum(size, 4) is None
    # A decoding step of Llama 70B on 4 GPUs: one row, 64 rows, 256 rows of 8192 in 16 bits.
    assert [way_of_sum(m * 16384, 4) for m in (1, 16, 64, 256, 1024)] == [
        "packets",
        "one-shot",
        "two-shot",
        "two-shot",
        None,
    ]


@pytest.mark.parametrize("op, way, rows", [(GATHER, "gather", 512), (SCATTER, "scatter", 1024)])
def test_shards_count_as_much_as_the_longest(op, way, rows):
    assert small.way_of(op, [rows // 4] * 4, 16384) == way
    assert small.way_of(op, [rows // 4, 0, 1, 0], 16384) == way
    assert small.way_of(op, [rows // 4 + 1, 0, 0, 0], 16384) is None
    assert small.way_of(op, [0] * 4, 16384) is None and small.way_of(op, [1] * 4, 0) is None


def test_bytes_received():
    assert small.wire_bytes(small.PACKETS, 100, 4) == 600
    assert small.wire_bytes(small.ONE_SHOT, 100, 4) == 300
    assert small.wire_bytes(small.TWO_SHOT, 100, 4) == 150
    ways = (*small.SUM_WAYS, small.GATHER, small.SCATTER)
    assert all(way in small.describe(way) for way in ways)
