"""Profiles: intervals, classification, the summary, and kineto traces with known answers."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from bench.errors import BenchError
from bench.profiling import KINDS, bracket, classify, finish, intervals, kineto, profile, summary
from bench.profiling.ranges import Launch, Range, totals
from bench.profiling.summary import Event, RankProfile

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"
PAUSE = "at::cuda::(anonymous namespace)::spin_kernel(long)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


# Intervals.


def test_union_intersection_difference():
    a = intervals.union([(5, 7), (0, 2), (1, 3), (3, 4), (6, 6), (9, 8)])
    assert a == [(0, 4), (5, 7)]
    b = intervals.union([(1, 2), (3, 6), (10, 11)])
    assert intervals.intersection(a, b) == [(1, 2), (3, 4), (5, 6)]
    assert intervals.difference(a, b) == [(0, 1), (2, 3), (6, 7)]
    assert intervals.difference(a, []) == a and intervals.intersection(a, []) == []
    assert intervals.length(a) == 6


def test_intervals_against_sets_of_points(seed):
    """On whole numbers an interval is the set of its unit cells."""
    draw = random.Random(seed)

    def cells(some: list[tuple[float, float]]) -> set[int]:
        return {i for begin, end in some for i in range(int(begin), int(end))}

    def some() -> list[tuple[float, float]]:
        return [(b, b + draw.randrange(6)) for b in (draw.randrange(40) for _ in range(draw.randrange(8)))]

    for _ in range(300):
        x, y = some(), some()
        a, b = intervals.union(x), intervals.union(y)
        assert cells(a) == cells(x) and intervals.length(a) == len(cells(x))
        assert all(p[1] < q[0] for p, q in itertools.pairwise(a))
        assert cells(intervals.intersection(a, b)) == cells(x) & cells(y)
        assert cells(intervals.difference(a, b)) == cells(x) - cells(y)


# Classification.


@pytest.mark.parametrize(
    "name,expected",
    [
        (NCCL, "communication"),
        (
            "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>",
            "communication",
        ),
        ("void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long)", "communication"),
        ("nvshmemi_transfer_rma", "communication"),
        (GEMM, "compute"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "compute"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", "compute"),
        ("void tpk::sm80::streamk_kernel<...>", "compute"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "compute"),
        (ADD, "compute"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "other"),
    ],
)
def test_kernels(name, expected):
    assert classify.kernel(name) == expected


def test_pauses():
    assert classify.is_pause(PAUSE) and classify.is_pause("spin_kernel")
    assert classify.is_pause("at::cuda::<unnamed>::spin_kernel(long)")
    assert not classify.is_pause("respin_kernel<4>") and not classify.is_pause(GEMM)
    assert classify.kernel(PAUSE) == "other"


def test_copies():
    assert classify.memcpy("Memcpy DtoD (Device -> Device)") == "copy"
    assert classify.memcpy("Memcpy PtoP (Device -> Device)") == "communication"
    assert classify.memcpy("Memcpy DtoD", between_devices=True) == "communication"
    assert classify.memcpy("Memset (Device)") == "other"


# Summary.


def test_summary_has_the_overlap_and_only_the_first_steps():
    events = [
        e
        for step in range(5)
        for e in (
            Event("ag", 100 * step, 100 * step + 40, "communication", "stream 20"),
            Event("mm", 100 * step + 30, 100 * step + 60, "compute", "stream 7"),
            Event("mm", 100 * step + 35, 100 * step + 50, "compute", "stream 8"),  # beside the other
        )
    ]
    late = [Event(e.name, e.start - 1000, e.end - 1000, e.category, e.stream) for e in events]
    profiles = [
        RankProfile(
            1, late, steps=5, clock_ns=1_010_000
        ),  # begins at -1000 + 1010 = 10 us on the other's clock
        RankProfile(0, events, steps=5, clock_ns=0),
    ]
    found = summary.build(profiles, "AG", tool="kineto")
    assert (found["schema"], found["kind"], found["title"], found["steps"]) == (1, "trace_summary", "AG", 5)
    first, second = found["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["communication_us"] == 200 and first["compute_us"] == 150
    assert first["overlap_fraction"] == 0.25 and first["exposed_us"] == 150
    assert [len(s["events"]) for s in first["streams"]] == [2, 2, 2]
    assert first["streams"][0]["events"][1] == {
        "name": "ag",
        "start_us": 100,
        "dur_us": 40,
        "category": "communication",
    }
    assert second["streams"][0]["events"][0]["start_us"] == 10
    text = summary.tables(found, profiles)
    assert "25.0" in text and "150" not in text.splitlines()[4]  # per step


def communicating(*times: float) -> list[RankProfile]:
    """One rank for each time of a step; two steps."""
    return [
        RankProfile(rank, [Event("ag", 0, 2 * us, "communication", "stream 20")], steps=2)
        for rank, us in enumerate(times)
    ]


def test_a_late_rank_is_told():
    profiles = communicating(597.5, 86.2, 400)
    found = summary.build(profiles, "AG", tool="nsys")
    assert "597.5 us a step on rank 0 and 86.2 us on rank 1, which seems late" in found["warning"]
    assert found["warning"] in summary.tables(found, profiles).splitlines()


@pytest.mark.parametrize(
    "times,late",
    [((100, 119), False), ((121, 100), True), ((0, 5), True), ((0, 0), False), ((7,), False), ((), False)],
)
def test_when_a_rank_is_late(times, late):
    profiles = communicating(*times)
    found = summary.build(profiles, "", tool="nsys")
    assert bool(found["warning"]) == late
    assert ("warning" in summary.tables(found, profiles)) == late


def test_the_time_axis_begins_where_the_first_rank_begins():
    events = [Event("mm", 100, 110, "compute", "stream 7")]
    ranks = [RankProfile(0, events, begin=97.0), RankProfile(1, events, begin=99.0, clock_ns=1000)]
    found = summary.build(ranks, "", tool="nsys")["ranks"]
    assert [r["streams"][0]["events"][0]["start_us"] for r in found] == [3, 4]


def test_summary_of_many_events_stays_small():
    events = [Event("mm", i, i + 0.5, "compute", "stream 7") for i in range(10 * summary.MAX_EVENTS)]
    (rank,) = summary.build([RankProfile(0, events)], "", tool="kineto")["ranks"]
    assert sum(len(s["events"]) for s in rank["streams"]) == summary.MAX_EVENTS
    assert rank["compute_us"] == 5 * summary.MAX_EVENTS  # of all
    assert rank["overlap_fraction"] == 0 and rank["exposed_us"] == 0


def test_range_totals():
    ranges = [
        Range("op", 0, 10, "t1"),
        Range("inner", 2, 4, "t1"),
        Range("op", 20, 25, "t1"),
        Range("op", 0, 9, "t2"),
    ]
    launches = [
        Launch(1, "t1", 1),
        Launch(3, "t1", 2),
        Launch(20, "t1", 3),
        Launch(12, "t1", 4),
        Launch(25, "t1", 5),
    ]
    busy = {1: [(100, 110)], 2: [(105, 120), (130, 131)], 3: [(140, 150)], 4: [(200, 300)], 5: [(400, 500)]}
    found = {r.name: (r.count, r.host_us, r.gpu_us) for r in totals(ranges, launches, busy)}
    assert found == {"op": (3, 24, 31), "inner": (1, 2, 16)}
    assert all(r.gpu_us is None for r in totals(ranges, launches, None))


# kineto.


def span(name: str, cat: str, ts: float, dur: float, pid: Any, tid: Any, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def gpu_trace(pid: int, base: int) -> dict[str, Any]:
    """As kineto writes it: one process row for the CPU, one for each GPU; launches joined to kernels by correlation."""
    at = 1000.0
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "ts": at, "pid": pid, "tid": 0, "args": {"name": "python3"}},
            {"ph": "M", "name": "process_labels", "ts": at, "pid": pid, "tid": 0, "args": {"labels": "CPU"}},
            {
                "ph": "M",
                "name": "process_sort_index",
                "ts": at,
                "pid": pid,
                "tid": 0,
                "args": {"sort_index": pid},
            },
            {"ph": "M", "name": "process_labels", "ts": at, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
            {"ph": "M", "name": "process_labels", "ts": at, "pid": 1, "tid": 0, "args": {"labels": "GPU 1"}},
            {"ph": "M", "name": "thread_name", "ts": at, "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
            span(
                NCCL, "kernel", at - 50, 30, 0, 20, stream=20, device=0, correlation=1
            ),  # to line up: not counted
            span("step 0", "user_annotation", at, 90, pid, pid),
            span("ProfilerStep#2", "user_annotation", at, 95, pid, pid),
            span("gather nccl", "user_annotation", at + 1, 20, pid, pid),
            span("cudaLaunchKernel", "cuda_runtime", at + 5, 2, pid, pid, correlation=2),
            span("product cublas", "user_annotation", at + 30, 20, pid, pid),
            span("cuLaunchKernelEx", "cuda_driver", at + 35, 2, pid, pid, correlation=3),
            span(NCCL, "kernel", at + 50, 100, 0, 20, stream=20, device=0, correlation=2),
            span(GEMM, "kernel", at + 100, 80, 0, 7, stream=7, device=0, correlation=3),
            span(
                "Memcpy PtoP (Device -> Device)", "gpu_memcpy", at + 180, 20, 0, 21, stream=21, correlation=4
            ),
            span("Memset (Device)", "gpu_memset", at + 200, 1, 0, 7, stream=7, correlation=5),
            {"ph": "s", "id": 2, "cat": "ac2g", "name": "ac2g", "pid": pid, "tid": pid, "ts": at + 5},
            {
                "ph": "f",
                "id": 2,
                "cat": "ac2g",
                "name": "ac2g",
                "pid": 0,
                "tid": 20,
                "ts": at + 50,
                "bp": "e",
            },
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": at + 300},
        ],
    }


def test_kineto_summary():
    (rank,) = kineto.summarise({0: gpu_trace(111, 10**18)}, title="AG")["ranks"]
    assert rank["communication_us"] == 120 and rank["compute_us"] == 80
    assert rank["overlap_fraction"] == round(50 / 120, 6) and rank["exposed_us"] == 70
    by_name = {s["name"]: s["events"] for s in rank["streams"]}
    assert set(by_name) == {"stream 20", "stream 7", "stream 21"}
    assert [(e["name"], e["start_us"], e["dur_us"], e["category"]) for e in by_name["stream 7"]] == [
        (GEMM, 50, 80, "compute"),
        ("Memset (Device)", 150, 1, "other"),
    ]
    found = {r.name: r.gpu_us for r in kineto.profile_of(gpu_trace(111, 0), 0).ranges}
    assert found == {"step 0": 180 - 50, "gather nccl": 100, "product cublas": 80}


def paused_trace(pid: int, base: int) -> dict[str, Any]:
    """The same behind a pause, which ends after the host has begun with the step."""
    trace, at = gpu_trace(pid, base), 1000.0

    def launched(name: str, when: float, begin: float, end: float, stream: int, number: int) -> None:
        trace["traceEvents"] += [
            span("cudaLaunchKernel", "cuda_runtime", at + when, 1, pid, pid, correlation=number),
            span(
                name,
                "kernel",
                at + begin,
                end - begin,
                0,
                stream,
                stream=stream,
                device=0,
                correlation=number,
            ),
        ]

    trace["traceEvents"].append(span("warm-up", "user_annotation", at - 300, 50, pid, pid))
    launched(GEMM, -290, -280, -200, 7, 90)  # of the warm-up
    launched(PAUSE, -100, -90, 30, 7, 91)
    launched(NCCL, -90, 31, 41, 7, 92)
    launched(PAUSE, -80, 42, 48, 7, 93)
    launched(ADD, 2, 49, 50, 7, 94)
    launched(PAUSE, 40, 220, 230, 7, 95)  # a step's own
    return trace


def test_kineto_counts_from_the_end_of_the_pause():
    plain, paused = (
        kineto.summarise({0: make(111, 10**18)})["ranks"][0] for make in (gpu_trace, paused_trace)
    )
    for name in ("communication_us", "exposed_us"):
        assert paused[name] == plain[name]
    assert paused["compute_us"] == plain["compute_us"] + 1
    events = [(e["name"], e["start_us"]) for s in paused["streams"] for e in s["events"]]
    assert sorted(events, key=lambda e: e[1])[:3] == [(ADD, 1), (NCCL, 2), (GEMM, 52)]
    assert (PAUSE, 172) in events and len(events) == 6
    found = kineto.profile_of(paused_trace(111, 0), 0)
    assert found.begin == 1048 and kineto.profile_of(gpu_trace(111, 0), 0).begin is None
    gpu = {r.name: r.gpu_us for r in found.ranges}
    assert gpu == {"step 0": 131 + 10, "gather nccl": 101, "product cublas": 90}
    sums = kineto.summarise({0: paused_trace(1, 10**18), 1: paused_trace(2, 10**18 + 5_000_000)})["ranks"]
    assert min(e["start_us"] for s in sums[1]["streams"] for e in s["events"]) == 5001


def test_kineto_merge_puts_ranks_beside_each_other_on_one_clock():
    merged = kineto.merge({1: gpu_trace(222, 10**18 + 5_000_000), 0: gpu_trace(111, 10**18)})
    assert merged["baseTimeNanoseconds"] == 10**18
    events = merged["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0: CPU", "rank 0: GPU 0", "rank 1: CPU", "rank 1: GPU 0"]
    gemms = {names[e["pid"]]: e["ts"] for e in events if e["name"] == GEMM}
    assert gemms == {"rank 0: GPU 0": 1100, "rank 1: GPU 0": 6100}
    arrows: dict[int, set[str]] = {}
    for e in events:
        if e["ph"] in "sf":
            arrows.setdefault(e["id"], set()).add(names[e["pid"]])
    assert sorted(map(sorted, arrows.values())) == [
        ["rank 0: CPU", "rank 0: GPU 0"],
        ["rank 1: CPU", "rank 1: GPU 0"],
    ]
    sums = kineto.summarise({0: gpu_trace(1, 10**18), 1: gpu_trace(2, 10**18 + 5_000_000)})
    assert sums["ranks"][1]["streams"][0]["events"][0]["start_us"] == 5000


def test_kineto_finish(tmp_path):
    for rank in range(2):
        summary.write_json(gpu_trace(100 + rank, 10**18), tmp_path / f"trace_rank{rank}.json.gz")
    path = kineto.finish(tmp_path, title="AG gpt3 M8192")
    found = json.loads(path.read_text())
    assert (
        path == tmp_path / "trace_summary.json"
        and found["title"] == "AG gpt3 M8192"
        and len(found["ranks"]) == 2
    )
    assert "traceEvents" in summary.read_json(tmp_path / "trace.json.gz")
    text = (tmp_path / "summary.txt").read_text()
    assert "AG gpt3 M8192" in text and "41.7" in text and "gather nccl" in text


def test_kineto_finish_without_traces(tmp_path):
    with pytest.raises(BenchError, match=r"trace_rank0\.json\.gz"):
        kineto.finish(tmp_path)


def test_profile_on_one_process(tmp_path):
    import torch

    import tpkernels as tpk

    a, b, calls = torch.randn(64, 64), torch.randn(64, 64), []

    def run() -> None:
        calls.append(tpk.matmul(a, b))

    (tmp_path / "trace_rank5.json.gz").write_bytes(b"of an earlier profile")
    profile("kineto", run, steps=3, out=tmp_path, rank=0, title='a "title"')
    assert len(calls) == 5
    found = json.loads(finish("kineto", tmp_path).read_text())
    assert found["title"] == "a 'title'" and found["steps"] == 3
    (rank,) = found["ranks"]
    assert rank["compute_us"] > 0 and rank["communication_us"] == 0 and rank["overlap_fraction"] == 0
    ranges = {
        r.name: r.count
        for r in kineto.profile_of(summary.read_json(tmp_path / "trace_rank0.json.gz"), 0).ranges
    }
    assert ranges["tpk::matmul [64, 64] x [64, 64] float32"] == 3 and ranges["step 2"] == 1
    bracket(run, 2)
    assert len(calls) == 8
    with pytest.raises(BenchError, match="expected at least 1, got 0"):
        kineto.record(run, 0, tmp_path, 0)
    with pytest.raises(BenchError, match="kineto, nsys, ncu"):
        profile("vtune", run, out=tmp_path, rank=0)  # type: ignore[arg-type]
    assert KINDS == ("kineto", "nsys", "ncu")
