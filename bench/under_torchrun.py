"""Runs jobs where torchrun has started the ranks: every process is one of them, and rank 0 also writes and shows.

Nothing can be restarted here. A rank that hangs is ended by a watchdog, which writes the row of the variant in
progress; where not even that is possible, because torchrun ends rank 0 after another rank crashed, a side file
(:mod:`.resume`) remains. ``--resume`` goes on after the variant either way. Variants that want processes of their own
are left out.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from . import environment, resume
from .errors import BenchError, Terminated
from .plan import Job, blank_row
from .recorder import Recorder
from .records import Row, Status
from .resume import InProgress, Note
from .suite import Suite

__all__ = ["run_jobs"]

_GAVE_UP = 3  # exit code
_OTHERS_SECONDS = 5.0  # the other ranks leave it to rank 0 to write the row
_START_SECONDS = 180.0
_TROUBLE_SECONDS = 20.0  # for the other ranks after one raised
_POLL_SECONDS = 0.2


@dataclass
class _Report:
    """Where this rank is; rows go to the recorder.

    Of rank 0 what is in progress goes to the side file, of the others what goes wrong to their notes.
    """

    suite: Suite
    job: Job
    recorder: Recorder
    rank: int
    since: float = field(default_factory=time.monotonic)
    step: tuple[str, str, str] = ("", "", "")  # case, dtype, variant; empty between cases
    limit: float = _START_SECONDS
    over: bool = False
    trouble_here: Note | None = None  # in this step

    def __post_init__(self) -> None:
        self.progress = InProgress(self.recorder.path)

    def at(self, case: str, dtype: str, variant: str, phase: str, limit: float) -> None:
        self._go_on()
        new = self.step[:2] != (case, dtype)
        self.step, self.limit = (case, dtype, variant), max(limit, self.job.settings.time_limit)
        if not self.recorder.silent:
            if new:
                self.progress.begin(self.blank_rows(case, dtype, "crashed", ""))
            self.progress.at(variant, phase)
            self.recorder.display.at(case, variant, phase)

    def trouble(self, variant: str, reason: str) -> None:
        print(f"{self.step[0]}, {variant}: {reason}", file=sys.stderr, flush=True)
        self.trouble_here = Note(self.rank, *self.step, reason)
        if self.rank:
            self.trouble_here.write(self.recorder.path)

    def rows(self, case: str, dtype: str, rows: list[Row]) -> None:
        self._go_on()
        self.step = ("", "", "")
        self.progress.clear()
        self.recorder.rows(rows)

    def _go_on(self) -> None:
        if self.trouble_here is not None:
            self.trouble_here = None
            Note.remove(self.recorder.path, self.rank)
        self.since = time.monotonic()

    def blank_rows(self, name: str, dtype: str, status: Status, reason: str) -> list[Row]:
        """Rows of all wanted variants of a case, without measurement."""
        options, where = self.job.options, (name, dtype)
        case = next(c for c in self.suite.cases(options) if (c.name, c.dtype) == where)
        wanted = next(item.variants for item in self.job.items if (item.case, item.dtype) == where)
        rows = [blank_row(self.suite, case, name, options, status, reason) for name in wanted]
        return self.recorder.mine(rows)

    def notes(self) -> list[Note]:
        """What has gone wrong in this step, as far as this rank knows."""
        here = [self.trouble_here] if self.trouble_here else []
        return here + [n for n in resume.notes(self.recorder.path, *self.step) if n.rank != self.rank]


def run_jobs(suite: Suite, jobs: Sequence[Job], recorder: Recorder) -> bool:
    """Run the job that is not isolated, if any, in this process; False if the time budget ended before it."""
    for other in jobs:
        if other.isolated:
            recorder.say(
                f"{other.isolated}: runs in processes of its own; start with --gpus in place of torchrun."
            )
    main = [job for job in jobs if not job.isolated]
    return _run_job(suite, main[0], recorder) if main else True


def _run_job(suite: Suite, job: Job, recorder: Recorder) -> bool:
    from . import engine, worker
    from .context import RanksLost
    from .lockstep import DeviceLost

    rank = int(os.environ["RANK"])
    os.environ.update({name: os.environ.get(name, value) for name, value in environment.NO_MULTICAST.items()})
    os.environ["TPK_CHECK"] = "0"
    report = _Report(suite, job, recorder, rank)
    threading.Thread(target=_watch, args=(report,), daemon=True, name="watchdog").start()
    context = worker.join(job.options, rank, int(os.environ["LOCAL_RANK"]))
    Note.remove(recorder.path, rank)  # of an earlier run; rank 0 has read it before it joined
    try:
        worker.settle_clocks(context)
        if rank == 0:
            recorder.begin(environment.collect(job.options.device, job.options.world, job.settings.commit))
        complete = engine.run_job(suite, job, context, report, worker.make_sampler(context))
    except (DeviceLost, RanksLost) as error:
        if isinstance(error, DeviceLost) and report.trouble_here is None:
            report.trouble(report.step[2], str(error))
        _give_up(report, "crashed", f"{type(error).__name__}: {error}")
    except BenchError:
        raise
    except Exception as error:  # the ranks are out of step now
        traceback.print_exc(file=sys.stderr)
        report.trouble(report.step[2], f"{type(error).__name__}: {error}")
        _give_up(report, "error", f"{type(error).__name__}: {error}")
    except KeyboardInterrupt as stop:
        if not isinstance(
            stop, Terminated
        ):  # by the user; torchrun ends us with SIGTERM after another rank crashed
            report.progress.clear()
        raise
    report.over = True
    worker.leave()
    return complete


def _watch(report: _Report) -> None:
    """Ends this process when it makes no step for too long."""
    while not report.over:
        time.sleep(_POLL_SECONDS)
        idle = time.monotonic() - report.since
        if report.rank == 0 and idle > _patience(report):
            known = report.notes()
            if known and len(known) < report.job.options.world:
                first = min(known, key=lambda note: note.since)
                if time.time() - first.since > _patience(report):
                    _give_up(report, "error", "the other ranks waited for it")
        if idle > report.limit + (0 if report.rank == 0 else _OTHERS_SECONDS):
            _give_up(report, "timeout", f"no sign of life for {report.limit:.0f} s")


def _patience(report: _Report) -> float:
    return min(_TROUBLE_SECONDS, report.job.settings.time_limit / 4)


def _give_up(report: _Report, status: Status, reason: str) -> NoReturn:
    """Write the row of the variant in progress, say how to go on, and end the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # comes from torchrun at any moment
    if not report.recorder.silent:
        name, dtype, variant = report.step
        if name:
            said = [f"rank {n.rank}: {n.reason}" for n in report.notes() if n.reason not in reason]
            reason = "; ".join([*said, reason])
            rows = report.blank_rows(name, dtype, status, reason)
            blamed = [row for row in rows if row.variant == variant] or rows
            report.recorder.rows(blamed, finished=False)
            report.progress.clear()
        report.recorder.end(complete=False)
        where = f"{name}, {variant or 'inputs'}" if name else "between cases, or at the start"
        sentence = f"bench: {where}: {reason}. What was measured is kept; run the same again with --resume."
        print(sentence, file=sys.stderr, flush=True)
    os._exit(_GAVE_UP)
