"""The gemm suite of the benchmark: its shapes, what it asks of the kernel, and every variant's result on the CPU."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import pytest
import torch

import tpkernels as tpk
from bench.context import Context
from bench.errors import BenchError
from bench.suite import Case, Options, Skip
from bench.suites import gemm, gemm_planner
from bench.suites.gemm import SUITE
from bench.suites.gemm_planner import SAME_TILE, Planner, Request
from bench.suites.gemm_products import FP8, GemmWorkload
from bench.suites.gemm_shapes import DEFAULT_SETS, SETS, WAVE, select, sweep

CPU = Options(device="cpu", small=True)
STREAMED = [f"streamk:{schedule}" for schedule in gemm_planner.STREAMED]
OURS = ["streamk", "streamk:data_parallel", "streamk:dp-same-tile", *STREAMED]
SM90 = ("sm90", 132)  # the Hopper kernel
PORTABLE = ("sm90-portable", 132)


# --- shapes --------------------------------------------------------------------------------------------------


def test_sweep_is_log_uniform_within_its_bounds():
    shapes = sweep(3000, seed=5)
    sizes = [(s.m, s.n, s.k) for s in shapes]
    assert all(128 <= x <= 8192 and x % 8 == 0 for size in sizes for x in size)
    for i in range(3):  # six octaves with a sixth each; the deviation of such a share is 0.007
        octaves = Counter(min(5, int(math.log2(size[i] / 128))) for size in sizes)
        assert all(abs(octaves[o] / 3000 - 1 / 6) < 0.03 for o in range(6)), octaves
    logs = torch.tensor(sizes, dtype=torch.float64).log().T
    assert float((torch.corrcoef(logs) - torch.eye(3)).abs().max()) < 0.1  # m, n and k are independent


def test_sweep_depends_on_its_seed_alone():
    assert sweep(50, seed=7) == sweep(200, seed=7)[:50]
    other = sweep(50, seed=8)
    assert sum(a.m == b.m for a, b in zip(sweep(50, seed=7), other, strict=True)) < 10
    # Stable for good: results of different versions are compared by name.
    assert [s.name for s in sweep(2, seed=0)] == ["sweep 00000 4288x2992x736", "sweep 00001 376x1072x688"]


def test_waves_are_those_of_the_real_plan():
    shapes = select(["wave-grid", "waves"])
    counts = [s.waves for s in shapes]
    grids = select(["wave-grid"])
    assert len(grids) == 14 and len({s.waves for s in grids}) == 14
    assert all(s.m * s.n / WAVE == s.waves and s.k == 4096 for s in grids)
    for wanted in (1.01, 1.1, 1.5, 1.9, 2.0):
        assert any(abs(count - wanted) < 0.02 for count in counts), wanted
    assert min(counts) < 1 and sum(count > 4 for count in counts) >= 3
    assert all(s.m * s.n / WAVE <= s.waves and s.label == f"{s.waves:.2f}" for s in shapes)
    for s in grids:
        for device, tile, at_once in ((PORTABLE, "128x128x32", 264), (SM90, "128x256x64/1x1", 132)):
            planner, request = Planner(s.m, s.n, s.k, *device), Request("data_parallel", 1, tile)
            plan = planner.plan(request)
            assert (
                plan["tiles"] == s.waves * at_once
            )  # two of the smaller tiles run on each of 132 multiprocessors
            assert plan["workers"] == min(at_once, plan["tiles"])
            assert planner.waves(request) == pytest.approx(s.waves)


def test_tensor_parallel_shapes_are_an_eighth_of_the_model():
    shapes = {s.label: (s.m, s.n, s.k) for s in select(["tp"], models=["llama70b"], rows=[2048])}
    assert shapes == {
        "llama70b qkv": (2048, 1280, 8192),
        "llama70b out": (2048, 8192, 1024),
        "llama70b up": (2048, 7168, 8192),
        "llama70b down": (2048, 8192, 3584),
    }
    assert (8192, 6144, 12288) in [(s.m, s.n, s.k) for s in select(["tp"])]
    assert {s.m for s in select(["decode"])} == {1, 8, 16, 32, 64, 128}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_names_are_unique_for_a_dtype(small, device):
    options = Options(device=device, small=small, sets=tuple(SETS), sweep=500, dtypes=gemm.DTYPES[device])
    cases = SUITE.cases(options)
    assert max(Counter((case.dtype, case.name) for case in cases).values()) == 1
    assert {case.shape_set for case in cases} == {*SETS, "sweep"}
    if small:
        assert max(case.params[x] for case in cases for x in "mn") <= 256
        assert max(case.params["k"] for case in cases) <= 1025
    for case in cases:
        m, n, k = (case.params[x] for x in "mnk")
        times = case.params.get("batch", 2 if case.op.endswith("swiglu") else 1)
        assert case.flops == 2 * m * n * k * times and f"{m}x{n}x{k}" in case.name


def test_defaults_and_sets_asked_for():
    assert {c.shape_set for c in SUITE.cases(Options())} == set(DEFAULT_SETS)
    assert {c.shape_set for c in SUITE.cases(Options(sweep=3))} == {"sweep"}
    assert [c.shape_set for c in SUITE.cases(Options(sweep=1, sets=("layouts",)))][-2:] == [
        "layouts",
        "sweep",
    ]
    assert {c.op for c in SUITE.cases(Options(ops=("swiglu", "layouts")))} == {"swiglu", "layouts"}
    assert {c.shape_set for c in SUITE.cases(Options(models=("gpt3",)))} == {"tp", "decode"}
    assert {c.dtype for c in SUITE.cases(Options())} == {"bfloat16"}
    assert {c.dtype for c in SUITE.cases(CPU)} == {"float32"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (Options(sets=("sqare",)), "--set: 'sqare' is not known; expected one of square, tp, .*'square'"),
        (Options(sets=("sweep",)), "For random shapes use --sweep N"),
        (Options(models=("llama7b",)), "--model: 'llama7b' is not known; expected one of llama8b"),
        (Options(dtypes=("float32",)), "--dtype: 'float32' is not known; expected one of bfloat16, float16"),
        (
            Options(device="cpu", dtypes=("float8",)),
            "--dtype: 'float8' is not known; expected one of float32",
        ),
        (Options(ops=("push",)), "--op: 'push' is not known; expected one of matmul"),
        (Options(rows=(0,)), "--rows: expected M of at least 1, got 0"),
        (Options(sweep=-1), "--sweep: expected a number of shapes of at least 0, got -1"),
    ],
)
def test_what_is_unknown_is_named_in_a_sentence(options, sentence):
    with pytest.raises(BenchError, match=sentence):
        SUITE.cases(options)


def test_cases_and_variants_do_not_import_torch():
    code = (
        "import sys; from bench.suites.gemm import SUITE; from bench.suite import Options; o = Options(sweep=2)\n"
        "for case in SUITE.cases(o): [SUITE.applies(case, v.name, o) for v in SUITE.variants(o)]\n"
        "SUITE.bytes_needed(case, o)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- variants and plans --------------------------------------------------------------------------------------


def test_baseline_is_a_variant_and_fp8_only_where_it_applies():
    for options in (CPU, Options()):
        names = [v.name for v in SUITE.variants(options)]
        assert SUITE.baseline(options) == names[0] and len(set(names)) == len(names)
        product = gemm._case(select(["square"])[0], "bfloat16")
        assert [v for v in names if v.startswith("streamk") and SUITE.applies(product, v, options)] == OURS
    case = gemm._case(select(["square"])[0], "bfloat16")
    assert SUITE.applies(case, FP8, Options())
    assert not SUITE.applies(case, FP8, CPU)
    assert not SUITE.applies(gemm._case(select(["square"])[0], "float16"), FP8, Options())
    layouts = [gemm._case(s, "bfloat16") for s in select(["layouts"])]
    taken = {c.params["layout"] for c in layouts if SUITE.applies(c, FP8, Options())}
    assert taken == {"forward"}
    assert not any(SUITE.applies(c, FP8, Options()) for c in layouts if "odd" in c.name or "ragged" in c.name)


@pytest.mark.parametrize(
    "size", [(1024, 1024, 1024), (256, 4096, 16384), (1408, 3840, 4096), (4096, 4096, 512)]
)
@pytest.mark.parametrize("device", [SM90, PORTABLE, ("sm80", 108), ("cpu", 0)])
def test_schedules_are_compared_at_the_same_tile(size, device):
    planner = Planner(*size, *device)
    auto = planner.plan(planner.request("streamk"))
    assert planner.request("streamk") == Request()
    for variant in [SAME_TILE, *STREAMED]:
        try:
            request = planner.request(variant)
        except Skip:
            continue
        plan = planner.plan(request)
        assert plan["tile"] == auto["tile"] and plan["cluster"] == auto["cluster"], variant
        assert request.tile == planner.tile_name(Request()) and request.tile.startswith(
            "x".join(map(str, auto["tile"]))
        )
        expected = "data_parallel" if variant == SAME_TILE else variant.removeprefix("streamk:")
        assert plan["schedule"] == expected
        assert (plan["partial_tiles"] > 0) == (variant != SAME_TILE)
    assert planner.plan(planner.request("streamk:data_parallel"))["partial_tiles"] == 0


def test_a_forced_schedule_alone_would_change_the_tile():
    """Why the tile is forced too: the planner takes another one for each schedule."""
    planner = Planner(1408, 3840, 4096, *PORTABLE)
    best = planner.plan(planner.request("streamk:data_parallel"))
    same = planner.plan(planner.request(SAME_TILE))
    assert best["tile"] != same["tile"] and best["predicted_us"] < same["predicted_us"]


def test_splits_are_the_cheapest_by_the_model():
    planner = Planner(256, 4096, 16384, *PORTABLE)
    chosen = planner.request("streamk:split_k")
    costs = {
        s: planner.plan(Request("split_k", s, chosen.tile))["predicted_us"]
        for s in gemm_planner._SPLITS["split_k"]
    }
    assert chosen.splits > 1 and costs[chosen.splits] == min(costs.values())


def test_schedules_with_nothing_to_stream_are_skipped():
    full = Planner(1536, 5632, 4096, *PORTABLE)  # two full waves
    for variant in ("streamk:hybrid_first", "streamk:hybrid_last"):
        with pytest.raises(
            Skip, match="data-parallel here: nothing to stream among 264 tiles of 128 iterations"
        ):
            full.request(variant)
    assert full.request("streamk:stream_k").schedule == "stream_k"
    for variant in STREAMED:  # K too short to be cut
        with pytest.raises(Skip, match="data-parallel here"):
            Planner(4096, 4096, 64, *PORTABLE).request(variant)


def test_plan_is_the_one_that_explain_gives():
    a, b = torch.empty(300, 2000), torch.empty(2000, 200)
    planner = Planner.of(300, 200, 2000, torch.device("cpu"))
    plan = planner.plan(Request())
    explained = dict(tpk.explain("matmul", a, b).plan)
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in explained.items()}
    same = plan.keys() & shown.keys()
    assert {"schedule", "tile", "tiles", "k_iters", "workers", "splits", "partial_tiles"} <= same
    assert {key: plan[key] for key in same} == {key: shown[key] for key in same}


# --- results -------------------------------------------------------------------------------------------------


def workload(m, n, k, layout="forward", dtype="float32"):
    moved = gemm.ITEM_BYTES[dtype] * (m * k + k * n + m * n)
    case = Case("case", "matmul", dtype, {"m": m, "n": n, "k": k, "layout": layout}, bytes=moved)
    return GemmWorkload(case, Context(CPU))


def run(runnable):
    runnable.poison()
    for i in range(runnable.copies):
        runnable.launch(i)
    return runnable.check()


@pytest.mark.parametrize("dtype", gemm.DTYPES["cpu"])
@pytest.mark.parametrize("variant", ["blas", *OURS])
def test_every_variant_is_right_on_the_cpu(variant, dtype, monkeypatch):
    monkeypatch.setenv(
        "TPK_NUM_THREADS", "3"
    )  # a number of workers that leaves every schedule something to stream
    work = workload(70, 90, 1100, dtype=dtype)
    runnable = work.prepare(variant)
    check = run(runnable)
    assert check.ok and (check.error > 0 or dtype == "float64")
    for product in work.products:
        want = product.a.double() @ product.b.double()
        assert float((product.out.double() - want).norm() / want.norm()) < check.tolerance
    assert len({product.out.data_ptr() for product in work.products}) == runnable.copies >= 2
    if variant != "blas":
        assert runnable.extra["waves"] > 0 and runnable.extra["plan"]["tiles"] > 0


@pytest.mark.parametrize("layout", ["forward", "dgrad", "wgrad", "columns", "padded"])
def test_layouts_have_the_strides_of_their_names(layout):
    work = workload(33, 47, 65, layout)
    product = work.products[0]
    assert product.a.shape == (33, 65) and product.b.shape == (65, 47) and product.out.shape == (33, 47)
    strides = {"forward": ((65, 1), (1, 65)), "dgrad": ((65, 1), (47, 1)), "wgrad": ((1, 33), (47, 1))}
    strides["columns"] = ((1, 33), (1, 65))
    assert (product.a.stride(), product.b.stride()) == strides.get(layout, ((66, 1), (1, 66)))
    for variant in ("blas", "streamk"):
        assert run(work.prepare(variant)).ok


def test_the_kernel_is_asked_for_what_the_plan_says(monkeypatch):
    asked = []
    monkeypatch.setattr(Planner, "request", lambda self, variant: Request("stream_k", 1, "16x64x128"))
    monkeypatch.setattr(
        torch.ops.tpkernels, "streamk_gemm", lambda *args: asked.append(args[7:]), raising=False
    )
    runnable = workload(40, 50, 600).prepare("streamk:stream_k")
    runnable.launch(0)
    assert asked == [("stream_k", 0, 1, "16x64x128")] and runnable.extra["plan"]["tile"] == [16, 64, 128]


def _wrong(kind):
    def run(product):
        out = torch.mm(product.a, product.b, out=product.out)
        if kind == "scaled":
            out.mul_(1.001)
        elif kind == "a tile":  # 8 of 90 columns lack the last part of K
            out[:, 40:48] = product.a[:, :-50] @ product.b[:-50, 40:48]
        elif kind == "not written":
            out[-1, -1] = float("nan")

    return run


@pytest.mark.parametrize("kind", ["scaled", "a tile", "not written"])
def test_a_wrong_result_is_caught(kind):
    check = run(workload(200, 90, 1100)._runnable(_wrong(kind)))
    assert not check.ok and (check.error == math.inf) == (kind == "not written")


def test_a_result_of_an_earlier_variant_does_not_count():
    work = workload(64, 48, 32)
    assert run(work.prepare("blas")).ok
    idle = work._runnable(lambda product: None)
    assert run(idle).error == math.inf


def test_fp8_is_judged_by_its_own_operands(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    work = workload(48, 64, 256, dtype="bfloat16")
    runnable = work.prepare(FP8)
    try:
        check = run(runnable)
    except RuntimeError as error:
        pytest.skip(f"this torch has no fp8 product on the CPU ({error})")
    assert check.ok and check.error < 4e-3  # against the operands before their rounding it would be some 5 %
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(Skip, match=r"fp8 needs compute capability 8\.9 or newer, this device has 8\.0"):
        work.prepare(FP8)


def test_memory_estimate_covers_two_buffer_sets():
    for case in SUITE.cases(Options(device="cpu", small=True, sets=tuple(SETS))):
        if case.op != "matmul":
            continue
        work = GemmWorkload(case, Context(CPU))
        used = sum(t.untyped_storage().nbytes() for p in work.products[:2] for t in (p.a, p.b, p.out))
        assert used <= SUITE.bytes_needed(case, CPU)
        work.close()
        assert not work.products
