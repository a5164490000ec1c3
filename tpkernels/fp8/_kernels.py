"""Quantisation as operations of the dispatcher: by the kernels of ``_C_sm80`` where they run, else by the formula.

``tpkernels::quantize``, ``requantize_transposed`` and ``largest`` stay as they are in compiled graphs. The kernels give
the bits of :mod:`._formula` in one pass over memory; they take GPUs of compute capability 8.0 or newer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels import _extensions
from tpkernels.fp8 import _formula
from tpkernels.fp8._formula import scale_shape
from tpkernels.ops._registry import register

_ops = torch.ops.tpkernels
_BUILT = _extensions.is_loaded("_C_sm80")
_SOURCES = (torch.bfloat16, torch.float16, torch.float32, *_formula.DTYPES)


def run(x: Tensor) -> bool:
    """Whether the kernels take ``x``."""
    return _BUILT and x.is_cuda and x.dtype in _SOURCES and _capable(x.device)


@torch.compiler.assume_constant_result
def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _outputs(x: Tensor, scaling: str, dtype: torch.dtype, rows: int, columns: int) -> list[Tensor]:
    """Data and scales, to be written."""
    shape = scale_shape(scaling, rows, columns)
    return [x.new_empty(rows, columns, dtype=dtype), x.new_empty(shape, dtype=torch.float32)]


def _quantize(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    power_of_2: bool,
    plain: bool,
    turned: bool,
    amax: Tensor | None,
) -> list[Tensor]:
    if not run(x) or x.numel() == 0:
        return _formula.make(x, scaling, dtype, power_of_2, amax, plain, turned)
    m, k = x.shape
    if scaling == "tensorwise" and amax is None:
        amax = _largest([x])
    of_x = _outputs(x, scaling, dtype, m, k) if plain else []
    of_x_t = _outputs(x, scaling, dtype, k, m) if turned else []
    source, is_turned = _source(x)
    pairs = (of_x_t, of_x) if is_turned else (of_x, of_x_t)
    outs = [out for pair in pairs for out in (pair or (None, None))]
    _ops.quantize_fp8(source, None, amax, *outs, scaling, power_of_2)
    return [*of_x, *of_x_t]


def _source(x: Tensor) -> tuple[Tensor, bool]:
    """x [rows, columns] or its transposed view, whichever has contiguous rows; else a copy."""
    if x.shape[1] <= 1 or x.stride(1) == 1:
        return x, False
    if x.shape[0] <= 1 or x.stride(0) == 1:
        return x.t(), True
    return x.contiguous(), False


def _quantize_fake(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    power_of_2: bool,
    plain: bool,
    turned: bool,
    amax: Tensor | None,
) -> list[Tensor]:
    m, k = x.shape
    of_x = _outputs(x, scaling, dtype, m, k) if plain else []
    return [*of_x, *(_outputs(x, scaling, dtype, k, m) if turned else [])]


def _requantize(data: Tensor, scale: Tensor, scaling: str, power_of_2: bool) -> list[Tensor]:
    if not run(data) or data.numel() == 0:
        return _formula.turn(data, scale, scaling, power_of_2)
    if data.shape[1] > 1 and data.stride(1) != 1:
        data = data.contiguous()
    out, of_out = _outputs(data, scaling, data.dtype, data.shape[1], data.shape[0])
    if scaling in _formula.SYMMETRIC:
        _ops.quantize_fp8(data, None, None, None, None, out, None, scaling, power_of_2)
        return [out]
    _ops.quantize_fp8(data, scale.contiguous(), None, None, None, out, of_out, scaling, power_of_2)
    return [out, of_out]


def _requantize_fake(data: Tensor, scale: Tensor, scaling: str, power_of_2: bool) -> list[Tensor]:
    made = _outputs(data, scaling, data.dtype, data.shape[1], data.shape[0])
    return made[:1] if scaling in _formula.SYMMETRIC else made


def _largest(xs: list[Tensor]) -> Tensor:
    if not all(run(x) for x in xs):
        return torch.cat([_formula.amax_of(x, "tensorwise") for x in xs])
    found = xs[0].new_empty(len(xs), dtype=torch.float32)
    for i, x in enumerate(xs):
        _ops.find_largest(_source(x.flatten(0, -2))[0], found[i : i + 1])
    return found


def _largest_fake(xs: list[Tensor]) -> Tensor:
    return xs[0].new_empty(len(xs), dtype=torch.float32)


register("quantize", _quantize, _quantize_fake)
register("requantize_transposed", _requantize, _requantize_fake)
register("largest", _largest, _largest_fake)


@torch.library.register_fake("tpkernels::quantize_fp8")
def _quantize_fp8_fake(*_: object) -> None:
    """It writes into its arguments."""


@torch.library.register_fake("tpkernels::find_largest")
def _find_largest_fake(x: Tensor, amax: Tensor) -> None:
    """It writes into its arguments."""
