"""Processes of one job: started, listened to, ended. Knows nothing of suites.

Each rank appends its events, one JSON object a line, to a file of its own: nothing is lost when it dies, and profilers
that start the process in between do not matter. What a rank prints goes to its log.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EVENTS", "FOLLOWED", "JOB", "Ranks", "end_with_parent"]

JOB = "TPK_BENCH_JOB"  # path of the job, JSON
FOLLOWED = 5  # exit code of a rank that ended because another one was gone
EVENTS = "TPK_BENCH_EVENTS"  # path of this rank's events
_PARENT = "TPK_BENCH_PARENT"  # process that the ranks must not outlive
_TERMINATE_SECONDS = 2.0
_DUMP_SECONDS = 0.5  # for the stacks


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    events: Path
    log: Path
    position: int = 0


class Ranks:
    """The processes of one job."""

    def __init__(
        self,
        job: Mapping[str, Any],
        world: int,
        folder: Path,
        environment: Mapping[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        command = [*prefix, sys.executable, "-m", f"{__package__}.worker"]
        shared = {**os.environ, **environment, **_rendezvous(world), JOB: str(path)}
        if not prefix:  # a profiler stands between otherwise
            shared[_PARENT] = str(os.getpid())
        shared["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)  # imports find the same as here
        self._ranks: list[_Rank] = []
        for i in range(world):
            events, log = folder / f"events{i}.jsonl", folder / f"rank{i}.log"
            events.write_bytes(b"")
            own = {"RANK": str(i), "LOCAL_RANK": str(i), EVENTS: str(events)}
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env={**shared, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches us alone, and we end the group
                )
            self._ranks.append(_Rank(process, events, log))

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Events since the last call, with their rank."""
        for i, rank in enumerate(self._ranks):
            with rank.events.open("rb") as file:
                file.seek(rank.position)
                text = file.read()
            whole = text.rfind(b"\n") + 1  # the rest of a line may come later
            rank.position += whole
            for line in text[:whole].splitlines():
                yield i, json.loads(line)

    def exit_codes(self) -> list[int | None]:
        """By rank; None while it runs, negative for a signal."""
        return [rank.process.poll() for rank in self._ranks]

    def log_tail(self, rank: int, lines: int = 12) -> str:
        """What the rank printed last."""
        text = self._ranks[rank].log.read_bytes()[-20_000:].decode(errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def where(self) -> dict[int, str]:
        """File, line and function that each running rank is in, as far as they tell."""
        self._signal(signal.SIGUSR1)  # each prints its stack into its log
        time.sleep(_DUMP_SECONDS)
        found = {}
        for i, rank in enumerate(self._ranks):
            log = rank.log.read_text(errors="replace")
            frames = re.findall(r"most recent call first\):\n\s+File \"([^\"]+)\", line (\d+) in (\S+)", log)
            if frames:
                path, line, function = frames[-1]
                found[i] = f"{Path(path).name}:{line} {function}"
        return found

    def keep_logs(self, folder: Path, name: str) -> Path:
        """Copy what the ranks printed to files in ``folder``; returns a pattern for their names."""
        folder.mkdir(parents=True, exist_ok=True)
        for i, rank in enumerate(self._ranks):
            shutil.copyfile(rank.log, folder / f"{name}-rank{i}.log")
        return folder / f"{name}-rank*.log"

    def wait(self, seconds: float) -> bool:
        """Whether all ended of themselves within that time."""
        deadline = time.monotonic() + seconds
        while any(code is None for code in self.exit_codes()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> None:
        """End all of them and everything that they started."""
        if any(code is None for code in self.exit_codes()):
            self._signal(signal.SIGTERM)
            self.wait(_TERMINATE_SECONDS)
        self._signal(signal.SIGKILL, ended_too=True)
        for rank in self._ranks:
            rank.process.wait()

    def _signal(self, number: signal.Signals, *, ended_too: bool = False) -> None:
        for rank in self._ranks:
            if ended_too or rank.process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, number)


def end_with_parent() -> None:
    """Called in a rank: the kernel ends it when its parent is gone, even killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.environ.get(_PARENT, str(os.getppid())) != str(os.getppid()):
        os._exit(FOLLOWED)  # it was gone before


def _rendezvous(world: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
