"""What users of other libraries for overlapped products reported, tried here; run on the ranks of a pool.

Which report is tried where: tests/cpu/test_reports_are_tried.py.

Results are exact in bfloat16 whoever multiplies and sums: a row of an operand has one element that is not zero.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from fused_behaviour import synchronize, unchecked
from fused_checks import FUSED, Case, gather_call, new_group, overlaps, scatter_call
from gemm_checks import differences, integers, randn
from op_behaviour import expect
from op_checks import own, pieces

import tpkernels as tpk
from tpkernels.comm import runtime
from tpkernels.nn import ColumnParallelLinear, RowParallelLinear
from tpkernels.testing import poison_

Tensor = torch.Tensor
BF16 = torch.bfloat16


class _Sparse:
    """[m, k] with one number from -2 to 2 in each row; ``times(w)`` needs no product."""

    def __init__(self, m: int, k: int, generator: torch.Generator) -> None:
        self.columns = torch.randint(k, (m,), generator=generator, device=generator.device)
        self.values = integers(m, dtype=BF16, generator=generator)
        self.matrix = torch.zeros(m, k, dtype=BF16, device=generator.device)
        self.matrix.scatter_(1, self.columns.unsqueeze(1), self.values.unsqueeze(1))

    def times(self, w: Tensor) -> Tensor:
        return w[self.columns].float() * self.values.float().unsqueeze(1)


def check_lengths(ctx: Any, path: str, rounds: int, seed: int) -> None:
    """Another number of tokens in every call, also none, one, and fewer than ranks; other layers, too; no waiting.

    Memory that is shared grows on the way, and what an earlier call left there must not show.
    """
    generator, together = torch.Generator(ctx.device).manual_seed(seed), random.Random(seed)
    ops = (tpk.all_gather_matmul, tpk.matmul_reduce_scatter, tpk.matmul_all_reduce)
    wrong = torch.zeros(3, dtype=torch.int64, device=ctx.device)
    with unchecked():
        for i in range(rounds):
            few = together.choice([0, 1, 2, ctx.world - 1, ctx.world + 1, together.randrange(100)])
            m = together.choice([few, together.randrange(1000), together.randrange(20 * (i + 2))])
            n, k = (together.choice([1, 8, 97, together.randrange(1, 600)]) for _ in "nk")
            pick, sizes = together.randrange(3), tpk.shard_sizes(m, ctx.world)
            xs = [_Sparse(m, k, generator) for _ in range(ctx.world if pick else 1)]
            ws = [integers(k, n, dtype=BF16, generator=generator, most=8) for _ in range(ctx.world)]
            if pick == 0:
                x, want = own(xs[0].matrix, 0, sizes, ctx.rank), xs[0].times(ws[ctx.rank])
                out = tpk.all_gather_matmul(x, ws[ctx.rank], ctx.group, shard_sizes=sizes, path=path)
            else:
                x, want = xs[ctx.rank].matrix, torch.zeros(m, n, device=ctx.device)
                for each, w in zip(xs, ws, strict=True):
                    want += each.times(w)
                want = own(want, 0, sizes, ctx.rank) if pick == 1 else want
                out = ops[pick](x, ws[ctx.rank], ctx.group, path=path)
            assert out.shape == want.shape, (ops[pick].__name__, m, n, k)
            wrong[pick] += (out != want).any()
            poison_(out)
    counts = dict(zip((op.__name__ for op in ops), wrong.tolist(), strict=True))
    assert not any(counts.values()), f"wrong results of {rounds} calls: {counts}"


@overlaps()
def check_widest_scatter(ctx: Any, path: str, seed: int) -> None:
    """8192 x 16384 from 53248 over all ranks: the other half of the layer on which another library hung."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    case = Case((8192 // ctx.world,) * ctx.world, k=53_248 // ctx.world, ns=(16_384,))
    call = scatter_call(ctx, path, BF16, case, generator, True)
    call.verify(call.run())


def check_huge_sum(ctx: Any, path: str, seed: int, most: int = 2**31) -> None:
    """An all-reduce of more than ``most`` elements, in which 32-bit offsets would not do."""
    n = 16_448 if most > 2**20 else 328
    m = most // n + 101
    generator = torch.Generator(ctx.device).manual_seed(seed)
    xs = [_Sparse(m, 64, generator) for _ in range(ctx.world)]
    ws = [integers(64, n, dtype=BF16, generator=generator, most=8) for _ in range(ctx.world)]
    bias = integers(n, dtype=BF16, generator=generator)
    out = tpk.matmul_all_reduce(xs[ctx.rank].matrix, ws[ctx.rank], ctx.group, bias=bias, path=path)
    assert out.shape == (m, n) and out.numel() > most
    for begin in range(0, m, 4096):
        part = slice(begin, min(begin + 4096, m))
        want = bias.float() + sum(
            w[x.columns[part]].float() * x.values[part].float().unsqueeze(1)
            for x, w in zip(xs, ws, strict=True)
        )
        different = differences(out[part], want.to(BF16))
        assert not different, f"rows from {begin}: {different}"


def check_layers_come_and_go(ctx: Any, path: str, times: int) -> None:
    """Memory of a device stays as it is while layers are made, trained for a step and dropped."""
    x = torch.ones(256, 512, dtype=BF16)

    def once() -> None:
        options: dict[str, Any] = {"bias": True, "sequence_parallel": True, "dtype": BF16, "path": path}
        up = ColumnParallelLinear(512, 768, group=ctx.group, **options)
        down = RowParallelLinear(768, 512, group=ctx.group, **options)
        down(up(x)).sum().backward()

    def used() -> int:
        gc.collect()
        if ctx.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        ctx.barrier()  # others on this GPU have freed what they had
        return torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]

    for _ in range(3):
        once()
    before = used()
    for _ in range(times):
        once()
    assert used() - before < 8 << 20, f"{(used() - before) >> 20} MiB more after {times} times two layers"


def check_dimensions(ctx: Any, path: str, seed: int) -> None:
    """Shards along every dimension of 3-D and 4-D operands, counted from either end; the last one is refused."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    for others, uneven in product([(5,), (2, 3)], [False, True]):
        sizes = pieces(4 * ctx.world, ctx.world, uneven)
        for axis in range(len(others) + 1):
            shape = (*others[:axis], sum(sizes), *others[axis:])
            _check_dimension(ctx, path, shape, axis, sizes, generator)
    x, w = torch.ones(3, 4, 8, dtype=BF16), torch.ones(8, 8, dtype=BF16)
    for op, name in ((tpk.all_gather_matmul, "gather_dim"), (tpk.matmul_reduce_scatter, "scatter_dim")):
        for dim in (-1, 2):
            call = lambda op=op, name=name, dim=dim: op(x, w, ctx.group, path=path, **{name: dim})  # noqa: E731
            expect(tpk.errors.ArgumentError, [name, "which is K"], call)


def _check_dimension(
    ctx: Any, path: str, shape: tuple[int, ...], axis: int, sizes: list[int], generator: torch.Generator
) -> None:
    k, n, rank = 24, 40, ctx.rank
    xs = [_Sparse(math.prod(shape), k, generator) for _ in range(ctx.world)]
    ws = [integers(k, n, dtype=BF16, generator=generator, most=8) for _ in range(ctx.world)]
    shard, mine = (x.matrix.view(*shape, k) for x in (xs[0], xs[rank]))
    shard, want = own(shard, axis, sizes, rank), xs[0].times(ws[rank]).view(*shape, n)
    total = sum(x.times(w).view(*shape, n) for x, w in zip(xs, ws, strict=True))
    shards = None if len(set(sizes)) == 1 else sizes
    for dim, long in product((axis, axis - len(shape) - 1), (False, True)):
        what = f"dimension {dim} of {shape}, {sizes}, {'overlapped' if long else 'as it comes'}"
        with overlaps() if long else nullcontext():
            out = tpk.all_gather_matmul(
                shard, ws[rank], ctx.group, gather_dim=dim, shard_sizes=shards, path=path
            )
            different = differences(out, want.to(BF16))
            assert not different, f"gather, {what}: {different}"
            out = tpk.matmul_reduce_scatter(
                mine, ws[rank], ctx.group, scatter_dim=dim, shard_sizes=shards, path=path
            )
            different = differences(out, own(total, axis, sizes, rank).to(BF16))
            assert not different, f"scatter, {what}: {different}"


# Hidden size, of the feed-forward, columns of q, k and v together.
MODELS = {
    "llama8b": (4096, 14336, 6144),
    "llama70b": (8192, 28672, 10240),
    "qwen32b": (5120, 25600, 10240),
    "gpt3": (12288, 49152, 36864),
}


def check_layers_of_models(ctx: Any, path: str, rounds: int, seed: int, scale: int = 1) -> None:
    """All products of transformer layers, one behind the other, with other lengths, and nobody waits in between.

    scale: by what every size is divided.
    """
    generator, together = torch.Generator(ctx.device).manual_seed(seed), random.Random(seed)
    wrong = torch.zeros(len(MODELS), dtype=torch.int64, device=ctx.device)
    with unchecked():
        for i in range(rounds):
            pick = i % len(MODELS)
            hidden, wide, qkv = (size // scale for size in list(MODELS.values())[pick])
            m = -(-together.choice([1, 96, 777, 2048, 4096]) // scale)
            sizes = tpk.shard_sizes(m, ctx.world)
            for k, ns in ((hidden, [qkv]), (hidden, [wide, wide])):
                x = _Sparse(m, k, generator)
                ws = [integers(k, n // ctx.world, dtype=BF16, generator=generator, most=8) for n in ns]
                shard = own(x.matrix, 0, sizes, ctx.rank)
                outs = tpk.all_gather_matmul(shard, ws, ctx.group, shard_sizes=sizes, path=path)
                for out, w in zip(outs, ws, strict=True):
                    wrong[pick] += (out != x.times(w)).any()
            for k in (hidden, wide):
                xs = [_Sparse(m, k // ctx.world, generator) for _ in range(ctx.world)]
                w = integers(k // ctx.world, hidden, dtype=BF16, generator=generator, most=8)
                out = tpk.matmul_reduce_scatter(xs[ctx.rank].matrix, w, ctx.group, path=path)
                total = sum(own(x.times(w), 0, sizes, ctx.rank) for x in xs)
                wrong[pick] += (out != total).any()
        synchronize(ctx)
    counts = dict(zip(MODELS, wrong.tolist(), strict=True))
    assert not any(counts.values()), f"wrong results of {rounds} layers, by model: {counts}"


@contextmanager
def _late(step: str, seconds: float) -> Iterator[None]:
    """This rank takes longer for a step of the runtime."""
    usual = getattr(runtime.active, step)

    def late(*args: Any) -> Any:
        result = usual(*args)
        time.sleep(seconds)
        return result

    setattr(runtime.active, step, late)
    try:
        yield
    finally:
        delattr(runtime.active, step)


def check_a_rank_late_with_its_memory(ctx: Any, path: str, seconds: float, seed: int) -> None:
    """Late behind each step of making shared memory, or between that and the first call: nobody writes too early."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    for turn, step in enumerate(("allocate", "map_ranks", "warm_up", "")):
        group = new_group(ctx, list(range(ctx.world)), backend="gloo")
        here = replace(ctx, group=group, group_name=group.group_name)
        late = ctx.rank == turn % ctx.world
        with unchecked():
            ctx.barrier()
            begin = time.monotonic()
            with _late(step, seconds) if late and step else nullcontext():
                tpk.reserve(group, max_m=64 * ctx.world, k=72, n=72)
            if step:  # three times: memory of few rows, of gathers and of scatters
                assert time.monotonic() - begin >= 3 * seconds, f"not all ranks had finished {step!r}"
            if late and not step:
                time.sleep(seconds)
            for context in (nullcontext, overlaps):
                for make in (gather_call, scatter_call):
                    with context():
                        case = Case((64,) * ctx.world, k=72, ns=(72,))
                        call = make(here, path, BF16, case, generator, True)
                        call.verify(call.run())
        synchronize(ctx)
        ctx.barrier()
        dist.destroy_process_group(group)


def check_training(ctx: Any, path: str, plain: str, steps: int, seed: int, exact: bool) -> None:
    """Two layers trained on path and on plain, from the same weights, lengths that change; exact: to the bit."""
    losses = []
    for each in (path, plain):
        generator = torch.Generator(ctx.device).manual_seed(seed)
        options: dict[str, Any] = {
            "group": ctx.group,
            "sequence_parallel": True,
            "dtype": BF16,
            "path": each,
            "seed": seed,
        }
        up = ColumnParallelLinear(64, 96 * ctx.world, activation="gelu", **options)
        down = RowParallelLinear(96 * ctx.world, 64, **options)
        parameters = [*up.parameters(), *down.parameters()]
        wanted, seen = randn(64, 64, dtype=BF16, generator=generator) / 8, []
        for step in range(steps):
            rows = 8 * ctx.world * (1 + step % 3)
            whole = randn(rows, 64, dtype=BF16, generator=generator)
            x = own(whole, 0, [rows // ctx.world] * ctx.world, ctx.rank)
            with tpk.record_paths() as log:
                loss = (down(up(x)) - x @ wanted).float().square().sum() / rows
                loss.backward()
            if each.startswith(FUSED):
                ops = {op for op, run in log.counts if run.startswith(FUSED)}
                assert {"all_gather_matmul", "matmul_reduce_scatter"} <= ops, log
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            seen.append(tpk.regions.all_reduce(loss.detach(), ctx.group))
        losses.append(torch.stack(seen))
    got, want = losses
    assert want[-3:].mean() < 0.7 * want[:3].mean(), f"it does not learn: {want.tolist()}"
    if exact:
        assert torch.equal(got, want), f"{(got - want).tolist()}"
    assert bool(((got - want).abs() <= 0.02 * want).all()), f"{got.tolist()}, {want.tolist()}"


def check_not_slower(ctx: Any, plain: str, m: int, hidden: int, most: float) -> None:
    """Path "auto" takes no more than ``most`` times what plain takes: medians, of the slowest rank."""
    wide, ones = hidden // ctx.world, lambda *shape: torch.ones(*shape, dtype=BF16)
    x, w, y, v = ones(m // ctx.world, hidden), ones(hidden, wide), ones(m, wide), ones(wide, hidden)
    calls = {
        "gather": lambda path: tpk.all_gather_matmul(x, w, ctx.group, path=path),
        "scatter": lambda path: tpk.matmul_reduce_scatter(y, v, ctx.group, path=path),
    }
    with unchecked():
        for name, call in calls.items():
            times: dict[str, list[float]] = {"auto": [], plain: []}
            for _ in range(7):
                for path, some in times.items():
                    some.append(runtime.active.elapsed_us(lambda call=call, path=path: call(path), 10))
            mine = [statistics.median(some) for some in times.values()]
            everyone = [[0.0, 0.0]] * ctx.world
            dist.all_gather_object(everyone, mine, group=ctx.group)
            auto, other = (max(some) for some in zip(*everyone, strict=True))
            assert auto <= most * other, f"{name}: {auto:.0f} us, {plain} {other:.0f}"
