"""FP8 quantisation and products of scaled operands, after the definition of the formats; no library of short types.

Formats of Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433): "float8_e4m3fn" has 4 significant
bits, a smallest subnormal of 2^-9 and no infinity, its largest value is 448; "float8_e5m2" has 3, 2^-16 and 57344.
Values beyond the largest are clamped to it here, as quantisation does, and NaN stays NaN.

A scale is what the quantised values are multiplied by to get x back: amax / largest value, in float32. ``scaling`` says
which elements share one; arrays of scales have

    tensorwise           (1,)
    rowwise              [..., 1]
    blockwise_1x128      [..., ceil(K / 128)]
    blockwise_128x128    [ceil(M / 128), ceil(K / 128)]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tpkernels.reference._array import Array, as_f64, get_array_module, round_to

# (significant bits, exponent of the smallest subnormal, largest value)
FP8_FORMATS: dict[str, tuple[int, int, float]] = {
    "float8_e4m3fn": (4, -9, 448.0),
    "float8_e5m2": (3, -16, 57344.0),
}
BLOCK = 128
_SMALLEST_SCALE = np.float32(2.0**-126)  # of a scale: its reciprocal is finite


class Fp8Array(NamedTuple):
    """``data``: values of the format, as float64; ``scale``: float32."""

    data: Array
    scale: Array


def round_to_fp8(x: Any, dtype: str) -> Array:
    """x rounded to nearest even in ``dtype``, clamped to its largest value, in float64: any shape -> the same shape."""
    x = as_f64(x)
    xp = get_array_module(x)
    bits, smallest, largest = FP8_FORMATS[dtype]
    clamped = xp.clip(x, -largest, largest)
    _, exponent = xp.frexp(clamped)
    quantum = xp.maximum(exponent - bits, smallest)
    return xp.ldexp(xp.rint(xp.ldexp(clamped, -quantum)), quantum)


def block_amax(x: Array, scaling: str) -> Array:
    """Largest absolute value of the elements that share a scale, float32; inf where one is not finite."""
    xp = get_array_module(x)
    size = xp.abs(xp.asarray(x, dtype=np.float32))
    size = xp.where(xp.isfinite(size), size, np.float32(np.inf))
    if scaling == "tensorwise":
        return size.max(initial=0.0).reshape(1)
    if scaling == "rowwise":
        return size.max(axis=-1, keepdims=True, initial=0.0)
    columns = _by_block(size, size.ndim - 1)
    if scaling == "blockwise_1x128":
        return columns
    if scaling == "blockwise_128x128":
        return _by_block(columns, 0)
    raise ValueError(
        f"scaling must be tensorwise, rowwise, blockwise_1x128 or blockwise_128x128, got {scaling!r}"
    )


def _by_block(size: Array, axis: int) -> Array:
    xp = get_array_module(size)
    starts = range(0, size.shape[axis], BLOCK)
    parts = [xp.take(size, xp.arange(s, min(s + BLOCK, size.shape[axis])), axis).max(axis) for s in starts]
    shape = (*size.shape[:axis], 0, *size.shape[axis + 1 :])
    return xp.stack(parts, axis) if parts else xp.zeros(shape, np.float32)


def scale_of(amax: Array, dtype: str, *, power_of_two: bool = False) -> Array:
    """amax * (1 / largest value), all in float32, at least 2^-126; 1 where amax is 0, NaN where it is not finite.

    ``power_of_two``: rounded up to one.
    """
    xp = get_array_module(amax)
    amax = xp.asarray(amax, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        scale = xp.maximum(amax * np.float32(1 / FP8_FORMATS[dtype][2]), _SMALLEST_SCALE)
    if power_of_two:
        finite = xp.where(xp.isfinite(scale), scale, np.float32(1))
        mantissa, exponent = xp.frexp(finite)
        scale = xp.where(xp.isfinite(scale), xp.ldexp(np.float32(1), exponent - (mantissa == 0.5)), scale)
    scale = xp.where(xp.isfinite(amax), scale, np.float32(np.nan))
    return xp.where(amax == 0, np.float32(1), scale).astype(np.float32)


def quantize(
    x: Array,
    scaling: str,
    dtype: str = "float8_e4m3fn",
    *,
    power_of_two: bool = False,
    amax: Array | None = None,
) -> Fp8Array:
    """x [..., K] (read as float32) -> its values times 1 / scale, both in float32, rounded to ``dtype``.

    ``amax``: in place of that of x, in the form of the scales.
    """
    xp = get_array_module(x)
    x = xp.asarray(x, dtype=np.float32)
    scale = scale_of(block_amax(x, scaling) if amax is None else amax, dtype, power_of_two=power_of_two)
    with np.errstate(invalid="ignore"):
        product = x * spread(np.float32(1) / scale, x.shape)
    return Fp8Array(round_to_fp8(product, dtype), scale)


def spread(scale: Array, shape: tuple[int, ...]) -> Array:
    """A scale for each element: along a dim as it is, broadcast, or repeated over blocks of 128."""
    xp = get_array_module(scale)
    if scale.size == 1:
        return xp.broadcast_to(scale.reshape(()), shape)
    for axis, n in enumerate(shape):
        if scale.shape[axis] not in (1, n):
            scale = xp.take(xp.repeat(scale, BLOCK, axis), xp.arange(n), axis)
    return xp.broadcast_to(scale, shape)


def dequantize(q: Fp8Array) -> Array:
    """data * scale in float64."""
    return q.data * as_f64(spread(q.scale, q.data.shape))


def scaled_matmul(
    a: Fp8Array, b: Fp8Array, bias: Array | None = None, *, rounding: str | None = None
) -> Array:
    """sum over k of (a scale_a)(b scale_b), + bias: a [..., K], b [K, N] -> [..., N], rounded once to ``rounding``.

    scale_b is that of b.T with its dims exchanged: (1,), [1, N], [ceil(K / 128), N], [ceil(K / 128), ceil(N / 128)].
    """
    product = dequantize(a) @ dequantize(b)
    return round_to(product if bias is None else product + as_f64(bias), rounding)
