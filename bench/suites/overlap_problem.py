"""One case of the overlap suite on one rank: inputs over several buffer sets, and what the results must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..context import Context
from ..suite import Case, Check
from .overlap_shapes import AG, AR, RS

__all__ = ["Problem", "all_gather", "fill_nan", "reduce_scatter"]

# torch 2.14 renamed them; both names are the same collectives.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_COLUMNS = 4096  # of the result that the float64 reference computes at a time


class Problem:
    """Inputs, reference and check, shared by all variants. Creating it is collective.

    Attributes:
        op: as in the case.
        m, n, k: rows over all ranks, columns and depth of this rank's product.
        shard: rows that a rank contributes to a gather or receives from a scatter (AG, RS).
        copies: number of buffer sets; one call reads and writes one set.
        x: per set, this rank's operand: [shard, k] for AG, else [m, k].
        w: per set, the weight [n, k]; the product is with ``w.t()``.
        out_rows: rows of the result on this rank.
    """

    def __init__(self, case: Case, context: Context) -> None:
        self.op = case.op
        self.context = context
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.m, self.n, self.k = (int(case.params[name]) for name in ("m", "n", "k"))
        if context.group is None:
            raise ValueError(
                "context: expected a process group, got none; the overlap suite needs several ranks."
            )
        self.group: dist.ProcessGroup = context.group
        self.world, self.rank = context.world, context.rank
        self.shard = self.m // self.world
        self.x_rows = self.shard if self.op == AG else self.m
        self.out_rows = self.shard if self.op == RS else self.m
        travels = self.m * (self.k if self.op == AG else self.n)
        numbers = self.x_rows * self.k + self.n * self.k + travels
        if self.op != AR:
            numbers += self.out_rows * self.n
        self.copies = context.copies(numbers * self.dtype.itemsize)
        self.x = [self.uniform(self.x_rows, self.k) for _ in range(self.copies)]
        self.w = [self.uniform(self.n, self.k) for _ in range(self.copies)]
        # The rows that are compared must be the same on every rank, for they sum their partials of them.
        self.shared = torch.Generator(context.device)
        self.shared.manual_seed(context.options.seed)
        self.rows = [self._rows() for _ in range(self.copies)]
        self.reference = [self._reference(i) for i in range(self.copies)]

    def uniform(self, *shape: int) -> Tensor:
        """Random data in [-1, 1] of the case's dtype."""
        return self.context.uniform(*shape, dtype=self.dtype)

    def empty(self, *shape: int) -> list[Tensor]:
        """One uninitialised tensor per buffer set."""
        return [torch.empty(shape, dtype=self.dtype, device=self.context.device) for _ in range(self.copies)]

    def outputs(self) -> list[Tensor]:
        """Room for the result, per buffer set."""
        return self.empty(self.out_rows, self.n)

    @property
    def link_bytes(self) -> int:
        """What a rank must send."""
        pieces = {AG: self.m * self.k, RS: self.m * self.n, AR: 2 * self.m * self.n}[self.op]
        return pieces * self.dtype.itemsize * (self.world - 1) // self.world

    @cached_property
    def full(self) -> list[Tensor]:
        """The left operand of the whole product, [m, k], for the product alone: other data than ``x`` for AG."""
        return [self.uniform(self.m, self.k) for _ in range(self.copies)] if self.op == AG else self.x

    @property
    def tolerance(self) -> float:
        """Relative error that is allowed in a row.

        A gathered operand arrives as it was sent, so only the result is rounded. Partials of a sum travel in the case's
        dtype: every rank rounds its own, a ring rounds the running sum at every hop, and the result is rounded once
        more; at most world + 1 roundings of what the result is made of.
        """
        return checks.tolerance(self.dtype, sums=1 if self.op == AG else self.world + 1)

    def check(self, outputs: Sequence[Tensor | None]) -> Check:
        """Compare the result of every buffer set; a missing one is wrong."""
        worst = 0.0
        for i in range(self.copies):
            out = outputs[i]
            if out is None or tuple(out.shape) != (self.out_rows, self.n):
                worst = float("inf")
                continue
            rows, reference = self.rows[i], self.reference[i]
            if self.op == RS:  # the rows that this rank keeps
                own = (rows // self.shard) == self.rank
                rows, reference = rows[own] - self.rank * self.shard, reference[own]
            worst = max(worst, checks.rows_error(out, reference, rows))
        return Check(worst, self.tolerance)

    def check_product(self, outputs: Sequence[Tensor]) -> Check:
        """Compare ``full @ w.t()``."""
        generator = self.context.generator
        errors = [
            checks.product_error(out, a, w.t(), generator=generator)
            for out, a, w in zip(outputs, self.full, self.w, strict=True)
        ]
        return Check(max(errors), checks.tolerance(self.dtype))

    def _rows(self) -> Tensor:
        """One row in 64 of every rank's shard, at least one each; of all rows for AR."""
        if self.op == AR:
            return checks.sampled_rows(self.m, self.shared)
        per_rank = [checks.sampled_rows(self.shard, self.shared) + r * self.shard for r in range(self.world)]
        return torch.cat(per_rank)

    def _reference(self, i: int) -> Tensor:
        """Rows ``rows[i]`` of the result in float64, [len(rows), n]."""
        rows, x, w = self.rows[i], self.x[i], self.w[i]
        if self.op == AG:
            # Every rank contributes those of its rows that were drawn; the others are zero in a sum of all.
            own = (rows // self.shard) == self.rank
            drawn = torch.zeros(len(rows), self.k, dtype=torch.float64, device=x.device)
            drawn[own] = x[rows[own] - self.rank * self.shard].double()
            dist.all_reduce(drawn, group=self.group)
            return _product(drawn, w)
        partial = _product(x[rows].double(), w)
        dist.all_reduce(partial, group=self.group)
        return partial


def _product(a: Tensor, w: Tensor) -> Tensor:
    """``a @ w.t()`` in float64, in pieces: a weight in float64 would be four times its size."""
    return torch.cat([a @ piece.double().t() for piece in w.split(_COLUMNS)], dim=1)


def fill_nan(*tensors: Sequence[Tensor | None]) -> Callable[[], None]:
    """A function that fills whatever the lists then hold with NaN."""

    def fill() -> None:
        for each in tensors:
            for tensor in each:
                if tensor is not None:
                    tensor.fill_(float("nan"))

    return fill
