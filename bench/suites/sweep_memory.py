"""Memory of the sweep: operands are views of one pool of random data, outputs of one buffer; both grow as shapes do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .gemm_products import Product

if TYPE_CHECKING:
    from torch import Tensor

    from ..context import Context

__all__ = ["MOST_COPIES", "Memory", "Products"]

MOST_COPIES = 256  # of small products; a sample of a millisecond has no more calls
_ALIGNED = 256  # bytes: where torch's own allocations begin
_SLACK = 1 << 20  # elements: shapes begin anywhere within them, so that none sees another's numbers


@dataclass
class Products:
    """The buffer sets of one shape, each out [M, N] = a [M, K] @ b [K, N], K contiguous in both operands.

    ``outputs``: [sets, M * N], all outs.
    """

    sets: list[Product]
    outputs: Tensor


class Memory:
    """What all shapes of one dtype live in."""

    def __init__(self, context: Context, dtype: torch.dtype) -> None:
        self.context, self.dtype = context, dtype
        self._inputs = torch.empty(0, dtype=dtype, device=context.device)
        self._outputs = self._inputs
        self.unit = _ALIGNED // dtype.itemsize

    def products(self, m: int, n: int, k: int) -> Products:
        """Sets of together more than three L2 caches, at most :data:`MOST_COPIES`, at least two."""
        size = (m * k + k * n + m * n) * self.dtype.itemsize
        copies = min(self.context.copies(size), MOST_COPIES)
        a, b, out = (math.ceil(x / self.unit) * self.unit for x in (m * k, n * k, m * n))
        start = self._reserve(copies * (a + b), copies * out)
        sets = []
        for i in range(copies):
            at = start + i * (a + b)
            sets.append(
                Product(
                    self._inputs[at : at + m * k].view(m, k),
                    self._inputs[at + a : at + a + n * k].view(n, k).t(),
                    self._outputs[i * out : i * out + m * n].view(m, n),
                )
            )
        return Products(sets, self._outputs[: copies * out].view(copies, out)[:, : m * n])

    def _reserve(self, inputs: int, outputs: int) -> int:
        """Make room; returns where in the pool of random data this shape begins."""
        if self._outputs.numel() < outputs:
            self._outputs = torch.empty(0, dtype=self.dtype, device=self.context.device)  # freed first
            self._outputs = torch.empty(_larger(outputs), dtype=self.dtype, device=self.context.device)
        if self._inputs.numel() < inputs + _SLACK:
            self._inputs = torch.empty(0, dtype=self.dtype, device=self.context.device)
            self._inputs = self.context.uniform(_larger(inputs + _SLACK), dtype=self.dtype)
        room = (self._inputs.numel() - inputs) // self.unit
        where = torch.randint(room + 1, (1,), generator=self.context.generator, device=self.context.device)
        return int(where) * self.unit


def _larger(elements: int) -> int:
    """Room for what comes next too: shapes grow a few times only."""
    return 1 << max(20, (elements - 1).bit_length()) if elements < 1 << 26 else math.ceil(elements * 1.25)
