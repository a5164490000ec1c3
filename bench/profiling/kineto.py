"""Profiles by torch.profiler (kineto): needs nothing installed, works on CPU and GPU.

OUT/trace_rank{r}.json.gz is a Chrome trace of one rank, OUT/trace.json.gz the merged one; both open in
https://ui.perfetto.dev or chrome://tracing.

Clocks: kineto writes times relative to ``baseTimeNanoseconds`` of a trace, and their sum is the system clock
of the host, into which CUPTI converts the clocks of the GPUs. Merged ranks of one host are therefore
comparable to a few microseconds (the error of that conversion), ranks of several hosts only as well as their
system clocks agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BenchError
from . import classify, intervals, summary
from .capture import align, hold, synchronize
from .ranges import Launch, Range, RangeTotal, totals
from .summary import Event, RankProfile

__all__ = ["finish", "merge", "profile_of", "record", "summarise"]

_GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver"}
_STEP = re.compile(r"step \d+")
# Ranges that torch and its profiler make themselves.
_FOREIGN_RANGE = re.compile(r"ProfilerStep|nccl:|gloo:|## ")
_PROCESS_METADATA = {"process_name", "process_labels", "process_sort_index"}
_PIDS_PER_RANK = 1000


def record(
    run: Callable[[], None], steps: int, out: Path, rank: int, *, title: str = "", group: Any = None
) -> Path:
    """Profile ``steps`` calls of ``run`` on this rank; every rank calls it.

    Args:
        run: one step. Called ``steps + 2`` times, with CUDA once more.
        steps: how many to record, each in a range "step i"; they are not synchronised, and with CUDA enqueued
            while the GPU pauses.
        out: folder for OUT/trace_rank{rank}.json.gz.
        rank: of this process.
        title: kept in the trace, for :func:`finish`.
        group: process group of the ranks that are profiled, if it is not the default group.

    Returns:
        path of the trace.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    from tpkernels.ops import _nvtx

    if steps < 1:
        raise BenchError(f"steps: expected at least 1, got {steps}.")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"trace_rank{rank}.json.gz"
    if rank == 0:  # an earlier profile may have had more ranks; the others write after align(group)
        for old in out.glob("trace_rank*.json*"):
            old.unlink()
    run()
    align(group)
    with (
        _nvtx.enable(),
        profile(
            activities=activities,
            schedule=schedule(
                wait=0, warmup=1, active=1
            ),  # the step to warm up bears the cost of starting CUPTI
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
            acc_events=True,  # without it torch warns that it forgets the step to warm up
        ) as profiler,
    ):
        run()
        align(group)
        profiler.step()
        align(
            group
        )  # recording starts at another time on every rank; what comes before "step 0" is not counted
        # kineto writes metadata as it is, without escaping it for JSON
        profiler.add_metadata("tpk_title", title.translate({ord('"'): "'", ord("\\"): "/"}))
        hold(run, steps, group)
        for step in range(steps):
            with record_function(f"step {step}"):
                run()
        synchronize()
        profiler.step()
    return path


def finish(out: Path, *, title: str = "") -> Path:
    """Merge the traces of all ranks into OUT/trace.json.gz, summarise them, return OUT/trace_summary.json."""
    traces = {rank: summary.read_json(path) for rank, path in _rank_files(out).items()}
    summary.write_json(merge(traces), out / "trace.json.gz")
    profiles = [profile_of(trace, rank) for rank, trace in traces.items()]
    return summary.write(profiles, out, title or _title(traces), tool="kineto")


def summarise(traces: Mapping[int, Mapping[str, Any]], *, title: str = "") -> dict[str, Any]:
    """The ``trace_summary`` object (see :mod:`.summary`) of one Chrome trace per rank."""
    profiles = [profile_of(trace, rank) for rank, trace in sorted(traces.items())]
    return summary.build(profiles, title or _title(traces), tool="kineto")


def _rank_files(out: Path) -> dict[int, Path]:
    found = {}
    for path in out.glob("trace_rank*.json*"):
        match = re.fullmatch(r"trace_rank(\d+)\.json(\.gz)?", path.name)
        if match:
            found[int(match[1])] = path
    if not found:
        raise BenchError(
            f"{out}: expected trace_rank0.json.gz and so on in it, found none; the ranks recorded no profile."
        )
    return dict(sorted(found.items()))


def _title(traces: Mapping[int, Mapping[str, Any]]) -> str:
    return str(next(iter(traces.values()), {}).get("tpk_title", ""))


def merge(traces: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One Chrome trace of all ranks: each rank's rows are its own processes "rank r: ...", times on one clock."""
    bases = {rank: int(trace.get("baseTimeNanoseconds", 0)) for rank, trace in traces.items()}
    base = min(bases.values(), default=0)
    events: list[dict[str, Any]] = []
    for index, (rank, trace) in enumerate(sorted(traces.items())):
        events += _of_rank(trace["traceEvents"], rank, (bases[rank] - base) / 1000, index, len(traces))
    first = traces[min(traces)]
    kept = {
        k: first[k]
        for k in ("schemaVersion", "displayTimeUnit", "deviceProperties", "tpk_title")
        if k in first
    }
    return {**kept, "baseTimeNanoseconds": base, "traceEvents": events}


def _of_rank(
    events: Sequence[Mapping[str, Any]], rank: int, shift_us: float, index: int, ranks: int
) -> list[dict[str, Any]]:
    names, labels = _process_names(events)
    used = dict.fromkeys(e["pid"] for e in events if e.get("ph") == "X")
    pids = {pid: rank * _PIDS_PER_RANK + i + 1 for i, pid in enumerate(used)}
    out: list[dict[str, Any]] = []
    for pid, new in pids.items():
        what = labels.get(pid) or (pid if isinstance(pid, str) else names.get(pid, ""))
        out.append(
            _metadata("process_name", new, {"name": f"rank {rank}: {what}" if what else f"rank {rank}"})
        )
        out.append(_metadata("process_sort_index", new, {"sort_index": new}))
    for event in events:
        if event.get("pid") not in pids or event.get("name") in _PROCESS_METADATA:
            continue
        moved = {**event, "pid": pids[event["pid"]]}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift_us
        if isinstance(event.get("id"), int):  # arrows connect equal ids
            moved["id"] = event["id"] * ranks + index
        out.append(moved)
    return out


def _process_names(events: Sequence[Mapping[str, Any]]) -> tuple[dict[Any, str], dict[Any, str]]:
    names, labels = {}, {}
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            names[event["pid"]] = str(event["args"]["name"])
        if event.get("ph") == "M" and event["name"] == "process_labels":
            labels[event["pid"]] = str(event["args"]["labels"])
    return names, labels


def _metadata(name: str, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}


def profile_of(trace: Mapping[str, Any], rank: int) -> RankProfile:
    """What one rank did, from its Chrome trace: GPU activities; on a CPU without GPU its products and transfers.

    Counts from "step 0" on, on the GPU from the end of the pause before it (:func:`.capture.hold`) if there is one.
    """
    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = [e for e in spans if e.get("cat") == "user_annotation" and _STEP.fullmatch(e["name"])]
    begin = min((e["ts"] for e in steps), default=float("-inf"))
    kernels = [e for e in spans if e.get("cat") == "kernel"]
    spans = [e for e in spans if e["ts"] >= begin]
    held_until = _pause_end(kernels, spans)
    gpu_begin = begin if held_until is None else max(begin, held_until)
    gpu = [e for e in spans if e.get("cat") in _GPU_CATEGORIES and e["ts"] >= gpu_begin]
    return RankProfile(
        rank=rank,
        events=[_gpu_event(e) for e in gpu]
        if gpu
        else _cpu_events(spans, _thread_names(trace["traceEvents"])),
        ranges=_ranges(spans, gpu),
        steps=max(1, len({e["name"] for e in steps})),
        clock_ns=int(trace.get("baseTimeNanoseconds", 0)),
        begin=None if held_until is None else gpu_begin,
    )


def _pause_end(kernels: Sequence[Mapping[str, Any]], of_steps: Sequence[Mapping[str, Any]]) -> float | None:
    """End of the last pause that was launched before the steps; None: there is none."""
    inside = {_correlation(e) for e in of_steps if e.get("cat") in _LAUNCH_CATEGORIES} - {None}
    ends = [
        e["ts"] + e["dur"] for e in kernels if classify.is_pause(e["name"]) and _correlation(e) not in inside
    ]
    return max(ends, default=None)


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _gpu_event(event: Mapping[str, Any]) -> Event:
    name, args = event["name"], event.get("args", {})
    category = classify.kernel(name) if event["cat"] == "kernel" else classify.memcpy(name)
    stream = f"stream {args.get('stream', event['tid'])}"
    return Event(name, event["ts"], event["ts"] + event["dur"], category, stream)


def _cpu_events(spans: Sequence[Mapping[str, Any]], threads: Mapping[Any, str]) -> list[Event]:
    """Products, copies and transfers. A copy inside a transfer is a part of it."""
    out = []
    transfers: dict[Any, list[intervals.Interval]] = {}
    for e in spans:
        if classify.cpu_activity(e["name"]) == "communication":
            transfers.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for e in spans:
        category = classify.cpu_activity(e["name"])
        if category is None:
            continue
        if category != "communication" and any(b <= e["ts"] < end for b, end in transfers.get(e["tid"], [])):
            continue
        thread = threads.get(e["tid"], f"thread {e['tid']}")
        out.append(Event(e["name"], e["ts"], e["ts"] + e["dur"], category, thread))
    return out


def _thread_names(events: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    return {
        e["tid"]: str(e["args"]["name"]) for e in events if e.get("ph") == "M" and e["name"] == "thread_name"
    }


def _ranges(spans: Sequence[Mapping[str, Any]], gpu: Sequence[Mapping[str, Any]]) -> list[RangeTotal]:
    activities: dict[Hashable, list[intervals.Interval]] = {}
    for e in gpu:
        activities.setdefault(_correlation(e), []).append((e["ts"], e["ts"] + e["dur"]))
    launches = [
        Launch(e["ts"], e["tid"], _correlation(e)) for e in spans if e.get("cat") in _LAUNCH_CATEGORIES
    ]
    marked = [
        Range(e["name"], e["ts"], e["ts"] + e["dur"], e["tid"])
        for e in spans
        if e.get("cat") == "user_annotation" and not _FOREIGN_RANGE.match(e["name"])
    ]
    return totals(marked, launches, activities if gpu else None)
