"""Tables of docs/grids.md that set the methods beside each other: bytes and predicted times; run make_grids.py.

Everything is read off the programs that the layers run, and off the formulas that tests hold against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from tpkernels.grids import (
    Method,
    Program,
    Sizes,
    backward,
    column_parallel,
    formula,
    forward,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    predict,
    row_parallel,
    spatial_temporal,
    stationary,
    summa,
    three_d,
)
from tpkernels.grids.one_launch import one_launch_missing
from tpkernels.planner import TOPOLOGIES

# A layer of a large model: hidden 12288, its MLP 4 times as wide.
HIDDEN = 12288
TOKENS = (2048, 16384, 131072)
WORLDS = (4, 8, 16, 64)
# Described, not measured as a whole.
CLUSTER = TOPOLOGIES["h200"].cluster


class Row(NamedTuple):
    """A method on a number of ranks: the two layers of an MLP, and how they are called."""

    name: str
    layers: tuple[Method, Method]


@cache
def rows(world: int) -> tuple[Row, ...]:
    """Every method that has so many ranks."""
    line = grid_1d(world)
    found = [Row("1-D, sequence parallel", (column_parallel(line), row_parallel(line)))]
    for name, make in (
        ("2-D", lambda: summa(grid_2d(world))),
        *((f"2.5-D, depth {d}", lambda d=d: summa(grid_2p5d(world, d))) for d in (2, 4)),
        ("3-D", lambda: three_d(grid_3d(world))),
        ("spatial-temporal", lambda: spatial_temporal(grid_spatial_temporal(world))),
    ):
        try:
            method = make()
        except ValueError:
            continue
        found.append(Row(name, (method, method)))
    return tuple(found)


def mlp(row: Row, tokens: int) -> Iterator[tuple[Method, Sizes]]:
    """The two layers and their sizes."""
    shapes = Sizes(tokens, HIDDEN, 4 * HIDDEN), Sizes(tokens, 4 * HIDDEN, HIDDEN)
    return zip(row.layers, shapes, strict=True)


def received(row: Row, tokens: int) -> Fraction:
    """Elements that a rank receives for one MLP, forward and backward."""
    total = Fraction(0)
    for method, sizes in mlp(row, tokens):
        volume = formula(method, sizes)
        total += volume["forward"] + volume["input_grad"] + volume["weight_grad"]
    return total


def table() -> str:
    """GB that a rank receives for one MLP, by method, ranks and tokens."""
    head = (
        "| ranks | method | "
        + " | ".join(f"{t:,} tokens" for t in TOKENS)
        + " | weights at rest | x and y at rest |"
    )
    lines = [head, "|" + " --- |" * (4 + len(TOKENS))]
    for world in WORLDS:
        best = [min(received(row, t) for row in rows(world)) for t in TOKENS]
        for row in rows(world):
            cells = []
            for tokens, least in zip(TOKENS, best, strict=True):
                gb = f"{float(received(row, tokens)) * 2 / 1e9:.2f}"
                cells.append(f"**{gb}**" if received(row, tokens) == least else gb)
            copies = row.layers[0].home("W").replicas
            weights = f"1/{world // copies}"
            lines.append(f"| {world} | {row.name} | " + " | ".join(cells) + f" | {weights} | 1/{world} |")
    return "\n".join(lines)


def launched() -> str:
    """GB that a rank receives for one MLP by messages, and where each pass is one launch, which results stay."""
    head = (
        "| ranks | method | "
        + " | ".join(f"{t:,} tokens, by messages | in one launch" for t in TOKENS)
        + " |"
    )
    lines = [head, "|" + " --- |" * (2 + 2 * len(TOKENS))]
    for world in WORLDS:
        for row in rows(world):
            if any(method.steps == 1 or one_launch_missing(method) for method in row.layers):
                continue
            cells = []
            for tokens in TOKENS:
                elements = sum(
                    program.sent_elements(sizes)
                    for method, sizes in mlp(row, tokens)
                    for program in programs(_still(method))
                )
                cells += [
                    f"{float(gb) * 2 / 1e9:.2f}" for gb in (received(row, tokens), Fraction(elements, world))
                ]
            lines.append(f"| {world} | {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _still(method: Method) -> Method:
    still = stationary(method)
    assert still is not None
    return still


@cache
def programs(method: Method) -> tuple[Program, Program]:
    """Forward, and backward of what it leaves."""
    there = forward(method)
    held = {operand: there.outputs[operand].layout for operand in ("X", "W") if operand in there.outputs}
    return there, backward(method, held=held)


@cache
def predicted_ms(row: Row, tokens: int, fused: bool) -> float:
    """Of one MLP, forward and backward."""
    return sum(
        predict(method, program, sizes, CLUSTER, fused=fused).us / 1e3
        for method, sizes in mlp(row, tokens)
        for program in programs(method)
    )


def ways(world: int) -> list[tuple[str, Row, bool]]:
    """Rows with their names: one dimension on path "fused", and not; the others overlap by themselves."""
    found = [(row.name, row, False) for row in rows(world)]
    name, line, _ = found[0]
    return [found[0], (f"{name}, fused", line, True), *found[1:]]


def products_ms(world: int, tokens: int) -> float:
    """Of one MLP without any message."""
    return 2 * 3 * 2 * tokens * HIDDEN * 4 * HIDDEN / world / CLUSTER.flops_per_us / 1e3


def times() -> str:
    """Milliseconds of one MLP, predicted, by method, ranks and tokens."""
    lines = ["| ranks | method | " + " | ".join(f"{t:,} tokens" for t in TOKENS) + " |"]
    lines.append("|" + " --- |" * (2 + len(TOKENS)))
    for world in WORLDS:
        told = [[predicted_ms(row, t, fused) for t in TOKENS] for _, row, fused in ways(world)]
        best = [min(column) for column in zip(*told, strict=True)]
        for (name, _, _), line in zip(ways(world), told, strict=True):
            cells = [
                f"**{ms:.1f}**" if ms == least else f"{ms:.1f}" for ms, least in zip(line, best, strict=True)
            ]
            lines.append(f"| {world} | {name} | " + " | ".join(cells) + " |")
        alone = (products_ms(world, t) for t in TOKENS)
        lines.append(f"| {world} | *products alone* | " + " | ".join(f"{ms:.1f}" for ms in alone) + " |")
    return "\n".join(lines)
