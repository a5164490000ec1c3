"""Tuning of path "fused" among gloo ranks that play it: one plan for all, whatever each rank's cache and clock say."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from auto_fakes import BF16, OPS, members, operands, same_everywhere
from fused_behaviour import unchecked
from fused_fakes import forget, on_fakes
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.comm import ranks as ranks_module
from tpkernels.comm import runtime, small
from tpkernels.ops import _plans
from tpkernels.tune import fused, local
from tpkernels.tune.fused import Plan

TILES = _plans.TILES["cpu"]


def overlapping(ctx, check, *args):
    """Few rows overlap too, of all operations: what makes those of few rows takes no plan."""
    usual, small.MOST_BYTES = small.MOST_BYTES, dict.fromkeys(small.MOST_BYTES, 0)
    try:
        on_fakes(ctx, check, *args)
    finally:
        small.MOST_BYTES = usual


@contextmanager
def tuning(ctx, mode=True, *, slow=(), fast=""):
    """A cache for each rank. Every plan takes 100 us; ``fast`` a half of it, and on the last rank tiles of ``slow`` ten
    times as long."""
    fake, before = runtime.active, os.environ.get("TPK_CACHE_DIR")
    fake.plans = {
        ("auto", ""),
        *(("auto", tile) for tile in TILES),
        *(("data_parallel", tile) for tile in TILES),
    }

    def elapsed_us(call, calls):
        for _ in range(1 + calls):
            call()
        _, tile = fake.asked[-1]
        us = 50.0 if tile == fast else 100.0
        return us * (10 if tile in slow and ctx.rank == ctx.world - 1 else 1)

    fake.elapsed_us = elapsed_us
    with tempfile.TemporaryDirectory() as folder, unchecked():
        os.environ["TPK_CACHE_DIR"] = folder
        anew()
        try:
            with tpk.autotune(mode):
                yield Path(folder)
        finally:
            anew()
            del os.environ["TPK_CACHE_DIR"]
            if before is not None:
                os.environ["TPK_CACHE_DIR"] = before


def anew():
    """As in a new process."""
    local.forget()
    fused.forget()


def asked():
    """What the last call asked for."""
    return runtime.active.asked[-1]


def entries(folder):
    return {
        k: e
        for path in folder.glob("tuned-*.json")
        for k, e in json.loads(path.read_text())["entries"].items()
    }


def _takes_the_fastest(ctx):
    """Timed once; the same on all ranks; the values are those of any other plan."""
    fast = "32x256x128"
    with tuning(ctx, fast=fast) as folder:
        for op in OPS:
            x, w = operands(ctx, op, m=64, n=16)
            with tpk.autotune(False):
                anew()
                forget()  # the ranks compare whether they tune
                want = op(x, w, ctx.group, path="fused")
            forget()
            anew()
            ran = len(runtime.active.asked)
            assert torch.equal(op(x, w, ctx.group, path="fused"), want)
            assert same_everywhere(ctx, asked())[1] == fast
            tried = len(runtime.active.asked) - ran
            assert (
                tried == 15 * 7 + 1
            )  # three rounds of five calls: the model's plan, five tiles, whole tiles
            op(x, w, ctx.group, path="fused")
            assert len(runtime.active.asked) == ran + tried + 1 and asked()[1] == fast
        keys = entries(folder)
        if ctx.rank == 0:
            assert [key.partition(" ")[0] for key in keys] == [op.__name__ for op in OPS]
        else:
            assert not keys, "rank 0 keeps what all ranks have timed"


def test_takes_the_fastest(ranks):
    ranks.run(overlapping, _takes_the_fastest, world=3, timeout=150)


def _the_slowest_rank_counts(ctx):
    """A tile that is fast on all but one rank is not taken."""
    with tuning(ctx, slow=("64x64x128",), fast="64x64x128"):
        x, w = operands(ctx, tpk.all_gather_matmul, m=64)
        tpk.all_gather_matmul(x, w, ctx.group, path="fused")
        assert same_everywhere(ctx, asked()) == (
            "auto",
            "",
        )  # nothing else is clearly faster than the model's plan


def test_the_slowest_rank_counts(ranks):
    ranks.run(overlapping, _the_slowest_rank_counts, world=2)


def _caches_differ(ctx):
    """Rank 0's counts, whatever the others' caches hold."""
    x, w = operands(ctx, tpk.matmul_reduce_scatter, m=64, n=16)

    def call():
        tpk.matmul_reduce_scatter(x, w, ctx.group, path="fused")
        return same_everywhere(ctx, asked())

    with tuning(ctx, fast=TILES[ctx.rank % 2]) as folder:
        # Each rank finds another tile fast: the first one, as all must wait for the slowest, is none of these.
        assert call() == ("auto", "")
        # Every cache gets an entry of its own.
        store = local.store_of(x.device)
        ((key, entry),) = ranks_module.exchange(members(ctx), list(store.all().items()))[0]
        store.put(key, replace(entry, tile=TILES[2 + ctx.rank]))
        assert len(entries(folder)) == 1
        fused.forget()
        ran = len(runtime.active.asked)
        assert call() == ("auto", TILES[2]) and len(runtime.active.asked) == ran + 1, "nothing is timed"
        # Rank 0 knows nothing, others do.
        fused.forget()
        if ctx.rank == 0:
            store._entries.clear()
            store.path.unlink()
        assert call() == ("auto", "") and len(runtime.active.asked) > ran + 50
        # A tile that no kernel has.
        fused.forget()
        store.put(key, replace(entry, tile="7x7x7"))
        ran = len(runtime.active.asked)
        assert call() == ("auto", "") and len(runtime.active.asked) > ran + 50


def test_caches_differ(ranks):
    ranks.run(overlapping, _caches_differ, world=2)


def _shapes_differ(ctx):
    """Columns of a weight that are new to one rank only."""
    with tuning(ctx, fast="16x64x128"):
        x = torch.ones(8, 16, dtype=BF16)
        for n in (16, 24, 16) if ctx.rank == 0 else (16, 16, 24):
            w = torch.ones(16, n, dtype=BF16)
            y = tpk.all_gather_matmul(x, w, ctx.group, path="fused")
            assert y.shape == (8 * ctx.world, n) and bool((y == 16).all())
            assert same_everywhere(ctx, asked())[1] == "16x64x128"


def test_shapes_differ(ranks):
    ranks.run(overlapping, _shapes_differ, world=2)


def _read_only(ctx):
    """Nothing is timed; what rank 0's cache has is taken."""
    x, w = operands(ctx, tpk.all_gather_matmul, m=64)
    with tuning(ctx, "read", fast=TILES[0]):
        tpk.all_gather_matmul(x, w, ctx.group, path="fused")
        assert same_everywhere(ctx, asked()) == ("auto", "") and len(runtime.active.asked) == 1
        fused.forget()
        with tpk.autotune():
            tpk.all_gather_matmul(x, w, ctx.group, path="fused")
        assert asked() == ("auto", TILES[0]) or asked() == ("data_parallel", TILES[0])
        fused.forget()
        ran = len(runtime.active.asked)
        tpk.all_gather_matmul(x, w, ctx.group, path="fused")
        assert same_everywhere(ctx, asked())[1] == TILES[0] and len(runtime.active.asked) == ran + 1


def test_read_only(ranks):
    ranks.run(overlapping, _read_only, world=2)


def _capture(ctx):
    """Nothing is exchanged and nothing timed in a capture; what is known is taken."""
    x, w = operands(ctx, tpk.all_gather_matmul, m=64)
    other = torch.ones(8, 24, dtype=BF16)
    with tuning(ctx, fast=TILES[3]):
        with tpk.autotune(False):
            tpk.all_gather_matmul(x, w, ctx.group, path="fused")  # shared memory
        for known in (False, True):
            runtime.active.capture = True
            ran = len(runtime.active.asked)
            tpk.all_gather_matmul(x, w, ctx.group, path="fused")
            assert same_everywhere(ctx, asked())[1] == (TILES[3] if known else "")
            tpk.all_gather_matmul(x, other, ctx.group, path="fused")
            assert asked() == ("auto", "") and len(runtime.active.asked) == ran + 2
            runtime.active.capture = False
            tpk.all_gather_matmul(x, w, ctx.group, path="fused")
            assert asked()[1] == TILES[3]


def test_capture(ranks):
    ranks.run(overlapping, _capture, world=2)


def _gradients(ctx):
    """Backward passes, and what is gathered beneath them."""
    x, w = (t.requires_grad_() for t in operands(ctx, tpk.all_gather_matmul, m=16))
    want = torch.autograd.grad(tpk.all_gather_matmul(x, w, ctx.group, path="gloo+blas").sum(), (x, w))
    with tuning(ctx, fast=TILES[4]):
        got = torch.autograd.grad(tpk.all_gather_matmul(x, w, ctx.group, path="fused").sum(), (x, w))
        assert all(map(torch.equal, got, want)) and same_everywhere(ctx, asked())[1] == TILES[4]


def test_gradients(ranks):
    ranks.run(overlapping, _gradients, world=2)


def _told_differently(ctx):
    with tpk.autotune(ctx.rank == 1), unchecked():
        forget()
        x, w = operands(ctx, tpk.all_gather_matmul)
        expect(
            tpk.errors.BackendError,
            ["TPK_AUTOTUNE is not set on rank 0, and is on rank 1"],
            lambda: tpk.all_gather_matmul(x, w, ctx.group, path="fused"),
        )
    forget()
    tpk.all_gather_matmul(x, w, ctx.group, path="fused")


def test_told_differently(ranks):
    ranks.run(overlapping, _told_differently, world=2)


def _apart(ctx, folder):
    """Products of other paths are local: ranks of one cache still take the same."""
    os.environ["TPK_CACHE_DIR"] = folder
    anew()
    try:
        with tpk.autotune():
            for op in OPS:
                x, w = operands(ctx, op, m=30, n=16, k=80)
                want = op(x.double(), w.double(), ctx.group, path="gloo+blas")
                assert torch.equal(op(x, w, ctx.group).double(), want)
                record = tpk.last_path()
                assert record.transport == "gloo" and "tuned: " in record.why, record
                same_everywhere(ctx, (record.gemm, record.why))
        total = sum(ranks_module.exchange(members(ctx), local.counts.timed))
        assert total == len(local.store_of(x.device).all()) > 0, "a product was timed by several ranks"
    finally:
        del os.environ["TPK_CACHE_DIR"]
        anew()


def test_products_of_other_paths(ranks, tmp_path):
    ranks.run(_apart, str(tmp_path), world=2)


def test_the_slowest_of_each_round():
    first, second = [[10.0, 30.0, 10.0], [5.0, 5.0, 5.0]], [[20.0, 10.0, 10.0], [50.0, 50.0, 50.0]]
    assert fused.slowest([first, second]) == [20.0, 50.0]
    assert fused.slowest([[[float("inf")]], [[1.0, 1.0, 1.0]]]) == [float("inf")]


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_tiles_of_the_hopper_kernel(monkeypatch, op):
    """Sums of other ranks have no room beside 192 columns."""
    monkeypatch.setattr(_plans, "machine_of", lambda *_: _plans.Machine("sm90", 132))
    left, right = torch.empty(2048, 1024, device="meta"), torch.empty(1024, 4096, device="meta")
    with tpk.autotune():
        tried = fused._tried(op, None, left.device, [left], [right], [1024, 1024])
    assert tried[0] == Plan() and len(set(tried)) == len(tried) <= 8
    assert op == "all_gather_matmul" or not any("x192x" in plan.tile for plan in tried)
    assert all(plan.schedule == "auto" for plan in tried[:-1])
