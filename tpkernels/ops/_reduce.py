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

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.comm import auto, beneath, fused
from tpkernels.comm.auto import Asked
from tpkernels.comm.faults import Reported
from tpkernels.comm.gathered import Use, plain
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.ops import _agreement, _checks, _collectives, _gemm, _groups, _paths
from tpkernels.ops._gradients import at_once, scatter_grads
from tpkernels.ops._groups import Group
from tpkernels.ops._main_grad import taken
from tpkernels.ops._matmul import product, sum_rows, weight_grad
from tpkernels.ops._products import grads_wanted
from tpkernels.ops._registry import register


class _Plan(NamedTuple):
    group: Group
    dim: int
    sizes: list[int]
    shape: list[int]  # of the whole product on this rank
    out_dtype: torch.dtype
    transport: str
    choice: _paths.Choice
    open: bool  # path is "auto"
    small: _paths.Choice  # the product in front of a small sum, if that is fused
    way: str | None = None  # of comm.small, by which that goes


def _plan(
    group: Group,
    as_: Sequence[Tensor],
    bs: Sequence[Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    path: str,
    scatter: tuple[int, Sequence[int] | None] | None,
) -> _Plan:
    """Check everything; ``scatter`` is (dim, sizes) for a reduce-scatter, None for an all-reduce."""
    if len(as_) == 0 or len(as_) != len(bs):
        raise ArgumentError(
            f"a, b: expected as many operands as weights, at least one, got {len(as_)} and {len(bs)}."
        )
    label = (lambda name, i: name) if len(as_) == 1 else (lambda name, i: f"{name}[{i}]")
    for i, (a, b) in enumerate(zip(as_, bs, strict=True)):
        _checks.check_product(label("a", i), a, label("b", i), b)
        _checks.check_weight(label("b", i), b)
        if i > 0:
            _checks.check_like(label("a", i), a, "a[0]", as_[0])
            if a.shape[:-1] != as_[0].shape[:-1] or b.shape[1] != bs[0].shape[1]:
                raise ShapeError(
                    f"a[{i}], b[{i}]: their product {[*a.shape[:-1], b.shape[1]]} must have the shape of the first, "
                    f"{[*as_[0].shape[:-1], bs[0].shape[1]]}, as the products are summed."
                )
    a, b = as_[0], bs[0]
    shape = [*a.shape[:-1], b.shape[1]]
    _checks.check_bias("bias", bias, b.shape[1], "a", a)
    dtype = _checks.check_out_dtype(out_dtype, a.dtype)
    dim, sizes = 0, []
    if scatter is not None:
        dim = _checks.check_dim("scatter_dim", scatter[0], "a", a)
        sizes = _groups.scatter_sizes(shape[dim], scatter[1], group, "a")
    transport = _groups.transport_of(group, a.device, "a")
    request = _paths.parse(path, a.device.type, distributed=True)
    transport = _paths.choose_transport(
        request,
        transport,
        group.name,
        group.world,
        a.device.type,
        a.dtype,
        dtype,
        math.prod(shape[:-1]),
    )
    choice = _paths.choose_gemm(request, a.device.type, a.dtype)
    small = _paths.choose_beside(request, a.device.type, a.dtype)
    return _Plan(group, dim, sizes, shape, dtype, transport, choice, request.open, small)


def _asked(op: str, as_: Sequence[Tensor], bs: Sequence[Tensor], plan: _Plan) -> tuple[Asked, list[int]]:
    """The call as path "auto" sees it, and rows of every shard."""
    asked = Asked(op, tuple(a.shape[-1] for a in as_), (bs[0].shape[1],), as_[0].dtype, plan.out_dtype)
    if op == "matmul_all_reduce":
        return asked, _groups.shard_sizes(math.prod(plan.shape[:-1]), plan.group.world)
    others = math.prod(n for d, n in enumerate(plan.shape[:-1]) if d != plan.dim)
    return asked, [size * others for size in plan.sizes]


def _settled(op: str, plan: _Plan, as_: Sequence[Tensor], bs: Sequence[Tensor]) -> _Plan:
    """The plan that path "auto" comes to, and that of a small sum."""
    asked, rows = _asked(op, as_, bs, plan)
    if plan.open:
        transport, choice = _paths.choose_fused(
            asked, rows, plan.group, as_[0].device, plan.transport, plan.choice
        )
        plan = plan._replace(transport=transport, choice=choice)
    way = asked.way(rows) if plan.transport == _paths.FUSED else None
    if way is None:
        return plan
    return plan._replace(choice=_paths.beside(plan.choice, plan.small, plan.open), way=way)


def _own_shape(plan: _Plan) -> list[int]:
    shape = list(plan.shape)
    shape[plan.dim] = plan.sizes[plan.group.rank]
    return shape


def _partial(plan: _Plan, as_: Sequence[Tensor], bs: Sequence[Tensor]) -> tuple[Tensor, _Plan]:
    """This rank's ``sum_i a_i @ b_i``: rounded once if it will travel, wide if it is all there is.

    And the plan, with what made the first product: tuning may have chosen that.
    """
    wide = _collectives.accumulate_dtype(plan.out_dtype)
    single = len(as_) == 1 and plan.group.world > 1
    first = _gemm.run(plan.choice, as_[0], bs[0], out_dtype=plan.out_dtype if single else wide)
    for a, b in zip(as_[1:], bs[1:], strict=True):
        _gemm.accumulate(plan.choice, a, b, first.out)
    return first.out, plan if first.choice is None else plan._replace(choice=first.choice)


def _note(op: str, plan: _Plan, as_: Sequence[Tensor], bs: Sequence[Tensor]) -> None:
    detail = ", ".join(_gemm.describe(a, b) for a, b in zip(as_, bs, strict=True))
    if plan.way is not None:
        detail += f"; {plan.way}"
    transport = plan.transport if plan.group.world > 1 else "none"
    _paths.record(op, transport, plan.choice.gemm, detail, plan.choice.why)


def _facts(
    op: str,
    as_: Sequence[Tensor],
    bs: Sequence[Tensor],
    plan: _Plan,
    bias: Tensor | None,
    residual: Tensor | None,
) -> dict[str, object]:
    return {
        "a's dtype": str(as_[0].dtype),
        "the product's shape": plan.shape,
        "the output's dtype": str(plan.out_dtype),
        "bias given": bias is not None,
        "residual given": residual is not None,
        "path 'fused'": plan.transport == _paths.FUSED,
        "path 'auto'": plan.open
        and auto.arises(*_asked(op, as_, bs, plan), plan.group, as_[0].device, plan.transport),
        "gradients wanted (any a, any b, bias)": grads_wanted(as_, bs, [] if bias is None else [bias]),
    }


def reduce_scatter_over(
    a: list[Tensor],
    b: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    out_dtype: torch.dtype | None,
    path: str,
    shard: Tensor | None = None,
    use: Use | None = None,
) -> Tensor:
    """``tpkernels::matmul_reduce_scatter``. ``use`` is called with ``shard``, which has as many rows as the result,
    gathered: beneath the product where that can be."""
    group = _groups.resolve(group_name)

    def validate() -> _Plan:
        plan = _plan(group, a, b, bias, out_dtype, path, (scatter_dim, shard_sizes))
        _checks.check_residual(residual, _own_shape(plan), plan.out_dtype, a[0])
        return plan

    plan = _agreement.validated(
        "matmul_reduce_scatter",
        group,
        _sample(a),
        validate,
        lambda plan: {
            **_facts("matmul_reduce_scatter", a, b, plan, bias, residual),
            "scatter_dim": plan.dim,
            "shard_sizes (or those that None stands for)": plan.sizes,
        },
    )
    plan = _settled("matmul_reduce_scatter", plan, a, b)
    used = False
    if plan.way is not None:
        with Reported("matmul_reduce_scatter", group):
            partial, plan = _partial(plan, a, b)
            out = fused.small_reduce_scatter(
                group, partial.to(plan.out_dtype), bias, residual, plan.dim, plan.sizes
            )
    elif plan.transport == _paths.FUSED:
        # Whole, before a gather begins that peers would wait for: what is refused, or finds no memory, is so here.
        call = fused.prepared_reduce_scatter(
            group, a, b, bias, residual, plan.dim, plan.sizes, out_dtype=plan.out_dtype
        )
        if shard is not None and use is not None and beneath.fits(group, shard, plan.dim, plan.sizes):
            used = True
            _paths.record("all_gather", _paths.FUSED, "none")
            with beneath.gathered(group, shard, plan.dim, plan.sizes, use):
                call.launch()
        else:
            call.launch()
        out = call.result()
    else:
        partial, plan = _partial(plan, a, b)
        out = _collectives.reduce_scatter(
            partial, plan.dim, plan.sizes, group, plan.out_dtype, bias=bias, residual=residual
        )
    _note("matmul_reduce_scatter", plan, a, b)
    if shard is not None and use is not None and not used:
        use(plain(torch.ops.tpkernels.all_gather(shard, plan.dim, plan.sizes, group_name, False)))
    return out


def _matmul_reduce_scatter(*args: Any) -> Tensor:
    return reduce_scatter_over(*args)


def _matmul_reduce_scatter_fake(
    a: list[Tensor],
    b: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    out_dtype: torch.dtype | None,
    path: str,
) -> Tensor:
    plan = _plan(_groups.resolve(group_name), a, b, bias, out_dtype, path, (scatter_dim, shard_sizes))
    shape = _own_shape(plan)
    _checks.check_residual(residual, shape, plan.out_dtype, a[0])
    return a[0].new_empty(shape, dtype=plan.out_dtype)


def _matmul_all_reduce(
    a: list[Tensor],
    b: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    group_name: str,
    out_dtype: torch.dtype | None,
    path: str,
) -> Tensor:
    group = _groups.resolve(group_name)

    def validate() -> _Plan:
        plan = _plan(group, a, b, bias, out_dtype, path, None)
        _checks.check_residual(residual, plan.shape, plan.out_dtype, a[0])
        return plan

    plan = _agreement.validated(
        "matmul_all_reduce",
        group,
        _sample(a),
        validate,
        lambda plan: _facts("matmul_all_reduce", a, b, plan, bias, residual),
    )
    plan = _settled("matmul_all_reduce", plan, a, b)
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
    _note("matmul_all_reduce", plan, a, b)
    return out


def _matmul_all_reduce_fake(
    a: list[Tensor],
    b: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    group_name: str,
    out_dtype: torch.dtype | None,
    path: str,
) -> Tensor:
    plan = _plan(_groups.resolve(group_name), a, b, bias, out_dtype, path, None)
    _checks.check_residual(residual, plan.shape, plan.out_dtype, a[0])
    return a[0].new_empty(plan.shape, dtype=plan.out_dtype)


def _sample(a: Sequence[Tensor]) -> Tensor:
    return a[0] if len(a) > 0 else torch.empty(0)


def _wanted(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor | None]:
    """The operands that gradients of weights need: none where a weight is frozen."""
    return [x if w.requires_grad else None for x, w in zip(a, b, strict=True)]


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, residual, dim, sizes, group, _, path = inputs
    ctx.n, ctx.has_residual, ctx.targets = len(a), residual is not None, taken(len(b))
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
    if any(need_as) and at_once(ctx.targets) and all(a is not None for a in as_):
        made = scatter_grads(
            dy, as_, bs, (need_as, need_bs, need_bias), ctx.targets, ctx.dim, sizes, ctx.group, ctx.path
        )
        return (*made, grad_residual, *(None,) * 5)
    grad_as: list[Tensor | None] = [None] * n
    whole = None
    if any(need_as):
        wanted = [i for i in range(n) if need_as[i]]
        wants_whole = any(need_bs) or need_bias
        end = (ctx.dim, sizes, ctx.group, None, False, wants_whole, False, ctx.path)
        products = torch.ops.tpkernels.all_gather_matmul(
            dy, [bs[i].t() for i in wanted], [], [], "none", *end
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
    return (grad_as, grad_bs, grad_bias, grad_residual, *(None,) * 5)


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, residual, _, _, path = inputs
    ctx.n, ctx.has_residual, ctx.path, ctx.targets = len(a), residual is not None, path, taken(len(b))
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
    return (grad_as, grad_bs, grad_bias, grad_residual, None, None, None)


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
