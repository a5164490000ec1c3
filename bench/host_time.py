"""Host time of an eager call: what an operation of ours costs the thread that calls it, beside plain torch.

Tensors are so small that arithmetic and transfers are nothing. Time is the least of many blocks of calls: on CPU the
calling thread's own CPU time, in which waits for other ranks and other programs on the machine do not count, on CUDA
the clock, until calls are enqueued. ``plain`` is what the operation stands for, made of torch's own product,
collectives and autograd: for ranks an autograd.Function by hand, as in Megatron-LM. Its sums over ranks are torch's,
not in rank order.
"""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from .errors import check_known

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OPS", "PASSES", "Times", "measure", "run"]

OPS = (
    "matmul",
    "matmul_gelu",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_replicated",
    "matmul_all_reduce",
    "column_linear",
    "row_linear",
)
PASSES = ("forward", "training")  # without gradients; with, and the backward pass
_SIZE = 16  # rows of a rank, and both sides of every weight
_BLOCK_S = 0.002  # short: a block in which nobody else came in between is what counts


class Times(NamedTuple):
    """Microseconds of one call on one rank."""

    ours: float
    plain: float


class _Pair(NamedTuple):
    """Two functions of the same tensors, of which those that need gradients are ``leaves``."""

    ours: Callable[[], Tensor]
    plain: Callable[[], Tensor]
    leaves: Sequence[Tensor]


def run(
    worlds: Sequence[int],
    ops: Sequence[str],
    backend: str,
    *,
    path: str = "auto",
    seconds: float = 1.0,
    profile: str = "",
    stdout: TextIO,
) -> int:
    """``python -m bench host``: a table of :func:`measure` for every number of ranks, or a profile of one operation.

    Args:
        backend: "gloo" (CPU), "nccl" (CUDA), or "fake": one process on CPU that sends nothing, so that what is left is
            the host's own time.
        seconds: of measuring, for each operation, pass and side.
        profile: operation whose calls cProfile is to watch in place of measuring; "" for none.
    """
    for name in (*ops, *([profile] if profile else [])):
        check_known("--op", name, OPS)
    with _ranks(backend, max(worlds), 120 + 8 * seconds) as on_ranks:
        for world in worlds:
            if profile:
                print(on_ranks(_profiled, world, profile, path)[0], file=stdout)
                continue
            print(f"{world} rank{'s' * (world > 1)} ({backend}), us of the host", file=stdout)
            print(f"{'':24}{'forward':>24}{'forward and backward':>28}", file=stdout)
            print(f"{'':24}" + f"{'ours':>10}{'plain':>8}{'more':>8}" * 2, file=stdout)
            for op in ops or OPS:
                cells = ""
                for times in zip(*on_ranks(measure, world, op, path, seconds), strict=True):
                    ours, plain = max(t.ours for t in times), max(t.plain for t in times)
                    cells += f"{ours:10.1f}{plain:8.1f}{ours - plain:8.1f}"
                print(f"{op:24}{cells}", file=stdout, flush=True)
    return 0


@contextmanager
def _ranks(backend: str, most: int, timeout: float) -> Iterator[Callable[..., list[Any]]]:
    """``f(function, world, *args)``: ``function(RankContext, *args)`` of every rank."""
    import torch
    import torch.distributed as dist

    from tpkernels.testing import RankContext, RankPool

    if backend != "fake":
        with RankPool(most, backend, timeout=timeout) as pool:
            yield lambda function, world, *args: pool.run(function, *args, world=world)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=most)

    def alone(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        group: Any = dist.new_group(list(range(world)))
        here = RankContext(0, world, group, group.group_name, torch.device("cpu"), "fake")
        return [function(here, *args)]

    try:
        yield alone
    finally:
        dist.destroy_process_group()


def measure(ctx: Any, op: str, path: str, seconds: float) -> list[Times]:
    """On one rank of a :class:`~tpkernels.testing.RankPool`: both of :data:`PASSES`. Collective."""
    pair = _pair(op, ctx, path)
    calls = {passes: [_call(f, pair.leaves, passes) for f in (pair.ours, pair.plain)] for passes in PASSES}
    return [Times(*_least(calls[passes], ctx, seconds)) for passes in PASSES]


def _call(function: Callable[[], Tensor], leaves: Sequence[Tensor], passes: str) -> Callable[[], object]:
    import torch

    if passes == "forward":

        def forward() -> None:
            with torch.no_grad():
                function()

        return forward
    out = function()
    dy = torch.ones_like(out)

    def training() -> None:
        for leaf in leaves:
            leaf.grad = None
        function().backward(dy)

    return training


def _least(calls: Sequence[Callable[[], object]], ctx: Any, seconds: float) -> list[float]:
    """Microseconds of each, blocks in turn. All ranks make the same number of calls."""
    import torch
    import torch.distributed as dist

    clock = time.perf_counter_ns if ctx.device.type == "cuda" else time.thread_time_ns
    begin = time.perf_counter()
    for call in calls:
        for _ in range(20):
            call()
    per_call = (time.perf_counter() - begin) / (20 * len(calls))
    counts = torch.tensor([max(5, int(_BLOCK_S / per_call)), int(seconds / _BLOCK_S) + 1], device=ctx.device)
    dist.broadcast(counts, 0, group=ctx.group)
    block, blocks = counts.tolist()
    least = [float("inf")] * len(calls)
    gc.collect()
    gc.disable()
    try:
        for _ in range(blocks):
            for i, call in enumerate(calls):
                ctx.barrier()
                if ctx.device.type == "cuda":
                    torch.cuda.synchronize(ctx.device)
                before = clock()
                for _ in range(block):
                    call()
                least[i] = min(least[i], (clock() - before) / block / 1000)
    finally:
        gc.enable()
    return least


def _profiled(ctx: Any, op: str, path: str) -> str:
    """Where the calling thread's time goes: cProfile's table of forward and backward passes of ours."""
    pair = _pair(op, ctx, path)
    call = _call(pair.ours, pair.leaves, "training")
    for _ in range(50):
        call()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(500):
        call()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
    return text.getvalue()


def _pair(op: str, ctx: Any, path: str) -> _Pair:
    import torch
    from torch.nn import functional as F

    import tpkernels as tpk
    from tpkernels import nn as layers

    group, world = ctx.group, ctx.world
    dtype = torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
    rows = world * _SIZE if op in ("matmul_reduce_scatter", "row_linear") else _SIZE
    x = torch.rand(rows, _SIZE, device=ctx.device, dtype=dtype).requires_grad_()
    w = torch.rand(_SIZE, _SIZE, device=ctx.device, dtype=dtype).requires_grad_()
    by_hand = _by_hand(group, world)
    leaves = [x, w]
    if op == "matmul":
        return _Pair(lambda: tpk.matmul(x, w.t(), path=path), lambda: F.linear(x, w), leaves)
    if op == "matmul_gelu":
        bias = torch.rand(_SIZE, device=ctx.device, dtype=dtype).requires_grad_()
        return _Pair(
            lambda: tpk.matmul(x, w.t(), bias=bias, activation="gelu", path=path),
            lambda: F.gelu(F.linear(x, w, bias)),
            [*leaves, bias],
        )
    if op in ("column_linear", "row_linear"):
        kind = layers.ColumnParallelLinear if op == "column_linear" else layers.RowParallelLinear
        layer: Any = kind(
            *_whole(op, world),
            group=group,
            bias=False,
            sequence_parallel=True,
            device=ctx.device,
            dtype=dtype,
            path=path,
        )
        plain = by_hand["all_gather_matmul" if op == "column_linear" else "matmul_reduce_scatter"]
        weight = layer.weight
        return _Pair(lambda: layer(x), lambda: plain(x, weight), [x, weight])
    ours: Callable[..., Tensor] = getattr(tpk, op)
    return _Pair(lambda: ours(x, w.t(), group, path=path), lambda: by_hand[op](x, w), leaves)


def _whole(op: str, world: int) -> Iterator[int]:
    """in_features and out_features of all ranks together."""
    sides = (_SIZE, world * _SIZE)
    return iter(sides if op == "column_linear" else sides[::-1])


def _by_hand(group: Any, world: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """What the operations stand for."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    # torch 2.14 renamed them; both names are the same collectives.
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def gather(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] * world, x.shape[1])
        gather_single(out, x, group=group)
        return out

    def scatter(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] // world, x.shape[1])
        scatter_single(out, x, group=group)
        return out

    def reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return F.linear(gather(x), w)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return scatter(dy @ w), dy.t() @ gather(x)

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return scatter(F.linear(x, w))

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            whole = gather(dy)
            return whole @ w, whole.t() @ x

    class Replicated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return F.linear(x, w)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return reduce(dy @ w), dy.t() @ x

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return reduce(F.linear(x, w))

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return dy @ w, dy.t() @ x

    return {
        "all_gather_matmul": Gather.apply,
        "matmul_reduce_scatter": Scatter.apply,
        "matmul_replicated": Replicated.apply,
        "matmul_all_reduce": Sum.apply,
    }
