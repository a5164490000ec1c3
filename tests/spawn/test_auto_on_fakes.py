"""Path "auto" among gloo ranks: what it takes, and what it says.

The ops of ``_C_sm90a`` are played by tests/fused_fakes.py; gloo plays what "fused" is compared with.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from auto_fakes import BF16, OPS, capturing, few_rows_on_gloo, machine_of, on_gloo, operands
from fused_behaviour import unchecked
from fused_fakes import forget
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.comm import auto, choice, conditions, runtime, small, workspace
from tpkernels.comm.choice import Quick
from tpkernels.errors import BackendError


def _takes_what_pays(ctx):
    for op in OPS:
        x, w = operands(ctx, op)
        want = op(x, w, ctx.group, path="gloo+blas")
        tpk.calibrate(ctx.group, machine=machine_of(ctx))
        told = tpk.explain(op.__name__, x, w, ctx.group)
        assert torch.equal(op(x, w, ctx.group), want)
        record = tpk.last_path()
        behind = op is tpk.matmul_all_reduce  # small: one kernel behind any product
        assert (record.path, record.op) == (f"fused+{'blas' if behind else 'streamk'}", op.__name__)
        assert record.why == "fused: 15 us predicted, gloo+blas 110", record.why
        assert (told.path, told.why) == (record.path, record.why) and "fused: 15 us" in str(told)
        assert ("one kernel" if behind else "copy engine") in told.transfers
        # The other way round.
        tpk.calibrate(ctx.group, machine=machine_of(ctx, us=200.0))
        told = tpk.explain(op.__name__, x, w, ctx.group)
        assert torch.equal(op(x, w, ctx.group), want)
        record = tpk.last_path()
        assert (record.path, record.why) == ("gloo+blas", "gloo+blas: 110 us predicted, fused 210")
        assert (told.path, told.why) == (record.path, record.why)
        assert told.transfers == "path='fused' can be asked for"
    assert {"gather", "scatter", "small packets"} <= set(runtime.active.log)
    assert {kind for *_, kind in workspace._spaces} == {"gather", "scatter", "small"}


def test_takes_what_pays(ranks):
    ranks.run(on_gloo, _takes_what_pays, world=3)


def _few_rows(ctx):
    """They are predicted by constants of their own, and made by one kernel; others as before."""
    quick = dict.fromkeys(choice.OPS, Quick(40.0, 1e6, small.MOST_BYTES[choice.GATHER]))
    for us, taken in ((40.0, True), (400.0, False)):
        few = {op: one._replace(us=us) for op, one in quick.items()}
        tpk.calibrate(ctx.group, machine=machine_of(ctx, us=90.0, quick=few))
        for op in OPS:
            x, w = operands(ctx, op)
            want = op(x, w, ctx.group, path="gloo+blas")
            told = tpk.explain(op.__name__, x, w, ctx.group)
            assert torch.equal(op(x, w, ctx.group), want)
            record = tpk.last_path()
            assert (told.path, told.why, told.product) == (record.path, record.why, record.detail)
            assert record.path == ("fused+blas" if taken else "gloo+blas")
            assert f"fused{':' if taken else ''} {10 + us:.0f}" in record.why, record.why
            assert not taken or "one kernel" in told.transfers
    assert {kind for *_, kind in workspace._spaces} == {"small"}
    runtime.active.log.clear()
    x, w = torch.ones(1 << 20, 8, dtype=BF16), torch.ones(8, 1, dtype=BF16)  # more bytes than that
    tpk.all_gather_matmul(x, w, ctx.group, path="fused")
    assert tpk.last_path().path == "fused+streamk" and runtime.active.log[-1] == "gather"


def test_few_rows(ranks):
    ranks.run(few_rows_on_gloo, _few_rows, world=2)


def _forced(ctx):
    """By argument and by environment, in both directions."""
    tpk.calibrate(ctx.group, machine=machine_of(ctx))
    x, w = operands(ctx, tpk.all_gather_matmul)

    def taken(path="auto"):
        tpk.all_gather_matmul(x, w, ctx.group, path=path)
        return tpk.last_path().path

    assert taken() == "fused+streamk"
    assert (taken("gloo"), taken("gloo+blas"), taken("blas")) == ("gloo+streamk", "gloo+blas", "gloo+blas")
    for given, path in (("gloo+blas", "gloo+blas"), ("gloo", "gloo+streamk"), ("auto", "fused+streamk")):
        os.environ["TPK_PATH"] = given
        assert taken() == path
    os.environ["TPK_PATH"] = "gloo+blas"
    assert taken("fused") == "fused+streamk"
    assert tpk.explain("all_gather_matmul", x, w, ctx.group).path == "gloo+blas"


def test_forced(ranks):
    ranks.run(on_gloo, _forced, world=2)


def _backward(ctx):
    """Backward passes choose by themselves."""
    tpk.calibrate(ctx.group, machine=machine_of(ctx))
    x, w = (t.requires_grad_() for t in operands(ctx, tpk.all_gather_matmul))
    with tpk.record_paths() as log:
        tpk.all_gather_matmul(x, w, ctx.group).sum().backward()
    assert log.counts["all_gather_matmul", "fused+streamk"] == 1
    assert log.counts["matmul_reduce_scatter", "fused+streamk"] == 1
    os.environ["TPK_PATH"] = "gloo+blas"
    with tpk.record_paths() as log:
        tpk.all_gather_matmul(x, w, ctx.group).sum().backward()
    assert not any("fused" in path for _, path in log.counts)


def test_backward(ranks):
    ranks.run(on_gloo, _backward, world=2)


# Where it cannot, or does not know


def _not_where_it_cannot(ctx):
    fake, x, w = runtime.active, *operands(ctx, tpk.matmul_reduce_scatter)

    def why(a=x, b=w, **options):
        told = tpk.explain("matmul_reduce_scatter", a, b, ctx.group, **options)
        tpk.matmul_reduce_scatter(a, b, ctx.group, **options)
        assert tpk.last_path().path == told.path == "gloo+blas"
        return tpk.last_path().why

    fake.name = "NVIDIA B200"
    assert why() == "gloo+blas: nothing was measured on NVIDIA B200; tpk.calibrate() does"
    forget()
    fake.name = "NVIDIA H200" if ctx.rank == 0 else "NVIDIA H100 80GB HBM3"
    tpk.matmul_reduce_scatter(x, w, ctx.group)
    assert "its GPUs are not alike (NVIDIA H100 80GB HBM3, NVIDIA H200)" in tpk.last_path().why
    forget()
    fake.name = "NVIDIA H200"
    assert why().startswith("gloo+blas: "), "too small to pay, as the table has it"
    forget()
    fake.missing = "under CUDA_LAUNCH_BLOCKING" if ctx.rank == 1 else ""
    tpk.matmul_reduce_scatter(x, w, ctx.group)
    assert tpk.last_path().why == (
        "gloo+blas, as fused cannot run: rank 1 cannot: under CUDA_LAUNCH_BLOCKING"
    )
    assert "rank 1 cannot" in why()
    fake.missing = ""
    forget()
    tpk.calibrate(ctx.group, machine=machine_of(ctx))
    assert "bfloat16 and float16, not float32" in why(x.float(), w.float())
    fake.log.clear()
    assert "not float64" in why(out_dtype=torch.float64)
    assert not any(line.startswith("allocate") for line in fake.log), "nothing was to be fused"


def test_not_where_it_cannot(ranks):
    ranks.run(on_gloo, _not_where_it_cannot, world=2)


def _too_many_rows(ctx):
    """They go the other way, and are refused where "fused" is asked for, before memory grows."""
    fake, reason = runtime.active, "M, rows of all ranks together, may be 11 at most, not 12"
    tpk.calibrate(ctx.group, machine=machine_of(ctx))
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(conditions, "MOST_ROWS", 11)
        for op in OPS:
            x, w = operands(ctx, op)
            told = tpk.explain(op.__name__, x, w, ctx.group)
            assert torch.equal(op(x, w, ctx.group), op(x, w, ctx.group, path="gloo+blas"))
            op(x.view(-1, 2, 8), w, ctx.group)  # all leading dimensions count
            record = tpk.last_path()
            assert record.path == told.path == "gloo+blas"
            assert record.why == told.why == f"gloo+blas, as fused cannot run: {reason}"
            assert told.transfers == f"cannot run: {reason}"
            for call in (op, partial(tpk.explain, op.__name__)):
                forced = lambda call=call, x=x, w=w: call(x, w, ctx.group, path="fused")  # noqa: E731
                expect(BackendError, ["'fused' was asked for", reason, "use 'auto'"], forced)
        expect(BackendError, ["reserve", reason], lambda: tpk.reserve(ctx.group, max_m=12, k=8))
        assert not any(line.startswith("allocate") for line in fake.log), "nothing was to be fused"
        x, w = operands(ctx, tpk.all_gather_matmul, m=5)
        tpk.all_gather_matmul(x, w, ctx.group)
        assert tpk.last_path().path == "fused+streamk"
    # As many as there may be, without the memory for them.
    huge = torch.empty(2**31 // ctx.world, 8, dtype=BF16, device="meta")
    told = tpk.explain("all_gather_matmul", huge, w.to("meta"), ctx.group)
    assert "may be 2,147,481,599 at most, not 2,147,483,648" in told.why
    last = torch.empty(2**31 // ctx.world - 1024, 8, dtype=BF16, device="meta")
    assert "cannot run" not in tpk.explain("all_gather_matmul", last[1:], w.to("meta"), ctx.group).why


def test_too_many_rows(ranks):
    ranks.run(on_gloo, _too_many_rows, world=2)


def _memory(ctx):
    """Memory that cannot be had is no error, and is not asked for again and again."""
    fake, x, w = runtime.active, *operands(ctx, tpk.all_gather_matmul)
    tpk.calibrate(ctx.group, machine=machine_of(ctx))
    fake.fail = "allocate" if ctx.rank == 1 else ""
    for _ in range(2):
        tpk.all_gather_matmul(x, w, ctx.group)
        assert tpk.last_path().path == "gloo+blas"
        assert "rank 1: RuntimeError: out of memory" in tpk.last_path().why
    assert [line for line in fake.log if line.startswith("allocate")] == [f"allocate {2 << 20}"]
    fake.fail = ""
    small, v = torch.ones(2, 8, dtype=BF16), w
    tpk.all_gather_matmul(small, v, ctx.group)
    assert tpk.last_path().path == "fused+streamk", "less was not refused"


def test_memory(ranks):
    ranks.run(on_gloo, _memory, world=2)


def _captures(ctx):
    """Nothing collective while a graph is captured: what is not known yet is not fused."""
    fake, gather = runtime.active, tpk.all_gather_matmul
    auto._calibrated["NVIDIA H200", ctx.world] = machine_of(ctx)

    def taken(rows=6, n=8):
        gather(torch.ones(rows, 8, dtype=BF16), torch.ones(8, n, dtype=BF16), ctx.group)
        return tpk.last_path()

    with capturing():
        assert "ranks cannot compare themselves while a CUDA graph" in taken().why
        assert fake.log == []
    with unchecked():
        assert taken().path == "fused+streamk"
    with capturing():
        assert taken().path == "fused+streamk"
        assert taken(rows=7).path == "fused+streamk", "rows are known to all ranks"
        assert taken(n=16).path == "fused+streamk", "new shapes are no matter"
        record = taken(rows=1 << 18)
        assert record.path == "gloo+blas" and "memory cannot grow while" in record.why
        assert "though fused: " in record.why
    with unchecked():
        assert taken(rows=1 << 18).path == "fused+streamk"
    with capturing():
        assert taken(rows=1 << 18).path == "fused+streamk"


def test_captures(ranks):
    ranks.run(on_gloo, _captures, world=2)
