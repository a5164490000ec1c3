"""Spans, grids and layouts of ``tpkernels.grids``: exchanges between any two layouts against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from grid_simulation import blocks_of, within_block
from hypothesis import given, settings
from hypothesis import strategies as st

from tpkernels.errors import GroupError
from tpkernels.grids import (
    Grid,
    Layout,
    column_parallel,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    messages,
    row_parallel,
    rows_over,
    sent_elements,
    spatial_temporal,
    summa,
    three_d,
    whole,
    with_replicas,
)
from tpkernels.grids.layout import Block
from tpkernels.grids.method import dimensions
from tpkernels.grids.spans import ALL, WHOLE, common, part, span, united, within

SIZES = st.integers(0, 40)


@st.composite
def spans(draw: st.DrawFn):
    parts = draw(st.integers(1, 12))
    start = draw(st.integers(0, parts - 1))
    return span(start, draw(st.integers(start + 1, parts)), parts)


def elements(some, size: int) -> set[int]:
    return set(range(*some.elements(size)))


@given(spans(), spans(), SIZES)
def test_common_is_the_intersection_for_every_size(a, b, size: int) -> None:
    both = common(a, b)
    assert elements(a, size) & elements(b, size) == (elements(both, size) if both else set())


@given(spans(), st.integers(1, 6), SIZES)
def test_cuts_are_a_partition(some, count: int, size: int) -> None:
    pieces = [some.cut(i, count) for i in range(count)]
    assert sum(p.length(size) for p in pieces) == some.length(size)
    assert set().union(*(elements(p, size) for p in pieces)) == elements(some, size)
    assert united(pieces) == (some,)


@given(st.integers(1, 12), st.data())
def test_terms(parts: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, parts - 1), min_size=1))
    terms = united(part(i, parts) for i in chosen)
    assert (terms == ALL) == (len(chosen) == parts)
    for i in range(parts):
        assert within((part(i, parts),), terms) == (i in chosen)
    with pytest.raises(ValueError, match="twice"):
        united([*terms, part(min(chosen), parts)])


GRIDS = [
    grid_1d(5),
    grid_2d(9),
    grid_2p5d(12, 3),
    grid_3d(27),
    grid_spatial_temporal(1),
    grid_spatial_temporal(64),
    with_replicas(grid_2p5d(12, 3), 2),
    with_replicas(with_replicas(grid_spatial_temporal(4), 2), 3),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_positions_and_coordinates(grid: Grid) -> None:
    assert len(set(grid.coordinates)) == grid.world
    for position, coordinates in enumerate(grid.coordinates):
        assert grid.position(*coordinates) == position
        assert all(0 <= c < n for c, n in zip(coordinates, grid.shape, strict=True))
        assert grid.distance(position, position) == 0
    turned = grid.position(*(c + n for c, n in zip(grid.coordinates[-1], grid.shape, strict=True)))
    assert turned == grid.world - 1


def test_bits_are_taken_alternately() -> None:
    """The first bit of a rank is the row's."""
    grid = grid_spatial_temporal(16)
    assert grid.coordinates[:4] == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert grid.coordinates[0b1101] == (0b10, 0b11)


def test_depths_are_outermost() -> None:
    """The ranks of a depth follow one another, row by row."""
    grid = grid_2p5d(12, 3)
    assert grid.coordinates[:5] == ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1))
    assert grid.position(1, 0, 2) == 10 and str(grid) == "2 x 2 x 3"


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_copies_are_outermost(grid: Grid) -> None:
    copies = with_replicas(grid, 3)
    assert copies.coordinates == tuple((copy, *at) for copy in range(3) for at in grid.coordinates)


@pytest.mark.parametrize(
    "make, world, words",
    [
        (grid_2d, 8, r"q x q ranks.*has 8; .* 4 or 9 ranks, or use 2.5-D with depth 2 \(2 x 2 x 2\)"),
        (grid_2d, 6, r"4 or 9 ranks, or use the layers of one dimension"),
        (grid_3d, 16, r"a cube.*has 16; .* 8 or 27 ranks, or use 2.5-D with depth 4 \(2 x 2 x 4\)"),
        (grid_spatial_temporal, 9, r"a power of 4.*has 9; .* 4 or 16 ranks"),
        (lambda w: grid_2p5d(w, 3), 8, r"8 ranks and depth 3 .* fit: 2 \(2 x 2 x 2\), 8 \(1 x 1 x 8\)"),
        (lambda w: grid_2p5d(w, 0), 12, r"fit: 3 \(2 x 2 x 3\), 12"),
        (grid_1d, 0, "at least 1 rank"),
    ],
)
def test_worlds_that_do_not_fit(make, world: int, words: str) -> None:
    with pytest.raises(GroupError, match=words):
        make(world)


def layouts_of(world: int) -> list[tuple[str, Layout]]:
    """Every home on every grid of so many ranks, of X, W and Y."""
    methods = [column_parallel(grid_1d(world)), row_parallel(grid_1d(world))]
    for make, of in (
        (grid_2d, summa),
        (lambda w: grid_2p5d(w, 2), summa),
        (grid_3d, three_d),
        (grid_3d, lambda g: three_d(g, True)),
        (grid_spatial_temporal, spatial_temporal),
    ):
        try:
            methods.append(of(make(world)))
        except GroupError:
            continue
    homes = [(f"{m}: {o}", m.home(o)) for m in methods for o in "XWYB"]
    return [*homes, ("rows", rows_over(grid_1d(world))), ("whole", whole(grid_1d(world)))]


@settings(max_examples=120)
@given(st.sampled_from([1, 4, 6, 8, 9, 16]), SIZES, SIZES, st.data())
def test_any_layout_to_any_other(world: int, rows: int, columns: int, data: st.DataObject) -> None:
    """Every element arrives once, nobody is sent what it has where blocks are those of one cut, and bytes are
    counted."""
    some = st.sampled_from(layouts_of(world))
    (_, source), (_, target) = data.draw(some), data.draw(some)
    full = np.arange(1.0, rows * columns + 1).reshape(rows, columns)
    have = blocks_of(full, source)
    made = [np.zeros(b.shape(rows, columns)) for b in target.blocks if b is not None]
    counts = [np.zeros_like(m) for m in made]
    travelled = 0
    for m in messages(source, target):
        giver, taker = source.block(m.source), target.block(m.target)
        piece = have[m.source][within_block(giver, m.rows, m.columns, full.shape)]
        into = within_block(taker, m.rows, m.columns, full.shape)
        made[m.target][into] += piece
        counts[m.target][into] += 1
        travelled += piece.size * (m.source != m.target)
    for got, count, want in zip(made, counts, blocks_of(full, target), strict=True):
        assert np.array_equal(got, want) and (count == 1).all()
    assert travelled == sent_elements(messages(source, target), rows, columns)
    assert travelled == sum(
        len(indices(t, rows, columns) - indices(s, rows, columns))
        for s, t in zip(source.blocks, target.blocks, strict=True)
    )


def indices(block: Block | None, rows: int, columns: int) -> set[tuple[int, int]]:
    assert block is not None
    return {(r, c) for r in elements(block.rows, rows) for c in elements(block.columns, columns)}


def test_what_cannot_be_had_is_refused() -> None:
    """A block that no rank has, and a sum with an addend missing: errors of a method, found when it is derived."""
    grid = grid_1d(2)
    half = Layout(grid, (Block(part(0, 2), WHOLE), None))
    with pytest.raises(ValueError, match="no rank has the rest"):
        messages(half, whole(grid))
    addends = whole(grid).partial(lambda p: (part(p, 3),))
    with pytest.raises(ValueError, match="would have only"):
        messages(addends, whole(grid))
    with pytest.raises(ValueError, match="2 and of 3 ranks"):
        messages(whole(grid), whole(grid_1d(3)))


def test_the_nearest_replica_gives() -> None:
    """At each depth of 2.5-D, W comes from a rank of that depth."""
    method = summa(grid_2p5d(18, 2))
    grid = method.grid
    needed = Layout(grid, tuple(Block(part(at[1], 3), part(1, 3)) for at in grid.coordinates))
    for m in messages(method.home("W"), needed):
        assert grid.coordinates[m.source][2] == grid.coordinates[m.target][2]


def test_dimensions_of_gradients_are_those_of_what_they_belong_to() -> None:
    assert dimensions("dW") == dimensions("W") == ("n", "k")
