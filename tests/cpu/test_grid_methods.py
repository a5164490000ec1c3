"""The methods of ``tpkernels.grids``: each block once, messages that match, phases that align, sums that are the
product.

In NumPy, all ranks in one process; ``tests/spawn/test_grid_linear.py`` is the same over gloo.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from grid_simulation import Array, blocks_of, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from tpkernels.grids import (
    Collective,
    Grid,
    Layout,
    Method,
    Pass,
    Sizes,
    at_rest,
    backward,
    collectives,
    column_parallel,
    data_parallel,
    formula,
    forward,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    loads,
    messages,
    part,
    peak,
    row_parallel,
    rows_over,
    spatial_temporal,
    summa,
    three_d,
    whole,
)

Q = range(1, 9)


def square(q: int) -> Grid:
    """For the spatial-temporal functions, which hold for every q."""
    return Grid(("row", "column"), (q, q))


KINDS = {
    "column": lambda q: column_parallel(grid_1d(q)),
    "row": lambda q: row_parallel(grid_1d(q)),
    "2-D": lambda q: summa(grid_2d(q * q)),
    "2.5-D, depth 2": lambda q: summa(grid_2p5d(2 * q * q, 2)),
    "2.5-D, depth 3": lambda q: summa(grid_2p5d(3 * q * q, 3)),
    "3-D": lambda q: three_d(grid_3d(q**3)),
    "3-D, swapped": lambda q: three_d(grid_3d(q**3), True),
    "spatial-temporal": lambda q: spatial_temporal(square(q)),
    "column, whole": lambda q: column_parallel(grid_1d(q), False),
    "row, whole": lambda q: row_parallel(grid_1d(q), False),
    "2 x column": lambda q: data_parallel(column_parallel(grid_1d(q)), 2),
    "3 x row, whole": lambda q: data_parallel(row_parallel(grid_1d(q), False), 3),
    "3 x 2-D": lambda q: data_parallel(summa(grid_2d(q * q)), 3),
    "2 x 2.5-D, depth 2": lambda q: data_parallel(summa(grid_2p5d(2 * q * q, 2)), 2),
    "2 x 3-D": lambda q: data_parallel(three_d(grid_3d(q**3)), 2),
    "2 x spatial-temporal": lambda q: data_parallel(spatial_temporal(square(q)), 2),
}


@pytest.mark.parametrize("q", Q)
@pytest.mark.parametrize("kind", KINDS)
def test_each_product_is_made_once(kind: str, q: int) -> None:
    """The cuboids of all ranks and steps are a partition of m x k x n, in each pass."""
    method = KINDS[kind](q)
    for each in Pass:
        works = [w for step in range(method.steps) for w in method.spans(each, step)]
        parts = [math.lcm(*(w[d].parts for w in works)) for d in range(3)]
        done = np.zeros(parts, dtype=int)
        for w in works:
            done[tuple(slice(*span.elements(n)) for span, n in zip(w, parts, strict=True))] += 1
        assert (done == 1).all()
        assert len(set(map(volume, works))) == 1, "ranks and steps have unequal work"


def volume(work: Sequence) -> object:
    return math.prod(span.share for span in work)


@pytest.mark.parametrize("q", Q)
@pytest.mark.parametrize("kind", KINDS)
def test_homes_hold_each_block_once_or_once_a_depth(kind: str, q: int) -> None:
    method = KINDS[kind](q)
    world = method.grid.world
    for operand, layout in method.homes.items():
        depths = method.grid.shape[-1] if "2.5" in kind else 1
        copies = depths * data_copies(kind) if operand == "W" else 1
        whole_there = {"column, whole": "X", "row, whole": "Y"}.get(kind.split(" x ")[-1])
        if operand == whole_there:
            copies = q
        assert {len(positions) for positions in layout.holders.values()} == {copies}
        sizes = method.cuts._replace(n=method.cuts.n * world)
        rows, columns = sizes.of(operand)
        held = [at_rest(method, sizes, position)[operand] for position in range(world)]
        assert sum(held) == copies * rows * columns and len(set(held)) == 1


def data_copies(kind: str) -> int:
    return int(kind.split(" x ")[0]) if " x " in kind else 1


@pytest.mark.parametrize("q", range(1, 5))
@pytest.mark.parametrize("depth", [2, 3])
def test_a_depth_is_data_parallelism(q: int, depth: int) -> None:
    """2.5-D and copies of 2-D: the same blocks, products and messages on the same ranks."""
    deep, copies = summa(grid_2p5d(depth * q * q, depth)), data_parallel(summa(grid_2d(q * q)), depth)
    assert deep.grid.coordinates == tuple(
        (row, column, copy) for copy, row, column in copies.grid.coordinates
    )
    for operand, layout in copies.homes.items():
        assert layout.blocks == deep.home(operand).blocks, operand
    for each in Pass:
        for step in range(q):
            assert copies.spans(each, step) == deep.spans(each, step)
    sizes = Sizes(*(6 * n for n in copies.cuts))
    assert formula(copies, sizes) == formula(deep, sizes)
    for one, other in ((forward(copies), forward(deep)), (backward(copies), backward(deep))):
        assert [e.messages for e in one.exchanges] == [e.messages for e in other.exchanges]
        assert len(one.steps) == len(other.steps)


def test_copies_of_a_line_of_one_are_plain_data_parallelism() -> None:
    """Nothing moves but the weight's gradient, once around: 2 (d - 1) / d of it."""
    method, sizes = data_parallel(column_parallel(grid_1d(1)), 4), Sizes(8, 12, 20)
    assert method.home("W").replicas == 4 and forward(method).sent_elements(sizes) == 0
    assert backward(method).sent_elements(sizes) == 2 * 3 * 12 * 20
    assert data_parallel(summa(grid_2d(4)), 1) is summa(grid_2d(4))


@pytest.mark.parametrize("q", range(2, 9))
def test_rings_are_permutations(q: int) -> None:
    """Every exchange of the spatial-temporal primitive: each rank sends one message and receives one, none to
    itself but where the whole layout is its own, and no two ranks have one block at any time."""
    method = spatial_temporal(square(q))
    for program in (forward(method), backward(method, held=held_of(method))):
        for exchange in program.exchanges:
            for layout in (exchange.source.layout, exchange.target.layout):
                assert layout.replicas == 1 and len(layout.holders) == q * q
            sources, targets = zip(*((m.source, m.target) for m in exchange.messages), strict=True)
            assert sorted(sources) == sorted(targets) == list(range(q * q))


def held_of(method: Method, keep: bool = False) -> dict[str, Layout]:
    outputs = forward(method, keep=keep).outputs
    return {operand: held.layout for operand, held in outputs.items() if operand in ("X", "W")}


def shift(q: int, rows: int, columns: int) -> dict[tuple[int, int], tuple[int, int]]:
    """From whom each rank receives."""
    return {(r, c): ((r + rows) % q, (c + columns) % q) for r in range(q) for c in range(q)}


def senders(method: Method, source: Layout, target: Layout) -> dict[tuple[int, ...], tuple[int, ...]]:
    at = method.grid.coordinates
    return {at[m.target]: at[m.source] for m in messages(source, target)}


@pytest.mark.parametrize("q", range(2, 9))
def test_spatial_temporal_is_the_papers_table(q: int) -> None:
    """Table 1 of PrimePar: who sends what to (r, c) after step t. The paper's I is X here."""
    method = spatial_temporal(square(q))

    def moved(kind: Pass, operand: str, t: int) -> dict[tuple[int, ...], tuple[int, ...]]:
        return senders(method, method.layout(kind, operand, t), method.layout(kind, operand, t + 1))

    for t in range(q - 1):
        assert moved(Pass.FORWARD, "X", t) == shift(q, 0, 1)
        assert moved(Pass.FORWARD, "W", t) == shift(q, 1, 0)
        assert moved(Pass.INPUT_GRAD, "dY", t) == shift(q, 0, 1)
        assert moved(Pass.INPUT_GRAD, "W", t) == shift(q, -1, 1)
    for t in range(q - 2):
        assert moved(Pass.WEIGHT_GRAD, "X", t) == shift(q, 1, -1)
        assert moved(Pass.WEIGHT_GRAD, "dY", t) == shift(q, 1, 0)
    assert moved(Pass.WEIGHT_GRAD, "X", q - 2) == shift(q, 1, 0)
    assert moved(Pass.WEIGHT_GRAD, "dY", q - 2) == shift(q, 1, 1)
    last = method.layout(Pass.INPUT_GRAD, "W", q - 1)
    assert senders(method, last, method.home("W")) == shift(q, 0, 1)
    sums = [e for e in backward(method).exchanges if e.operand == "dW"]
    assert len(sums) == 1
    assert senders(method, sums[0].source.layout, sums[0].target.layout.partial(terms_of(sums[0]))) == shift(
        q, 0, 1
    )


def terms_of(exchange):
    return lambda position: exchange.target.layout.block(position).terms


@pytest.mark.parametrize("q", Q)
def test_phases_align(q: int) -> None:
    """A pass of the spatial-temporal primitive begins where the one before ended; dW ends where W began."""
    method = spatial_temporal(square(q))
    first, last = 0, q - 1

    def same(one: Pass, operand: str, step: int, other: Pass, name: str, at: int) -> bool:
        return method.layout(one, operand, step).same_places(method.layout(other, name, at))

    forth, back, weight = Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD
    assert same(forth, "W", last, back, "W", first)
    assert same(forth, "X", last, weight, "X", first)
    assert same(back, "dY", last, weight, "dY", first)
    assert same(weight, "dW", last, forth, "W", first)
    assert method.layout(forth, "W", 0).same_places(method.home("W"))
    assert method.layout(forth, "Y", last).same_places(method.home("Y"))
    assert method.layout(back, "dY", 0).same_places(method.home("Y"))
    if (
        q > 1
    ):  # so operators that follow one another need a redistribution: what the layer's homes are there for
        assert not method.layout(forth, "X", 0).same_places(method.home("Y"))


@pytest.mark.parametrize("q", range(2, 7))
@pytest.mark.parametrize("kind", ["2-D", "2.5-D, depth 2"])
def test_summa_moves_along_rows_and_columns(kind: str, q: int) -> None:
    """At every step each rank gives a block of an operand, or an addend, to one of its line (of two: both to one)."""
    method = KINDS[kind](q)
    at = method.grid.coordinates
    axis = {"X": 0, "W": 1, "dX": 0, "dW": 1}  # the coordinate that all ranks of such a line share
    for program in (forward(method), backward(method)):
        for e in program.exchanges:
            if e.source.buffer.startswith("dW/"):
                continue  # over depths
            to, by = Counter(m.target for m in e.messages), Counter(m.source for m in e.messages)
            assert set(by.values()) == {1} and set(to.values()) == {2 if e.result and q == 2 else 1}
            for m in e.messages:
                fixed = axis[e.operand]
                assert at[m.source][fixed] == at[m.target][fixed]
                assert at[m.source][2:] == at[m.target][2:], "depths are independent"


@pytest.mark.parametrize("q", range(2, 5))
def test_three_d_exchanges_are_rotations_of_groups(q: int) -> None:
    """All-gathers and reduce-scatters over q ranks of one line: each of the q messages of a rank goes to
    another."""
    method = three_d(grid_3d(q**3))
    for program in (forward(method), backward(method)):
        for e in program.exchanges:
            for rank in range(q**3):
                taken = [m.source for m in e.messages if m.target == rank]
                assert len(set(taken)) == q and rank in taken
                assert all(method.grid.distance(rank, other) == 1 for other in taken if other != rank)


def test_two_layers_of_three_d_end_where_they_began() -> None:
    for q in (1, 2, 3):
        one, other = three_d(grid_3d(q**3)), three_d(grid_3d(q**3), True)
        assert one.home("Y") == other.home("X") and other.home("Y") == one.home("X")
        assert (one.home("X") == one.home("Y")) == (q == 1)


@st.composite
def cases(draw: st.DrawFn, most: int = 8) -> tuple[Method, Sizes, bool]:
    """A method and sizes that its grid cuts evenly, or any."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    q = draw(st.integers(1, min(most, 3 if " x " in kind else 4) if "3-D" in kind else most))
    method = KINDS[kind](q)
    even = draw(st.booleans())
    times = [draw(st.integers(1, 3)) for _ in range(3)]
    sizes = (
        n * t if even else n * t + draw(st.integers(0, 3)) for n, t in zip(method.cuts, times, strict=True)
    )
    return method, Sizes(*sizes), even


@settings(max_examples=60)
@given(cases(), st.booleans(), st.integers(0, 2**31))
def test_the_sum_over_steps_is_the_product(case: tuple[Method, Sizes, bool], keep: bool, seed: int) -> None:
    """All three passes and the bias against dense products in float64; bytes as counted, and as the formulas
    say."""
    method, sizes, even = case
    check(method, sizes, even, keep and method.gathers, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", ["3-D", "3-D, swapped"])
@pytest.mark.parametrize("q", [5, 6])
def test_more_ranks(kind: str, q: int, rng: np.random.Generator) -> None:
    method = KINDS[kind](q)
    check(method, Sizes(*(2 * n for n in method.cuts)), True, True, rng)


def check(method: Method, sizes: Sizes, even: bool, keep: bool, rng: np.random.Generator) -> None:
    x, w, dy, b = (rng.standard_normal(sizes.of(operand)) for operand in ("X", "W", "Y", "B"))

    def at_home(**operands: Array) -> dict[str, list[Array | None]]:
        return {name: blocks_of(full, method.home(name)) for name, full in operands.items()}

    def check_outputs(found: dict[str, list[Array | None]], **wanted: Array) -> None:
        for operand, full in wanted.items():
            for got, want in zip(found[operand], blocks_of(full, method.home(operand)), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)

    program = forward(method, bias=True, keep=keep)
    made, sent = simulate(program, at_home(X=x, W=w, B=b), sizes)
    check_outputs(made, Y=x @ w.T)
    for position, block in enumerate(method.home("Y").blocks):
        columns = slice(*block.columns.elements(sizes.n))
        assert np.array_equal(made["B"][position], b[:, columns])
    kept = {operand: made[operand] for operand in ("X", "W") if operand in made}
    held = {operand: program.outputs[operand].layout for operand in kept}
    back = backward(method, bias_grad=True, held=held)
    grads, sent_back = simulate(back, {**at_home(X=x, W=w, dY=dy), **kept}, sizes)
    check_outputs(grads, dX=dy @ w, dW=dy.T @ x, dB=dy.sum(0, keepdims=True))
    assert sent == program.sent_elements(sizes) and sent_back == back.sent_elements(sizes)
    if even:
        volume = formula(method, sizes, kept=keep)
        world = method.grid.world
        assert sent == world * (volume["forward"] + volume["bias"])
        assert sent_back == world * (volume["input_grad"] + volume["weight_grad"] + volume["bias_grad"])


@settings(max_examples=40)
@given(cases(5), st.sampled_from(list(itertools.product((True, False), repeat=3))), st.integers(0, 2**31))
def test_gradients_that_are_not_asked_for(
    case: tuple[Method, Sizes, bool], asked: tuple[bool, bool, bool], seed: int
) -> None:
    """A frozen weight, an input without gradient: the other ones are right, and nothing is moved for them."""
    method, sizes, even = case
    rng = np.random.default_rng(seed)
    x, w, dy = (rng.standard_normal(sizes.of(operand)) for operand in ("X", "W", "Y"))
    names = [name for name, wanted in zip(("dX", "dW", "dB"), asked, strict=True) if wanted]
    program = backward(method, input_grad=asked[0], weight_grad=asked[1], bias_grad=asked[2])
    assert sorted(program.outputs) == sorted(names)
    given_ = {o: blocks_of(full, method.home(o)) for o, full in (("X", x), ("W", w), ("dY", dy))}
    made, sent = simulate(program, given_, sizes)
    dense = {"dX": dy @ w, "dW": dy.T @ x, "dB": dy.sum(0, keepdims=True)}
    for name in names:
        for got, want in zip(made[name], blocks_of(dense[name], method.home(name)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    if even and asked == (True, False, False):
        assert sent == method.grid.world * formula(method, sizes)["input_grad"]


@pytest.mark.parametrize("q", [3, 4])
@pytest.mark.parametrize("scale", [(1, 1, 1), (9, 1, 1), (1, 9, 1), (1, 1, 9)])
def test_memory_beside_what_is_given(q: int, scale: tuple[int, int, int]) -> None:
    """Most that is in buffers: double buffers and partial sums, in blocks x, w and y of X, W and Y at rest. Where a
    pass has several steps, the present blocks and the next ones; where it gathers, all of them."""
    double = (  # gradients: the sum at home, an addend that comes, one that leaves, and the next one
        lambda x, w, y: 2 * x + 2 * w + y,
        lambda x, w, y: 4 * x + w + x,
        lambda x, w, y: x + 2 * x + (4 if q > 3 else 3) * w,
        lambda x, w, y: x + x + 4 * w,
    )
    ring = (
        double[0],
        lambda x, w, y: x + 3 * w + y + x,
        lambda x, w, y: 2 * y + 2 * w + x,
        lambda x, w, y: 3 * x + 2 * y + w,
    )
    gathered = (
        lambda x, w, y: q * (x + w + y),
        lambda x, w, y: q * (y + x + x + w) + x,
        lambda x, w, y: q * (y + w + x + x),
        lambda x, w, y: q * (y + x + w) + w,
    )
    for kind, (forth, *back) in (
        ("2-D", double),
        ("2.5-D, depth 2", double),
        ("spatial-temporal", ring),
        ("3-D", gathered),
        ("column", (lambda x, w, y: q * x + y, lambda x, w, y: 2 * q * x + x + w)),
        ("row", (lambda x, w, y: q * y + y, lambda x, w, y: q * y + x + w)),
    ):
        method = KINDS[kind](q)
        sizes = Sizes(*(n * t * 2 for n, t in zip(method.cuts, scale, strict=True)))
        blocks = [at_rest(method, sizes, 0)[o] for o in "XWY"]
        program = forward(method)
        held = {o: h.layout for o, h in program.outputs.items() if o in ("X", "W")}
        ranks = range(method.grid.world)
        for each, formulas in ((program, [forth]), (backward(method, held=held), back)):
            found = max((peak(each, sizes, p) for p in ranks), key=lambda f: f.elements)
            assert sum(found.buffers.values()) == found.elements
            assert found.elements == max(f(*blocks) for f in formulas), (kind, found)


@pytest.mark.parametrize("q", [2, 3, 4])
def test_exchanges_in_the_words_of_the_field(q: int) -> None:
    """SUMMA shifts, 3-D gathers and reduce-scatters, PrimePar shifts; over lines of the grid."""
    two = q == 2  # ranks: all that they can do is to exchange, or to give
    gather, scatter = ("shift", "shift") if two else ("all-gather", "reduce-scatter")
    expected = {
        "2-D": {"X": "shift", "W": "shift", "dX": "broadcast" if two else "shift"},
        "3-D": dict.fromkeys(("X", "W", "dY"), gather) | dict.fromkeys(("Y", "dX", "dW"), scatter),
        "spatial-temporal": dict.fromkeys(("X", "W", "dY", "dX", "dW"), "shift"),
        "column": {"X": gather, "dX": scatter},
        "row": {"Y": scatter, "dY": gather},
    }
    expected["2-D"]["dW"] = expected["2-D"]["dX"]
    for kind, words in expected.items():
        method = KINDS[kind](q)
        seen: dict[str, set[str]] = {}
        for program in (forward(method), backward(method)):
            for e in program.exchanges:
                found = collectives(e.source.layout, e.target.layout)
                seen.setdefault(e.operand, set()).update(c.kind for c in found)
                if kind == "3-D":
                    assert {len(c.ranks) for c in found} == {q}
                    assert len(found) == method.grid.world // q
        assert seen == {operand: {word} for operand, word in words.items()}, kind


def test_exchanges_of_other_layouts() -> None:
    deep = summa(grid_2p5d(27, 3))
    over_depths = [e for e in backward(deep).exchanges if e.source.buffer.startswith("dW/")]
    kinds = [{c.kind for c in collectives(e.source.layout, e.target.layout)} for e in over_depths]
    assert kinds == [{"reduce-scatter"}, {"all-gather"}], "an all-reduce in two halves"
    line = grid_1d(4)
    turned = collectives(column_parallel(line).home("X"), row_parallel(line).home("X"))
    assert turned == (Collective("all-to-all", (0, 1, 2, 3)),)
    assert collectives(whole(line), rows_over(line)) == ()


@settings(max_examples=25)
@given(cases(4))
def test_loads_of_steps(case: tuple[Method, Sizes, bool]) -> None:
    """The work is divided evenly, and all that is received is in the steps."""
    method, sizes, even = case
    world = method.grid.world
    for program, passes in ((forward(method), 1), (backward(method), 2)):
        found = loads(method, program, sizes)
        assert len(found) == len(program.steps)
        assert world * sum(f.products for f in found) >= passes * sizes.m * sizes.k * sizes.n
        assert world * sum(f.received for f in found) >= program.sent_elements(sizes)
        if even:
            assert world * sum(f.products for f in found) == passes * sizes.m * sizes.k * sizes.n
        if method.rings and even and method.grid.world > 1:
            # In a step every rank sends and receives as much as any other, on the way to the ring and home apart.
            assert all(f.sent == f.received for f in found)


def test_keeping_what_is_not_gathered_is_refused() -> None:
    with pytest.raises(ValueError, match="gathers no whole blocks"):
        forward(summa(grid_2d(4)), keep=True)


def test_sizes_that_a_method_cuts() -> None:
    assert summa(grid_2p5d(18, 2)).cuts == Sizes(m=6, k=3, n=3)
    assert three_d(grid_3d(27)).cuts == Sizes(m=9, k=9, n=3)
    assert spatial_temporal(square(4)).cuts == Sizes(m=4, k=4, n=4)
    assert part(5, 4) == part(1, 4)
