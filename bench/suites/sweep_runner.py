"""Measures the shapes of the sweep: what the engine does in seconds a shape, in a tenth of one.

Where the engine's time goes, and what is done here instead: inputs are views of one pool of random memory; graphs hold
a millisecond of calls, not two, are captured without a garbage collection, and share their memory; 8 to 12 rounds after
15 ms of warm-up (55 ms where power may limit clocks); no calls from the host; one check. What is the same: the variants
of a shape are CUDA graphs replayed in turn in random order behind a sleep of the GPU, operands rotate through more than
three L2 caches (small ones: and the L2 is emptied before each sample), medians count, and the baseline is measured
twice, in every tenth shape. Samples are levelled by rounds (:func:`bench.measure.levelled`): after so short a warm-up
power still moves the clocks.

The check comes last, on poisoned outputs of a replay of the timed graph: no NaN in any buffer set, and all of two sets,
others for each shape, against float64 (:mod:`bench.projections`).
"""

from __future__ import annotations

import gc
import math
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import tpkernels as tpk

from .. import checks
from ..lockstep import OK, DeviceLost, Outcome, Report, describe, together
from ..measure import Budget, CaptureError, Key, Series, interleave
from ..plan import Item, Job, blank_row
from ..projections import Projection
from ..records import Row, Stats
from ..suite import Case, Suite
from .gemm_planner import Planner, Request
from .gemm_products import Product
from .sweep import AUTO
from .sweep_memory import Memory, Products

if TYPE_CHECKING:
    from torch import Tensor

    from ..context import Context
    from ..nvml import Sampler

__all__ = ["AGAIN_EVERY", "SweepRunner"]

AGAIN_EVERY = 10  # shapes: in these the baseline is measured twice
_HEAVY_US = 12.0  # calls of products that long draw power that clocks depend on
_SETTLE_US = 40_000.0
_RESTLESS = 0.03  # (p80 - p20) / p50 of samples
_CHECKED = 2  # buffer sets
_PLAN = ("schedule", "tile_name", "tiles", "k_iters", "workers", "splits", "partial_tiles", "multiprocessors")


def make_budget(*, cuda: bool, quick: bool, rounds: int) -> Budget:
    """How long a variant is measured; see the module."""
    if not cuda:
        return Budget.make(cuda=False, rounds=rounds)
    lean = Budget(rounds=(8, 12), round_us=1_000.0, total_us=12_000.0, warmup_us=15_000.0)
    lean = replace(lean, rounds=(5, 6), warmup_us=5_000.0) if quick else lean
    return replace(lean, rounds=(rounds, rounds)) if rounds else lean


@dataclass
class _Entry:
    """One variant on its way to a row. ``outs``: its results by buffer set."""

    outcome: Outcome = OK
    launch: Callable[[int], object] | None = None
    series: Series | None = None
    outs: list[Tensor] = field(default_factory=list)
    stats: Stats | None = None
    error: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class SweepRunner:
    """Measures the cases of one job on this device."""

    def __init__(self, suite: Suite, context: Context, job: Job, report: Report, sampler: Sampler) -> None:
        self.suite, self.context, self.report, self.sampler = suite, context, report, sampler
        settings = job.settings
        self.budget = make_budget(cuda=context.cuda, quick=settings.quick, rounds=settings.rounds)
        self.baseline = suite.baseline(job.options)
        self.memory: Memory | None = None
        self.pool: Any = None
        self._renew_pool()
        self._flush = self._flusher()
        if context.cuda:
            gc.collect()
            gc.freeze()  # what torch has made need not be looked through after every shape

    def __call__(self, case: Case, item: Item) -> list[Row]:
        """Rows of a case."""
        with _no_collection():
            entries = {name: _Entry() for name in item.runs}
            self.report.at(case.name, case.dtype, "", "inputs", 0.0)
            made: list[Products] = []
            outcome = together(self.context, self.report, "", lambda: made.append(self._products(case)))
            if outcome == OK:
                (products,) = made
                self._measure(case, item, entries, products)
            return self._rows(case, item, entries, outcome)

    # --- one case ------------------------------------------------------------------------------------------------

    def _products(self, case: Case) -> Products:
        dtype: torch.dtype = getattr(torch, case.dtype)
        needed, free = self.suite.bytes_needed(case, self.context.options), self.context.free_bytes()
        if free is not None and needed > free:
            raise torch.OutOfMemoryError(
                f"needs {needed / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free"
            )
        if self.memory is None or self.memory.dtype != dtype:
            self.memory = None
            self.memory = Memory(self.context, dtype)
        m, n, k = (int(case.params[name]) for name in "mnk")
        return self.memory.products(m, n, k)

    def _measure(self, case: Case, item: Item, entries: dict[str, _Entry], products: Products) -> None:
        at = partial(self.report.at, case.name, case.dtype)
        for name, entry in list(entries.items()):
            at(name, "capture", 0.0)
            entry.outcome = together(
                self.context, self.report, name, partial(self._prepare, case, name, entry, products)
            )
        ready = {name: entry for name, entry in entries.items() if entry.outcome == OK}
        self._measure_again(case, item, entries, ready)
        rng = random.Random(f"{self.context.options.seed} {case.name}")
        series = {(name, ""): entry.series for name, entry in ready.items() if entry.series is not None}
        try:
            self._settle(list(series.values()), rng)
            stats = self._time(series, rng, lambda name: at(name.removesuffix(" again"), "time", 0.0))
            now = self.sampler.now()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.report.trouble("", describe(error))
            raise DeviceLost(describe(error)) from error
        for (name, _), (found, late) in stats.items():
            ready[name].stats = found
            ready[name].extra |= {"late_samples": late} if late else {}
            ready[name].extra |= now
        self._check_all(ready, products, at)

    def _prepare(self, case: Case, name: str, entry: _Entry, products: Products) -> None:
        """Plan, run once, capture."""
        entry.launch = self._launch(case, name, entry, products)
        entry.series = self._series(entry.launch, len(products.sets))
        if name == AUTO:
            path = tpk.last_path()
            entry.extra["took"] = path.gemm if path else ""

    def _series(self, launch: Callable[[int], object], copies: int) -> Series:
        cuda = self.context.cuda
        try:
            return Series(
                launch, copies, self.context, self.budget, capture=cuda, pool=self.pool, flush=self._flush
            )
        except CaptureError as error:
            self._renew_pool()
            raise RuntimeError(f"cannot be captured into a CUDA graph: {error}") from error

    def _measure_again(
        self, case: Case, item: Item, entries: dict[str, _Entry], ready: dict[str, _Entry]
    ) -> None:
        """The baseline as another variant, in some of the cases."""
        first = ready.get(self.baseline or "")
        if first is None or item.companion or int(case.params["index"]) % AGAIN_EVERY:
            return
        assert first.launch is not None
        again = _Entry(series=self._series(first.launch, len(first.outs)), outs=first.outs)
        entries[f"{self.baseline} again"] = ready[f"{self.baseline} again"] = again

    def _launch(self, case: Case, name: str, entry: _Entry, products: Products) -> Callable[[int], object]:
        sets = products.sets
        copies = len(sets)
        entry.outs = [p.out for p in sets]
        if name == self.baseline:
            return lambda i: torch.mm(sets[i % copies].a, sets[i % copies].b, out=sets[i % copies].out)
        if name == AUTO:
            outs = (
                entry.outs
            )  # not the entry: it would hold itself, and its graph, until a garbage collection

            def run_auto(i: int) -> None:
                # Kept, so that calls do not write to the same few lines of the L2 again and again.
                outs[i % copies] = tpk.matmul(sets[i % copies].a, sets[i % copies].b)

            return run_auto
        planner = self._planner(case)
        request = planner.request(name)
        entry.extra |= _plan_of(planner, request)
        gemm = torch.ops.tpkernels.streamk_gemm

        def run(p: Product) -> None:
            a, b, out = p.a[None], p.b[None], p.out[None]
            gemm(a, b, None, out, None, "none", False, request.schedule, 0, request.splits, request.tile)

        return lambda i: run(sets[i % copies])

    def _planner(self, case: Case) -> Planner:
        m, n, k = (int(case.params[name]) for name in "mnk")
        # Sampled sizes are multiples of 8, so that TMA can load operands of 16 bits.
        wide = getattr(torch, case.dtype).itemsize > 2
        return Planner.of(m, n, k, self.context.device, dtype=case.dtype if wide else "")

    def _time(
        self, series: dict[Key, Series], rng: random.Random, at: Callable[[str], object]
    ) -> dict[Key, tuple[Stats, int]]:
        """All in turn; where samples of one are far apart all are timed again, in twice as many rounds."""
        stats = interleave(series, self.context, self.budget, rng, at, level=True)
        if self.context.cuda and any(found.spread > _RESTLESS for found, _ in stats.values()):
            fewest, most = self.budget.rounds
            longer = replace(self.budget, rounds=(2 * fewest, 2 * most), total_us=2 * self.budget.total_us)
            stats = interleave(series, self.context, longer, rng, at, level=True)
        return stats

    def _settle(self, series: list[Series], rng: random.Random) -> None:
        """A heavy product's graphs in turn without pauses: after a while power decides at what clocks they run."""
        if not self.context.cuda or not any(one.estimate_us / one.calls >= _HEAVY_US for one in series):
            return
        for _ in range(math.ceil(_SETTLE_US / sum(one.estimate_us for one in series))):
            for one in rng.sample(series, len(series)):
                one.run()

    # --- the check -----------------------------------------------------------------------------------------------

    def _check_all(self, ready: dict[str, _Entry], products: Products, at: Callable[..., None]) -> None:
        some = random.sample(range(len(products.sets)), min(_CHECKED, len(products.sets)))
        generator = self.context.generator
        want = {i: Projection.of(products.sets[i].a, products.sets[i].b, generator) for i in some}
        for name, entry in ready.items():
            if entry.series is None or name.endswith(" again"):
                continue
            at(name, "check", 0.0)
            outcome = together(
                self.context, self.report, name, partial(self._check, name, entry, products, want)
            )
            entry.outcome = outcome if outcome != OK else entry.outcome

    def _check(self, name: str, entry: _Entry, products: Products, want: dict[int, Projection]) -> None:
        assert entry.series is not None and entry.launch is not None
        for out in entry.outs if name == AUTO else [products.outputs]:
            out.fill_(float("nan"))
        if entry.series.kind == "graph":
            entry.series.run()
        else:  # on the CPU: its loop need not meet every set
            for i in range(len(entry.outs)):
                entry.launch(i)
        written = entry.outs if name == AUTO else [products.outputs]
        if bool(torch.stack([out.isnan().any() for out in written]).any()):
            entry.error = float("inf")
        else:
            entry.error = max(projection.error(entry.outs[i]) for i, projection in want.items())

    # --- rows ----------------------------------------------------------------------------------------------------

    def _rows(self, case: Case, item: Item, entries: dict[str, _Entry], outcome: Outcome) -> list[Row]:
        again = entries.get(f"{self.baseline} again")
        companion = entries.get(item.companion)
        rows = []
        for name in item.variants:
            entry = entries[name]
            if companion is not None and companion.stats is not None:
                entry.extra["baseline_us"] = _digits(companion.stats.p50)
            row = blank_row(self.suite, case, name, self.context.options, *outcome)
            rows.append(self._fill(row, entry) if outcome == OK else row)
            if name == self.baseline and again is not None and again.stats is not None:
                twice = replace(rows[-1], variant=f"{name} again", role="noise", partner=name)
                rows.append(self._fill(twice, replace(again, outcome=entry.outcome, error=entry.error)))
        return rows

    def _fill(self, row: Row, entry: _Entry) -> Row:
        status, reason = entry.outcome
        allowed = checks.tolerance(getattr(torch, row.dtype))
        extra = dict(entry.extra)
        if entry.series is not None:
            extra |= {"calls": entry.series.calls, "copies": len(entry.outs)}
        row = replace(row, status=status, reason=reason, extra=extra)
        if entry.stats is None:
            return row
        found = entry.stats
        p20, p50, p80, least = (_digits(x) for x in (found.p20, found.p50, found.p80, found.min))
        row = replace(row, us=Stats(p20, p50, p80, least, found.n))
        if entry.error is None:
            return row
        row = replace(row, error=_digits(entry.error), tolerance=allowed)
        if status == "ok" and not entry.error <= allowed:
            row = replace(
                row, status="failed", reason=f"relative error {entry.error:.1e}, allowed {allowed:.1e}"
            )
        return row

    # --- for all cases -------------------------------------------------------------------------------------------

    def _renew_pool(self) -> None:
        """Memory for graphs, and one that keeps it while there is none of a case. A failed capture spoils it."""
        if not self.context.cuda:
            return
        self.pool = torch.cuda.graph_pool_handle()
        token = torch.zeros(1, device=self.context.device)
        self._kept = Series(
            lambda i: token.add_(1), 1, self.context, self.budget, capture=True, pool=self.pool
        )

    def _flusher(self) -> Callable[[], object] | None:
        """Reads more memory than the L2 holds: what was there is gone, and nothing waits to be written back."""
        if not self.context.cuda:
            return None
        cache = torch.cuda.get_device_properties(self.context.device).L2_cache_size
        other = torch.zeros(2 * cache // 4, dtype=torch.float32, device=self.context.device)
        found = torch.zeros((), dtype=torch.float32, device=self.context.device)
        return lambda: torch.sum(other, dim=0, out=found)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection frees what a capture does not allow: graphs of the shape before. It comes afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.collect()


def _plan_of(planner: Planner, request: Request) -> dict[str, Any]:
    """For the row, shorter than :meth:`.Planner.extra`: there are thousands of rows."""
    plan = {**planner.plan(request), "tile_name": planner.tile_name(request)}
    short: dict[str, Any] = {name: plan[name] for name in _PLAN}
    short["predicted_us"] = _digits(float(plan["predicted_us"]))
    return {"plan": short, "waves": _digits(planner.waves(request))}


def _digits(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")
