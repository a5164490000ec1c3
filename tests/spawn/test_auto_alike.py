"""Path "auto" among gloo ranks: all of them take the same, which rank 0 writes into memory that they share."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import op_checks
import pytest
import torch
from auto_fakes import BF16, F32, OPS, machine_of, members, on_gloo, operands, same_everywhere
from fused_behaviour import unchecked
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.comm import auto, choice, verdicts
from tpkernels.comm import ranks as ranks_module
from tpkernels.comm.choice import Overlap


def _fused(op):
    """What path "fused" takes here: all-reduces are one kernel behind any product, others overlap."""
    return "fused+blas" if op == choice.SUM else "fused+streamk"


def _alike(ctx):
    """Rank 0 chooses for all, whatever they would by constants of their own, or by columns that not all have."""
    auto._calibrated["NVIDIA H200", ctx.world] = machine_of(ctx, us=5.0 if ctx.rank == 0 else 500.0)
    x, w = operands(ctx, tpk.all_gather_matmul)
    tpk.all_gather_matmul(x, w, ctx.group)
    assert same_everywhere(ctx, tpk.last_path().path) == "fused+streamk"
    told = "fused: 15 us predicted, gloo+blas 110"
    other = "rank 0 chose so; here gloo+blas: 110 us predicted, fused 510"
    assert tpk.last_path().why == (told if ctx.rank == 0 else other)
    # Fused pays for a long product only, which hides its copies: they take 150 us here.
    slow = dict.fromkeys(choice.OPS, Overlap(1.28e-3, 0.0, 5.0, 0.0))
    made = machine_of(ctx, fused=slow, tflops=1e-3, memory_gbps=1e6)
    alone = [choice.Call(choice.GATHER, (6,) * ctx.world, n, 8) for n in (3, 4096)]
    assert [choice.choose(call, made).fused for call in alone] == [False, True], "ranks would not agree"
    tpk.calibrate(ctx.group, machine=made)
    # Columns, or rows, of the weight: few on some ranks, or none, and the same on rank 1 whatever the others have.
    for most in (4096, 3, 4095, 2):
        n = (most, 1, 3000 if most < 9 else 0)[ctx.rank]
        for op in OPS:
            path = _fused(op.__name__) if most > 9 else "gloo+blas"
            if op is tpk.all_gather_matmul:
                op(torch.ones(6, 8, dtype=BF16), torch.ones(8, n, dtype=BF16), ctx.group)
            else:
                op(torch.ones(6 * ctx.world, n, dtype=BF16), torch.ones(n, 8, dtype=BF16), ctx.group)
            assert same_everywhere(ctx, tpk.last_path().path) == path, tpk.last_path().why
            assert ("rank 0 chose so" in tpk.last_path().why) == (ctx.rank > 0 and (n > 9) != (most > 9))


def test_alike(ranks):
    ranks.run(on_gloo, _alike, world=3)


def _told_apart(ctx):
    """Ranks that do not all leave the choice open are told under TPK_CHECK=1, and else when time is up."""
    tpk.calibrate(ctx.group, machine=machine_of(ctx))
    x, w = operands(ctx, tpk.all_gather_matmul)
    odd = "auto" if ctx.rank == 0 else "gloo+blas"
    gather = lambda path: tpk.all_gather_matmul(x, w, ctx.group, path=path)  # noqa: E731
    expect(tpk.errors.MismatchError, ["path 'auto'"], lambda: gather(odd))
    dtype = BF16 if ctx.rank == 0 else F32
    wide = lambda: tpk.all_gather_matmul(x, w, ctx.group, out_dtype=dtype)  # noqa: E731
    expect(tpk.errors.MismatchError, ["path 'auto', and out_dtype"], wide)
    gather("auto")
    os.environ["TPK_COMM_TIMEOUT_S"] = "0.5"
    try:
        with unchecked():
            if ctx.rank > 0:
                words = ["rank 0 did not come to the 2. call", "0.5 s", "TPK_CHECK=1"]
                expect(tpk.errors.CommTimeoutError, words, lambda: gather("auto"))
    finally:
        del os.environ["TPK_COMM_TIMEOUT_S"]


def test_told_apart(ranks):
    ranks.run(on_gloo, _told_apart, world=2)


def _ring(ctx):
    """Rank 0 may run ahead, but not so far that it overwrites what others have not read."""
    group, draw = members(ctx), random.Random(7)
    wanted = [draw.random() < 0.5 for _ in range(3 * verdicts._SLOTS)]
    ring = verdicts.Verdicts(group)
    for i, fused in enumerate(wanted):
        if ctx.rank == 1 and i % 1000 == 0:
            time.sleep(0.01)
        mine = fused if ctx.rank == 0 else not fused
        assert ring.agree(mine, i % 3, 60) is fused, i
    # The slowest holds rank 0 back, for as long as calls may take.
    begin = time.monotonic()
    if ctx.rank == 0:
        for _ in range(verdicts._SLOTS - 1):
            ring.agree(True, 0, 60)
        expect(tpk.errors.CommTimeoutError, ["another rank", "0.3 s"], lambda: ring.agree(True, 0, 0.3))
        assert time.monotonic() - begin >= 0.3
    elif ctx.rank == 1:
        expect(tpk.errors.MismatchError, ["another operation than rank 0"], lambda: ring.agree(True, 1, 60))
    ranks_module.exchange(group, None)
    assert not any(name.startswith("tpkernels-") for name in os.listdir("/dev/shm"))


def test_ring(ranks):
    ranks.run(on_gloo, _ring, world=3, timeout=100)


def _no_memory_in_common(ctx):
    """On one rank: then on none."""
    usual = verdicts.mmap
    if ctx.rank == 1:
        verdicts.mmap = SimpleNamespace(mmap=lambda *_: os.stat("/nowhere/at all"))
    try:
        tpk.calibrate(ctx.group, machine=machine_of(ctx))
        x, w = operands(ctx, tpk.all_gather_matmul)
        for _ in range(2):
            tpk.all_gather_matmul(x, w, ctx.group)
            assert "its ranks have no host memory in common (rank 1: " in tpk.last_path().why
            assert tpk.last_path().path == "gloo+blas"
    finally:
        verdicts.mmap = usual


def test_no_memory_in_common(ranks):
    ranks.run(on_gloo, _no_memory_in_common, world=2)


def _values(ctx, uneven):
    """Every argument, with gradients, where some calls are fused and others are not."""
    made = machine_of(ctx)
    for op in choice.OPS:  # the more rows the longer
        fused = made.fused | {op: Overlap(1e-3, 0.0, 5.0, 0.0)}
        made = replace(made, fused=fused)
    tpk.calibrate(ctx.group, machine=made)
    with tpk.record_paths() as log:
        op_checks.check_all_gather_matmul(ctx, BF16, uneven, "auto")
        op_checks.check_reduce(ctx, BF16, uneven, "auto")
    for op in choice.OPS:
        taken = {path for name, path in log.counts if name == op}
        assert same_everywhere(ctx, sorted(taken)) == [_fused(op), "gloo+blas"], (op, taken)


@pytest.mark.parametrize("uneven", [False, True])
def test_values(ranks, uneven):
    ranks.run(on_gloo, _values, uneven, world=3, timeout=200)
