"""A tensor-parallel method as pure functions: which products each rank makes at each step, and where matrices lie.

Contract: a linear layer is Y = X W^T with X [M, K], W [N, K] (as ``nn.Linear`` stores it) and Y [M, N]. Each of its
three passes sums M x K x N products:

    pass          result        left   right   summed over
    FORWARD       Y = X W^T     X      W       K
    INPUT_GRAD    dX = dY W     dY     W       N
    WEIGHT_GRAD   dW = dY^T X   dY     X       M

A method says, by ``work``, which cuboid of them a rank makes at a step; its faces are the blocks that the rank must
have then (``Method.layout``). With ``homes``, where operands lie before a pass and results behind it, everything
else follows: messages, bytes, memory, pictures (``program``, ``volume``). Adding a method is writing these two
functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

from tpkernels.grids.grid import Coordinates, Grid
from tpkernels.grids.layout import Block, Layout
from tpkernels.grids.spans import WHOLE, Span

__all__ = ["DIMENSIONS", "Method", "Pass", "Sizes", "Work"]


class Pass(Enum):
    """One of the three products of a linear layer."""

    FORWARD = "forward"
    INPUT_GRAD = "input gradient"
    WEIGHT_GRAD = "weight gradient"

    @property
    def left(self) -> str:
        """Operand whose rows are the result's (WEIGHT_GRAD: whose columns are its rows)."""
        return "X" if self is Pass.FORWARD else "dY"

    @property
    def right(self) -> str:
        """The other operand."""
        return "X" if self is Pass.WEIGHT_GRAD else "W"

    @property
    def result(self) -> str:
        """What is made."""
        return {Pass.FORWARD: "Y", Pass.INPUT_GRAD: "dX", Pass.WEIGHT_GRAD: "dW"}[self]

    @property
    def summed(self) -> str:
        """The dimension that the product sums over."""
        return {Pass.FORWARD: "k", Pass.INPUT_GRAD: "n", Pass.WEIGHT_GRAD: "m"}[self]


# Rows and columns of every matrix; a gradient's are those of what it is the gradient of. The bias B is one row.
DIMENSIONS: Mapping[str, tuple[str, str]] = {
    "X": ("m", "k"),
    "W": ("n", "k"),
    "Y": ("m", "n"),
    "B": ("1", "n"),
}


def dimensions(operand: str) -> tuple[str, str]:
    """Names of rows and columns: ("n", "k") for "W" and "dW"."""
    return DIMENSIONS[operand.removeprefix("d")]


class Sizes(NamedTuple):
    """Of a whole linear layer: ``m`` rows of X, ``k`` input features, ``n`` output features."""

    m: int
    k: int
    n: int

    def of(self, operand: str) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        rows, columns = dimensions(operand)
        return (1 if rows == "1" else getattr(self, rows)), getattr(self, columns)


class Work(NamedTuple):
    """The products x[m, k] * w[n, k] that a rank makes at a step, as spans of the three dimensions."""

    m: Span
    k: Span
    n: Span


@dataclass(frozen=True, eq=False)
class Method:
    """A method on a grid. Made by ``one_d``, ``summa``, ``three_d``, ``spatial_temporal`` and ``data_parallel``.

    family: which formulas are its (``volume``).
    name: of the method.
    grid: its ranks.
    steps: products of a rank in each pass.
    work: what the rank at ``coordinates`` multiplies in a pass at a step.
    homes: layouts of "X", "W", "Y" and "B" between passes; gradients lie as what they are the gradients of.
    rings: a block comes from who had it in the step before (else from its home, in every step anew).
    made_by: the function that made it, and its arguments: what is pickled of a method.
    sums: layouts through which results ("Y", "dX", "dW") get to their homes, where these have replicas: as an
        all-reduce goes, slices of the sum first.
    """

    family: str
    name: str
    grid: Grid
    steps: int
    work: Callable[[Pass, Coordinates, int], Work]
    homes: Mapping[str, Layout]
    made_by: tuple[Callable[..., Method], tuple[object, ...]]
    rings: bool = False
    sums: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., Method], tuple[object, ...]]:
        return self.made_by

    @property
    def gathers(self) -> bool:
        """Whether a pass is one product of whole gathered blocks, which can be kept for the next one."""
        return self.steps == 1 and not self.rings

    def home(self, operand: str) -> Layout:
        """Where the operand, or gradient, lies between passes."""
        return self.homes[operand.removeprefix("d")]

    def spans(self, kind: Pass, step: int) -> tuple[Work, ...]:
        """The work of every position."""
        return tuple(self.work(kind, coordinates, step) for coordinates in self.grid.coordinates)

    def layout(self, kind: Pass, operand: str, step: int) -> Layout:
        """Where the operand, or the result, of a pass lies while step ``step`` multiplies. A result's blocks are
        partial sums, of what that step alone adds."""
        return _layout(self, kind, operand, step)

    @cached_property
    def cuts(self) -> Sizes:
        """In how many equal parts the method cuts m, k and n: sizes must be multiples."""
        parts = {"m": 1, "k": 1, "n": 1, "1": 1}
        for operand in ("X", "W", "Y"):
            for block in self.home(operand).blocks:
                if block is not None:
                    for dimension, span in zip(dimensions(operand), block[:2], strict=True):
                        parts[dimension] = math.lcm(parts[dimension], span.parts)
        return Sizes(parts["m"], parts["k"], parts["n"])

    def __str__(self) -> str:
        return f"{self.name} on {self.grid}"


@lru_cache(maxsize=4096)
def _layout(method: Method, kind: Pass, operand: str, step: int) -> Layout:
    blocks = []
    for work in method.spans(kind, step):
        rows, columns = (WHOLE if d == "1" else getattr(work, d) for d in dimensions(operand))
        block = Block(rows, columns)
        if operand == kind.result:
            block = block._replace(terms=(getattr(work, kind.summed),))
        blocks.append(block)
    return Layout(method.grid, tuple(blocks))
