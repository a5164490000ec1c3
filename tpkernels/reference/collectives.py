"""Shards and collectives, all ranks in one process.

A sharded value is a list of arrays, one per rank; a replicated value is one array. Each ``*_backward`` takes the
gradient of the outputs in the outputs' form and returns that of the inputs in theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tpkernels.reference._array import Array, as_f64, get_array_module, round_to


def shard_sizes(total: int, world: int) -> list[int]:
    """Ceil split of ``total`` over ``world`` ranks, as torch.chunk does; the last ranks may get fewer, or 0."""
    if total < 0 or world < 1:
        raise ValueError(f"total must be at least 0 and world at least 1, got {total} and {world}")
    step = -(-total // world)
    return [min(step, max(total - rank * step, 0)) for rank in range(world)]


def sizes_along(shards: Sequence[Array], dim: int) -> list[int]:
    """Each shard's size along ``dim``."""
    return [int(x.shape[dim]) for x in shards]


def split(x: Array, dim: int, world: int, sizes: Sequence[int] | None = None) -> list[Array]:
    """Cut a replicated x along ``dim`` (None: ceil split): array -> one shard per rank."""
    x = as_f64(x)
    sizes = shard_sizes(x.shape[dim], world) if sizes is None else list(sizes)
    if len(sizes) != world or sum(sizes) != x.shape[dim] or min(sizes) < 0:
        raise ValueError(f"sizes must be {world} numbers that sum to {x.shape[dim]} (dim {dim}), got {sizes}")
    shards, start = [], 0
    index = [slice(None)] * x.ndim
    for size in sizes:
        index[dim] = slice(start, start + size)
        shards.append(x[tuple(index)])
        start += size
    return shards


def split_backward(dys: Sequence[Array], dim: int) -> Array:
    """Each rank's shard gradient -> the gradient of the replicated input."""
    return all_gather(dys, dim)


def all_gather(shards: Sequence[Array], dim: int) -> Array:
    """Concatenate along ``dim``: one shard per rank (uneven allowed) -> the array every rank gets."""
    return get_array_module(*shards).concatenate([as_f64(x) for x in shards], axis=dim)


def all_gather_backward(
    dys: Sequence[Array], dim: int, sizes: Sequence[int], replicated_grad: bool = False
) -> list[Array]:
    """Gradients of the gathered array, one per rank -> one shard gradient per rank.

    They are summed over ranks (each rank used the gathered array for its own part of the work), unless
    ``replicated_grad``: then every rank did the same work, and holds the same, already complete, gradient.
    """
    total = as_f64(dys[0]) if replicated_grad else sum_ranks(dys)
    return split(total, dim, len(sizes), sizes)


def sum_ranks(xs: Sequence[Array], rounding: str | None = None) -> Array:
    """Sum in rank order. With ``rounding`` each x is first rounded to that type and each addition to float32."""
    if rounding is None:
        return functools.reduce(lambda total, x: total + x, (as_f64(x) for x in xs))
    return functools.reduce(
        lambda total, x: round_to(total + x, "float32"), (round_to(x, rounding) for x in xs)
    )


def all_reduce(xs: Sequence[Array], op: str = "sum") -> Array:
    """Sum or maximum over ranks: one array per rank -> the array every rank gets."""
    if op == "sum":
        return sum_ranks(xs)
    if op == "max":
        return functools.reduce(get_array_module(*xs).maximum, (as_f64(x) for x in xs))
    raise ValueError(f"op must be 'sum' or 'max', got {op!r}")


def all_reduce_backward(dy: Array, world: int) -> list[Array]:
    """Gradient of the replicated sum -> that of each rank's term (the same on all)."""
    return [as_f64(dy)] * world


def copy_to_group(x: Array, world: int) -> list[Array]:
    """A replicated array as each rank's own operand (identity)."""
    return [as_f64(x)] * world


def copy_to_group_backward(dys: Sequence[Array]) -> Array:
    """Each rank's gradient -> the complete gradient of the replicated array, their sum."""
    return sum_ranks(dys)


def reduce_scatter(xs: Sequence[Array], dim: int, sizes: Sequence[int] | None = None) -> list[Array]:
    """Sum over ranks, then cut along ``dim`` (None: ceil split): one full array per rank -> one shard per rank."""
    return split(sum_ranks(xs), dim, len(xs), sizes)


def reduce_scatter_backward(dys: Sequence[Array], dim: int) -> list[Array]:
    """One shard gradient per rank -> the gradient of each rank's full array (the same on all)."""
    return [all_gather(dys, dim)] * len(dys)
