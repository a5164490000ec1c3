"""Profiles of one case of a suite: where the time of every rank went, and how much communication is hidden.

Three profilers, used in two places. In the worker of each rank, with a callable that runs one step::

    kineto.record(run: Callable[[], None], steps: int, out: Path, rank: int, *, title: str = "",
                  group: ProcessGroup | None = None) -> Path
        profiles ``steps`` calls under torch.profiler, returns the path of OUT/trace_rank{rank}.json.gz
    bracket(run: Callable[[], None], steps: int, *, group: ProcessGroup | None = None,
            pause: bool = True) -> None
        under nsys or ncu: one call to warm up, then ``steps`` calls between cudaProfilerStart and
        cudaProfilerStop, each in an NVTX range "step i"
    profile(kind: "kineto" | "nsys" | "ncu", run, *, steps=5, out: Path, rank: int, title: str = "",
            group=None) -> None
        either of them, by the name of the profiler

``group`` is needed where not all ranks of the default group take part. On GPUs the steps are enqueued while
the GPU pauses (:func:`.capture.hold`; not for ncu, which looks at one kernel), so that times show what the GPUs
do and not that a host was late; whatever the GPU did up to the end of the pause does not count.

Both turn the ranges of ``TPK_NVTX=1`` on by themselves. In the launcher, before the ranks start (kineto needs
nothing)::

    nsys.rank_prefix(out: Path) -> list[str]
    ncu.rank_prefix(out: Path, kernel_regex: str = "", *, skip: int = 0, count: int = 1,
                    sections: str = "basic", metrics: Sequence[str] = ()) -> list[str]
    rank_prefix(kind, out: Path, kernel_regex: str = "") -> list[str]
        what to put before the command of every rank; the same for all, as RANK must be in each one's
        environment. BenchError where the profiler is not installed.

and after all ranks ended::

    kineto.finish(out: Path, *, title: str = "") -> Path
    nsys.finish(out: Path, *, title: str = "") -> Path
        merge or export what the ranks wrote, write OUT/trace_summary.json (the timeline that ``bench report``
        draws) and OUT/summary.txt (the tables), and return the path of trace_summary.json
    ncu.finish(out: Path, *, log: str = "") -> Path
        write OUT/ncu_summary.json and OUT/summary.txt, return the path of ncu_summary.json; ``log`` is the
        output of the ranks, where ncu says why it could not profile
    finish(kind, out: Path, *, title: str = "", log: str = "") -> Path
        any of the three; OUT/summary.txt is the text to print

All of them raise BenchError, a sentence, for what a user can mend. ``out`` is created where it is missing; it
holds one profile: files that an earlier one left there are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ..errors import check_known
from . import kineto, ncu, nsys
from .capture import bracket

__all__ = ["KINDS", "Kind", "bracket", "finish", "kineto", "ncu", "nsys", "profile", "rank_prefix"]

Kind = Literal["kineto", "nsys", "ncu"]
KINDS: tuple[Kind, ...] = ("kineto", "nsys", "ncu")


def profile(
    kind: Kind,
    run: Callable[[], None],
    *,
    steps: int = 5,
    out: Path,
    rank: int,
    title: str = "",
    group: Any = None,
) -> None:
    """Run ``steps`` calls of ``run`` on this rank under a profiler; nsys and ncu are around this process already."""
    check_known("profile", kind, KINDS)
    if kind == "kineto":
        kineto.record(run, steps, out, rank, title=title, group=group)
    else:
        bracket(run, steps, group=group, pause=kind == "nsys")


def rank_prefix(kind: Kind, out: Path, kernel_regex: str = "") -> list[str]:
    """What to put before the command of every rank; ``kernel_regex`` is for ncu."""
    check_known("profile", kind, KINDS)
    if kind == "nsys":
        return nsys.rank_prefix(out)
    return ncu.rank_prefix(out, kernel_regex) if kind == "ncu" else []


def finish(kind: Kind, out: Path, *, title: str = "", log: str = "") -> Path:
    """Merge and summarise what the ranks wrote under ``out``; returns the path of the summary (JSON).

    Args:
        kind: the profiler.
        out: folder of the profile.
        title: of the timeline.
        log: output of the ranks, for the errors of ncu.
    """
    check_known("profile", kind, KINDS)
    if kind == "ncu":
        return ncu.finish(out, log=log)
    return kineto.finish(out, title=title) if kind == "kineto" else nsys.finish(out, title=title)
