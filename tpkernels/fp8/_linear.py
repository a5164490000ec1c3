"""Products with FP8 gradients: what a linear layer makes of high-precision tensors, by a recipe.

With W [N, K] a weight (b is its .t()), x [M, K] and dY [M, N], each of the three products reads operands whose
contracted dimension is contiguous, as FP8 tensor cores take no other:

    y = x W^T       x along K, W along K
    dX = dY W       dY along N, W^T along N
    dW = dY^T x     dY^T along M, x^T along M

- Of x the backward pass keeps its FP8 values alone, half the bytes of bfloat16; x^T is made of them.
- W is quantised where it is needed, forward and backward, from the parameter.
- dY^T is made of dY where that is at hand in high precision, together with dY's FP8, else of what was gathered.
- Tensorwise, x^T, W^T and dY^T are the same bytes in another order; so is W^T blockwise.

Over a group, tensorwise scales are of the largest value of all ranks' parts: one all-reduce of a few numbers for each
pass. The other scalings need none: the blocks of a dimension that is cut over the ranks begin anew with each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels.fp8._quantize import Quantized, largest_of, make
from tpkernels.fp8.recipe import Fp8Recipe
from tpkernels.ops import _groups
from tpkernels.ops._main_grad import Target

_ops = torch.ops.tpkernels


class Call(NamedTuple):
    """What the functions get besides tensors.

    group: None for a local product. cut: the rows of x (column-parallel) or of y (row-parallel) are cut along ``dim``.
    keep: by weight, whether it needs a gradient. targets: by weight, see :mod:`tpkernels.ops._main_grad`.
    """

    recipe: Fp8Recipe
    group: str | None
    cut: bool
    dim: int
    sizes: list[int] | None
    out_dtype: torch.dtype
    path: str
    keep: tuple[bool, ...]
    targets: tuple[Target | None, ...]
    bias_of: tuple[int, ...] = ()
    keep_gathered: bool = False


def _largest(call: Call, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Tensorwise the largest absolute value of each tensor, over the group; else None for each."""
    if call.recipe.scaling != "tensorwise" or not tensors:
        return [None] * len(tensors)
    largest = largest_of([x.detach() for x in tensors])
    if call.group is not None:
        largest = _ops.all_reduce(largest, "max", call.group)
    return list(largest.split(1))


def _quantized(
    call: Call, x: Tensor, scaling: str, amax: Tensor | None, dtype: torch.dtype, transpose: bool = False
) -> Quantized:
    """As ``quantize``, of checked arguments; amax: from ``_largest``."""
    power = call.recipe.power_of_2
    (made,) = make(
        x.detach(), scaling, dtype, power, amax, plain=not transpose, turned=transpose, trusted=True
    )
    return made


def _gradient(
    call: Call, dy: Tensor, amax: Tensor | None, turned: bool
) -> tuple[Quantized, Quantized | None]:
    """dY along N and, if ``turned``, dY^T along M."""
    recipe = call.recipe
    made = make(
        dy.detach(),
        recipe.operand_scaling,
        recipe.grad_dtype,
        recipe.power_of_2,
        amax,
        turned=turned,
        trusted=True,
    )
    return made[0], made[1] if turned else None


def _factor(q: Quantized) -> tuple[Tensor, Tensor]:
    """[N, K] as the right factor of a product, with its scales."""
    right = q.t()
    return right.data, right.scale


def _weights(call: Call, bs: Sequence[Tensor], amaxes: Sequence[Tensor | None], transpose: bool) -> Any:
    """The right factors of x, or (transpose) of dY, and their scales."""
    recipe = call.recipe
    made = [
        _factor(_quantized(call, b.t(), recipe.weight_scaling, amax, recipe.forward_dtype, transpose))
        for b, amax in zip(bs, amaxes, strict=True)
    ]
    return [data for data, _ in made], [scale for _, scale in made]


def _wants_weight_grad(call: Call, i: int) -> bool:
    target = call.targets[i]
    return target is None or target.wanted()


def _weight_grad(call: Call, i: int, dy_t: Quantized, x_t: Quantized, b: Tensor) -> Tensor | None:
    """dW^T, lying as ``b`` [K, N] does, of both factors along M."""
    recipe, target = call.recipe, call.targets[i]
    out_dtype = b.dtype if target is None else torch.float32
    right, scale = _factor(x_t)
    end = (None, out_dtype, recipe.fast_accumulation, call.path)
    dw: Tensor = _ops.scaled_matmul(dy_t.data, right, dy_t.scale, scale, *end)
    if target is None:
        return dw.t()
    target.into().add_(dw.t())
    return target.added(b)


class _Column(torch.autograd.Function):
    """x [..., K], gathered or not, times several weights [K, N_i], each with a bias or none."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        recipe, n = call.recipe, len(call.keep)
        bs, biases = tensors[:n], tensors[n:]
        of_x, *of_bs = _largest(call, [x, *(b.t() for b in bs)])
        data, scale, _ = _quantized(call, x, recipe.operand_scaling, of_x, recipe.forward_dtype)
        rights, scales = _weights(call, bs, of_bs, False)
        keep = any(call.keep)
        gathered = call.keep_gathered and keep
        if call.cut:
            place = (list(call.bias_of), call.dim, call.sizes, call.group)
            end = (call.out_dtype, recipe.fast_accumulation, gathered, call.path)
            made = _ops.all_gather_scaled_matmul(
                data, scale, rights, scales, [bias.detach() for bias in biases], *place, *end
            )
            if gathered:
                scale, data = made.pop(), made.pop()
        else:
            by_weight = dict(zip(call.bias_of, biases, strict=True))
            made = [
                _ops.scaled_matmul(
                    data, rights[i], scale, scales[i], by_weight.get(i), call.out_dtype,
                    recipe.fast_accumulation, call.path,
                )
                for i in range(n)
            ]  # fmt: skip
        ctx.call, ctx.gathered, ctx.dtype = call, gathered, x.dtype
        ctx.bias_dtypes = [bias.dtype for bias in biases]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(of_bs if of_x is not None else []), *((data, scale) if keep else []), *bs)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, list(ctx.saved_tensors)
        recipe, n = call.recipe, len(call.keep)
        bs = saved[-n:]
        of_bs: list[Tensor | None] = saved[:n] if recipe.scaling == "tensorwise" else [None] * n
        need = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * n
        grad_x = None
        present = [i for i in range(n) if dys[i] is not None]
        given: list[Tensor] = [dy for dy in dys if dy is not None]
        if present and (need[1] or any(need[2 + i] for i in present)):
            wanted = [need[2 + i] and _wants_weight_grad(call, i) for i in present]
            of_dys = _largest(call, given)
            made = [_gradient(call, *each) for each in zip(given, of_dys, wanted, strict=True)]
            dqs = [dq for dq, _ in made]
            if need[1]:
                rights, scales = _weights(call, [bs[i] for i in present], [of_bs[i] for i in present], True)
                grad_x = _sum(ctx, call, [q.data for q in dqs], rights, [q.scale for q in dqs], scales)
            if any(wanted):
                x_q = Quantized(saved[-n - 2], saved[-n - 1], recipe.operand_scaling)
                if call.cut and not ctx.gathered:
                    x_q = _gathered(call, x_q, call.sizes)
                x_t = x_q.transposed(round_scales_to_power_of_2=recipe.power_of_2)
                for i, (_, dy_t) in zip(present, made, strict=True):
                    if dy_t is not None:
                        grads[i] = _weight_grad(call, i, dy_t, x_t, bs[i])
        of_biases: list[Tensor | None] = []
        for place, (i, dtype) in enumerate(zip(call.bias_of, ctx.bias_dtypes, strict=True)):
            dy = dys[i] if need[2 + n + place] else None
            of_biases.append(None if dy is None else _sum_rows(dy).to(dtype))
        return None, grad_x, *grads, *of_biases


def _sum(
    ctx: Any,
    call: Call,
    lefts: list[Tensor],
    rights: list[Tensor],
    of_lefts: list[Tensor],
    of_rights: list[Tensor],
) -> Tensor:
    """The gradient of x: a sum over weights and ranks."""
    fast = call.recipe.fast_accumulation
    pairs = (lefts, rights, of_lefts, of_rights)
    out: Tensor
    if call.group is None:  # one weight
        out = _ops.scaled_matmul(
            lefts[0], rights[0], of_lefts[0], of_rights[0], None, ctx.dtype, fast, call.path
        )
    elif call.cut:
        place = (call.dim, call.sizes, call.group, ctx.dtype, fast, call.path)
        out = _ops.scaled_matmul_reduce_scatter(*pairs, None, None, *place)
    else:
        out = _ops.scaled_matmul_all_reduce(*pairs, None, None, call.group, ctx.dtype, fast, call.path)
    return out


def _sum_rows(dy: Tensor) -> Tensor:
    """Gradient of a bias, in float32."""
    return dy.flatten(0, -2).sum(0, dtype=torch.float32)


def _gathered(call: Call, q: Quantized, sizes: list[int] | None) -> Quantized:
    """Of all ranks' rows."""
    place = (call.dim, sizes, call.group, False)
    data = _ops.all_gather(q.data.view(torch.uint8), *place).view(q.data.dtype)
    return Quantized(data, q.scale if q.scale.dim() == 1 else _ops.all_gather(q.scale, *place), q.scaling)


class _Row(torch.autograd.Function):
    """sum over ranks of x [..., K] times a weight [K, N], + bias + residual; scattered along its rows if ``cut``."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, x: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        recipe = call.recipe
        of_x, of_b = _largest(call, [x, b.t()])
        data, scale, _ = _quantized(call, x, recipe.operand_scaling, of_x, recipe.forward_dtype)
        rights, scales = _weights(call, [b], [of_b], False)
        terms = [term if term is None else term.detach() for term in (bias, residual)]
        operands = ([data], rights, [scale], scales, *terms)
        end = (call.group, call.out_dtype, recipe.fast_accumulation, call.path)
        if call.cut:
            out = _ops.scaled_matmul_reduce_scatter(*operands, call.dim, call.sizes, *end)
        else:
            out = _ops.scaled_matmul_all_reduce(*operands, *end)
        ctx.call, ctx.dtype, ctx.rows = call, x.dtype, x.shape[call.dim]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(
            *([of_b] if of_b is not None else []), *((data, scale) if call.keep[0] else []), b
        )
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, list(ctx.saved_tensors)
        recipe, b = call.recipe, saved[-1]
        of_b = saved[0] if recipe.scaling == "tensorwise" else None
        _, need_x, need_b, need_bias, need_residual = ctx.needs_input_grad
        grad_x = grad_b = grad_bias = None
        if need_x or need_b:
            wanted = need_b and _wants_weight_grad(call, 0)
            (of_dy,) = _largest(call, [dy])
            dq, dy_t = _gradient(call, dy, of_dy, wanted and not call.cut)
            sizes = _sizes(ctx, call) if call.cut else None
            end = (ctx.dtype, recipe.fast_accumulation)
            if need_x:
                (right,), (of_right,) = _weights(call, [b], [of_b], True)
                if call.cut:
                    place = (call.dim, sizes, call.group)
                    grad_x, whole, scale = _ops.all_gather_scaled_matmul(
                        dq.data, dq.scale, [right], [of_right], [], [], *place, *end, True, call.path
                    )
                    dq = Quantized(whole, scale, dq.scaling)
                else:
                    grad_x = _ops.scaled_matmul(dq.data, right, dq.scale, of_right, None, *end, call.path)
            elif call.cut and wanted:
                dq = _gathered(call, dq, sizes)
            if wanted:
                x_q = Quantized(saved[-3], saved[-2], recipe.operand_scaling)
                x_t = x_q.transposed(round_scales_to_power_of_2=recipe.power_of_2)
                if dy_t is None:
                    dy_t = dq.transposed(round_scales_to_power_of_2=recipe.power_of_2)
                grad_b = _weight_grad(call, 0, dy_t, x_t, b)
        if need_bias:
            total = _sum_rows(dy)
            if call.cut:  # in high precision, of the ranks' rows
                total = _ops.all_reduce(total, "sum", call.group)
            grad_bias = total.to(ctx.bias_dtype)
        return None, grad_x, grad_b, grad_bias, dy if need_residual else None


def _sizes(ctx: Any, call: Call) -> list[int] | None:
    """Rows of every rank; None: equal ones."""
    if call.sizes is not None:
        return call.sizes
    rows = _groups.shard_sizes(ctx.rows, _world(call.group))
    return None if all(size is rows[0] for size in rows) else rows


@torch.compiler.assume_constant_result
def _world(group_name: str) -> int:
    """A compiled graph knows no process groups."""
    return _groups.resolve(group_name).world


def column(call: Call, x: Tensor, bs: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """``_Column``, which may be differentiated once."""
    return list(_Column.apply(call, x, *bs, *biases))


def row(call: Call, x: Tensor, bs: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """``_Row`` of one weight, which may be differentiated once."""
    out: Tensor = _Row.apply(call, x, bs[0], bias, residual)
    return out
