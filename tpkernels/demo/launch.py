"""Starts the ranks of a run: one process each, through torch.distributed.run, in this machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import EXIT_ERROR

__all__ = ["CRASH_EXIT", "available_cores", "launch", "under_torchrun"]

_MAX_THREADS = 8
# Exit code of a rank that printed a traceback; a rank that printed a sentence exits with EXIT_ERROR.
CRASH_EXIT = 3


def under_torchrun() -> bool:
    """True in a process that torchrun (or another launcher that sets its variables) started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def available_cores() -> int:
    """Cores this process may use: its affinity mask, cut by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no cgroup v2, or "max": no quota
    return max(1, cores)


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Runs ``python -m tpkernels.demo *arguments`` on ``ranks`` processes; returns the exit code, 0 or 1.

    The first rank that fails ends the others. The launcher runs inside this process, which saves importing torch twice.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # More threads than this cost these small products more than they bring, and more than there are cores far more.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(_MAX_THREADS, available_cores() // ranks))))
    # What went wrong is printed by the rank itself and by us, in sentences.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "tpkernels.demo", *arguments]))
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        _explain(rank, failure.exitcode)
        return EXIT_ERROR
    except (SignalException, KeyboardInterrupt):
        print("stopped: all ranks were ended.", file=sys.stderr)
        return EXIT_ERROR
    return 0


def _explain(rank: int, code: int) -> None:
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (often: out of memory; try a smaller --size or --batch)" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was ended by {name}{hint}; the other ranks were stopped.", file=sys.stderr)
    elif code == CRASH_EXIT:
        print(
            f"error: rank {rank} failed, see its traceback above; the other ranks were stopped.",
            file=sys.stderr,
        )
