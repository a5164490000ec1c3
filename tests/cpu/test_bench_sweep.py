"""The suite ``sweep``: its sample, its memory, what its check must see, and what becomes of variants that go wrong."""

from __future__ import annotations

import gc
import itertools
import math
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cli, measure, resume, start
from bench.bars import SWEEP_SEED, SWEEP_SHAPES
from bench.checks import tolerance
from bench.context import Context
from bench.errors import BenchError
from bench.measure import Budget, Series
from bench.nvml import Sampler
from bench.plan import Item, Job, Selection, Settings, measured, plan
from bench.projections import Projection
from bench.records import Header, Row, Stats, append
from bench.suite import Options
from bench.suites import sweep_runner
from bench.suites.gemm_planner import SAME_TILE, Planner, Request
from bench.suites.gemm_shapes import sweep
from bench.suites.sweep import SUITE
from bench.suites.sweep_memory import MOST_COPIES, Memory
from bench.suites.sweep_runner import AGAIN_EVERY, SweepRunner

CPU = Options(device="cpu", small=True)
GPU = Options(device="cuda")
BF16 = torch.bfloat16
OURS = ["streamk", SAME_TILE, "auto"]


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the sample ----------------------------------------------------------------------------------------------


def test_the_sample_is_that_of_the_bars():
    cases = SUITE.cases(GPU)
    assert len(cases) == SWEEP_SHAPES and GPU.seed == SWEEP_SEED
    assert [c.name for c in cases] == [s.name for s in sweep(SWEEP_SHAPES, SWEEP_SEED)]
    assert {c.dtype for c in cases} == {"bfloat16"} and {c.shape_set for c in cases} == {"sweep"}
    assert [c.params["index"] for c in cases] == list(range(SWEEP_SHAPES))


@pytest.mark.parametrize(("count", "parts"), [(1000, 10), (7, 3), (2, 5)])
def test_parts_are_the_sample(count: int, parts: int):
    whole = SUITE.cases(Options(sweep=count))
    pieces = [SUITE.cases(Options(sweep=count, part=(i, parts))) for i in range(1, parts + 1)]
    assert [c for piece in pieces for c in piece] == list(whole)
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (Options(dtypes=("int8",)), "--dtype: 'int8' is not known"),
        (Options(sets=("square",)), "sweep: --set does not choose among sampled shapes; use --shapes"),
        (Options(rows=(8,)), "sweep: --rows does not choose"),
        (Options(models=("llama8b",)), "sweep: --model does not choose"),
    ],
)
def test_what_a_sample_has_no_use_for_is_a_sentence(options: Options, sentence: str):
    with pytest.raises(BenchError, match=sentence):
        SUITE.cases(options)


@pytest.mark.parametrize("text", ["3", "0/4", "5/4", "a/b", "1/2/3"])
def test_a_part_is_one_of_several(capsys: pytest.CaptureFixture[str], text: str):
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--part", text])
    assert f"expected a part of several such as 3/10, got {text}" in capsys.readouterr().err


def test_options_reach_the_ranks():
    (job,) = plan(
        SUITE, Options(device="cpu", small=True, part=(2, 3), sweep=6), Selection(), set(), Settings()
    )
    assert Job.from_json(job.to_json()).options == job.options
    assert [item.case for item in job.items] == [c.name for c in SUITE.cases(job.options)]


def test_tiles_are_forced_with_the_schedules_that_the_planner_chooses_from():
    names = [v.name for v in SUITE.variants(Options(tiles=("128x256x64/2x1", "64x64x32")))]
    assert names[:2] == ["cublas", "streamk"] and "auto" not in names
    assert [n for n in names if n.endswith("/2x1")] == [
        "streamk:data_parallel@128x256x64/2x1",
        "streamk:hybrid_aligned@128x256x64/2x1",
    ]
    assert "streamk:stream_k@64x64x32" in names
    planner = Planner(1000, 1000, 1000, "sm90", 132)
    assert planner.request("streamk@128x256x64/2x1") == Request("auto", 1, "128x256x64/2x1")


def test_plans_of_wide_dtypes_are_the_portable_kernels(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, str]] = []

    def streamk_plan(*arguments: Any, **more: str) -> Any:
        asked.append({"device": arguments[4], **more})
        return "data_parallel", [64, 64, 16, 4, 4, 4, 1, 0, 1, 1, 1, 0], 1.0

    monkeypatch.setattr(torch.ops.tpkernels, "streamk_plan", streamk_plan)
    Planner(128, 128, 128, "sm90-portable", 132, "float64").plan(Request())
    Planner(128, 128, 128, "sm90", 132).plan(Request())
    assert asked == [{"device": "sm90-portable", "dtype": "float64"}, {"device": "sm90"}]


def test_neither_torch_nor_a_gpu_is_needed_to_list():
    code = (
        "import sys; from bench.suites.sweep import SUITE; from bench.suite import Options; o = Options(sweep=2)\n"
        "assert SUITE.cases(o) and SUITE.variants(o) and SUITE.baseline(o); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_not_profiled():
    with pytest.raises(BenchError, match="bench gemm --sweep N --case NAME --profile"):
        SUITE.workload(SUITE.cases(CPU)[0], Context(CPU))


def test_a_run_goes_on_in_its_file_on_the_same_card_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    planned: list[list[str]] = []
    monkeypatch.setattr(start, "_run_all", lambda given, loaded, plans, *rest: planned.append(
        [item.case for job in plans["sweep"] for item in job.items]) or 0)  # fmt: skip
    monkeypatch.setattr(
        resume, "present", lambda *_: {"cards": ["A"], "torch": "", "nccl": "", "commit": "", "dirty": None}
    )
    path = tmp_path / "r.jsonl"
    command = ["sweep", "--device", "cpu", "--shapes", "6", "--out", str(path)]
    names = [case.name for case in SUITE.cases(Options(device="cpu", small=True, sweep=6))]
    assert cli.main(command) == 0 and planned.pop() == names
    done = [Row("sweep", name, "matmul", variant, "ours", dtype="float32", run="r")
            for name in names[:4] for variant in ("blas", *OURS)]  # fmt: skip
    append(path, Header("r", "sweep", "", [], {"gpu": "A"}), *done)
    assert cli.main(command) == 0 and planned.pop() == names[4:]
    assert cli.main([*command, "--part", "3/3"]) == 0 and planned.pop() == names[4:]
    assert cli.main([*command, "--part", "2/3"]) == 0 and planned.pop() == []
    monkeypatch.setattr(
        resume, "present", lambda *_: {"cards": ["B"], "torch": "", "nccl": "", "commit": "", "dirty": None}
    )
    assert cli.main(command) == 2 and not planned
    assert "was measured on A, this is B; choose another file with --out" in capsys.readouterr().err


# --- the check -----------------------------------------------------------------------------------------------


def product(
    generator: torch.Generator, m: int, n: int, k: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = (
        (torch.rand(s, generator=generator, dtype=torch.float64) * 2 - 1).to(dtype) for s in ((m, k), (n, k))
    )
    b = b.t()
    return a, b, (a.double() @ b.double()).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n", "k"), [(512, 1024, 256), (64, 64, 4096), (130, 100, 72), (200, 333, 128)])
def test_right_products_pass(generator: torch.Generator, m: int, n: int, k: int, dtype: torch.dtype):
    a, b, out = product(generator, m, n, k, dtype)
    assert Projection.of(a, b, generator).error(out) < 0.9 * tolerance(dtype)


@pytest.fixture
def judged(generator: torch.Generator) -> tuple[Projection, torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, out = product(generator, 640, 896, 512)
    return Projection.of(a, b, generator), a, b, out


def test_a_wrong_tile_is_seen(judged: Any, generator: torch.Generator):
    projection, _, _, out = judged
    for m, n in ((0, 0), (512, 768), (128, 256)):
        wrong = out.clone()
        wrong[m : m + 128, n : n + 128] = wrong[m : m + 128, n : n + 128].roll(1, 0)
        assert projection.error(wrong) > 0.9
    # What one warp stores at a time, and one element of usual size.
    wrong = out.clone()
    wrong[304:320, 128:144] = 0
    assert projection.error(wrong) > 4 * tolerance(BF16)
    wrong = out.clone()
    wrong[300, 700] += math.sqrt(512) / 3
    assert projection.error(wrong) > 2 * tolerance(BF16)


def test_a_missing_slab_of_k_is_seen(judged: Any):
    projection, a, b, out = judged
    slab = slice(192, 256)
    less = (a[:, slab].double() @ b[slab].double()).to(BF16)
    wrong = out.clone()
    wrong[:128, 640:] -= less[:128, 640:]
    assert projection.error(wrong) > 50 * tolerance(BF16)
    assert projection.error((out.double() * (1 + 2**-6)).to(BF16)) > 2 * tolerance(
        BF16
    )  # systematic, everywhere


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_seen(judged: Any, value: float):
    projection, _, _, out = judged
    out[639, 895] = value
    assert projection.error(out) == math.inf


def test_nothing_to_add_up(generator: torch.Generator):
    a, b, out = product(generator, 64, 128, 0)
    projection = Projection.of(a, b, generator)
    assert projection.error(out) == 0.0
    out[5, 5] = 1e-3
    assert projection.error(out) == math.inf
    a, b, out = product(generator, 0, 128, 8)
    assert Projection.of(a, b, generator).error(out) == 0.0


# --- memory --------------------------------------------------------------------------------------------------


def test_operands_are_views_of_one_pool_that_do_not_overlap(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Context, "copies", lambda self, set_bytes, at_least=2: 5)
    memory = Memory(Context(CPU), BF16)
    made = memory.products(100, 72, 40)
    assert len(made.sets) == 5 and made.outputs.shape == (5, 7200)
    spans = []
    for p in made.sets:
        assert (p.a.shape, p.b.shape, p.out.shape) == ((100, 40), (40, 72), (100, 72))
        assert p.a.stride() == (40, 1) and p.b.stride() == (1, 40) and p.out.is_contiguous()
        for x in (p.a, p.b, p.out):
            assert (x.untyped_storage().data_ptr() - x.data_ptr()) % 256 == 0
            spans.append((x.data_ptr(), x.data_ptr() + 2 * x.numel()))
        assert p.a.unique().numel() > 100 and bool((p.a.abs() <= 1).all())
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    made.outputs.fill_(math.nan)
    assert all(bool(p.out.isnan().all()) for p in made.sets)
    before = made.sets[0].a.data_ptr()
    again = memory.products(100, 72, 40)
    assert again.sets[0].a.data_ptr() != before  # other numbers for the next shape
    assert memory.products(3000, 72, 4000).sets[4].a.shape == (3000, 4000)  # grown


def test_many_small_sets_are_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Context, "copies", lambda self, set_bytes, at_least=2: 512)
    assert len(Memory(Context(CPU), BF16).products(64, 64, 64).sets) == MOST_COPIES


# --- the runner ----------------------------------------------------------------------------------------------


class Quiet:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []
        self.troubles: list[str] = []

    def at(self, case: str, dtype: str, variant: str, phase: str, limit: float) -> None:
        self.steps.append((variant, phase))

    def trouble(self, variant: str, reason: str) -> None:
        self.troubles.append(variant)

    def rows(self, case: str, dtype: str, rows: list[Row]) -> None:
        pass


def runner(options: Options = CPU, report: Quiet | None = None) -> SweepRunner:
    job = Job("sweep", options, (), settings=Settings(rounds=2))
    return SweepRunner(SUITE, Context(options), job, report or Quiet(), Sampler(None))


def run(
    index: int = 0, *, report: Quiet | None = None, variants: tuple[str, ...] = (), **more: Any
) -> dict[str, Row]:
    options = Options(**{"device": "cpu", "small": True, "sweep": 12, **more})
    case = SUITE.cases(options)[index]
    names = variants or tuple(v.name for v in SUITE.variants(options))
    rows = runner(options, report)(case, Item(case.name, case.dtype, names))
    return {row.variant: row for row in rows}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_row_is_timed_and_checked(dtype: str):
    rows = run(dtypes=(dtype,))
    assert list(rows) == ["blas", "blas again", *OURS]
    for name, row in rows.items():
        assert (row.status, row.reason, row.suite) == ("ok", "", "sweep")
        assert row.us is not None and row.us.p50 > 0 and row.us.n == 2
        assert row.error is not None and 0 < row.error < tolerance(getattr(torch, dtype)) == row.tolerance
        assert (row.role, row.partner) == {"blas": ("peer", ""), "blas again": ("noise", "blas")}.get(
            name, ("ours", "")
        )
    plan_, same = rows["streamk"].extra["plan"], rows[SAME_TILE].extra["plan"]
    assert same["schedule"] == "data_parallel" and same["tile_name"] == plan_["tile_name"]
    assert plan_["predicted_us"] > 0 and rows["streamk"].extra["waves"] > 0
    assert rows["auto"].extra["took"] == "blas"
    assert rows["auto"].extra["calls"] >= 1 and rows["auto"].extra["copies"] == 2


def test_the_baseline_is_measured_twice_in_some_shapes():
    assert "blas again" not in run(1)
    assert "blas again" in run(AGAIN_EVERY)
    # A resumed run must not measure the others again for want of it.
    rows = list(run(1).values())
    assert measured(rows, retry=False, baselines=set()) == {row.key for row in rows}


def test_a_tile_can_be_forced():
    rows = run(tiles=("64x64x128",), dtypes=("float32",), seed=3)
    forced = rows["streamk:data_parallel@64x64x128"]
    assert forced.status == "ok" and forced.extra["plan"]["tile_name"] == "64x64x128"
    assert {row.status for row in rows.values()} <= {"ok", "skipped"}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., object]], None]:
    """Replaces how a variant is launched: ``how(products)`` gives the launch."""
    original = SweepRunner._launch

    def install(variant: str, how: Callable[..., object]) -> None:
        def launch(self: SweepRunner, case: Any, name: str, entry: Any, products: Any) -> Any:
            made = original(self, case, name, entry, products)
            return how(products, made) if name == variant else made

        monkeypatch.setattr(SweepRunner, "_launch", launch)

    return install


def test_a_wrong_tile_fails_its_row_alone(broken: Any):
    def wrong(products: Any, made: Any) -> Any:
        def launch(i: int) -> None:
            made(i)
            products.sets[i % 2].out[-16:, -64:] *= 1.05

        return launch

    broken("streamk", wrong)
    rows = run()
    assert rows["streamk"].status == "failed" and "allowed" in rows["streamk"].reason
    assert rows["streamk"].us is not None
    assert {row.status for name, row in rows.items() if name != "streamk"} == {"ok"}


def test_what_is_not_written_fails(broken: Any):
    def lazy(products: Any, made: Any) -> Any:
        return lambda i: made(0)  # the second buffer set keeps its NaN

    broken(SAME_TILE, lazy)
    row = run()[SAME_TILE]
    assert (row.status, row.error) == ("failed", math.inf)


def test_what_raises_is_its_row(broken: Any):
    def refuse(products: Any, made: Any) -> Any:
        raise ValueError("no kernel for this\nsecond line")

    broken("streamk", refuse)
    report = Quiet()
    rows = run(report=report)
    assert (rows["streamk"].status, rows["streamk"].reason) == ("error", "ValueError: no kernel for this")
    assert rows["streamk"].us is None and report.troubles == ["streamk"]
    assert rows["auto"].status == rows["blas"].status == "ok"
    assert ("streamk", "capture") in report.steps and ("auto", "check") in report.steps


def test_a_shape_without_memory_is_skipped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Context, "free_bytes", lambda self: 1000)
    rows = run()
    assert {row.status for row in rows.values()} == {"skipped"}
    assert "GB of GPU memory" in rows["streamk"].reason


def test_rows_without_the_baseline_refer_to_one_beside_them():
    case = SUITE.cases(CPU)[0]
    rows = runner()(case, Item(case.name, case.dtype, ("streamk",), companion="blas"))
    assert [row.variant for row in rows] == ["streamk"]
    assert rows[0].extra["baseline_us"] > 0


# --- the path of GPUs, with stand-ins -----------------------------------------------------------------------------


class FakeGraph:
    """Repeats what was captured."""

    def __init__(self) -> None:
        self.pools: list[Any] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)

    def capture_end(self) -> None:
        self.pools.append("end")


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    made: list[FakeGraph] = []

    def graph() -> FakeGraph:
        made.append(FakeGraph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_graphs_share_the_pool_and_end_their_capture(fake_graphs: list[FakeGraph]):
    calls: list[int] = []
    measure._capture(lambda: calls.append(1), "pool")
    assert calls == [1] and fake_graphs[0].pools == ["pool", "end"]


def test_a_failed_capture_is_ended_too(fake_graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "_repair", lambda: None)

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert measure._capture(fail, "pool") == (
        None,
        "RuntimeError: operation not permitted when stream is capturing",
    )
    assert fake_graphs[0].pools == ["pool", "end"]


def test_the_l2_is_emptied_before_each_sample(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            order.append("event")

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: object) -> float:
            return 1.0

    monkeypatch.setattr(Context, "cuda", property(lambda self: True))
    monkeypatch.setattr(Context, "synchronize", lambda self: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure, "_cycles_per_us", lambda: 1.0)
    monkeypatch.setattr(measure, "_trial", lambda launch, copies, context: (100.0, 1.0))
    series = Series(
        lambda i: order.append("call"),
        2,
        Context(CPU),
        Budget(round_us=200.0),
        capture=False,
        flush=lambda: order.append("flush"),
    )
    order.clear()
    assert series.time()[0] == 500.0
    assert order == ["sleep", "flush", "event", "call", "call", "event"]


def test_rounds_are_levelled_and_what_one_series_does_alone_stays():
    clock = [1.0, 1.1, 0.9, 1.0, 1.05]
    times = {
        ("a", ""): [10 * c for c in clock],
        ("b", ""): [20 * c for c in clock],
        ("c", ""): [30 * c for c in clock],
    }
    times["c", ""][2] *= 2
    level = measure.levelled(times)
    assert level["a", ""] == pytest.approx([10.0] * 5) and level["b", ""] == pytest.approx([20.0] * 5)
    assert level["c", ""] == pytest.approx([30 / 1.05, 30 / 1.05, 60 / 1.05, 30 / 1.05, 30 / 1.05], rel=0.06)


def test_restless_samples_are_taken_again(monkeypatch: pytest.MonkeyPatch):
    budgets: list[Budget] = []
    spread = [0.05, 0.001]

    def interleave(series: Any, context: Any, budget: Budget, rng: Any, at: Any, level: bool) -> Any:
        assert level
        budgets.append(budget)
        return {("streamk", ""): (Stats(100 - 100 * spread[len(budgets) - 1], 100, 100, 90, 8), 0)}

    made = runner()
    made.budget = sweep_runner.make_budget(cuda=True, quick=False, rounds=0)
    monkeypatch.setattr(Context, "cuda", property(lambda self: True))
    monkeypatch.setattr(sweep_runner, "interleave", interleave)
    found = made._time({}, random.Random(0), lambda name: None)
    assert found["streamk", ""][0].spread == pytest.approx(0.001)
    assert [b.timed_rounds(1000.0) for b in budgets] == [12, 24]


def test_a_failed_capture_spoils_neither_the_variants_after_it_nor_the_pool(monkeypatch: pytest.MonkeyPatch):
    pools: list[str] = []

    class Failing:
        calls, estimate_us, kind = 1, 10.0, "graph"

        def __init__(self, launch: Any, copies: int, *rest: Any, pool: str, **more: Any) -> None:
            pools.append(pool)
            if pool == "pool 1" and copies == 2:
                raise measure.CaptureError("CUBLAS_STATUS_EXECUTION_FAILED")

    handles = iter(["pool 1", "pool 2"])
    made = runner()
    monkeypatch.setattr(Context, "cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(sweep_runner, "Series", Failing)
    made._renew_pool()
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph: CUBLAS"):
        made._series(lambda i: None, 2)
    made._series(lambda i: None, 2)
    assert pools == ["pool 1", "pool 1", "pool 2", "pool 2"]


def test_nothing_holds_a_graph_until_a_garbage_collection():
    """One that frees a graph while another is captured breaks the capture."""
    made, case = runner(), SUITE.cases(CPU)[0]
    products = made._products(case)
    for name in ("blas", *OURS):
        entry = sweep_runner._Entry()
        entry.launch = made._launch(case, name, entry, products)
        known = weakref.ref(entry)
        del entry
        assert known() is None, name
    with sweep_runner._no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_shape_takes_a_tenth_of_a_second():
    lean = sweep_runner.make_budget(cuda=True, quick=False, rounds=0)
    for us in (5.0, 30.0, 1500.0):  # a call
        graph = max(lean.round_us, 2 * us)
        rounds = lean.timed_rounds(graph) + lean.warmup_rounds(4 * graph)
        assert lean.timed_rounds(graph) >= 8
        assert 4 * rounds * (graph + 300.0) < 150_000  # us
    assert sweep_runner.make_budget(cuda=True, quick=True, rounds=0).timed_rounds(1000.0) < 8
    assert sweep_runner.make_budget(cuda=True, quick=False, rounds=3).timed_rounds(1000.0) == 3
