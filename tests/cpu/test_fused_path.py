"""Path "fused" without a GPU: what calls hand to the ops, and memory, refusals and explain() on fakes of those ops.

Values are checked in tests/spawn/test_fused_on_fakes.py.
"""

from __future__ import annotations

from unittest.mock import patch

import fused_behaviour
import pytest
import torch
import torch.distributed as dist
from few_rows import few_rows_overlap, overlaps
from fused_checks import new_group
from fused_fakes import FakeRuntime, on_fakes
from op_behaviour import expect
from op_checks import on_device

import tpkernels as tpk
from tpkernels.comm import fused, ranks, runtime, small, workspace
from tpkernels.comm.auto import Asked
from tpkernels.errors import ArgumentError, BackendError
from tpkernels.ops import _plans

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FUSED = "fused"


# On fakes of the ops, with gloo between ranks


@overlaps()
def _groups_go(ctx):
    """Memory of a group is freed once it is destroyed, by the next call in another one."""
    x, w = torch.ones(4, 8, dtype=BF16), torch.ones(8, 8, dtype=BF16)
    for _ in range(3):
        group = new_group(ctx, list(range(ctx.world)))
        for members in (group, ctx.group):
            for op in (tpk.all_gather_matmul, tpk.matmul_reduce_scatter):
                op(x, w, members, path=FUSED)
        assert len(workspace._spaces) == 4
        dist.destroy_process_group(group)
    tpk.all_gather_matmul(x, w, ctx.group, path=FUSED)
    assert {name for name, *_ in workspace._spaces} == {ctx.group_name}


def test_groups_go(ranks):
    ranks.run(on_fakes, _groups_go)


def _opcheck(ctx):
    """Fakes give the shapes and strides of what the path really returns."""
    ops, name = torch.ops.tpkernels, ctx.group_name
    x = torch.randn(2, 4, 3).to(BF16).requires_grad_()
    w, v = torch.randn(3, 5).to(BF16).requires_grad_(), torch.randn(3, 5).to(BF16)
    bias = torch.randn(5).to(BF16).requires_grad_()
    y = torch.randn(2, 2 * ctx.world, 3).to(BF16).requires_grad_()
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for op, args in (
        (
            ops.all_gather_matmul,
            (x, [w, v], [bias], [1], "gelu", 1, None, name, F32, True, True, True, FUSED, None, None, None),
        ),
        (
            ops.matmul_reduce_scatter,
            ([y, y], [w, v], bias, None, 1, None, name, None, FUSED, None, None, None),
        ),
    ):
        torch.library.opcheck(op.default, args, test_utils=tests)


def test_opcheck(ranks):
    ranks.run(on_fakes, _opcheck, world=2)


def _shapes_of_one_rank(ctx):
    """A rank without columns, or without K, still takes part: the others wait for what it sends."""
    ones, last = lambda *shape: torch.ones(*shape, dtype=BF16), ctx.rank == ctx.world - 1
    n, k = (0, 0) if last else (5, 8)
    for bs in ([ones(8, n)], [ones(8, 0), ones(8, n)]):
        *outs, gathered = (
            tpk.all_gather_matmul(ones(3, 8), bs, ctx.group, biases=[b[0] for b in bs], path=FUSED),
            tpk.all_gather_matmul(ones(3, 8), bs, ctx.group, return_gathered=True, path=FUSED)[1],
        )
        assert torch.equal(outs[0][-1], torch.full((3 * ctx.world, n), 9.0, dtype=BF16))
        assert torch.equal(gathered, ones(3 * ctx.world, 8))
    a, b = ones(2 * ctx.world, k), ones(k, 5)
    out = tpk.matmul_reduce_scatter([a, a], [b, b], ctx.group, bias=ones(5), path=FUSED)
    assert torch.equal(out, torch.full((2, 5), 16.0 * (ctx.world - 1) + 1, dtype=BF16))
    assert runtime.active.log[-1] == ("scatter" if few_rows_overlap() else "small scatter")
    assert tpk.last_path().detail.startswith(f"M={2 * ctx.world} N=5")


@overlaps()
def _long_shapes_of_one_rank(ctx):
    _shapes_of_one_rank(ctx)


def test_shapes_of_one_rank(ranks):
    ranks.run(on_fakes, _shapes_of_one_rank, world=3)
    ranks.run(on_fakes, _long_shapes_of_one_rank, world=3)


def _refusals(ctx):
    errors, x, w = tpk.errors, torch.ones(6, 8, dtype=BF16), torch.ones(8, 8, dtype=BF16)
    fused_behaviour.check_refused(ctx, F32, ["bfloat16", "float32"])
    wide = lambda: tpk.all_gather_matmul(x, w, ctx.group, out_dtype=F64, path=FUSED)  # noqa: E731
    expect(errors.BackendError, ["fused", "float64"], wide)
    if ctx.world > 1:  # under TPK_CHECK=1
        odd = FUSED if ctx.rank == 0 else "auto"
        expect(
            errors.MismatchError, ["path 'fused'"], lambda: tpk.all_gather_matmul(x, w, ctx.group, path=odd)
        )
    # Not before all of this was any memory made, and nothing was left behind in the group.
    assert not any(line.startswith("allocate") for line in runtime.active.log)
    tpk.all_gather_matmul(x, w, ctx.group, path=FUSED)


def test_refusals(ranks):
    ranks.run(on_fakes, _refusals, world=3)


def _one_rank_cannot(ctx):
    x, w = torch.ones(6, 8, dtype=BF16), torch.ones(8, 8, dtype=BF16)
    fake = FakeRuntime(ctx.rank)
    fake.missing = "it is too old" if ctx.rank == 1 else ""
    runtime.active, usual = fake, runtime.active
    for _ in range(2):  # found out once, and remembered
        for op in (tpk.all_gather_matmul, tpk.matmul_reduce_scatter):
            call = lambda op=op: op(x, w, ctx.group, path=FUSED)  # noqa: E731
            expect(tpk.errors.BackendError, ["fused", "rank 1 cannot: it is too old", "auto"], call)
    reserve = lambda: tpk.reserve(ctx.group, max_m=8, k=8)  # noqa: E731
    expect(tpk.errors.BackendError, ["rank 1 cannot"], reserve)
    explain = lambda: tpk.explain("all_gather_matmul", x, w, ctx.group, path=FUSED)  # noqa: E731
    expect(tpk.errors.BackendError, ["rank 1 cannot"], explain)
    assert "cannot run: rank 1" in str(tpk.explain("matmul_reduce_scatter", x, w, ctx.group))
    assert fake.log == []
    # Memory that cannot be had on one rank: an error on all of them, and another try later.
    ranks._missing.clear()
    fake.missing, fake.fail = "", "allocate" if ctx.rank == 1 else ""
    expect(
        tpk.errors.BackendError, ["rank 1: RuntimeError: out of memory"], lambda: tpk.reserve(max_m=8, k=8)
    )
    expect(
        tpk.errors.BackendError,
        ["rank 1", "memory"],
        lambda: tpk.all_gather_matmul(x, w, ctx.group, path=FUSED),
    )
    fake.fail = ""
    tpk.all_gather_matmul(x, w, ctx.group, path=FUSED)
    runtime.active = usual
    usual.log.extend(fake.log)


def test_one_rank_cannot(ranks):
    ranks.run(on_fakes, _one_rank_cannot)


@overlaps()
def _explained(ctx):
    x, w = torch.ones(6, 8, dtype=BF16), torch.ones(8, 16, dtype=BF16)
    sizes = [0, 6, 2][: ctx.world]
    shard = x[: sizes[ctx.rank]]
    before = tpk.explain("all_gather_matmul", shard, w, ctx.group, shard_sizes=sizes, path=FUSED)
    assert before.path == "fused+streamk" and "the first call finds out" in before.transfers
    assert before.wire_bytes == (sum(sizes) - sizes[ctx.rank]) * 8 * 2
    assert "chunks" in str(before) and "M=8 N=16 K=8" in str(before)
    assert runtime.active.log == [], "it only tells"
    tpk.all_gather_matmul(shard, w, ctx.group, shard_sizes=sizes, path=FUSED)
    record = tpk.last_path()
    assert (record.path, record.detail, record.why) == (before.path, before.product, before.why)
    after = tpk.explain("matmul_reduce_scatter", x, w, ctx.group, path=FUSED)
    assert after.path == "fused+streamk" and "first call" not in after.transfers
    auto = tpk.explain("matmul_reduce_scatter", x, w, ctx.group)
    assert auto.path == "gloo+blas" and "path='fused' can be asked for" in str(auto)
    every = tpk.explain("matmul_all_reduce", x, w, ctx.group, path=FUSED)
    assert every.path == "fused+blas" and every.transfers.startswith("behind the product one kernel, packets")
    assert every.product.endswith("; packets") and every.wire_bytes == 2 * 6 * 16 * 2 * (ctx.world - 1)
    tpk.matmul_all_reduce(x, w, ctx.group, path=FUSED)
    record = tpk.last_path()
    assert (record.path, record.detail, record.why) == (every.path, every.product, every.why)
    named = tpk.explain("matmul_all_reduce", x, w, ctx.group, path="fused+streamk")
    tpk.matmul_all_reduce(x, w, ctx.group, path="fused+streamk")
    assert tpk.last_path().path == named.path == "fused+streamk", "a product that is named is taken"
    large = torch.empty(1 << 20, 8, dtype=BF16, device="meta")
    every = tpk.explain("matmul_all_reduce", large, w.to("meta"), ctx.group, path=FUSED)
    assert every.path == "fused+streamk" and every.transfers.endswith("pushed to all")
    assert tpk.explain("matmul_replicated", x, w, ctx.group).transfers == ""


def _plans_explained(ctx):
    """Of the product that serves other ranks, where there is one, with their rows; else of a whole one."""
    machine, seen, real = _plans.machine_of, [], _plans.candidates

    def candidates(product, machine):
        seen.append(product)
        return real(product, machine)

    _plans.machine_of, _plans.candidates = lambda *_: _plans.Machine("sm90", 132), candidates
    try:
        x, w = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((32, 8192), (8192, 4096)))
        for op, m in (("all_gather_matmul", 32 * ctx.world), ("matmul_reduce_scatter", 32)):
            for way, path, few in ((None, FUSED, None), ("gather", FUSED, True), (None, "auto", None)):
                with patch.object(Asked, "way", lambda *_, way=way: way):
                    told = tpk.explain(op, x, w, ctx.group, path=path)
                fused_plan = path == FUSED and not few
                sizes = tpk.shard_sizes(32, ctx.world) if op != "all_gather_matmul" else [32] * ctx.world
                want = (op, tuple(sizes), ctx.rank, 2) if fused_plan else ("", (), 0, 2)
                got = seen.pop()
                assert (got.collective, got.shard_rows, got.rank, got.out_bytes) == want, (op, way, path)
                assert got.m == m and bool(told.plan["suffix"]) != fused_plan, told
    finally:
        _plans.machine_of, _plans.candidates = machine, real
    tpk.all_gather_matmul(torch.ones(6, 8, dtype=BF16), torch.ones(8, 8, dtype=BF16), ctx.group, path=FUSED)


def test_plans_are_explained(ranks):
    ranks.run(on_fakes, _plans_explained, world=2)


def _few_rows_explained(ctx):
    """What is told is what runs then."""
    x, w = torch.ones(6, 8, dtype=BF16), torch.ones(8, 16, dtype=BF16)
    sizes = [0, 6, 2][: ctx.world]
    gathered = 8 * 2 * (sum(sizes) - sizes[ctx.rank])
    for op, a, given, received, told in (
        ("all_gather_matmul", x[: sizes[ctx.rank]], {"shard_sizes": sizes}, gathered, "in front of; gather"),
        ("matmul_reduce_scatter", x, {}, 16 * 2 * 2 * (ctx.world - 1), "behind; scatter"),
    ):
        place, _, way = told.partition(";")
        for path, used in ((FUSED, "fused+blas"), ("fused+streamk", "fused+streamk")):
            before = tpk.explain(op, a, w, ctx.group, path=path, **given)
            assert before.path == used and before.product.endswith(";" + way), before
            assert before.transfers.startswith(f"{place} the product one kernel,{way}")
            assert before.wire_bytes == received
            getattr(tpk, op)(a, w, ctx.group, path=path, **given)
            record = tpk.last_path()
            assert (record.path, record.detail, record.why) == (before.path, before.product, before.why)


def test_explain(ranks):
    ranks.run(on_fakes, _explained, world=3)
    ranks.run(on_fakes, _few_rows_explained, world=3)


@overlaps()
def _memory_of_calls(ctx):
    """It grows when a call needs more, in powers of two, or to what was reserved; not in a capture."""
    fake, ones = runtime.active, lambda *shape: torch.ones(*shape, dtype=BF16)
    gather = lambda rows, k: tpk.all_gather_matmul(ones(rows, k), ones(k, 8), ctx.group, path=FUSED)  # noqa: E731
    fake.capture = True
    with fused_behaviour.unchecked():  # the comparison looks for a capture itself
        expect(tpk.errors.BackendError, ["fused", "first use", "captur"], lambda: gather(8, 8))
        fake.capture = False
        gather(8, 8)
        sizes = lambda: [line.split()[1] for line in fake.log if line.startswith("allocate")]  # noqa: E731
        assert sizes() == [str(2 << 20)]
        gather(9, 1000)
        fake.capture = True
        gather(7, 1000)
        expect(tpk.errors.BackendError, ["fused", "gather", "captur"], lambda: gather(1000, 2000))
        expect(tpk.errors.BackendError, ["captur"], lambda: tpk.reserve(ctx.group, max_m=8, k=8))
        fake.capture = False
        assert sizes() == [str(2 << 20)]
        rows = 3 << 20
        tpk.reserve(ctx.group, max_m=rows, k=1, n=3)
        gather(1000, 2000)
        slots = -(-(4096 + -(-rows // ctx.world) * ctx.world * 16) // (2 << 20)) * (2 << 20)
        few = -(-small.WORKSPACE_BYTES // (2 << 20)) * (2 << 20)
        assert sizes()[1:] == [str(few), str((48 << 20) + (2 << 20)), str(slots)]
        # A graph replays into the first allocation: it lives on.
        space = workspace._spaces[ctx.group_name, torch.device("cpu"), "gather"]
        assert [memory.numel() for memory, _ in space.kept] == [2 << 20] and not space.captured
        for n in (8, 1 << 19):  # small, and not
            tpk.reserve(ctx.group, max_m=16, all_reduce_n=n)
            fake.capture = True
            tpk.matmul_all_reduce(ones(16, 1), ones(1, n), ctx.group, path=FUSED)
            fake.capture = False
            assert fake.log[-1] == ("small packets" if n == 8 else "all_reduce")
        before = len(fake.log)
        tpk.reserve(ctx.group, max_m=8, k=8, n=8, all_reduce_n=8, dtype=F32)
        assert len(fake.log) == before
        expect(
            tpk.errors.BackendError,
            ["same size", "rank 0"],
            lambda: tpk.reserve(ctx.group, max_m=8 + ctx.rank, k=8),
        )


def test_memory_of_calls(ranks):
    ranks.run(on_fakes, _memory_of_calls, world=3)


def _single(ctx):
    x, w = torch.ones(6, 8, dtype=BF16), torch.ones(8, 4, dtype=BF16)
    for op in (tpk.all_gather_matmul, tpk.matmul_reduce_scatter):
        assert torch.equal(op(x, w, ctx.group, path=FUSED), x @ w)
        assert tpk.last_path().path == "streamk"
    tpk.reserve(ctx.group, max_m=8, k=8, n=8)


def test_one_rank_multiplies(ranks):
    ranks.run(on_device, _single, world=1)


def test_arguments_of_reserve(ranks):
    ranks.run(on_device, _bad_reserve, world=2)


def _bad_reserve(ctx):
    for name, value in (("max_m", -1), ("k", 2.0), ("n", True), ("all_reduce_n", "3")):
        call = lambda name=name, value=value: tpk.reserve(ctx.group, **{"max_m": 1, name: value})  # noqa: E731
        expect(ArgumentError, [name, repr(value)], call)
    if not torch.cuda.is_available():
        expect(BackendError, ["fused", "no CUDA device"], lambda: tpk.reserve(ctx.group, max_m=8, k=8))
    expect(BackendError, ["fused", "cpu"], lambda: tpk.reserve(ctx.group, max_m=8, k=8, device="cpu"))


# Operands


def test_what_the_copy_engine_takes():
    """Views where it can push them, else copies."""
    x = torch.arange(48).view(6, 8)
    for shard in (x, x[:, 3:], x[::2], x[:1].t().t(), x[:, :1], x.new_empty(0, 8)):
        assert shard.numel() == 0 or fused.pushable(shard).data_ptr() == shard.data_ptr()
    for shard in (x.t(), x[:1].expand(6, 8), x.flatten().as_strided((4, 8), (4, 1)), x[:, ::2]):
        pushable = fused.pushable(shard)
        assert torch.equal(pushable, shard) and pushable.is_contiguous()
    assert fused.pushable(x.t()[:0]).stride(1) == 1


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_and_back(dim):
    x = torch.randn(3, 4, 5, 6)
    rows = fused.as_rows(x, dim, 60)
    for i in range(x.shape[dim]):  # index i of the dimension has its rows together
        inner = 60 // x.shape[dim]
        assert torch.equal(rows[i * inner : (i + 1) * inner], x.select(dim, i).reshape(inner, 6))
    back = fused.from_rows(rows, dim, x.shape[dim], fused.inner_shape(x.shape, dim))
    assert torch.equal(back, x) and back.is_contiguous()
