"""Which local products path "auto" gives to our Hopper kernel: those in which it was measured to be faster than cuBLAS.

Measured on an H200 in CUDA graphs, bfloat16, operands in memory and laid out as TMA reads them, K contiguous in both,
as in the forward pass of a linear layer. Other layouts, dtypes of the result, batches and devices stay with cuBLAS.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpkernels.ops import _gemm, _plans
from tpkernels.ops._paths import Choice

_TMA = 16  # bytes: where matrices and their rows may begin


def suits(a: Tensor, b: Tensor, gate: Tensor | None) -> bool:
    """Whether the factors lie as they did when this was measured. Asked in each call: it is not part of a shape."""
    if not a.is_cuda or a.dtype not in (torch.bfloat16, torch.float16) or a.dim() < 2 or b.dim() != 2:
        return False
    lies = _lies_along_k(a) and _lies_along_k(b.mT)
    return lies and (gate is None or (gate.dim() == 2 and _lies_along_k(gate.mT)))


def _lies_along_k(x: Tensor) -> bool:
    """Rows one behind the other, each contiguous and aligned for TMA."""
    size = x.element_size()
    return (
        x.stride(-1) == 1 and x.stride(-2) * size % _TMA == 0 and x.data_ptr() % _TMA == 0 and x.numel() > 0
    )


def choose(choice: Choice, a: Tensor, b: Tensor, e: _gemm.Epilogue, out_dtype: torch.dtype) -> Choice:
    """``choice``, or our kernel where that is left open and it should be faster; of operands that :func:`suits`."""
    if not choice.open or choice.gemm != "cublas" or out_dtype != a.dtype:
        return choice
    machine = _plans.machine_of(a.device.type, a.device, _plans.dtype_name(a.dtype))
    if machine.architecture != "sm90":
        return choice
    product = _plans.Product(1, math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1])
    few_tiles = _plans.has_few_tiles(product.m, product.n, a.device)
    reason = why_ours(product, machine, e, few_tiles=few_tiles)
    return choice if reason is None else choice._replace(gemm="streamk", why=reason)


def why_ours(
    product: _plans.Product, machine: _plans.Machine, e: _gemm.Epilogue, *, few_tiles: bool
) -> str | None:
    """Why the Hopper kernel is preferred to cuBLAS and torch's operations behind it; None if it is not. Pure.

    In 509 random products of 16 to 8192 rows, 128 to 8192 columns and K of 128 to 8192 it took, beside them, 0.55x
    the time with bias and gelu (1.03x at worst), 0.54x with a gate and silu (1.09x), 0.64x with a residual (1.17x), and
    in the 376 of few tiles 0.59x with a bias alone (1.07x).
    """
    if e.activation != "none" or e.gate is not None or e.residual is not None:
        return "our kernel does in one launch what follows the product"
    if e.bias is not None and few_tiles:
        return "our kernel adds the bias in the same launch, where cuBLAS might round the product first"
    if _plans.prefers_streamk(product, machine):
        return "our kernel is faster in short products"
    return None
