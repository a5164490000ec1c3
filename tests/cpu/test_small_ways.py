"""By which way small all-reduces are summed, and that the memory is enough: tpkernels/comm/small.py."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tpkernels.comm import conditions, small

HEADER = (Path(__file__).parents[2] / "csrc/host/all_reduce.hpp").read_text()
WORLDS = range(2, conditions.MAX_RANKS + 1)


def sizes(world: int) -> list[int]:
    draw = random.Random(world)
    some = [draw.randrange(1, 1 << draw.randrange(1, 24)) for _ in range(2000)]
    return sorted({1, small.MOST_BYTES, *(size for size in some if size <= small.MOST_BYTES)})


def test_constants_of_the_header():
    assert re.search(rf"kBytes = {small.PAGE_BYTES};", HEADER)
    assert re.search(r"kPacketBytes = 2 << 20;", HEADER) and small.PACKET_BYTES == 2 << 20
    assert re.search(r"enum class Way : int32_t { kPackets, kOneShot, kTwoShot };", HEADER)


def needed(way: str, size: int, world: int) -> int:
    """Of a half: Call::fits() of the header, in other words."""
    units = -(-size // 16)
    if way == small.PACKETS:
        assert world * 2 * units * 16 <= small.PACKET_BYTES
        return small.PACKET_BYTES
    block = -(-units // (world * 8)) * 8 * 16  # whole lines
    slots = world * (block if way == small.TWO_SHOT else units * 16)
    return small.PACKET_BYTES + slots + (units * 16 if way == small.TWO_SHOT else 0)


@pytest.mark.parametrize("world", WORLDS)
def test_every_call_fits(world):
    half = (small.WORKSPACE_BYTES - small.PAGE_BYTES) // 2 // 128 * 128
    for size in sizes(world):
        way = small.way_of(size, world)
        assert way is not None and needed(way, size, world) <= half, (size, way)


@pytest.mark.parametrize("world", WORLDS)
def test_ways_follow_one_another(world):
    """With growing sizes: packets, one-shot, two-shot; never back. Two ranks have nothing to share in two steps."""
    order = [small.WAYS.index(small.way_of(size, world)) for size in sizes(world)]
    assert order == sorted(order)
    assert set(order) == ({0, 1} if world == 2 else {0, 1, 2})


def test_what_is_not_small():
    for size in (0, small.MOST_BYTES + 1):
        assert small.way_of(size, 4) is None
    # A decoding step of Llama 70B on 4 GPUs: one row, 64 rows, 256 rows of 8192 in 16 bits.
    assert [small.way_of(m * 16384, 4) for m in (1, 16, 64, 256, 1024)] == [
        "packets",
        "one-shot",
        "two-shot",
        "two-shot",
        None,
    ]


def test_bytes_received():
    assert small.wire_bytes(small.PACKETS, 100, 4) == 600
    assert small.wire_bytes(small.ONE_SHOT, 100, 4) == 300
    assert small.wire_bytes(small.TWO_SHOT, 100, 4) == 150
    assert all(way in small.describe(way) for way in small.WAYS)
