"""Runs jobs in processes of their own, watches them, and goes on with the rest when one hangs or crashes.

This process never touches CUDA and never imports torch, so nothing that happens in a rank can harm it.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from . import records
from .environment import NO_MULTICAST
from .errors import BenchError
from .plan import Item, Job, Strikes, blank_row, without
from .ranks import FOLLOWED, Ranks
from .recorder import Recorder
from .records import Row, Status
from .suite import Suite

__all__ = ["Failure", "Step", "find_failure", "rank_environment", "run_jobs", "watch"]

_STARTS = 2  # a port that someone else took meanwhile is worth a second one
_START_SECONDS = 180.0  # importing torch, creating contexts and communicators
_TROUBLE_SECONDS = 20.0  # for the other ranks after one reported an error
_GOODBYE_SECONDS = 20.0
_POLL_SECONDS = 0.03


@dataclass(frozen=True)
class Step:
    """Where a rank is: the ``number`` of its step and since when (time.monotonic())."""

    number: int = 0
    since: float = 0.0
    case: str = ""
    dtype: str = ""
    variant: str = ""
    phase: str = "start"
    limit: float = 0.0


@dataclass(frozen=True)
class Failure:
    """How a set of ranks came to its end; an empty ``case`` means before the first."""

    status: Literal["timeout", "crashed", "error"]
    reason: str
    rank: int
    case: str = ""
    dtype: str = ""
    variant: str = ""


@dataclass
class _Progress:
    """What the events of one set of ranks say."""

    steps: list[Step]
    ready: bool = False
    done: bool = False
    complete: bool = True
    trouble: dict[int, tuple[float, str]] = field(default_factory=dict)  # by rank: since when, and what
    finished: set[tuple[str, str]] = field(default_factory=set)


def rank_environment(job: Job) -> dict[str, str]:
    """Variables of the rank processes."""
    env = {**NO_MULTICAST, "TPK_CHECK": "0"}  # agreement of the ranks costs ours a collective a call
    if job.options.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["OMP_NUM_THREADS"] = os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.options.world))
        )
    if Path("/sys/class/net/lo").exists() and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve does not matter then
    return env


def run_jobs(suite: Suite, jobs: Sequence[Job], recorder: Recorder) -> bool:
    """Run the jobs one after the other; False if the time budget ended before them.

    Raises:
        BenchError: the ranks do not start.
        KeyboardInterrupt: the user stops it; the ranks are ended.
    """
    with tempfile.TemporaryDirectory(prefix="tpk-bench-") as folder:
        return all(_run_job(suite, job, recorder, Path(folder)) for job in jobs)


def _run_job(suite: Suite, job: Job, recorder: Recorder, folder: Path) -> bool:
    strikes, failed_starts = Strikes(), 0
    for attempt in itertools.count():
        ranks = Ranks(job.to_json(), job.options.world, folder / f"{attempt}", rank_environment(job))
        try:
            progress, failure = watch(ranks, job, recorder)
        finally:
            ranks.end()
        if failure is None:
            return progress.complete
        if not failure.case:
            failed_starts += 1
            if failed_starts == _STARTS:
                said = ranks.log_tail(failure.rank)
                raise BenchError(
                    f"the ranks did not start: {failure.reason}. Rank {failure.rank} printed:\n{said}"
                )
            continue
        failed_starts = 0
        logs = ranks.keep_logs(
            recorder.path.with_suffix(".logs"), f"{recorder.run}-{time.strftime('%H%M%S')}"
        )
        recorder.display.say(f"the ranks were ended ({failure.reason}); what they printed: {logs}")
        left = _what_is_left(suite, job, progress.finished, failure, strikes, recorder)
        if not left:
            break
        job = replace(job, items=tuple(left))
    return True


def _what_is_left(
    suite: Suite,
    job: Job,
    finished: set[tuple[str, str]],
    failure: Failure,
    strikes: Strikes,
    recorder: Recorder,
) -> list[Item]:
    """Write the rows of what failed, and of variants that failed too often; returns the items still to run."""
    where = (failure.case, failure.dtype)
    if where in finished:  # on the way to the next one
        return without(job.items, finished, None)
    blamed = job.isolated or failure.variant  # processes of its own: whatever happens there counts against it
    left = without(job.items, finished, (*where, blamed))
    _write(suite, job, recorder, where, [blamed] if blamed else [], failure.status, failure.reason, left)
    if blamed:
        strikes.add(blamed, failure.reason)
    for variant in strikes.out():
        for item in [item for item in left if variant in item.runs]:
            left = without(left, (), (item.case, item.dtype, variant))
            _write(suite, job, recorder, (item.case, item.dtype), [variant], "skipped", strikes.reason, left)
    return left


def _write(
    suite: Suite,
    job: Job,
    recorder: Recorder,
    where: tuple[str, str],
    variants: Sequence[str],
    status: Status,
    reason: str,
    left: Sequence[Item],
) -> None:
    """Rows without measurement of some variants of a case ([]: all), as far as it wants rows of them."""
    case = next(c for c in suite.cases(job.options) if (c.name, c.dtype) == where)
    wanted = next(item.variants for item in job.items if (item.case, item.dtype) == where)
    rows = [
        blank_row(suite, case, name, job.options, status, reason)
        for name in wanted
        if name in variants or not variants
    ]
    recorder.rows(rows, finished=all((item.case, item.dtype) != where for item in left))


def watch(
    ranks: Ranks,
    job: Job,
    recorder: Recorder | None,
    *,
    start_seconds: float = _START_SECONDS,
    goodbye_seconds: float = _GOODBYE_SECONDS,
) -> tuple[_Progress, Failure | None]:
    """Follow the ranks to their end, or to what ends them; what they find goes to the recorder."""
    progress = _Progress([Step(since=time.monotonic())] * job.options.world)
    while True:
        codes = ranks.exit_codes()  # before the events: what an ended rank said last is read below
        for rank, event in ranks.events():
            _take(progress, rank, event, recorder)
        if progress.done:
            ranks.wait(goodbye_seconds)
            return progress, None
        failure = find_failure(
            codes, progress.steps, progress.trouble, time.monotonic(), job.settings.time_limit, start_seconds
        )
        if failure is not None:
            return progress, replace(failure, reason=_reason(failure, codes, ranks))
        time.sleep(_POLL_SECONDS)


def _take(progress: _Progress, rank: int, event: Mapping[str, Any], recorder: Recorder | None) -> None:
    now = time.monotonic()
    kind = event["event"]
    if kind == "at":
        progress.steps[rank] = Step(
            event["number"],
            now,
            event["case"],
            event["dtype"],
            event["variant"],
            event["phase"],
            event["limit"],
        )
        progress.trouble.pop(rank, None)  # it went on
        if rank == 0 and recorder:
            recorder.display.at(event["case"], event["variant"], event["phase"])
    elif kind == "trouble":
        progress.trouble[rank] = (now, event["reason"])
    elif kind == "fatal":
        raise BenchError(event["sentence"])
    elif rank == 0 and kind == "done":
        progress.done, progress.complete = True, event["complete"]
    elif rank == 0 and kind == "ready" and recorder:
        recorder.begin(event["env"])
    elif rank == 0 and kind == "rows" and recorder:
        rows = [r for data in event["rows"] if isinstance(r := records.decode(data, "a rank"), Row)]
        progress.finished.add((event["case"], event["dtype"]))
        recorder.rows(rows)


def find_failure(
    codes: Sequence[int | None],
    steps: Sequence[Step],
    trouble: Mapping[int, tuple[float, str]],
    now: float,
    time_limit: float,
    start_seconds: float = _START_SECONDS,
) -> Failure | None:
    """What is wrong with the ranks, if anything. Pure.

    A rank that ended is to blame, one that a signal ended first of all: the others may have ended because of it. Of
    ranks that hang the one that is furthest behind is to blame: the others wait for it in a later step.
    """
    ended = {rank: code for rank, code in enumerate(codes) if code is not None}
    if any(ended.values()) or len(ended) == len(codes):
        rank = min(ended, key=lambda r: (ended[r] >= 0, ended[r] in (0, FOLLOWED), steps[r].number))
        reason = trouble[rank][1] if rank in trouble else ""
        return _failure("crashed", reason, rank, steps[rank])
    rank = min(range(len(steps)), key=lambda r: steps[r].number)
    if trouble and len(trouble) < len(steps):
        first, (since, reason) = min(trouble.items(), key=lambda t: t[1][0])
        if now - since > min(_TROUBLE_SECONDS, time_limit / 4):
            return _failure(
                "error", f"rank {first}: {reason}; the other ranks waited for it", first, steps[first]
            )
    step = steps[rank]
    limit = max(time_limit, step.limit, 0.0 if step.case else start_seconds)
    if now - max(s.since for s in steps) > limit:
        where = f" ({step.phase})" if step.case else ""
        return _failure("timeout", f"no sign of life for {limit:.0f} s{where}", rank, step)
    return None


def _failure(status: Literal["timeout", "crashed", "error"], reason: str, rank: int, step: Step) -> Failure:
    return Failure(status, reason, rank, step.case, step.dtype, step.variant)


def _reason(failure: Failure, codes: Sequence[int | None], ranks: Ranks) -> str:
    """The failure's reason, completed by what the operating system and the rank's log know."""
    rank, code = failure.rank, codes[failure.rank] or 0
    if failure.status == "timeout":
        where = ranks.where()
        waiting = {
            r for r, frame in where.items() if "distributed_c10d" in frame
        }  # for another rank, perhaps
        telling = [r for r in where if r not in waiting] or list(where)
        return "; ".join([failure.reason, *(f"rank {r} was in {where[r]}" for r in telling[:1])])
    if failure.reason:
        return failure.reason
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"rank {rank} was ended by {signal.Signals(-code).name}{hint}"
    return f"rank {rank} ended with exit code {code}: {ranks.log_tail(rank, 1)[:200]}"
