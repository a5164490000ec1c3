"""Runs jobs where torchrun has started the ranks: every process is one of them, and rank 0 also writes and shows.

Nothing can be restarted here. A rank that hangs is ended by a watchdog, which writes the row of the variant in
progress, so that ``--resume`` goes on after it; and variants that want processes of their own are left out.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from . import environment
from .plan import Job, blank_row
from .recorder import Recorder
from .records import Row, Status
from .suite import Suite

__all__ = ["run_jobs"]

_GAVE_UP = 3  # exit code
_OTHERS_SECONDS = 5.0  # the other ranks leave it to rank 0 to write the row
_START_SECONDS = 180.0


@dataclass
class _Report:
    """Where this rank is; rows go to the recorder."""

    job: Job
    recorder: Recorder
    since: float = field(default_factory=time.monotonic)
    step: tuple[str, str, str] = ("", "", "")  # case, dtype, variant
    limit: float = _START_SECONDS
    over: bool = False

    def at(self, case: str, dtype: str, variant: str, phase: str, limit: float) -> None:
        self.step, self.limit = (case, dtype, variant), max(limit, self.job.settings.time_limit)
        self.since = time.monotonic()
        if not self.recorder.silent:
            self.recorder.display.at(case, variant, phase)

    def trouble(self, variant: str, reason: str) -> None:
        print(f"{self.step[0]}, {variant}: {reason}", file=sys.stderr, flush=True)

    def rows(self, case: str, dtype: str, rows: list[Row]) -> None:
        self.recorder.rows(rows)


def run_jobs(suite: Suite, jobs: Sequence[Job], recorder: Recorder) -> bool:
    """Run the first job in this process; False if the time budget ended before it."""
    from . import engine, worker
    from .context import RanksLost
    from .lockstep import DeviceLost

    for other in jobs[1:]:
        recorder.say(
            f"{other.isolated}: runs in processes of its own; start with --gpus in place of torchrun."
        )
    rank, job = int(os.environ["RANK"]), jobs[0]
    os.environ.update({name: os.environ.get(name, value) for name, value in environment.NO_MULTICAST.items()})
    report = _Report(job, recorder)
    threading.Thread(target=_watch, args=(suite, report, rank), daemon=True, name="watchdog").start()
    context = worker.join(job.options, rank, int(os.environ["LOCAL_RANK"]))
    try:
        worker.settle_clocks(context)
        if rank == 0:
            recorder.begin(environment.collect(job.options.device, job.options.world, job.settings.commit))
        complete = engine.run_job(suite, job, context, report, worker.make_sampler(context))
    except (DeviceLost, RanksLost) as error:
        _give_up(suite, report, "crashed", f"{type(error).__name__}: {error}")
    report.over = True
    worker.leave()
    return complete


def _watch(suite: Suite, report: _Report, rank: int) -> None:
    """Ends this process when it makes no step for too long."""
    while not report.over:
        time.sleep(0.2)
        if time.monotonic() - report.since > report.limit + (0 if rank == 0 else _OTHERS_SECONDS):
            _give_up(suite, report, "timeout", f"no sign of life for {report.limit:.0f} s")


def _give_up(suite: Suite, report: _Report, status: Status, reason: str) -> NoReturn:
    """Write the row of the variant in progress, say how to go on, and end the process."""
    job, (name, dtype, variant) = report.job, report.step
    if not report.recorder.silent:
        for item in job.items:
            if (item.case, item.dtype) == (name, dtype):
                case = next(c for c in suite.cases(job.options) if (c.name, c.dtype) == (name, dtype))
                blamed = [variant] if variant in item.variants else item.variants
                rows = [blank_row(suite, case, one, job.options, status, reason) for one in blamed]
                report.recorder.rows(rows, finished=False)
        report.recorder.end(complete=False)
        where = f"{name}, {variant or 'inputs'}" if name else "the start"
        sentence = f"bench: {where}: {reason}. What was measured is kept; run the same again with --resume."
        print(sentence, file=sys.stderr, flush=True)
    os._exit(_GAVE_UP)
