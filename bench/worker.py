"""One rank: sets up its device and the group, runs a job, reports. Started by :mod:`.ranks`, or by torchrun."""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import environment, nvml, records, suites
from .errors import BenchError
from .plan import Job
from .ranks import EVENTS, FOLLOWED, JOB, end_with_parent
from .records import Row
from .suite import Options

__all__ = ["FileReport", "join", "leave", "main", "make_sampler", "settle_clocks"]

_LOST = 4  # exit code of a rank that cannot go on; its events or its log say why
_COLLECTIVE_HOURS = 2  # hangs are noticed by whoever watches the ranks


class FileReport:
    """Events as lines of a file that the supervisor reads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._number = 0

    def send(self, event: str, **fields: Any) -> None:
        """Append one event."""
        self._file.write(json.dumps({"event": event, **fields}).encode() + b"\n")

    def at(self, case: str, dtype: str, variant: str, phase: str, limit: float) -> None:
        """See :class:`.lockstep.Report`."""
        self._number += 1
        self.send(
            "at", number=self._number, case=case, dtype=dtype, variant=variant, phase=phase, limit=limit
        )

    def trouble(self, variant: str, reason: str) -> None:
        """See :class:`.lockstep.Report`."""
        self.send("trouble", variant=variant, reason=reason)

    def rows(self, case: str, dtype: str, rows: Sequence[Row]) -> None:
        """See :class:`.lockstep.Report`."""
        self.send("rows", case=case, dtype=dtype, rows=[records.encode(row) for row in rows])


def join(options: Options, rank: int, local_rank: int) -> Any:
    """Set up this rank's device and join the group; returns its :class:`.context.Context`.

    Raises:
        BenchError: there is no such GPU.
    """
    import torch
    import torch.distributed as dist

    from .context import Context

    device = torch.device("cpu")
    if options.device == "cuda":
        if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
            raise BenchError(
                f"gpus: rank {rank} needs GPU {local_rank}, torch {torch.__version__} (CUDA {torch.version.cuda}) "
                f"sees {torch.cuda.device_count()}; use --device cpu, or a torch that fits the driver."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # Not the default stream: graphs cannot be captured there, and everything stays on one stream.
        torch.cuda.set_stream(torch.cuda.Stream(device))
    if options.world == 1:
        return Context(options, rank, 1, device)
    timeout = datetime.timedelta(hours=_COLLECTIVE_HOURS)
    if options.device == "cuda":
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    control: Any = dist.new_group(backend="gloo", timeout=timeout)
    return Context(options, rank, options.world, device, dist.distributed_c10d._get_default_group(), control)


def leave() -> None:
    """Leave the group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()


def settle_clocks(context: Any) -> None:
    """Multiply matrices until two windows in a row agree within 1 %, for 1.5 to 3 seconds."""
    import torch

    if not context.cuda:
        return
    a, b = (context.uniform(8192, 8192, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    start, last = time.monotonic(), 0.0
    while (elapsed := time.monotonic() - start) < 3.0:
        begin = time.monotonic()
        for _ in range(200):
            torch.mm(a, b, out=out)
        context.synchronize()
        window = time.monotonic() - begin
        if elapsed > 1.5 and abs(window / last - 1) < 0.01:
            break
        last = window
    del a, b, out
    torch.cuda.empty_cache()


def make_sampler(context: Any) -> nvml.Sampler:
    """Of this rank's GPU."""
    gpus = nvml.visible() if context.cuda else []
    index = context.device.index or 0
    return nvml.Sampler(gpus[index] if index < len(gpus) else None)


def run(job: Job, report: FileReport, rank: int, local_rank: int) -> None:
    """All that a rank of a job does."""
    from . import engine

    suite = suites.load(job.suite)
    context = join(job.options, rank, local_rank)
    env = environment.collect(job.options.device, job.options.world, job.settings.commit) if rank == 0 else {}
    settle_clocks(context)
    report.send("ready", env=env)
    if job.profile is not None:
        from . import profile

        profile.run(suite, job, context, report)
        complete = True
    else:
        complete = engine.run_job(suite, job, context, report, make_sampler(context))
    report.send("done", complete=complete)


def main() -> int:
    """Entry of a rank that :mod:`.ranks` started."""
    end_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    report = FileReport(Path(os.environ[EVENTS]))
    job = Job.from_json(json.loads(Path(os.environ[JOB]).read_text()))
    try:
        run(job, report, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    except BenchError as error:
        report.send("fatal", sentence=str(error))
        return _LOST
    except BaseException as error:
        from .context import RanksLost
        from .lockstep import DeviceLost

        if not isinstance(error, (DeviceLost, RanksLost)):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(
            FOLLOWED if isinstance(error, RanksLost) else _LOST
        )  # what a broken context does at exit is anyone's guess
    leave()
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
