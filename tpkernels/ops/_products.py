"""What operations with several weights per operand share: checks, the products, gradients before activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.comm.auto import Asked
from tpkernels.errors import ArgumentError
from tpkernels.ops import _checks, _gemm, _paths
from tpkernels.ops._groups import Group
from tpkernels.ops._matmul import preact_grad, product, sum_rows
from tpkernels.ops._settled import note


class Plan(NamedTuple):
    """A checked call; ``dim`` and ``sizes`` describe the gather, where there is one; ``open``: path is "auto".

    small: the products behind a small gather, if that is fused; ``way``: of :mod:`comm.small`, where it is one.
    All but the first two is remembered (:meth:`rest`), and nobody may write to its lists. ``asked`` and ``rows``: the
    call as path "auto" sees it, which has a choice if ``chooses``; ``detail``: sizes of the products.
    """

    group: Group
    biases: list[Tensor | None]
    dim: int
    sizes: list[int]
    out_dtype: torch.dtype
    transport: str
    choice: _paths.Choice
    open: bool = False
    small: _paths.Choice | None = None
    way: str | None = None
    asked: Asked | None = None
    rows: Sequence[int] = ()
    chooses: bool = False
    detail: str = ""

    def rest(self) -> tuple[Any, ...]:
        """What is the same for every call of this signature: ``Plan(group, biases, *rest)``."""
        return self[2:]


def validate_products(
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
    by_weight = biases_by_weight(len(bs), biases, bias_of)
    for i, b in enumerate(bs):
        label = "b" if len(bs) == 1 else f"b[{i}]"
        _checks.check_product(name, a, label, b)
        _checks.check_weight(label, b)
        _checks.check_bias(f"biases[{i}]", by_weight[i], b.shape[1], name, a)
    _checks.check_activation(activation)
    return by_weight


def biases_by_weight(
    count: int, biases: Sequence[Tensor | None], bias_of: Sequence[int]
) -> list[Tensor | None]:
    """One bias or None per weight."""
    by_weight: list[Tensor | None] = [None] * count
    for i, bias in zip(bias_of, biases, strict=True):
        by_weight[i] = bias
    return by_weight


def run_products(
    op: str, plan: Plan, a: Tensor, bs: Sequence[Tensor], activation: str, want_preact: bool
) -> list[Tensor]:
    plain = activation == "none"
    products = [
        _gemm.run(
            plan.choice,
            a,
            b,
            _gemm.PLAIN if plain and bias is None else _gemm.Epilogue(bias=bias, activation=activation),
            out_dtype=plan.out_dtype,
            want_preact=want_preact,
        )
        for b, bias in zip(bs, plan.biases, strict=True)
    ]
    if products[0].choice is not None:  # tuning may have chosen; each product for itself, the first is told
        plan = plan._replace(choice=products[0].choice)
    note(op, plan)
    return [p.out for p in products] + [kept for p in products for kept in p.kept]


def describe_products(a: Tensor, bs: Sequence[Tensor], rows: int | None = None) -> str:
    """Sizes for a path record; ``rows`` where they are not those of ``a``."""
    return ", ".join(_gemm.describe(a, b, rows=rows) for b in bs)


def preact_grads(
    ctx: Any,
    grads: Sequence[Tensor | None],
    bs: Sequence[Tensor],
    preacts: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    operand: Callable[[], Tensor],
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Gradient at each product before its activation, in the operands' dtype."""
    by_weight = biases_by_weight(ctx.n, biases, ctx.bias_of)
    dys: list[Tensor | None] = []
    for i in range(ctx.n):
        saved = preacts[i]

        def preact(i: int = i, saved: Tensor | None = saved) -> Tensor:
            return saved if saved is not None else product(operand(), bs[i], by_weight[i], ctx.path)

        extra = grads[ctx.n + i] if saved is not None else None
        grad = preact_grad(grads[i], extra, ctx.activation, preact)
        dys.append(None if grad is None else grad.to(dtype))
    return dys


def bias_grads(ctx: Any, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
    needed = ctx.needs_input_grad[2]
    picked = [dys[i] for i in ctx.bias_of]
    return [
        sum_rows(dy) if need and dy is not None else None for need, dy in zip(needed, picked, strict=True)
    ]


def grads_wanted(*tensors: Sequence[Tensor]) -> list[bool]:
    """Which lists hold a tensor that needs a gradient: the backward pass communicates for those."""
    return [any(t.requires_grad for t in some) for some in tensors]
