"""What path "fused" needs of CUDA, in one place: tests without a GPU put another object in ``active``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels import _extensions
from tpkernels.comm import conditions, streams, symmetric
from tpkernels.ops._groups import Group

_AHEAD_CYCLES = 10_000_000  # about 5 ms, in which the host enqueues what is timed


class Runtime:
    """CUDA and the ops of ``_C_sm90a``."""

    device_types: tuple[str, ...] = ("cuda",)
    compared_with: tuple[str, ...] = ("nccl",)  # transports that path choice has times of

    def facts(self, device: torch.device) -> conditions.RankFacts:
        """What this rank tells the others about itself."""
        if not torch.cuda.is_available():
            return conditions.RankFacts(_host(), "none", {}, "it has no CUDA device")
        capability = torch.cuda.get_device_capability(device)
        missing = conditions.machine_missing(capability, _extensions.why_not("_C_sm90a"), os.environ)
        mine = torch.device(device).index
        reaches = {
            _uuid(i): torch.cuda.can_device_access_peer(mine, i)
            for i in range(torch.cuda.device_count())
            if i != mine
        }
        shares = conditions.may_share(os.environ)
        return conditions.RankFacts(_host(), _uuid(mine), reaches, missing or "", shares)

    def card(self, device: torch.device) -> str:
        """Name of the GPU, of which constants of path choice are kept."""
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""

    def alone(self, group: Group) -> bool:
        """Whether the job has no ranks but those of the group."""
        return not dist.is_initialized() or dist.get_world_size() == group.world

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make the device the current one."""
        return torch.cuda.device(device)

    def multiprocessors(self, device: torch.device) -> int:
        """How many a product may hold while it waits for other ranks; 0: all.

        Half of them where ranks may share a GPU: copies within a GPU are made by multiprocessors.
        """
        if not conditions.may_share(os.environ):
            return 0
        return torch.cuda.get_device_properties(device).multi_processor_count // 2

    def capturing(self) -> bool:
        """Whether the current stream is recorded into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def elapsed_us(self, call: Callable[[], object], calls: int) -> float:
        """Time of one call on the current stream. Other ranks call alike: the first one makes all begin together."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_AHEAD_CYCLES)
        call()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls

    def synchronize(self, device: torch.device | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize(device)

    def chained(self, device: torch.device) -> AbstractContextManager[None]:
        """One call after the other, whatever their streams."""
        return streams.Chained(device)

    def allocate(self, size: int, device: torch.device) -> Tensor:
        return symmetric.allocate(size, device)

    def times_mapped(self) -> int:
        return symmetric.mapped()

    def map_ranks(self, memory: Tensor, group: Group, name: str, most: int) -> symmetric.Mapping:
        return symmetric.map_ranks(memory, group, name, most)

    def warm_up(self, device: torch.device, rank: int, addresses: tuple[int, ...]) -> None:
        """Load what calls need: loading waits for kernels that run, and those may wait for other ranks."""
        torch.ops.tpkernels.fused_warm_up(device.index, rank, list(addresses))

    def gather(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_all_gather_matmul(*args)

    def begin_gather(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_gather_begin(*args)

    def end_gather(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_gather_end(*args)

    def scatter(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_matmul_reduce_scatter(*args)

    def all_reduce(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_matmul_all_reduce(*args)

    def multiply_blocks(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_block_matmul(*args)

    def reduce_small(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_all_reduce(*args)

    def gather_small(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_all_gather(*args)

    def scatter_small(self, *args: Any) -> None:
        torch.ops.tpkernels.fused_reduce_scatter(*args)

    def fault(self) -> str:
        """What a stopped launch has left, in words; host memory, so it can be read when CUDA is lost."""
        if not _extensions.is_loaded("_C_sm90a"):
            return ""
        return str(torch.ops.tpkernels.comm_fault())


active: Runtime = Runtime()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _host() -> str:
    """Two machines may have one name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()
