"""The dispatcher's operations on FP8 operands: the product, and the three with a collective.

``tpkernels::scaled_matmul``, ``all_gather_scaled_matmul``, ``scaled_matmul_reduce_scatter`` and
``scaled_matmul_all_reduce`` have no gradients: :mod:`tpkernels.fp8._linear` builds those of quantised layers from
them. What is gathered travels in FP8 with its scales; sums travel in the output's dtype, and are added in rank order in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.fp8 import _product
from tpkernels.ops import _agreement, _checks, _collectives, _groups, _paths
from tpkernels.ops._groups import Group
from tpkernels.ops._registry import register


class _Product(NamedTuple):
    """Arguments of ``scaled_matmul``."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accumulation: bool
    path: str

    def check(self) -> None:
        _product.check("a", self.a, self.scale_a, "b", self.b, self.scale_b)
        _product.check_rest(self.bias, self.b, self.out_dtype)


def _scaled_matmul(*args: Any) -> Tensor:
    call = _Product(*args)
    call.check()
    a, b, scale_a, scale_b, bias, out_dtype, fast, path = call
    layout = _product.layout_of(a, b, scale_a, scale_b, out_dtype, fast)
    choice = _product.choose(_paths.parse(path, a.device.type, distributed=False), a.device, layout)
    given = (a, b, scale_a, scale_b, bias, out_dtype, fast)
    choice = _product.settle(choice, *given)
    out = _product.run(choice, *given)
    _paths.record("scaled_matmul", "none", choice.gemm, _product.describe(a, b, layout), choice.why)
    return out


def _scaled_matmul_fake(*args: Any) -> Tensor:
    call = _Product(*args)
    call.check()
    return call.a.new_empty([*call.a.shape[:-1], call.b.shape[1]], dtype=call.out_dtype)


register("scaled_matmul", _scaled_matmul, _scaled_matmul_fake)


class _Plan(NamedTuple):
    group: Group
    dim: int
    sizes: list[int]
    transport: str
    choice: _paths.Choice
    biases: list[Tensor | None]


def _chosen(group: Group, a: Tensor, layout: _product.Layout, path: str) -> tuple[str, _paths.Choice]:
    transport = _groups.transport_of(group, a.device, "a")
    request = _paths.parse(path, a.device.type, distributed=True)
    choice = _product.choose(request, a.device, layout)
    _paths.check_transport(request, transport, group.name)
    return transport, choice


def _note(
    op: str, plan: _Plan, pairs: Sequence[tuple[Tensor, Tensor]], layouts: Sequence[_product.Layout]
) -> None:
    parts = [_product.describe(a, b, layout) for (a, b), layout in zip(pairs, layouts, strict=True)]
    transport = plan.transport if plan.group.world > 1 else "none"
    _paths.record(op, transport, plan.choice.gemm, ", ".join(parts), plan.choice.why)


class _Gather(NamedTuple):
    """Arguments of ``all_gather_scaled_matmul``."""

    a_shard: Tensor
    scale_a: Tensor
    bs: list[Tensor]
    scale_bs: list[Tensor]
    biases: list[Tensor]
    bias_of: list[int]
    gather_dim: int
    shard_sizes: list[int] | None
    group_name: str
    out_dtype: torch.dtype
    fast_accumulation: bool
    return_gathered: bool
    path: str


def _plan_gather(group: Group, call: _Gather) -> _Plan:
    a, scale_a, bs, scale_bs = call[:4]
    if len(bs) == 0 or len(bs) != len(scale_bs):
        raise ArgumentError(
            f"b: expected at least one weight, and as many scales, got {len(bs)} and {len(scale_bs)}."
        )
    by_weight: list[Tensor | None] = [None] * len(bs)
    for i, bias in zip(call.bias_of, call.biases, strict=True):
        by_weight[i] = bias
    for i, (b, scale_b) in enumerate(zip(bs, scale_bs, strict=True)):
        _product.check("a_shard", a, scale_a, f"b[{i}]", b, scale_b)
        _product.check_rest(by_weight[i], b, call.out_dtype, f"biases[{i}]")
    dim = _checks.check_dim("gather_dim", call.gather_dim, "a_shard", a)
    sizes = _groups.gather_sizes(a.shape[dim], call.shard_sizes, group, "a_shard")
    layout = _product.layout_of(a, bs[0], scale_a, scale_bs[0], call.out_dtype, call.fast_accumulation)
    transport, choice = _chosen(group, a, layout, call.path)
    return _Plan(group, dim, sizes, transport, choice, by_weight)


def _all_gather_scaled_matmul(*args: Any) -> list[Tensor]:
    call = _Gather(*args)
    a_shard, scale_a, bs, scale_bs = call[:4]
    group = _groups.resolve(call.group_name)
    plan = _agreement.validated(
        "all_gather_scaled_matmul",
        group,
        a_shard,
        lambda: _plan_gather(group, call),
        lambda plan: {
            "a_shard's dtype": str(a_shard.dtype),
            "a_shard's shape without gather_dim": [n for d, n in enumerate(a_shard.shape) if d != plan.dim],
            "scales of a row": 0 if scale_a.numel() == 1 else scale_a.shape[-1],
            "gather_dim": plan.dim,
            "shard_sizes (or the equal sizes that None stands for)": plan.sizes,
        },
    )
    data, scale = gathered(a_shard, scale_a, plan.dim, plan.sizes, group)
    end = (call.out_dtype, call.fast_accumulation)
    made, choices = [], []
    for b, scale_b, bias in zip(bs, scale_bs, plan.biases, strict=True):
        given = (data, b, scale, scale_b, bias, *end)
        choices.append(_product.settle(plan.choice, *given))
        made.append(_product.run(choices[-1], *given))
    layouts = [
        _product.layout_of(data, b, scale, scale_b, *end) for b, scale_b in zip(bs, scale_bs, strict=True)
    ]
    _note("all_gather_scaled_matmul", plan._replace(choice=choices[0]), [(data, b) for b in bs], layouts)
    if not call.return_gathered:
        return made
    return [*made, data, scale.clone() if scale is scale_a else scale]  # an op must not return its argument


def gathered(
    data: Tensor, scale: Tensor, dim: int, sizes: Sequence[int], group: Group
) -> tuple[Tensor, Tensor]:
    """Rows of every rank, in FP8, and their scales; the scale of a whole tensor is everybody's already."""
    whole = _collectives.all_gather(data.view(torch.uint8), dim, sizes, group).view(data.dtype)
    return whole, scale if scale.dim() == 1 else _collectives.all_gather(scale, dim, sizes, group)


def _all_gather_scaled_matmul_fake(*args: Any) -> list[Tensor]:
    call = _Gather(*args)
    a_shard, scale_a = call[:2]
    plan = _plan_gather(_groups.resolve(call.group_name), call)
    rows = list(a_shard.shape[:-1])
    rows[plan.dim] = sum(plan.sizes)
    made = [a_shard.new_empty([*rows, b.shape[1]], dtype=call.out_dtype) for b in call.bs]
    if not call.return_gathered:
        return made
    scales = scale_a.shape if scale_a.dim() == 1 else [*rows, scale_a.shape[-1]]
    return [*made, a_shard.new_empty([*rows, a_shard.shape[-1]]), scale_a.new_empty(scales)]


register("all_gather_scaled_matmul", _all_gather_scaled_matmul, _all_gather_scaled_matmul_fake)


class _Sum(NamedTuple):
    """Arguments of ``scaled_matmul_reduce_scatter``, and of ``scaled_matmul_all_reduce``: without ``scatter``."""

    a: list[Tensor]
    b: list[Tensor]
    scale_a: list[Tensor]
    scale_b: list[Tensor]
    bias: Tensor | None
    residual: Tensor | None
    scatter: tuple[int, list[int] | None] | None  # the dimension, and the rows of every rank
    group_name: str
    out_dtype: torch.dtype
    fast_accumulation: bool
    path: str

    @classmethod
    def scattered(cls, *args: Any) -> _Sum:
        return cls._make((*args[:6], args[6:8], *args[8:]))

    @classmethod
    def whole(cls, *args: Any) -> _Sum:
        return cls._make((*args[:6], None, *args[6:]))


def _plan_sum(group: Group, call: _Sum) -> tuple[_Plan, list[int]]:
    """A checked call and this rank's shape."""
    a, b, scale_a, scale_b, bias, residual, scatter, _, out_dtype, fast, path = call
    if not len(a) == len(b) == len(scale_a) == len(scale_b) or len(a) == 0:
        counts = ", ".join(str(len(x)) for x in (a, b, scale_a, scale_b))
        raise ArgumentError(
            f"a, b: expected as many operands as weights and scales of each, at least one, got {counts}."
        )
    for i in range(len(a)):
        _product.check(f"a[{i}]", a[i], scale_a[i], f"b[{i}]", b[i], scale_b[i])
        if a[i].shape[:-1] != a[0].shape[:-1] or b[i].shape[1] != b[0].shape[1]:
            raise ShapeError(
                f"a[{i}], b[{i}]: their product {[*a[i].shape[:-1], b[i].shape[1]]} must have the shape of the first, "
                f"{[*a[0].shape[:-1], b[0].shape[1]]}, as the products are summed."
            )
    _product.check_rest(bias, b[0], out_dtype)
    shape, dim, sizes = [*a[0].shape[:-1], b[0].shape[1]], 0, []
    if scatter is not None:
        dim = _checks.check_dim("scatter_dim", scatter[0], "a", a[0])
        sizes = _groups.scatter_sizes(shape[dim], scatter[1], group, "a")
        shape[dim] = sizes[group.rank]
    _checks.check_residual(residual, shape, out_dtype, a[0])
    layout = _product.layout_of(a[0], b[0], scale_a[0], scale_b[0], out_dtype, fast)
    transport, choice = _chosen(group, a[0], layout, path)
    return _Plan(group, dim, sizes, transport, choice, [bias]), shape


def _summed(op: str, call: _Sum) -> Tensor:
    a, b, scale_a, scale_b, bias, residual, scatter, _, out_dtype, fast, _ = call
    group = _groups.resolve(call.group_name)
    plan, _ = _agreement.validated(
        op,
        group,
        a[0] if a else torch.empty(0),
        lambda: _plan_sum(group, call),
        lambda result: {
            "the product's shape": [*a[0].shape[:-1], b[0].shape[1]],
            "the output's dtype": str(out_dtype),
            "bias given": bias is not None,
            "residual given": residual is not None,
            "scatter_dim": result[0].dim,
            "shard_sizes (or those that None stands for)": result[0].sizes,
        },
    )
    wide = out_dtype if len(a) == 1 and group.world > 1 else torch.float32
    total, choices = None, []
    for left, right, of_left, of_right in zip(a, b, scale_a, scale_b, strict=True):
        given = (left, right, of_left, of_right, None, wide, fast)
        choices.append(_product.settle(plan.choice, *given))
        product = _product.run(choices[-1], *given)
        total = product if total is None else total.add_(product)
    assert total is not None
    if scatter is None:
        out = _collectives.all_reduce_sum(total, group, out_dtype, bias=bias, residual=residual)
    else:
        out = _collectives.reduce_scatter(
            total, plan.dim, plan.sizes, group, out_dtype, bias=bias, residual=residual
        )
    quads = zip(a, b, scale_a, scale_b, strict=True)
    layouts = [_product.layout_of(x, w, of_x, of_w, wide, fast) for x, w, of_x, of_w in quads]
    _note(op, plan._replace(choice=choices[0]), list(zip(a, b, strict=True)), layouts)
    return out


def _summed_fake(call: _Sum) -> Tensor:
    _, shape = _plan_sum(_groups.resolve(call.group_name), call)
    return call.a[0].new_empty(shape, dtype=call.out_dtype)


register(
    "scaled_matmul_reduce_scatter",
    lambda *args: _summed("scaled_matmul_reduce_scatter", _Sum.scattered(*args)),
    lambda *args: _summed_fake(_Sum.scattered(*args)),
)
register(
    "scaled_matmul_all_reduce",
    lambda *args: _summed("scaled_matmul_all_reduce", _Sum.whole(*args)),
    lambda *args: _summed_fake(_Sum.whole(*args)),
)
