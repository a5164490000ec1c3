"""What the worker of a rank does under a profiler: warm up, line up with the other ranks, run marked steps.

Under a profiler the host often needs longer to enqueue a step than the GPU to run it. Ranks would then wait for
each other's hosts, and that would look like communication. So the GPU pauses until the steps are enqueued
(:func:`hold`); the parsers count from the end of the pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["PAUSE_LIMIT_US", "align", "bracket", "hold", "pause_cycles", "synchronize"]

PAUSE_LIMIT_US = 50_000.0
_PAUSE_MARGIN = 1.5  # of the time that the host needs
_PAUSE_BASE_US = 500.0  # to enqueue the all-reduce, and for what the host does around the steps
_CYCLES_PER_US = 2000.0  # a clock of about 2 GHz; a slower one makes the pause longer
_MARK_CYCLES = 20_000


def bracket(run: Callable[[], None], steps: int, *, group: Any = None, pause: bool = True) -> None:
    """Run ``steps`` steps between cudaProfilerStart and cudaProfilerStop, after one step to warm up.

    nsys and ncu, which started this process, record only that part. Each step is in an NVTX range "step i"; they
    are not synchronised, so that the GPU has work queued as in a benchmark, and with ``pause`` all of them are
    queued behind :func:`hold`, which takes one more step. Without CUDA the steps just run. ``group``: the ranks
    that take part, as in :func:`align`.
    """
    import torch

    from tpkernels.ops import _nvtx

    cuda = torch.cuda.is_available()
    run()
    align(group)
    if cuda:
        torch.cuda.profiler.start()
    align(group)  # starting the profiler takes a while, and not the same on every rank
    try:
        with _nvtx.enable():
            if pause:
                hold(run, steps, group)
            for step in range(steps):
                with _nvtx.phase(f"step {step}"):
                    run()
            synchronize()
    finally:
        if cuda:
            torch.cuda.profiler.stop()


def hold(run: Callable[[], None], steps: int, group: Any = None) -> None:
    """Make the GPUs of all ranks pause until their hosts have enqueued ``steps`` steps; without CUDA nothing.

    Runs one step in a range "warm-up", under the profiler as those that follow, to see how long the host needs.
    The pause is as many cycles on every rank, but not as long, as clocks differ. An all-reduce after it brings
    the GPUs to the same point in time, and a short pause marks that point in the recording.
    """
    import torch
    import torch.distributed as dist

    from tpkernels.ops import _nvtx

    if not torch.cuda.is_available():
        return
    start = time.perf_counter()
    with _nvtx.phase("warm-up"):
        run()
    host_us = (time.perf_counter() - start) * 1e6
    cycles = torch.tensor([pause_cycles(host_us, steps)], device="cuda")
    several = _several(group)
    if several:
        dist.all_reduce(cycles, dist.ReduceOp.MAX, group)
    slowest = int(cycles.item())
    align(group)
    torch.cuda._sleep(slowest)
    if several:
        dist.all_reduce(cycles, dist.ReduceOp.MAX, group)
        torch.cuda._sleep(_MARK_CYCLES)


def pause_cycles(host_us: float, steps: int) -> int:
    """Cycles to pause for ``steps`` steps of which the host enqueues one in ``host_us``: with a margin, limited."""
    wanted = _PAUSE_MARGIN * host_us * steps + _PAUSE_BASE_US
    return int(min(wanted, PAUSE_LIMIT_US) * _CYCLES_PER_US)


def synchronize() -> None:
    """Wait for this rank's GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def align(group: Any = None) -> None:
    """Wait for this rank's GPU and for the other ranks of a process group (None: the default group, if any)."""
    import torch.distributed as dist

    synchronize()
    if _several(group):
        dist.barrier(group)
        synchronize()


def _several(group: Any) -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
