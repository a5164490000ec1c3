"""Measures the cases of a job on this rank, in lockstep with the other ranks.

For one case: the workload makes the inputs; every variant is prepared, run once on poisoned outputs and checked, then
captured into a graph, replayed on poisoned outputs and checked again; then all are timed in turn; then the rows go
out together. What goes wrong with one variant on any rank becomes its row, and the others go on. Where the process
itself cannot go on (a CUDA error that stays, a rank that is gone) an exception leaves the engine, and whoever started
the ranks does the rest.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .context import Context, RanksLost
from .lockstep import OK, DeviceLost, Report, describe, together
from .measure import Budget, CaptureError, Series, host_times, interleave
from .nvml import Sampler
from .plan import Item, Job, blank_row
from .records import Row, Stats, Status
from .suite import Case, Check, Runnable, Suite, Workload

__all__ = ["run_case", "run_job"]


def run_job(suite: Suite, job: Job, context: Context, report: Report, sampler: Sampler) -> bool:
    """Measure every item; False if the deadline came before the last."""
    cases = {(case.name, case.dtype): case for case in suite.cases(job.options)}
    budget = Budget.make(cuda=context.cuda, quick=job.settings.quick, rounds=job.settings.rounds)
    own = suite.runner(context, job, report, sampler)
    for item in job.items:
        if any(context.agree(0 < job.settings.deadline < time.time())):
            return False
        case = cases[item.case, item.dtype]
        rows = own(case, item) if own else run_case(suite, case, item, context, budget, report, sampler)
        report.rows(case.name, case.dtype, rows)
    return True


def run_case(
    suite: Suite,
    case: Case,
    item: Item,
    context: Context,
    budget: Budget,
    report: Report,
    sampler: Sampler,
) -> list[Row]:
    """Measure one case: rows of ``item.variants``, and of the baseline's second series if it is one of them."""
    run = _CaseRun(suite, case, item, context, budget, report)
    try:
        outcome = run.make_inputs()
        if outcome == OK:
            for name in run.entries:
                run.make_ready(name)
            run.time_all(sampler)
        return run.rows(outcome)
    finally:
        run.close()


@dataclass
class _Entry:
    """One variant on its way to a row. ``series`` by name of the part, "" for the whole."""

    status: Status = "ok"
    reason: str = ""
    runnable: Runnable | None = None
    check: Check | None = None
    peak_bytes: int = 0
    series: dict[str, Series] = field(default_factory=dict)
    calls_timed: int = 0  # calls of one sample
    outside: int = 0  # device memory taken in preparation other than through torch's allocator
    us: Stats | None = None
    host_us: Stats | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def run_once(self) -> None:
        """One call on each buffer set."""
        for i in range(self.calls.copies):
            self.calls.launch(i)

    @property
    def calls(self) -> Runnable:
        """The runnable of an entry that has one."""
        assert self.runnable is not None
        return self.runnable


class _CaseRun:
    """State of one case; the methods in the order in which they are called."""

    def __init__(
        self, suite: Suite, case: Case, item: Item, context: Context, budget: Budget, report: Report
    ) -> None:
        self.suite, self.case, self.item = suite, case, item
        self.context, self.budget, self.report = context, budget, report
        self.entries = {name: _Entry() for name in item.runs}
        self.again: _Entry | None = None  # the baseline's second series
        self.baseline = suite.baseline(context.options)
        self.limits = {v.name: v.time_limit for v in suite.variants(context.options)}
        self.workload: Workload | None = None
        self.meanwhile: dict[str, float] = {}  # clock and power

    def at(self, variant: str, phase: str) -> None:
        self.report.at(self.case.name, self.case.dtype, variant, phase, self.limits.get(variant, 0.0))

    def make_inputs(self) -> tuple[Status, str]:
        self.at("", "inputs")
        needed, free = self.suite.bytes_needed(self.case, self.context.options), self.context.free_bytes()
        least = min(self.context.agree(needed if free is None else free))
        if needed > least:
            return ("skipped", f"needs {needed / 1e9:.1f} GB of GPU memory, {least / 1e9:.1f} GB are free")

        def make() -> None:
            self.workload = self.suite.workload(self.case, self.context)
            self.context.synchronize()

        return together(self.context, self.report, "", make)

    def make_ready(self, name: str) -> None:
        """Prepare, check, capture and check again; what goes wrong ends it for this variant."""
        entry = self.entries[name]
        for phase, action in (
            ("prepare", self._prepare),
            ("check", self._check),
            ("capture", self._make_series),
        ):
            self.at(name, phase)
            outcome = together(self.context, self.report, name, partial(action, name, entry))
            if outcome != OK:
                self.entries[name] = _Entry(*outcome)
                if entry.runnable is not None:
                    _close(entry.runnable.close)
                del entry
                self._free()
                return
        _verdict(entry)

    def _prepare(self, name: str, entry: _Entry) -> None:
        assert self.workload is not None
        before = _memory_outside(self.context)
        entry.runnable = self.workload.prepare(name)
        self.context.synchronize()
        entry.outside = _memory_outside(self.context) - before

    def _check(self, name: str, entry: _Entry) -> None:
        """Run once and judge the result; measure the memory of a call."""
        calls = entry.calls
        if calls.sample is not None:
            samples: list[float] = []
            self._judge(entry, lambda: samples.extend(calls.sample()))  # type: ignore[misc]
            entry.us = Stats.of(self.context.slowest(samples))
            return
        self._judge(entry, entry.run_once)
        if self.suite.track_memory and self.context.cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            calls.launch(0)
            self.context.synchronize()
            entry.peak_bytes = torch.cuda.max_memory_allocated() - before
            entry.extra["outside_bytes"] = max(self.context.agree(entry.outside))
        entry.peak_bytes = max(self.context.agree(entry.peak_bytes))

    def _judge(self, entry: _Entry, run: Callable[[], object]) -> None:
        """Run on poisoned outputs; a failed check stays."""
        if entry.calls.poison is not None:
            entry.calls.poison()
        self.context.synchronize()
        run()
        self.context.synchronize()
        if entry.calls.check is not None and (entry.check is None or entry.check.ok):
            check = entry.calls.check()
            self.context.synchronize()
            # The worst of all ranks, so that they go on alike.
            entry.check = max(self.context.agree(check), key=lambda c: (not c.ok, c.error))

    def _make_series(self, name: str, entry: _Entry) -> None:
        calls, cuda = entry.calls, self.context.cuda
        if calls.sample is not None:
            return
        capture = cuda and calls.graph
        try:
            self._record_series(entry, capture=capture)
        except CaptureError as error:
            entry.extra["graph_error"] = str(error)
            capture = False
            self._record_series(entry, capture=False)
        if cuda and not capture:
            entry.extra["timed"] = entry.series[""].kind

    def _record_series(self, entry: _Entry, *, capture: bool) -> None:
        calls = entry.calls
        entry.series.clear()
        for part, launch in {"": calls.launch, **calls.parts}.items():
            made = Series(launch, calls.copies, self.context, self.budget, capture=capture)
            entry.series[part] = made
            if capture and not part:
                self._judge(entry, made.run)

    def time_all(self, sampler: Sampler) -> None:
        """Time what is ready in turn, wrong results too; the baseline twice."""
        ready = {name: entry for name, entry in self.entries.items() if entry.runnable is not None}
        first = ready.get(self.baseline or "")
        if first is not None and self.item.companion != self.baseline and first.calls.sample is None:
            self.again = _Entry(runnable=replace(first.calls, parts={}), check=first.check)
            if "" in first.series:
                self.again.series[""] = self._another(first)
            ready[f"{self.baseline} again"] = self.again
        rng = random.Random(f"{self.context.options.seed} {self.case.name}")
        try:
            with sampler.sampling() as self.meanwhile:
                self._time_series(ready, rng)
                self._judge_again(ready)
                self._time_from_host(ready, rng)
        except RanksLost:
            raise
        except Exception as error:  # the ranks are out of step now
            traceback.print_exc(file=sys.stderr)
            self.report.trouble("", describe(error))
            raise DeviceLost(describe(error)) from error

    def _time_series(self, ready: dict[str, _Entry], rng: random.Random) -> None:
        series = {(name, part): one for name, e in ready.items() for part, one in e.series.items()}
        stats = interleave(series, self.context, self.budget, rng, lambda name: self._turn(name, "time"))
        for (name, part), (found, late) in stats.items():
            if part:
                ready[name].extra[f"{part}_us"] = found.p50
                continue
            ready[name].us = found
            if late:
                ready[name].extra["late_samples"] = late

    def _another(self, entry: _Entry) -> Series:
        """A series made anew, as another variant's would be."""
        first = entry.series[""]
        try:
            return Series(
                entry.calls.launch,
                entry.calls.copies,
                self.context,
                self.budget,
                capture=first.kind == "graph",
            )
        except CaptureError:
            return first

    def _judge_again(self, ready: dict[str, _Entry]) -> None:
        """Results must be right after many replays too. Then the graphs go: calls from the host need memory."""
        for name, entry in ready.items():
            made = entry.series.get("")
            entry.calls_timed = made.calls if made is not None else 0
            if entry is self.again or made is None:
                continue
            if self.again is not None and name == self.baseline:
                made = self.again.series[""]  # captured last: a runnable may know the outputs of that alone
            self._turn(name, "check")
            self._judge(entry, made.run if made.kind == "graph" else entry.run_once)
            _verdict(entry)
        for entry in ready.values():
            entry.series.clear()
        if self.context.cuda:
            torch.cuda.empty_cache()

    def _time_from_host(self, ready: dict[str, _Entry], rng: random.Random) -> None:
        if not self.context.cuda:
            return
        launches = {
            (name, ""): (entry.calls.launch, entry.calls.copies)
            for name, entry in ready.items()
            if entry.calls.sample is None
        }
        stats = host_times(launches, self.context, self.budget, rng, lambda name: self._turn(name, "host"))
        for (name, _), found in stats.items():
            ready[name].host_us = found

    def _turn(self, name: str, phase: str) -> None:
        self.at(name if name in self.entries else self.baseline or "", phase)

    def rows(self, outcome: tuple[Status, str]) -> list[Row]:
        """Rows of the wanted variants; ``outcome`` of making the inputs goes into all unless it is OK."""
        rows = []
        for name in self.item.variants:
            row = blank_row(self.suite, self.case, name, self.context.options, *outcome)
            if outcome == OK:
                row = self._fill(row, self.entries[name])
            rows.append(row)
            if name == self.baseline and self.again is not None:
                again = self._fill(replace(row, status="ok", reason=""), self.again)
                rows.append(replace(again, variant=f"{name} again", role="noise", partner=name))
        return rows

    def _fill(self, row: Row, entry: _Entry) -> Row:
        row = replace(
            row,
            status=entry.status,
            reason=entry.reason,
            us=entry.us,
            host_us=entry.host_us,
            error=entry.check.error if entry.check else None,
            tolerance=entry.check.tolerance if entry.check else None,
            peak_bytes=entry.peak_bytes,
        )
        if entry.runnable is None:
            return row
        if entry.calls.flops is not None:
            row = replace(row, flops=entry.calls.flops)
        if entry.calls.bytes is not None:
            row = replace(row, bytes=entry.calls.bytes)
        extra = {**entry.calls.extra, **entry.extra, **self._companion_times(), **self.meanwhile}
        if entry.calls_timed:
            extra |= {"calls": entry.calls_timed, "copies": entry.calls.copies}
        if self.context.footprint:
            extra["footprint_l2"] = round(self.context.footprint, 1)
        if entry.calls.finish is not None and row.best is not None:
            entry.calls.extra.update(entry.extra)  # the times of parts, which it may want
            extra |= entry.calls.finish(row.best)
        return replace(row, extra=extra)

    def _companion_times(self) -> dict[str, Any]:
        """The baseline's times for rows of a case where it has no row itself."""
        if not self.item.companion:
            return {}
        entry = self.entries[self.item.companion]
        if entry.status != "ok":
            return {"baseline_error": f"{entry.status}: {entry.reason}"}
        times = {"baseline_us": entry.us, "baseline_host_us": entry.host_us}
        return {name: stats.p50 for name, stats in times.items() if stats}

    def close(self) -> None:
        """Free what the case holds, after an exception too."""
        for entry in self.entries.values():
            if entry.runnable is not None:
                _close(entry.runnable.close)
        self.entries.clear()
        self.again = None
        if self.workload is not None:
            _close(self.workload.close)
        self.workload = None
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.context.cuda:
            with suppress(Exception):
                torch.cuda.empty_cache()


def _verdict(entry: _Entry) -> None:
    if entry.check is not None and not entry.check.ok:
        entry.status = "failed"
        entry.reason = f"relative error {entry.check.error:.1e}, allowed {entry.check.tolerance:.1e}"


def _memory_outside(context: Context) -> int:
    """Bytes of the device in use that torch's caching allocator does not hold: other libraries, symmetric memory."""
    if not context.cuda:
        return 0
    free, total = torch.cuda.mem_get_info(context.device)
    return total - free - torch.cuda.memory_reserved(context.device)


def _close(close: Callable[[], object] | None) -> None:
    if close is not None:
        try:
            close()
        except Exception:
            traceback.print_exc(file=sys.stderr)
