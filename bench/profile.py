"""A profile of one case and variant: ranks run some calls under a profiler, which :mod:`.profiling` evaluates."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BenchError
from .plan import Job, Profile
from .suite import Suite

if TYPE_CHECKING:
    from .context import Context
    from .lockstep import Report

__all__ = ["run", "start"]

_START_SECONDS = 300.0  # ranks start slowly under a profiler,
_EXPORT_SECONDS = 300.0  # and end slowly: it writes its report


def start(job: Job, variant: str, profile: Profile) -> int:
    """Run the ranks and print the summary; returns the exit code."""
    from . import profiling
    from .ranks import Ranks
    from .supervisor import rank_environment, watch

    out = Path(profile.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    item = replace(job.items[0], variants=(variant,), companion="")
    job = replace(job, items=(item,), profile=replace(profile, out=str(out)))
    prefix = profiling.rank_prefix(profile.kind, out, profile.kernel)
    log = ""
    with tempfile.TemporaryDirectory(prefix="tpk-bench-") as folder:
        ranks = Ranks(job.to_json(), job.options.world, Path(folder), rank_environment(job), prefix)
        try:
            _, failure = watch(
                ranks, job, None, start_seconds=_START_SECONDS, goodbye_seconds=_EXPORT_SECONDS
            )
            if failure is not None:
                raise BenchError(
                    f"profile: {failure.reason}; rank {failure.rank} printed last:\n{ranks.log_tail(failure.rank)}"
                )
            log = "\n".join(ranks.log_tail(i, 200) for i in range(job.options.world))
        finally:
            ranks.end()
    summary = profiling.finish(profile.kind, out, title=f"{job.suite} {item.case} {variant}", log=log)
    print((out / "summary.txt").read_text())
    print(f"the profile is in {summary.parent}")
    return 0


def run(suite: Suite, job: Job, context: Context, report: Report) -> None:
    """The part of a rank."""
    from . import profiling
    from .suite import Runnable

    assert job.profile is not None
    item = job.items[0]
    case = next(c for c in suite.cases(job.options) if (c.name, c.dtype) == (item.case, item.dtype))
    variant = next(v for v in suite.variants(job.options) if v.name == item.variants[0])

    def at(phase: str) -> None:
        report.at(case.name, case.dtype, variant.name, phase, max(_EXPORT_SECONDS, variant.time_limit))

    at("inputs")
    workload = suite.workload(case, context)
    at("prepare")
    runnable: Runnable = workload.prepare(variant.name)
    if runnable.sample is not None:
        raise BenchError(f"profile: {variant.name} of {case.name} is no single call; choose another variant.")
    calls = _Calls(runnable)
    for _ in range(runnable.copies):
        calls()
    context.synchronize()
    at("profile")
    profiling.profile(
        job.profile.kind,
        calls,
        steps=job.profile.steps,
        out=Path(job.profile.out),
        rank=context.rank,
        title=f"{case.name} {variant.name}",
    )
    if runnable.close is not None:
        runnable.close()
    workload.close()


class _Calls:
    """Launches one call after the other, each on the next buffer set."""

    def __init__(self, runnable: Any) -> None:
        self.runnable, self.next = runnable, 0

    def __call__(self) -> None:
        self.runnable.launch(self.next % self.runnable.copies)
        self.next += 1
