"""The engine's path for GPUs, with stand-ins for CUDA: graphs that repeat their calls, events that read a clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_fake_suite import FakeSuite, FakeWorkload

from bench import engine, measure
from bench.context import Context
from bench.measure import Budget
from bench.nvml import Sampler
from bench.plan import Item
from bench.records import Row
from bench.suite import Check, Options, Runnable

OPTIONS = Options(device="cpu", small=True)
BUDGET = Budget(rounds=(6, 6), warmup_us=0.0, host_rounds=(3, 4), round_us=100.0)


class FakeEvent:
    """Reads the host's clock; ``done_early`` makes the GPU look idle when the host has enqueued everything."""

    done_early = False

    def __init__(self, enable_timing: bool) -> None:
        self.at = math.nan

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return self.done_early

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


class FakeGraph:
    """Repeats what was captured, by calling it."""

    def __init__(self) -> None:
        self.replay: Callable[[], object] = lambda: None


def record(graph: FakeGraph, run: Callable[[], object]) -> None:
    run()
    graph.replay = run


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cycles of every sleep."""
    sleeps: list[int] = []
    monkeypatch.setattr(Context, "cuda", property(lambda self: True))
    monkeypatch.setattr(Context, "copies", lambda self, set_bytes, at_least=2: at_least)
    monkeypatch.setattr(Context, "free_bytes", lambda self: 1 << 40)
    monkeypatch.setattr(Context, "synchronize", lambda self: None)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7000, 10_000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    monkeypatch.setattr(torch.cuda, "_sleep", sleeps.append)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(measure, "_record", record)
    monkeypatch.setattr(measure, "_cycles_per_us", lambda: 1000.0)
    monkeypatch.setattr(FakeEvent, "done_early", False)
    return sleeps


class Quiet:
    def at(self, *arguments: Any) -> None:
        pass

    def trouble(self, variant: str, reason: str) -> None:
        pass

    def rows(self, case: str, dtype: str, rows: list[Row]) -> None:
        pass


def run(*variants: str, memory: bool = False) -> dict[str, Row]:
    suite = FakeSuite()
    suite.variant_names = variants
    suite.track_memory = memory
    case = suite.cases(OPTIONS)[0]
    item = Item(case.name, case.dtype, variants)
    rows = engine.run_case(suite, case, item, Context(OPTIONS), BUDGET, Quiet(), Sampler(None))
    return {row.variant: row for row in rows}


def test_a_graph_and_the_host_are_both_timed() -> None:
    rows = run("base", "fine", "wrong", "parts", memory=True)
    base = rows["base"]
    assert base.us is not None and base.us.n == 6
    assert base.host_us is not None and base.host_us.n == 4
    assert base.peak_bytes == 4000
    assert rows["base again"].host_us is not None and rows["base again"].us is not None
    assert rows["wrong"].status == "failed"
    assert base.extra["calls"] % 2 == 0
    assert rows["parts"].extra["half_us"] > 0


def test_replays_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def record_nothing(graph: FakeGraph, run: Callable[[], object]) -> None:
        run()

    monkeypatch.setattr(measure, "_record", record_nothing)
    rows = run("base")
    assert (rows["base"].status, rows["base"].error) == ("failed", math.inf)


def test_graphs_that_keep_outputs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that returns new memory knows the outputs of the last capture only: of the baseline's second series."""
    kept: dict[str, torch.Tensor] = {}

    def launch(i: int) -> None:
        kept["out"] = torch.ones(4)

    def record_memory(graph: FakeGraph, run: Callable[[], object]) -> None:
        run()
        out = kept["out"]
        graph.replay = lambda: out.fill_(1.0)

    def check() -> Check:
        return Check(0.0 if bool((kept["out"] == 1).all()) else math.inf, 0.0)

    runnable = Runnable(launch, 1, check, lambda: kept["out"].fill_(math.nan) if kept else None)
    monkeypatch.setattr(FakeWorkload, "prepare", lambda self, variant: runnable)
    monkeypatch.setattr(measure, "_record", record_memory)
    assert run("base")["base"].status == "ok"


def test_what_cannot_be_captured_is_enqueued_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    repaired: list[str] = []

    def fail_once(graph: FakeGraph, run: Callable[[], object]) -> None:
        if "_repair" in str(run.__qualname__):
            repaired.append("yes")
            return
        try:
            raise NotImplementedError("operation not permitted when stream is capturing\nsecond line")
        except NotImplementedError:
            raise RuntimeError("capture was invalidated")  # noqa: B904 - as torch's context manager does

    monkeypatch.setattr(measure, "_record", fail_once)
    row = run("parts")["parts"]
    assert row.status == "ok" and row.us is not None and row.host_us is not None
    assert row.extra["timed"] == "queued"
    assert row.extra["graph_error"] == "NotImplementedError: operation not permitted when stream is capturing"
    assert row.extra["half_us"] > 0
    assert row.extra["per_second"] == pytest.approx(1e6 / row.us.p50)
    assert repaired == ["yes"]


def test_a_variant_may_refuse_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    runnable = Runnable(lambda i: None, check=lambda: Check(0.0, 1.0), graph=False)
    monkeypatch.setattr(FakeWorkload, "prepare", lambda self, variant: runnable)
    monkeypatch.setattr(measure, "_record", lambda graph, run: pytest.fail("captured"))
    row = run("base")["base"]
    assert row.us is not None and row.host_us is not None
    assert row.extra["timed"] == "queued" and "graph_error" not in row.extra


def test_late_hosts_make_the_gpu_sleep_longer(fake_cuda: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    series = measure.Series(lambda i: None, 2, Context(OPTIONS), BUDGET, capture=True)
    fake_cuda.clear()
    assert series.time()[1] is False and series.time()[1] is False
    assert fake_cuda == [200_000, 200_000]
    monkeypatch.setattr(FakeEvent, "done_early", True)
    assert [series.time()[1] for _ in range(3)] == [True] * 3
    assert fake_cuda[2:] == [200_000, 400_000, 800_000]
    for _ in range(10):
        series.time()
    assert fake_cuda[-1] == 20_000_000


def test_late_samples_are_left_out_while_enough_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    class Given:
        estimate_us = 1.0

        def __init__(self, samples: list[tuple[float, bool]]) -> None:
            self.samples = iter(samples)

        def time(self) -> tuple[float, bool]:
            return next(self.samples)

    budget = Budget(rounds=(7, 7), warmup_us=0.0)
    warm = [(1e6, False)]
    few_late = [(10.0, False)] * 5 + [(99.0, True)] * 2
    most_late = [(10.0, False)] * 2 + [(99.0, True)] * 5
    series: dict[Any, Any] = {("a", ""): Given(warm + few_late), ("b", ""): Given(warm + most_late)}
    stats = measure.interleave(series, Context(OPTIONS), budget, random.Random(0), lambda name: None)
    (a, late_a), (b, late_b) = stats["a", ""], stats["b", ""]
    assert (a.p50, a.n, late_a) == (10.0, 5, 0)
    assert (b.p50, b.n, late_b) == (99.0, 7, 5)


def test_what_is_too_slow_to_enqueue_ahead_is_timed_without_a_sleep(fake_cuda: list[int]) -> None:
    """us of the device and of the host for one call: kind, calls, sleep."""
    budget = Budget(round_us=2000.0)
    assert measure._shape(100.0, 50.0, 3, budget, True, True) == ("graph", 21, 200.0)
    assert measure._shape(100.0, 400.0, 3, budget, True, False) == ("queued", 16, 1.5 * 400 * 16 + 200)
    assert measure._shape(80_000.0, 90_000.0, 3, budget, True, False) == ("steady", 4, 0.0)
    assert measure._shape(9000.0, 8000.0, 3, budget, True, False) == ("steady", 10, 0.0)
    series = measure.Series(lambda i: time.sleep(0.01), 1, Context(OPTIONS), budget, capture=False)
    fake_cuda.clear()
    assert series.kind == "steady" and 10_000 <= series.time()[0] < 15_000 and fake_cuda == []
