"""Virtual ranks: all of a group in one process on one GPU, a stream each and a part of the multiprocessors.

No process group and no symmetric memory: every "rank's" page and buffer is ordinary memory of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from streamk_cases import integers

Tensor = torch.Tensor
PAGE = 4096
OPS: Any = torch.ops.tpkernels


class Ranks:
    """Virtual ranks: memory, streams, and calls that are all enqueued before any is waited for."""

    # All clusters of all ranks have to run at once, also where some leave odd multiprocessors to the others' pairs.
    def __init__(self, world: int, buffer_bytes: int, timeout_s: float = 20.0) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.memory = [
            torch.zeros(PAGE + buffer_bytes, dtype=torch.uint8, device="cuda") for _ in range(world)
        ]
        self.addresses = [m.data_ptr() for m in self.memory]
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count // world - 4
        torch.cuda.synchronize()
        for rank in range(world):
            OPS.fused_warm_up(0, rank, self.addresses)

    def poison(self) -> None:
        for memory in self.memory:
            memory[PAGE:].fill_(0xFF)  # NaN

    def run(self, call: Callable[[int], None], order: Sequence[int] | None = None) -> None:
        torch.cuda.synchronize()
        for rank in order or range(self.world):
            with torch.cuda.stream(self.streams[rank]):
                call(rank)
        torch.cuda.synchronize()

    def replay(self, call: Callable[[int], None], times: int = 1, order: Sequence[int] | None = None) -> None:
        """As run, by a CUDA graph of every rank: copies of one call then do not stand behind those of another."""
        graphs = [torch.cuda.CUDAGraph() for _ in range(self.world)]
        for rank, graph in enumerate(graphs):
            with torch.cuda.graph(graph, stream=self.streams[rank]):
                call(rank)
        for _ in range(times):
            self.run(lambda rank: graphs[rank].replay(), order)

    def gather(
        self, shards: Sequence[Tensor], bs: Sequence[Tensor], **options: Any
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Every rank's products and gathered operand. All ranks have the same bs here."""
        rows = [s.shape[0] for s in shards]
        m, k = sum(rows), shards[0].shape[1]
        dtype = options.get("out_dtype", shards[0].dtype)
        assert PAGE + m * math.ceil(k / 8) * 16 <= self.memory[0].numel(), "the test's buffers are too small"
        outs = [[filled(m, b.shape[1], dtype=dtype) for b in bs] for _ in shards]
        gathered = [filled(m, k, dtype=shards[0].dtype) for _ in shards]
        biases = options.get("biases", [])
        # The next product takes multiprocessors while it waits for the one before.
        multiprocessors = self.multiprocessors // min(2, len(bs))

        def call(rank: int) -> None:
            OPS.fused_all_gather_matmul(
                shards[rank], list(bs), biases, list(range(len(biases))), options.get("activation", "none"),
                outs[rank], [], gathered[rank] if options.get("gathered", True) else None, rows, rank, self.addresses,
                self.timeout_s, options.get("schedule", "auto"), options.get("tile", ""), multiprocessors,
            )  # fmt: skip

        # Ranks share a copy stream: one's copy of its gathered operand would stand in front of another's pushes.
        self.replay(call, order=options.get("order"))
        return outs, gathered

    def blocks(
        self,
        lefts: Sequence[Tensor],
        rights: Sequence[Tensor],
        tables: tuple[list[int], list[int]],
        **options: Any,
    ) -> list[Tensor]:
        """Every rank's sum over steps of a left times a right block, of whom the tables [rank * steps + step] name."""
        sums_rows = options.get("sums_rows", (False, False))
        m, n = lefts[0].shape[sums_rows[0]], rights[0].shape[sums_rows[1]]
        outs = [filled(m, n, dtype=options.get("out_dtype", lefts[0].dtype)) for _ in lefts]

        def call(rank: int) -> None:
            OPS.fused_block_matmul(
                lefts[rank], rights[rank], *sums_rows, *tables, options.get("bias"), outs[rank], rank, self.addresses,
                self.timeout_s, options.get("schedule", "auto"), options.get("tile", ""), self.multiprocessors,
            )  # fmt: skip

        self.replay(call, options.get("times", 1), options.get("order"))
        return outs

    def reduce(
        self, as_: Sequence[Tensor], bs: Sequence[Tensor], rows: Sequence[int], **options: Any
    ) -> list[Tensor]:
        """Every rank's rows of the sum of a_i b_i; with op=fused_matmul_all_reduce all of them. more: of every rank,
        factors of more products.
        """
        dtype = options.get("out_dtype", as_[0].dtype)
        m, n = as_[0].shape[0], bs[0].shape[1]
        unit = 16 // dtype.itemsize
        pitch = math.ceil(n / unit) * unit
        slots = self.world * max(rows) + (m if "op" in options else 0)
        assert PAGE + slots * pitch * dtype.itemsize <= self.memory[0].numel(), (
            "the test's buffers are too small"
        )
        outs = [filled(m, n, dtype=dtype) if "op" in options else filled(r, pitch, dtype=dtype) for r in rows]
        stored = options.get("stored", False)  # by the products themselves, in the memory of other ranks
        sends = [None if stored else filled(m, pitch, dtype=dtype) for _ in rows]
        residuals = [
            None if r is None else widened(r, pitch) for r in options.get("residuals", [None] * self.world)
        ]

        more = options.get("more", [([], [])] * self.world)

        def call(rank: int) -> None:
            options.get("op", OPS.fused_matmul_reduce_scatter)(
                as_[rank], bs[rank], options.get("bias"), residuals[rank], outs[rank], sends[rank], list(rows), rank,
                self.addresses, self.timeout_s, options.get("schedule", "auto"), options.get("tile", ""),
                self.multiprocessors, *more[rank],
            )  # fmt: skip

        if "op" in options:  # an owner's copies wait for its sums, hence for other ranks' copies
            self.replay(call, 3)
        else:
            self.run(call, options.get("order"))
        return [out[:, :n] for out in outs]


def filled(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")


def split(total: int, world: int, uneven: bool) -> list[int]:
    if not uneven:
        each = math.ceil(total / world)
        return [max(0, min(each, total - r * each)) for r in range(world)]
    sizes = [(total * (r + 1) * (r + 2)) // (world * (world + 1)) for r in range(world)]
    sizes = [b - a for a, b in zip([0, *sizes], sizes, strict=False)]
    return [sizes[0] + total - sum(sizes), *sizes[1:]]


def pitched(x: Tensor) -> Tensor:
    """The same matrix with a pitch that TMA takes."""
    rows, cols = x.shape
    return x.new_empty(rows, math.ceil(cols / 8) * 8)[:, :cols].copy_(x)


def widened(x: Tensor, columns: int) -> Tensor:
    """The same rows, with room for whole chunks; NaN there."""
    wide = filled(x.shape[0], columns, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide


def whole(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Integers: every order of sums is exact in float32."""
    return integers(1, *shape, dtype=dtype, generator=generator)[0]
