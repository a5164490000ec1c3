"""From the options to runs: which suites on how many ranks, into which file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import environment, records, resume, suites
from .errors import BenchError
from .live import make_display
from .plan import Job, Profile, Selection, Settings, measured, plan
from .recorder import Recorder
from .suite import Options, Suite

__all__ = ["run", "under_torchrun"]

_CPU_RANKS = 2
_MOST_BAD = 20  # rows that are named at the end of a run
_TILE_ROUNDS = 5  # of --tiles: many variants, each for a point of a fit


def under_torchrun() -> bool:
    """True in a process that torchrun (or another launcher that sets its variables) started."""
    return all(
        name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    )


def run(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Do what the options say; returns the exit code."""
    # GPUs that were asked for are not replaced by CPU ranks in silence.
    device = given.device or ("cuda" if environment.gpu_count() or given.gpus else "cpu")
    loaded = [suites.load(name) for name in given.suites]
    worlds = {suite.name: _worlds(suite, device, given.gpus, only_list=given.list) for suite in loaded}
    if given.gpus and not any(suite.distributed for suite in loaded) and given.gpus != (1,):
        raise BenchError(f"gpus: {' and '.join(given.suites)} runs on one GPU; leave --gpus out.")
    settings = Settings(
        quick=given.quick or bool(given.tiles),
        rounds=given.rounds or (_TILE_ROUNDS if given.tiles else 0),
        time_limit=given.time_limit,
        deadline=time.time() + given.budget if given.budget else 0.0,
        commit=given.commit,
    )
    path = given.out or _default_path(device, max(max(w) for w in worlds.values()))
    if given.resume and not path.exists():
        raise BenchError(f"resume: {path} does not exist; name the file with --out, or leave --resume out.")
    known, lost = records.Results(), []
    if path.exists() and not given.profile:
        lost = resume.left_over(path)
        known = records.load(path)  # another schema is found before measuring
        lost = [row for row in lost if all((r.key, r.run) != (row.key, row.run) for r in known.rows)]
    goes_on = given.resume or (path.exists() and not given.profile and all(suite.brief for suite in loaded))
    done = _done(given, known, lost, loaded, device, settings, path) if goes_on else set()
    selection = Selection(tuple(given.cases), given.variants, given.skip)
    plans = {
        suite.name: [
            job
            for world in worlds[suite.name]
            for job in plan(suite, _options(given, device, world), selection, done, settings)
        ]
        for suite in loaded
    }
    if given.list:
        for suite in loaded:
            _print_plan(suite, plans[suite.name])
        return 0
    if given.profile:
        return _profile(given, loaded, plans)
    if _first() and path.exists():
        _write_lost(path, lost)
    return _run_all(given, loaded, plans, path, arguments)


def _first() -> bool:
    """Whether this process writes and prints."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def _done(
    given: argparse.Namespace,
    known: records.Results,
    lost: Sequence[records.Row],
    loaded: Sequence[Suite],
    device: str,
    settings: Settings,
    path: Path,
) -> set[tuple[str, str, str, int, str]]:
    """Keys that --resume leaves out; ``lost``: rows of what the last run was measuring when it ended."""
    warnings = resume.check(path, known, given.suites, resume.present(device, settings))
    for sentence in warnings if _first() else []:
        print(f"bench: warning: {sentence}", file=sys.stderr)
    rows = records.Results(known.headers, [*known.rows, *lost]).latest()
    names = ((suite.name, suite.baseline(_options(given, device, 1))) for suite in loaded if suite.twice)
    baselines = {(suite, name) for suite, name in names if name}
    return measured(rows, retry=given.retry, baselines=baselines)


def _write_lost(path: Path, lost: Sequence[records.Row]) -> None:
    """Rows of what the last run was measuring when it ended; then the side file goes, see :func:`.resume.left_over`."""
    for row in lost:
        records.append(path, row)
        print(f"{row.suite} {row.case}, {row.variant}: {row.status.upper()}: {row.reason}", file=sys.stderr)
    resume.clear(path)


def _run_all(
    given: argparse.Namespace,
    loaded: Sequence[Suite],
    plans: dict[str, list[Job]],
    path: Path,
    arguments: Sequence[str],
) -> int:
    if under_torchrun():
        from .under_torchrun import run_jobs
    else:
        from .supervisor import run_jobs
    first = _first()
    display = make_display(live=first and not given.no_live)
    again = shlex.join(a for a in arguments if a != "--resume")
    go_on = f"{'torchrun ... -m' if under_torchrun() else 'python -m'} {__package__} {again} --resume"
    if given.out is None:
        go_on += f" --out {path}"
    before = len(records.load(path).rows) if path.exists() else 0
    for suite in loaded:
        jobs = plans[suite.name]
        if not jobs:
            if first:
                print(f"{suite.name}: everything asked for is in {path} already.")
            continue
        recorder = Recorder(path, display, arguments, suite, silent=not first)
        recorder.show_plan(jobs)
        try:
            complete = run_jobs(suite, jobs, recorder)
        except BaseException as error:
            recorder.end(complete=False)
            if first and isinstance(error, KeyboardInterrupt):
                print(f"\ninterrupted; what was measured is in {path}. To go on: {go_on}", file=sys.stderr)
            raise
        if complete:
            for world in dict.fromkeys(job.options.world for job in jobs):
                recorder.summarise(world)
        recorder.end(complete=complete)
        summary = recorder.conclusion()
        if summary:
            print(summary)
        if not complete:
            if first:
                print(f"the time budget is spent; what was measured is in {path}. To go on: {go_on}")
            break
    if not first or not path.exists():
        return 0
    rows = records.load(path).rows[before:]
    bad = [
        row for row in rows if row.role == "ours" and row.status in ("failed", "timeout", "crashed", "error")
    ]
    for row in bad[:_MOST_BAD]:
        print(f"{row.suite} {row.case}, {row.variant}: {row.status.upper()}: {row.reason}")
    if len(bad) > _MOST_BAD:
        print(f"and {len(bad) - _MOST_BAD} more rows of ours that went wrong")
    if rows:
        print(f"{len(rows)} rows in {path}; to see them: python -m {__package__} report {path}")
    return 1 if bad else 0


def _profile(given: argparse.Namespace, loaded: Sequence[Suite], plans: dict[str, list[Job]]) -> int:
    from . import profile

    if under_torchrun():
        raise BenchError("profile: it starts its own ranks; use --gpus N without torchrun.")
    chosen = [job for suite in loaded for job in plans[suite.name]]
    cases = {(job.suite, item.case, item.dtype, job.options.world) for job in chosen for item in job.items}
    if len(cases) != 1 or len(given.variants) != 1:
        raise BenchError(
            f"profile: expected exactly one case and one variant, got {len(cases)} cases and {len(given.variants)} "
            "variants; choose with --case and --variant, --list shows them."
        )
    variant = given.variants[0]
    job = next(job for job in chosen for item in job.items if variant in item.variants)
    out = given.out or Path("bench-results") / f"profile-{given.profile}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    return profile.start(job, variant, Profile(given.profile, given.steps, str(out), given.kernel))


def _worlds(suite: Suite, device: str, gpus: Sequence[int], *, only_list: bool = False) -> Sequence[int]:
    """Numbers of ranks of a suite."""
    launched = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 0
    if launched and gpus not in ((), (launched,)):
        raise BenchError(f"gpus: torchrun started {launched} ranks; leave --gpus out.")
    if not suite.distributed:
        if launched > 1:
            raise BenchError(f"{suite.name}: runs in one process; start it without torchrun.")
        return (1,)
    there = environment.gpu_count() if device == "cuda" else 0
    wanted = (launched,) if launched else gpus or (there or _CPU_RANKS,)
    for world in wanted:
        if device == "cuda" and world > max(there, launched) and not only_list:
            mend = f"use --gpus {there}" if there else "use --device cpu for ranks on the CPU"
            raise BenchError(f"gpus: {world} asked for, {there} found (nvidia-smi -L lists them); {mend}.")
        if world < suite.smallest_world:
            raise BenchError(
                f"{suite.name}: needs {suite.smallest_world} or more ranks, got {world}; on one GPU run gemm."
            )
    return wanted


def _options(given: argparse.Namespace, device: str, world: int) -> Options:
    return Options(
        device=device,
        world=world,
        dtypes=given.dtypes,
        sets=given.sets,
        models=given.models,
        rows=given.rows,
        ops=given.ops,
        tiles=given.tiles,
        sweep=given.sweep,
        part=given.part,
        seed=given.seed,
        small=given.small or device == "cpu",
    )


def _default_path(device: str, world: int) -> Path:
    name = f"{time.strftime('%Y-%m-%d')}_{environment.gpu_short_name(device)}x{world}.jsonl"
    return Path("bench-results") / name


def _print_plan(suite: Suite, jobs: Sequence[Job]) -> None:
    print(f"{suite.name}: {suite.what}")
    for job in jobs:
        options = job.options
        own = f", in processes of its own: {job.isolated}" if job.isolated else ""
        print(f"\n{len(job.items)} cases on {options.world} {options.device} rank(s){own}")
        for item in job.items:
            print(f"  {item.case:<34} {item.dtype:<9} {', '.join(item.variants)}")
    if jobs:
        baseline = suite.baseline(jobs[0].options)
        print("\nvariants")
        for variant in suite.variants(jobs[0].options):
            mark = " (baseline)" if variant.name == baseline else ""
            print(f"  {variant.name:<26} {variant.role:<8} {variant.what}{mark}")
    print()
