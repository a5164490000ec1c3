"""The engine on one rank: order of steps, checks, what becomes of variants that go wrong; and its helpers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from bench_fake_suite import FakeSuite, FakeWorkload

from bench import checks, engine
from bench.context import Context, OutOfStep
from bench.lockstep import OK, DeviceLost, together
from bench.measure import Budget, Series, _calls, interleave
from bench.nvml import Sampler
from bench.plan import Item, Job, Settings
from bench.records import Row
from bench.suite import Case, Check, Options, Runnable, Skip, Workload

OPTIONS = Options(device="cpu", small=True)
BUDGET = Budget(rounds=(5, 5), warmup_us=0.0)


@dataclass
class Seen:
    """A report that remembers."""

    steps: list[tuple[str, str]] = field(default_factory=list)
    troubles: list[tuple[str, str]] = field(default_factory=list)
    cases: list[tuple[str, list[Row]]] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)

    def at(self, case: str, dtype: str, variant: str, phase: str, limit: float) -> None:
        if self.steps[-1:] != [(variant, phase)]:
            self.steps.append((variant, phase))
        self.limits[variant] = limit

    def trouble(self, variant: str, reason: str) -> None:
        self.troubles.append((variant, reason))

    def rows(self, case: str, dtype: str, rows: list[Row]) -> None:
        self.cases.append((case, rows))


def fake(*variants: str, **attributes: Any) -> FakeSuite:
    suite = FakeSuite()
    suite.variant_names = variants
    for name, value in attributes.items():
        setattr(suite, name, value)
    return suite


def run(suite: FakeSuite, *variants: str, companion: str = "", seen: Seen | None = None) -> dict[str, Row]:
    case = suite.cases(OPTIONS)[0]
    item = Item(case.name, case.dtype, variants, companion)
    context = Context(OPTIONS)
    rows = engine.run_case(suite, case, item, context, BUDGET, seen or Seen(), Sampler(None))
    return {row.variant: row for row in rows}


def test_a_case_gives_a_row_for_each_variant_and_the_baseline_again() -> None:
    suite = fake("base", "fine", "parts")
    rows = run(suite, "base", "fine", "parts")
    assert list(rows) == ["base", "base again", "fine", "parts"]
    assert {row.status for row in rows.values()} == {"ok"}
    again = rows["base again"]
    assert (again.role, again.partner) == ("noise", "base")
    assert again.us is not None and rows["base"].us is not None and again.us != rows["base"].us
    fine = rows["fine"]
    assert fine.us is not None and fine.us.n == 5 and fine.host_us is None
    assert (fine.error, fine.tolerance) == (0.0, 1e-12)
    assert (fine.op, fine.params, fine.flops, fine.world) == ("double", {"n": 8}, 64, 1)
    assert fine.extra["per_second"] == pytest.approx(1e6 / fine.us.p50)
    assert rows["parts"].extra["half_us"] > 0


def test_wrong_results_are_failed_and_timed_all_the_same() -> None:
    rows = run(fake("base", "wrong", "nan"), "base", "wrong", "nan")
    assert rows["wrong"].status == "failed"
    assert rows["wrong"].error == pytest.approx(0.05)
    assert "relative error 5.0e-02, allowed 1.0e-12" in rows["wrong"].reason
    assert rows["wrong"].us is not None
    assert (rows["nan"].status, rows["nan"].error) == ("failed", math.inf)
    assert rows["base"].status == "ok"


def test_a_wrong_baseline_is_failed_and_its_second_series_is_noise_still() -> None:
    suite = fake("wrong")
    suite.baseline = lambda options: "wrong"  # type: ignore[method-assign]
    rows = run(suite, "wrong")
    assert (rows["wrong"].status, rows["wrong again"].role) == ("failed", "noise")


def test_what_goes_wrong_with_a_variant_leaves_the_others_alone() -> None:
    seen = Seen()
    rows = run(fake("base", "raises", "absent", "needy"), "base", "raises", "absent", "needy", seen=seen)
    assert (rows["raises"].status, rows["raises"].reason) == ("error", "ValueError: no kernel for this shape")
    assert (rows["absent"].status, rows["absent"].reason) == ("skipped", "this library is not installed")
    assert rows["needy"].status == "skipped" and "not enough memory" in rows["needy"].reason
    assert all(rows[name].us is None for name in ("raises", "absent", "needy"))
    assert rows["base"].us is not None
    assert [variant for variant, _ in seen.troubles] == ["raises", "needy"]
    assert ("raises", "prepare") in seen.steps and ("raises", "check") not in seen.steps


def test_samples_take_the_place_of_calls() -> None:
    rows = run(fake("base", "sampled"), "base", "sampled")
    stats = rows["sampled"].us
    assert stats is not None and (stats.p50, stats.n) == (2.5, 4)
    assert rows["sampled"].error == 0.0


def test_a_companion_runs_without_a_row_and_its_time_is_in_the_others() -> None:
    rows = run(fake("base", "fine"), "fine", companion="base")
    assert list(rows) == ["fine"]
    assert rows["fine"].extra["baseline_us"] > 0
    rows = run(fake("raises", "fine"), "fine", companion="raises")
    assert rows["fine"].status == "ok"
    assert rows["fine"].extra["baseline_error"] == "error: ValueError: no kernel for this shape"


def test_inputs_that_cannot_be_made_are_a_row_for_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BROKEN_INPUTS", "small")
    rows = run(fake("base", "fine"), "base", "fine")
    assert {(r.status, r.reason) for r in rows.values()} == {
        ("error", "ValueError: these inputs cannot be made")
    }
    assert list(rows) == ["base", "fine"]


def test_a_case_that_does_not_fit_is_skipped_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "free_bytes", lambda self: 8_000_000_000)
    rows = run(fake("base", bytes_needed=lambda case, options: 9_000_000_000), "base")
    assert (rows["base"].status, rows["base"].reason) == (
        "skipped",
        "needs 9.0 GB of GPU memory, 8.0 GB are free",
    )
    assert run(fake("base", bytes_needed=lambda case, options: 8_000_000_000), "base")["base"].status == "ok"


def test_outputs_are_poisoned_before_the_check_and_everything_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def prepare(self: FakeWorkload, variant: str) -> Runnable:
        if variant == "late":
            events.append("prepare late")
        return Runnable(
            launch=lambda i: events.append(f"launch {i}"),
            copies=2,
            check=lambda: events.append("check") or Check(0.0, 1.0),  # type: ignore[func-returns-value]
            poison=lambda: events.append("poison"),
            close=lambda: events.append("close"),
        )

    monkeypatch.setattr(FakeWorkload, "prepare", prepare)
    monkeypatch.setattr(FakeWorkload, "close", lambda self: events.append("close workload"))
    run(fake("base"), "base")
    assert events[:4] == ["poison", "launch 0", "launch 1", "check"]
    assert set(events[4:-6]) == {"launch 0", "launch 1"}
    assert events[-6:] == ["poison", "launch 0", "launch 1", "check", "close", "close workload"]


def test_a_check_that_raises_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def check() -> Check:
        raise RuntimeError("shapes differ")

    runnable = Runnable(lambda i: None, check=check, close=lambda: closed.append("closed"))
    monkeypatch.setattr(FakeWorkload, "prepare", lambda self, variant: runnable)
    assert run(fake("base"), "base")["base"].reason == "RuntimeError: shapes differ"
    assert closed == ["closed"]


def test_an_error_while_timing_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    def launch(i: int) -> None:
        if next(calls) > 6:  # the check and the estimate go well
            raise RuntimeError("illegal memory access")

    monkeypatch.setattr(FakeWorkload, "prepare", lambda self, variant: Runnable(launch))
    seen = Seen()
    with pytest.raises(DeviceLost, match="illegal memory access"):
        run(fake("base"), "base", seen=seen)
    assert seen.troubles == [("", "RuntimeError: illegal memory access")]
    assert seen.steps[-1] == ("base", "time")


def test_the_limit_of_a_slow_variant_is_reported() -> None:
    suite = fake("base", "fine")
    known = suite.variants(OPTIONS)
    suite.variants = lambda options: [known[0], type(known[1])("fine", "ours", "", time_limit=600.0)]  # type: ignore[method-assign]
    seen = Seen()
    run(suite, "base", "fine", seen=seen)
    assert (seen.limits["base"], seen.limits["fine"]) == (0.0, 600.0)


def test_a_job_runs_its_items_and_stops_at_the_deadline() -> None:
    suite, seen = fake("base"), Seen()
    items = tuple(Item(case.name, case.dtype, ("base",)) for case in suite.cases(OPTIONS))
    job = Job("fake", OPTIONS, items)
    assert engine.run_job(suite, job, Context(OPTIONS), seen, Sampler(None))
    assert [case for case, _ in seen.cases] == ["small", "middle", "large"]
    late = Job("fake", OPTIONS, items, settings=Settings(deadline=time.time() - 1))
    assert not engine.run_job(suite, late, Context(OPTIONS), seen, Sampler(None))
    assert len(seen.cases) == 3


def test_steps_of_all_ranks_together() -> None:
    context, seen = Context(OPTIONS), Seen()

    def raising(error: Exception) -> Callable[[], object]:
        def act() -> None:
            raise error

        return act

    assert together(context, seen, "v", lambda: 1) == OK
    assert together(context, seen, "v", raising(Skip("no library"))) == ("skipped", "no library")
    assert together(context, seen, "v", raising(KeyError("x"))) == ("error", "KeyError: 'x'")
    context.world = 3
    ended = OutOfStep({1: ("error", "ValueError: here")})
    assert together(context, seen, "v", raising(ended)) == ("error", "rank 1: ValueError: here")
    assert together(context, seen, "v", raising(OutOfStep({0: OK})))[0] == "error"


def test_graphs_hold_whole_walks_over_the_buffer_sets() -> None:
    assert _calls(1000.0, 3, 2000.0) == 3
    assert _calls(10.0, 3, 2000.0) == 201
    assert _calls(0.5, 64, 2000.0) == 512
    assert _calls(1e6, 2, 2000.0) == 2
    assert all(_calls(us, copies, 2000.0) % copies == 0 for us in (1, 7, 300) for copies in (2, 3, 7, 64))


def test_budgets() -> None:
    usual = Budget.make(cuda=True)
    assert (usual.timed_rounds(2000.0), usual.timed_rounds(1e6), usual.timed_rounds(1.0)) == (30, 10, 30)
    assert Budget.make(cuda=True, rounds=4).timed_rounds(1e9) == 4
    assert Budget.make(cuda=True, quick=True).timed_rounds(2000.0) < usual.timed_rounds(2000.0)
    assert usual.warmup_rounds(1e9) == 2


def test_interleaving_times_every_series_in_every_round_in_changing_order() -> None:
    context, turns = Context(OPTIONS), []
    series = {(name, ""): Series(lambda i: None, 1, context, BUDGET, capture=False) for name in "abc"}
    stats = interleave(series, context, BUDGET, random.Random(1), turns.append)
    rounds = [turns[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert [(s.n, late) for s, late in stats.values()] == [(5, 0)] * 3


def test_a_time_is_that_of_one_call() -> None:
    series = Series(lambda i: time.sleep(0.002), 1, Context(OPTIONS), BUDGET, capture=False)
    assert 1900 < series.time()[0] < 20_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_right_product_is_within_tolerance_and_a_wrong_tile_is_not(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    a = (torch.rand(300, 2000, generator=generator) * 2 - 1).to(dtype)
    b = (torch.rand(170, 2000, generator=generator) * 2 - 1).to(dtype).t()
    out = (a.double() @ b.double()).to(torch.float32).to(dtype)
    error = checks.product_error(out, a, b, generator=generator)
    assert 0 < error <= checks.tolerance(dtype)
    if dtype != torch.float32:
        assert error > 0.3 * checks.tolerance(dtype)  # so the tolerance is not generous
    out[128:192, 64:128] = out[0:64, 0:64]
    assert checks.product_error(out, a, b, generator=generator) > 10 * checks.tolerance(dtype)


def test_a_product_with_a_term_missing_is_out_of_tolerance() -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    a, b = (torch.rand(*s, generator=generator).mul(2).sub(1).bfloat16() for s in ((64, 4096), (4096, 64)))
    out = (a[:, :-64].double() @ b[:-64].double()).bfloat16()
    assert checks.product_error(out, a, b, generator=generator) > 10 * checks.tolerance(torch.bfloat16)


def test_nan_anywhere_is_infinite_and_empty_or_zero_results_are_right() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.ones(200, 3), torch.ones(3, 5)
    out = a @ b
    out[77, 4] = math.nan  # in no sampled row, perhaps
    assert checks.product_error(out, a, b, generator=generator) == math.inf
    assert checks.product_error(torch.empty(0, 5), torch.empty(0, 3), b, generator=generator) == 0.0
    zero = torch.zeros(4, 5)
    assert checks.rows_error(zero, zero.double()) == 0.0
    assert checks.rows_error(torch.full((4, 5), 1e-30), zero.double()) >= 1.0
    assert checks.rows_error(torch.full((4, 5), math.inf), torch.ones(4, 5).double()) == math.inf


def test_sampled_rows_meet_every_tile() -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    rows = checks.sampled_rows(1000, generator)
    assert [int(r) // 64 for r in rows] == list(range(16))
    assert int(rows.max()) < 1000
    assert checks.sampled_rows(1, generator).tolist() == [0]


def test_more_sums_are_allowed_more() -> None:
    assert checks.tolerance(torch.bfloat16) == pytest.approx(3.1e-3, rel=0.02)
    assert checks.tolerance(torch.bfloat16, 4) == pytest.approx(2 * checks.tolerance(torch.bfloat16))


def test_data_is_uniform_and_differs_between_ranks_and_seeds() -> None:
    contexts = [Context(OPTIONS, rank=r, world=1) for r in (0, 1)] + [Context(Options(device="cpu", seed=1))]
    data = [c.uniform(1000, dtype=torch.float32) for c in contexts]
    assert all(x.min() >= -1 and x.max() <= 1 and abs(x.std() - 3**-0.5) < 0.05 for x in data)
    assert not data[0].equal(data[1]) and not data[0].equal(data[2])
    assert Context(OPTIONS).uniform(1000, dtype=torch.float32).equal(data[0])


def test_a_workload_and_a_case_are_what_suites_say() -> None:
    suite = fake("base")
    case = suite.cases(OPTIONS)[0]
    assert isinstance(case, Case) and isinstance(suite.workload(case, Context(OPTIONS)), Workload)
