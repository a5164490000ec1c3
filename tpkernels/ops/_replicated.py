"""``tpkernels::matmul_replicated``: several products of an operand that is the same on every rank.

Outputs, in order: one product per weight; then, if asked for, one pre-activation per weight. The forward pass is
local. Gradient of the operand: ``sum_i dY_i W_i^T``, all-reduced. Gradient of a weight: ``X^T dY_i``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.ops import _agreement, _checks, _groups, _paths
from tpkernels.ops._groups import Group
from tpkernels.ops._main_grad import NOWHERE, taken
from tpkernels.ops._matmul import weight_grad
from tpkernels.ops._products import (
    Plan,
    bias_grads,
    biases_by_weight,
    describe_products,
    preact_grads,
    run_products,
    validate_products,
)
from tpkernels.ops._registry import register
from tpkernels.ops._remembered import Remembered, signature, signatures


class _Call(NamedTuple):
    """Arguments of the op."""

    a: Tensor
    bs: list[Tensor]
    biases: list[Tensor]
    bias_of: list[int]
    activation: str
    group_name: str
    out_dtype: torch.dtype | None
    return_preact: bool
    path: str
    main_grads: list[Tensor] | None
    main_grad_of: list[int] | None
    stand_ins: list[bool] | None


def _plan_replicated(group: Group, call: _Call) -> Plan:
    a, path = call.a, call.path
    by_weight = validate_products("a", a, call.bs, call.biases, call.bias_of, call.activation)
    dtype = _checks.check_out_dtype(call.out_dtype, a.dtype)
    transport = _groups.transport_of(group, a.device, "a")
    request = _paths.parse(path, a.device.type, distributed=True)
    if request.transport != _paths.FUSED:  # nothing travels before the gradient, which can be fused
        _paths.check_transport(request, transport, group.name)
    choice = _paths.choose_gemm(request, a.device.type, a.dtype)
    return Plan(group, by_weight, 0, [], dtype, "none", choice)


_remembered: Remembered[tuple[Any, ...]] = Remembered()


def _planned(group: Group, call: _Call) -> Plan:
    """:func:`_plan_replicated`, remembered."""
    a, bs, biases, bias_of, path = call.a, call.bs, call.biases, call.bias_of, call.path
    tensors = signature(a), signatures(bs), signatures(biases), tuple(bias_of)
    transport = _groups.transport_of(group, a.device, "a")
    key = tensors, call.activation, transport, call.out_dtype, path, _paths.environment(path)

    def decide() -> tuple[Any, ...]:
        plan = _plan_replicated(group, call)
        return plan._replace(detail=describe_products(a, bs)).rest()

    rest = _remembered.get(key, decide)
    return Plan(group, biases_by_weight(len(bs), biases, bias_of), *rest)


def _matmul_replicated(*args: Any) -> list[Tensor]:
    call = _Call(*args)
    a, group = call.a, _groups.resolve(call.group_name)
    plan = _agreement.validated(
        "matmul_replicated",
        group,
        a,
        lambda: _planned(group, call),
        lambda plan: {
            "a's dtype": str(a.dtype),
            "a's shape": list(a.shape),
            "gradient of a wanted": a.requires_grad,
        },
    )
    return run_products("matmul_replicated", plan, a, call.bs, call.activation, call.return_preact)


def _matmul_replicated_fake(*args: Any) -> list[Tensor]:
    call = _Call(*args)
    plan = _plan_replicated(_groups.resolve(call.group_name), call)
    rows = call.a.shape[:-1]
    copies = 2 if call.return_preact else 1
    return [
        call.a.new_empty([*rows, b.shape[1]], dtype=plan.out_dtype) for _ in range(copies) for b in call.bs
    ]


def _replicated_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    call = _Call(*inputs)
    a, bs, biases, with_preact = call.a, call.bs, call.biases, call.return_preact
    n = len(bs)
    ctx.set_materialize_grads(False)
    ctx.n, ctx.bias_of, ctx.activation = n, list(call.bias_of), call.activation
    ctx.group, ctx.path = call.group_name, call.path
    ctx.targets = taken(bs, call.main_grads, call.main_grad_of, call.stand_ins)
    recompute = call.activation != "none" and not with_preact
    ctx.dtype = a.dtype
    ctx.save_for_backward(
        a if recompute or any(b.requires_grad for b in bs) else None,  # a frozen weight needs none of it
        *bs,
        *(output[n : 2 * n] if with_preact else [None] * n),
        *(biases if recompute else [None] * len(biases)),
    )


def _replicated_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    n = ctx.n
    a, *rest = ctx.saved_tensors
    bs, preacts, biases = rest[:n], rest[n : 2 * n], rest[2 * n :]
    need_a, need_bs = ctx.needs_input_grad[:2]  # nested as the inputs are
    dys = preact_grads(ctx, grads, bs, preacts, biases, lambda: a, ctx.dtype)
    present = [(dy, b.t()) for dy, b in zip(dys, bs, strict=True) if dy is not None]
    grad_a = None
    if need_a and present:
        grad_a = torch.ops.tpkernels.matmul_all_reduce(
            [dy for dy, _ in present],
            [w for _, w in present],
            None,
            None,
            ctx.group,
            ctx.dtype,
            ctx.path,
            *NOWHERE,
        )
    grad_bs = [
        weight_grad(a, dy, b, ctx.path, target=target) if need and dy is not None else None
        for need, dy, b, target in zip(need_bs, dys, bs, ctx.targets, strict=True)
    ]
    return grad_a, grad_bs, bias_grads(ctx, dys)


register(
    "matmul_replicated",
    _matmul_replicated,
    _matmul_replicated_fake,
    setup_context=_replicated_setup,
    backward=_replicated_backward,
)
