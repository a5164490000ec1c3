"""How long programs take on a described cluster, step by step. Pure; a simulation, not a measurement.

    step = slowest rank of max(products, messages)
    messages of a rank = the longest of its levels, of sending and of receiving: bytes / rate + number * latency

A message belongs to the innermost level that joins both ranks; what several ranks of a host need crosses once
(:func:`_legs`). Levels are ports of their own (NVLink, a network card) and work at the same time, in both directions.
Products run at one rate, whatever their size: small ones are faster here than on any GPU. Where a method's pass is one
product of gathered blocks, its exchanges lie in front of it and behind it; ``fused`` lets them run beneath it, as path
"fused" of the layers of one dimension does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tpkernels.errors import ArgumentError
from tpkernels.grids.layout import Message
from tpkernels.grids.method import Method, Sizes
from tpkernels.grids.program import Exchange, Product, Program
from tpkernels.grids.spans import Span

__all__ = ["Cluster", "Level", "Timing", "predict"]


class Level(NamedTuple):
    """Links between ranks.

    ranks: consecutive positions that it joins, those of the levels inside it among them.
    bytes_per_us: that a rank sends, and at the same time receives.
    message_us: of each message, beside its bytes.
    """

    name: str
    ranks: int
    bytes_per_us: float
    message_us: float


@dataclass(frozen=True)
class Cluster:
    """A machine: what a rank multiplies, and its links, the innermost level first.

    Raises:
        ArgumentError: a rate that is not above zero, a latency below it, levels that are not multiples of one another.
    """

    flops_per_us: float
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.flops_per_us > 0:
            raise ArgumentError(f"flops_per_us: it must be above 0, but it is {self.flops_per_us}.")
        if not self.levels:
            raise ArgumentError("levels: a cluster needs one at least, the links between its ranks.")
        inside = 1
        for level in self.levels:
            if not (level.bytes_per_us > 0 and level.message_us >= 0):
                raise ArgumentError(
                    f"levels: {level.name!r} must send more than 0 bytes a microsecond and take 0 us or more for a "
                    f"message, but they are {level.bytes_per_us} and {level.message_us}."
                )
            if level.ranks <= inside * (inside > 1) or level.ranks < 1 or level.ranks % inside:
                raise ArgumentError(
                    f"levels: {level.name!r} must join a multiple of the {inside} ranks inside it, and more than them, "
                    f"but it joins {level.ranks}."
                )
            inside = level.ranks

    def level_of(self, a: int, b: int) -> int:
        """Number of the level over which two positions talk."""
        for number, level in enumerate(self.levels):
            if a // level.ranks == b // level.ranks:
                return number
        raise ArgumentError(
            f"cluster: positions {a} and {b} are joined by none of its levels, whose last one has "
            f"{self.levels[-1].ranks} ranks; describe the links between them."
        )


class Timing(NamedTuple):
    """Microseconds: of a whole program, and what its products, and its messages, would take alone."""

    us: float
    products_us: float
    messages_us: float


def predict(
    method: Method,
    program: Program,
    sizes: Sizes,
    cluster: Cluster,
    *,
    element_bytes: int = 2,
    fused: bool = False,
) -> Timing:
    """The time of a pass of ``method``, as ``program`` (``forward`` or ``backward``) makes it.

    Args:
        element_bytes: of what travels.
        fused: exchanges run beneath the products of a method that gathers; the others overlap in any case.
    Raises:
        ArgumentError: the cluster does not join the ranks.
    """
    total = products = messages = 0.0
    for step in program.steps:
        flops = [0] * method.grid.world
        for work in step.work:
            if isinstance(work, Product):
                for position, box in enumerate(method.spans(work.kind, work.step)):
                    m, k, n = (span.length(size) for span, size in zip(box, sizes, strict=True))
                    flops[position] += 2 * m * k * n
        moved = _messages_us(step.exchanges, sizes, cluster, element_bytes)
        of_products = [f / cluster.flops_per_us for f in flops]
        total += max(max(p, moved.get(rank, 0.0)) for rank, p in enumerate(of_products))
        products += max(of_products)
        messages += max(moved.values(), default=0.0)
    if fused and method.gathers:
        total = max(products, messages)
    return Timing(total, products, messages)


def _messages_us(
    exchanges: tuple[Exchange, ...], sizes: Sizes, cluster: Cluster, element_bytes: int
) -> dict[int, float]:
    """By position, how long its messages of a step take."""
    ports: dict[tuple[int, int, bool], float] = defaultdict(float)
    for exchange in exchanges:
        rows, columns = sizes.of(exchange.operand)
        for sender, receiver, elements in _legs(exchange, cluster, rows, columns):
            number = cluster.level_of(sender, receiver)
            level = cluster.levels[number]
            us = level.message_us + elements * element_bytes / level.bytes_per_us
            ports[sender, number, True] += us
            ports[receiver, number, False] += us
    found: dict[int, float] = defaultdict(float)
    for (position, _, _), us in ports.items():
        found[position] = max(found[position], us)
    return found


def _legs(exchange: Exchange, cluster: Cluster, rows: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """Sender, receiver and elements of all that travels.

    A block that several ranks behind an outer level need crosses it once, to the one that stands there as its owner
    does among its own, which gives it to the others; addends for one rank are added up in the same way before they
    cross. So do collectives that know of hosts.
    """
    arrivals = Counter((m.target, m.rows, m.columns) for m in exchange.messages)
    sums = max(arrivals.values(), default=0) > 1  # several addends of a block, not copies of one
    several: dict[tuple[int, Span, Span, int, int], list[Message]] = defaultdict(list)
    for m in exchange.messages:
        if m.source != m.target:
            outer = cluster.level_of(m.source, m.target)
            inside = cluster.levels[outer - 1].ranks if outer > 0 else 1
            one, other = (m.target, m.source) if sums else (m.source, m.target)
            several[one, m.rows, m.columns, outer, other // inside].append(m)
    for (one, _, _, outer, _), group in several.items():
        elements = group[0].elements(rows, columns)
        others = [m.source if sums else m.target for m in group]
        if outer == 0:
            legs = [(one, other) for other in others]
        else:
            inside = cluster.levels[outer - 1].ranks
            door = min(others, key=lambda p, at=one % inside: (p % inside != at, p))  # type: ignore[misc]
            legs = [(one, door), *((door, other) for other in others if other != door)]
        for sender, receiver in legs:
            yield (receiver, sender, elements) if sums else (sender, receiver, elements)
