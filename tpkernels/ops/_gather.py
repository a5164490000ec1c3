"""``tpkernels::all_gather_matmul``: several products of an operand that is gathered from row shards.

Outputs, in order: one product per weight; then, if asked for, one pre-activation per weight; then, if asked
for, the gathered operand.

Gradient of the operand: ``sum_i dY_i W_i^T``, reduce-scattered. Gradient of a weight: ``X^T dY_i``, with X gathered
again or kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.comm import auto, fused, runtime
from tpkernels.comm.auto import Asked
from tpkernels.comm.faults import Reported
from tpkernels.comm.gathered import Use, plain
from tpkernels.ops import _agreement, _checks, _collectives, _groups, _paths
from tpkernels.ops._gradients import all_gather_grads, at_once, sizes_of
from tpkernels.ops._groups import Group
from tpkernels.ops._main_grad import NOWHERE, taken
from tpkernels.ops._matmul import weight_grad
from tpkernels.ops._products import (
    Plan,
    bias_grads,
    biases_by_weight,
    describe_products,
    grads_wanted,
    preact_grads,
    run_products,
    validate_products,
)
from tpkernels.ops._registry import register
from tpkernels.ops._remembered import Remembered, signature, signatures
from tpkernels.ops._settled import note, settled


class Call(NamedTuple):
    """Arguments of the op that its forward pass looks at."""

    a_shard: Tensor
    bs: list[Tensor]
    biases: list[Tensor]
    bias_of: list[int]
    activation: str
    gather_dim: int
    shard_sizes: list[int] | None
    group_name: str
    out_dtype: torch.dtype | None
    return_preact: bool
    return_gathered: bool
    save_gathered: bool
    path: str


_FORWARD = len(Call._fields)  # what follows says where gradients go


def _plan_gather(group: Group, call: Call) -> Plan:
    a_shard, path = call.a_shard, call.path
    by_weight = validate_products("a_shard", a_shard, call.bs, call.biases, call.bias_of, call.activation)
    dim = _checks.check_dim("gather_dim", call.gather_dim, "a_shard", a_shard)
    rows = _groups.gather_sizes(a_shard.shape[dim], call.shard_sizes, group, "a_shard")
    dtype = _checks.check_out_dtype(call.out_dtype, a_shard.dtype)
    transport = _groups.transport_of(group, a_shard.device, "a_shard")
    request = _paths.parse(path, a_shard.device.type, distributed=True)
    total = math.prod(_gathered_shape(a_shard, dim, rows)[:-1])
    transport = _paths.choose_transport(
        request, transport, group.name, group.world, a_shard.device.type, a_shard.dtype, dtype, total
    )
    choice = _paths.choose_gemm(request, a_shard.device.type, a_shard.dtype)
    small = _paths.choose_beside(request, a_shard.device.type, a_shard.dtype)
    return Plan(group, by_weight, dim, rows, dtype, transport, choice, request.open, small)


_remembered: Remembered[tuple[Any, ...]] = Remembered()


def _planned(group: Group, call: Call) -> Plan:
    """:func:`_plan_gather`, with what path "auto" needs, remembered."""
    a_shard, bs, biases, bias_of = call[:4]

    def decide() -> tuple[Any, ...]:
        plan = _plan_gather(group, call)
        others = math.prod(n for d, n in enumerate(a_shard.shape[:-1]) if d != plan.dim)
        ns = tuple(b.shape[1] for b in bs)
        asked = Asked("all_gather_matmul", (a_shard.shape[-1],), ns, a_shard.dtype, plan.out_dtype)
        rows = [size * others for size in plan.sizes]
        chooses = plan.open and auto.arises(asked, rows, group, a_shard.device, plan.transport)
        detail = describe_products(a_shard, bs, sum(rows))
        return plan._replace(asked=asked, rows=rows, chooses=chooses, detail=detail).rest()

    transport = _groups.transport_of(group, a_shard.device, "a_shard")
    tensors = signature(a_shard), signatures(bs), signatures(biases), tuple(bias_of)
    sizes = None if call.shard_sizes is None else tuple(call.shard_sizes)
    options = call.activation, call.gather_dim, sizes, call.out_dtype, call.path
    place = group.rank, group.world, transport, _paths.environment(call.path), runtime.active
    rest = _remembered.get((tensors, options, place), decide)
    return Plan(group, biases_by_weight(len(bs), biases, bias_of), *rest)


def _gathered_shape(a_shard: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    shape = list(a_shard.shape)
    shape[dim] = sum(sizes)
    return shape


def gather_over(call: Call, use: Use | None = None) -> list[Tensor]:
    """``tpkernels::all_gather_matmul``; ``use`` is called with what was gathered, where it came to."""
    a_shard, bs, activation, return_preact = call.a_shard, call.bs, call.activation, call.return_preact
    group = _groups.resolve(call.group_name)

    def facts(plan: Plan) -> _agreement.Facts:
        other = [n for d, n in enumerate(a_shard.shape) if d != plan.dim]
        return {
            "a_shard's dtype": str(a_shard.dtype),
            "a_shard's shape without gather_dim": other,
            "gather_dim": plan.dim,
            "shard_sizes (or the equal sizes that None stands for)": plan.sizes,
            "gradients wanted (a_shard, any b)": grads_wanted([a_shard], bs),
            "path 'fused'": plan.transport == _paths.FUSED,
            "path 'auto', and out_dtype": [plan.chooses, plan.chooses and str(plan.out_dtype)],
        }

    plan = _agreement.validated("all_gather_matmul", group, a_shard, lambda: _planned(group, call), facts)
    if changes := settled(plan, a_shard.device):
        plan = plan._replace(**changes)
    want_gathered = call.return_gathered or call.save_gathered
    if plan.way is not None:
        gathered = fused.small_gather(group, a_shard, plan.dim, plan.sizes)
    elif plan.transport == _paths.FUSED:
        made = fused.all_gather_matmul(
            group,
            a_shard,
            bs,
            plan.biases,
            activation,
            plan.dim,
            plan.sizes,
            out_dtype=plan.out_dtype,
            want_preact=return_preact,
            want_gathered=want_gathered,
            use=use,
        )
        if made is not None:
            note("all_gather_matmul", plan)
            return made
        gathered = a_shard.new_empty(_gathered_shape(a_shard, plan.dim, plan.sizes))  # no element
        plan = plan._replace(transport="none")
    else:
        gathered = _collectives.all_gather(a_shard, plan.dim, plan.sizes, group)
    with Reported("all_gather_matmul", group) if plan.way is not None else nullcontext():
        out = run_products("all_gather_matmul", plan, gathered, bs, activation, return_preact)
    if use is not None:
        use(plain(gathered))
    return [*out, gathered] if want_gathered else out


def _all_gather_matmul(*args: Any) -> list[Tensor]:
    return gather_over(Call(*args[:_FORWARD]))


def _all_gather_matmul_fake(*args: Any) -> list[Tensor]:
    call = Call(*args[:_FORWARD])
    plan = _plan_gather(_groups.resolve(call.group_name), call)
    shape, empty = _gathered_shape(call.a_shard, plan.dim, plan.sizes), call.a_shard.new_empty
    copies = 2 if call.return_preact else 1
    out = [empty([*shape[:-1], b.shape[1]], dtype=plan.out_dtype) for _ in range(copies) for b in call.bs]
    return [*out, empty(shape)] if call.return_gathered or call.save_gathered else out


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    call = Call(*inputs[:_FORWARD])
    a_shard, bs, biases, bias_of, activation = call[:5]
    with_preact, with_gathered, save, path = call[-4:]
    n = len(bs)
    ctx.set_materialize_grads(False)
    ctx.n, ctx.bias_of, ctx.activation = n, list(bias_of), activation
    ctx.dim, ctx.sizes = call.gather_dim % a_shard.dim(), call.shard_sizes
    ctx.group, ctx.path = call.group_name, path
    ctx.with_gathered, ctx.targets = with_gathered or save, taken(bs, *inputs[_FORWARD:])
    ctx.dtype, ctx.rows = a_shard.dtype, a_shard.shape[ctx.dim]
    recompute = activation != "none" and not with_preact
    wanted = not save and (recompute or any(b.requires_grad for b in bs))  # a frozen weight needs none of it
    ctx.save_for_backward(
        a_shard if wanted else None,
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

    dys = preact_grads(ctx, grads, bs, preacts, biases, operand, ctx.dtype)
    grad_gathered = grads[-1] if ctx.with_gathered else None
    grad_a = None
    if (
        need_a
        and a_shard is not None
        and not again
        and at_once(ctx.targets)
        and any(dy is not None for dy in dys)
    ):
        grad_a, grad_bs = all_gather_grads(
            dys, a_shard, bs, need_bs, ctx.targets, ctx.dim, ctx.sizes, ctx.group, ctx.path
        )
        if grad_gathered is not None:
            grad_a = grad_a + _scattered(ctx, grad_gathered)
    else:
        if need_a:
            grad_a = _reduce_scatter_grad(ctx, bs, dys, grad_gathered)
        grad_bs = [
            weight_grad(operand(), dy, b, ctx.path, target=target) if need and dy is not None else None
            for need, dy, b, target in zip(need_bs, dys, bs, ctx.targets, strict=True)
        ]
    return grad_a, grad_bs, bias_grads(ctx, dys)


def _reduce_scatter_grad(
    ctx: Any,
    bs: Sequence[Tensor],
    dys: Sequence[Tensor | None],
    grad_gathered: Tensor | None,
) -> Tensor | None:
    """Of the operand."""
    present = [(dy, b.t()) for dy, b in zip(dys, bs, strict=True) if dy is not None]
    grad = None
    if present:
        left, right = [dy for dy, _ in present], [w for _, w in present]
        sizes = sizes_of(ctx.rows, ctx.sizes, ctx.group)
        end = (ctx.dim, sizes, ctx.group, ctx.dtype, ctx.path)
        grad = torch.ops.tpkernels.matmul_reduce_scatter(left, right, None, None, *end, *NOWHERE)
    if grad_gathered is not None:
        scattered = _scattered(ctx, grad_gathered)
        grad = scattered if grad is None else grad + scattered
    return grad


def _scattered(ctx: Any, grad_gathered: Tensor) -> Tensor:
    """What the gradient of the gathered operand gives to that of the shard."""
    sizes = sizes_of(ctx.rows, ctx.sizes, ctx.group)
    out: Tensor = torch.ops.tpkernels.reduce_scatter(grad_gathered, ctx.dim, sizes, ctx.group)
    return out


register(
    "all_gather_matmul",
    _all_gather_matmul,
    _all_gather_matmul_fake,
    setup_context=_all_gather_setup,
    backward=_all_gather_backward,
)
