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

from torch import Tensor

from tpkernels.comm.gathered import Gathered
from tpkernels.ops import _gather, _reduce
from tpkernels.ops._gradients import main_grads
from tpkernels.ops._matmul import is_transposed, product_below, product_like, sum_rows
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


def _of_gather(
    dys: list[Tensor],
    a_shard: Tensor,
    bs: list[Tensor],
    need_bs: list[bool],
    gather_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    path: str,
) -> list[Tensor]:
    made, into = [], main_grads()

    def weights(x: Gathered) -> None:
        for i, dy in enumerate(dys):
            if need_bs[i]:
                made.extend(_weight(bs[i], x.rows.t(), x.ordered(dy), into.get(i), path))

    rights = [b.t() for b in bs]
    shard = a_shard if any(need_bs) else None
    end = (gather_dim, shard_sizes, group_name, a_shard.dtype, path, shard, weights)
    return [_reduce.reduce_scatter_over(dys, rights, None, None, *end), *made]


def _of_gather_fake(
    dys: list[Tensor],
    a_shard: Tensor,
    bs: list[Tensor],
    need_bs: list[bool],
    gather_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    path: str,
) -> list[Tensor]:
    mine = (b for i, b in enumerate(bs) if need_bs[i] and i not in main_grads())
    return [a_shard.new_empty(a_shard.shape), *(_empty_like(b, a_shard) for b in mine)]


def _of_gather_into(
    dys: list[Tensor],
    a_shard: Tensor,
    bs: list[Tensor],
    into: list[Tensor],
    into_of: list[int],
    gather_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    path: str,
) -> Tensor:
    def weights(x: Gathered) -> None:
        for i, acc in zip(into_of, into, strict=True):
            _weight(bs[i], x.rows.t(), x.ordered(dys[i]), acc, path)

    shard = a_shard if into else None
    end = (gather_dim, shard_sizes, group_name, a_shard.dtype, path, shard, weights)
    return _reduce.reduce_scatter_over(dys, [b.t() for b in bs], None, None, *end)


def _of_gather_into_fake(
    dys: list[Tensor],
    a_shard: Tensor,
    bs: list[Tensor],
    into: list[Tensor],
    into_of: list[int],
    gather_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    path: str,
) -> Tensor:
    return a_shard.new_empty(a_shard.shape)


def _of_scatter(
    dy: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    need_a: list[bool],
    need_b: list[bool],
    need_bias: bool,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    path: str,
) -> list[Tensor]:
    made, into = [], main_grads()

    def weights(whole: Gathered) -> None:
        for i, x in enumerate(a):
            if need_b[i]:
                made.extend(_weight(b[i], whole.ordered(x).t(), whole.rows, into.get(i), path))
        if need_bias:
            made.append(sum_rows(whole.rows))

    rights = [w.t() for w, needed in zip(b, need_a, strict=True) if needed]
    use = weights if any(need_b) or need_bias else None
    end = (scatter_dim, shard_sizes, group_name, None, False, False, False, path, use)
    return [*_gather.gather_over(dy, rights, [], [], "none", *end), *made]


def _of_scatter_fake(
    dy: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    need_a: list[bool],
    need_b: list[bool],
    need_bias: bool,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    path: str,
) -> list[Tensor]:
    made = [dy.new_empty(x.shape) for x, needed in zip(a, need_a, strict=True) if needed]
    made += [_empty_like(w, dy) for i, w in enumerate(b) if need_b[i] and i not in main_grads()]
    return [*made, dy.new_empty(dy.shape[-1:])] if need_bias else made


register("all_gather_matmul_grads", _of_gather, _of_gather_fake)
register("all_gather_matmul_grads_into", _of_gather_into, _of_gather_into_fake)
register("matmul_reduce_scatter_grads", _of_scatter, _of_scatter_fake)
