"""What the worker of a rank does under a profiler: warm up, line up with the other ranks, run marked steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["align", "bracket", "synchronize"]


def bracket(run: Callable[[], None], steps: int, *, group: Any = None) -> None:
    """Run ``steps`` steps between cudaProfilerStart and cudaProfilerStop, after one step to warm up.

    nsys and ncu, which started this process, record only that part. Each step is in an NVTX range "step i"; they
    are not synchronised, so that the GPU has work queued as in a benchmark. Without CUDA the steps just run.
    ``group``: the ranks that take part, as in :func:`align`.
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
            for step in range(steps):
                with _nvtx.phase(f"step {step}"):
                    run()
            synchronize()
    finally:
        if cuda:
            torch.cuda.profiler.stop()


def synchronize() -> None:
    """Wait for this rank's GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def align(group: Any = None) -> None:
    """Wait for this rank's GPU and for the other ranks of a process group (None: the default group, if any)."""
    import torch.distributed as dist

    synchronize()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.barrier(group)
        synchronize()
