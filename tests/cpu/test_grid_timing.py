"""Predicted times of programs on described clusters: against figures by hand, and what must hold for every method."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tpkernels.errors import ArgumentError
from tpkernels.grids import (
    Cluster,
    Layout,
    Level,
    Method,
    Sizes,
    backward,
    column_parallel,
    data_parallel,
    exchange_us,
    forward,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    predict,
    row_parallel,
    rows_over,
    spatial_temporal,
    summa,
    three_d,
)
from tpkernels.grids.timing import legs

HOST = Cluster(1000.0, (Level("NVLink", 8, 100.0, 2.0),))
HOSTS = Cluster(1000.0, (Level("NVLink", 2, 100.0, 2.0), Level("network", 64, 10.0, 5.0)))
SIZES = Sizes(64, 48, 96)
METHODS = [
    column_parallel(grid_1d(4)),
    row_parallel(grid_1d(4)),
    summa(grid_2d(4)),
    summa(grid_2p5d(8, 2)),
    three_d(grid_3d(8)),
    spatial_temporal(grid_spatial_temporal(16)),
]


def test_a_gather_and_a_product_by_hand() -> None:
    """Each of two ranks sends its half of x, 32 x 48 of 2 bytes, and multiplies 64 x 48 x 48."""
    method = column_parallel(grid_1d(2))
    gather, product = 2.0 + 32 * 48 * 2 / 100, 2 * 64 * 48 * 48 / 1000
    program = forward(method)
    assert predict(method, program, SIZES, HOST) == pytest.approx((gather + product, product, gather))
    assert predict(method, program, SIZES, HOST, fused=True).us == pytest.approx(max(gather, product))
    wide = predict(method, program, SIZES, HOST, element_bytes=4)
    assert wide.messages_us == pytest.approx(2 + 2 * (gather - 2)) and wide.products_us == product


def test_a_ring_overlaps_by_hand() -> None:
    """2 x 2 ranks of the spatial-temporal primitive, links so slow that the messages decide each step."""
    slow = Cluster(1e9, (Level("link", 4, 1.0, 0.0),))
    method = spatial_temporal(grid_spatial_temporal(4))
    x, w = 32 * 24 * 2, 48 * 24 * 2  # a block of each, bytes
    # To where the ring begins: half of the ranks get another block of x. Then x and w move on beside a product.
    assert predict(method, forward(method), SIZES, slow).messages_us == pytest.approx(x + x + w)
    assert predict(method, forward(method), SIZES, slow).us == pytest.approx(x + x + w, rel=1e-3)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_program_takes_no_less_than_its_parts(method: Method) -> None:
    for program in (forward(method), backward(method)):
        slower = Cluster(
            1000.0, tuple(level._replace(bytes_per_us=level.bytes_per_us / 2) for level in HOSTS.levels)
        )
        for cluster in (HOST, HOSTS) if method.grid.world <= 8 else (HOSTS,):
            told = predict(method, program, SIZES, cluster)
            assert max(told.products_us, told.messages_us) <= told.us * (1 + 1e-9)
            assert told.us <= told.products_us + told.messages_us + 1e-9
            beneath = predict(method, program, SIZES, cluster, fused=True)
            assert beneath.us <= told.us and (method.gathers or beneath == told)
        assert predict(method, program, SIZES, slower).us > predict(method, program, SIZES, HOSTS).us
        faster = Cluster(math.inf, HOSTS.levels)
        told = predict(method, program, SIZES, faster)
        assert told.products_us == 0 and told.us == pytest.approx(told.messages_us)


@pytest.mark.parametrize("method", [column_parallel(grid_1d(8)), row_parallel(grid_1d(8))], ids=str)
def test_hosts_are_crossed_once(method: Method) -> None:
    """8 ranks in hosts of two: of each block one copy, or one sum, goes to every other host."""
    for program in (forward(method), backward(method)):
        for exchange in program.exchanges:
            sent = list(legs(exchange.messages, HOSTS))
            moved = [m for m in exchange.messages if m.source != m.target]
            assert len(sent) == len(moved), "one leg for each message, some of them shorter"
            across = [leg for leg in sent if HOSTS.level_of(*leg[:2]) == 1]
            direct = [m for m in moved if HOSTS.level_of(m.source, m.target) == 1]
            if not direct:
                continue
            assert len(across) * 2 == len(direct)
            load = [sum(e for s, _, e in across if s == rank) for rank in range(8)]
            assert len(set(load)) == 1, "no rank's network card has more to do than another's"


def test_an_exchange_by_hand() -> None:
    """Rows over 4 ranks in hosts of two, to columns: each rank sends every other a quarter of its own quarter."""
    line = grid_1d(4)
    rows, columns = rows_over(line), row_parallel(line).home("X")
    own = 64 * 48 * 2 / 4
    inside, across = 2.0 + own / 4 / 100, 2 * (5.0 + own / 4 / 10)
    assert exchange_us(rows, columns, 64, 48, HOSTS) == pytest.approx(max(inside, across))
    assert exchange_us(rows, columns, 64, 48, HOSTS, element_bytes=4) > max(inside, across)
    assert exchange_us(rows, rows, 64, 48, HOSTS) == 0.0
    one = Layout(grid_2d(4), rows.blocks)  # the same blocks under another grid's name
    assert exchange_us(one, rows, 64, 48, HOSTS) == 0.0


@pytest.mark.parametrize("replicas", [2, 4])
def test_copies_cost_what_one_does_and_the_sum_of_gradients(replicas: int) -> None:
    """Where a copy fits into a host: forward as the method alone with its rows, backward the all-reduce more."""
    cluster = Cluster(1000.0, (Level("NVLink", 4, 100.0, 2.0), Level("network", 64, 10.0, 5.0)))
    for method in (
        column_parallel(grid_1d(4)),
        summa(grid_2d(4)),
        spatial_temporal(grid_spatial_temporal(4)),
    ):
        copies = data_parallel(method, replicas)
        own = SIZES._replace(m=SIZES.m // replicas)
        assert predict(copies, forward(copies), SIZES, cluster).us == pytest.approx(
            predict(method, forward(method), own, cluster).us
        )
        block = SIZES.k * SIZES.n * 2 / 4
        half = (replicas - 1) * (5.0 + block / replicas / 10)
        assert predict(copies, backward(copies), SIZES, cluster).us == pytest.approx(
            predict(method, backward(method), own, cluster).us + 2 * half
        )


def test_heavy_traffic_of_2p5d_stays_in_a_host() -> None:
    """Depths in hosts of their own: only the sum of dW over depths crosses, as between copies of 2-D."""
    method, copies = summa(grid_2p5d(16, 4)), data_parallel(summa(grid_2d(4)), 4)
    cluster = Cluster(1000.0, (Level("NVLink", 4, 100.0, 2.0), Level("network", 16, 10.0, 5.0)))
    for make in (forward, backward):
        program = make(method)
        for exchange in program.exchanges:
            levels = {cluster.level_of(m.source, m.target) for m in exchange.messages if m.source != m.target}
            assert levels == ({1} if exchange.source.buffer.startswith("dW/") else {0})
        assert predict(method, program, SIZES, cluster) == predict(copies, make(copies), SIZES, cluster)


def test_a_gathered_sum_crosses_once_too() -> None:
    """2.5-D's dW where a host has two of a place's four depths, as in a mesh of 2 x 2 x 4; the second half of the
    all-reduce copies, and adds nothing."""
    method = summa(replace(grid_2p5d(16, 4), digits=()))
    halves = [e for e in backward(method).exchanges if e.source.buffer.startswith("dW/")]
    cluster = Cluster(1000.0, (Level("NVLink", 2, 100.0, 2.0), Level("network", 16, 10.0, 5.0)))
    for exchange in halves:
        sent = list(legs(exchange.messages, cluster))
        across = [leg for leg in sent if cluster.level_of(*leg[:2]) == 1]
        direct = [m for m in exchange.messages if cluster.level_of(m.source, m.target) == 1]
        assert len(sent) == sum(m.source != m.target for m in exchange.messages)
        assert len(across) * 2 == len(direct)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(0.0, HOST.levels), "flops_per_us: it must be above 0"),
        (lambda: Cluster(math.nan, HOST.levels), "flops_per_us: it must be above 0"),
        (lambda: Cluster(1.0, HOST.levels, 0.0), "memory_bytes_per_us: it must be above 0, but it is 0.0"),
        (lambda: Cluster(1.0, ()), "levels: a cluster needs one at least"),
        (lambda: Cluster(1.0, (Level("a", 8, 0.0, 1.0),)), "'a' must send more than 0 bytes"),
        (lambda: Cluster(1.0, (Level("a", 8, 1.0, -1.0),)), "'a' must send more than 0 bytes"),
        (lambda: Cluster(1.0, (HOST.levels[0], Level("b", 12, 1.0, 1.0))), "'b' must join a multiple of the 8"),
        (lambda: Cluster(1.0, (HOST.levels[0], Level("b", 8, 1.0, 1.0))), "and more than them, but it joins 8"),
        (lambda: Cluster(1.0, (Level("a", 0, 1.0, 1.0),)), "but it joins 0"),
        (
            lambda: predict(METHODS[-1], forward(METHODS[-1]), SIZES, HOST),
            "are joined by none of its levels, whose last one has 8 ranks",
        ),
    ],
)  # fmt: skip
def test_nonsense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()  # type: ignore[operator]
