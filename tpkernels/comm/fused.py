"""The calls of path "fused": operands brought into the form that the ops of ``_C_sm90a`` take, and back.

They take matrices whose rows are those of all ranks, shard after shard. A gathered or scattered dimension that is not
the first is moved there and back, and every row of a shard stands for as many as the other dimensions have.

Small calls are kernels of their own beside any product: :mod:`~tpkernels.comm.small`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.comm import departures, ranks, runtime, small, workspace
from tpkernels.comm.choice import MOST_PAIRS
from tpkernels.comm.faults import Reported, timeout_s
from tpkernels.comm.gathered import Gathered, Use
from tpkernels.ops import _nvtx
from tpkernels.ops._groups import Group, shard_sizes
from tpkernels.tune import mode

if TYPE_CHECKING:
    from tpkernels.tune.fused import Plan


def all_gather_matmul(
    group: Group,
    a_shard: Tensor,
    bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    dim: int,
    sizes: Sequence[int],
    *,
    out_dtype: torch.dtype,
    want_preact: bool,
    want_gathered: bool,
    use: Use | None = None,
) -> list[Tensor] | None:
    """One product per weight; then pre-activations, then the gathered operand, where wanted.

    ``use`` is called with what was gathered. None where there is nothing to gather, on any rank. Arguments are
    checked already.
    """
    device, k = a_shard.device, a_shard.shape[-1]
    inner = inner_shape(a_shard.shape, dim)
    rows = [size * math.prod(inner) for size in sizes]
    total = sum(rows)
    with Reported("all_gather_matmul", group), runtime.active.on(device):
        ranks.require(group, device)
        if total == 0 or k == 0:
            return None
        timeout = timeout_s(group, device)
        space = workspace.ensure(
            group, device, "gather", workspace.gather_bytes(total, k, a_shard.element_size())
        )
        shard = pushable(as_rows(a_shard, dim, rows[group.rank]))
        outs, preacts = (
            [a_shard.new_empty(total, b.shape[1], dtype=out_dtype) for b in bs] if wanted else []
            for wanted in (True, want_preact)
        )
        gathered = a_shard.new_empty(total, k) if want_gathered else None
        # The kernel takes no empty weight. Without any other this rank still has to send, so it multiplies by zeros.
        used = [i for i, b in enumerate(bs) if b.shape[1] > 0]
        weights = [loadable(bs[i]) for i in used]
        results, kept = ([some[i] for i in used] for some in (outs, preacts or outs))
        if not used:
            weights, results = (
                [loadable(a_shard.new_zeros(k, 1))],
                [a_shard.new_empty(total, 1, dtype=out_dtype)],
            )
        by_weight = [(place, biases[i]) for place, i in enumerate(used)]
        given = [
            shard,
            weights,
            [bias for _, bias in by_weight if bias is not None],
            [place for place, bias in by_weight if bias is not None],
            activation,
            results,
            kept if want_preact and used else [],
            gathered,
            rows,
            group.rank,
            list(space.addresses),
            timeout,
        ]

        def launch(schedule: str, tile: str) -> None:
            multiprocessors = runtime.active.multiprocessors(device)
            runtime.active.gather(*given, schedule, tile, multiprocessors, use is not None)

        plan = _plan("all_gather_matmul", group, [shard], weights, rows, timeout, launch)
        with _nvtx.phase("gather and product", "fused"), runtime.active.chained(device):
            launch(*plan)
            if use is not None:
                use(
                    Gathered(
                        workspace.gathered_rows(space, total, k, a_shard.dtype),
                        partial(as_rows, dim=dim, rows=total),
                    )
                )
    made = [*outs, *preacts, *([] if gathered is None else [gathered])]
    return [from_rows(x, dim, sum(sizes), inner) for x in made]


class Prepared(NamedTuple):
    """A call that has its memory and its operands, and has been checked: only launches are left, which peers wait for.

    Attributes:
        launch: enqueues it; once.
        result: what it gives, in its shape.
    """

    launch: Callable[[], None]
    result: Callable[[], Tensor]


def prepared_reduce_scatter(
    group: Group,
    as_: Sequence[Tensor],
    bs: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    dim: int,
    sizes: Sequence[int],
    *,
    out_dtype: torch.dtype,
) -> Prepared:
    """This rank's rows of the sum over ranks of ``sum_i a_i @ b_i``, plus bias and residual. Arguments are checked."""
    inner = inner_shape(as_[0].shape, dim)
    rows = [size * math.prod(inner) for size in sizes]
    own = rows[group.rank]
    matrices = [as_rows(a, dim, sum(rows)) for a in as_]
    right = None if residual is None else as_rows(residual, dim, own)
    call = _prepared("matmul_reduce_scatter", group, matrices, bs, bias, right, rows, own, out_dtype)
    return Prepared(call.launch, lambda: from_rows(call.result(), dim, sizes[group.rank], inner))


def matmul_all_reduce(
    group: Group,
    as_: Sequence[Tensor],
    bs: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """The sum over ranks of ``sum_i a_i @ b_i``, plus bias and residual, on every rank. Arguments are checked.

    Every rank sums a block of rows and sends it to all.
    """
    shape = [*as_[0].shape[:-1], bs[0].shape[1]]
    total = math.prod(shape[:-1])
    rows = shard_sizes(total, group.world)
    matrices = [a.reshape(total, a.shape[-1]) for a in as_]
    right = None
    if residual is not None:
        right = residual.reshape(total, shape[-1]).narrow(0, sum(rows[: group.rank]), rows[group.rank])
    call = _prepared("matmul_all_reduce", group, matrices, bs, bias, right, rows, total, out_dtype)
    call.launch()
    return call.result().reshape(shape)


def small_gather(group: Group, a_shard: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """All ranks' shards along ``dim``, in one kernel, for products behind it. Arguments are checked already."""
    inner, k = inner_shape(a_shard.shape, dim), a_shard.shape[-1]
    rows = [size * math.prod(inner) for size in sizes]
    shard = as_rows(a_shard, dim, rows[group.rank]).contiguous()
    out = shard.new_empty(sum(rows), k)
    _small("all_gather_matmul", small.GATHER, group, runtime.active.gather_small, [shard, out, rows])
    return from_rows(out, dim, sum(sizes), inner)


def small_reduce_scatter(
    group: Group,
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dim: int,
    sizes: Sequence[int],
) -> Tensor:
    """This rank's rows of the sum over ranks of a small partial, plus bias and residual, in one kernel.

    Partials are added as they are, in rank order in float32; one rounding. Arguments are checked already.
    """
    inner, n = inner_shape(partial.shape, dim), partial.shape[-1]
    rows = [size * math.prod(inner) for size in sizes]
    mine = as_rows(partial, dim, sum(rows)).contiguous()
    right = None if residual is None else as_rows(residual, dim, rows[group.rank]).contiguous()
    out = mine.new_empty(rows[group.rank], n)
    terms = [mine, None if bias is None else bias.contiguous(), right, out, rows]
    _small("matmul_reduce_scatter", small.SCATTER, group, runtime.active.scatter_small, terms)
    return from_rows(out, dim, sizes[group.rank], inner)


def small_all_reduce(
    group: Group, partial: Tensor, bias: Tensor | None, residual: Tensor | None, way: str
) -> Tensor:
    """The sum over ranks of a small partial, plus bias and residual, in one kernel; ``way``: of :mod:`comm.small`.

    Added and rounded as by :func:`small_reduce_scatter`.
    """
    n = partial.shape[-1]
    mine = partial.reshape(-1, n).contiguous()
    right = None if residual is None else residual.reshape(-1, n).contiguous()
    out = torch.empty_like(mine)
    terms = [mine, None if bias is None else bias.contiguous(), right, out, way]
    _small("matmul_all_reduce", way, group, runtime.active.reduce_small, terms)
    return out.reshape(partial.shape)


def _small(op: str, way: str, group: Group, call: Callable[..., None], given: list[Any]) -> None:
    """``call`` with what is given and this rank's place among the others. The first of what is given is a tensor."""
    device = given[0].device
    with Reported(op, group), runtime.active.on(device):
        ranks.require(group, device)
        timeout = timeout_s(group, device)
        space = workspace.ensure(group, device, "small", small.WORKSPACE_BYTES)
        name = op.removeprefix("matmul_").removesuffix("_matmul")
        with _nvtx.phase(name, way), runtime.active.chained(device):
            call(*given, group.rank, list(space.addresses), space.size, timeout)


def _prepared(
    op: str,
    group: Group,
    as_: Sequence[Tensor],
    bs: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    rows: Sequence[int],
    out_rows: int,
    out_dtype: torch.dtype,
) -> Prepared:
    """``out_rows`` rows of the sum: this rank's, or all. The residual has this rank's rows."""
    scatters = op == "matmul_reduce_scatter"
    device, n, total, active = as_[0].device, bs[0].shape[1], sum(rows), runtime.active
    with Reported(op, group), active.on(device):
        ranks.require(group, device)
        wide = workspace.pitch(n, out_dtype.itemsize)  # own rows are read and written in whole chunks
        out = as_[0].new_empty(out_rows, wide if scatters else n, dtype=out_dtype)
        if total == 0 or n == 0:
            return Prepared(lambda: None, lambda: out[:, :n])
        timeout = timeout_s(group, device)
        size = workspace.scatter_bytes if scatters else workspace.sum_bytes
        kind = "scatter" if scatters else "sum"
        space = workspace.ensure(group, device, kind, size(rows, n, out.element_size()))
        stored = departures.stores(op, rows, n * out.element_size(), os.environ)
        # Rows of tiles begin where shards do, and TMA starts at multiples of 16 bytes of what is contiguous.
        lefts, rights = _factors(as_, bs, by_columns=all(end % 8 == 0 for end in accumulate(rows)))
        before: list[Any] = [
            lefts[0],
            rights[0],
            bias,
            None if residual is None else _widened(residual, wide),
            out,
            None if stored else out.new_empty(total, wide),
            list(rows),
            group.rank,
            list(space.addresses),
            timeout,
        ]
        behind: list[Any] = [active.multiprocessors(device), lefts[1:], rights[1:]]

        def run(schedule: str, tile: str) -> None:
            (active.scatter if scatters else active.all_reduce)(*before, schedule, tile, *behind)

        plan = _plan(op, group, lefts, rights, rows, timeout, run)

    def launch() -> None:
        phase = _nvtx.phase(f"product and {op.removeprefix('matmul_')}", "fused")
        with Reported(op, group), active.on(device), phase, active.chained(device):
            run(*plan)
        before.clear()  # what comes next may take their memory
        behind.clear()

    return Prepared(launch, lambda: out[:, :n])


def _factors(
    as_: Sequence[Tensor], bs: Sequence[Tensor], *, by_columns: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernel multiplies and sums: pairs with K above 0, or one, side by side along K by copies.

    It takes a few pairs in one go, where all of a kind have the same dimension contiguous.
    """
    as_, bs = [a for a in as_ if a.shape[1] > 0] or as_[:1], [b for b in bs if b.shape[0] > 0] or bs[:1]
    if as_[0].shape[1] == 0:  # the others wait for what this rank adds, which is zero
        as_, bs = [as_[0].new_zeros(as_[0].shape[0], 1)], [bs[0].new_zeros(1, bs[0].shape[1])]
    if len(as_) <= MOST_PAIRS:
        lefts, rights = [loadable(a, by_columns=by_columns) for a in as_], [loadable(b) for b in bs]
        # What lies both ways, since an extent is 1, is loaded along K.
        if len({_lies(a, 1) for a in lefts}) == len({_lies(b, 0) for b in rights}) == 1:
            return lefts, rights
    return [loadable(torch.cat(list(as_), dim=1), by_columns=by_columns)], [
        loadable(torch.cat(list(bs), dim=0))
    ]


def _lies(x: Tensor, inner: int) -> bool:
    """Whether TMA can take a matrix, from an address that it takes, with the elements of ``inner`` side by side."""
    outer = 1 - inner
    whole = x.shape[outer] <= 1 or (x.stride(outer) > 0 and x.stride(outer) % 8 == 0)
    return whole and (x.shape[inner] <= 1 or x.stride(inner) == 1)


def loadable(x: Tensor, *, by_columns: bool = True) -> Tensor:
    """A matrix of 2-byte elements as TMA takes it: the other stride, and the address, multiples of 16 bytes.

    ``by_columns``: columns may be what is contiguous.
    """
    if x.data_ptr() % 16 == 0 and (_lies(x, 1) or (by_columns and _lies(x, 0))):
        return x
    rows, cols = x.shape
    return x.new_empty(rows, -(-cols // 8) * 8)[:, :cols].copy_(x)


def _widened(x: Tensor, columns: int) -> Tensor:
    """The same rows in so many columns, contiguous, from a multiple of 16 bytes on; what is new is never used."""
    if x.shape[1] == columns and x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    wide = x.new_empty(x.shape[0], columns)
    wide[:, : x.shape[1]] = x
    return wide


def _plan(
    op: str,
    group: Group,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    rows: Sequence[int],
    timeout: float,
    launch: Callable[[str, str], None],
) -> Plan | tuple[str, str]:
    """Schedule and tile of a call: left to the op, unless the ranks tune."""
    if not mode.active():
        return "auto", ""
    from tpkernels.tune import fused as tuned

    return tuned.plan(op, group, lefts, rights, rows, timeout, launch)


def inner_shape(shape: Sequence[int], dim: int) -> list[int]:
    """Dimensions between the one of the shards and the last."""
    return [n for d, n in enumerate(shape[:-1]) if d != dim]


def as_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """A matrix with ``dim`` outermost; a copy only where no view exists."""
    if dim == 0 and x.dim() == 2:
        return x
    return x.movedim(dim, 0).reshape(rows, x.shape[-1])


def from_rows(x: Tensor, dim: int, size: int, inner: Sequence[int]) -> Tensor:
    """Back, in the layout of a new tensor."""
    if dim == 0 and len(inner) == 0:
        return x.contiguous()
    return x.reshape(size, *inner, x.shape[1]).movedim(0, dim).contiguous()


def pushable(shard: Tensor) -> Tensor:
    """As the copy engine takes it: elements of a row side by side, rows that do not overlap."""
    rows, k = shard.shape
    if rows == 0:
        return shard.new_empty(0, k)
    if (k > 1 and shard.stride(1) != 1) or (rows > 1 and shard.stride(0) < k):
        return shard.contiguous()
    return shard
