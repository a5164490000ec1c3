"""``tpkernels::all_gather_matmul`` and ``tpkernels::matmul_replicated``: products of column-parallel layers.

Both multiply one operand by several weights whose columns are sharded over the group. The operand is
gathered from row shards in the first, and the same on every rank in the second.

Outputs, in order: one product per weight; then, if asked for, one pre-activation per weight; then, if asked
for, the gathered operand.

==================  ===============================  ========================================
forward             gradient of the operand          gradient of a weight
==================  ===============================  ========================================
all_gather_matmul   sum_i dY_i W_i^T reduce-scatter  X^T dY_i, X gathered again or kept
matmul_replicated   sum_i dY_i W_i^T all-reduced     X^T dY_i
==================  ===============================  ========================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.ops import _agreement, _checks, _collectives, _gemm, _groups, _paths
from tpkernels.ops._groups import Group
from tpkernels.ops._matmul import preact_grad, product, reduce_to, sum_rows, weight_grad
from tpkernels.ops._registry import register


class _Plan(NamedTuple):
    group: Group
    dim: int
    sizes: list[int]
    out_dtype: torch.dtype
    transport: str
    choice: _paths.Choice
    biases: list[Tensor | None]


def _validate_products(
    name: str,
    a: Tensor,
    bs: Sequence[Tensor],
    biases: Sequence[Tensor],
    bias_of: Sequence[int],
    activation: str,
) -> list[Tensor | None]:
    """Check operands; returns one bias or None per weight."""
    if len(bs) == 0:
        raise ArgumentError("b: expected at least one weight, got an empty list.")
    by_weight: list[Tensor | None] = [None] * len(bs)
    for i, bias in zip(bias_of, biases, strict=True):
        by_weight[i] = bias
    for i, b in enumerate(bs):
        label = "b" if len(bs) == 1 else f"b[{i}]"
        _checks.check_product(name, a, label, b)
        _checks.check_weight(label, b)
        _checks.check_bias(f"biases[{i}]", by_weight[i], b.shape[1], name, a)
    _checks.check_activation(activation)
    return by_weight


def _plan_gather(
    group: Group,
    a_shard: Tensor,
    bs: Sequence[Tensor],
    biases: Sequence[Tensor],
    bias_of: Sequence[int],
    activation: str,
    gather_dim: int,
    sizes: Sequence[int] | None,
    out_dtype: torch.dtype | None,
    path: str,
) -> _Plan:
    by_weight = _validate_products("a_shard", a_shard, bs, biases, bias_of, activation)
    dim = _checks.check_dim("gather_dim", gather_dim, "a_shard", a_shard)
    rows = _groups.gather_sizes(a_shard.shape[dim], sizes, group, "a_shard")
    dtype = _checks.check_out_dtype(out_dtype, a_shard.dtype)
    transport = _groups.transport_of(group, a_shard.device, "a_shard")
    request = _paths.parse(path, a_shard.device.type, distributed=True)
    _paths.check_transport(request, transport, group.name)
    choice = _paths.choose_gemm(request, a_shard.device.type, a_shard.dtype)
    return _Plan(group, dim, rows, dtype, transport, choice, by_weight)


def _gathered_shape(a_shard: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    shape = list(a_shard.shape)
    shape[dim] = sum(sizes)
    return shape


def _run_products(
    op: str, plan: _Plan, a: Tensor, bs: Sequence[Tensor], activation: str, want_preact: bool
) -> list[Tensor]:
    products = [
        _gemm.run(
            plan.choice,
            a,
            b,
            bias=bias,
            activation=activation,
            out_dtype=plan.out_dtype,
            want_preact=want_preact,
        )
        for b, bias in zip(bs, plan.biases, strict=True)
    ]
    detail = ", ".join(_gemm.describe(a, b) for b in bs)
    _paths.record(op, plan.transport, plan.choice.gemm, detail, plan.choice.why)
    return [p.out for p in products] + [p.preact for p in products if p.preact is not None]


def _all_gather_matmul(
    a_shard: Tensor,
    bs: list[Tensor],
    biases: list[Tensor],
    bias_of: list[int],
    activation: str,
    gather_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    return_gathered: bool,
    save_gathered: bool,
    path: str,
) -> list[Tensor]:
    group = _groups.resolve(group_name)

    def validate() -> _Plan:
        return _plan_gather(
            group, a_shard, bs, biases, bias_of, activation, gather_dim, shard_sizes, out_dtype, path
        )

    def facts(plan: _Plan) -> _agreement.Facts:
        other = [n for d, n in enumerate(a_shard.shape) if d != plan.dim]
        return {
            "a_shard's dtype": str(a_shard.dtype),
            "a_shard's shape without gather_dim": other,
            "gather_dim": plan.dim,
            "shard_sizes (or the equal sizes that None stands for)": plan.sizes,
        }

    plan = _agreement.validated("all_gather_matmul", group, a_shard, validate, facts)
    gathered = _collectives.all_gather(a_shard, plan.dim, plan.sizes, group)
    out = _run_products("all_gather_matmul", plan, gathered, bs, activation, return_preact)
    return [*out, gathered] if return_gathered or save_gathered else out


def _all_gather_matmul_fake(
    a_shard: Tensor,
    bs: list[Tensor],
    biases: list[Tensor],
    bias_of: list[int],
    activation: str,
    gather_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    return_gathered: bool,
    save_gathered: bool,
    path: str,
) -> list[Tensor]:
    plan = _plan_gather(
        _groups.resolve(group_name),
        a_shard,
        bs,
        biases,
        bias_of,
        activation,
        gather_dim,
        shard_sizes,
        out_dtype,
        path,
    )
    shape = _gathered_shape(a_shard, plan.dim, plan.sizes)
    copies = 2 if return_preact else 1
    out = [
        a_shard.new_empty([*shape[:-1], b.shape[1]], dtype=plan.out_dtype) for _ in range(copies) for b in bs
    ]
    return [*out, a_shard.new_empty(shape)] if return_gathered or save_gathered else out


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    (
        a_shard,
        bs,
        biases,
        bias_of,
        activation,
        dim,
        sizes,
        group,
        _,
        with_preact,
        with_gathered,
        save,
        path,
    ) = inputs
    n = len(bs)
    ctx.set_materialize_grads(False)
    ctx.n, ctx.bias_of, ctx.activation = n, list(bias_of), activation
    ctx.dim, ctx.sizes, ctx.group, ctx.path = dim % a_shard.dim(), sizes, group, path
    ctx.with_gathered = with_gathered or save
    recompute = activation != "none" and not with_preact
    ctx.save_for_backward(
        a_shard,
        *bs,
        *(output[n : 2 * n] if with_preact else [None] * n),
        output[-1] if save else None,
        *(biases if recompute else [None] * len(biases)),
    )


def _all_gather_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    n = ctx.n
    a_shard, *rest = ctx.saved_tensors
    bs, preacts, gathered, biases = rest[:n], rest[n : 2 * n], rest[2 * n], rest[2 * n + 1 :]
    need_a, need_bs = ctx.needs_input_grad[:2]  # nested as the inputs are
    again: list[Tensor] = [] if gathered is None else [gathered]

    def operand() -> Tensor:
        if not again:
            again.append(torch.ops.tpkernels.all_gather(a_shard, ctx.dim, ctx.sizes, ctx.group, False))
        return again[0]

    dys = _preact_grads(ctx, grads, bs, preacts, biases, operand, a_shard.dtype)
    grad_gathered = grads[-1] if ctx.with_gathered else None
    grad_a = None
    if need_a:
        grad_a = _reduce_scatter_grad(ctx, a_shard, bs, dys, grad_gathered)
    grad_bs = [
        weight_grad(operand(), dy, b.shape, ctx.path) if need and dy is not None else None
        for need, dy, b in zip(need_bs, dys, bs, strict=True)
    ]
    return (grad_a, grad_bs, _bias_grads(ctx, dys), _no_grad(ctx.bias_of), *(None,) * 9)


def _reduce_scatter_grad(
    ctx: Any,
    a_shard: Tensor,
    bs: Sequence[Tensor],
    dys: Sequence[Tensor | None],
    grad_gathered: Tensor | None,
) -> Tensor | None:
    sizes = ctx.sizes
    if sizes is None:  # equal shards; None would mean the same here, but sums need not divide by the world
        sizes = [a_shard.shape[ctx.dim]] * _groups.resolve(ctx.group).world
    present = [(dy, b.t()) for dy, b in zip(dys, bs, strict=True) if dy is not None]
    grad = None
    if present:
        grad = torch.ops.tpkernels.matmul_reduce_scatter(
            [dy for dy, _ in present],
            [w for _, w in present],
            None,
            None,
            ctx.dim,
            sizes,
            ctx.group,
            a_shard.dtype,
            ctx.path,
        )
    if grad_gathered is not None:
        scattered = torch.ops.tpkernels.reduce_scatter(grad_gathered, ctx.dim, sizes, ctx.group)
        grad = scattered if grad is None else grad + scattered
    return grad


def _preact_grads(
    ctx: Any,
    grads: Sequence[Tensor | None],
    bs: Sequence[Tensor],
    preacts: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    operand: Callable[[], Tensor],
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Gradient at each product before its activation, in the operands' dtype."""
    by_weight: list[Tensor | None] = [None] * ctx.n
    for i, bias in zip(ctx.bias_of, biases, strict=True):
        by_weight[i] = bias
    dys: list[Tensor | None] = []
    for i in range(ctx.n):
        saved = preacts[i]

        def preact(i: int = i, saved: Tensor | None = saved) -> Tensor:
            return saved if saved is not None else product(operand(), bs[i], by_weight[i], ctx.path)

        extra = grads[ctx.n + i] if saved is not None else None
        grad = preact_grad(grads[i], extra, ctx.activation, preact)
        dys.append(None if grad is None else grad.to(dtype))
    return dys


def _bias_grads(ctx: Any, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
    needed = ctx.needs_input_grad[2]
    picked = [dys[i] for i in ctx.bias_of]
    return [
        sum_rows(dy) if need and dy is not None else None for need, dy in zip(needed, picked, strict=True)
    ]


def _no_grad(integers: list[int]) -> list[None] | None:
    """Gradient of a list of integers; torch takes an empty one for a list of tensors and wants a list back."""
    return None if integers else []


register(
    "all_gather_matmul",
    _all_gather_matmul,
    _all_gather_matmul_fake,
    setup_context=_all_gather_setup,
    backward=_all_gather_backward,
)


def _plan_replicated(
    group: Group,
    a: Tensor,
    bs: Sequence[Tensor],
    biases: Sequence[Tensor],
    bias_of: Sequence[int],
    activation: str,
    out_dtype: torch.dtype | None,
    path: str,
) -> _Plan:
    by_weight = _validate_products("a", a, bs, biases, bias_of, activation)
    dtype = _checks.check_out_dtype(out_dtype, a.dtype)
    transport = _groups.transport_of(group, a.device, "a")
    request = _paths.parse(path, a.device.type, distributed=True)
    _paths.check_transport(request, transport, group.name)
    choice = _paths.choose_gemm(request, a.device.type, a.dtype)
    return _Plan(group, 0, [], dtype, "none", choice, by_weight)


def _matmul_replicated(
    a: Tensor,
    bs: list[Tensor],
    biases: list[Tensor],
    bias_of: list[int],
    activation: str,
    group_name: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    path: str,
) -> list[Tensor]:
    group = _groups.resolve(group_name)
    plan = _agreement.validated(
        "matmul_replicated",
        group,
        a,
        lambda: _plan_replicated(group, a, bs, biases, bias_of, activation, out_dtype, path),
        lambda plan: {"a's dtype": str(a.dtype), "a's shape": list(a.shape)},
    )
    return _run_products("matmul_replicated", plan, a, bs, activation, return_preact)


def _matmul_replicated_fake(
    a: Tensor,
    bs: list[Tensor],
    biases: list[Tensor],
    bias_of: list[int],
    activation: str,
    group_name: str,
    out_dtype: torch.dtype | None,
    return_preact: bool,
    path: str,
) -> list[Tensor]:
    plan = _plan_replicated(_groups.resolve(group_name), a, bs, biases, bias_of, activation, out_dtype, path)
    copies = 2 if return_preact else 1
    return [a.new_empty([*a.shape[:-1], b.shape[1]], dtype=plan.out_dtype) for _ in range(copies) for b in bs]


def _replicated_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, bs, biases, bias_of, activation, group, _, with_preact, path = inputs
    n = len(bs)
    ctx.set_materialize_grads(False)
    ctx.n, ctx.bias_of, ctx.activation, ctx.group, ctx.path = n, list(bias_of), activation, group, path
    recompute = activation != "none" and not with_preact
    ctx.save_for_backward(
        a,
        *bs,
        *(output[n : 2 * n] if with_preact else [None] * n),
        *(biases if recompute else [None] * len(biases)),
    )


def _replicated_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    n = ctx.n
    a, *rest = ctx.saved_tensors
    bs, preacts, biases = rest[:n], rest[n : 2 * n], rest[2 * n :]
    need_a, need_bs = ctx.needs_input_grad[:2]  # nested as the inputs are
    dys = _preact_grads(ctx, grads, bs, preacts, biases, lambda: a, a.dtype)
    present = [(dy, b.t()) for dy, b in zip(dys, bs, strict=True) if dy is not None]
    grad_a = None
    if need_a and present:
        grad_a = torch.ops.tpkernels.matmul_all_reduce(
            [dy for dy, _ in present], [w for _, w in present], None, None, ctx.group, a.dtype, ctx.path
        )
        grad_a = reduce_to(grad_a, a.shape)
    grad_bs = [
        weight_grad(a, dy, b.shape, ctx.path) if need and dy is not None else None
        for need, dy, b in zip(need_bs, dys, bs, strict=True)
    ]
    return (grad_a, grad_bs, _bias_grads(ctx, dys), _no_grad(ctx.bias_of), *(None,) * 5)


register(
    "matmul_replicated",
    _matmul_replicated,
    _matmul_replicated_fake,
    setup_context=_replicated_setup,
    backward=_replicated_backward,
)
