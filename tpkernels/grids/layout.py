"""Layouts: which block of a matrix each rank of a grid has; and what must be sent to get from one to another.

Contract: everything is a pure function of layouts; the sizes of the matrix come in only where bytes are counted. A
layout gives every position of its grid one ``Block``, or None. Ranks may hold the same block (replicas), and blocks
may be partial sums: ``terms`` says which part of the summed dimension a block has. So one function, ``messages``,
derives every exchange of this package:

    from                   to                         is
    one owner each         other owners               a permutation, a ring's shift
    one owner each         several holders            broadcast, all-gather
    partial sums           one owner each             reduce, reduce-scatter
    replicas               anything                   the nearest holder sends; who has it sends itself nothing

It also proves, each time, that every block arrives whole and no addend twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from tpkernels.grids.grid import Grid
from tpkernels.grids.spans import ALL, WHOLE, Span, Terms, common, part, united, within

__all__ = ["Block", "Layout", "Message", "from_blocks", "messages", "rows_over", "sent_elements", "whole"]


class Block(NamedTuple):
    """A rectangle of a matrix; ``terms``: the part of the sum that its values have."""

    rows: Span
    columns: Span
    terms: Terms = ALL

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of the block, where the matrix is ``rows`` x ``columns``."""
        return self.rows.length(rows), self.columns.length(columns)

    def __str__(self) -> str:
        text = f"rows {self.rows}, columns {self.columns}"
        return text if self.terms == ALL else f"{text}, summed over {' and '.join(map(str, self.terms))}"


@dataclass(frozen=True)
class Layout:
    """The block of each position of ``grid``; None: that rank has none of the matrix."""

    grid: Grid
    blocks: tuple[Block | None, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.grid, self.blocks))

    def __hash__(self) -> int:
        return self._hash  # exchanges are looked up by their layouts in every call

    @cached_property
    def holders(self) -> dict[tuple[Span, Span], tuple[int, ...]]:
        """Positions of each rectangle, in order."""
        found: dict[tuple[Span, Span], list[int]] = defaultdict(list)
        for position, block in enumerate(self.blocks):
            if block is not None:
                found[block.rows, block.columns].append(position)
        return {rectangle: tuple(positions) for rectangle, positions in found.items()}

    @cached_property
    def replicas(self) -> int:
        """How many ranks hold each block: the most, should they differ."""
        return max((len(positions) for positions in self.holders.values()), default=0)

    def block(self, position: int) -> Block:
        """The block of a position that has one."""
        block = self.blocks[position]
        assert block is not None, f"position {position} has no block"
        return block

    def partial(self, terms: Callable[[int], Terms]) -> Layout:
        """The same rectangles as partial sums over ``terms(position)``."""
        blocks = (b and b._replace(terms=terms(p)) for p, b in enumerate(self.blocks))
        return Layout(self.grid, tuple(blocks))

    def same_places(self, other: Layout) -> bool:
        """Whether every rank has the same rectangle in both, whatever the terms."""
        return all((a and a[:2]) == (b and b[:2]) for a, b in zip(self.blocks, other.blocks, strict=True))

    def __str__(self) -> str:
        lines = (f"{p} {self.grid.coordinates[p]}: {block}" for p, block in enumerate(self.blocks))
        return "\n".join(lines)


class Message(NamedTuple):
    """``source`` gives ``target`` a rectangle of its block, to be added to what others give of it; they may be
    one."""

    source: int
    target: int
    rows: Span
    columns: Span

    def elements(self, rows: int, columns: int) -> int:
        """How many it carries."""
        return self.rows.length(rows) * self.columns.length(columns)


def from_blocks(grid: Grid, block: Callable[..., tuple[Span, Span]]) -> Layout:
    """The layout whose rectangle at coordinates (a, b, ...) is ``block(a, b, ...)``, (rows, columns)."""
    return Layout(grid, tuple(Block(*block(*coordinates)) for coordinates in grid.coordinates))


def whole(grid: Grid) -> Layout:
    """The whole matrix on every rank."""
    return Layout(grid, (Block(WHOLE, WHOLE),) * grid.world)


def rows_over(grid: Grid) -> Layout:
    """Rows cut over all positions, in order: what sequence parallelism has."""
    return Layout(grid, tuple(Block(part(p, grid.world), WHOLE) for p in range(grid.world)))


@lru_cache(maxsize=512)
def messages(source: Layout, target: Layout) -> tuple[Message, ...]:
    """What every rank must be given to get from one layout to the other, by target and then by source.

    Messages of a rank to itself are listed too (``source == target``): they are the part that it has already.
    Several messages of one rectangle to one target are the addends of a sum.

    Raises:
        ValueError: a block of ``target`` cannot be made of what ``source`` has.
    """
    if source.grid.world != target.grid.world:
        raise ValueError(f"layouts of {source.grid.world} and of {target.grid.world} ranks")
    finder = _Finder(source)
    found: list[Message] = []
    for position, block in enumerate(target.blocks):
        if block is not None:
            found += sorted(finder.needed(position, block))
    return tuple(found)


def sent_elements(exchange: Iterable[Message], rows: int, columns: int) -> int:
    """Elements that leave a rank for another, all messages together."""
    return sum(m.elements(rows, columns) for m in exchange if m.source != m.target)


class _Finder:
    """Who gives what of a layout's blocks. Looks at the few different cuts first, since ranks are many."""

    def __init__(self, source: Layout) -> None:
        self.source = source
        self.row_cuts = sorted({rows for rows, _ in source.holders})
        self.column_cuts = sorted({columns for _, columns in source.holders})
        self.crossed: dict[tuple[bool, Span], list[tuple[Span, Span]]] = {}

    def needed(self, target: int, block: Block) -> list[Message]:
        found: list[Message] = []
        for row_cut, rows in self._cross(block.rows, True):
            for column_cut, columns in self._cross(block.columns, False):
                holders = self.source.holders.get((row_cut, column_cut), ())
                givers = self._givers(holders, target, block)
                found += [Message(giver, target, rows, columns) for giver in givers]
        self._check_covered(found, target, block)
        return found

    def _cross(self, wanted: Span, rows: bool) -> list[tuple[Span, Span]]:
        """Cuts of the source that meet ``wanted``, each with what they have in common."""
        key = (rows, wanted)
        if key not in self.crossed:
            cuts = self.row_cuts if rows else self.column_cuts
            pairs = ((cut, common(cut, wanted)) for cut in cuts)
            self.crossed[key] = [(cut, both) for cut, both in pairs if both is not None]
        return self.crossed[key]

    def _givers(self, holders: tuple[int, ...], target: int, block: Block) -> list[int]:
        """One holder, the nearest, for each different part of the sum that ``block`` is to have."""
        by_terms: dict[Terms, list[int]] = defaultdict(list)
        for holder in holders:
            terms = self.source.block(holder).terms
            if within(terms, block.terms):
                by_terms[terms].append(holder)
        if by_terms:
            addends = united(span for terms in by_terms for span in terms)
            if addends != block.terms:
                raise ValueError(f"position {target} would have only {addends} of {block}")
        grid, world = self.source.grid, self.source.grid.world
        return [
            min(several, key=lambda p: (grid.distance(p, target), (p - target) % world))
            for several in by_terms.values()
        ]

    def _check_covered(self, found: list[Message], target: int, block: Block) -> None:
        rectangles = {(m.rows, m.columns) for m in found}
        if sum(r.share * c.share for r, c in rectangles) != block.rows.share * block.columns.share:
            raise ValueError(
                f"position {target} cannot get all of {block} once: no rank has the rest, or blocks of ranks overlap"
            )
