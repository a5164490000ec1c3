"""The kernel of small gathers and reduce-scatters on virtual ranks, by themselves and in turn with all-reduces.

Whole calls: test_fused_one_gpu.py and tests/gpun.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small_ranks import BF16, F16, F32, OPS, Ranks, Tensor, draw, summed
from streamk_cases import hopper_only, randn

from tpkernels.comm import small

pytestmark = [pytest.mark.gpu1, hopper_only]

# Whole units and lines, less than a unit, shards that begin inside one, several rounds of a thread.
COLUMNS = [1, 5, 8, 333, 1024, 4096]


def shards(world: int) -> list[list[int]]:
    """Equal, uneven, most of them empty, all rows on the first or last rank."""
    some = [[4], [1], [7, 0, 2], [0, 13, 1, 5], [3] + [0] * (world - 1), [0] * (world - 1) + [9]]
    return [[each[r % len(each)] for r in range(world)] for each in some]


def nan(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full((rows, columns), math.nan, dtype=dtype, device="cuda")


def check_gather(ranks: Ranks, whole: Tensor, rows: Sequence[int], ctas: int = 0) -> None:
    mine, outs = whole.split(list(rows)), [nan(*whole.shape, whole.dtype) for _ in rows]
    ranks.run(lambda rank: ranks.gather(rank, mine[rank].clone(), outs[rank], rows, ctas))
    for rank, out in enumerate(outs):
        assert torch.equal(out, whole), f"rank {rank}, {rows}, {tuple(whole.shape)}, {ctas} CTAs"


def check_scatter(
    ranks: Ranks,
    partials: Sequence[Tensor],
    rows: Sequence[int],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    ctas: int = 0,
) -> None:
    """residual: of all rows."""
    wants = summed(partials, bias, residual).split(list(rows))
    rights = [None] * len(rows) if residual is None else [x.clone() for x in residual.split(list(rows))]
    outs = [nan(*want.shape, want.dtype) for want in wants]
    ranks.run(lambda r: ranks.scatter(r, partials[r], outs[r], rows, bias, rights[r], ctas))
    for rank, (out, want) in enumerate(zip(outs, wants, strict=True)):
        assert torch.equal(out, want), f"rank {rank}, {rows}, {tuple(partials[0].shape)}, {ctas} CTAs"


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_values(dtype: torch.dtype, world: int, generator: torch.Generator) -> None:
    """Every element of a gather; bitwise the rank-ordered sums."""
    ranks = Ranks(world)
    ranks.poison()
    for i, rows in enumerate(shards(world)):
        for j, columns in enumerate(COLUMNS):
            partials = draw(world, (sum(rows), columns), dtype, generator)
            bias = (
                randn(columns, dtype=(F32, dtype, F16)[j % 3], generator=generator) if (i + j) % 2 else None
            )
            residual = randn(*partials[0].shape, dtype=dtype, generator=generator) if (i + j) % 3 else None
            for ctas in (0, 1, 3):
                check_gather(ranks, partials[0], rows, ctas)
                check_scatter(ranks, partials, rows, bias, residual, ctas)


def test_the_largest(generator: torch.Generator) -> None:
    """As many bytes as go this way, and as many CTAs as the op takes."""
    ranks = Ranks(2, most_bytes=8 << 20)
    check_gather(ranks, randn(512, 8192, dtype=BF16, generator=generator), [256, 256], 64)
    check_scatter(ranks, draw(2, (1024, 8192), BF16, generator), [512, 512], ctas=64)


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_tensors_that_begin_anywhere(offset: int, generator: torch.Generator) -> None:
    """Addresses that are no multiples of 16 bytes, in memory that nobody may touch around them."""
    ranks, rows, columns = Ranks(2), [3, 2], 77

    def views(*heights: int) -> list[Tensor]:
        spaces = [torch.full((1000,), math.nan, dtype=BF16, device="cuda") for _ in heights]
        return [
            x[offset : offset + h * columns].view(h, columns) for x, h in zip(spaces, heights, strict=True)
        ]

    def untouched(x: Tensor) -> bool:
        space = x.new_empty(0).set_(x.untyped_storage(), 0, (1000,))
        return int(space.isnan().sum()) == 1000 - x.numel()

    partials, residuals, sums = views(5, 5), views(*rows), views(*rows)
    mine, outs = views(*rows), views(5, 5)
    for x in (*partials, *residuals, *mine):
        x.copy_(randn(*x.shape, dtype=BF16, generator=generator))
    ranks.run(lambda r: ranks.scatter(r, partials[r], sums[r], rows, None, residuals[r]))
    ranks.run(lambda r: ranks.gather(r, mine[r], outs[r], rows))
    wants = summed(partials, torch.cat(residuals)).split(rows)
    assert all(torch.equal(got, want) for got, want in zip(sums, wants, strict=True))
    assert all(torch.equal(out, torch.cat(mine)) for out in outs)
    assert all(untouched(x) for x in (*sums, *outs)), "beyond an output"


class Step:
    """A call of one of the operations, on all ranks, with outputs that are poisoned before."""

    def __init__(
        self, ranks: Ranks, kind: str, rows: Sequence[int], columns: int, generator: torch.Generator
    ):
        self.ranks, self.kind, self.rows = ranks, kind, rows
        self.mine: list[Tensor] = []  # shards
        self.partials = draw(ranks.world, (sum(rows), columns), BF16, generator)
        self.update()
        self.outs = [nan(*want.shape) for want in self.wants]

    def update(self) -> None:
        """What comes out, for what is in ``partials``."""
        world, rows = self.ranks.world, list(self.rows)
        total = summed(self.partials)
        if self.kind == small.GATHER:
            self.mine = [x.contiguous() for x in self.partials[0].split(rows)]
            self.wants = [self.partials[0]] * world
        else:
            self.wants = list(total.split(rows)) if self.kind == small.SCATTER else [total] * world

    def launch(self, rank: int, ctas: int = 0) -> None:
        if self.kind == small.GATHER:
            self.ranks.gather(rank, self.mine[rank], self.outs[rank], self.rows, ctas)
        elif self.kind == small.SCATTER:
            self.ranks.scatter(rank, self.partials[rank], self.outs[rank], self.rows, ctas=ctas)
        else:
            self.ranks.launch(rank, self.kind, self.partials[rank], self.outs[rank], ctas=ctas)

    def poison(self) -> None:
        for out in self.outs:
            out.fill_(math.nan)

    def wrong(self) -> int:
        pairs = zip(self.outs, self.wants, strict=True)
        return sum(not torch.equal(out, want) for out, want in pairs)


def steps(ranks: Ranks, generator: torch.Generator) -> list[Step]:
    kinds = (small.GATHER, small.SCATTER, *small.SUM_WAYS)
    return [
        Step(ranks, kind, rows, columns, generator)
        for kind in kinds
        for rows, columns in zip(shards(ranks.world), (1024, 8, 333, 4096, 5, 520), strict=True)
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_calls_in_turn(world: int, generator: torch.Generator) -> None:
    """Operations, shards and numbers of CTAs change from call to call; ranks start in any order; nobody waits."""
    ranks, together = Ranks(world), random.Random(generator.initial_seed())
    torch.cuda._sleep(1)  # loaded at its first use, which waits for running kernels
    every = steps(ranks, generator)
    for turn in range(60):
        together.shuffle(every)
        for step in every:
            step.poison()
        torch.cuda.synchronize()
        for step in every:
            ctas = together.randrange(1, 9)
            for rank in together.sample(range(world), world):
                with torch.cuda.stream(ranks.streams[rank]):
                    if together.random() < 0.1:
                        torch.cuda._sleep(together.randrange(200_000))
                    step.launch(rank, ctas)
        torch.cuda.synchronize()
        bad = [(step.kind, step.rows) for step in every if step.wrong()]
        assert not bad, (turn, bad)
    epochs = [int(m[:4].view(torch.int32)) for m in ranks.memory]
    assert epochs == [60 * len(every)] * world


def test_graphs(generator: torch.Generator) -> None:
    """Replays of an odd number of calls of all operations, with new data, between eager calls."""
    world = 3
    ranks, together = Ranks(world), random.Random(generator.initial_seed())
    every = steps(ranks, generator)
    recorded, eager = every[::4][:7], every[1::4]
    assert len(recorded) % 2 == 1 and {small.GATHER, small.SCATTER} < {step.kind for step in recorded}
    ranks.run(lambda rank: [step.launch(rank) for step in every])
    graphs = []
    for rank in range(world):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=ranks.streams[rank]):
            for step in recorded:
                step.launch(rank)
    for turn in range(50):
        for step in recorded:
            mine = step.mine if step.kind == small.GATHER else []
            for x in step.partials:
                x.copy_(randn(*x.shape, dtype=BF16, generator=generator))
            step.update()
            for kept, new in zip(mine, step.mine if mine else [], strict=True):  # which the graph reads
                kept.copy_(new)
            step.mine = mine
            step.poison()
        torch.cuda.synchronize()
        for _ in range(5):
            for rank in together.sample(range(world), world):
                with torch.cuda.stream(ranks.streams[rank]):
                    graphs[rank].replay()
        torch.cuda.synchronize()
        assert not any(step.wrong() for step in recorded), turn
        step = together.choice(eager)
        step.poison()
        ranks.run(step.launch)
        assert not step.wrong(), turn


def test_around_products(generator: torch.Generator) -> None:
    """A product reads what was gathered, a reduce-scatter what it made, again and again in the same memory."""
    world, rows, k, n = 2, [24, 40], 2048, 1024
    ranks = Ranks(world)
    whole = randn(64, k, dtype=BF16, generator=generator)
    bs = [randn(k, n, dtype=BF16, generator=generator) / 32 for _ in range(world)]
    mine = [x.contiguous() for x in whole.split(rows)]
    wants = summed([whole @ b for b in bs]).split(rows)
    gathered, partials = [nan(64, k) for _ in rows], [nan(64, n) for _ in rows]
    outs = [nan(height, n) for height in rows]
    ranks.run(lambda rank: torch.mm(gathered[rank], bs[rank], out=partials[rank]))  # memory for each stream

    def call(rank: int) -> None:
        for _ in range(5):
            gathered[rank].fill_(math.nan)
            ranks.gather(rank, mine[rank], gathered[rank], rows)
            torch.mm(gathered[rank], bs[rank], out=partials[rank])
            ranks.scatter(rank, partials[rank], outs[rank], rows)

    for turn in range(40):
        for x in (*gathered, *partials, *outs):
            x.fill_(math.nan)
        ranks.run(call)
        assert all(torch.equal(out, want) for out, want in zip(outs, wants, strict=True)), turn


LATE = """
import torch, tpkernels
memory = [torch.zeros(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
addresses = [m.data_ptr() for m in memory]
ops = torch.ops.tpkernels
for rank in range(2): ops.fused_warm_up(0, rank, addresses)
x, y = torch.ones(64, 512, device="cuda").bfloat16(), torch.ones(32, 512, device="cuda").bfloat16()
place = [32, 32], 0, addresses, memory[0].numel(), 0.5, 2
ops.fused_all_gather(y, x, *place) if {gathers} else ops.fused_reduce_scatter(x, None, None, y, *place)
try:
    torch.cuda.synchronize()
except RuntimeError:
    print(ops.comm_fault())
"""


@pytest.mark.parametrize(
    "gathers, said", [(True, "rows of a gather"), (False, "the partial of a reduce-scatter")]
)
def test_a_rank_that_does_not_come_is_named(gathers: bool, said: str) -> None:
    code = LATE.format(gathers=gathers)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert f"waited 500 ms for {said}, word " in run.stdout, run.stdout + run.stderr
    assert "its flag is 0, expected 1. Rank 1, which sends it, did not." in run.stdout


def test_bad_calls_are_refused() -> None:
    ranks, x = Ranks(2), torch.ones(4, 8, dtype=BF16, device="cuda")
    size, wide = ranks.memory[0].numel(), torch.ones(8, 8, dtype=BF16, device="cuda")

    def gather(
        shard: Tensor = x, out: Tensor = wide, rows: Sequence[int] = (4, 4), rank: int = 0, size: int = size
    ) -> None:
        OPS.fused_all_gather(shard, out, list(rows), rank, ranks.addresses, size, 1.0, 1)

    def scatter(
        partial: Tensor = wide,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor = x,
        rows: Sequence[int] = (4, 4),
        ctas: int = 1,
    ) -> None:
        OPS.fused_reduce_scatter(
            partial, bias, residual, out, list(rows), 0, ranks.addresses, size, 1.0, ctas
        )

    refused: list[tuple[Callable[..., None], dict[str, Any], str]] = [
        (gather, {"rows": [4]}, "shard_rows must have an entry for each of the 2 ranks, but it has 1"),
        (gather, {"rows": [4, -1]}, "shard_rows must not be negative, but an entry is -1"),
        (gather, {"rows": [3, 4]}, "shard must have the 3 rows that shard_rows says of rank 0, but it has 4"),
        (gather, {"rows": [0, 0], "shard": x[:0]}, "shards must have elements"),
        (gather, {"rows": [4, 1 << 40]}, "less than 2 GiB together"),
        (gather, {"out": x}, r"out must be a CUDA tensor of shape \[8, 8\]"),
        (gather, {"out": wide.half()}, "out must be contiguous and of shard's dtype"),
        (gather, {"shard": x.double()}, "shard must be bfloat16, float16 or float32"),
        (gather, {"rank": 2}, r"rank must lie in \[0, 2\), but it is 2"),
        (gather, {"size": 1 << 20}, "do not fit a buffer of 1048576 bytes by way of gather"),
        (scatter, {"rows": [4, 5]}, "partial must have the 9 rows that shard_rows has, but it has 8"),
        (scatter, {"partial": wide.t()}, "partial must be a contiguous CUDA tensor"),
        (scatter, {"out": wide}, r"out must be a CUDA tensor of shape \[4, 8\]"),
        (scatter, {"residual": wide}, r"residual must be a CUDA tensor of shape \[4, 8\]"),
        (scatter, {"bias": x[0, :4]}, r"bias must be a contiguous CUDA tensor \[N\]"),
        (scatter, {"ctas": 65}, r"ctas must lie in \[0, 64\]"),
    ]
    for call, options, said in refused:
        with pytest.raises(RuntimeError, match=said):
            call(**options)
    torch.cuda.synchronize()
    assert not OPS.comm_fault()
    assert int(ranks.memory[0][:4].view(torch.int32)) == 0, "nobody has begun a call"
