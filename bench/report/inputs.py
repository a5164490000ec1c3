"""What the files on the command line are: result files and trace summaries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import BenchError
from ..records import Results, load
from .timeline import TraceSummary, parse_trace

__all__ = ["read_inputs"]


def read_inputs(paths: Sequence[Path]) -> tuple[Results, list[TraceSummary]]:
    """Results of all result files together, and the trace summaries, each in the order given.

    Raises:
        BenchError: a file that cannot be read, is empty, or is neither.
    """
    result_files, traces = [], []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise BenchError(f"{path}: cannot be read ({error.strerror}).") from None
        if not text.strip():
            raise BenchError(f"{path}: is empty; expected a result file (JSONL) or a trace summary (JSON).")
        kind, data = _kind(text)
        if kind == "trace_summary" and data is not None:
            traces.append(parse_trace(data, path))
        elif kind in ("header", "row", "footer"):
            result_files.append(path)
        else:
            raise BenchError(
                f"{path}: expected a result file (JSONL that begins with a header) or a trace summary, "
                f"got {_what(text, kind, data)}."
            )
    return load(*result_files) if result_files else Results(), traces


def _kind(text: str) -> tuple[object, dict[str, object] | None]:
    """The field ``kind`` of the whole file, or of its first line."""
    for candidate in (text, text.lstrip().split("\n", 1)[0]):
        try:
            data = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(data, dict):
            return data.get("kind"), data
        return None, None
    return None, None


def _what(text: str, kind: object, data: dict[str, object] | None) -> str:
    if data is not None and "traceEvents" in data:
        return "a Chrome trace (its trace_summary.json is what the report draws)"
    if kind is not None:
        return f"kind {kind!r}"
    return f"something that begins with {text.strip()[:40]!r}"
