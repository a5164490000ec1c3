"""Array plumbing: NumPy or CuPy by the argument's type, float64 everywhere, and a model of rounding to short types."""

from __future__ import annotations

import importlib
import math
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray

# (significant bits, exponent of the smallest subnormal, largest finite value)
_FORMATS: dict[str, tuple[int, int, float]] = {
    "bfloat16": (8, -133, (2.0 - 2.0**-7) * 2.0**127),
    "float16": (11, -24, 65504.0),
    "float32": (24, -149, (2.0 - 2.0**-23) * 2.0**127),
}


def get_array_module(*arrays: Any) -> Any:
    """``cupy`` if any argument is a CuPy array, else ``numpy``."""
    if any(type(x).__module__.split(".")[0] == "cupy" for x in arrays):
        import cupy

        return cupy
    return np


def as_f64(x: Any) -> Array:
    """``x`` as a float64 array where it is (NumPy or CuPy)."""
    return get_array_module(x).asarray(x, dtype=np.float64)


def erf(x: Array) -> Array:
    """The error function, elementwise, accurate in float64: any shape -> the same shape."""
    if get_array_module(x) is np:
        flat = np.fromiter(map(math.erf, x.ravel()), np.float64, x.size)
        return flat.reshape(x.shape)
    return importlib.import_module("cupyx.scipy.special").erf(x)


def round_to(x: Any, dtype: str | None) -> Array:
    """``x`` rounded to nearest even as ``dtype`` would hold it, returned in float64: any shape -> the same shape.

    Args:
        dtype: "bfloat16", "float16", "float32", with their subnormals and overflow to infinity; None and "float64"
            return x.

    Raises:
        ValueError: another dtype.
    """
    x = as_f64(x)
    if dtype is None or dtype == "float64":
        return x
    if dtype not in _FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(_FORMATS)}, float64 or None, got {dtype!r}")
    xp = get_array_module(x)
    bits, smallest, largest = _FORMATS[dtype]
    _, exponent = xp.frexp(x)
    quantum = xp.maximum(exponent - bits, smallest)
    rounded = xp.ldexp(xp.rint(xp.ldexp(x, -quantum)), quantum)
    return xp.where(xp.abs(rounded) > largest, xp.copysign(xp.inf, x), rounded)


def flatten_rows(x: Array) -> Array:
    """[..., K] -> [rows, K] (K may be 0, so the row count is computed and not left to reshape)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo broadcasting: x summed over the dimensions that it has in front of ``shape``, or in which it is larger."""
    front = x.ndim - len(shape)
    larger = [front + d for d, n in enumerate(shape) if n != x.shape[front + d]]
    axes = (*range(front), *larger)
    return x.sum(axis=axes, keepdims=True).reshape(shape) if axes else x
