"""``tpkernels::matmul_reduce_scatter_and_gather``: what the gradient of a gather with products needs, in one call.

The gradient of the operand is a product that is reduced and scattered; that of a weight needs the operand gathered
again. On path "fused" the second travels beneath the first. Elsewhere one comes after the other. It has no gradient of
its own: where one is wanted the two operations are called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.ops import _reduce
from tpkernels.ops._registry import register


def _run(
    a: list[Tensor],
    b: list[Tensor],
    shard: Tensor,
    dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    out_dtype: torch.dtype | None,
    path: str,
) -> tuple[Tensor, Tensor]:
    out, gathered = _reduce.reduce_scatter_over(
        a, b, None, None, dim, shard_sizes, group_name, out_dtype, path, shard
    )
    if gathered is None:
        gathered = torch.ops.tpkernels.all_gather(shard, dim, shard_sizes, group_name, False)
    return out, gathered


def _fake(
    a: list[Tensor],
    b: list[Tensor],
    shard: Tensor,
    dim: int,
    shard_sizes: list[int] | None,
    group_name: str,
    out_dtype: torch.dtype | None,
    path: str,
) -> tuple[Tensor, Tensor]:
    out = torch.ops.tpkernels.matmul_reduce_scatter(
        a, b, None, None, dim, shard_sizes, group_name, out_dtype, path
    )
    return out, torch.ops.tpkernels.all_gather(shard, dim, shard_sizes, group_name, False)


register("matmul_reduce_scatter_and_gather", _run, _fake)
