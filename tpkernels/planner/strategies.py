"""How an operator may be cut: a method on a grid, and data-parallel copies of it; where its tensors then lie. Pure.

    method              ranks of a copy    as into (qkv, up, head)      as back (out, down)
    1d                  any                column_parallel, X whole     row_parallel, Y whole
    1d-sp               any                column_parallel              row_parallel
    2d                  q x q              summa                        summa
    2.5d                q x q x depth      summa                        summa
    3d                  q x q x q          three_d                      three_d, swapped
    spatial-temporal    2^k x 2^k          spatial_temporal             spatial_temporal

Copies are outermost: the ranks of each are consecutive, and the batch is cut over copies first. So are the depths of
2.5-D: it and copies of 2-D have the same blocks of weights and activations on the same ranks. They differ in what is
cut over all ranks of a copy (embedding, norms, biases: over depths, too); in the sum of gradients, which over depths is
the layer's, counted message by message, and over copies a hook's, counted as a tree; and in the optimizer's states,
which copies may share (ZeRO-1).

In one dimension there may be more ranks than heads of keys and values: some ranks in a row then hold the same ones
(``nn.SharedColumnParallelLinear``), and attention stays where they are made.

An operator between linear layers has a ``Placement``: an *outer* one (of the residual stream) is where some strategy's
x lies, an *inner* one (heads, inner features of the MLP) where its y lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Any

from tpkernels.errors import ArgumentError
from tpkernels.grids import (
    Cluster,
    Layout,
    Method,
    column_parallel,
    data_parallel,
    exchange_us,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    messages,
    row_parallel,
    sent_elements,
    spatial_temporal,
    summa,
    three_d,
)
from tpkernels.grids.data_parallel import side_by_side
from tpkernels.planner.model import ModelShape

__all__ = [
    "METHODS",
    "Placement",
    "Strategy",
    "kv_copies",
    "misfits",
    "moved_bytes",
    "moved_us",
    "placements",
    "strategies",
]

METHODS = ("1d", "1d-sp", "2d", "2.5d", "3d", "spatial-temporal")
NAMES: Mapping[str, str] = {
    "1d": "1-D",
    "1d-sp": "1-D, sequence parallel",
    "2d": "2-D",
    "2.5d": "2.5-D",
    "3d": "3-D",
    "spatial-temporal": "spatial-temporal",
}
# Ranks of a copy beyond which no method is looked at: exchanges are simulated message by message.
MOST_RANKS = 128


@dataclass(frozen=True)
class Strategy:
    """``method`` on ``ranks`` ranks (of which 2.5-D has ``depth`` depths), and so many ``copies`` of it."""

    method: str
    ranks: int
    copies: int
    depth: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.ranks * self.copies

    def one(self, back: bool) -> Method:
        """The method on one copy."""
        return _method(self.method, self.ranks, self.depth, back)

    def whole(self, back: bool) -> Method:
        """The method on all copies."""
        return data_parallel(self.one(back), self.copies)

    @cached_property
    def outer(self) -> Placement:
        """Of x into, and of y back."""
        return Placement(self.one(False).home("X"), self.copies)

    @cached_property
    def inner(self) -> Placement:
        """Of y into, and of x back."""
        return Placement(self.one(False).home("Y"), self.copies)

    @property
    def text(self) -> str:
        """For tables: "2 x 2-D of 2 x 2"."""
        if self.ranks == 1:
            return f"{self.copies} copies" if self.copies > 1 else "one rank"
        copies = f"{self.copies} x " if self.copies > 1 else ""
        return f"{copies}{NAMES[self.method]} of {self.one(False).grid}"

    def to_dict(self) -> dict[str, Any]:
        """What ``from_dict`` takes."""
        found: dict[str, Any] = {"method": self.method, "ranks": self.ranks, "copies": self.copies}
        return {**found, "depth": self.depth} if self.method == "2.5d" else found

    @classmethod
    def from_dict(cls, given: Any) -> Strategy:
        """What ``to_dict`` made.

        Raises:
            ArgumentError: it is something else. GroupError: ranks that are no grid of the method.
        """
        try:
            made = cls(**given)
            numbers = (made.ranks, made.copies, made.depth)
            if made.method not in METHODS or not all(type(n) is int and n > 0 for n in numbers):
                raise TypeError
        except TypeError:
            raise ArgumentError(
                f"strategy: expected a method of {', '.join(METHODS)}, its ranks and copies, got {given!r}."
            ) from None
        made.one(False)
        return made


@lru_cache(maxsize=256)
def _method(method: str, ranks: int, depth: int, back: bool) -> Method:
    if method in ("1d", "1d-sp"):
        make = row_parallel if back else column_parallel
        return make(grid_1d(ranks), method == "1d-sp")
    if method == "3d":
        return three_d(grid_3d(ranks), back)
    if method == "spatial-temporal":
        return spatial_temporal(grid_spatial_temporal(ranks))
    return summa(grid_2d(ranks) if method == "2d" else grid_2p5d(ranks, depth))


@dataclass(frozen=True)
class Placement:
    """A layout on the ranks of a copy, side by side on so many copies."""

    layout: Layout
    copies: int

    @cached_property
    def full(self) -> Layout:
        """On all ranks."""
        return side_by_side(self.layout, self.copies) if self.copies > 1 else self.layout

    @property
    def share(self) -> float:
        """Of the tensor, what a rank has: the most."""
        blocks = (block for block in self.layout.blocks if block is not None)
        return max(float(b.rows.share * b.columns.share) for b in blocks) / self.copies

    @property
    def row_parts(self) -> int:
        """Parts of the rows, over all copies."""
        return self.copies * max(b.rows.parts for b in self.layout.blocks if b is not None)

    @property
    def column_parts(self) -> int:
        """Parts of the features."""
        return max(b.columns.parts for b in self.layout.blocks if b is not None)

    def same(self, other: Placement) -> bool:
        """Whether every rank has the same block in both."""
        return self is other or not _differ(self, other)


@lru_cache(maxsize=1 << 16)
def _differ(one: Placement, other: Placement) -> bool:
    a, b = _common(one, other)
    return bool(a.blocks != b.blocks)


@lru_cache(maxsize=1 << 16)
def _common(one: Placement, other: Placement) -> tuple[Layout, Layout]:
    """Both on so few ranks that their pattern repeats behind them, where copies are many."""
    repeats = gcd(one.copies, other.copies)
    parts = []
    for placement in (one, other):
        copies = placement.copies // repeats
        parts.append(side_by_side(placement.layout, copies) if copies > 1 else placement.layout)
    return parts[0], parts[1]


def moved_us(
    one: Placement, other: Placement, rows: int, columns: int, cluster: Cluster, element_bytes: int
) -> float:
    """The time of a tensor's way from one placement to the other; 0 where every rank has its block already."""
    repeats = gcd(one.copies, other.copies)
    source, target = _common(one, other)
    return exchange_us(source, target, rows // repeats, columns, cluster, element_bytes=element_bytes)


def moved_bytes(one: Placement, other: Placement, rows: int, columns: int, element_bytes: int) -> float:
    """Bytes that a rank sends on that way, in the mean."""
    source, target = _common(one, other)
    if source.blocks == target.blocks:
        return 0.0
    repeats = gcd(one.copies, other.copies)
    sent = sent_elements(messages(source, target), rows // repeats, columns)
    return sent * element_bytes / source.grid.world


def strategies(world: int, methods: Iterable[str] = METHODS) -> tuple[Strategy, ...]:
    """Every method on every number of ranks that divides the world, the rest being copies.

    One rank a copy is data parallelism alone, of whatever method; it is there once. 2.5-D of depth 1 is 2-D, and with
    one rank a depth data parallelism.
    """
    return tuple(_strategies(world, frozenset(methods)))


def _strategies(world: int, methods: frozenset[str]) -> Iterator[Strategy]:
    alone = next((m for m in ("1d-sp", "1d", "2d", "3d", "spatial-temporal") if m in methods), None)
    for ranks in (n for n in range(1, min(world, MOST_RANKS) + 1) if world % n == 0):
        copies = world // ranks
        for method in METHODS:
            if method not in methods:
                continue
            if ranks == 1:
                if method == alone:
                    yield Strategy(method, 1, copies)
            elif method == "2.5d":
                for depth in (d for d in range(2, ranks // 2) if ranks % d == 0):
                    if math.isqrt(ranks // depth) ** 2 == ranks // depth:
                        yield Strategy(method, ranks, copies, depth)
            elif _is_grid(method, ranks):
                yield Strategy(method, ranks, copies)


def _is_grid(method: str, ranks: int) -> bool:
    if method == "2d":
        return math.isqrt(ranks) ** 2 == ranks
    if method == "3d":
        return any(q * q * q == ranks for q in range(1, ranks + 1))
    if method == "spatial-temporal":
        return ranks & (ranks - 1) == 0 and ranks.bit_length() % 2 == 1
    return True


def placements(some: Iterable[Strategy], *, outer: bool) -> tuple[tuple[Placement, Strategy], ...]:
    """The different placements that strategies have, each with the first strategy that has it."""
    found: list[tuple[Placement, Strategy]] = []
    for strategy in some:
        placement = strategy.outer if outer else strategy.inner
        if not any(placement.same(other) for other, _ in found):
            found.append((placement, strategy))
    return tuple(found)


def kv_copies(placement: Placement, model: ModelShape) -> int:
    """How many ranks of a copy hold each head of keys and values, where heads lie so."""
    return placement.column_parts // gcd(model.kv_heads, placement.column_parts)


def misfits(strategy: Strategy, model: ModelShape) -> list[str]:
    """What of the model the strategy cannot cut in equal parts, in sentences that say what would fit; empty: none."""
    into, back = strategy.one(False).cuts, strategy.one(True).cuts
    heads = strategy.inner
    kv_parts = 1 if strategy.method.startswith("1d") else heads.column_parts
    wanted = [
        ("batch", model.batch, heads.row_parts, "whole sequences (for attention)"),
        ("batch x sequence", model.tokens, strategy.copies * math.lcm(into.m, back.m), "rows"),
        ("heads", model.heads, heads.column_parts, "heads"),
        ("kv_heads", model.kv_heads, kv_parts, "heads of keys and values"),
        ("hidden", model.hidden, math.lcm(into.k, back.n), "features"),
        ("heads x head_dim", model.width, math.lcm(into.n, back.k), "features of all heads"),
        ("ffn", model.ffn, math.lcm(into.n, back.k), "inner features"),
        ("vocab", model.vocab, into.n, "logits"),
        ("vocab", model.vocab, strategy.ranks // strategy.outer.column_parts, "rows of the embedding"),
    ]
    found = []
    for name, size, parts, what in wanted:
        if size % parts:
            below = size // parts * parts
            fits = f"{below} or {below + parts}" if below else f"{parts}"
            found.append(
                f"{name}: {strategy.text} cuts {what} in {parts} equal parts, but it is {size}; {fits} would fit."
            )
    return found
