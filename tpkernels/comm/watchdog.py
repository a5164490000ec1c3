"""A thread that tells of a stopped launch when it happens, whatever the host is busy with.

It reads the record of ``Runtime.fault``, which lies in host memory. It never calls CUDA, which may be lost, or busy.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable

from tpkernels.comm import faults, runtime

PERIOD_S = 0.5
_LONGEST_END_S = 1.0

_log = logging.getLogger("tpkernels")
_process = 0  # that has a watchdog: threads do not live on in a fork


def start() -> None:
    """Watch from now on, once in a process, unless ``TPK_WATCHDOG=0``. Behind a warm-up, which makes the record."""
    global _process
    if _process == os.getpid() or os.environ.get("TPK_WATCHDOG") == "0":
        return
    _process = os.getpid()
    end = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(runtime.active.fault, end), name="tpkernels watchdog", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # no more threads: then the next call tells, as without
        return
    atexit.register(_stop, _process, thread, end)


def _watch(look: Callable[[], str], end: threading.Event) -> None:
    """Until there is something to tell, once, or the process ends, with a last look: its error may come of that."""
    ending = False
    while not ending:
        ending = end.wait(PERIOD_S)
        sentence = look()
        if sentence:
            what = "A launch of process %d was stopped; its last call is %s. %s"
            _log.error(what, os.getpid(), faults.last_call(), sentence)
            return


def _stop(process: int, thread: threading.Thread, end: threading.Event) -> None:
    """Before the interpreter goes: a thread that came back to it then, out of C++, would end the process."""
    if process == os.getpid():
        end.set()
        thread.join(_LONGEST_END_S)
