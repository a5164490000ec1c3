"""``tpkernels::matmul`` and ``tpkernels::matmul_accumulate``: the local product.

``matmul`` returns ``[out]``, or what the backward pass wants too: ``[out, preact]``, and with a gate
``[out, alpha a b, alpha a gate]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import DeviceError, DTypeError, ShapeError
from tpkernels.ops import _activation, _checks, _gemm, _paths, _preferred
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._main_grad import Target
from tpkernels.ops._registry import below, register
from tpkernels.ops._remembered import Remembered, signature


def _validate(a: Tensor, b: Tensor, e: _gemm.Epilogue, out_dtype: torch.dtype | None) -> torch.dtype:
    _checks.check_product("a", a, "b", b)
    _checks.check_gate(e.gate, b, e.bias, a)
    _checks.check_bias("bias", e.bias, b.shape[-1], "a", a)
    _checks.check_addend("residual", e.residual, _gemm.output_shape(a, b), a)
    _checks.check_activation(e.activation)
    return _checks.check_out_dtype(out_dtype, a.dtype)


_decided: Remembered[tuple[torch.dtype, _paths.Choice, str]] = Remembered()


def _choose(a: Tensor, path: str) -> _paths.Choice:
    request = _paths.parse(path, a.device.type, distributed=False)
    return _paths.choose_gemm(request, a.device.type, a.dtype)


def _implementation(
    a: Tensor,
    b: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    path: str,
) -> list[Tensor]:
    epilogue = _gemm.Epilogue(gate, bias, residual, alpha, activation)
    operands = signature(a), signature(b), signature(gate), signature(bias), signature(residual)
    kept = return_preact and gate is not None  # two products, which our kernel makes one after the other
    suits = path == "auto" and not kept and _preferred.suits(a, b, gate)

    def decide() -> tuple[torch.dtype, _paths.Choice, str]:
        dtype = _validate(a, b, epilogue, out_dtype)
        choice = _choose(a, path)
        if suits:
            choice = _preferred.choose(choice, a, b, epilogue, dtype)
        return dtype, choice, _gemm.describe(a, b, gated=gate is not None)

    key = operands, activation, out_dtype, path, _paths.environment(path), suits
    dtype, choice, detail = _decided.get(key, decide)
    product = _gemm.run(choice, a, b, epilogue, out_dtype=dtype, want_preact=return_preact)
    choice = product.choice or choice
    _paths.record("matmul", "none", choice.gemm, detail, choice.why)
    return [product.out, *product.kept]


def _fake(
    a: Tensor,
    b: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    path: str,
) -> list[Tensor]:
    dtype = _validate(a, b, _gemm.Epilogue(gate, bias, residual, alpha, activation), out_dtype)
    shape = _gemm.output_shape(a, b)
    kept = 0 if not return_preact else 1 if gate is None else 2
    return [a.new_empty(shape, dtype=dtype) for _ in range(1 + kept)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, b, gate, bias, residual, alpha, activation, _, return_preact, path = inputs
    ctx.set_materialize_grads(False)
    ctx.alpha, ctx.activation, ctx.path, ctx.has_bias = alpha, activation, path, bias is not None
    ctx.residual_dtype = None if residual is None else residual.dtype
    keep_bias = bias if activation != "none" and not return_preact else None
    ctx.save_for_backward(a, b, gate, keep_bias, *output[1:])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    need_a, need_b, need_gate, need_bias, need_residual = ctx.needs_input_grad[:5]
    grad_a = grad_b = grad_gate = grad_bias = grad_residual = None
    if need_residual and grads[0] is not None:
        grad_residual = grads[0].to(ctx.residual_dtype)
    if need_a or need_b or need_gate or need_bias:
        a, b, gate, bias, *kept = ctx.saved_tensors  # once: checkpointing allows no more
        if gate is None:
            grad_a, grad_b, grad_bias = _plain_grads(ctx, grads, a, b, bias, kept)
        else:
            grad_a, grad_b, grad_gate = _gated_grads(ctx, grads, a, b, gate, kept)
    return grad_a, grad_b, grad_gate, grad_bias, grad_residual


_Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def _plain_grads(
    ctx: Any, grads: list[Tensor | None], a: Tensor, b: Tensor, bias: Tensor | None, kept: list[Tensor]
) -> _Three:
    """Gradients of a, b and bias without a gate."""
    grad = preact_grad(
        grads[0],
        grads[1] if kept else None,
        ctx.activation,
        lambda: kept[0] if kept else product(a, b, bias, ctx.path, alpha=ctx.alpha),
    )
    if grad is None:
        return None, None, None
    grad = grad.to(a.dtype)
    need_a, need_b, _, need_bias = ctx.needs_input_grad[:4]
    grad_a = reduce_to(product(grad, b.mT, path=ctx.path, alpha=ctx.alpha), a.shape) if need_a else None
    grad_b = weight_grad(a, grad, b, ctx.path, ctx.alpha) if need_b else None
    return grad_a, grad_b, sum_rows(grad) if ctx.has_bias and need_bias else None


def _gated_grads(
    ctx: Any, grads: list[Tensor | None], a: Tensor, b: Tensor, gate: Tensor, kept: list[Tensor]
) -> _Three:
    """Gradients of a, b and gate of ``activation(alpha a gate) * (alpha a b)``."""
    need_a, need_b, need_gate = ctx.needs_input_grad[:3]
    d_up, d_gate = half_grads(
        grads,
        ctx.activation,
        a.dtype,
        lambda: kept or [product(a, w, path=ctx.path, alpha=ctx.alpha) for w in (b, gate)],
        has_kept=bool(kept),
    )
    if d_up is None or d_gate is None:
        return None, None, None
    grad_a = None
    if need_a:  # two products, the sum rounded once
        wide = accumulate_dtype(a.dtype)
        first = product(d_up, b.mT, path=ctx.path, alpha=ctx.alpha, out_dtype=wide)
        both = product(d_gate, gate.mT, path=ctx.path, alpha=ctx.alpha, residual=first)
        grad_a = reduce_to(both, a.shape)
    grad_b = weight_grad(a, d_up, b, ctx.path, ctx.alpha) if need_b else None
    grad_gate = weight_grad(a, d_gate, gate, ctx.path, ctx.alpha) if need_gate else None
    return grad_a, grad_b, grad_gate


def half_grads(
    grads: list[Tensor | None],
    activation: str,
    dtype: torch.dtype,
    halves: Callable[[], list[Tensor]],
    *,
    has_kept: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients at the product and at that with the gate, in ``dtype``, or None twice if there are none.

    halves: the two products, which were outputs, with gradients of their own, if ``has_kept``.
    """
    extra_up, extra_gate = grads[1:3] if has_kept else (None, None)
    if grads[0] is None and extra_up is None and extra_gate is None:
        return None, None
    up, gated = halves()
    wide = accumulate_dtype(up.dtype)
    if grads[0] is None:
        d_up, d_gate = torch.zeros_like(up, dtype=wide), torch.zeros_like(gated, dtype=wide)
    else:
        grad, up, gated = grads[0].to(wide), up.to(wide), gated.to(wide)
        d_up = grad * _activation.forward(gated, activation)
        d_gate = _activation.backward(grad * up, gated, activation)
    d_up = d_up if extra_up is None else d_up + extra_up
    d_gate = d_gate if extra_gate is None else d_gate + extra_gate
    return d_up.to(dtype), d_gate.to(dtype)


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    path: str = "auto",
    *,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The local product as an op, for use in backward formulas."""
    out: list[Tensor] = torch.ops.tpkernels.matmul(
        a, b, None, bias, residual, alpha, "none", out_dtype, False, path
    )
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


def weight_grad(
    a: Tensor, grad: Tensor, b: Tensor, path: str, alpha: float = 1.0, target: Target | None = None
) -> Tensor | None:
    """``alpha a^T @ grad`` summed over rows; for a batched ``b``, over the dimensions it was broadcast in.

    With a target (of a weight [K, N], without alpha) it is added there, and what is returned is not it.
    """
    if target is not None or b.dim() == 2:
        left, right = as_rows(a).t(), as_rows(grad)
        if target is not None:
            return target.add(left, right, path)
        return product_like(b, left, right, lambda x, y: product(x, y, path=path, alpha=alpha))
    # Where the weight is one for several matrices their rows are summed up in the product, not behind it.
    batch = grad.shape[:-2]
    own = (*(1,) * (grad.dim() - b.dim()), *b.shape[:-2])
    shared = [d for d, n in enumerate(own) if n == 1 and batch[d] != 1]
    left, right = (_rows_together(x.expand(*batch, -1, -1), shared) for x in (a, grad))
    return product(left.mT, right, path=path, alpha=alpha).reshape(b.shape)


def _rows_together(x: Tensor, dims: list[int]) -> Tensor:
    """Batch dimensions ``dims`` and the rows as one dimension; a copy where no view can be that."""
    if not dims:
        return x
    inner = list(range(x.dim() - 2 - len(dims), x.dim() - 2))
    return x.movedim(dims, inner).flatten(inner[0], -2)


def is_transposed(b: Tensor) -> bool:
    """Whether a weight [K, N] is a view of one that is stored [N, K]."""
    return b.stride(0) == 1 and b.stride(1) != 1


def product_below(a: Tensor, b: Tensor, path: str) -> Tensor:
    """:func:`product` for implementations of ops."""
    made: list[Tensor] = below("matmul", a.device)(a, b, None, None, None, 1.0, "none", None, False, path)
    return made[0]


def product_like(
    b: Tensor, left: Tensor, right: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """``left @ right`` by ``multiply``, which lies as ``b`` does.

    The gradient of a parameter whose ``.t()`` is ``b`` is then contiguous: autograd takes it as it is, where it would
    copy any other, and torch 2.11 would even gather it, if the parameter is a DTensor cut unevenly.
    """
    if is_transposed(b):
        return multiply(right.t(), left.t()).t()
    return multiply(left, right)


def reduce_to(grad: Tensor, shape: torch.Size) -> Tensor:
    """Undo broadcasting of batch dimensions."""
    return grad if grad.shape == shape else grad.sum_to_size(shape)


def sum_rows(grad: Tensor) -> Tensor:
    """Bias gradient [N]: sum over all rows."""
    return as_rows(grad).sum(0)


def as_rows(x: Tensor) -> Tensor:
    """As a matrix, whose rows are those of all leading dimensions."""
    return x if x.dim() == 2 else x.flatten(0, -2)  # reshape(-1, 0) would be ambiguous


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
    choice = _gemm.accumulate(_choose(a, path), a, b, acc)
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
    allow_tf32: bool = False,
) -> None:
    """The kernel writes into ``out`` and ``preact`` and returns nothing."""


torch.library.register_fake("tpkernels::streamk_gemm", _streamk_fake)
