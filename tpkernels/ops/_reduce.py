"""``tpkernels::matmul_reduce_scatter`` and ``tpkernels::matmul_all_reduce``: products of row-parallel layers.

Both form ``sum_i a_i @ b_i`` on every rank (a list, because the gradient of a product with several weights is
such a sum), then sum over the group. Partials are rounded to the output's dtype for the wire, added in rank
order in float32 (float64), then bias and residual are added once, and the result is rounded once.

=====================  ==========================  ====================================
forward                gradient of an operand      gradient of a weight
=====================  ==========================  ====================================
matmul_reduce_scatter  all-gathered dY times W^T   X^T times the dY just gathered
matmul_all_reduce      dY W^T                      X^T dY
=====================  ==========================  ====================================

The bias is replicated, so its gradient is complete (summed over all rows) and equal on every rank; so is the
residual of matmul_all_reduce. The residual of matmul_reduce_scatter is sharded as the output is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.comm import beneath, fused
from tpkernels.comm.faults import Reported
from tpkernels.comm.gathered import Use, plain
from tpkernels.ops import _agreement, _checks, _collectives, _gemm, _groups, _paths
from tpkernels.ops._gradients import any_compiled, at_once, scatter_grads
from tpkernels.ops._main_grad import NOWHERE, taken
from tpkernels.ops._matmul import product, sum_rows, weight_grad
from tpkernels.ops._products import grads_wanted
from tpkernels.ops._reduce_plan import Call, Plan, own_shape, plan_of, planned
from tpkernels.ops._registry import below, register
from tpkernels.ops._settled import note, settled

_FORWARD = len(Call._fields)  # arguments of the op; what follows says where gradients go


def _partial(plan: Plan, as_: Sequence[Tensor], bs: Sequence[Tensor]) -> tuple[Tensor, Plan]:
    """This rank's ``sum_i a_i @ b_i``: rounded once if it will travel, wide if it is all there is.

    And the plan, with what made the first product: tuning may have chosen that.
    """
    wide = _collectives.accumulate_dtype(plan.out_dtype)
    single = len(as_) == 1 and plan.group.world > 1
    first = _gemm.run(plan.choice, as_[0], bs[0], out_dtype=plan.out_dtype if single else wide)
    for a, b in zip(as_[1:], bs[1:], strict=True):
        _gemm.accumulate(plan.choice, a, b, first.out)
    return first.out, plan if first.choice is None else plan._replace(choice=first.choice)


def _facts(call: Call, plan: Plan) -> dict[str, object]:
    as_, bs, bias, residual = call[:4]
    return {
        "a's dtype": str(as_[0].dtype),
        "the product's shape": plan.shape,
        "the output's dtype": str(plan.out_dtype),
        "bias given": bias is not None,
        "residual given": residual is not None,
        "path 'fused'": plan.transport == _paths.FUSED,
        "path 'auto'": plan.chooses,
        "gradients wanted (any a, any b, bias)": grads_wanted(as_, bs, [] if bias is None else [bias]),
    }


def reduce_scatter_over(call: Call, shard: Tensor | None = None, use: Use | None = None) -> Tensor:
    """``tpkernels::matmul_reduce_scatter``. ``use`` is called with ``shard``, which has as many rows as the result,
    gathered: beneath the product where that can be."""
    a, b, bias, residual = call[:4]
    group = _groups.resolve(call.group_name)
    op = "matmul_reduce_scatter"
    plan = _agreement.validated(
        op,
        group,
        _sample(a),
        lambda: planned(op, group, call),
        lambda plan: {
            **_facts(call, plan),
            "scatter_dim": plan.dim,
            "shard_sizes (or those that None stands for)": plan.sizes,
        },
    )
    if changes := settled(plan, a[0].device):
        plan = plan._replace(**changes)
    used = False
    if plan.way is not None:
        with Reported("matmul_reduce_scatter", group):
            partial, plan = _partial(plan, a, b)
            out = fused.small_reduce_scatter(
                group, partial.to(plan.out_dtype), bias, residual, plan.dim, plan.sizes
            )
    elif plan.transport == _paths.FUSED:
        # Whole, before a gather begins that peers would wait for: what is refused, or finds no memory, is so here.
        prepared = fused.prepared_reduce_scatter(
            group, a, b, bias, residual, plan.dim, plan.sizes, out_dtype=plan.out_dtype
        )
        if shard is not None and use is not None and beneath.fits(group, shard, plan.dim, plan.sizes):
            used = True
            _paths.record("all_gather", _paths.FUSED, "none")
            with beneath.gathered(group, shard, plan.dim, plan.sizes, use):
                prepared.launch()
        else:
            prepared.launch()
        out = prepared.result()
    else:
        partial, plan = _partial(plan, a, b)
        out = _collectives.reduce_scatter(
            partial, plan.dim, plan.sizes, group, plan.out_dtype, bias=bias, residual=residual
        )
    note("matmul_reduce_scatter", plan)
    if shard is not None and use is not None and not used:
        gather = below("all_gather", shard.device)
        use(plain(gather(shard, plan.dim, plan.sizes, call.group_name, False)))
    return out


def _matmul_reduce_scatter(*args: Any) -> Tensor:
    return reduce_scatter_over(Call(*args[:_FORWARD]))


def _matmul_reduce_scatter_fake(*args: Any) -> Tensor:
    call = Call(*args[:_FORWARD])
    plan = plan_of(_groups.resolve(call.group_name), call)
    shape = own_shape(plan)
    _checks.check_residual(call.residual, shape, plan.out_dtype, call.a[0])
    return call.a[0].new_empty(shape, dtype=plan.out_dtype)


def _matmul_all_reduce(*args: Any) -> Tensor:
    call = Call.all_reduce(*args[: _FORWARD - 2])
    a, b, bias, residual = call[:4]
    group, op = _groups.resolve(call.group_name), "matmul_all_reduce"
    plan = _agreement.validated(
        op, group, _sample(a), lambda: planned(op, group, call), lambda plan: _facts(call, plan)
    )
    if changes := settled(plan, a[0].device):
        plan = plan._replace(**changes)
    if plan.way is not None:
        with Reported("matmul_all_reduce", group):
            way = plan.way
            partial, plan = _partial(plan, a, b)
            out = fused.small_all_reduce(group, partial.to(plan.out_dtype), bias, residual, way)
    elif plan.transport == _paths.FUSED:
        out = fused.matmul_all_reduce(group, a, b, bias, residual, out_dtype=plan.out_dtype)
    else:
        partial, plan = _partial(plan, a, b)
        out = _collectives.all_reduce_sum(partial, group, plan.out_dtype, bias=bias, residual=residual)
    note("matmul_all_reduce", plan)
    return out


def _matmul_all_reduce_fake(*args: Any) -> Tensor:
    call = Call.all_reduce(*args[: _FORWARD - 2])
    plan = plan_of(_groups.resolve(call.group_name), call)
    _checks.check_residual(call.residual, plan.shape, plan.out_dtype, call.a[0])
    return call.a[0].new_empty(plan.shape, dtype=plan.out_dtype)


def _sample(a: Sequence[Tensor]) -> Tensor:
    return a[0] if len(a) > 0 else torch.empty(0)


def _wanted(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor | None]:
    """The operands that gradients of weights need: none where a weight is frozen."""
    return [x if w.requires_grad else None for x, w in zip(a, b, strict=True)]


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, residual, dim, sizes, group, _, path, *into = inputs
    ctx.n, ctx.has_residual, ctx.targets = len(a), residual is not None, taken(b, *into)
    ctx.dim, ctx.sizes, ctx.group, ctx.path = dim % a[0].dim(), sizes, group, path
    ctx.dtype, ctx.rows = a[0].dtype, a[0].shape[ctx.dim]
    ctx.save_for_backward(*_wanted(a, b), *b)


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    n = ctx.n
    saved = ctx.saved_tensors  # read once: recomputation unpacks at every read
    as_, bs = saved[:n], saved[n:]
    sizes = ctx.sizes
    if sizes is None:
        rows = _groups.shard_sizes(ctx.rows, _groups.resolve(ctx.group).world)
        sizes = None if all(size is rows[0] for size in rows) else rows  # equal shards keep shapes simple
    dy = grad.to(ctx.dtype)
    need_as, need_bs, need_bias = ctx.needs_input_grad[:3]  # nested as the inputs are
    grad_residual = grad if ctx.has_residual else None
    serves = at_once(ctx.targets) and not any_compiled(ctx.targets)
    if any(need_as) and serves and all(a is not None for a in as_):
        made = scatter_grads(
            dy, as_, bs, (need_as, need_bs, need_bias), ctx.targets, ctx.dim, sizes, ctx.group, ctx.path
        )
        return (*made, grad_residual)
    grad_as: list[Tensor | None] = [None] * n
    whole = None
    if any(need_as):
        wanted = [i for i in range(n) if need_as[i]]
        wants_whole = any(need_bs) or need_bias
        end = (ctx.dim, sizes, ctx.group, None, False, wants_whole, False, ctx.path)
        products = torch.ops.tpkernels.all_gather_matmul(
            dy, [bs[i].t() for i in wanted], [], [], "none", *end, *NOWHERE
        )
        whole = products.pop() if wants_whole else None
        for i, value in zip(wanted, products, strict=True):
            grad_as[i] = value
    elif any(need_bs) or need_bias:
        whole = torch.ops.tpkernels.all_gather(dy, ctx.dim, sizes, ctx.group, False)
    grad_bs = [
        weight_grad(a, whole, b, ctx.path, target=target) if need and whole is not None else None
        for need, a, b, target in zip(need_bs, as_, bs, ctx.targets, strict=True)
    ]
    grad_bias = sum_rows(whole) if need_bias and whole is not None else None
    return grad_as, grad_bs, grad_bias, grad_residual


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, residual, _, _, path, *into = inputs
    ctx.n, ctx.has_residual, ctx.path, ctx.targets = len(a), residual is not None, path, taken(b, *into)
    ctx.dtype = a[0].dtype
    ctx.save_for_backward(*_wanted(a, b), *b)


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    n = ctx.n
    saved = ctx.saved_tensors  # read once: recomputation unpacks at every read
    as_, bs = saved[:n], saved[n:]
    dy = grad.to(ctx.dtype)
    need_as, need_bs, need_bias = ctx.needs_input_grad[:3]
    grad_as = [
        product(dy, b.t(), path=ctx.path) if need else None for need, b in zip(need_as, bs, strict=True)
    ]
    grad_bs = [
        weight_grad(a, dy, b, ctx.path, target=target) if need else None
        for need, a, b, target in zip(need_bs, as_, bs, ctx.targets, strict=True)
    ]
    grad_bias = sum_rows(dy) if need_bias else None
    grad_residual = grad if ctx.has_residual else None
    return grad_as, grad_bs, grad_bias, grad_residual


register(
    "matmul_reduce_scatter",
    _matmul_reduce_scatter,
    _matmul_reduce_scatter_fake,
    setup_context=_scatter_setup,
    backward=_scatter_backward,
)
register(
    "matmul_all_reduce",
    _matmul_all_reduce,
    _matmul_all_reduce_fake,
    setup_context=_all_reduce_setup,
    backward=_all_reduce_backward,
)
