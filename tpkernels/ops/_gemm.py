"""The local product with its epilogue, on the path that was chosen.

The order of an epilogue, everywhere (kernels/gemm_call.hpp), in float32, or float64 for such operands:

- product, * alpha, + bias: the pre-activation, kept if asked for
- activation; where there is a gate, activation(alpha * a @ gate) * the product
- + residual
- one rounding
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.ops import _activation, _nvtx, _plans
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._paths import Choice, PlanArguments, library_of
from tpkernels.tune import mode


class Epilogue(NamedTuple):
    """What follows a product. ``gate`` has the shape of ``b``, ``residual`` that of the output; no bias with a gate."""

    gate: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    alpha: float = 1.0
    activation: str = "none"

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows but rounding."""
        return (
            self.gate is None
            and self.bias is None
            and self.residual is None
            and self.alpha == 1.0
            and self.activation == "none"
        )


PLAIN = Epilogue()


class Product(NamedTuple):
    """Result of a local product. ``kept``, if asked for: [pre-activation], with a gate [alpha a b, alpha a gate].

    choice: what ran, where tuning replaced what was chosen.
    """

    out: Tensor
    kept: list[Tensor]
    choice: Choice | None = None


def output_shape(a: Tensor, b: Tensor) -> list[int]:
    """Shape of ``a @ b``: [..., M, N] with batch dimensions broadcast."""
    batch = a.shape[:-2] if b.dim() == 2 else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return [*batch, a.shape[-2], b.shape[-1]]


def describe(a: Tensor, b: Tensor, *, gated: bool = False, rows: int | None = None) -> str:
    """Sizes of a product for a path record; ``rows`` where they are not those of ``a``."""
    dtype = str(a.dtype).removeprefix("torch.")
    if rows is None:
        rows = math.prod(a.shape[:-1])
    return f"M={rows} N={b.shape[-1]} K={a.shape[-1]} {dtype}{' gated' if gated else ''}"


def run(
    choice: Choice,
    a: Tensor,
    b: Tensor,
    epilogue: Epilogue = PLAIN,
    *,
    out_dtype: torch.dtype,
    want_preact: bool = False,
) -> Product:
    """Multiply ``a`` [..., M, K] by ``b`` [K, N] (or batched) with an epilogue. Arguments are checked already."""
    if choice.open and mode.active():
        from tpkernels.tune import local

        call = local.Call(a, b, epilogue, out_dtype, want_preact)
        choice = local.tuned(choice, call, library_of(a.device.type))
    with _nvtx.phase("product", choice.gemm):
        if choice.gemm == "streamk":
            product = _streamk(a, b, epilogue, out_dtype, want_preact, choice.plan)
        else:
            product = _library(a, b, epilogue, out_dtype, want_preact)
        return product._replace(choice=choice)


def accumulate(choice: Choice, a: Tensor, b: Tensor, acc: Tensor) -> Choice:
    """``acc += a @ b``, the sum rounded once to ``acc``'s dtype. ``acc`` has the product's shape.

    Returns what ran, which tuning may have chosen.
    """
    if choice.open and mode.active():
        from tpkernels.tune import local

        choice = local.tuned(choice, local.Call(a, b, PLAIN, acc.dtype, into=acc))
    with _nvtx.phase("product", choice.gemm):
        _accumulate(choice, a, b, acc)
    return choice


def _accumulate(choice: Choice, a: Tensor, b: Tensor, acc: Tensor) -> None:
    if choice.gemm == "streamk":
        a3, b3 = _as_batched(a, b)
        try:
            acc3 = acc.view(a3.shape[0], a3.shape[1], b3.shape[2])
        except RuntimeError:  # batch dimensions that no view can join
            acc += _streamk(a, b, PLAIN, accumulate_dtype(acc.dtype), False, choice.plan).out
        else:
            tf32 = _plans.may_use_tf32(a.dtype)
            torch.ops.tpkernels.streamk_gemm(
                a3, b3, None, acc3, None, "none", True, allow_tf32=tf32, **arguments(choice.plan)
            )
        return
    rows = _rows_view(acc) if b.dim() == 2 and acc.dtype == accumulate_dtype(a.dtype) else None
    if rows is None:
        acc += _library(a, b, PLAIN, accumulate_dtype(acc.dtype), False).out
    else:
        _add_product(rows, a.flatten(0, -2), b)


def _add_product(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """``acc += a @ b`` in one call of the library, where ``acc`` has the dtype of its sums."""
    if a.is_cuda and a.dtype != acc.dtype:  # float32 beside half precision: torch 2.10 and later
        torch.addmm(acc, a, b, out_dtype=acc.dtype, out=acc)
    else:
        acc.addmm_(a.to(acc.dtype), b.to(acc.dtype))


def arguments(plan: PlanArguments) -> dict[str, str | int]:
    """As the Stream-K ops take them."""
    return {"schedule": plan.schedule, "splits": plan.splits, "tile": plan.tile}


def _streamk(
    a: Tensor, b: Tensor, e: Epilogue, out_dtype: torch.dtype, want_preact: bool, plan: PlanArguments
) -> Product:
    if e.gate is not None and want_preact:  # the kernel cannot store both products
        wide, alone = accumulate_dtype(a.dtype), Epilogue(alpha=e.alpha)
        return _finish(lambda right: _streamk(a, right, alone, wide, False, plan).out, b, e, out_dtype, True)
    shape = output_shape(a, b)
    a3, b3, *gates = _as_batched(a, b, *([] if e.gate is None else [e.gate]))
    out = a.new_empty(a3.shape[0], a3.shape[1], b3.shape[2], dtype=out_dtype)
    preact = torch.empty_like(out) if want_preact else None
    torch.ops.tpkernels.streamk_gemm(
        a3,
        b3,
        e.bias,
        out,
        preact,
        e.activation,
        False,
        gate=gates[0] if gates else None,
        residual=None if e.residual is None else e.residual.reshape(out.shape),
        alpha=e.alpha,
        allow_tf32=_plans.may_use_tf32(a.dtype),
        **arguments(plan),
    )
    return Product(out.view(shape), [] if preact is None else [preact.view(shape)])


def _library(a: Tensor, b: Tensor, e: Epilogue, out_dtype: torch.dtype, want_preact: bool) -> Product:
    if e.is_plain and not want_preact:
        product = _wide_product(a, b, out_dtype, keep_wide=False)
        return Product(product if product.dtype == out_dtype else product.to(out_dtype), [])
    one_call = not want_preact and a.is_cuda and out_dtype == a.dtype and b.dim() == 2
    if one_call and not _may_round_first(a, b, e):
        whole = _one_cublas_call(a, b, e)
        if whole is not None:
            return Product(whole, [])

    def multiply(right: Tensor) -> Tensor:
        product = _wide_product(a, right, out_dtype, keep_wide=not e.is_plain)
        return product if e.alpha == 1.0 else e.alpha * product

    return _finish(multiply, b, e, out_dtype, want_preact)


def _may_round_first(a: Tensor, b: Tensor, e: Epilogue) -> bool:
    """Whether cuBLAS might round the product before it adds the bias.

    Where there are fewer tiles than multiprocessors it may split K, for which torch.addmm was seen to do so: 45 of 400
    random bfloat16 products of up to 900x400, 2 of float16 (torch 2.11, H200).
    """
    if e.bias is None or a.dtype == accumulate_dtype(a.dtype):
        return False
    return _plans.has_few_tiles(math.prod(a.shape[:-1]), b.shape[-1], a.device)


def _one_cublas_call(a: Tensor, b: Tensor, e: Epilogue) -> Tensor | None:
    """Where cuBLAS scales and adds a bias in its own epilogue, before rounding: one tensor of ``a``'s dtype.

    Not so with a residual: torch.addmm of bfloat16 was seen to round the product before it added one.
    """
    if e.is_plain or e.gate is not None or e.residual is not None or e.activation != "none":
        return None
    shape = output_shape(a, b)
    if e.bias is not None:
        return torch.addmm(e.bias, a.flatten(0, -2), b, alpha=e.alpha).view(shape)
    return torch.addmm(b.new_zeros(1), a.flatten(0, -2), b, beta=0, alpha=e.alpha).view(shape)


def _finish(
    multiply: Callable[[Tensor], Tensor], b: Tensor, e: Epilogue, out_dtype: torch.dtype, want_preact: bool
) -> Product:
    """The epilogue in torch operations; ``multiply(b)`` is alpha * a @ b, in float32 (float64) if anything follows."""
    wide = multiply(b)
    gate = None if e.gate is None else multiply(e.gate)
    with _nvtx.phase("epilogue"):
        if e.bias is not None:
            wide = wide + e.bias
        y = _activation.forward(wide, e.activation) if gate is None else _gated(wide, gate, e.activation)
        if e.residual is not None:
            y = y + e.residual.to(y.dtype)
        out = y.to(out_dtype)
        kept = [wide] if gate is None else [wide, gate]
        return Product(out, [_apart(x.to(out_dtype), out) for x in kept] if want_preact else [])


def _gated(product: Tensor, gate: Tensor, activation: str) -> Tensor:
    return _activation.forward(gate, activation) * product


def _apart(x: Tensor, out: Tensor) -> Tensor:
    """``x`` with memory of its own: no activation and no rounding leave one tensor."""
    return x.clone() if x.data_ptr() == out.data_ptr() and out.numel() > 0 else x


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


def _as_batched(a: Tensor, *bs: Tensor) -> list[Tensor]:
    """Views [B, M, K] and [B, K, N] of the left and of each right operand, copies only where no view exists.

    The right ones have one shape. Where they are the same for several matrices of ``a``, all those are one matrix.
    """
    if bs[0].dim() == 2:
        if a.dim() == 2:
            return [a.unsqueeze(0), *(b.unsqueeze(0) for b in bs)]
        rows = _rows_view(a)
        if rows is not None:
            return [rows.unsqueeze(0), *(b.unsqueeze(0) for b in bs)]
        a3 = _collapse_batch(a)
        return [a3, *(b.unsqueeze(0).expand(a3.shape[0], -1, -1) for b in bs)]
    batch = torch.broadcast_shapes(a.shape[:-2], bs[0].shape[:-2])
    left, *rights = (x.expand(*batch, -1, -1) for x in (a, *bs))
    return [_collapse_batch(x) for x in _join_rows(left, rights)]


def _join_rows(a: Tensor, bs: list[Tensor]) -> list[Tensor]:
    """Without the last batch dimensions in which the right operands do not change, if their rows of ``a`` can be one
    matrix without a copy: keys that several heads share."""
    last = a.dim() - 2
    while last > 0 and all(b.stride(last - 1) == 0 or b.shape[last - 1] == 1 for b in bs):
        last -= 1
    if last == a.dim() - 2 or a.numel() == 0:
        return [a, *bs]
    try:
        joined = a.view(*a.shape[:last], -1, a.shape[-1])
    except RuntimeError:
        return [a, *bs]
    for _ in range(a.dim() - 2 - last):
        bs = [b.select(last, 0) for b in bs]
    return [joined, *bs]


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
