"""Correctness of results against float64, on torch tensors of any device.

The error of a row is ``||got - want|| / ||want||`` over that row of the result: a wrong tile cannot hide behind the
norm of the whole, and one element near zero raises no alarm. The largest error of a row counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["product_error", "rows_error", "sampled_rows", "tolerance"]

_ROWS_APART = 64  # no tile of any kernel here has fewer rows, so one row of every 64 meets every tile


def tolerance(dtype: torch.dtype, sums: int = 1) -> float:
    """Largest allowed error of a row of a product, relative.

    One rounding to ``dtype`` errs by a fifth of its machine epsilon over a row (a uniform rounding error has a standard
    deviation of eps / sqrt(12) of the last place, and mantissas are spread over [1, 2)); the order of summation in fp32
    adds little. Allowed is 0.4 epsilon, twice that: 3.1e-3 for bfloat16, 3.9e-4 for float16. Float32 and float64 err by
    their summation instead, some tens of epsilon for long sums.

    Args:
        dtype: of the result.
        sums: how often values were rounded to ``dtype`` and added up or passed on before (ranks of a reduction in
            ``dtype``, products in a chain); independent roundings add as the square root.
    """
    import torch

    epsilon = torch.finfo(dtype).eps
    allowed = 0.4 * epsilon if dtype in (torch.bfloat16, torch.float16) else 64 * epsilon
    return allowed * math.sqrt(max(1, sums))


def rows_error(out: Tensor, reference_rows: Tensor, rows: Tensor | None = None) -> float:
    """Largest relative error of a row; inf where ``out`` has a NaN anywhere (it was poisoned and not written).

    Args:
        out: [M, N], the whole result.
        reference_rows: [len(rows), N], float64.
        rows: int64 indices of the rows of ``out`` that ``reference_rows`` holds; None for all.
    """
    if out.numel() == 0:
        return 0.0
    if bool(out.isnan().any()):
        return math.inf
    got = (out if rows is None else out[rows]).double()
    want = reference_rows.double()
    difference = (got - want).norm(dim=1)
    scale = want.norm(dim=1)
    # A row that should be zero (K = 0) must be zero.
    errors = difference / scale.where(scale > 0, (difference == 0).double())
    worst = float(errors.max())
    return worst if math.isfinite(worst) else math.inf


def sampled_rows(count: int, generator: torch.Generator) -> Tensor:
    """One random index out of every 64 of ``range(count)``, on the generator's device."""
    import torch

    first = torch.arange(0, count, _ROWS_APART, device=generator.device)
    step = torch.randint(0, _ROWS_APART, first.shape, device=generator.device, generator=generator)
    return (first + step).clamp(max=max(0, count - 1))


def product_error(out: Tensor, a: Tensor, b: Tensor, *, generator: torch.Generator) -> float:
    """Largest relative error of sampled rows of ``out`` = ``a @ b``; inf where ``out`` has a NaN anywhere.

    Args:
        out: [M, N].
        a: [M, K], any strides.
        b: [K, N], any strides.
        generator: on the tensors' device; picks the rows.
    """
    if out.numel() == 0:
        return 0.0
    rows = sampled_rows(a.shape[0], generator)
    return rows_error(out, a[rows].double() @ b.double(), rows)
