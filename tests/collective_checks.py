"""What the collectives of path "gloo" and "nccl" must give, bit for bit; run on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from op_checks import own, pieces

import tpkernels as tpk
from tpkernels.ops import _collectives, _groups
from tpkernels.testing import poison_

Tensor = torch.Tensor
SHAPES = [((37, 24), 0), ((3, 29, 16), 1), ((5, 7, 9), 0), ((1, 40, 8), 1), ((4, 6, 31), 2), ((2, 1, 12), 1)]


def bits(x: Tensor) -> Tensor:
    """Integers, so that -0 is not 0."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def rank_ordered_sum(partials: list[Tensor], terms: list[Tensor | None], dtype: torch.dtype) -> Tensor:
    """Rounded for the wire, summed in float32 (float64) in rank order, then the terms, rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = partials[0].to(dtype).to(wide)
    for term in [*(partial.to(dtype) for partial in partials[1:]), *terms]:
        total = total if term is None else total + term.to(wide)
    return total.to(dtype)


def _draw(ctx: Any, seed: int) -> Any:
    generator = torch.Generator(ctx.device).manual_seed(seed)  # the same data on every rank
    return lambda *shape: torch.randn(*shape, generator=generator)


def _sizes(total: int, world: int) -> Iterator[list[int]]:
    yield tpk.shard_sizes(total, world)
    yield pieces(total, world, True)
    if total % world == 0:
        yield [0] * (world - 1) + [total]


def _poison(ctx: Any) -> None:
    """What is allocated next is likely to get this memory."""
    for count in (1 << 10, 1 << 14, 1 << 20):
        poison_(torch.empty(count, device=ctx.device))


def _same(actual: Tensor, wanted: Tensor, what: str) -> None:
    assert actual.shape == wanted.shape and actual.dtype == wanted.dtype, (what, actual.shape, actual.dtype)
    assert actual.is_contiguous(), what
    assert torch.equal(bits(actual), bits(wanted.contiguous())), what


def check_reduce_scatter(ctx: Any, dtype: torch.dtype, seed: int) -> None:
    """Every dimension, shards of every kind, partials as wide as the sum or of the wire's dtype, in any layout."""
    draw, group = _draw(ctx, seed), _groups.resolve(ctx.group_name)
    bias_dtypes = [torch.float32, dtype, torch.bfloat16]
    for case, (shape, dim) in enumerate(SHAPES):
        world, columns = ctx.world, dim < len(shape) - 1
        partials = [draw(*shape).to((dtype, torch.float32)[case % 2]) for _ in range(world)]
        bias = draw(shape[-1]).to(bias_dtypes[case % 3]) if columns else None
        residual = draw(*shape).to(dtype) if case % 2 == 0 else None
        wanted = rank_ordered_sum(partials, [bias, residual], dtype)
        for sizes in _sizes(shape[dim], world):
            for strided in (False, True):
                mine = partials[ctx.rank]
                mine = mine.transpose(0, 1).contiguous().transpose(0, 1) if strided else mine
                rows = None if residual is None else own(residual, dim, sizes, ctx.rank)
                _poison(ctx)
                out = _collectives.reduce_scatter(mine, dim, sizes, group, dtype, bias=bias, residual=rows)
                _same(out, own(wanted, dim, sizes, ctx.rank), f"{shape}, dim {dim}, {sizes}, {strided}")


def check_all_reduce(ctx: Any, dtype: torch.dtype, seed: int) -> None:
    """One step and two, blocks that end inside rows, and columns that do not divide a block."""
    draw, group = _draw(ctx, seed), _groups.resolve(ctx.group_name)
    for case, shape in enumerate([(5, 3), (2, 3, 8), (300, 257), (2, 77, 1000), (100_003,), (64, 1024)]):
        partials = [draw(*shape).to((dtype, torch.float32)[case % 2]) for _ in range(ctx.world)]
        bias = draw(shape[-1]) if case % 2 == 0 else draw(shape[-1]).to(dtype)
        for terms in (
            [None, None],
            [bias, None],
            [None, draw(*shape).to(dtype)],
            [bias, draw(*shape).to(dtype)],
        ):
            _poison(ctx)
            out = _collectives.all_reduce_sum(
                partials[ctx.rank], group, dtype, bias=terms[0], residual=terms[1]
            )
            _same(out, rank_ordered_sum(partials, terms, dtype), f"{shape}, {[t is None for t in terms]}")


def check_all_gather(ctx: Any, dtype: torch.dtype, seed: int) -> None:
    """Every dimension, shards of every kind, contiguous or not."""
    draw, group = _draw(ctx, seed), _groups.resolve(ctx.group_name)
    for shape, dim in SHAPES:
        for sizes in [*_sizes(shape[dim], ctx.world), [2] * ctx.world]:
            whole = draw(*shape[:dim], sum(sizes), *shape[dim + 1 :]).to(dtype)
            _poison(ctx)
            gathered = _collectives.all_gather(own(whole, dim, sizes, ctx.rank), dim, sizes, group)
            _same(gathered, whole, f"{shape}, dim {dim}, {sizes}")


def check_graph(ctx: Any, seed: int) -> None:
    """Every collective in one CUDA graph, uneven shards too: nothing waits for the device while it is captured."""
    draw, group, dtype = _draw(ctx, seed), _groups.resolve(ctx.group_name), torch.bfloat16
    uneven = [3 + (rank == 0) for rank in range(ctx.world)]
    partials = [draw(sum(uneven), 40_008).to(dtype) for _ in range(ctx.world)]
    bias = draw(40_008)
    mine = partials[ctx.rank].clone()

    def step() -> list[Tensor]:
        shard = _collectives.reduce_scatter(mine, 0, uneven, group, dtype, bias=bias)
        return [
            shard,
            _collectives.all_gather(shard, 0, uneven, group),
            _collectives.all_reduce_sum(mine, group, dtype, bias=bias),
        ]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = step()
    for _ in range(20):
        partials = [draw(*mine.shape).to(dtype) for _ in range(ctx.world)]
        mine.copy_(partials[ctx.rank])
        for out in outs:
            poison_(out)
        graph.replay()
        whole = rank_ordered_sum(partials, [bias], dtype)
        for out, wanted in zip(outs, (own(whole, 0, uneven, ctx.rank), whole, whole), strict=True):
            _same(out, wanted, "replayed")
