"""bench sweep: how a shape is timed and checked, on the CPU and, with stand-ins, as on a GPU."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import measure
from bench.checks import tolerance
from bench.context import Context
from bench.measure import Budget, Series
from bench.nvml import Sampler
from bench.plan import Item, Job, Settings, measured
from bench.records import Row, Stats
from bench.suite import Options
from bench.suites import sweep_runner
from bench.suites.gemm_planner import SAME_TILE
from bench.suites.sweep import SUITE
from bench.suites.sweep_runner import AGAIN_EVERY, SweepRunner

CPU = Options(device="cpu", small=True)
GPU = Options(device="cuda")
BF16 = torch.bfloat16
OURS = ["streamk", SAME_TILE, "auto"]


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
