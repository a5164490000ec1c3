"""A store for torch's rendezvous of symmetric memory in groups that overlap.

torch names what ranks tell each other ".../COUNT/RANK", where COUNT grows with everything that the process has ever
told, in any group. Ranks that were in different groups before, say two of four, count differently and would wait for
each other until their time is up.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

_KEY = re.compile(r"(.*)/(\d+)/(\d+)")


class Renumbered(Store):
    """``store``, in which counts begin with 0 for this object; for one rendezvous."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._store.set(self._of(key), value)

    def get(self, key: str) -> bytes:
        """Read a value; waits until it is there."""
        value: bytes = self._store.get(self._of(key))
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._store.wait([self._of(key) for key in keys], *([] if timeout is None else [timeout]))

    def _of(self, key: str) -> str:
        match = _KEY.fullmatch(key)
        if match is None:
            return key
        name, count, rank = match.groups()
        return f"{name}/{int(count) - self._first.setdefault(name, int(count))}/{rank}"
