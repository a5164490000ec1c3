"""The overlap suite's variants on gloo ranks: what they compute passes its check, what is tampered with does not."""

from __future__ import annotations

import math

import pytest
import torch
from overlap_cases import make, run_all

from bench.suite import Skip
from bench.suites.overlap import SUITE
from bench.suites.overlap_shapes import AG, AR, OPS, RS
from bench.suites.overlap_workload import OverlapWorkload

GPU_ONLY = {"symm_mem", "symm_mem:one_shot", "symm_mem:two_shot", "cublasmp", "ceiling"}


def check_variants(ctx, op, dtype):
    context, options, cases = make(ctx, op, dtype=dtype)
    ran = set()
    for case in cases:
        workload = SUITE.workload(case, context)
        for variant in SUITE.variants(options):
            if not SUITE.applies(case, variant.name, options):
                continue
            if variant.name in GPU_ONLY:
                try:
                    workload.prepare(variant.name)
                except Skip as reason:
                    assert str(reason) == f"{variant.name} needs GPUs, this run is on the CPU."
                    continue
                raise AssertionError(f"{variant.name} did not skip")
            runnable = workload.prepare(variant.name)
            assert runnable.copies >= 2
            for calls in (
                runnable.copies,
                2 * runnable.copies + 1,
            ):  # fewer than a walk would leave poison behind
                runnable.poison()
                for i in range(calls):
                    runnable.launch(i)
                check = runnable.check()
                assert check.ok, f"{case.name}, {variant.name}: {check}"
            assert check.tolerance < 0.02
            ran.add(variant.name)
        workload.close()
    assert ran == {"gloo+blas", "ours", "ours:gloo+blas", "ours:gloo+streamk", "comm", "gemm"}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_variants(ranks, op, world):
    ranks.run(check_variants, op, "bfloat16", world=world)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(ranks, dtype):
    ranks.run(check_variants, "RS", dtype, world=2)


def check_poison(ctx, op):
    """Outputs that are not written fail, also where only some of the buffer sets are not."""
    context, _, cases = make(ctx, op)
    workload = SUITE.workload(cases[0], context)
    for variant in ("gloo+blas", "ours", "ours:gloo+blas", "comm", "gemm"):
        runnable = workload.prepare(variant)
        run_all(runnable)
        assert runnable.check().ok
        runnable.poison()
        assert runnable.check().error == math.inf, variant
        runnable.launch(0)
        assert runnable.check().error == math.inf, variant


@pytest.mark.parametrize("op", OPS)
def test_unwritten_outputs_fail(ranks, op):
    ranks.run(check_poison, op, world=2)


def check_reference(ctx, op):
    """The reference is the product that a single process computes from everybody's inputs."""
    context, _, cases = make(ctx, op)
    problem = OverlapWorkload(cases[0], context).problem
    everything = context.agree((problem.x, problem.w))
    assert not torch.equal(everything[0][0][0], everything[1][0][0])  # data differ between ranks
    for i in range(problem.copies):
        xs = [x[i].double() for x, _ in everything]
        ws = [w[i].double() for _, w in everything]
        if op == "AG":
            want = torch.cat(xs) @ ws[ctx.rank].t()
        else:
            want = sum(x @ w.t() for x, w in zip(xs, ws, strict=True))
        assert torch.allclose(problem.reference[i], want[problem.rows[i]], rtol=1e-12, atol=1e-12)
        assert {int(r) // problem.shard for r in problem.rows[i]} == set(range(ctx.world)) or op == "AR"
    # What is in the last place of a rank's rows, or of one column, or of the sum, is seen.
    rows = want if op != "RS" else want.chunk(ctx.world)[ctx.rank]
    good = [reference_result(problem, everything, i, ctx.rank) for i in range(problem.copies)]
    assert problem.check(good).ok
    for spoil in (
        lambda t: t.mul_(1.02),
        lambda t: t[:, 3].add_(1.0),
        lambda t: t[-1].fill_(float("nan")),
        lambda t: t.copy_(t.roll(1, 0)),
    ):
        bad = [each.clone() for each in good]
        spoil(bad[-1])
        assert not problem.check(bad).ok
    assert not problem.check([*good[:-1], None]).ok
    assert not problem.check([each[:-1] for each in good]).ok
    assert rows.shape == good[0].shape


def reference_result(problem, everything, i, rank):
    xs, ws = [x[i].double() for x, _ in everything], [w[i].double() for _, w in everything]
    if problem.op == AG:
        whole = torch.cat(xs) @ ws[rank].t()
    else:
        whole = sum(x @ w.t() for x, w in zip(xs, ws, strict=True))
    if problem.op == RS:
        whole = whole.chunk(len(xs))[rank]
    return whole.to(problem.dtype)


@pytest.mark.parametrize("op", OPS)
def test_reference(ranks, op):
    ranks.run(check_reference, op, world=3)


def check_partial_sum(ctx, op):
    """A sum that lacks a rank's part is refused on every rank that should have had it."""
    context, _, cases = make(ctx, op)
    problem = OverlapWorkload(cases[0], context).problem
    everything = context.agree((problem.x, problem.w))
    for x, _ in everything[1:]:
        for each in x:
            each.zero_()
    lacking = [reference_result(problem, everything, i, ctx.rank) for i in range(problem.copies)]
    check = problem.check(lacking)
    assert check.error > 10 * check.tolerance


@pytest.mark.parametrize("op", ["RS", "AR"])
def test_partial_sums_fail(ranks, op):
    ranks.run(check_partial_sum, op, world=2)


def check_facts(ctx):
    for op, sent in ((AG, 32 * 40), (RS, 32 * 72), (AR, 2 * 32 * 72)):
        context, _, cases = make(ctx, op)
        workload = SUITE.workload(cases[0], context)
        comm = workload.prepare("comm")
        assert (comm.flops, comm.bytes) == (0.0, sent * 2 / 2)  # bfloat16; half of it is for the other rank
        assert workload.prepare("ours:gloo+streamk").extra["path"] == "gloo+streamk"


def test_facts(ranks):
    ranks.run(check_facts, world=2)


def check_fused_is_skipped(ctx, op):
    """Where path "fused" cannot run, the row has its reason."""
    context, _, cases = make(ctx, op)
    workload = SUITE.workload(cases[0], context)
    try:
        workload.prepare("ours:fused")
    except Skip as reason:
        assert "'fused'" in str(reason) and "cuda" in str(reason).lower(), reason
        return
    raise AssertionError("a fused kernel on the CPU?")


@pytest.mark.parametrize("op", ["AG", "RS"])
def test_fused_is_skipped(ranks, op):
    ranks.run(check_fused_is_skipped, op, world=2)
