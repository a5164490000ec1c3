"""Collectives with gradients: the edges of sharded regions in a model.

===============  =============  ==========================================================
forward          backward       use
===============  =============  ==========================================================
copy_to_group    all-reduce     replicated value enters sharded computation
all_reduce       identity       partial sums become a replicated value
all_gather       reduce-scatter shards become whole, each rank computes something else with it
all_gather       own slice      the same, ``replicated_grad=True``: all ranks compute the same
reduce_scatter   all-gather     partial sums become shards
split            all-gather     replicated value becomes shards
===============  =============  ==========================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.ops import _agreement, _checks, _collectives, _groups, _paths
from tpkernels.ops._groups import Group
from tpkernels.ops._registry import register

ops = torch.ops.tpkernels


def _check(x: Tensor, group: Group, *, floating: bool = True) -> str:
    if floating:  # sums; anything may be gathered
        _checks.check_operand("x", x, min_dim=0)
    return _groups.transport_of(group, x.device, "x")


def _row_dim(x: Tensor, dim: int) -> int:
    if x.dim() == 0 or not -x.dim() <= dim < x.dim():
        raise ArgumentError(f"dim: expected a dimension of x {list(x.shape)}, got {dim}.")
    return dim % x.dim()


def _without(x: Tensor, dim: int) -> list[int]:
    return [n for d, n in enumerate(x.shape) if d != dim]


def _copy(x: Tensor, group_name: str) -> Tensor:
    _check(x, _groups.resolve(group_name))
    return x.clone(memory_format=torch.contiguous_format)


def _copy_fake(x: Tensor, group_name: str) -> Tensor:
    _check(x, _groups.resolve(group_name))
    return x.new_empty(x.shape)


def _all_reduce(x: Tensor, reduce_op: str, group_name: str) -> Tensor:
    group = _groups.resolve(group_name)

    def validate() -> str:
        if reduce_op not in ("sum", "max"):
            raise ArgumentError(f"op: expected 'sum' or 'max', got {reduce_op!r}.")
        return _check(x, group)

    transport = _agreement.validated(
        "all_reduce",
        group,
        x,
        validate,
        lambda _: {"x's dtype": str(x.dtype), "x's shape": list(x.shape), "op": reduce_op},
    )
    _paths.record("all_reduce", transport, "none")
    if reduce_op == "max":
        return _collectives.all_reduce_max(x, group)
    rows = x.reshape(1, 1) if x.dim() == 0 else x
    total = _collectives.all_reduce_sum(rows, group, x.dtype).reshape(x.shape)
    return total.clone() if group.world == 1 else total  # an op must not return its argument


def _all_gather(
    x: Tensor, dim: int, shard_sizes: list[int] | None, group_name: str, replicated_grad: bool
) -> Tensor:
    group = _groups.resolve(group_name)

    def validate() -> tuple[str, int, list[int]]:
        transport = _check(x, group, floating=False)
        d = _row_dim(x, dim)
        return transport, d, _groups.gather_sizes(x.shape[d], shard_sizes, group, "x")

    transport, d, sizes = _agreement.validated(
        "all_gather",
        group,
        x,
        validate,
        lambda r: {
            "x's dtype": str(x.dtype),
            "dim": r[1],
            "x's shape without dim": _without(x, r[1]),
            "shard_sizes (or the equal sizes that None stands for)": r[2],
        },
    )
    _paths.record("all_gather", transport, "none")
    return _collectives.all_gather(x, d, sizes, group)


def _all_gather_fake(
    x: Tensor, dim: int, shard_sizes: list[int] | None, group_name: str, replicated_grad: bool
) -> Tensor:
    d = _row_dim(x, dim)
    sizes = _groups.gather_sizes(x.shape[d], shard_sizes, _groups.resolve(group_name), "x")
    shape = list(x.shape)
    shape[d] = sum(sizes)
    return x.new_empty(shape)


def _plan_scatter(x: Tensor, dim: int, sizes: list[int] | None, group: Group) -> tuple[int, list[int]]:
    d = _row_dim(x, dim)
    return d, _groups.scatter_sizes(x.shape[d], sizes, group, "x")


def _reduce_scatter(x: Tensor, dim: int, shard_sizes: list[int] | None, group_name: str) -> Tensor:
    group = _groups.resolve(group_name)

    def validate() -> tuple[str, int, list[int]]:
        return _check(x, group), *_plan_scatter(x, dim, shard_sizes, group)

    transport, d, sizes = _agreement.validated(
        "reduce_scatter",
        group,
        x,
        validate,
        lambda r: {"x's dtype": str(x.dtype), "x's shape": list(x.shape), "dim": r[1], "shard_sizes": r[2]},
    )
    _paths.record("reduce_scatter", transport, "none")
    return _collectives.reduce_scatter(x, d, sizes, group, x.dtype)


def _split(x: Tensor, dim: int, shard_sizes: list[int] | None, group_name: str) -> Tensor:
    group = _groups.resolve(group_name)
    d, sizes = _agreement.validated(
        "split",
        group,
        x,
        lambda: _plan_scatter(x, dim, shard_sizes, group),
        lambda r: {"x's dtype": str(x.dtype), "x's shape": list(x.shape), "dim": r[0], "shard_sizes": r[1]},
    )
    return _collectives.own_slice(x, d, sizes, group)


def _scatter_fake(x: Tensor, dim: int, shard_sizes: list[int] | None, group_name: str) -> Tensor:
    group = _groups.resolve(group_name)
    d, sizes = _plan_scatter(x, dim, shard_sizes, group)
    shape = list(x.shape)
    shape[d] = sizes[group.rank]
    return x.new_empty(shape)


def _copy_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _copy_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (ops.all_reduce(grad, "sum", ctx.group),)


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.reduce_op = inputs[1]


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.reduce_op != "sum":
        raise ArgumentError("op: an all_reduce with op='max' has no gradient; detach its input.")
    return (grad,)


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dim, sizes, ctx.group, ctx.replicated = inputs
    ctx.dim = dim % x.dim()
    ctx.sizes = sizes if sizes is not None else [x.shape[ctx.dim]] * _groups.resolve(ctx.group).world


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    back = ops.split if ctx.replicated else ops.reduce_scatter
    return (back(grad, ctx.dim, ctx.sizes, ctx.group),)


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dim, sizes, ctx.group = inputs
    ctx.dim = dim % x.dim()
    if sizes is None:
        rows = _groups.shard_sizes(x.shape[ctx.dim], _groups.resolve(ctx.group).world)
        sizes = None if all(size is rows[0] for size in rows) else rows
    ctx.sizes = sizes


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (ops.all_gather(grad, ctx.dim, ctx.sizes, ctx.group, False),)


def _split_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (ops.all_gather(grad, ctx.dim, ctx.sizes, ctx.group, True),)


register("copy_to_group", _copy, _copy_fake, setup_context=_copy_setup, backward=_copy_backward)
register(
    "all_reduce",
    _all_reduce,
    lambda x, reduce_op, group_name: x.new_empty(x.shape),
    setup_context=_all_reduce_setup,
    backward=_all_reduce_backward,
)
register("all_gather", _all_gather, _all_gather_fake, setup_context=_gather_setup, backward=_gather_backward)
register(
    "reduce_scatter",
    _reduce_scatter,
    _scatter_fake,
    setup_context=_scatter_setup,
    backward=_reduce_scatter_backward,
)
register("split", _split, _scatter_fake, setup_context=_scatter_setup, backward=_split_backward)
