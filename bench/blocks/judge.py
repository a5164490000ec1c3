"""Errors of layers: what is allowed, and the worst of several tensors, by pieces and as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..checks import tolerance

__all__ = ["allowed", "allowed_gradient", "allowed_loss", "allowed_piece", "worst", "worst_whole"]

Pairs = Mapping[str, tuple[Tensor, Tensor, Tensor | None]]
"""Name -> (result, right values, rows of the result that they are or None for all)."""

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
    """Largest allowed error of a parameter's gradient in a language model, over all rows that are looked at.

    Errors of layers add up as the square root of their number. Found in bfloat16 against float32, and allowed:

        ======  =====  ======  =====  ==============  =====  =======
        layers  width  tokens  ranks  without ranks   found  allowed
        ======  =====  ======  =====  ==============  =====  =======
        2       192    48      2      1.9 %           2.0 %  4.4 %
        4       1024   512     4      2.5 %           2.9 %  5.5 %
        16      256    256     2      3.4 %           3.8 %  8.0 %
        16      256    256     4      3.4 %           4.2 %  8.7 %
        16      192    48      2      3.7 %           4.3 %  8.0 %
        ======  =====  ======  =====  ==============  =====  =======

    and 10 % with 16 layers on eight ranks. A sum that lacks one of n ranks errs by about 1 / sqrt(n): 35 % on eight.

    The reference is in float32 because an unsharded model in bfloat16 rounds in another order and is noise of its
    own: with 16 layers the same gradients were 4.4 to 5.2 % away from that one.
    """
    return 0.45 * allowed(dtype, world) * math.sqrt(4 + layers)


def allowed_piece(dtype: torch.dtype, world: int, layers: int) -> float:
    """The same of 128 columns of a row of the gradient; for a tile that is missing or old, which errs by 1 or more.

    The worst of up to some 100 000 pieces had three to four times its model's error in the table above: 5, 9, 13, 12
    and 15 %; allowed are 15, 19, 28, 31 and 28 %.
    """
    return 3.5 * allowed_gradient(dtype, world, layers)


def allowed_loss(dtype: torch.dtype) -> float:
    """Largest allowed relative error of a loss in the first few training steps; a fifth of it was found."""
    return {2: 5e-3, 4: 1e-4}[dtype.itemsize]


def _largest(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a row of two matrices; what should be zero must be; inf where a NaN is."""
    got, want = got.double(), want.double()
    difference, scale = (got - want).norm(dim=1), want.norm(dim=1)
    error = float((difference / scale.where(scale > 0, (difference == 0).double())).max())
    return error if math.isfinite(error) else math.inf


def _piece_error(out: Tensor, want: Tensor, rows: Tensor | None) -> float:
    """Largest of a piece of ``out``, or of its ``rows``; inf where ``out`` holds a NaN anywhere."""
    if bool(out.isnan().any()):
        return math.inf
    got = out if rows is None else out[rows]
    width = got.shape[-1]
    columns = min(_COLUMNS, width)
    # Pieces from the left, and where they do not fill the row one more that ends at its right edge.
    pieces = [slice(0, width // columns * columns)] + [slice(width - columns, width)] * (width % columns > 0)
    return max(_largest(got[..., p].reshape(-1, columns), want[..., p].reshape(-1, columns)) for p in pieces)


def _whole_error(out: Tensor, want: Tensor, rows: Tensor | None) -> float:
    """Of all of ``out``, or of its ``rows``."""
    got = out if rows is None else out[rows]
    return _largest(got.reshape(1, -1), want.reshape(1, -1))


def _worst(pairs: Pairs, error: Callable[[Tensor, Tensor, Tensor | None], float]) -> tuple[float, str]:
    errors = {name: error(*pair) for name, pair in pairs.items()}
    name = max(errors, key=lambda n: errors[n])
    return errors[name], name


def worst(pairs: Pairs) -> tuple[float, str]:
    """Largest error of 128 columns of a row, and whose it is; inf where a NaN is anywhere."""
    return _worst(pairs, _piece_error)


def worst_whole(pairs: Pairs) -> tuple[float, str]:
    """Largest error of all that is looked at of a tensor, and whose it is."""
    return _worst(pairs, _whole_error)
