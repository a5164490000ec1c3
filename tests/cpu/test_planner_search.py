"""The planner's search beside brute force: random rows of operators, residual edges, repeated layers, memory limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpkernels.planner.search import Edge, Node, Problem, Totals, evaluate, least_memory, search, solve


def random_problem(rng: np.random.Generator, most: int = 4000) -> Problem:
    """A few nodes of 1 to 3 states, a laminar set of edges over them, perhaps a repeated layer; few assignments."""
    while True:
        count = int(rng.integers(2, 7))
        i, j = sorted(rng.choice(count, 2, replace=False).tolist())
        repeat = (i, j, int(rng.integers(1, 4))) if rng.random() < 0.6 else None
        states = rng.integers(1, 4, count)
        if repeat:
            states[j] = states[i]
        whole = Problem([], {}, repeat)
        object.__setattr__(whole, "nodes", [None] * count)
        if math.prod(int(states[k]) for k in whole.unrolled) <= most:
            break
    names = {(k, k + 1) for k in range(count - 1)}
    for a, b in itertools.combinations(range(count), 2):
        crossing = any(a < c < b < d or c < a < d < b for c, d in names)
        leaves = repeat and any(a < k < b for k in repeat[:2])
        if rng.random() < 0.5 and not crossing and not leaves:
            names.add((a, b))

    def values(*shape: int) -> np.ndarray:
        return rng.integers(0, 12, shape).astype(float)

    nodes = [Node(values(n), values(n), values(n)) for n in states.tolist()]
    edges = {(a, b): Edge(values(states[a], states[b]), values(states[a], states[b])) for a, b in names}
    for edge in edges.values():  # states that do not go together
        edge.time[rng.random(edge.time.shape) < 0.08] = np.inf
    return Problem(nodes, edges, repeat)


def every(problem: Problem) -> list[Totals]:
    """Of all assignments that are allowed."""
    sizes = [len(problem.nodes[k].time) for k in problem.unrolled]
    found = (evaluate(problem, states) for states in itertools.product(*map(range, sizes)))
    return [totals for totals in found if np.isfinite(totals.time)]


@settings(max_examples=60)
@given(st.integers(0, 2**31))
def test_without_a_limit_it_is_brute_force(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    found, all_of_them = search(problem), every(problem)
    if not all_of_them:
        assert found is None
        return
    assert found is not None and found.totals == evaluate(problem, found.states)
    assert found.totals.time == found.bound == min(t.time for t in all_of_them)


@settings(max_examples=60)
@given(st.integers(0, 2**31))
def test_under_a_limit_it_keeps_what_it_promises(seed: int) -> None:
    """Within the limit, never below the bound, the bound never above the best; nothing only where nothing is."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 800)
    all_of_them = every(problem)
    if not all_of_them:
        assert search(problem, 1.0) is least_memory(problem) is None
        return
    least = min(t.peak for t in all_of_them)
    assert evaluate(problem, least_memory(problem) or []).peak == least
    assert search(problem, least - 1) is None
    for limit in (least, *rng.uniform(least, max(t.peak for t in all_of_them), 3)):
        best = min(t.time for t in all_of_them if t.peak <= limit)
        found = search(problem, limit)
        assert found is not None and found.totals == evaluate(problem, found.states)
        assert found.totals.peak <= limit
        assert found.bound <= best + 1e-6 and found.totals.time >= best - 1e-6


def test_the_bound_is_near_where_layers_are_many() -> None:
    """40 equal layers of a fast state and a lean one: some layers have the one, some the other, and it is exact."""
    stay = np.where(np.eye(2) > 0, 0.0, 1.0)
    node = Node(np.array([1.0, 5.0]), np.array([7.0, 2.0]), np.array([3.0, 1.0]))
    start = Node(np.zeros(2), np.zeros(2), np.zeros(2))
    problem = Problem([start, node], {(0, 1): Edge(stay, np.zeros((2, 2)))}, (0, 1, 40))
    for limit in (100, 150, 200, 250):
        found = search(problem, float(limit))
        assert found is not None and found.totals.peak <= limit
        fast = (limit - 3 - 40 * 2) // 5  # layers that may be fast
        best = fast * 1 + (40 - fast) * 5 + (1 if 0 < fast < 40 else 0)
        assert found.totals.time == best
        assert found.totals.time - 6 <= found.bound <= best


def test_states_that_are_not_allowed() -> None:
    free = Edge(np.zeros((2, 1)), np.zeros((2, 1)))
    one = Node(np.array([math.inf, 2.0]), np.zeros(2), np.zeros(2))
    last = Node(np.zeros(1), np.zeros(1), np.zeros(1))
    assert solve(Problem([one, last], {(0, 1): free}), lambda time, memory: time) == [1, 0]
    none = one._replace(time=np.full(2, math.inf))
    assert search(Problem([none, last], {(0, 1): free})) is None


def test_edges_that_cross_are_refused() -> None:
    node = Node(np.zeros(1), np.zeros(1), np.zeros(1))
    edge = Edge(np.zeros((1, 1)), np.zeros((1, 1)))
    row = {(k, k + 1): edge for k in range(3)}
    with pytest.raises(ValueError, match=r"edges \(0, 2\) and \(1, 3\) cross"):
        search(Problem([node] * 4, {**row, (0, 2): edge, (1, 3): edge}))
    with pytest.raises(ValueError, match="every two neighbours"):
        search(Problem([node] * 4, {(0, 1): edge}))
    with pytest.raises(ValueError, match="an edge leaves the layer"):
        search(Problem([node] * 4, {**row, (0, 2): edge}, (1, 3, 2)))
