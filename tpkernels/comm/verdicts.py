"""What rank 0 chose, call by call, for the other ranks of a host: they must take the same.

Path "auto" and the tuning of path "fused" have a ring each.

Ranks cannot always come to the same by themselves: columns of a weight, or rows of it, need not be divided evenly, and
whoever asked only when a shape is new to it would wait for ranks to which it is not. So rank 0 writes its choices into
memory of the host, and waits for nobody; the others wait until it has come to the same call. Nothing of it is on the
device, so it works in a capture too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

from tpkernels.comm import ranks
from tpkernels.errors import BackendError, CommTimeoutError, MismatchError
from tpkernels.ops._groups import Group

_SLOTS = 4096  # calls that rank 0 may be ahead of the slowest rank
_WORD = 8
_SPINS = 200  # looks without giving the processor away
MOST = (1 << 20) - 1  # the largest choice


class Verdicts:
    """A ring of words, one for each call: its number, the operation, the choice. Collective.

    ``what``: whose it is, for errors.

    Raises:
        BackendError: the ranks have no memory in common, on all of them alike.
    """

    def __init__(self, group: Group, what: str = "path 'auto'") -> None:
        self._group, self._what = group, what
        self._calls = 0
        size = (_SLOTS + group.world) * _WORD
        path, error = "", ""
        if group.rank == 0:
            try:
                path = _make_file(size)
            except OSError as failure:
                error = str(failure)
        path = ranks.exchange(group, path)[0]
        try:
            with open(path, "r+b") as file:
                self._words = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")
        except (OSError, ValueError) as failure:
            error = error or str(failure)
        failed = [f"rank {r}: {text}" for r, text in enumerate(ranks.exchange(group, error)) if text]
        if group.rank == 0:
            with suppress(OSError):
                os.unlink(path)  # it lives as long as it is mapped
        if failed:
            raise BackendError(f"its ranks have no host memory in common ({'; '.join(failed)})")

    def agree(self, fused: bool, op: int, timeout_s: float) -> bool:
        """:meth:`agree_on` two choices."""
        return bool(self.agree_on(int(fused), op, timeout_s))

    def agree_on(self, choice: int, op: int, timeout_s: float) -> int:
        """Rank 0's choice for this call; ``choice`` is this rank's (0 to MOST), ``op`` numbers the operation (0 to 3).

        Raises:
            CommTimeoutError: rank 0, or the slowest rank, did not come.
            MismatchError: rank 0 calls another operation.
        """
        self._calls += 1
        words, group, slot = self._words, self._group, self._calls % _SLOTS
        if group.rank == 0:
            others = range(_SLOTS + 1, _SLOTS + group.world)
            self._wait(
                lambda: all(words[i] + _SLOTS > self._calls for i in others), "another rank", timeout_s
            )
            words[slot] = self._calls << 22 | op << 20 | choice  # one store of 8 bytes
            return choice
        self._wait(lambda: words[slot] >> 22 == self._calls, "rank 0", timeout_s)
        word = words[slot]
        words[_SLOTS + group.rank] = self._calls
        if word >> 20 & 3 != op:
            raise MismatchError(
                f"{self._what} in group {group.name!r}: rank {group.rank} calls another operation than rank 0; all "
                "ranks make the same calls in the same order. TPK_CHECK=1 tells which."
            )
        return int(word & MOST)

    def _wait(self, there: Callable[[], bool], who: str, timeout_s: float) -> None:
        for _ in range(_SPINS):
            if there():
                return
        end = time.monotonic() + timeout_s
        while not there():
            time.sleep(0)
            if time.monotonic() > end:
                raise CommTimeoutError(
                    f"{self._what} in group {self._group.name!r}: {who} did not come to the {self._calls}. call that "
                    f"chooses within {timeout_s:g} s; all ranks make the same calls in the same order, with "
                    "the same path argument. TPK_CHECK=1 tells what differs."
                )


def _make_file(size: int) -> str:
    """A file of zeros in memory, where there is such a folder."""
    folder = "/dev/shm"
    descriptor, path = tempfile.mkstemp(prefix="tpkernels-", dir=folder if os.path.isdir(folder) else None)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    return path
