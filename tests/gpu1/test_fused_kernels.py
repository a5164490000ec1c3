"""The fused products' C++ ops on virtual ranks.

What is run is what several GPUs run, but for the links. Several processes: test_fused_one_gpu.py; several GPUs:
tests/gpun.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from streamk_cases import HOPPER_TILES, hopper_only, integers, randn
from virtual_ranks import OPS, PAGE, Ranks, filled, pitched, split, whole

from tpkernels.testing import assert_close_tiles

Tensor = torch.Tensor
pytestmark = [pytest.mark.gpu1, hopper_only]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("tile", [*HOPPER_TILES, ""])
def test_gather(tile: str, world: int, generator: torch.Generator) -> None:
    """Shards that end inside tiles, empty ones, fewer rows than ranks, K and addresses that TMA cannot take."""
    ranks = Ranks(world, 4 << 20)
    for total, uneven, k, n in [
        (1024, False, 512, 520),
        (997, True, 320, 264),
        (1500, True, 203, 333),
        (2, False, 64, 8),
    ]:
        rows = split(total, world, uneven)
        a, b = whole(total, k, generator=generator), pitched(whole(k, n, generator=generator))
        want = a.double() @ b.double()
        shards = [s.clone() for s in a.split(rows)]
        ranks.poison()
        for schedule in ["auto", "data_parallel", "stream_k", "hybrid_last"]:
            outs, gathered = ranks.gather(shards, [b], tile=tile, schedule=schedule, out_dtype=torch.float32)
            for rank in range(world):
                what = f"rank {rank} of {world}, {rows} rows, K {k}, N {n}, {schedule}"
                assert torch.equal(outs[rank][0].double(), want), what
                assert torch.equal(gathered[rank], a), what


@pytest.mark.parametrize("world", [2, 4])
def test_gather_is_bitwise_the_plain_product(world: int, generator: torch.Generator) -> None:
    """With the same plan. Several weights, biases, activation; shards with a pitch and an offset."""
    ranks = Ranks(world, 8 << 20)
    total, k = 1300, 1096
    rows = split(total, world, True)
    a = randn(1, total, k, dtype=torch.bfloat16, generator=generator)[0]
    bs = [randn(1, k, n, dtype=torch.bfloat16, generator=generator)[0] for n in (256, 392, 96)]
    bs[1] = bs[1].t().contiguous().t()
    biases = [randn(n, dtype=torch.float32, generator=generator) for n in (256, 392)]
    wide = [torch.empty(r, k + 24, dtype=torch.bfloat16, device="cuda") for r in rows]
    shards = [w[:, 8 : k + 8] for w in wide]
    for shard, part in zip(shards, a.split(rows), strict=True):
        shard.copy_(part)
    outs, _ = ranks.gather(
        shards, bs, biases=biases, activation="gelu", tile="128x256x64/2x1", schedule="data_parallel"
    )
    for i, b in enumerate(bs):
        out = filled(1, total, b.shape[1], dtype=torch.bfloat16)
        bias = biases[i] if i < 2 else None
        OPS.streamk_gemm(
            a[None], b[None], bias, out, None, "gelu", False, "data_parallel", 0, 1, "128x256x64/2x1"
        )
        for rank in range(world):
            assert torch.equal(outs[rank][i], out[0]), f"weight {i}, rank {rank}"


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("tile", [*HOPPER_TILES, ""])
def test_reduce(tile: str, world: int, generator: torch.Generator) -> None:
    ranks = Ranks(world, 8 << 20)
    cases = [
        (1024, False, 256, 512),
        (997, True, 320, 264),
        (1500, True, 200, 333),
        (2, False, 64, 8),
        (300, True, 72, 1029),
    ]
    for total, uneven, k, n in cases:
        rows = split(total, world, uneven)
        as_ = [whole(total, k, generator=generator) for _ in rows]
        bs = [pitched(whole(k, n, generator=generator)) for _ in rows]
        want = sum(a.double() @ b.double() for a, b in zip(as_, bs, strict=True))
        ranks.poison()
        for schedule, stored in itertools.product(["auto", "data_parallel"], [False, True]):
            options = {"tile": tile, "schedule": schedule, "stored": stored}
            outs = ranks.reduce(as_, bs, rows, out_dtype=torch.float32, **options)
            for rank, (out, part) in enumerate(zip(outs, want.split(rows), strict=True)):
                assert torch.equal(out.double(), part), (
                    f"rank {rank} of {world}, {rows} rows, K {k}, N {n}, {options}"
                )


@pytest.mark.parametrize("rows", [[1500, 1300], [1100, 0, 1537], [513, 1100, 1, 1024]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", ["128x256x64/2x1", "256x192x64/2x1", "192x192x64/1x2", ""])
def test_rows_leave_in_chunks(
    tile: str, dtype: torch.dtype, rows: list[int], generator: torch.Generator
) -> None:
    """Of 8 MiB and more, in which tiles do not end; every chunk has its own bell and flag."""
    world, total, k, n = len(rows), sum(rows), 72, 16384 // dtype.itemsize
    ranks = Ranks(world, (world * max(rows) + total) * 16384)
    ones = {"dtype": torch.bfloat16, "generator": generator, "most": 1}  # partials need no rounding
    as_, b = [integers(total, k, **ones) for _ in rows], integers(k, n, **ones)
    want = (sum(a.double() for a in as_) @ b.double()).to(dtype)
    ranks.poison()
    options = {"tile": tile, "out_dtype": dtype}
    for stored in (False, True, False):
        outs = ranks.reduce(as_, [b] * world, rows, stored=stored, **options)
        assert torch.equal(torch.cat(outs), want)
    for stored in (False, True) if tile == "" else ():
        op = OPS.fused_matmul_all_reduce
        for out in ranks.reduce(as_, [b] * world, rows, op=op, stored=stored, **options):
            assert torch.equal(out, want)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [False, True])
def test_reduce_adds_rounded_partials_in_rank_order(
    stored: bool, world: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Peers' partials rounded, the own one not, then bias and residual: bitwise, with the same plan of one tile."""
    ranks = Ranks(world, 8 << 20)
    k, n, options = 640, 504, {"tile": "128x128x64/1x1", "schedule": "data_parallel"}
    rows = [150 + 37 * r for r in range(world)]
    total = sum(rows)
    as_ = [randn(1, total, k, dtype=dtype, generator=generator)[0] for _ in rows]
    bs = [randn(1, k, n, dtype=dtype, generator=generator)[0].t().contiguous().t() for _ in rows]
    bias = randn(n, dtype=torch.float32, generator=generator)
    residuals = [randn(1, r, n, dtype=dtype, generator=generator)[0] for r in rows]
    outs = ranks.reduce(as_, bs, rows, bias=bias, residuals=residuals, stored=stored, **options)
    wide = []
    for a, b in zip(as_, bs, strict=True):
        wide.append(filled(1, total, n, dtype=torch.float32))
        OPS.streamk_gemm(
            a[None], b[None], None, wide[-1], None, "none", False, "data_parallel", 0, 1, options["tile"]
        )
    begin = 0
    for rank, out in enumerate(outs):
        mine = slice(begin, begin + rows[rank])
        begin += rows[rank]
        parts = [w[0, mine] if r == rank else w[0, mine].to(dtype).float() for r, w in enumerate(wide)]
        total_sum = parts[0].clone()
        for part in parts[1:]:
            total_sum += part
        total_sum = total_sum + bias + residuals[rank].float()
        assert torch.equal(out, total_sum.to(dtype)), f"rank {rank}"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_reduce(world: int, generator: torch.Generator) -> None:
    """The same bits on every rank: those of the reduce-scatter."""
    one, every = Ranks(world, 8 << 20), Ranks(world, 16 << 20)
    for total, k, n in [(1024, 256, 512), (997, 320, 264), (700, 200, 333), (2, 64, 8), (1, 72, 1029)]:
        rows = split(total, world, False)
        as_ = [randn(1, total, k, dtype=torch.bfloat16, generator=generator)[0] for _ in rows]
        bs = [pitched(randn(1, k, n, dtype=torch.bfloat16, generator=generator)[0]) for _ in rows]
        bias = randn(n, dtype=torch.float32, generator=generator)
        residuals = [randn(1, r, n, dtype=torch.bfloat16, generator=generator)[0] for r in rows]
        every.poison()
        for dtype in (torch.bfloat16, torch.float32):
            added = {"bias": bias, "residuals": [r.to(dtype) for r in residuals], "out_dtype": dtype}
            parts = one.reduce(as_, bs, rows, **added)
            for stored in (False, True):
                outs = every.reduce(as_, bs, rows, op=OPS.fused_matmul_all_reduce, stored=stored, **added)
                assert all(torch.equal(out, torch.cat(parts)) for out in outs), (
                    f"{world} ranks, {rows} rows, N {n}, stored {stored}"
                )


def test_calls_in_turn(generator: torch.Generator) -> None:
    """Shapes and shards change from call to call, ranks start in any order, buffers are never cleaned in between."""
    world = 4
    gather, reduce = Ranks(world, 4 << 20), Ranks(world, 8 << 20)
    order = torch.Generator().manual_seed(generator.initial_seed())
    for call in range(60):
        pick = torch.randint(1, 1200, (4,), generator=order).tolist()
        cuts = sorted(x % pick[0] for x in pick[1:]) if pick[0] > 1 else [0, 0, 0]
        rows = [b - a for a, b in zip([0, *cuts], [*cuts, pick[0]], strict=True)]
        k, n = 8 * (1 + pick[1] % 60), 8 * (1 + pick[2] % 50)
        turn = torch.randperm(world, generator=order).tolist()
        a, b = whole(pick[0], k, generator=generator), whole(k, n, generator=generator)
        outs, _ = gather.gather(
            [s.clone() for s in a.split(rows)], [b], order=turn, out_dtype=torch.float32, gathered=False
        )
        want = a.double() @ b.double()
        assert all(torch.equal(out[0].double(), want) for out in outs), rows
        options = {"order": turn, "stored": call % 3 == 1, "out_dtype": torch.float32}
        parts = reduce.reduce([a] * world, [b] * world, rows, **options)
        assert torch.equal(torch.cat(parts).double(), world * want), rows


@pytest.mark.parametrize("stored", [False, True])
def test_graphs(stored: bool, generator: torch.Generator) -> None:
    """Every rank's calls captured, replayed on new data, mixed with eager calls of another shape."""
    world, m, k, n = 2, 700, 512, 392
    gather, reduce = Ranks(world, 4 << 20), Ranks(world, 4 << 20)
    rows = [300, 400]
    a = whole(m, k, generator=generator)
    shards = [s.clone() for s in a.split(rows)]
    b = whole(k, n, generator=generator)
    outs = [filled(m, n, dtype=torch.float32) for _ in rows]
    sums = [filled(r, n, dtype=torch.float32) for r in rows]
    sends = [None if stored else filled(m, n, dtype=torch.float32) for _ in rows]

    def gathers(rank: int) -> None:
        OPS.fused_all_gather_matmul(
            shards[rank], [b], [], [], "none", [outs[rank]], [], None, rows, rank, gather.addresses, 20.0, "auto", "",
            gather.multiprocessors,
        )  # fmt: skip

    def reduces(rank: int) -> None:
        OPS.fused_matmul_reduce_scatter(
            a, b, None, None, sums[rank], sends[rank], rows, rank, reduce.addresses, 20.0, "auto", "",
            reduce.multiprocessors,
        )  # fmt: skip

    def eager() -> None:  # one op of all ranks after the other: they share one stream for copies
        gather.run(gathers)
        gather.run(reduces)

    eager()
    graphs = []
    for rank in range(world):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=gather.streams[rank]):
            gathers(rank)
            reduces(rank)
    for turn in range(12):
        a.copy_(whole(m, k, generator=generator))
        for shard, part in zip(shards, a.split(rows), strict=True):
            shard.copy_(part)
        for out in [*outs, *sums]:
            out.fill_(math.nan)
        if turn % 3 == 2:
            eager()
        else:
            gather.run(lambda rank: graphs[rank].replay())
        want = a.double() @ b.double()
        assert all(torch.equal(out.double(), want) for out in outs), turn
        assert torch.equal(torch.cat(sums).double(), world * want), turn
        if turn % 4 == 1:
            other, _ = gather.gather([s[:100].clone() for s in shards], [b], out_dtype=torch.float32)
            assert torch.equal(
                other[0][0].double(), torch.cat([s[:100] for s in shards]).double() @ b.double()
            )


LATE = """
import torch, tpkernels
rows, tail = [256, 256], (0.5, "auto", "", 0)
memory = [torch.zeros(1 << 22, dtype=torch.uint8, device="cuda") for _ in range(2)]
addresses = [m.data_ptr() for m in memory]
ops = torch.ops.tpkernels
for rank in range(2): ops.fused_warm_up(0, rank, addresses)
a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
out = torch.empty(512, 512, device="cuda", dtype=torch.bfloat16)
if {op!r} != "enter":
    memory[0].view(torch.int32)[64 + 1] = 1  # the other rank came, and then did nothing
if {op!r} not in ("reduce", "stored"):
    ops.fused_all_gather_matmul(a[:256], [b], [], [], "none", [out], [], None, rows, 0, addresses, *tail)
else:
    send = out if {op!r} == "reduce" else None
    ops.fused_matmul_reduce_scatter(a, b, None, None, out[:256].clone(), send, rows, 0, addresses, *tail)
try:
    torch.cuda.synchronize()
except RuntimeError:
    print(ops.comm_fault())
"""


@pytest.mark.parametrize(
    "op,said",
    [
        ("gather", "slab 0 of chunk 1 of a: its flag is 0, expected 1. Rank 1, which sends it, did not."),
        ("reduce", "row 0 of what rank 1 adds: its flag is 0, expected 1. Rank 1, which sends it, did not."),
        ("stored", "row 0 of what rank 1 adds: its flag is 0, expected 1. Rank 1, which sends it, did not."),
        ("enter", "rank 1 to begin the same call: its flag is 0, expected 1."),
    ],
)
def test_a_rank_that_does_not_come_is_named(op: str, said: str) -> None:
    code = LATE.format(op=op)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert said in run.stdout, run.stdout + run.stderr
    assert "waited 500 ms" in run.stdout


def test_no_memory_for_partials_is_told_before_anyone_waits(generator: torch.Generator) -> None:
    """Nobody enters: the call can be made again when there is memory."""
    world, m, n, k = 2, 4096, 4096, 512
    ranks = Ranks(world, m * k * 2)
    rows = split(m, world, False)
    shards = [randn(1, r, k, dtype=torch.bfloat16, generator=generator)[0] for r in rows]
    b = randn(1, k, n, dtype=torch.bfloat16, generator=generator)[0]
    out = filled(m, n, dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    held = []
    torch.cuda.set_per_process_memory_fraction(
        torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while len(held) < 4096:
                held.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
        with pytest.raises(
            RuntimeError, match=r"no memory for a workspace of .* use schedule 'data_parallel'"
        ):
            OPS.fused_all_gather_matmul(
                shards[0], [b], [], [], "none", [out], [], None, rows, 0, ranks.addresses, ranks.timeout_s,
                "hybrid_aligned", "128x256x64", ranks.multiprocessors,
            )  # fmt: skip
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    assert all(memory[:PAGE].view(torch.int32)[128].item() == 0 for memory in ranks.memory), "someone entered"
    outs, _ = ranks.gather(shards, [b], schedule="hybrid_aligned", tile="128x256x64")
    want = torch.cat(shards).double() @ b.double()
    for of_rank in outs:
        assert_close_tiles(of_rank[0], want, torch.bfloat16, k=k)


def test_bad_calls_are_refused_before_anyone_waits(generator: torch.Generator) -> None:
    ranks = Ranks(2, 1 << 20)
    k = 2048  # deep enough to be cut
    a, b = whole(64, k, generator=generator), whole(k, 64, generator=generator)
    out = filled(128, 64, dtype=torch.bfloat16)

    def gather(shard: Tensor = a, rows: Sequence[int] = (64, 64), rank: int = 0, **kw: Any) -> None:
        OPS.fused_all_gather_matmul(
            shard, [kw.get("b", b)], [], [], "none", [out], [], None, list(rows), rank, ranks.addresses, 1.0,
            kw.get("schedule", "auto"), kw.get("tile", ""), 0,
        )  # fmt: skip

    both = torch.cat([a, a])

    def reduce(schedule: str = "auto", a: Tensor = both, rows: Sequence[int] = (64, 64)) -> None:
        OPS.fused_matmul_reduce_scatter(
            a, b, None, None, out[: rows[0]], out, list(rows), 0, ranks.addresses, 1.0, schedule, "", 0
        )  # fmt: skip

    for call, said in [
        (lambda: gather(rows=[64]), "shard_rows must name 2 to 16 ranks, but it names 1"),
        (
            lambda: gather(rows=[63, 65]),
            r"a_shard must be a CUDA tensor \[63, 2048\], but it is \[64, 2048\]",
        ),
        (lambda: gather(rank=2), r"rank must lie in \[0, 2\), but it is 2"),
        (lambda: gather(b=b.half()), "bs must be of a_shard's dtype"),
        (lambda: gather(tile="17x3"), "tile must be one of"),
        (lambda: reduce("stream_k"), "could make ranks wait for each other"),
        (
            lambda: reduce(a=torch.zeros(k, 136, dtype=a.dtype, device="cuda").t()[:128], rows=[60, 68]),
            "a must have K contiguous, as shard 1 begins at row 60",
        ),
    ]:
        with pytest.raises(RuntimeError, match=said):
            call()
    torch.cuda.synchronize()
    assert not OPS.comm_fault()
    words = ranks.memory[0][:PAGE].view(torch.int32)
    assert int(words[128]) == 0, "nobody has begun an epoch"
    outs, _ = ranks.gather([a, a], [b], out_dtype=torch.float32)
    assert_close_tiles(outs[1][0], torch.cat([a, a]).double() @ b.double(), torch.float32, k=k)
