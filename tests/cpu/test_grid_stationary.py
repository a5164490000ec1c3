"""Methods whose results stay: each product once, by whole blocks, in one launch a pass where there are few enough."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from tpkernels.grids import (
    Grid,
    Method,
    Pass,
    Sizes,
    backward,
    column_parallel,
    data_parallel,
    forward,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    spatial_temporal,
    stationary,
    summa,
    three_d,
)
from tpkernels.grids.one_launch import one_launch_missing, owners

KINDS = {
    "2-D": lambda q: summa(grid_2d(q * q)),
    "2.5-D, depth 2": lambda q: summa(grid_2p5d(2 * q * q, 2)),
    "spatial-temporal": lambda q: spatial_temporal(Grid(("row", "column"), (q, q))),
    "2 x 2-D": lambda q: data_parallel(summa(grid_2d(q * q)), 2),
}
Q = range(1, 9)


def made(kind: str, q: int) -> Method:
    method = stationary(KINDS[kind](q))
    assert method is not None
    return method


@pytest.mark.parametrize("q", Q)
@pytest.mark.parametrize("kind", KINDS)
def test_each_product_is_made_once_and_no_result_moves(kind: str, q: int) -> None:
    method = made(kind, q)
    assert method.steps == q
    for each in Pass:
        works = [work for step in range(q) for work in method.spans(each, step)]
        parts = [math.lcm(*(work[d].parts for work in works)) for d in range(3)]
        done = np.zeros(parts, dtype=int)
        for work in works:
            done[tuple(slice(*span.elements(n)) for span, n in zip(work, parts, strict=True))] += 1
        assert (done == 1).all()
        places = {tuple(b[:2] for b in method.layout(each, each.result, step).blocks) for step in range(q)}
        assert places == {tuple(b[:2] for b in method.home(each.result).blocks)}


@pytest.mark.parametrize("q", range(1, 5))
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_come_from_their_owners(kind: str, q: int) -> None:
    """The tables of a launch: whom they name has the block; as many travel as the programs' messages."""
    method = made(kind, q)
    sizes = Sizes(*(6 * n for n in method.cuts))
    sent = Counter[str]()
    for each in Pass:
        table = owners(method, each)
        for operand, owner in ((each.left, table.left), (each.right, table.right)):
            home, share = method.home(operand), Counter[int]()
            for step in range(q):
                layout = method.layout(each, operand, step)
                for position, block in enumerate(layout.blocks):
                    there = home.block(owner[position][step])
                    assert block is not None and there[:2] == block[:2]
                    if owner[position][step] != position:
                        rows, columns = block.shape(*sizes.of(operand))
                        sent[each.name] += rows * columns
                        share[owner[position][step]] += 1
            # No rank sends, or takes, much more than another.
            counts = [share[p] for p in range(method.grid.world)]
            assert max(counts) - min(counts) <= q
            taken = [sum(o != p for o in owner[p]) for p in range(method.grid.world)]
            assert set(taken) <= {q - 1, q}
    assert sent["FORWARD"] == forward(method).sent_elements(sizes)
    alone = backward(method, weight_grad=False)
    assert sent["INPUT_GRAD"] == alone.sent_elements(sizes)


@pytest.mark.parametrize("q", range(2, 6))
def test_steps_that_need_least_come_first(q: int) -> None:
    method = made("2-D", q)
    for each in Pass:
        table = owners(method, each)
        for position in range(q * q):
            foreign = [
                (table.left[position][step] != position) + (table.right[position][step] != position)
                for step in range(q)
            ]
            assert foreign == sorted(foreign)


def test_fewer_bytes_than_rings() -> None:
    """Straight from home, the spatial-temporal blocks need no way in and no way out."""
    sizes = Sizes(16384, 12288, 49152)
    for world in (4, 16):
        rings = spatial_temporal(Grid(("row", "column"), (math.isqrt(world),) * 2))
        still = stationary(rings)
        assert still is not None
        there = {operand: held.layout for operand, held in forward(rings).outputs.items() if operand == "X"}
        around = forward(rings).sent_elements(sizes) + backward(rings, held=there).sent_elements(sizes)
        straight = forward(still).sent_elements(sizes) + backward(still).sent_elements(sizes)
        assert straight < around


def test_which_have_none() -> None:
    assert stationary(column_parallel(grid_1d(4))) is None
    assert stationary(three_d(grid_3d(8))) is None
    assert one_launch_missing(summa(grid_2d(16))) is None
    assert one_launch_missing(three_d(grid_3d(8))) == "3-D gathers blocks that no rank has whole"
    assert one_launch_missing(summa(grid_2d(25))) == "a group may have 16 ranks, not 25"
