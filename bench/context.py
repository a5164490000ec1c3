"""A rank's surroundings: device, process group, random data, agreement with the other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .suite import Options

__all__ = ["Context", "OutOfStep", "RanksLost"]

_L2_TIMES = 3  # buffers rotate over at least three times the L2
_MAX_COPIES = 512  # as many as the calls of a graph
_CPU_CACHE_BYTES = 1 << 20  # on the CPU rotation is exercised, not needed


class RanksLost(Exception):
    """The ranks cannot agree on anything any more: one of them has ended."""


class OutOfStep(Exception):
    """Some ranks were at the end of a step while others were still asking within it: a rank failed on the way.

    Raised on all of them. ``ended``: what those at the end said, by rank.
    """

    def __init__(self, ended: dict[int, Any]) -> None:
        super().__init__(f"ranks {list(ended)} were at the end of a step that the others were in.")
        self.ended = ended


@dataclass
class Context:
    """What suites and engine know about this rank.

    Attributes:
        options: the user's.
        rank, world: of this process.
        device: cuda:<local rank> (current already), or cpu.
        group: carries the data: NCCL on GPUs, gloo on CPU; None in a world of one.
        control: a gloo group for agreement between the ranks' hosts; None in a world of one.
        generator: of this rank's data, on ``device``; differs between ranks.
    """

    options: Options
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(self.options.seed * 1009 + self.rank)
        self._token = torch.zeros(1, device=self.device)
        self.footprint = 0.0

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    def uniform(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Random data in [-1, 1]: other distributions draw less power, and clocks rise with it."""
        # All bits of float64 random: sums of products of float32 numbers would be exact.
        drawn = dtype if dtype == torch.float64 else torch.float32
        x = torch.empty(shape, dtype=drawn, device=self.device)
        return x.uniform_(-1, 1, generator=self.generator).to(dtype)

    def copies(self, set_bytes: int, *, at_least: int = 2) -> int:
        """How many buffer sets of ``set_bytes`` (all that one call reads and writes) exceed three L2 caches.

        Noted in ``footprint``: their bytes over those of the L2.
        """
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.cuda else _CPU_CACHE_BYTES
        wanted = math.ceil(_L2_TIMES * cache / max(1, set_bytes))
        copies = max(at_least, min(_MAX_COPIES if self.cuda else 2, wanted))
        self.footprint = copies * set_bytes / cache
        return copies

    def align(self) -> None:
        """Bring the ranks' current streams (on CPU: the ranks) to the same point in time."""
        if self.group is None:
            return
        if self.cuda:
            dist.all_reduce(self._token, group=self.group)
            return
        try:
            dist.barrier(self.control)
        except RuntimeError as error:
            raise RanksLost(str(error)) from error

    def agree(self, value: Any, *, end_of_step: bool = False) -> list[Any]:
        """Every rank's ``value`` (picklable), in rank order, on every rank.

        Raises:
            RanksLost: a rank is gone.
            OutOfStep: only some ranks say that they are at the end of a step.
        """
        if self.control is None:
            return [value]
        answers: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(answers, (end_of_step, value), group=self.control)
        except RuntimeError as error:
            raise RanksLost(str(error)) from error
        ended = {rank: said for rank, (ends, said) in enumerate(answers) if ends}
        if 0 < len(ended) < self.world:
            raise OutOfStep(ended)
        return [said for _, said in answers]

    def slowest(self, samples: Sequence[float]) -> list[float]:
        """Elementwise maximum over the ranks of equally many samples."""
        return [max(of_all) for of_all in zip(*self.agree([float(s) for s in samples]), strict=True)]

    def free_bytes(self) -> int | None:
        """Device memory that this rank can still allocate; None on CPU."""
        if not self.cuda:
            return None
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
