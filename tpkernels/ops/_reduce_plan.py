"""Checked calls of products whose sums go over ranks (:mod:`_reduce`): what is decided about them, and remembered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.comm import auto, runtime
from tpkernels.comm.auto import Asked
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.ops import _checks, _gemm, _groups, _paths
from tpkernels.ops._groups import Group
from tpkernels.ops._remembered import Remembered, signature, signatures

__all__ = ["Call", "Plan", "own_shape", "plan_of", "planned"]


class Plan(NamedTuple):
    """A checked call. All but the first field is remembered, and nobody may write to its lists."""

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
    asked: Asked | None = None  # the call as path "auto" sees it
    rows: Sequence[int] = ()  # of every shard, of all leading dimensions
    chooses: bool = False  # path "auto" has a choice
    detail: str = ""  # sizes of the products


class Call(NamedTuple):
    """Arguments of ``matmul_reduce_scatter`` that its forward pass looks at."""

    a: list[Tensor]
    b: list[Tensor]
    bias: Tensor | None
    residual: Tensor | None
    scatter_dim: int | None  # None: an all-reduce, every rank gets all rows
    shard_sizes: list[int] | None
    group_name: str
    out_dtype: torch.dtype | None
    path: str

    @classmethod
    def all_reduce(cls, *args: Any) -> Call:
        """Of the arguments of ``matmul_all_reduce``."""
        return cls._make((*args[:4], None, None, *args[4:]))


def plan_of(group: Group, call: Call) -> Plan:
    """Check everything but the residual."""
    as_, bs, bias = call.a, call.b, call.bias
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
    dtype = _checks.check_out_dtype(call.out_dtype, a.dtype)
    dim, sizes = 0, []
    if call.scatter_dim is not None:
        dim = _checks.check_dim("scatter_dim", call.scatter_dim, "a", a)
        sizes = _groups.scatter_sizes(shape[dim], call.shard_sizes, group, "a")
    transport = _groups.transport_of(group, a.device, "a")
    request = _paths.parse(call.path, a.device.type, distributed=True)
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
    return Plan(group, dim, sizes, shape, dtype, transport, choice, request.open, small)


_remembered: Remembered[tuple[Any, ...]] = Remembered()


def planned(op: str, group: Group, call: Call) -> Plan:
    """:func:`plan_of`, with what path "auto" needs, remembered; checks the residual too."""
    as_, bs, scatters = call.a, call.b, call.scatter_dim is not None

    def decide() -> tuple[Any, ...]:
        plan = plan_of(group, call)
        _checks.check_residual(
            call.residual, own_shape(plan) if scatters else plan.shape, plan.out_dtype, as_[0]
        )
        asked = Asked(op, tuple(a.shape[-1] for a in as_), (bs[0].shape[1],), as_[0].dtype, plan.out_dtype)
        if not scatters:
            rows = _groups.shard_sizes(math.prod(plan.shape[:-1]), group.world)
        else:
            others = math.prod(n for d, n in enumerate(plan.shape[:-1]) if d != plan.dim)
            rows = [size * others for size in plan.sizes]
        chooses = plan.open and auto.arises(asked, rows, group, as_[0].device, plan.transport)
        detail = ", ".join(_gemm.describe(a, b) for a, b in zip(as_, bs, strict=True))
        return plan._replace(asked=asked, rows=rows, chooses=chooses, detail=detail)[1:]

    transport = _groups.transport_of(group, (as_[0].device if len(as_) > 0 else torch.device("cpu")), "a")
    tensors = signatures(as_), signatures(bs), signature(call.bias), signature(call.residual)
    sizes = None if call.shard_sizes is None else tuple(call.shard_sizes)
    options = op, call.scatter_dim, sizes, call.out_dtype, call.path
    place = group.rank, group.world, transport, _paths.environment(call.path), runtime.active
    return Plan(group, *_remembered.get((tensors, options, place), decide))


def own_shape(plan: Plan) -> list[int]:
    shape = list(plan.shape)
    shape[plan.dim] = plan.sizes[plan.group.rank]
    return shape
