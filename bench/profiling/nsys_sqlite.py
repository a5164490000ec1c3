"""Reads the SQLite export of an Nsight Systems report.

Tables appear only if there is something in them, and their columns differ between versions (``nsys export``
documents them as unstable), so nothing but start, end and a name is taken for granted.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BenchError
from . import classify, intervals
from .ranges import Launch, Range, RangeTotal, totals
from .summary import Event, RankProfile

__all__ = ["read"]

_PEER_COPY = 10  # of ENUM_CUDA_MEMCPY_OPER
_DEVICE_COPY = 8
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_RANGE_TYPES = {
    59,
    60,
    70,
    71,
}  # of ENUM_NSYS_EVENT_TYPE: push/pop and start/end, of the process and from NVTX text files
_STEP = re.compile(r"step \d+")
# A globalTid is the number of the process (as in globalPid) and, in the low 24 bits, that of the thread.
_PROCESS_BITS = ~0xFFFFFF

Row = dict[str, Any]


@dataclass(frozen=True)
class _Activity:
    event: Event
    key: tuple[
        int, int
    ]  # process (0: this version does not tell) and correlation of the call that launched it


def read(path: Path, rank: int) -> RankProfile:
    """What one rank did, from the export of its report.

    Counts from "step 0" on, on the GPU from the end of the pause before it (:func:`.capture.hold`) if there is one.

    Raises:
        BenchError: not a database, or none of Nsight Systems, or one without GPU activities.
    """
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return _read(database, path, rank)
    except sqlite3.DatabaseError as error:
        raise BenchError(f"{path}: expected the SQLite export of an nsys report ({error}).") from None


def _read(database: sqlite3.Connection, path: Path, rank: int) -> RankProfile:
    tables = {
        name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
    }
    if "StringIds" not in tables:
        raise BenchError(
            f"{path}: expected the SQLite export of an nsys report, found no table StringIds in it."
        )
    strings = dict(database.execute("SELECT id, value FROM StringIds"))

    def rows(table: str) -> list[Row]:
        if table not in tables:
            return []
        cursor = database.execute(f'SELECT * FROM "{table}"')
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    ranges = _ranges(rows("NVTX_EVENTS"), strings)
    steps = [r for r in ranges if _STEP.fullmatch(r.name)]
    begin = min((r.start for r in steps), default=0)
    ranges = [r for r in ranges if r.start >= begin]
    activities = _activities(rows, strings)
    launches = _launches(rows("CUPTI_ACTIVITY_KIND_RUNTIME"), activities)
    held_until = _pause_end(activities, [call for call in launches if call.start >= begin])
    gpu_begin = begin if held_until is None else max(begin, held_until)
    activities = [a for a in activities if a.event.start >= gpu_begin]
    if not activities:
        raise BenchError(
            f"{path}: expected kernels or copies in it, found none; the profiled steps launched nothing on "
            "a GPU, or nsys could not trace CUDA (its messages are in the rank's output)."
        )
    return RankProfile(
        rank=rank,
        events=[a.event for a in activities],
        ranges=_totals(ranges, activities, launches),
        steps=max(1, len({r.name for r in steps})),
        clock_ns=_session_start(rows("TARGET_INFO_SESSION_START_TIME")),
        begin=None if held_until is None else gpu_begin,
    )


def _pause_end(activities: Sequence[_Activity], of_steps: Sequence[Launch]) -> float | None:
    """End of the last pause that was launched before the steps; None: there is none."""
    inside = {call.key for call in of_steps}
    ends = [a.event.end for a in activities if classify.is_pause(a.event.name) and a.key not in inside]
    return max(ends, default=None)


def _session_start(rows: Sequence[Row]) -> int:
    """System clock at time 0 of the report: what makes reports of several ranks comparable."""
    return int(rows[0].get("utcEpochNs") or 0) if rows else 0


def _activities(rows: Any, strings: dict[int, str]) -> list[_Activity]:
    out = []
    for row in rows("CUPTI_ACTIVITY_KIND_KERNEL"):
        name = _kernel_name(row, strings)
        out.append(_activity(row, name, classify.kernel(name)))
    for row in rows("CUPTI_ACTIVITY_KIND_MEMCPY"):
        kind = row.get("copyKind")
        between = kind == _PEER_COPY or (kind == _DEVICE_COPY and _devices_differ(row))
        name = f"Memcpy {'PtoP' if between else _COPY_KINDS.get(kind, '')}".strip()
        out.append(_activity(row, name, classify.memcpy(name, between_devices=between)))
    for row in rows("CUPTI_ACTIVITY_KIND_MEMSET"):
        out.append(_activity(row, "Memset", classify.memcpy("Memset")))
    for row in rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):  # only without --cuda-graph-trace=node
        out.append(_activity(row, "CUDA graph", "other"))
    return out


def _kernel_name(row: Row, strings: dict[int, str]) -> str:
    for column in ("demangledName", "shortName", "mangledName", "name"):
        value = row.get(column)
        if value is not None:
            return strings.get(value, str(value)) if isinstance(value, int) else str(value)
    return "kernel"


def _devices_differ(row: Row) -> bool:
    source, target = row.get("srcDeviceId"), row.get("dstDeviceId")
    return source is not None and target is not None and source != target


def _activity(row: Row, name: str, category: classify.Category) -> _Activity:
    stream = f"stream {row.get('streamId', '?')}"
    event = Event(name, row["start"] / 1000, row["end"] / 1000, category, stream)
    return _Activity(event, ((row.get("globalPid") or 0) & _PROCESS_BITS, row.get("correlationId") or 0))


def _ranges(rows: Sequence[Row], strings: dict[int, str]) -> list[Range]:
    out = []
    for row in rows:
        if row.get("end") is None or row.get("eventType", 59) not in _RANGE_TYPES:
            continue
        name = row.get("text")
        if name is None:
            name = strings.get(row.get("textId") or -1, "")
        out.append(Range(name, row["start"] / 1000, row["end"] / 1000, row.get("globalTid") or 0))
    return out


def _launches(calls: Sequence[Row], activities: Sequence[_Activity]) -> list[Launch]:
    has_process = any(a.key[0] for a in activities)
    launches = []
    for call in calls:
        thread = call.get("globalTid") or 0
        key = (thread & _PROCESS_BITS if has_process else 0, call.get("correlationId") or 0)
        launches.append(Launch(call["start"] / 1000, thread, key))
    return launches


def _totals(
    ranges: Sequence[Range], activities: Sequence[_Activity], launches: Sequence[Launch]
) -> list[RangeTotal]:
    busy: dict[Hashable, list[intervals.Interval]] = {}
    for a in activities:
        busy.setdefault(a.key, []).append((a.event.start, a.event.end))
    return totals(ranges, launches, busy)
