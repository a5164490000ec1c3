"""Layouts of what belongs to a cut tensor's features, or to its rows: biases, norms' weights, statistics, embeddings.

Contract: ``layout`` is that of a tensor [rows, features] of which every rank has a block, none twice. One value a
feature (a bias) is a matrix of one row; it is cut over all ranks at rest. One value a row (a maximum, a sum of squares)
is had by every rank that has a part of the row, of its part of the features.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from tpkernels.grids.grid import Grid
from tpkernels.grids.layout import Block, Layout
from tpkernels.grids.spans import WHOLE, Span, part, united

__all__ = [
    "Lookup",
    "features_home",
    "features_needed",
    "features_partial",
    "ids_home",
    "lookup",
    "over_features",
    "over_rows",
]


@lru_cache(maxsize=256)
def features_home(grid: Grid, layout: Layout) -> Layout:
    """At rest: each feature's value on one of the ranks that have the feature, in equal parts."""
    holders: dict[Span, list[int]] = defaultdict(list)
    for position in range(grid.world):
        holders[layout.block(position).columns].append(position)
    blocks: dict[int, Block] = {}
    for span, positions in holders.items():
        for index, position in enumerate(positions):
            blocks[position] = Block(WHOLE, span.cut(index, len(positions)))
    return Layout(grid, tuple(blocks[position] for position in range(grid.world)))


@lru_cache(maxsize=256)
def features_needed(layout: Layout) -> Layout:
    """Each feature's value on all ranks that have the feature."""
    blocks = (layout.block(position)._replace(rows=WHOLE) for position in range(layout.grid.world))
    return Layout(layout.grid, tuple(blocks))


@lru_cache(maxsize=256)
def features_partial(layout: Layout) -> Layout:
    """The same, as sums over the rows that each rank has: gradients of such values."""
    return features_needed(layout).partial(lambda position: united([layout.block(position).rows]))


@lru_cache(maxsize=256)
def over_features(layout: Layout) -> tuple[Layout, Layout, int]:
    """From each rank's own value of a row to those of all ranks that have a part of the row, and how many these are.

    The values are a matrix with a column for each different span of features, in order.
    """
    spans = sorted(
        {layout.block(p).columns for p in range(layout.grid.world)}, key=lambda s: s.start / s.parts
    )
    blocks = [layout.block(position) for position in range(layout.grid.world)]
    own = (Block(b.rows, part(spans.index(b.columns), len(spans))) for b in blocks)
    everyone = (Block(b.rows, WHOLE) for b in blocks)
    return Layout(layout.grid, tuple(own)), Layout(layout.grid, tuple(everyone)), len(spans)


@lru_cache(maxsize=256)
def over_rows(layout: Layout) -> tuple[Layout, Layout, int]:
    """From a value of each rank's rows, the same on all that have them, to the values of all rows on every rank.

    The values are a matrix of one column, with a row for each different span of rows, in order; and how many these are.
    """
    spans = sorted({layout.block(p).rows for p in range(layout.grid.world)}, key=lambda s: s.start / s.parts)
    own = (
        Block(part(spans.index(layout.block(p).rows), len(spans)), WHOLE) for p in range(layout.grid.world)
    )
    return (
        Layout(layout.grid, tuple(own)),
        Layout(layout.grid, (Block(WHOLE, WHOLE),) * layout.grid.world),
        len(spans),
    )


def ids_home(layout: Layout) -> Layout:
    """Of an embedding's table [ids, features], whose vectors are to lie so: ranks with the same features share ids."""
    blocks = []
    for position in range(layout.grid.world):
        columns = layout.block(position).columns
        holders = [p for p in range(layout.grid.world) if layout.block(p).columns == columns]
        blocks.append(Block(part(holders.index(position), len(holders)), columns))
    return Layout(layout.grid, tuple(blocks))


class Lookup(NamedTuple):
    """Vectors of one part of the rows: what every rank has of them from its part of the ids (``partial`` sums), the
    ranks that are to have them (``owners``), and their gradients on all that have their features (``everyone``)."""

    partial: Layout
    owners: Layout
    everyone: Layout


def lookup(layout: Layout, rows: Span) -> Lookup:
    """Of a table at ``ids_home``."""
    table = ids_home(layout)
    every = range(layout.grid.world)
    owners = (layout.block(p) if layout.block(p).rows == rows else None for p in every)
    everyone = Layout(layout.grid, tuple(Block(rows, layout.block(p).columns) for p in every))
    partial = everyone.partial(lambda p: (table.block(p).rows,))
    return Lookup(partial, Layout(layout.grid, tuple(owners)), everyone)
