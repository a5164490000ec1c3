"""What exchanges are in the field's words, and how much each step asks of compute and links: for planners and pictures.

Derived from messages alone. An exchange falls into groups of ranks that have nothing to do with one another; each is

    shift             every rank sends to one and receives from one: a ring, or a permutation
    broadcast         one rank gives its block to all others
    reduce            all ranks give addends to one
    all-gather        every rank gives its block to all others
    reduce-scatter    every rank gives every other one an addend of that one's block
    all-to-all        anything else
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tpkernels.grids.layout import Layout, Message, messages
from tpkernels.grids.method import Method, Sizes
from tpkernels.grids.program import Product, Program

__all__ = ["Collective", "Load", "collectives", "loads"]


class Collective(NamedTuple):
    """An exchange among ``ranks`` (positions, in order)."""

    kind: str
    ranks: tuple[int, ...]


class Load(NamedTuple):
    """A step's largest demands on one rank: multiply-adds, elements sent and received, messages sent or received."""

    products: int
    sent: int
    received: int
    messages: int


def collectives(source: Layout, target: Layout) -> tuple[Collective, ...]:
    """The exchange from one layout to the other; empty if no rank sends anything to another."""
    found = []
    for group in _groups([m for m in messages(source, target) if m.source != m.target]):
        ranks = sorted({p for m in group for p in (m.source, m.target)})
        found.append(Collective(_kind(group, len(ranks)), tuple(ranks)))
    return tuple(sorted(found, key=lambda c: c.ranks))


def loads(method: Method, program: Program, sizes: Sizes) -> tuple[Load, ...]:
    """Each step's ``Load``. Its products and its messages run at the same time."""
    world = method.grid.world
    found = []
    for step in program.steps:
        sent, received, count = [0] * world, [0] * world, [0] * world
        for exchange in step.exchanges:
            rows, columns = sizes.of(exchange.operand)
            for m in exchange.messages:
                if m.source != m.target:
                    elements = m.elements(rows, columns)
                    sent[m.source] += elements
                    received[m.target] += elements
                    count[m.source] += 1
                    count[m.target] += 1
        products = [0] * world
        for work in step.work:
            if isinstance(work, Product):
                for position, box in enumerate(method.spans(work.kind, work.step)):
                    extent = zip(box, sizes, strict=True)
                    products[position] += _product([span.length(size) for span, size in extent])
        found.append(Load(max(products), max(sent), max(received), max(count)))
    return tuple(found)


def _product(numbers: Sequence[int]) -> int:
    m, k, n = numbers
    return m * k * n


def _groups(exchange: Sequence[Message]) -> list[list[Message]]:
    """Messages whose ranks are connected, together."""
    leader: dict[int, int] = {}

    def find(rank: int) -> int:
        while leader.setdefault(rank, rank) != rank:
            rank = leader[rank]
        return rank

    for m in exchange:
        leader[find(m.source)] = find(m.target)
    groups: dict[int, list[Message]] = defaultdict(list)
    for m in exchange:
        groups[find(m.source)].append(m)
    return list(groups.values())


def _kind(group: Sequence[Message], ranks: int) -> str:
    pairs = {(m.source, m.target) for m in group}
    sources, targets = {m.source for m in group}, {m.target for m in group}
    gives_one = len({(m.source, m.rows, m.columns) for m in group}) == len(sources)
    takes_one = len({(m.target, m.rows, m.columns) for m in group}) == len(targets)
    if len(pairs) == len(group) == len(sources) == len(targets) == ranks:
        return "shift"
    if len(sources) == 1 and gives_one:
        return "broadcast"
    if len(targets) == 1 and takes_one:
        return "reduce"
    if len(pairs) == len(group) == ranks * (ranks - 1):
        if gives_one:
            return "all-gather"
        if takes_one:
            return "reduce-scatter"
    return "all-to-all"
