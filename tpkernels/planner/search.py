"""The best state of every operator in a row with residual edges: segmented dynamic programming, as in PrimePar. Pure.

Contract: nodes 0 .. n stand in a row; each has states, and each state a time, a memory and a passing memory. Edges join
neighbours, and others over them (residuals); each has a time and a memory for every pair of states. A range of nodes
may be a layer that is repeated. Wanted are states whose times are least in sum, while

    sum of memories + largest passing memory <= limit

``solve`` is exact without a limit. Between two nodes i and j that nothing jumps over,

    C[i, j](a, c) = min over b of C[i, k](a, b) + node k(b) + C[k, j](b, c)      (+ edge (i, j)(a, c))

so a piece of the row is a matrix over the states of its two ends, edges over it are added when it is whole, and equal
layers are put together by doubling. Edges may nest or follow one another; those that cross are refused.

With a limit, memory gets a price (Lagrange; PrimePar's alpha): for a price the search is exact, and tells a time below
which no assignment within the limit comes (``bound``). Prices are where the lower hull of memory and time meets the
limit; between the two neighbours there, layers of the one and of the other are put together. The largest passing memory
is tried as up to ``_CAPS`` ceilings on the states. So: what is returned is within the limit, and no assignment
within the limit takes less than ``bound``; both are tested against brute force.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Found", "Node", "Problem", "Totals", "evaluate", "least_memory", "search", "solve"]

Array = NDArray[np.float64]
_CAPS = 8  # of the largest passing memory
_PRICES = 40  # tried for one ceiling


class Node(NamedTuple):
    """By state: time (infinite: not allowed), memory that stays, memory while the operator runs."""

    time: Array
    memory: Array
    passing: Array


class Edge(NamedTuple):
    """By states of its two ends; an infinite time: not together."""

    time: Array
    memory: Array


@dataclass(frozen=True, eq=False)
class Problem:
    """``repeat`` (i, j, n): nodes i+1 .. j, with edges among i .. j, are n layers; i and j have the same states.

    An assignment is the state of every node of the row with all layers: 0 .. i, n times i+1 .. j, then j+1 ...
    """

    nodes: Sequence[Node]
    edges: Mapping[tuple[int, int], Edge]
    repeat: tuple[int, int, int] | None = None

    @cached_property
    def unrolled(self) -> list[int]:
        """The node at every place of the row."""
        if self.repeat is None:
            return list(range(len(self.nodes)))
        i, j, n = self.repeat
        return [
            *range(i + 1),
            *[k for _ in range(n) for k in range(i + 1, j + 1)],
            *range(j + 1, len(self.nodes)),
        ]

    @cached_property
    def pairs(self) -> list[tuple[int, int, tuple[int, int]]]:
        """Places that every edge joins, and which edge."""
        found = []
        i, j, n = self.repeat or (0, len(self.nodes) - 1, 1)
        more = (n - 1) * (j - i)
        for a, b in self.edges:
            if i <= a and b <= j:
                found += [(a + layer * (j - i), b + layer * (j - i), (a, b)) for layer in range(n)]
            else:
                found.append((a + more * (a >= j), b + more * (b >= j), (a, b)))
        return found


class Totals(NamedTuple):
    """Of an assignment."""

    time: float
    memory: float
    passing: float

    @property
    def peak(self) -> float:
        """What must be within the limit."""
        return self.memory + self.passing


class Found(NamedTuple):
    """The best assignment that was found; none within the limit takes less than ``bound``."""

    states: list[int]
    totals: Totals
    bound: float


def evaluate(problem: Problem, states: Sequence[int]) -> Totals:
    """Adds everything up."""
    time = memory = passing = 0.0
    for place, state in zip(problem.unrolled, states, strict=True):
        node = problem.nodes[place]
        time += float(node.time[state])
        memory += float(node.memory[state])
        passing = max(passing, float(node.passing[state]))
    for a, b, name in problem.pairs:
        edge = problem.edges[name]
        time += float(edge.time[states[a], states[b]])
        memory += float(edge.memory[states[a], states[b]])
    return Totals(time, memory, passing)


class _Piece(NamedTuple):
    """Costs over the states of both ends, theirs apart; and the states between them for a pair of ends."""

    cost: Array
    between: Callable[[int, int], list[int]]


def solve(
    problem: Problem, weigh: Callable[[Array, Array], Array], ceiling: float = np.inf
) -> list[int] | None:
    """The assignment with the least sum of ``weigh(time, memory)``, exactly; None if none is allowed.

    Args:
        weigh: linear, such as time + price * memory.
        ceiling: states with more passing memory are left out.
    Raises:
        ValueError: edges that cross.
    """

    def weighed(time: Array, memory: Array, allowed: NDArray[np.bool_]) -> Array:
        finite = np.where(allowed, time, 0.0)  # (the weight of a time may be 0)
        return np.where(allowed, weigh(finite, memory), np.inf)

    costs = [
        weighed(node.time, node.memory, np.isfinite(node.time) & (node.passing <= ceiling))
        for node in problem.nodes
    ]
    edges = {name: weighed(*edge, np.isfinite(edge.time)) for name, edge in problem.edges.items()}
    _check_edges(problem)
    if problem.repeat is None:
        pieces = [_segment(costs, edges, 0, len(costs) - 1)]
        joints: list[Array] = []
    else:
        i, j, n = problem.repeat
        last = len(costs) - 1
        layers = _power(_segment(costs, edges, i, j), costs[j], n)
        pieces = [layers]
        joints = []
        if i > 0:
            pieces.insert(0, _segment(costs, edges, 0, i))
            joints.append(costs[i])
        if j < last:
            pieces.append(_segment(costs, edges, j, last))
            joints.append(costs[j])
    whole = pieces[0]
    for joint, piece in zip(joints, pieces[1:], strict=True):
        whole = _joined(whole, joint, piece)
    total = costs[0][:, None] + whole.cost + costs[-1][None, :]
    a, c = np.unravel_index(int(np.argmin(total)), total.shape)
    if not np.isfinite(total[a, c]):
        return None
    return [int(a), *whole.between(int(a), int(c)), int(c)]


def _check_edges(problem: Problem) -> None:
    last = len(problem.nodes) - 1
    names = list(problem.edges)
    for (a, b), (c, d) in itertools.combinations(names, 2):
        if a < c < b < d or c < a < d < b:
            raise ValueError(f"edges {(a, b)} and {(c, d)} cross")
    if any((k, k + 1) not in problem.edges for k in range(last)) or any(a >= b for a, b in names):
        raise ValueError("every two neighbours need an edge, and every edge must go forward")
    if problem.repeat is not None:
        i, j, n = problem.repeat
        if n < 1 or any(a < k < b for a, b in names for k in (i, j)):
            raise ValueError(f"an edge leaves the layer {(i, j)}, or it is repeated {n} times")


def _segment(costs: Sequence[Array], edges: Mapping[tuple[int, int], Array], i: int, j: int) -> _Piece:
    """Nodes i .. j: pieces between the places that no edge inside jumps over, then the edge over all of them."""
    at, whole = i, None
    while at < j:
        end = max(b for a, b in edges if (a == at and b <= j and (a, b) != (i, j)) or (a, b) == (at, at + 1))
        if end == at + 1:
            piece = _Piece(edges[at, end], lambda a, c: [])
        else:
            piece = _segment(costs, edges, at, end)
        whole = piece if whole is None else _joined(whole, costs[at], piece)
        at = end
    assert whole is not None
    if j > i + 1 and (i, j) in edges:
        whole = whole._replace(cost=whole.cost + edges[i, j])
    return whole


def _joined(left: _Piece, joint: Array, right: _Piece) -> _Piece:
    sums = left.cost[:, :, None] + (joint[:, None] + right.cost)[None]
    best = np.argmin(sums, axis=1)
    cost = np.take_along_axis(sums, best[:, None, :], axis=1)[:, 0, :]

    def between(a: int, c: int) -> list[int]:
        b = int(best[a, c])
        return [*left.between(a, b), b, *right.between(b, c)]

    return _Piece(cost, between)


def _power(piece: _Piece, joint: Array, n: int) -> _Piece:
    """``n`` of them, by doubling."""
    whole = None
    while True:
        if n & 1:
            whole = piece if whole is None else _joined(whole, joint, piece)
        n >>= 1
        if not n:
            assert whole is not None
            return whole
        piece = _joined(piece, joint, piece)


def least_memory(problem: Problem) -> list[int] | None:
    """The assignment that needs least; None if none is allowed."""
    found = (_least(problem, ceiling) for ceiling in _passing_sizes(problem))
    return min((f for f in found if f), key=lambda f: evaluate(problem, f).peak, default=None)


def _least(problem: Problem, ceiling: float) -> list[int] | None:
    return solve(problem, lambda time, memory: memory, ceiling)


def _passing_sizes(problem: Problem) -> list[float]:
    values = (node.passing[np.isfinite(node.time)] for node in problem.nodes)
    return sorted({float(v) for some in values for v in some})


def search(problem: Problem, limit: float = np.inf) -> Found | None:
    """The best assignment within the limit, as the module says; None if there is none.

    Without a limit that matters ``bound`` is its time: it is the best of all.
    """
    free = solve(problem, lambda time, memory: time)
    if free is None:
        return None
    totals = evaluate(problem, free)
    if totals.peak <= limit:
        return Found(free, totals, totals.time)
    leanest = least_memory(problem)
    assert leanest is not None
    lean = evaluate(problem, leanest)
    if lean.peak > limit:
        return None
    best = Found(leanest, lean, lean.time)
    bound = np.inf
    for least, ceiling in _ceilings(problem):
        if least > limit:
            continue
        found, below = _under(problem, limit, least, ceiling)
        bound = min(bound, below)
        if found is not None and found.totals.time < best.totals.time:
            best = found
    return best._replace(bound=float(max(bound, totals.time)))


def _ceilings(problem: Problem) -> Iterator[tuple[float, float]]:
    """Ranges of passing memory that have all states in them."""
    sizes = _passing_sizes(problem)
    groups = [list(g) for g in np.array_split(np.array(sizes), min(_CAPS, len(sizes)))]
    for group in groups:
        yield float(group[0]), float(group[-1])


def _under(problem: Problem, limit: float, least: float, ceiling: float) -> tuple[Found | None, float]:
    """With states of a passing memory up to ``ceiling``, in assignments that have some from ``least`` on."""

    def priced(price: float) -> tuple[list[int], Totals] | None:
        states = solve(problem, lambda time, memory: time + price * memory, ceiling)
        return None if states is None else (states, evaluate(problem, states))

    room = limit - least
    fast = priced(0.0)
    slow_states = _least(problem, ceiling)
    if fast is None or slow_states is None:
        return None, np.inf
    slow = slow_states, evaluate(problem, slow_states)
    if slow[1].memory > room:
        return None, np.inf  # no assignment of this kind is within the limit
    bound = fast[1].time
    kept = [fast, slow]
    for _ in range(_PRICES):
        spread = fast[1].memory - slow[1].memory
        if fast[1].peak <= limit or spread <= 0 or slow[1].time <= fast[1].time:
            break
        price = (slow[1].time - fast[1].time) / spread
        middle = priced(price)
        assert middle is not None
        kept.append(middle)
        value = middle[1].time + price * middle[1].memory
        bound = max(bound, value - price * room)
        if value >= (fast[1].time + price * fast[1].memory) * (1 - 1e-12):
            break  # nothing below the line from the one to the other
        if middle[1].peak <= limit:
            slow = middle
        else:
            fast = middle
    kept += _mixed(problem, fast[0], slow[0])
    within = [Found(states, totals, bound) for states, totals in kept if totals.peak <= limit]
    return min(within, key=lambda f: f.totals.time, default=None), bound


def _mixed(problem: Problem, fast: list[int], slow: list[int]) -> list[tuple[list[int], Totals]]:
    """Some layers of the one assignment, and the others of the other."""
    if problem.repeat is None:
        cuts = range(1, len(fast))
    else:
        i, j, n = problem.repeat
        cuts = range(i + 1, i + 2 + n * (j - i), j - i)
    mixes = [one[:cut] + other[cut:] for one, other in ((fast, slow), (slow, fast)) for cut in cuts]
    return [(states, evaluate(problem, states)) for states in mixes]
