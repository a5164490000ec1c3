"""``tpkernels::all_gather_matmul_grads`` and ``tpkernels::matmul_reduce_scatter_grads``: all gradients in one call.

Each has to gather: the operand again, for the gradients of weights, beneath the product for its own gradient; or dY,
which the product for the operand's gradient multiplies. On path "fused" the products for the weights read what was
gathered where it came to, instead of a copy. The ops have no gradients of their own: where such are wanted, the
operations are called one by one.

=======================  ================================================  =============================
op                       of operands                                       of weights
=======================  ================================================  =============================
all_gather_matmul        ``sum_i dY_i W_i^T``, reduced and scattered        ``X^T dY_i``, X gathered
matmul_reduce_scatter    ``dY W_i^T``, dY gathered                         ``X_i^T dY``
=======================  ================================================  =============================
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tpkernels.comm.gathered import Gathered, Use
from tpkernels.ops import _gather, _reduce
from tpkernels.ops._gradients import main_grads
from tpkernels.ops._matmul import is_transposed, product_below, product_like, sum_rows
from tpkernels.ops._reduce_plan import Call
from tpkernels.ops._registry import below, register


def _weight(b: Tensor, left: Tensor, right: Tensor, into: Tensor | None, path: str) -> list[Tensor]:
    """``left @ right``, the gradient of ``b``; nothing where it is added to ``into``."""
    if into is None:
        return [product_like(b, left, right, lambda x, y: product_below(x, y, path))]
    below("matmul_accumulate", left.device)(left, right, into, path)
    return []


def _empty_like(b: Tensor, x: Tensor) -> Tensor:
    """What :func:`_weight` makes for ``b``, of the dtype of ``x``."""
    return x.new_empty(b.shape[::-1]).t() if is_transposed(b) else x.new_empty(b.shape)


class _OfGather(NamedTuple):
    """Arguments of ``all_gather_matmul_grads``."""

    dys: list[Tensor]
    a_shard: Tensor
    bs: list[Tensor]
    need_bs: list[bool]
    gather_dim: int
    shard_sizes: list[int] | None
    group_name: str
    path: str


def _of_gather(*args: Any) -> list[Tensor]:
    call = _OfGather(*args)
    made, into = [], main_grads()

    def weights(x: Gathered) -> None:
        for i, dy in enumerate(call.dys):
            if call.need_bs[i]:
                made.extend(_weight(call.bs[i], x.rows.t(), x.ordered(dy), into.get(i), call.path))

    return [_of_shard(call, any(call.need_bs), weights), *made]


def _of_gather_fake(*args: Any) -> list[Tensor]:
    call = _OfGather(*args)
    mine = (b for i, b in enumerate(call.bs) if call.need_bs[i] and i not in main_grads())
    return [_shard_like(call), *(_empty_like(b, call.a_shard) for b in mine)]


class _OfGatherInto(NamedTuple):
    """Arguments of ``all_gather_matmul_grads_into``."""

    dys: list[Tensor]
    a_shard: Tensor
    bs: list[Tensor]
    into: list[Tensor]
    into_of: list[int]
    gather_dim: int
    shard_sizes: list[int] | None
    group_name: str
    path: str


def _of_gather_into(*args: Any) -> Tensor:
    call = _OfGatherInto(*args)

    def weights(x: Gathered) -> None:
        for i, acc in zip(call.into_of, call.into, strict=True):
            _weight(call.bs[i], x.rows.t(), x.ordered(call.dys[i]), acc, call.path)

    return _of_shard(call, bool(call.into), weights)


def _of_gather_into_fake(*args: Any) -> Tensor:
    return _shard_like(_OfGatherInto(*args))


def _of_shard(call: _OfGather | _OfGatherInto, any_weight: bool, weights: Use) -> Tensor:
    """The gradient of the operand, with the operand gathered for ``weights`` beneath, if there are any."""
    rights, shard = [b.t() for b in call.bs], call.a_shard if any_weight else None
    end = (call.gather_dim, call.shard_sizes, call.group_name, call.a_shard.dtype, call.path)
    return _reduce.reduce_scatter_over(Call(call.dys, rights, None, None, *end), shard, weights)


def _shard_like(call: _OfGather | _OfGatherInto) -> Tensor:
    return call.a_shard.new_empty(call.a_shard.shape)


class _OfScatter(NamedTuple):
    """Arguments of ``matmul_reduce_scatter_grads``."""

    dy: Tensor
    a: list[Tensor]
    b: list[Tensor]
    need_a: list[bool]
    need_b: list[bool]
    need_bias: bool
    scatter_dim: int
    shard_sizes: list[int] | None
    group_name: str
    path: str


def _of_scatter(*args: Any) -> list[Tensor]:
    call = _OfScatter(*args)
    made, into = [], main_grads()

    def weights(whole: Gathered) -> None:
        for i, x in enumerate(call.a):
            if call.need_b[i]:
                made.extend(_weight(call.b[i], whole.ordered(x).t(), whole.rows, into.get(i), call.path))
        if call.need_bias:
            made.append(sum_rows(whole.rows))

    rights = [w.t() for w, needed in zip(call.b, call.need_a, strict=True) if needed]
    use = weights if any(call.need_b) or call.need_bias else None
    place = (call.scatter_dim, call.shard_sizes, call.group_name)
    gather = _gather.Call(call.dy, rights, [], [], "none", *place, None, False, False, False, call.path)
    return [*_gather.gather_over(gather, use), *made]


def _of_scatter_fake(*args: Any) -> list[Tensor]:
    call, dy = _OfScatter(*args), args[0]
    made = [dy.new_empty(x.shape) for x, needed in zip(call.a, call.need_a, strict=True) if needed]
    into = main_grads()
    made += [_empty_like(w, dy) for i, w in enumerate(call.b) if call.need_b[i] and i not in into]
    return [*made, dy.new_empty(dy.shape[-1:])] if call.need_bias else made


register("all_gather_matmul_grads", _of_gather, _of_gather_fake)
register("all_gather_matmul_grads_into", _of_gather_into, _of_gather_into_fake)
register("matmul_reduce_scatter_grads", _of_scatter, _of_scatter_fake)
