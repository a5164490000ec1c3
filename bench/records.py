"""The result file: JSONL, one object a line, of three kinds.

``header``
    begins a run: schema version, run id, suite, command line, environment (:mod:`.environment`).
``row``
    one measurement: one variant (an implementation) of one case (an operation at one shape).
``footer``
    ends a run: whether it is complete; clocks and power afterwards. A run that was killed has none.

A file may hold several runs, one after the other: other suites, or the same one resumed. Lines are appended and
flushed as soon as they are known, so an interrupted run leaves a valid file; a last line that was cut off is dropped
on reading.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import BenchError

__all__ = [
    "SCHEMA",
    "STATUSES",
    "Footer",
    "Header",
    "Results",
    "Role",
    "Row",
    "Stats",
    "Status",
    "append",
    "card",
    "decode",
    "encode",
    "geomean",
    "load",
]

SCHEMA = 1

Status = Literal["ok", "failed", "skipped", "timeout", "crashed", "error"]
STATUSES: tuple[Status, ...] = ("ok", "failed", "skipped", "timeout", "crashed", "error")
# ours: a path of tpkernels. peer: another implementation of the same operation. part: a piece of it alone (the
# GEMM, the communication). ceiling: what overlap can reach (pieces side by side without dependency).
# noise: a variant measured a second time.
Role = Literal["ours", "peer", "part", "ceiling", "noise"]


@dataclass(frozen=True)
class Stats:
    """Times in microseconds over ``n`` samples; with several ranks every sample is that of the slowest rank."""

    p20: float
    p50: float
    p80: float
    min: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Stats:
        """Quantiles of at least one sample (linear between neighbours)."""
        if len(samples) == 0:
            raise ValueError("samples: expected at least one, got none.")
        if len(samples) == 1:
            only = float(samples[0])
            return cls(only, only, only, only, 1)
        q = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(q[1], statistics.median(samples), q[7], min(samples), len(samples))

    @property
    def spread(self) -> float:
        """(p80 - p20) / p50."""
        return (self.p80 - self.p20) / self.p50 if self.p50 > 0 else 0.0


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        suite: "link", "gemm", "sweep", "quantize", "overlap", "layer" or "train".
        case: name of the case, unique within the suite for given dtype and world: "AG gpt3 M8192".
        op: what is computed or moved: "matmul", "all_gather_matmul", "push", ...
        variant: the implementation: "nccl+cublas", "streamk", "symm_mem", ...
        role: see :data:`Role`.
        status: "ok"; "failed" (wrong result); "skipped" (does not apply, or does not fit: see ``reason``); "timeout",
            "crashed", "error" (see ``reason``).
        shape_set: name of the set that the shape belongs to.
        dtype: "bfloat16", ...
        world: number of ranks.
        params: sizes: m, n, k (of the operation as defined in :mod:`.shapes`), bytes, sms, ...
        us: device time of one call, from CUDA graphs; where ``extra["timed"]`` is "queued" or "steady" it cannot be
            captured, and calls were enqueued one by one (on CPU: wall time).
        host_us: time of one call launched from the host to an idle GPU.
        error, tolerance: largest relative error against float64, and what is allowed.
        flops, bytes: of one call on one rank (0: not meaningful); ``tflops`` and ``gbps`` derive from them and ``us``.
        peak_bytes: device memory at the peak of one call, beyond the inputs, as torch's allocator counts it; 0: not
            measured. ``extra["outside_bytes"]`` is what preparation took beside it: symmetric memory, libraries.
        partner: for role "noise" the variant that was measured again.
        extra: anything else of that suite: plan, baseline measured in the same process, tokens/s.
    """

    suite: str
    case: str
    op: str
    variant: str
    role: Role
    status: Status = "ok"
    reason: str = ""
    shape_set: str = ""
    dtype: str = ""
    world: int = 1
    params: dict[str, Any] = field(default_factory=dict)
    us: Stats | None = None
    host_us: Stats | None = None
    error: float | None = None
    tolerance: float | None = None
    flops: float = 0.0
    bytes: float = 0.0
    peak_bytes: int = 0
    partner: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    run: str = ""

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What makes a measurement the same as one of another run: (suite, case, dtype, world, variant)."""
        return (self.suite, self.case, self.dtype, self.world, self.variant)

    @property
    def best(self) -> Stats | None:
        """``us``, or ``host_us`` where there is no graph time."""
        return self.us or self.host_us

    @property
    def tflops(self) -> float | None:
        """10^12 floating-point operations a second, of one rank."""
        return self.flops / self.best.p50 * 1e-6 if self.best and self.flops and self.best.p50 > 0 else None

    @property
    def gbps(self) -> float | None:
        """10^9 bytes a second, of one rank."""
        return self.bytes / self.best.p50 * 1e-3 if self.best and self.bytes and self.best.p50 > 0 else None


@dataclass(frozen=True)
class Header:
    """The beginning of a run. ``env``: see :func:`bench.environment.collect`."""

    run: str
    suite: str
    started: str
    command: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True)
class Footer:
    """The end of a run.

    Attributes:
        seconds: how long it took.
        after: "gpus": clocks, power and temperature then (:func:`bench.environment.gpu_state`).
        complete: False if it was interrupted or ran out of ``--budget``; ``--resume`` measures the rest.
    """

    run: str
    finished: str
    seconds: float
    after: dict[str, Any] = field(default_factory=dict)
    complete: bool = True


_KINDS: dict[str, type[Header | Row | Footer]] = {"header": Header, "row": Row, "footer": Footer}


@dataclass
class Results:
    """Everything in one or several files."""

    headers: list[Header] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    footers: list[Footer] = field(default_factory=list)

    def add(self, record: Header | Row | Footer) -> None:
        """Append to the list of its kind."""
        if isinstance(record, Header):
            self.headers.append(record)
        elif isinstance(record, Row):
            self.rows.append(record)
        else:
            self.footers.append(record)

    def header_of(self, row: Row) -> Header | None:
        """The header of the run that the row belongs to."""
        return next((h for h in self.headers if h.run == row.run), None)

    def card_of(self, run: str) -> str:
        """:func:`card` of the run of that id."""
        return next((card(h.env) for h in self.headers if h.run == run), "")

    def latest(self) -> list[Row]:
        """Rows in file order; of several with the same key the last (a resumed or repeated run replaces).

        Rows of different cards never replace each other.
        """
        cards = {h.run: card(h.env) for h in self.headers}
        return list({(cards.get(row.run, ""), *row.key): row for row in self.rows}.values())


def card(env: Mapping[str, Any]) -> str:
    """Name of the GPU in the environment of a run, of the processor where none was measured; "" if unknown."""
    return str(env.get("gpu") or env.get("cpu") or "")


def encode(record: Header | Row | Footer) -> dict[str, Any]:
    """As it stands in a line of the file, ready for json.dumps."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(record, cls))
    return {"kind": kind, **_finite(dataclasses.asdict(record))}


def append(path: Path, *records: Header | Row | Footer) -> None:
    """Append a line each, flushed to the disk; a last line that was cut off is removed first.

    Raises:
        BenchError: the file cannot be written.
    """
    lines = "".join(json.dumps(encode(record), allow_nan=False) + "\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            _drop_partial_line(file)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BenchError(
            f"{path}: cannot be written ({error.strerror}); name another file with --out."
        ) from None


def load(*paths: Path) -> Results:
    """Read result files; BenchError in a sentence for a missing file, another schema or a line that is none of ours."""
    results = Results()
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise BenchError(f"{path}: cannot be read ({error.strerror}).") from None
        known = len(results.headers)
        lines = text.split(b"\n")
        for number, line in enumerate(lines[:-1] if lines else [], start=1):
            if line.strip():
                results.add(_decode_line(line, f"{path}:{number}"))
        if len(results.headers) == known:
            raise BenchError(
                f"{path}: expected a result file of schema {SCHEMA}, found no header line in it."
            )
    return results


def _decode_line(line: bytes, where: str) -> Header | Row | Footer:
    try:
        data = json.loads(line)
    except ValueError:
        raise BenchError(
            f"{where}: expected a JSON object, got {line[:60].decode(errors='replace')!r}."
        ) from None
    return decode(data, where)


def decode(data: Any, where: str) -> Header | Row | Footer:
    """The inverse of :func:`encode`; BenchError, beginning with ``where``, for what is none of ours."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in _KINDS:
        raise BenchError(
            f"{where}: expected a header, row or footer of schema {SCHEMA}, got kind {kind!r}; is this a result file?"
        )
    if kind == "header" and data.get("schema") != SCHEMA:
        raise BenchError(
            f"{where}: written with schema {data.get('schema')!r}, this version reads schema {SCHEMA}; "
            "measure again, or use the version of tpkernels that wrote it."
        )
    fields = {name: value for name, value in data.items() if name != "kind"}
    try:
        if kind == "row":
            for name in ("us", "host_us"):
                fields[name] = Stats(**fields[name]) if fields.get(name) else None
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise BenchError(f"{where}: not a {kind} of schema {SCHEMA} ({error}).") from None


def _drop_partial_line(file: Any) -> None:
    """Cut the file back to its last line end."""
    size = file.seek(0, os.SEEK_END)
    position = size
    while position > 0:
        step = min(65536, position)
        file.seek(position - step)
        at = file.read(step).rfind(b"\n")
        if at >= 0:
            position = position - step + at + 1
            break
        position -= step
    if position < size:
        file.truncate(position)


def _finite(value: Any) -> Any:
    """JSON has no inf and no nan: an error of inf (an unwritten output) is stored as 1e308."""
    if isinstance(value, float) and not math.isfinite(value):
        return 1e308
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; nan for none."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
