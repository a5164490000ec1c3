"""Errors of layers: what is allowed, and the worst piece of several tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..checks import rows_error, tolerance

__all__ = ["allowed", "allowed_gradient", "allowed_loss", "worst"]

_COLUMNS = 128  # of a row that are judged together


def allowed(dtype: torch.dtype, world: int) -> float:
    """Largest allowed error of a layer, of 128 columns of a row of y or of a gradient, relative.

    A block rounds some 30 times on the way to a gradient, in attention to differences that cancel in part: found
    are 1.6 machine epsilon in bfloat16 (width 1024, 2048 tokens, two ranks), 2.3 with four ranks, whose partial
    sums are rounded too, and 8 to 13 in float32. Allowed are 5 in bfloat16 and float16 on two ranks (4 %), 6.4 on
    eight (5 %). A sum over the ranks that is missing or made twice changes something by half of it or more.
    """
    return tolerance(dtype, 2 * (64 + 8 * world))


def allowed_gradient(dtype: torch.dtype, world: int, layers: int) -> float:
    """The same of a language model's gradients.

    Errors of layers add up as the square root of their number; the worst parameter had, in bfloat16 on two ranks,
    3.8 % with 2 layers, 5.2 % with 6, 12.5 % with 16. Allowed is more than twice that.
    """
    return 2.0 * allowed(dtype, world) * math.sqrt(layers)


def allowed_loss(dtype: torch.dtype) -> float:
    """Largest allowed relative error of a loss in the first few training steps; a fifth of it was found."""
    return {2: 5e-3, 4: 1e-4}[dtype.itemsize]


def _error(out: Tensor, want: Tensor, rows: Tensor | None) -> float:
    """Of ``out``, or of its ``rows``; inf where ``out`` holds a NaN anywhere."""
    if bool(out.isnan().any()):
        return float("inf")
    got = out if rows is None else out[rows]
    columns = _COLUMNS if got.shape[-1] % _COLUMNS == 0 else got.shape[-1]
    return rows_error(got.reshape(-1, columns), want.reshape(-1, columns))


def worst(pairs: Mapping[str, tuple[Tensor, Tensor, Tensor | None]]) -> tuple[float, str]:
    """Largest error and whose it is; ``pairs``: name -> (result, right values, rows of the result they are)."""
    errors = {name: _error(*pair) for name, pair in pairs.items()}
    name = max(errors, key=lambda n: errors[n])
    return errors[name], name
