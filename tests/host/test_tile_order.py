"""Property tests of tile orders, shards and chunks against brute force over single rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpkernels import _host

WORLDS = st.integers(1, 16)


@st.composite
def sharded(draw: st.DrawFn, max_rows: int = 60) -> tuple[list[int], int, _host.TileShape]:
    """Uneven shards (zeros are common), a rank, and a tile that need not divide anything."""
    world = draw(WORLDS)
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(0, max_rows)), min_size=world, max_size=world))
    bm = draw(st.integers(1, max(1, max_rows // 2)))
    return sizes, draw(st.integers(0, world - 1)), _host.TileShape(bm, draw(st.integers(1, 40)), 32)


def owners_by_row(sizes: list[int]) -> list[int]:
    return [rank for rank, size in enumerate(sizes) for _ in range(size)]


def rows_of_tile(sizes: list[int], tile_row: int, bm: int) -> list[int]:
    return owners_by_row(sizes)[tile_row * bm : (tile_row + 1) * bm]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 70),
    st.integers(0, 70),
    st.integers(0, 3),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 9),
)
def test_order_is_a_permutation(m: int, n: int, batch: int, bm: int, bn: int, group: int) -> None:
    order = _host.make_tile_order(m, n, batch, _host.TileShape(bm, bn, 32), group_m=group)
    tiles = [order.at(i) for i in range(len(order))]
    everything = [(b, i, j) for b in range(batch) for i in range(-(-m // bm)) for j in range(-(-n // bn))]
    assert sorted(tiles) == everything


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1 << 36), st.integers(1, 1 << 24), st.integers(1, 1 << 8), st.data())
def test_order_beyond_32_bits(m: int, n: int, batch: int, data: st.DataObject) -> None:
    order = _host.make_tile_order(m, n, batch, _host.TileShape(16, 16, 32))
    assert len(order) == batch * -(-m // 16) * -(-n // 16)
    per_batch = order.tiles_m * order.tiles_n
    position = data.draw(st.integers(0, len(order) - 1))
    b, i, j = order.at(position)
    assert b == position // per_batch and 0 <= i < order.tiles_m and 0 <= j < order.tiles_n
    # Back from the tile to its position.
    first = i // 8 * 8
    rows = min(8, order.tiles_m - first)
    assert position % per_batch == first * order.tiles_n + j * rows + (i - first)


@settings(max_examples=250, deadline=None)
@given(sharded(), st.integers(0, 40), st.integers(1, 2), st.integers(1, 9))
def test_arrival_order_follows_the_landing(
    case: tuple[list[int], int, _host.TileShape], n: int, batch: int, group: int
) -> None:
    sizes, rank, tile = case
    world = len(sizes)
    order, shard_tiles = _host.make_arrival_order(sizes, rank, n, batch, tile, group_m=group)
    tiles = [order.at(i) for i in range(len(order))]
    assert len(set(tiles)) == len(tiles)
    ready = [max((owner - rank) % world for owner in rows_of_tile(sizes, m, tile.bm)) for _, m, _ in tiles]
    assert ready == sorted(ready), "a tile stands behind one that lands later"
    assert [ready.count(c) for c in range(world)] == shard_tiles


@settings(max_examples=250, deadline=None)
@given(sharded(), st.integers(0, 40), st.integers(1, 2), st.integers(1, 9))
def test_departure_order_serves_the_next_rank_first(
    case: tuple[list[int], int, _host.TileShape], n: int, batch: int, group: int
) -> None:
    sizes, rank, tile = case
    world = len(sizes)
    order, shard_tiles = _host.make_departure_order(sizes, rank, n, batch, tile, group_m=group)
    tiles = [order.at(i) for i in range(len(order))]
    assert len(set(tiles)) == len(tiles)
    needed = [
        min((owner - rank - 1) % world for owner in rows_of_tile(sizes, m, tile.bm)) for _, m, _ in tiles
    ]
    assert needed == sorted(needed), "a tile stands behind one that is needed later"
    assert [needed.count(c) for c in range(world)] == shard_tiles
    own = shard_tiles[world - 1]
    for _, m, _ in tiles[len(tiles) - own :]:
        assert set(rows_of_tile(sizes, m, tile.bm)) == {rank}, "the last tiles are not all mine"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=16), st.data())
def test_sharded_orders_beyond_32_bits(sizes: list[int], data: st.DataObject) -> None:
    world = len(sizes)
    rank = data.draw(st.integers(0, world - 1))
    tile = _host.TileShape(128, 128, 32)
    begins = [sum(sizes[:s]) for s in range(world + 1)]
    for make, pick, shift in ((_host.make_arrival_order, max, 0), (_host.make_departure_order, min, 1)):
        order, shard_tiles = make(sizes, rank, 5000, 1, tile)
        assert sum(shard_tiles) == len(order) == -(-begins[-1] // 128) * 40
        if not len(order):
            continue
        for position in sorted(data.draw(st.lists(st.integers(0, len(order) - 1), max_size=8))):
            _, m, _ = order.at(position)
            first, end = m * 128, min(m * 128 + 128, begins[-1])
            touched = [s for s in range(world) if sizes[s] and begins[s] < end and begins[s + 1] > first]
            time = pick((s - rank - shift) % world for s in touched)
            assert sum(shard_tiles[:time]) <= position < sum(shard_tiles[: time + 1])


@settings(max_examples=100, deadline=None)
@given(sharded(), st.integers(0, 200), st.integers(1, 50), st.integers(1, 90), st.integers(1, 40))
def test_chunks_cover_exactly_what_a_tile_reads(
    case: tuple[list[int], int, _host.TileShape], k: int, chunk_rows: int, slab_k: int, bk: int
) -> None:
    sizes, _, tile = case
    chunks = _host.Chunks(sizes, k, chunk_rows, slab_k)
    owners = owners_by_row(sizes)
    begins = [sum(sizes[:s]) for s in range(len(sizes))]
    names = [(s, (row - begins[s]) // chunk_rows) for row, s in enumerate(owners)]  # the chunk of every row
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    assert len(chunks) == len(numbers) * max(1, -(-k // slab_k))
    for tile_row in range(-(-len(owners) // tile.bm)):
        rows = slice(tile_row * tile.bm, (tile_row + 1) * tile.bm)
        begin, end = chunks.rows_of_tile_row(tile_row, tile.bm)
        assert set(range(begin, end)) == {numbers[name] for name in names[rows]}
        begin, end = _host.shards_of_tile_row(sizes, tile_row, tile.bm)
        assert {s for s in range(begin, end) if sizes[s]} == set(owners[rows])
    k_iters = max(1, -(-k // bk))
    for k_begin, k_end in ((0, k_iters), (k_iters // 2, k_iters), (0, max(1, k_iters // 3))):
        begin, end = chunks.slabs_of_iters(k_begin, k_end, bk)
        assert set(range(begin, end)) == {x // slab_k for x in range(k_begin * bk, min(k_end * bk, k))}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 64))
def test_even_shards_split_like_torch_chunk(total: int, world: int) -> None:
    sizes = _host.even_shards(total, world)
    each = -(-total // world)
    assert len(sizes) == world and sum(sizes) == total
    assert all(size == each for size in sizes[: total // each if each else world])


def test_wrong_arguments_are_sentences() -> None:
    tile = _host.TileShape(16, 16, 32)
    with pytest.raises(ValueError, match="shard_sizes must name 1 to 64 shards"):
        _host.make_arrival_order([1] * 65, 0, 16, 1, tile)
    with pytest.raises(ValueError, match="shard_sizes must not be negative, but shard 1 has -3 rows"):
        _host.make_departure_order([1, -3], 0, 16, 1, tile)
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 2\), but it is 2"):
        _host.make_arrival_order([1, 3], 2, 16, 1, tile)
    with pytest.raises(ValueError, match="bm, bn and bk must be at least 1"):
        _host.TileShape(16, 0, 32)
    with pytest.raises(ValueError, match="must stay below 2\\^61"):
        _host.make_tile_order(1 << 40, 1 << 40, 1, tile)
    with pytest.raises(IndexError, match="position must lie in"):
        _host.make_tile_order(1, 1, 1, tile).at(1)
