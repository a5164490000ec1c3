"""The check of the sweep: all of a product against float64, by random projections, for a small part of its cost.

128 neighbouring columns of a row of ``out`` are added up with random signs. So are those of ``a @ b``, as
``a @ (b @ signs)`` (Freivalds): 64 times less arithmetic than the product, so it can be in float64 for every row. What
errors and elements are in the mean of squares, their sums with signs are times the square root of 128, and no error
cancels but by chance.

The error is that of 64 rows by 128 columns, ``||sums of got - sums of want|| / usual norm of the latter``, the largest
counts: a wrong tile, a part of one, a missed slab of K cannot hide behind the rest, and one wrong element of its usual
size is 1.1e-2, more than a bfloat16 product is allowed (:func:`.checks.tolerance`). Few wrong elements of one row may
cancel: 16 do so far that they pass in 6 % of all draws, in two rows in 0.2 %. Elements must be of one size everywhere,
as those of random operands are, and K not below 64: then figures of right products stay below 0.9 of what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Projection"]

_ROWS, _COLUMNS = 64, 128


@dataclass
class Projection:
    """What ``a @ b`` is to be.

    Attributes:
        signs: float64 [N, groups of columns]: +1 or -1 in the group that a column belongs to, else 0.
        want: float64 [M, groups of columns], of the product.
        usual: float64 [groups of columns], the root of the mean of its squares, by a group's number of columns.
    """

    signs: Tensor
    want: Tensor
    usual: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor, generator: torch.Generator) -> Projection:
        """For a [M, K] and b [K, N], any strides; ``generator``: on their device, draws the signs."""
        import torch

        n = b.shape[1]
        column = torch.arange(n, device=b.device)
        # The last group takes what is left over.
        group = (column // _COLUMNS).clamp(max=max(0, n // _COLUMNS - 1))
        sign = torch.randint(0, 2, (n,), device=b.device, generator=generator).double() * 2 - 1
        signs = torch.zeros(n, max(1, n // _COLUMNS), dtype=torch.float64, device=b.device)
        signs[column, group] = sign
        want = a.double() @ (b.double() @ signs)
        columns = signs.square().sum(dim=0)
        return cls(signs, want, (want.square().sum() / max(1, a.shape[0] * n) * columns).sqrt())

    def error(self, out: Tensor) -> float:
        """Largest relative error (see the module) of ``out`` [M, N]; inf where it holds a NaN or an infinity."""
        if out.numel() == 0:
            return 0.0
        found = _mean_squares(out.double() @ self.signs - self.want).sqrt()
        # Of a product of zeros all must be zero.
        worst = float((found / self.usual.where(self.usual > 0, (found == 0).all().double())).max())
        return worst if math.isfinite(worst) else math.inf


def _mean_squares(x: Tensor) -> Tensor:
    """Of groups of 64 rows of each column; the last group takes what is left over."""
    import torch

    squares = x.square()
    whole = max(1, x.shape[0] // _ROWS) - 1
    head = squares[: whole * _ROWS].reshape(whole, _ROWS, x.shape[1]).mean(dim=1)
    return torch.cat([head, squares[whole * _ROWS :].mean(dim=0, keepdim=True)])
