"""Virtual ranks for the kernel of small calls: all in one process on one GPU, a stream each, grids that fit together.

Every "rank's" memory is ordinary memory of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from streamk_cases import randn

from tpkernels.comm import small

Tensor = torch.Tensor
OPS: Any = torch.ops.tpkernels
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Ranks:
    """Virtual ranks. At most 64 CTAs of all of them: they are resident whatever else runs."""

    def __init__(self, world: int, most_bytes: int = 2 << 20, timeout_s: float = 20.0) -> None:
        self.world, self.timeout_s, self.calls = world, timeout_s, 0
        half = small.PACKET_BYTES + (world + 1) * (most_bytes + 256)
        self.memory = [
            torch.zeros(small.PAGE_BYTES + 2 * half, dtype=torch.uint8, device="cuda") for _ in range(world)
        ]
        self.addresses = [m.data_ptr() for m in self.memory]
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        torch.cuda.synchronize()
        for rank in range(world):
            OPS.fused_warm_up(0, rank, self.addresses)

    def poison(self) -> None:
        """All that is not words or packets."""
        for memory in self.memory:
            for half in memory[small.PAGE_BYTES :].chunk(2):
                half[small.PACKET_BYTES :].fill_(0xFF)  # NaN

    def launch(
        self,
        rank: int,
        way: str,
        partial: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        ctas: int = 0,
    ) -> None:
        OPS.fused_all_reduce(partial, bias, residual, out, way, *self._place(rank, ctas))

    def gather(self, rank: int, shard: Tensor, out: Tensor, rows: Sequence[int], ctas: int = 0) -> None:
        OPS.fused_all_gather(shard, out, list(rows), *self._place(rank, ctas))

    def scatter(
        self,
        rank: int,
        partial: Tensor,
        out: Tensor,
        rows: Sequence[int],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        ctas: int = 0,
    ) -> None:
        OPS.fused_reduce_scatter(partial, bias, residual, out, list(rows), *self._place(rank, ctas))

    def _place(self, rank: int, ctas: int) -> tuple[Any, ...]:
        return rank, self.addresses, self.memory[0].numel(), self.timeout_s, ctas or 64 // self.world

    def run(self, call: Callable[[int], None], order: Sequence[int] | None = None) -> None:
        torch.cuda.synchronize()
        for rank in order or range(self.world):
            with torch.cuda.stream(self.streams[rank]):
                call(rank)
        torch.cuda.synchronize()

    def reduce(self, way: str, partials: Sequence[Tensor], **options: Any) -> list[Tensor]:
        outs = [torch.full_like(partial, math.nan) for partial in partials]
        self.run(lambda rank: self.launch(rank, way, partials[rank], outs[rank], **options))
        return outs


def summed(partials: Sequence[Tensor], *terms: Tensor | None) -> Tensor:
    """In rank order in float32, rounded once."""
    total = partials[0].float()
    for each in [*partials[1:], *terms]:
        total = total if each is None else total + each.float()
    return total.to(partials[0].dtype)


def draw(world: int, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    return [randn(*shape, dtype=dtype, generator=generator) for _ in range(world)]
