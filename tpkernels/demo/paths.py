"""Which path each operation took, from the package's own records."""

from __future__ import annotations

from tpkernels import PathLog

from .ui import PathRow

__all__ = ["path_rows"]


def path_rows(forward: PathLog, backward: PathLog) -> list[PathRow]:
    """One row per (pass, operation, path), forward first, both in alphabetical order."""
    logs = (("forward", forward), ("backward", backward))
    return [
        PathRow(phase, op, path, n) for phase, log in logs for (op, path), n in sorted(log.counts.items())
    ]
