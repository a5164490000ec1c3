"""The local product with its epilogue, on the path that was chosen.

Epilogue order, everywhere: product, + bias, pre-activation (kept if asked for), activation, rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.ops import _activation, _nvtx
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._paths import Choice


class Product(NamedTuple):
    """Result of a local product; ``preact`` is None unless it was asked for."""

    out: Tensor
    preact: Tensor | None


def output_shape(a: Tensor, b: Tensor) -> list[int]:
    """Shape of ``a @ b``: [..., M, N] with batch dimensions broadcast."""
    batch = a.shape[:-2] if b.dim() == 2 else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return [*batch, a.shape[-2], b.shape[-1]]


def describe(a: Tensor, b: Tensor) -> str:
    """Sizes of a product for a path record."""
    rows = math.prod(a.shape[:-1])
    return f"M={rows} N={b.shape[-1]} K={a.shape[-1]} {str(a.dtype).removeprefix('torch.')}"


def run(
    choice: Choice,
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype,
    want_preact: bool = False,
) -> Product:
    """Multiply ``a`` [..., M, K] by ``b`` [K, N] (or batched) with an epilogue. Arguments are checked already."""
    with _nvtx.phase("product", choice.gemm):
        if choice.gemm == "streamk":
            return _streamk(a, b, bias, activation, out_dtype, want_preact)
        return _library(a, b, bias, activation, out_dtype, want_preact)


def accumulate(choice: Choice, a: Tensor, b: Tensor, acc: Tensor) -> None:
    """``acc += a @ b``, the sum rounded once to ``acc``'s dtype. ``acc`` has the product's shape."""
    with _nvtx.phase("product", choice.gemm):
        if choice.gemm == "streamk":
            a3, b3 = _as_batched(a, b)
            try:
                acc3 = acc.view(a3.shape[0], a3.shape[1], b3.shape[2])
            except RuntimeError:  # batch dimensions that no view can join
                acc += _streamk(a, b, None, "none", accumulate_dtype(acc.dtype), False).out
                return
            torch.ops.tpkernels.streamk_gemm(a3, b3, None, acc3, None, "none", True)
            return
        acc += _library(a, b, None, "none", accumulate_dtype(acc.dtype), False).out


def _streamk(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype, want_preact: bool
) -> Product:
    shape = output_shape(a, b)
    a3, b3 = _as_batched(a, b)
    out = a.new_empty(a3.shape[0], a3.shape[1], b3.shape[2], dtype=out_dtype)
    preact = torch.empty_like(out) if want_preact else None
    torch.ops.tpkernels.streamk_gemm(a3, b3, bias, out, preact, activation, False)
    return Product(out.view(shape), None if preact is None else preact.view(shape))


def _library(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype, want_preact: bool
) -> Product:
    if a.is_cuda and out_dtype == a.dtype and bias is not None and activation == "none" and b.dim() == 2:
        # cuBLASLt adds the bias in its own epilogue, before rounding.
        wide = torch.addmm(bias, a.flatten(0, -2), b).view(output_shape(a, b))
        bias = None
    else:
        wide = _wide_product(a, b, out_dtype, keep_wide=bias is not None or activation != "none")
    with _nvtx.phase("epilogue"):
        if bias is not None:
            wide = wide + bias
        out = _activation.forward(wide, activation).to(out_dtype)
        preact = wide.to(out_dtype) if want_preact else None
        if preact is not None and preact.data_ptr() == out.data_ptr() and out.numel() > 0:
            preact = preact.clone()
        return Product(out, preact)


def _wide_product(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, keep_wide: bool) -> Tensor:
    """Product whose sums are float32 (float64), in that dtype if an epilogue follows."""
    wide = accumulate_dtype(a.dtype)
    if a.dtype == wide:
        return torch.matmul(a, b)
    if not a.is_cuda:
        return torch.matmul(a.to(wide), b.to(wide))
    if out_dtype == a.dtype and not keep_wide:
        return torch.matmul(a, b)
    a3, b3 = _as_batched(a, b)
    if a3.shape[0] == 1:
        product = torch.mm(a3[0], b3[0], out_dtype=wide)
    else:
        product = torch.bmm(a3, b3, out_dtype=wide)
    return product.view(output_shape(a, b))


def _as_batched(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Views [B, M, K] and [B, K, N] of both operands, copies only where no view exists."""
    if b.dim() == 2:
        if a.dim() == 2:
            return a.unsqueeze(0), b.unsqueeze(0)
        rows = _rows_view(a)
        if rows is not None:
            return rows.unsqueeze(0), b.unsqueeze(0)
        a3 = _collapse_batch(a)
        return a3, b.unsqueeze(0).expand(a3.shape[0], -1, -1)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return _collapse_batch(a.expand(*batch, -1, -1)), _collapse_batch(b.expand(*batch, -1, -1))


def _rows_view(a: Tensor) -> Tensor | None:
    """``a`` as one matrix of rows, if its leading dimensions are evenly spaced."""
    try:
        return a.view(-1, a.shape[-1]) if a.numel() > 0 else a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    except RuntimeError:
        return None


def _collapse_batch(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x.unsqueeze(0)
    if x.dim() == 3:
        return x
    if x.stride()[:-2] == (0,) * (x.dim() - 2):  # one matrix, expanded: keep it a view
        return x[(0,) * (x.dim() - 2)].unsqueeze(0).expand(math.prod(x.shape[:-2]), -1, -1)
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
