"""Quantisation to FP8: one pass for the largest values, one for the rest.

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

``tpkernels.reference.fp8`` says the same in NumPy; tests compare bit for bit. (In graphs that torch.compile makes for a
GPU, reciprocals are not correctly rounded: where scales are no powers of two, values may differ in their last bit.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tpkernels.errors import ArgumentError, DTypeError, ShapeError
from tpkernels.ops import _checks
from tpkernels.ops._arrays import tensor

__all__ = [
    "BLOCK",
    "DTYPES",
    "SCALINGS",
    "Quantized",
    "amax_of",
    "quantize",
    "quantize_by",
    "scale_of",
    "spread",
]

BLOCK = 128
SCALINGS = ("tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128")
#: The formats and their largest values.
DTYPES = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST_SCALE = 2.0**-126  # its reciprocal is finite


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
        if self.scaling == "blockwise_128x128":
            return Quantized(self.data.t().contiguous(), self.scale.t().contiguous(), self.scaling)
        if self.scaling == "tensorwise":
            return Quantized(self.data.flatten(0, -2).t().contiguous(), self.scale, self.scaling)
        wide = torch.bfloat16 if round_scales_to_power_of_2 else torch.float32  # holds FP8 times 2^n exactly
        x = self.dequantize(wide)
        amax = amax_of(x, self.scaling, transpose=True)
        scale = scale_of(amax, self.data.dtype, power_of_2=round_scales_to_power_of_2)
        return quantize_by(x, scale, self.scaling, self.data.dtype, transpose=True)

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
    found = amax_of(x, scaling, transpose=transpose) if amax is None else amax.reshape(1).to(torch.float32)
    scale = scale_of(found, dtype, power_of_2=round_scales_to_power_of_2)
    return quantize_by(x, scale, scaling, dtype, transpose=transpose, clamp=amax is not None)


def check_scaling(scaling: str) -> None:
    if scaling not in SCALINGS:
        raise ArgumentError(f"scaling: expected one of {', '.join(SCALINGS)}, got {scaling!r}.")


def amax_of(x: Tensor, scaling: str, *, transpose: bool = False) -> Tensor:
    """Largest absolute values, float32, in the form of the scales of x (or of x^T); inf for what is not finite."""
    x = _source(x, transpose)
    blocks = _blocks(x, scaling)
    dims = {"tensorwise": None, "rowwise": -1, "blockwise_1x128": -1, "blockwise_128x128": (1, 3)}[scaling]
    if blocks.numel() == 0:  # has no largest value
        shape = (
            [1]
            if scaling == "tensorwise"
            else [*x.shape[:-1], 1]
            if scaling == "rowwise"
            else [n for d, n in enumerate(blocks.shape) if d not in _negative(dims, blocks.dim())]
        )
        return x.new_zeros(shape, dtype=torch.float32)
    found = torch.linalg.vector_norm(
        blocks, math.inf, dim=dims, keepdim=scaling == "rowwise", dtype=torch.float32
    )
    found = torch.nan_to_num(found, nan=math.inf, posinf=math.inf)
    return found.reshape(1) if scaling == "tensorwise" else found


def scale_of(amax: Tensor, dtype: torch.dtype, *, power_of_2: bool = False) -> Tensor:
    """The scale for each ``amax``, see the module."""
    # A product, in float32: CUDA divides by a number so, and the CPU does not.
    scale = (amax * (1.0 / DTYPES[dtype])).clamp_min(_SMALLEST_SCALE)
    if power_of_2:  # the next one, by its bits: a carry out of the mantissa raises the exponent
        scale = ((scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    scale = torch.where(torch.isfinite(amax), scale, math.nan)
    return torch.where(amax == 0, 1.0, scale)


def quantize_by(
    x: Tensor,
    scale: Tensor,
    scaling: str,
    dtype: torch.dtype,
    *,
    transpose: bool = False,
    clamp: bool = False,
) -> Quantized:
    """x (or x^T) in FP8 with scales that are known. clamp: there may be values that are too large for them."""
    x = _source(x, transpose)
    reciprocal = 1.0 / scale
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if scaling in ("tensorwise", "rowwise"):
        _multiply(x, reciprocal, out, clamp)
        return Quantized(out, scale, scaling)
    if x.shape[-1] % BLOCK == 0 and (scaling == "blockwise_1x128" or x.shape[0] % BLOCK == 0):
        factor = reciprocal.unsqueeze(-1) if scaling == "blockwise_1x128" else reciprocal[:, None, :, None]
        _multiply(_blocks(x, scaling), factor, _blocks(out, scaling), clamp)
    else:
        _multiply(x, spread(reciprocal, x.shape), out, clamp)
    return Quantized(out, scale, scaling)


def _multiply(x: Tensor, factor: Tensor, out: Tensor, clamp: bool) -> None:
    """``out = x * factor`` in float32, rounded to FP8."""
    if clamp:
        largest = DTYPES[out.dtype]
        out.copy_((x * factor).clamp_(-largest, largest))
    elif torch.compiler.is_compiling():  # fused by the compiler
        out.copy_(x * factor)
    else:  # one pass over memory
        torch.mul(x, factor, out=out)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """A scale for each element, or what broadcasts to it."""
    if scale.numel() == 1:
        return scale.reshape([1] * len(shape))
    for dim, n in enumerate(shape):
        if scale.shape[dim] not in (1, n):
            # By index: repeat_interleave of these came out wrong from inductor on the CPU (torch 2.14).
            scale = scale.index_select(dim, torch.arange(n, device=scale.device) // BLOCK)
    return scale


def _source(x: Tensor, transpose: bool) -> Tensor:
    x = x.to(torch.float32) if x.dtype == torch.float64 else x
    if transpose:
        x = x.flatten(0, -2).t()
    return x


def _blocks(x: Tensor, scaling: str) -> Tensor:
    """A view of x [..., K] as blocks, zeros behind its ends: [..., K / 128, 128] or [M / 128, 128, K / 128, 128]."""
    if scaling in ("tensorwise", "rowwise"):
        return x
    behind = -x.shape[-1] % BLOCK
    if scaling == "blockwise_1x128":
        x = F.pad(x, (0, behind)) if behind else x
        return x.view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    below = -x.shape[0] % BLOCK
    x = F.pad(x, (0, behind, 0, below)) if behind or below else x
    return x.view(x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK)


def _negative(dims: int | tuple[int, ...] | None, count: int) -> set[int]:
    """Dimensions counted from the front."""
    return set() if dims is None else {d % count for d in ((dims,) if isinstance(dims, int) else dims)}
