"""Sets batched and grouped of the gemm suite: sizes, variants, plans, and results on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from bench.context import Context
from bench.suite import Case, Options
from bench.suites import gemm
from bench.suites.gemm import SUITE
from bench.suites.gemm_shapes import group_sizes, select
from bench.suites.gemm_stacked import EACH, GROUPED_MM, StackedWorkload, elements

CPU = Options(device="cpu", small=True)


def workload(op: str, m: int, n: int, k: int, **params: int) -> StackedWorkload:
    params = {"m": m, "n": n, "k": k, **params}
    case = Case("case", op, "float32", params, bytes=4.0 * sum(elements(op, params)))
    return StackedWorkload(case, Context(CPU))


def run(runnable):
    runnable.poison()
    for i in range(runnable.copies):
        runnable.launch(i)
    return runnable.check()


def test_sizes_of_groups_are_uneven_and_stay_as_they_are():
    for shape in select(["grouped", "grouped-swiglu"]):
        sizes = group_sizes(shape.groups, shape.m)
        assert len(sizes) == shape.groups and sum(sizes) == shape.m
        assert max(sizes) > 1.5 * shape.m / shape.groups
        assert sizes == group_sizes(shape.groups, shape.m)
    assert group_sizes(8, 1024) == [181, 25, 75, 48, 102, 478, 113, 2]  # results are compared by name


def test_variants():
    names = [v.name for v in SUITE.variants(Options())]
    cases = {
        s.op: gemm._case(s, "bfloat16") for s in select(["batched", "grouped", "grouped-swiglu", "square"])
    }
    taken = {op: [v for v in names if SUITE.applies(c, v, Options())] for op, c in cases.items()}
    assert taken["batched"] == ["cublas", "streamk", "streamk:data_parallel"]
    for op in ("grouped", "grouped_swiglu"):
        assert set(taken[op]) == {"cublas", "streamk", "streamk:data_parallel", GROUPED_MM, EACH}
    assert not {GROUPED_MM, EACH} & set(taken["matmul"])
    assert cases["batched"].flops == 2.0 * 2048 * 64**3
    assert cases["grouped"].bytes == 2.0 * (32768 * 2048 + 64 * 7168 * 2048 + 32768 * 7168)
    gated = cases["grouped_swiglu"]  # the last one: 8192 rows, N 2048, K 7168
    assert gated.bytes == 2.0 * (8192 * 7168 + 64 * 7168 * 4096 + 8192 * 2048)
    assert gated.flops == 2.0 * 8192 * 7168 * 4096


@pytest.mark.parametrize("variant", ["blas", "streamk", "streamk:data_parallel", EACH])
@pytest.mark.parametrize("op", ["batched", "grouped", "grouped_swiglu"])
def test_every_variant_is_right_on_the_cpu(op, variant):
    if variant == EACH and op == "batched":
        return
    work = workload(op, 40, 50, 60, batch=3) if op == "batched" else workload(op, 90, 50, 60, groups=5)
    runnable = work.prepare(variant)
    check = run(runnable)
    assert check.ok and check.error > 0
    assert len({s.out.data_ptr() for s in work.sets}) == runnable.copies >= 2
    if variant.startswith("streamk") and variant != EACH:
        assert runnable.extra["plan"]["tiles"] >= (3 if op == "batched" else 4)


@pytest.mark.parametrize("op", ["grouped", "grouped_swiglu"])
@pytest.mark.parametrize("kind", ["another weight", "not written"])
def test_a_wrong_group_is_caught(op, kind):
    work = workload(op, 90, 50, 60, groups=5)

    def wrong(s):
        work._torch_each(s)
        if kind == "not written":
            s.out[-1, -1] = math.nan
        else:
            last = next(g for g in reversed(range(5)) if work.sizes[g] > 0)
            begin, end = sum(work.sizes[:last]), sum(work.sizes[: last + 1])
            products = s.a[begin:end] @ s.weight[last - 1]
            gate = torch.nn.functional.silu(products[:, :-50]) if op == "grouped_swiglu" else 1
            s.out[begin:end] = gate * products[:, -50:]

    check = run(work._runnable(wrong))
    assert not check.ok and (check.error == math.inf) == (kind == "not written")
