"""Weight gradients of grouped products: ``tpkernels::grouped_weight_grad`` and ``grouped_weight_grad_accumulate``.

A product for each group on every path: each has a K of its own, and mostly tiles enough to fill the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tpkernels.errors import DeviceError, DTypeError, ShapeError
from tpkernels.ops import _checks, _gemm, _nvtx, _paths
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._grouped import check_sizes, choose, product, product_into, spans
from tpkernels.ops._registry import register


def _validate_grad(a: Tensor, dy: Tensor, sizes: Sequence[int]) -> None:
    for name, x in (("a", a), ("dy", dy)):
        _checks.check_operand(name, x)
        if x.dim() != 2:
            raise ShapeError(
                f"{name}: expected 2 dimensions [rows of all groups, columns], got {list(x.shape)}."
            )
    _checks.check_like("dy", dy, "a", a)
    if a.shape[0] != dy.shape[0]:
        raise ShapeError(f"dy: expected the rows of a, {a.shape[0]}, got shape {list(dy.shape)}.")
    check_sizes(sizes, a, len(sizes))


def _grad(a: Tensor, dy: Tensor, group_sizes: list[int], transposed: bool, path: str) -> Tensor:
    _validate_grad(a, dy, group_sizes)
    choice = choose(path, a.device, a.dtype)._replace(open=False)  # K is new in every call: nothing to tune
    left, right = (dy, a) if transposed else (a, dy)
    made = a.new_empty(len(group_sizes), left.shape[1], right.shape[1])
    for group, size in enumerate(group_sizes):
        if size == 0:
            made[group].zero_()
    with _nvtx.phase("product", choice.gemm):
        for group, rows in spans(group_sizes):
            product_into(choice, left[rows].t(), right[rows], made[group])
    detail = f"{_gemm.describe(a.t(), dy)} in {len(group_sizes)} groups of K, a product for each"
    _paths.record("grouped_weight_grad", "none", choice.gemm, detail, choice.why)
    return made.mT if transposed else made


def _grad_fake(a: Tensor, dy: Tensor, group_sizes: list[int], transposed: bool, path: str) -> Tensor:
    _validate_grad(a, dy, group_sizes)
    left, right = (dy, a) if transposed else (a, dy)
    made = a.new_empty(len(group_sizes), left.shape[1], right.shape[1])
    return made.mT if transposed else made


def _grad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, dy, ctx.sizes, _, ctx.path = inputs
    ctx.save_for_backward(a, dy)


def _grad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, dy = ctx.saved_tensors
    need_a, need_dy = ctx.needs_input_grad[:2]
    grad_a = product(dy, grad.mT, None, ctx.sizes, ctx.path) if need_a else None
    grad_dy = product(a, grad, None, ctx.sizes, ctx.path) if need_dy else None
    return grad_a, grad_dy, None, None, None


register("grouped_weight_grad", _grad, _grad_fake, setup_context=_grad_setup, backward=_grad_backward)


def _validate_accumulate(a: Tensor, dy: Tensor, acc: Tensor, sizes: Sequence[int]) -> None:
    _validate_grad(a, dy, sizes)
    shape = [len(sizes), a.shape[1], dy.shape[1]]
    if list(acc.shape) != shape:
        raise ShapeError(f"acc: expected the products' shape {shape}, got {list(acc.shape)}.")
    if acc.dtype != accumulate_dtype(a.dtype):
        raise DTypeError(
            f"acc: expected {accumulate_dtype(a.dtype)} for operands of {a.dtype}, got {acc.dtype}."
        )
    if acc.device != a.device:
        raise DeviceError(f"acc: expected device {a.device} as in a, got {acc.device}; move one of them.")


def _accumulate(a: Tensor, dy: Tensor, acc: Tensor, group_sizes: list[int], path: str) -> None:
    _validate_accumulate(a, dy, acc, group_sizes)
    _checks.check_no_overlap("acc", acc, [("a", a), ("dy", dy)])
    choice = choose(path, a.device, a.dtype)._replace(open=False)
    for group, rows in spans(group_sizes):
        _gemm.accumulate(choice, a[rows].t(), dy[rows], acc[group])
    detail = f"{_gemm.describe(a.t(), dy)} in {len(group_sizes)} groups of K, a product for each"
    _paths.record("grouped_weight_grad_accumulate", "none", choice.gemm, detail, choice.why)


def _accumulate_fake(a: Tensor, dy: Tensor, acc: Tensor, group_sizes: list[int], path: str) -> None:
    _validate_accumulate(a, dy, acc, group_sizes)


register("grouped_weight_grad_accumulate", _accumulate, _accumulate_fake)
