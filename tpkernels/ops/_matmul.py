"""``tpkernels::matmul`` and ``tpkernels::matmul_accumulate``: the local product.

``matmul`` returns ``[out]``, or ``[out, preact]`` when the pre-activation is wanted for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import DeviceError, DTypeError, ShapeError
from tpkernels.ops import _activation, _checks, _gemm, _paths
from tpkernels.ops._registry import register


def _validate(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype | None
) -> torch.dtype:
    _checks.check_product("a", a, "b", b)
    _checks.check_bias("bias", bias, b.shape[-1], "a", a)
    _checks.check_activation(activation)
    return _checks.check_out_dtype(out_dtype, a.dtype)


def _implementation(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    path: str,
) -> list[Tensor]:
    dtype = _validate(a, b, bias, activation, out_dtype)
    request = _paths.parse(path, a.device.type, distributed=False)
    choice = _paths.choose_gemm(request, a.device.type, a.dtype)
    product = _gemm.run(
        choice, a, b, bias=bias, activation=activation, out_dtype=dtype, want_preact=return_preact
    )
    _paths.record("matmul", "none", choice.gemm, _gemm.describe(a, b), choice.why)
    return [product.out] if product.preact is None else [product.out, product.preact]


def _fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    path: str,
) -> list[Tensor]:
    dtype = _validate(a, b, bias, activation, out_dtype)
    shape = _gemm.output_shape(a, b)
    return [a.new_empty(shape, dtype=dtype) for _ in range(2 if return_preact else 1)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, b, bias, activation, _, return_preact, path = inputs
    ctx.set_materialize_grads(False)
    ctx.activation, ctx.path, ctx.has_bias = activation, path, bias is not None
    keep_bias = bias if activation != "none" and not return_preact else None
    ctx.save_for_backward(a, b, keep_bias, output[1] if return_preact else None)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    a, b, bias, preact = ctx.saved_tensors
    grad = preact_grad(
        grads[0],
        grads[1] if len(grads) > 1 else None,
        ctx.activation,
        lambda: preact if preact is not None else product(a, b, bias, path=ctx.path),
    )
    if grad is None:
        return (None,) * 7
    grad = grad.to(a.dtype)
    need_a, need_b = ctx.needs_input_grad[:2]
    grad_a = reduce_to(product(grad, b.mT, path=ctx.path), a.shape) if need_a else None
    grad_b = weight_grad(a, grad, b.shape, ctx.path) if need_b else None
    grad_bias = sum_rows(grad) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return grad_a, grad_b, grad_bias, None, None, None, None


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, path: str = "auto") -> Tensor:
    """The local product as an op, for use in backward formulas."""
    out: list[Tensor] = torch.ops.tpkernels.matmul(a, b, bias, "none", None, False, path)
    return out[0]


def preact_grad(
    grad_out: Tensor | None, grad_preact: Tensor | None, activation: str, preact: Any
) -> Tensor | None:
    """Gradient at the pre-activation from the gradients of ``out`` and of a returned ``preact``.

    ``preact`` is a function, called only if the activation needs it.
    """
    grad = grad_out
    if grad is not None and activation != "none":
        grad = _activation.backward(grad, preact().to(grad.dtype), activation)
    if grad_preact is None:
        return grad
    return grad_preact if grad is None else grad + grad_preact


def weight_grad(a: Tensor, grad: Tensor, shape: torch.Size, path: str) -> Tensor:
    """``a^T @ grad`` summed over rows; for a batched weight, over the dimensions it was broadcast in."""
    if len(shape) == 2:
        return product(a.flatten(0, -2).t(), grad.flatten(0, -2), path=path)
    return reduce_to(product(a.mT, grad, path=path), shape)


def reduce_to(grad: Tensor, shape: torch.Size) -> Tensor:
    """Undo broadcasting of batch dimensions."""
    return grad if grad.shape == shape else grad.sum_to_size(shape)


def sum_rows(grad: Tensor) -> Tensor:
    """Bias gradient [N]: sum over all rows."""
    return grad.flatten(0, -2).sum(0)  # reshape(-1, 0) would be ambiguous


register("matmul", _implementation, _fake, setup_context=_setup_context, backward=_backward)


def _validate_accumulate(a: Tensor, b: Tensor, acc: Tensor) -> None:
    _checks.check_product("a", a, "b", b)
    shape = _gemm.output_shape(a, b)
    if list(acc.shape) != shape:
        raise ShapeError(f"accumulate_into: expected the product's shape {shape}, got {list(acc.shape)}.")
    if acc.dtype not in _checks.DTYPES:
        raise DTypeError(f"accumulate_into: expected a floating point dtype, got {acc.dtype}.")
    if acc.device != a.device:
        raise DeviceError(
            f"accumulate_into: expected device {a.device} as in a, got {acc.device}; move one of them."
        )


def _accumulate(a: Tensor, b: Tensor, acc: Tensor, path: str) -> None:
    _validate_accumulate(a, b, acc)
    _checks.check_no_overlap("accumulate_into", acc, [("a", a), ("b", b)])
    request = _paths.parse(path, a.device.type, distributed=False)
    choice = _paths.choose_gemm(request, a.device.type, a.dtype)
    _gemm.accumulate(choice, a, b, acc)
    _paths.record("matmul_accumulate", "none", choice.gemm, _gemm.describe(a, b), choice.why)


def _accumulate_fake(a: Tensor, b: Tensor, acc: Tensor, path: str) -> None:
    _validate_accumulate(a, b, acc)


register("matmul_accumulate", _accumulate, _accumulate_fake)


def _streamk_fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    preact: Tensor | None,
    activation: str,
    accumulate: bool,
    schedule: str = "auto",
    workers: int = 0,
    splits: int = 1,
    tile: str = "",
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    multiprocessors: int = 0,
) -> None:
    """The kernel writes into ``out`` and ``preact`` and returns nothing."""


torch.library.register_fake("tpkernels::streamk_gemm", _streamk_fake)
