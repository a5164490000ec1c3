"""Errors that a user of the command line sees: a sentence, no traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BenchError", "Terminated", "check_known"]


class BenchError(Exception):
    """What was expected, what came, what to do."""


class Terminated(KeyboardInterrupt):
    """SIGTERM; plain KeyboardInterrupt is Ctrl-C."""


def check_known(what: str, value: str, known: Iterable[str], *, hint: str = "") -> None:
    """Raises BenchError unless ``value`` is one of ``known``; the sentence lists them and the nearest one."""
    names = list(known)
    if value in names:
        return
    near = difflib.get_close_matches(value, names, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise BenchError(f"{what}: {value!r} is not known; expected one of {', '.join(names)}.{meant}{hint}")
