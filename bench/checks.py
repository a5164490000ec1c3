"""Correctness of results against float64, on torch tensors of any device.

The error is ``||got - want|| / ||want||`` over 128 neighbouring columns of a row, and the largest of them counts: a
wrong tile, or one that misses a slab of K, cannot hide behind the norm of the whole, and one element near zero
raises no alarm.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["product_error", "rows_error", "sampled_rows", "tolerance"]

_ROWS_APART = 64  # no tile of a large product has fewer rows, so one row of every 64 meets every tile
_ALL_ROWS = 256  # up to so many rows all are looked at
_COLUMNS = 128


def tolerance(dtype: torch.dtype, sums: int = 1) -> float:
    """Largest allowed relative error of a product.

    One rounding to ``dtype`` errs by a fifth of its machine epsilon (a uniform rounding error has a standard
    deviation of eps / sqrt(12) of the last place, and mantissas are spread over [1, 2)), the worst of 10^5 groups of
    128 elements by a quarter more; the order of summation in fp32 adds little. Allowed is 0.4 epsilon: 3.1e-3 for
    bfloat16, 3.9e-4 for float16. (A single element may err by half an epsilon: results of a few elements do not
    belong here.) Float32 and float64 err by their summation instead, some tens of epsilon for long sums.

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
    """Largest relative error of the rows; inf where ``out`` has a NaN anywhere (it was poisoned and not written).

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
    difference, scale = _norms(got - want), _norms(want)
    # Few columns may sum to nearly nothing: what counts then is the usual size of elements. Zero (K = 0) must be zero.
    usual = want.square().mean().sqrt() * _norms(want.new_ones(1, want.shape[1]))
    scale = scale.maximum(0.5 * usual)
    errors = difference / scale.where(scale > 0, (difference == 0).double())
    worst = float(errors.max())
    return worst if math.isfinite(worst) else math.inf


def _norms(x: Tensor) -> Tensor:
    """Norms of groups of 128 columns of each row; the last group takes what is left over."""
    import torch

    whole = max(1, x.shape[1] // _COLUMNS) - 1
    head = x[:, : whole * _COLUMNS].reshape(x.shape[0], whole, _COLUMNS).norm(dim=2)
    return torch.cat([head, x[:, whole * _COLUMNS :].norm(dim=1, keepdim=True)], dim=1)


def sampled_rows(count: int, generator: torch.Generator) -> Tensor:
    """One random index out of every 64 of ``range(count)``, all up to 256, on the generator's device."""
    import torch

    if count <= _ALL_ROWS:
        return torch.arange(count, device=generator.device)
    first = torch.arange(0, count, _ROWS_APART, device=generator.device)
    step = torch.randint(0, _ROWS_APART, first.shape, device=generator.device, generator=generator)
    return (first + step).clamp(max=max(0, count - 1))


def product_error(out: Tensor, a: Tensor, b: Tensor, *, generator: torch.Generator) -> float:
    """Largest relative error (see above) of sampled rows of ``out`` = ``a @ b``; inf where ``out`` has a NaN anywhere.

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
