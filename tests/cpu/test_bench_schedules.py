"""The model of the best schedule: its limits, what bounds it, and the numbers of another model of the same."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import links, schedules
from bench.links import COSTS, MEASURED, links_of
from bench.records import Results, Row, load
from bench.report.analysis import by_card
from bench.schedules import CUTS, SCHEDULES, Costs, Link, Op, Tiles, alone_us, best, fused_us
from tpkernels import _host

RESULTS = Path(__file__).parents[2] / "bench/results"
FAST = Link(rate=1e15, copy=0, start=0, seen=0)
SLOW = Link(rate=3e5, copy=5, start=2, seen=3, add=2.5)


def shard_bytes(op: str, world: int, m: int, n: int, k: int) -> int:
    return -(-m // world) * (k if op == "gather" else n) * 2


# Times of the schedules that another program, written before this one and on its own, gives for the same: iterations of
# 0.69 us, 1.5 us each for an epilogue, a partial written and one added; one copy of a shard, 357 GB/s, 5 us a copy;
# 6 us until a shard can be read, in a scatter 6 on both sides of a copy, and 2.6 us to add a tile. "own first" is for
# gathers.
OTHER_COSTS = Costs(0.69, 1.5, 1.5, 1.5)
OTHER_LINKS = {"gather": Link(357e3, 5.0, 6.0, 0.0), "scatter": Link(357e3, 5.0, 6.0, 6.0, 2.6)}
OTHER: list[tuple[tuple[Any, ...], tuple[float, ...]]] = [
    # gpt3 M8192
    (("gather", 8, 8192, 6144, 12288), (1607.76, 2096.91, 1643.95, 1563.15, 1575.15, 1651.57, 1593.6)),
    (("scatter", 8, 8192, 12288, 6144), (1643.96, 2139.8, 1599.35, 1599.35, 1609.04, 1623.8)),
    # llama70b M8192
    (("gather", 8, 8192, 3584, 8192), (648.91, 982.39, 722.41, 670.42, 646.39, 680.92, 649.68)),
    (("scatter", 8, 8192, 8192, 3584), (660.44, 1020.78, 668.67, 644.81, 679.74, 667.88)),
    # llama70b M2048
    (("gather", 8, 2048, 3584, 8192), (235.89, 278.97, 278.97, 230.23, 228.34, 201.79, 238.56)),
    (("scatter", 8, 2048, 8192, 3584), (207.51, 306.86, 226.58, 239.87, 216.75, 229.86)),
    # llama8b M8192
    (("gather", 4, 8192, 1792, 4096), (207.65, 320.72, 216.73, 229.4, 237.8, 205.94, 218.92)),
    (("scatter", 4, 8192, 4096, 1792), (217.43, 341.21, 237.11, 217.43, 219.74, 222.05)),
    # llama70b qkv M8192
    (("gather", 4, 8192, 1280, 8192), (392.79, 524.37, 425.38, 434.55, 381.42, 362.79, 374.79)),
    (("scatter", 4, 8192, 8192, 1280), (377.97, 558.36, 390.06, 377.97, 379.59, 382.59)),
    # gpt3 M1024
    (("gather", 2, 1024, 6144, 12288), (267.96, 244.76, 244.76, 247.76, 205.2, 223.2, 289.2)),
    (("scatter", 2, 1024, 12288, 6144), (205.82, 255.55, 203.3, 255.55, 219.8, 255.8)),
]


@pytest.mark.parametrize(("case", "times"), OTHER, ids=[" ".join(map(str, case)) for case, _ in OTHER])
def test_the_same_numbers_as_another_model(case, times):
    op, world, m, n, k = case
    tiles, size = Tiles.of(world, m, n, k), shard_bytes(*case)
    named = [s for s in SCHEDULES if op == "gather" or s != "own first"]
    found = [fused_us(op, tiles, size, OTHER_COSTS, OTHER_LINKS[op], s, 1) for s in named]
    assert found == pytest.approx(times, abs=0.006)


def cases(count: int, seed: int) -> list[tuple[Tiles, float, float, Link]]:
    """Random: tiles, bytes of a shard, time of the product, link."""
    draw = random.Random(seed)
    return [
        (
            Tiles(draw.randint(2, 8), draw.randint(1, 12), draw.randint(1, 30), draw.randint(1, 200)),
            draw.uniform(1e4, 5e7),
            draw.uniform(5, 2000),
            Link(
                draw.uniform(1e5, 5e5),
                draw.uniform(0, 8),
                draw.uniform(0, 4),
                draw.uniform(0, 4),
                draw.uniform(0, 4),
            ),
        )
        for _ in range(count)
    ]


def link_us(op: Op, tiles: Tiles, size: float, link: Link) -> float:
    """What travels alone, in one copy a shard, the last sum added."""
    once = link.start + (tiles.world - 1) * (link.copy + size / link.rate) + link.seen
    return {
        "gather": once,
        "scatter": once + (tiles.world - 1) * link.add,
        "sums": 2 * once + (tiles.world - 1) * link.add,
    }[op]


@pytest.mark.parametrize("op", ["gather", "scatter", "sums"])
def test_without_a_link_the_product_is_left(op):
    for tiles, size, product, _ in cases(6, seed=1):
        assert best(op, tiles, size, product, COSTS, FAST).us == pytest.approx(product)


@pytest.mark.parametrize("op", ["gather", "scatter", "sums"])
def test_without_a_product_the_link_is_left(op):
    for tiles, size, _, link in cases(6, seed=2):
        found = best(op, tiles, size, 0.0, COSTS, link, cuts=(1,))
        assert found.us == pytest.approx(link_us(op, tiles, size, link))


def test_a_link_that_is_slower_than_the_product_leaves_the_last_tiles():
    """Three shards of one wave each: two shards land, one after the other, and then the last wave is computed."""
    tiles = Tiles(world=3, rows=11, columns=12, depth=10)
    wave = 10 * COSTS.iteration + COSTS.epilogue
    size = 1e3 * SLOW.rate
    landed = 2 + 2 * (5 + 1000) + 3
    assert fused_us("gather", tiles, size, COSTS, SLOW, "waves", 1) == pytest.approx(landed + wave)
    # In 11 copies the last row of 12 tiles is all that is left, and more copies cost more.
    cut = landed + 2 * 10 * 5 + wave
    assert fused_us("gather", tiles, size, COSTS, SLOW, "waves", 11) == pytest.approx(cut)
    # The first copy leaves behind the first wave, the last sum is added behind the last copy.
    scatter = wave + 2 + 2 * (5 + 1000) + 3 + 2 * 2.5
    assert fused_us("scatter", tiles, size, COSTS, SLOW, "waves", 1) == pytest.approx(scatter)
    sums = scatter + 2 + 2 * (5 + 1000) + 3
    assert fused_us("sums", tiles, size, COSTS, SLOW, "waves", 1) == pytest.approx(sums)


def test_in_turn_sums_leave_while_later_ones_are_computed():
    """Three ranks, three copies of one wave each, which take 3/4 of a wave to send."""
    tiles = Tiles(world=3, rows=33, columns=12, depth=10)
    wave = 10 * COSTS.iteration + COSTS.epilogue
    link = Link(rate=1.0, copy=0, start=0, seen=0)
    # Shard by shard: the others' are sent by 6.75 waves, own sums are there at 7, 8 and 9, and take 1.5 each.
    by_shard = fused_us("sums", tiles, 3 * 0.75 * wave, COSTS, link, "waves", 3)
    assert by_shard == pytest.approx(11.5 * wave)
    # In turn: own sums are there at 5, 8 and 9; the others' third ones are sent from 6.5 to 8.
    in_turn = fused_us("sums", tiles, 3 * 0.75 * wave, COSTS, link, "waves", 3, in_turn=True)
    assert in_turn == pytest.approx(11 * wave)
    assert best("sums", tiles, 3 * 0.75 * wave, 9 * wave, COSTS, link, cuts=(3,)).us <= in_turn * (1 + 1e-12)


@pytest.mark.parametrize("op", ["gather", "scatter", "sums"])
def test_between_the_longer_of_the_two_and_both_in_sequence(op):
    for tiles, size, product, link in cases(12, seed=3):
        found = best(op, tiles, size, product, COSTS, link)
        times = 2 if op == "sums" else 1
        assert found.us >= product * (1 - 1e-12)
        assert found.us >= times * (tiles.world - 1) * size / link.rate
        assert found.us <= (product + link_us(op, tiles, size, link)) * (1 + 1e-12)
        assert found.schedule in SCHEDULES and found.copies in {min(c, tiles.rows) for c in CUTS}


@pytest.mark.parametrize("op", ["gather", "scatter", "sums"])
def test_monotone(op):
    for tiles, size, product, link in cases(10, seed=4):
        least = best(op, tiles, size, product, COSTS, link).us * (1 - 1e-12)
        more = [
            (size * 1.2, product, link),
            (size, product * 1.2, link),
            *(
                (size, product, dataclasses.replace(link, **{name: getattr(link, name) + 1}))
                for name in ("copy", "start")
            ),
            (size, product, dataclasses.replace(link, seen=link.seen + 1, add=link.add + 1)),
            (size, product, dataclasses.replace(link, rate=link.rate / 1.2)),
        ]
        for a, b, c in more:
            assert best(op, tiles, a, b, COSTS, c).us >= least
        assert best(op, tiles, size, product, COSTS, link, cuts=(1,)).us >= least


def test_only_the_ratios_of_the_costs_count():
    for tiles, size, product, link in cases(4, seed=5):
        one = best("gather", tiles, size, product, COSTS, link)
        other = best("gather", tiles, size, product, COSTS.times(7.0), link)
        assert other.us == pytest.approx(one.us) and other.schedule == one.schedule


@given(st.integers(2, 8), st.integers(1, 9), st.integers(1, 40), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_every_iteration_is_done_once(world, rows, columns, depth):
    tiles = Tiles(world, rows, columns, depth)
    for schedule in SCHEDULES:
        done: Counter[int] = Counter()
        spans: dict[int, list[tuple[int, int]]] = {}
        for segments in schedules._segments(schedule, tiles):
            for tile, begin, end in segments:
                assert 0 <= begin < end <= depth
                done[tile] += end - begin
                spans.setdefault(tile, []).append((begin, end))
        assert done == Counter(dict.fromkeys(range(tiles.count), depth)), schedule
        for of_tile in spans.values():  # end to end
            ends = sorted(of_tile)
            assert [a for _, a in ends[:-1]] == [b for b, _ in ends[1:]]


def test_nothing_is_faster_alone_than_evenly_filled_workers():
    for tiles, *_ in cases(10, seed=6):
        evenly = tiles.count * (tiles.depth * COSTS.iteration + COSTS.epilogue) / schedules.WORKERS
        waves = -(-tiles.count // schedules.WORKERS) * (tiles.depth * COSTS.iteration + COSTS.epilogue)
        assert evenly * (1 - 1e-12) <= alone_us(tiles, COSTS) <= waves * (1 + 1e-12)


def test_tiles_of_shards_that_do_not_come_out_even():
    assert Tiles.of(4, 8192, 1280, 8192) == Tiles(4, 16, 5, 128)
    tiles = Tiles.of(3, 1153, 257, 65)  # shards of 385 rows
    assert tiles == Tiles(3, 4, 2, 2)
    assert best("scatter", tiles, 385 * 257 * 2, 20.0, COSTS, SLOW).copies in (1, 2, 4)


# --- constants -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "name"),
    [(("NVIDIA H200", 2), "2026-11-28_h200x2"), (("NVIDIA H100 80GB HBM3", 4), "2026-11-28_h100x4")],
)
def test_constants_are_those_of_the_results(key, name):
    found = links_of(load(RESULTS / f"{name}.jsonl"))[key[1]]
    assert dataclasses.replace(found, source="") == dataclasses.replace(MEASURED[key], source="")
    assert found.source == "these GPUs"  # their own rows, not the table


def test_constants_where_nothing_was_measured_of_four_h200():
    four, two, h100 = (
        MEASURED[key] for key in (("NVIDIA H200", 4), ("NVIDIA H200", 2), ("NVIDIA H100 80GB HBM3", 4))
    )
    assert dataclasses.replace(four, hbm_gbps=0, source="") == dataclasses.replace(
        h100, hbm_gbps=0, source=""
    )
    assert four.hbm_gbps == two.hbm_gbps and "H100" in four.source
    # What makes them comparable: where both were measured, copies to one peer are alike.
    assert four.copy_engine_gbps == pytest.approx(two.copy_engine_gbps, rel=0.01)


def test_units_of_a_link():
    link = MEASURED["NVIDIA H200", 2].link
    assert (link.rate, link.copy) == (pytest.approx(379840.4), pytest.approx(2.6347 + 2.2687))
    assert link.start == link.seen == pytest.approx(3.0491 / 2)
    assert link.add == pytest.approx(64 * 1024 * 132 / 4010.33e3)


def test_costs_are_those_of_the_kernel():
    cost = _host.hopper_cost()
    wanted = (
        cost["iter_us 128x256x64/2x1"],
        cost["epilogue_us 128x256x64"],
        cost["publish_us"],
        cost["add_us"],
    )
    assert dataclasses.astuple(COSTS) == wanted


def test_who_has_constants():
    h200 = load(RESULTS / "2026-11-28_h200x4_fused.jsonl")
    (part,) = by_card(h200).values()
    assert links_of(part)[4] == MEASURED["NVIDIA H200", 4]
    own = load(RESULTS / "2026-11-28_h200x2.jsonl")
    foreign = [dataclasses.replace(h, env={**h.env, "gpu": "another"}) for h in own.headers]
    assert links_of(Results(foreign, own.rows)) == {}  # its product is not known
    unknown = Results(
        [dataclasses.replace(h, env={**h.env, "gpu": "another"}) for h in h200.headers], h200.rows
    )
    assert links_of(unknown) == {} == links_of(Results())
    broken = Row("link", "constants", "constants", "fit", "ceiling", world=4, extra={"copy_engine_gbps": 1.0})
    assert links_of(Results(h200.headers, [*h200.rows, broken])) == links_of(h200)
    assert links.COSTS is COSTS
