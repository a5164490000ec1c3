"""Quantisation to FP8.

    scaling              elements that share a scale     scales of x [..., K]
    tensorwise           all                             [1]
    rowwise              a row                           [..., 1]
    blockwise_1x128      128 neighbours of a row         [..., ceil(K / 128)]
    blockwise_128x128    a square of 128                 [ceil(M / 128), ceil(K / 128)], x with two dimensions

A scale is what the quantised values are multiplied by to get x back: ``amax / largest value of the format``, float32,
made as the product of amax with the reciprocal.

- Values are rounded to nearest even; nothing overflows, as no value is larger than amax. With an ``amax`` of the
  caller's, larger values are clamped.
- Where amax is 0 the scale is 1. A scale is never below 2^-126.
- Where amax is infinite or NaN the scale is NaN, and with it every product that these elements have a part in: an
  overflow shows, and is never hidden by clamping.

``tpkernels.reference.fp8`` says the same in NumPy; tests compare bit for bit. On GPUs kernels do it
(:mod:`._kernels`). Where there are none, graphs that torch.compile makes for a GPU do not round reciprocals correctly:
if scales are no powers of two, values may differ in their last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, DTypeError, ShapeError
from tpkernels.fp8 import _formula, _kernels
from tpkernels.fp8._formula import BLOCK, DTYPES, SCALINGS, spread
from tpkernels.ops import _checks
from tpkernels.ops._arrays import tensor

__all__ = [
    "BLOCK",
    "DTYPES",
    "SCALINGS",
    "Quantized",
    "largest_of",
    "make",
    "quantize",
    "quantize_both",
    "spread",
]


class Quantized(NamedTuple):
    """FP8 values and their scales.

    Attributes:
        data: [..., K], or its transposed view (``t()``), float8_e4m3fn or float8_e5m2.
        scale: float32, see the module; exchanged as ``data`` is.
        scaling: one of ``SCALINGS``.
    """

    data: Tensor
    scale: Tensor
    scaling: str

    def t(self) -> Quantized:
        """The transposed view of a matrix: a weight [N, K] as the factor [K, N] of a product."""
        return Quantized(self.data.t(), self.scale.t(), self.scaling)

    def transposed(self, *, round_scales_to_power_of_2: bool = False) -> Quantized:
        """A copy of ``data`` [..., K] as [K, rows], contiguous, quantised along the rows.

        Tensorwise and 128x128: the same bytes and scales. Rowwise and 1x128: quantised anew, as a scale no longer
        belongs to a row. With scales that are powers of two, here and before, this rounds only what lies more than
        2^14 below its new neighbours' largest value (e4m3), and nothing else a second time.
        """
        data, scale = self.data.flatten(0, -2), self.scale
        if self.scaling in ("rowwise", "blockwise_1x128"):
            scale = scale.flatten(0, -2)
        turn = torch.ops.tpkernels.requantize_transposed if _kernels.run(data) else _formula.turn
        made = turn(data, scale, self.scaling, round_scales_to_power_of_2)
        if self.scaling == "tensorwise":
            return Quantized(made[0], scale, self.scaling)
        if self.scaling == "blockwise_128x128":
            return Quantized(made[0], scale.t().contiguous(), self.scaling)
        return Quantized(made[0], made[1], self.scaling)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """data * scale, rounded once to ``dtype``."""
        return (self.data.to(torch.float32) * spread(self.scale, self.data.shape)).to(dtype)


@torch.no_grad()
def quantize(
    x: Tensor,
    scaling: str = "tensorwise",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    transpose: bool = False,
    round_scales_to_power_of_2: bool = False,
    amax: Tensor | None = None,
) -> Quantized:
    """``x`` in FP8::

        xq = tpk.quantize(x, "blockwise_1x128")
        wq = tpk.quantize(weight, "blockwise_128x128")
        y = tpk.scaled_matmul(xq, wq.t())

    Args:
        x: [..., K], bfloat16, float16 or float32 (float64 is rounded to it), any strides.
        scaling: "tensorwise", "rowwise", "blockwise_1x128" or "blockwise_128x128" (x [M, K]).
        dtype: torch.float8_e4m3fn, or torch.float8_e5m2 (more range, one bit less), for gradients.
        transpose: quantise x^T, [K, rows], instead, from x as it lies: what the products for gradients take.
        round_scales_to_power_of_2: round scales up to a power of two: multiplying by them is then exact.
        amax: tensorwise: a tensor of one element to take for the largest absolute value of x, such as that of all
            ranks, or of earlier steps.

    Returns:
        :class:`Quantized`, contiguous, without a gradient.

    Raises:
        ArgumentError, ShapeError, DTypeError.
    """
    x = _checked(x, scaling, dtype, amax)
    (made,) = make(x, scaling, dtype, round_scales_to_power_of_2, amax, plain=not transpose, turned=transpose)
    return made


@torch.no_grad()
def quantize_both(
    x: Tensor,
    scaling: str = "tensorwise",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    round_scales_to_power_of_2: bool = False,
    amax: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """``quantize(x, ...)`` and ``quantize(x, ..., transpose=True)``; on GPUs x is read for both together.

    What the gradients of a linear layer take of dY, each with scales of its own::

        dq, dq_t = tpk.fp8.quantize_both(dy, "blockwise_1x128")  # [M, N] and [N, M]
        dx = tpk.scaled_matmul(dq, wq.transposed().t())
        dw = tpk.scaled_matmul(dq_t, x_t.t())

    Args, raises: as :func:`quantize`.
    """
    x = _checked(x, scaling, dtype, amax)
    made, turned = make(x, scaling, dtype, round_scales_to_power_of_2, amax, turned=True)
    return made, turned


def _checked(x: Tensor, scaling: str, dtype: torch.dtype, amax: Tensor | None) -> Tensor:
    x = tensor("x", x)
    check_scaling(scaling)
    if dtype not in DTYPES:
        raise DTypeError(f"dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}.")
    _checks.check_operand("x", x)
    if amax is not None and (scaling != "tensorwise" or amax.numel() != 1):
        raise ArgumentError(
            f"amax: expected one element, with scaling='tensorwise', got {list(amax.shape)} with {scaling!r}; "
            "the other scalings find it themselves."
        )
    if scaling == "blockwise_128x128" and x.dim() != 2:
        raise ShapeError(f"x: blockwise_128x128 takes two dimensions, got shape {list(x.shape)}; flatten it.")
    return x


def make(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    power_of_2: bool,
    amax: Tensor | None = None,
    *,
    plain: bool = True,
    turned: bool = False,
    trusted: bool = False,
) -> list[Quantized]:
    """Of checked arguments: x in FP8 if ``plain``, then x^T if ``turned``. trusted: nothing is larger than ``amax``."""
    x = x.to(torch.float32) if x.dtype == torch.float64 else x
    amax = None if amax is None else amax.reshape(1).to(torch.float32)
    if not _kernels.run(x):
        made = _formula.make(x, scaling, dtype, power_of_2, amax, plain, turned, trusted)
    else:
        made = torch.ops.tpkernels.quantize(x.flatten(0, -2), scaling, dtype, power_of_2, plain, turned, amax)
        if plain and x.dim() > 2:
            shape = x.shape[:-1]
            made[0] = made[0].view(x.shape)
            made[1] = made[1] if scaling == "tensorwise" else made[1].view(*shape, made[1].shape[-1])
    return [Quantized(made[i], made[i + 1], scaling) for i in range(0, len(made), 2)]


def largest_of(xs: list[Tensor]) -> Tensor:
    """Largest absolute value of each, float32 [len(xs)]; inf for what is not finite."""
    if all(_kernels.run(x) for x in xs):
        return torch.ops.tpkernels.largest(xs)  # type: ignore[no-any-return]
    return torch.cat([_formula.amax_of(x, "tensorwise") for x in xs])


def check_scaling(scaling: str) -> None:
    if scaling not in SCALINGS:
        raise ArgumentError(f"scaling: expected one of {', '.join(SCALINGS)}, got {scaling!r}.")
