"""How long programs take on a described cluster, step by step. Pure; a simulation, not a measurement.

    step = slowest rank of max(products, messages)
    messages of a rank = the longest of its levels, of sending and of receiving: bytes / rate + number * latency

Sizes are taken as cut evenly: a block is its share of the matrix.

A message belongs to the innermost level that joins both ranks; what several ranks of a host need crosses once
(:func:`legs`). Levels are ports of their own (NVLink, a network card) and work at the same time, in both directions.
Products run at one rate, whatever their size: small ones are faster here than on any GPU. Where a method's pass is one
product of gathered blocks, its exchanges lie in front of it and behind it; ``fused`` lets them run beneath it, as path
"fused" of the layers of one dimension does.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from tpkernels.errors import ArgumentError
from tpkernels.grids.layout import Layout, Message, messages
from tpkernels.grids.method import Method, Sizes
from tpkernels.grids.program import Product, Program
from tpkernels.grids.spans import Span

__all__ = ["Cluster", "Level", "Timing", "exchange_us", "legs", "predict"]


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
    """A machine: what a rank multiplies, its links, the innermost level first, and its memory.

    memory_bytes_per_us: that a rank reads and writes of its own memory. For what is no product: ``predict`` has none.

    Raises:
        ArgumentError: a rate that is not above zero, a latency below it, levels that are not multiples of one another.
    """

    flops_per_us: float
    levels: tuple[Level, ...]
    memory_bytes_per_us: float = math.inf

    def __post_init__(self) -> None:
        if not self.flops_per_us > 0:
            raise ArgumentError(f"flops_per_us: it must be above 0, but it is {self.flops_per_us}.")
        if not self.memory_bytes_per_us > 0:
            raise ArgumentError(
                f"memory_bytes_per_us: it must be above 0, but it is {self.memory_bytes_per_us}."
            )
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
    flops = 2.0 * sizes.m * sizes.k * sizes.n
    for step in _demands(method, program, cluster):
        products += max(flops * share for share, _ in step) / cluster.flops_per_us
        slowest = beneath = 0.0
        for share, ports in step:
            moved = max((_port_us(port, sizes, cluster, element_bytes) for port in ports), default=0.0)
            slowest = max(slowest, moved, flops * share / cluster.flops_per_us)
            beneath = max(beneath, moved)
        total += slowest
        messages += beneath
    if fused and method.gathers:
        total = max(products, messages)
    return Timing(total, products, messages)


def exchange_us(
    source: Layout, target: Layout, rows: int, columns: int, cluster: Cluster, *, element_bytes: int = 2
) -> float:
    """The time to get a matrix from one layout to the other, with nothing else under way; 0 where all is there.

    Raises:
        ArgumentError: the cluster does not join the ranks. ValueError: as ``messages``.
    """
    if source.blocks == target.blocks:
        return 0.0
    moved = _exchange_load(source, target, cluster)
    return max(
        (
            count * cluster.levels[level].message_us
            + share * rows * columns * element_bytes / cluster.levels[level].bytes_per_us
            for level, count, share in moved
        ),
        default=0.0,
    )


class _Load(NamedTuple):
    """What a rank sends, or receives, over a level's links in a step: of an operand (its name without "d"), so many
    messages with such a part of the matrix in all."""

    operand: str
    messages: int
    share: float


# Over one level, in one direction.
_Port: TypeAlias = tuple[int, tuple[_Load, ...]]
# Of a rank in a step: the part of all products, and its ports. Ranks that have the same are in a step once.
_Demand: TypeAlias = tuple[float, tuple[_Port, ...]]


@lru_cache(maxsize=2048)
def _demands(method: Method, program: Program, cluster: Cluster) -> tuple[tuple[_Demand, ...], ...]:
    """By step, what each different rank has to do, whatever the sizes: so plans of many sizes look at messages once."""
    found = []
    world = method.grid.world
    for step in program.steps:
        shares = [0.0] * world
        for work in step.work:
            if isinstance(work, Product):
                for position, box in enumerate(method.spans(work.kind, work.step)):
                    shares[position] += math.prod((s.stop - s.start) / s.parts for s in box)
        ports: dict[tuple[int, int, bool], dict[str, _Load]] = defaultdict(dict)
        for exchange in step.exchanges:
            operand = exchange.operand.removeprefix("d")
            for port, (count, share) in _ports(exchange.messages, cluster).items():
                before = ports[port].get(operand, _Load(operand, 0, 0.0))
                ports[port][operand] = _Load(operand, before.messages + count, before.share + share)
        by_rank: dict[int, set[_Port]] = defaultdict(set)
        for (position, level, _), load in ports.items():
            by_rank[position].add((level, tuple(load.values())))
        found.append(tuple({(shares[rank], tuple(sorted(by_rank[rank]))) for rank in range(world)}))
    return tuple(found)


def _port_us(port: _Port, sizes: Sizes, cluster: Cluster, element_bytes: int) -> float:
    level = cluster.levels[port[0]]
    us = 0.0
    for operand, count, share in port[1]:
        rows, columns = sizes.of(operand)
        us += count * level.message_us + share * rows * columns * element_bytes / level.bytes_per_us
    return us


@lru_cache(maxsize=4096)
def _exchange_load(source: Layout, target: Layout, cluster: Cluster) -> tuple[tuple[int, int, float], ...]:
    """Level, messages and share of each different port of an exchange."""
    found = _ports(messages(source, target), cluster)
    return tuple({(level, count, share) for (_, level, _), (count, share) in found.items()})


def _ports(exchange: tuple[Message, ...], cluster: Cluster) -> dict[tuple[int, int, bool], tuple[int, float]]:
    """By position, level and direction (true: sending): messages, and the part of the matrix in them."""
    found: dict[tuple[int, int, bool], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for sender, receiver, share in legs(exchange, cluster):
        level = cluster.level_of(sender, receiver)
        for port in ((sender, level, True), (receiver, level, False)):
            count, before = found[port]
            found[port] = count + 1, before + share
    return found


def legs(exchange: tuple[Message, ...], cluster: Cluster) -> Iterator[tuple[int, int, float]]:
    """Sender, receiver and part of the matrix of all that travels.

    A block that several ranks behind an outer level need crosses it once, to the one that stands there as its owner
    does among its own, which gives it to the others; addends for one rank are added up in the same way before they
    cross. So do collectives that know of hosts.
    """
    arrivals = Counter((m.target, m.rows, m.columns) for m in exchange)
    sums = max(arrivals.values(), default=0) > 1  # several addends of a block, not copies of one
    several: dict[tuple[int, Span, Span, int, int], list[Message]] = defaultdict(list)
    for m in exchange:
        if m.source != m.target:
            outer = cluster.level_of(m.source, m.target)
            inside = cluster.levels[outer - 1].ranks if outer > 0 else 1
            one, other = (m.target, m.source) if sums else (m.source, m.target)
            several[one, m.rows, m.columns, outer, other // inside].append(m)
    for (one, _, _, outer, _), group in several.items():
        share = math.prod((s.stop - s.start) / s.parts for s in (group[0].rows, group[0].columns))
        others = [m.source if sums else m.target for m in group]
        if outer == 0:
            legs = [(one, other) for other in others]
        else:
            inside = cluster.levels[outer - 1].ranks
            door = min(others, key=lambda p, at=one % inside: (p % inside != at, p))  # type: ignore[misc]
            legs = [(one, door), *((door, other) for other in others if other != door)]
        for sender, receiver in legs:
            yield (receiver, sender, share) if sums else (sender, receiver, share)
