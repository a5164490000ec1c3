"""Path "fused" in CUDA graphs, and the memory that a capture cannot allocate; run on the ranks of a pool."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from few_rows import overlaps
from fused_behaviour import delay, differs, first_results, mixed_calls, unchecked
from fused_checks import FUSED, new_group
from gemm_checks import randn
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.testing import poison_

Tensor = torch.Tensor
BF16 = torch.bfloat16


def _chain(ctx: Any, path: str, rows: int, k: int, n: int, seed: int) -> tuple[Tensor, Any]:
    """A static shard and a step of both operations on it."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    x = randn(rows, k, dtype=BF16, generator=generator)
    w1, w2 = (
        randn(ctx.world, *shape, dtype=BF16, generator=generator)[ctx.rank] for shape in ((n, k), (k, n))
    )

    def step() -> Tensor:
        y = tpk.all_gather_matmul(x, w1.t(), ctx.group, path=path, activation="relu")
        return tpk.matmul_reduce_scatter(y, w2.t(), ctx.group, path=path)

    return x, step


def _captured(step: Any) -> tuple[Any, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    return graph, out


def _grow(ctx: Any, path: str, mebibytes: int) -> None:
    """A call of each operation that needs more memory than any before, hopefully."""
    rows, wide = 16384 // ctx.world, mebibytes * 32  # in all mebibytes << 20 bytes of 16-bit elements
    x, w = torch.ones(rows, wide, dtype=BF16), torch.ones(wide, 8, dtype=BF16)
    assert bool((tpk.all_gather_matmul(x, w, ctx.group, path=path) == wide).all())
    x, w = torch.ones(rows * ctx.world, 8, dtype=BF16), torch.ones(8, wide, dtype=BF16)
    assert bool((tpk.matmul_reduce_scatter(x, w, ctx.group, path=path) == 8 * ctx.world).all())


@overlaps()
def check_graphs(ctx: Any, path: str, replays: int, seed: int) -> None:
    """Two captured steps, replayed with new data in random order, between eager calls of other shapes.

    Half-way the memory has to grow, and the graphs still use what they were captured with.
    """
    chains = [_chain(ctx, path, rows, k, n, seed) for rows, k, n in ((100, 136, 200), (64, 264, 72))]
    others = mixed_calls(ctx, path, seed)
    firsts = first_results(others)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _, step in chains:
            step()
    torch.cuda.current_stream().wait_stream(side)
    graphs = [_captured(step) for _, step in chains]
    together, alone = random.Random(seed), random.Random(seed + 1 + ctx.rank)
    data = torch.Generator(ctx.device).manual_seed(seed + 1 + ctx.rank)
    wrong = torch.zeros(2, dtype=torch.int64, device=ctx.device)
    with unchecked():
        for _ in range(replays):
            pick, eager, other = (
                together.randrange(2),
                together.random() < 0.5,
                together.randrange(len(others)),
            )
            (x, step), (graph, out) = chains[pick], graphs[pick]
            x.copy_(randn(*x.shape, dtype=BF16, generator=data))
            if eager:
                for got, first in zip(others[other].run(), firsts[other], strict=True):
                    wrong[0] += differs(got, first)
            delay(ctx, alone)
            poison_(out)
            for _ in range(together.randrange(1, 3)):
                graph.replay()
            wrong[1] += differs(step(), out)
        torch.cuda.synchronize()
    assert not wrong.any(), f"of {replays} rounds, wrong: eager calls {wrong[0]}, replays {wrong[1]}"


@overlaps()
def check_capture_needs_memory(ctx: Any, path: str, seed: int) -> None:
    """Neither the first use of a group nor growth may happen in a capture; afterwards everything still works."""
    group = new_group(ctx, list(range(ctx.world)))
    here = replace(ctx, group=group, group_name=group.group_name)
    beside = torch.zeros(8)
    for rows, k, n in (
        (16, 64, 72),
        (65536 // ctx.world, 2048, 72),
    ):  # the second needs 256 MiB for each operation
        _, step = _chain(here, path, rows, k, n, seed)
        a, b = torch.ones(rows * ctx.world, n, dtype=BF16), torch.ones(n, k, dtype=BF16)
        scatter = partial(tpk.matmul_reduce_scatter, a, b, group, path=path)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            beside.add_(1)  # a graph must not be empty
            expect(tpk.errors.BackendError, [FUSED, "captur"], step)
            expect(tpk.errors.BackendError, [FUSED, "captur"], scatter)
        want = step()
        _replays_give(*_captured(step), want)
    _destroy(ctx, group)


@overlaps()
def check_reserve(ctx: Any, path: str, seed: int) -> None:
    """With memory reserved the first call may be in a capture."""
    group = new_group(ctx, list(range(ctx.world)))
    _, step = _chain(replace(ctx, group=group, group_name=group.group_name), path, 200, 328, 72, seed)
    tpk.reserve(group, max_m=200 * ctx.world, k=328, n=328)
    captured = _captured(step)
    _replays_give(*captured, step())
    _destroy(ctx, group)


def _replays_give(graph: Any, out: Tensor, want: Tensor) -> None:
    for _ in range(3):
        poison_(out)
        graph.replay()
        assert torch.equal(out, want)


def _destroy(ctx: Any, group: Any) -> None:
    """Once every rank is done with it."""
    torch.cuda.synchronize()
    ctx.barrier()
    dist.destroy_process_group(group)
