"""All ranks of a grid in one process, in NumPy: programs of ``tpkernels.grids`` carried out as they are written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tpkernels.grids.layout import Block, Layout
from tpkernels.grids.method import Pass, Sizes
from tpkernels.grids.program import Exchange, Product, Program
from tpkernels.grids.spans import Span

Array = np.ndarray
# Of one rank, by name.
Buffers = dict[str, Array]


def cut(full: Array, rows: Span, columns: Span) -> Array:
    (a, b), (c, d) = rows.elements(full.shape[0]), columns.elements(full.shape[1])
    return full[a:b, c:d]


def blocks_of(full: Array, layout: Layout) -> list[Array | None]:
    return [None if b is None else cut(full, b.rows, b.columns).copy() for b in layout.blocks]


def within_block(block: Block, rows: Span, columns: Span, shape: tuple[int, int]) -> tuple[slice, slice]:
    """Where a rectangle of the matrix lies in the block."""
    found = []
    for outer, inner, size in zip(block[:2], (rows, columns), shape, strict=True):
        begin, (a, b) = outer.elements(size)[0], inner.elements(size)
        found.append(slice(a - begin, b - begin))
    return found[0], found[1]


def exchange(some: Exchange, ranks: list[Buffers], sizes: Sizes) -> tuple[list[Array | None], int]:
    """What every rank has of the target, and how many elements travelled."""
    shape = sizes.of(some.operand)
    source, target = some.source, some.target
    made: list[Array | None] = [
        None if block is None else np.zeros(block.shape(*shape)) for block in target.layout.blocks
    ]
    sent = 0
    for message in some.messages:
        giver, taker = source.layout.block(message.source), target.layout.block(message.target)
        piece = ranks[message.source][source.buffer][
            within_block(giver, message.rows, message.columns, shape)
        ]
        into = made[message.target]
        assert into is not None
        into[within_block(taker, message.rows, message.columns, shape)] += piece
        sent += piece.size * (message.source != message.target)
    return made, sent


def product(work: Product, own: Buffers) -> Array:
    left, right = own[work.left], own[work.right]
    if work.kind is Pass.WEIGHT_GRAD:
        return left.T @ right
    return left @ (right.T if work.kind is Pass.FORWARD else right)


def simulate(
    program: Program, given: Mapping[str, list[Array | None]], sizes: Sizes
) -> tuple[dict[str, list[Array | None]], int]:
    """Outputs by operand and rank, and the elements that travelled between ranks."""
    world = len(next(iter(given.values())))
    ranks: list[Buffers] = [
        {name: some[p] for name, some in given.items() if some[p] is not None} for p in range(world)
    ]
    sent = 0
    for number, step in enumerate(program.steps):
        arrived = []
        for some in step.exchanges:
            made, count = exchange(some, ranks, sizes)
            arrived.append((some.target.buffer, made, some.adds))
            sent += count
        results = [
            [
                (w.into, product(w, own) if isinstance(w, Product) else own[w.of].sum(0, keepdims=True))
                for w in step.work
            ]
            for own in ranks
        ]
        for name, made, adds in arrived:  # behind the work, which does not see them yet
            for own, array in zip(ranks, made, strict=True):
                if array is not None:
                    own[name] = own[name] + array if adds and name in own else array
        for own, some in zip(ranks, results, strict=True):
            for name, array in some:
                own[name] = own[name] + array if name in own else array
        for own in ranks:  # what is used later must be said to be
            for name in [n for n in own if program.last_use.get(n, -1) <= number]:
                del own[name]
    outputs = {operand: [own.get(held.buffer) for own in ranks] for operand, held in program.outputs.items()}
    return outputs, sent
