"""The formula of quantisation, in PyTorch: what the CPU and compiled graphs for it run, and what kernels equal.

:mod:`tpkernels.fp8._quantize` says what it computes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
SCALINGS = ("tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128")
#: Those in which the transposed matrix has the same bytes and scales.
SYMMETRIC = ("tensorwise", "blockwise_128x128")
#: The formats and their largest values.
DTYPES = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST_SCALE = 2.0**-126  # its reciprocal is finite


def scale_shape(scaling: str, rows: int, columns: int) -> list[int]:
    """Of the scales of a matrix."""
    return {
        "tensorwise": [1],
        "rowwise": [rows, 1],
        "blockwise_1x128": [rows, (columns + BLOCK - 1) // BLOCK],
        "blockwise_128x128": [(rows + BLOCK - 1) // BLOCK, (columns + BLOCK - 1) // BLOCK],
    }[scaling]


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
) -> tuple[Tensor, Tensor]:
    """x (or x^T) in FP8 with known scales, and these. clamp: there may be values that are too large for them."""
    x = _source(x, transpose)
    reciprocal = 1.0 / scale
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if scaling in ("tensorwise", "rowwise"):
        _multiply(x, reciprocal, out, clamp)
        return out, scale
    if x.shape[-1] % BLOCK == 0 and (scaling == "blockwise_1x128" or x.shape[0] % BLOCK == 0):
        factor = reciprocal.unsqueeze(-1) if scaling == "blockwise_1x128" else reciprocal[:, None, :, None]
        _multiply(_blocks(x, scaling), factor, _blocks(out, scaling), clamp)
    else:
        _multiply(x, spread(reciprocal, x.shape), out, clamp)
    return out, scale


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


def make(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    power_of_2: bool,
    amax: Tensor | None,
    plain: bool,
    turned: bool,
    trusted: bool = False,
) -> list[Tensor]:
    """Data and scales of x if ``plain``, then of x^T if ``turned``. trusted: nothing is larger than ``amax``."""
    made: list[Tensor] = []
    for transpose in [t for t, wanted in ((False, plain), (True, turned)) if wanted]:
        if made and scaling in SYMMETRIC:
            scale = made[1].t().clone(memory_format=torch.contiguous_format)
            made += [*turn(made[0].flatten(0, -2), made[1], scaling, power_of_2), scale]
            continue
        found = amax_of(x, scaling, transpose=transpose) if amax is None else amax
        scale = scale_of(found, dtype, power_of_2=power_of_2)
        clamp = amax is not None and not trusted
        made += quantize_by(x, scale, scaling, dtype, transpose=transpose, clamp=clamp)
    return made


def turn(data: Tensor, scale: Tensor, scaling: str, power_of_2: bool) -> list[Tensor]:
    """Data of the transposed matrix, of what is in FP8; then, where they are not the old ones, its scales."""
    if scaling in SYMMETRIC:
        return [data.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(data.dtype)]
    wide = torch.bfloat16 if power_of_2 else torch.float32  # holds FP8 times 2^n exactly
    x = (data.to(torch.float32) * spread(scale, data.shape)).to(wide)
    return make(x, scaling, data.dtype, power_of_2, None, False, True)
