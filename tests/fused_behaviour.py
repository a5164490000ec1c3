"""How path "fused" behaves: repeats, streams, groups, errors, a rank that stalls.

Run on the ranks of a pool, as fused_checks; what works without a GPU is tried on gloo ranks too.
"""

from __future__ import annotations

import gc
import io
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from few_rows import overlaps
from fused_checks import FUSED, Call, Case, gather_call, new_group, rows_of_ranks, scatter_call
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.comm import workspace
from tpkernels.testing import poison_

Tensor = torch.Tensor
BF16 = torch.bfloat16


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the comparison of arguments, which waits for the device at every call and keeps ranks together."""
    before = os.environ.get("TPK_CHECK", "0")
    os.environ["TPK_CHECK"] = "0"
    try:
        yield
    finally:
        os.environ["TPK_CHECK"] = before


def delay(ctx: Any, draw: random.Random) -> None:
    """Now and then the host, or the device, is late."""
    kind = draw.random()
    if kind < 0.1:
        time.sleep(draw.uniform(0, 0.003))
    elif kind < 0.3 and ctx.device.type == "cuda":
        torch.cuda._sleep(draw.randrange(1_000_000))  # up to about 0.6 ms


def synchronize(ctx: Any) -> None:
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()


def differs(actual: Tensor, first: Tensor) -> Tensor:
    """Whether a bit does, as a tensor, so that nobody waits."""
    bits = {2: torch.int16, 4: torch.int32}[first.element_size()]
    return (actual.view(bits) != first.view(bits)).any()


def mixed_calls(ctx: Any, path: str, seed: int) -> list[Call]:
    """Both operations, several shapes, and each with two sets of data: what is left of another call shows."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    rows = rows_of_ranks(ctx.world)
    several = {"k": 200, "ns": (72, 130), "bias": True, "gathered": True}
    some = [
        (gather_call, Case(rows[0], k=328, ns=(264,))),
        (gather_call, Case(rows[1], **several)),
        (gather_call, Case(rows[4], k=64)),
        (scatter_call, Case(rows[0], k=136, ns=(264,), bias=True)),
        (scatter_call, Case(rows[1], k=65, ns=(130,), residual=True)),
        (scatter_call, Case(rows[3], k=264, ns=(97,))),
    ]
    return [make(ctx, path, BF16, case, generator, False) for make, case in some for _ in range(2)]


def first_results(calls: list[Call]) -> list[list[Tensor]]:
    firsts = []
    for call in calls:
        firsts.append(call.run())
        call.verify(firsts[-1])
    return firsts


Made = tuple[Callable[[], list[Tensor]], list[Tensor]]  # a call, and what it gives, to the bit


def poison_shared(ctx: Any) -> None:
    """NaN where peers will write: enqueued in front of a call, and they write once that has begun.

    Not in memory of few rows, which they may write to a call earlier.
    """
    for (name, _, kind), space in workspace._spaces.items():
        if name == ctx.group_name and kind != "small":
            space.memory[workspace.PAGE_BYTES :].fill_(0xFF)


def repeat(ctx: Any, calls: list[Made], iterations: int, seed: int) -> None:
    """In random order, late ranks, poisoned results and shared memory: the same bits, every time."""
    together, alone = random.Random(seed), random.Random(seed + 1 + ctx.rank)
    wrong = torch.zeros(len(calls), dtype=torch.int64, device=ctx.device)
    with unchecked():
        for _ in range(iterations):
            pick = together.randrange(len(calls))
            delay(ctx, alone)
            if alone.random() < 0.5:
                poison_shared(ctx)
            run, wants = calls[pick]
            for out, want in zip(run(), wants, strict=True):
                wrong[pick] += differs(out, want)
                poison_(out)
        synchronize(ctx)
    assert not wrong.any(), f"wrong results of {iterations} calls, by kind: {wrong.tolist()}"


@overlaps()
def check_repeats(ctx: Any, path: str, iterations: int, seed: int) -> None:
    """Gathers and reduce-scatters that overlap."""
    calls = mixed_calls(ctx, path, seed)
    repeat(ctx, [(c.run, f) for c, f in zip(calls, first_results(calls), strict=True)], iterations, seed)


@overlaps()
def check_two_streams(ctx: Any, path: str, rounds: int, seed: int) -> None:
    """Two streams use one group in turn, each of them late now and then: never a race."""
    calls = mixed_calls(ctx, path, seed)[::2][:5]  # five calls over two streams: each meets both
    firsts = first_results(calls)
    torch.cuda.synchronize()
    streams, alone = [torch.cuda.Stream(), torch.cuda.Stream()], random.Random(seed + 1 + ctx.rank)
    wrong = [torch.zeros((), dtype=torch.int64, device=ctx.device) for _ in streams]
    torch.cuda.synchronize()
    with unchecked():
        for i in range(rounds):
            lane = (i + ctx.rank) % 2  # the ranks need not agree on streams
            with torch.cuda.stream(streams[lane]):
                delay(ctx, alone)
                for out, first in zip(calls[i % 5].run(), firsts[i % 5], strict=True):
                    wrong[lane] += differs(out, first)
                    poison_(out)
        torch.cuda.synchronize()
    assert not any(wrong), f"{[int(each) for each in wrong]} of {rounds} calls gave wrong results"


@overlaps()
def check_two_groups(ctx: Any, path: str, rounds: int, seed: int) -> None:
    """Ranks as a grid: everyone takes part in a group of its row and one of its column, with calls in both."""
    half = ctx.world // 2
    grid = [list(range(half)), list(range(half, ctx.world))], [[r, r + half] for r in range(half)]
    mine = []
    for line, direction in enumerate(grid):
        for ranks in direction:
            group = new_group(ctx, ranks)  # by every rank of the pool, in one order
            if ctx.rank in ranks:
                place = {"rank": ranks.index(ctx.rank), "world": len(ranks)}
                here = replace(ctx, group=group, group_name=group.group_name, **place)
                mine.append(mixed_calls(here, path, seed + 10 * line + ranks[0]))
    firsts = [first_results(calls) for calls in mine]
    together, alone = random.Random(seed), random.Random(seed + 1 + ctx.rank)
    wrong = torch.zeros(2, dtype=torch.int64, device=ctx.device)
    with unchecked():
        for _ in range(rounds):
            line, pick = together.randrange(2), together.randrange(len(mine[0]))
            delay(ctx, alone)
            for out, first in zip(mine[line][pick].run(), firsts[line][pick], strict=True):
                wrong[line] += differs(out, first)
                poison_(out)
        synchronize(ctx)
    assert not wrong.any(), f"wrong results in the groups of rows and columns: {wrong.tolist()}"


@overlaps()
def check_groups_come_and_go(ctx: Any, path: str, times: int, seed: int) -> None:
    """Memory of a group is freed with it. A rank that is late between the exchange and its first call harms nobody."""
    generator = torch.Generator(ctx.device).manual_seed(seed)

    def once(late: float) -> None:
        group = new_group(ctx, list(range(ctx.world)), backend="gloo")  # what NCCL keeps is not ours
        here = replace(ctx, group=group, group_name=group.group_name)
        if ctx.rank == ctx.world - 1:
            time.sleep(late)
        for make in (gather_call, scatter_call):
            case = Case((1024,) * ctx.world, k=1024, ns=(1024,))  # megabytes, so that a leak shows
            call = make(here, path, BF16, case, generator, True)
            call.verify(call.run())
        synchronize(ctx)
        ctx.barrier()
        dist.destroy_process_group(group)

    def free() -> int:
        gc.collect()
        # Whatever is freed lazily, at the latest in the next call.
        tpk.all_gather_matmul(torch.ones(8, 8).to(BF16), torch.ones(8, 8).to(BF16), ctx.group, path=path)
        if ctx.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        ctx.barrier()  # every rank that shares this GPU has freed what it had
        return torch.cuda.mem_get_info()[0]

    with unchecked():
        for late in (1.0, 0.0, 0.0):
            once(late)
        before = free()
        ctx.barrier()
        for _ in range(times):
            once(0.0)
        lost = before - free()
    # Each group has two buffers of 2 MiB for every rank in it.
    assert lost < 64 << 20, f"{lost >> 20} MiB are gone after {times} groups"


@overlaps()
def check_beside_collectives(ctx: Any, path: str, rounds: int, seed: int) -> None:
    """Another communicator is at work on the same devices, on a stream of its own: nobody waits for ever."""
    calls = mixed_calls(ctx, path, seed)
    firsts = first_results(calls)
    other, side = new_group(ctx, list(range(ctx.world))), torch.cuda.Stream()
    data = torch.full((1 << 22,), float(ctx.rank))
    torch.cuda.synchronize()
    together, alone = random.Random(seed), random.Random(seed + 1 + ctx.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    with unchecked():
        for _ in range(rounds):
            with torch.cuda.stream(side):
                delay(ctx, alone)
                dist.all_reduce(data, op=dist.ReduceOp.MAX, group=other)
            pick = together.randrange(len(calls))
            for out, first in zip(calls[pick].run(), firsts[pick], strict=True):
                wrong += differs(out, first)
                poison_(out)
        torch.cuda.synchronize()
    assert not wrong, f"{int(wrong)} wrong results"
    assert bool((data == ctx.world - 1).all())


# Errors


def check_disagreement(ctx: Any, path: str) -> None:
    """Under TPK_CHECK=1 ranks that disagree all get an error, nobody hangs, and the path still works."""
    group, odd = ctx.group, ctx.rank == ctx.world - 1
    ones = lambda *shape: torch.ones(*shape, dtype=BF16)  # noqa: E731
    mismatch = tpk.errors.MismatchError
    k, n = (16, 24) if odd else (8, 16)
    gather, scatter = tpk.all_gather_matmul, tpk.matmul_reduce_scatter
    expect(mismatch, ["shape", "gather_dim"], lambda: gather(ones(8, k), ones(k, 8), group, path=path))
    expect(mismatch, ["shard_sizes"], lambda: gather(ones(k, 8), ones(8, 8), group, path=path))
    expect(mismatch, ["product's shape"], lambda: scatter(ones(8, 8), ones(8, n), group, path=path))
    expect(
        mismatch,
        ["operation"],
        lambda: (gather if odd else scatter)(ones(8, 8), ones(8, 8), group, path=path),
    )
    if path == FUSED:  # whose other ranks would wait for ever
        mixed = "auto" if odd else path
        for op in (gather, scatter):
            expect(mismatch, ["path 'fused'"], lambda op=op: op(ones(8, 8), ones(8, 8), group, path=mixed))
    total = scatter(ones(8 * ctx.world, 8), ones(8, 16), group, path=path)
    assert torch.equal(total, torch.full((8, 16), 8.0 * ctx.world, dtype=BF16))


def check_refused(ctx: Any, dtype: torch.dtype, words: list[str]) -> None:
    """A forced path that cannot run says why."""
    x, w = torch.ones(8, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
    for op in (tpk.all_gather_matmul, tpk.matmul_reduce_scatter):
        expect(tpk.errors.BackendError, [FUSED, *words], lambda op=op: op(x, w, ctx.group, path=FUSED))


# What the others then wait for, in the words of the message.
STALLS = {
    "gather": "to begin the same call",
    "scatter": "to begin the same call",
    "small": "of an all-reduce",
    "small gather": "rows of a gather",
    "small scatter": "of a reduce-scatter",
}

_TOLD = "was stopped; its last call is"  # by tpkernels/comm/watchdog.py


def check_stalled(ctx: Any, kind: str) -> tuple[str, float, str]:
    """The last rank stops calling: the others tell, and raise. The process is spent.

    Returns the message, the seconds, and what was on stderr before the call that raised.
    """
    x, w = torch.ones(64, 64, dtype=BF16), torch.ones(64, 72, dtype=BF16)

    def call() -> Tensor:
        if kind.endswith("scatter"):
            return tpk.matmul_reduce_scatter(x, w, ctx.group, path=FUSED)
        if kind == "small":
            return tpk.matmul_all_reduce(x, w, ctx.group, path=FUSED)
        return tpk.all_gather_matmul(x, w, ctx.group, path=FUSED)

    with nullcontext() if kind.startswith("small") else overlaps():
        return _stalled(ctx, call)


def _stalled(ctx: Any, call: Callable[[], Tensor]) -> tuple[str, float, str]:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    ctx.barrier()
    if ctx.rank == ctx.world - 1:
        return "", 0.0, ""
    begin, told = time.monotonic(), io.StringIO()
    try:
        with redirect_stderr(told):
            for _ in range(2):
                call()
            longest = float(os.environ["TPK_COMM_TIMEOUT_S"]) + 10
            while _TOLD not in told.getvalue() and time.monotonic() - begin < longest:
                time.sleep(0.05)  # this thread is busy elsewhere
        tpk.synchronize()
    except tpk.errors.CommTimeoutError as error:
        seconds = time.monotonic() - begin
        expect(tpk.errors.CommTimeoutError, ["expected"], call)  # it stays so
        return str(error), seconds, told.getvalue()
    raise AssertionError(
        f"two calls ended without rank {ctx.world - 1}, or nobody was told that they did not"
    )


def judge_stalled(kind: str, answers: list[tuple[str, float, str]], limit: float) -> None:
    """In the test's process: what check_stalled returned on every rank."""
    stalled = len(answers) - 1
    for rank, (message, seconds, told) in enumerate(answers[:-1]):
        assert STALLS[kind] in message and f"rank {stalled}" in message.lower(), message
        flag = re.search(r"its flag is (\d+), expected (\d+)", message)
        behind = 2 if kind == "small" else 1  # packets lie in two halves in turn
        assert flag is not None and int(flag[1]) == int(flag[2]) - behind, message
        assert 0.5 * limit < seconds < limit + 20, f"{seconds:.1f} s, the limit is {limit} s"
        # Once, while nothing was called.
        assert told.count(_TOLD) == 1, f"rank {rank} told {told!r}"
        assert f"on rank {rank} of {len(answers)}" in told and message[message.index("CTA ") :] in told, told
