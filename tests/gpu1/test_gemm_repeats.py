"""The same bits each time: thousands of runs, streams at once, graph replays, beside kernels that hold multiprocessors,
with garbage in the workspace; and as many multiprocessors as are asked for.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_checks import Failures, Product, embed, gemm, integers, output, randn
from streamk_cases import (
    ANY_WALKING_TILE,
    HOPPER_TILES,
    SPLIT_PLANS,
    WALKING_AND_CHEAPEST,
    PoisonedAllocator,
    bits,
    filled,
    hopper_only,
    is_hopper,
    variants,
)

pytestmark = pytest.mark.gpu1
Tensor = torch.Tensor


class Repeats:
    """Launches back to back into a block of outputs, then compares the block: little else runs in between."""

    BLOCK = 100

    def __init__(self, a: Tensor, b: Tensor, dtype: torch.dtype, **options: Any) -> None:
        self.a, self.b, self.options = a, b, options
        shape = (1, a.shape[1], b.shape[2])
        self.first = filled(*shape, dtype=dtype)
        gemm(a, b, self.first, **options)
        self.outs = filled(self.BLOCK, *shape, dtype=dtype)
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def block(self) -> None:
        self.outs.fill_(math.nan)
        for out in self.outs:
            gemm(self.a, self.b, out, **self.options)
        self.wrong += (bits(self.outs) != bits(self.first)).flatten(1).any(1).sum()

    def check(self, what: str) -> None:
        assert not bool(self.first.isnan().any()), what
        assert int(self.wrong) == 0, f"{what}: {int(self.wrong)} runs gave other bits than the first"


def small_problem(generator: torch.Generator, k: int = 2048, n: int = 296) -> tuple[Tensor, Tensor]:
    """Few tiles of any size, cut among many clusters. Not integers: another order of sums has other bits."""
    a = randn(1, 300, k, dtype=torch.bfloat16, generator=generator)
    return a, randn(1, k, n, dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_ten_thousand_runs(tile: str, generator: torch.Generator) -> None:
    """Also report 7: a workspace used again, whose stale flags and partials look right. Clusters and plans in turn."""
    a, b = small_problem(generator)
    combinations = list(itertools.product(variants(tile), SPLIT_PLANS))
    for name, plan in combinations:
        runs = Repeats(a, b, torch.float32, tile=name, **plan)
        for _ in range(math.ceil(10_000 / len(combinations) / Repeats.BLOCK)):
            runs.block()
        runs.check(f"{name} {plan}")


@hopper_only
def test_ten_thousand_runs_of_one_plan(generator: torch.Generator) -> None:
    """With an epilogue that reads, so that runs are also held up there."""
    a, b = small_problem(generator, k=1536)
    options: dict[str, Any] = {
        "bias": randn(296, dtype=torch.float32, generator=generator),
        "activation": "gelu",
    }
    options |= {"residual": randn(1, 300, 296, dtype=torch.bfloat16, generator=generator)}
    runs = Repeats(a, b, torch.bfloat16, tile="128x256x64/2x1", schedule="stream_k", **options)
    for _ in range(100):
        runs.block()
    runs.check("128x256x64/2x1")


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_depths_that_are_no_multiple_of_the_stages(tile: str, generator: torch.Generator) -> None:
    """Report 22: buffers used again while they are still read. 9, 11, 13, 17 iterations; stages are 3 to 6."""
    for (k, n), plan in itertools.product(
        [(576, 296), (700, 264), (832, 1304), (1088, 72)], SPLIT_PLANS[:1] + [{}]
    ):
        a, b = small_problem(generator, k=k - k % 8, n=n)
        for name in variants(tile):
            runs = Repeats(a, b, torch.bfloat16, tile=name, **plan)
            for _ in range(4):
                runs.block()
            runs.check(f"{name} K = {k} {plan}")


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_two_streams_at_once(tile: str, generator: torch.Generator) -> None:
    """Neither waits for the other's tickets, flags or partials."""
    for name, plan in zip(itertools.cycle(variants(tile)), SPLIT_PLANS, strict=False):
        problems = [small_problem(generator), small_problem(generator, k=1600, n=520)]
        runs = [Repeats(a, b, torch.float32, tile=name, **plan) for a, b in problems]
        streams = [torch.cuda.Stream() for _ in runs]
        torch.cuda.synchronize()
        for _ in range(5):
            for stream, run in zip(streams, runs, strict=True):
                with torch.cuda.stream(stream):
                    run.block()
        torch.cuda.synchronize()
        for run in runs:
            run.check(f"{name} {plan}")


@pytest.mark.parametrize("tile", WALKING_AND_CHEAPEST)
def test_graphs(tile: str, generator: torch.Generator) -> None:
    """Captured: split and whole tiles, an accumulation. Replayed a hundred times on new data, two graphs at once."""
    m, n, k = 300, 392, 2048
    make: dict[str, Any] = {"dtype": torch.float16, "generator": generator}
    for name in variants(tile):
        a, b = integers(1, m, k, **make), integers(1, k, n, **make)
        plans = [*SPLIT_PLANS, {"schedule": "data_parallel"}, {"schedule": "stream_k"}]
        sets = [[filled(1, m, n, dtype=torch.float32) for _ in plans] for _ in range(2)]

        def launch(outs: list[Tensor], name: str = name, plans: Any = plans, a: Any = a, b: Any = b) -> None:
            for out, plan in zip(outs, plans, strict=True):
                gemm(a, b, out, tile=name, accumulate=out is outs[-1], **plan)

        launch(sets[0])  # loads kernels outside the capture
        torch.cuda.synchronize()
        graphs = []
        for outs in sets:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                launch(outs)
        streams = [torch.cuda.Stream() for _ in graphs]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(50):
            a.copy_(integers(1, m, k, **make))
            b.copy_(integers(1, k, n, **make))
            for outs in sets:
                for out in outs[:-1]:
                    out.fill_(math.nan)
                outs[-1].fill_(7.0)
            torch.cuda.synchronize()
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            want = (a.double() @ b.double()).float()
            for outs in sets:
                for out in outs[:-1]:
                    wrong += (out != want).sum()
                wrong += (outs[-1] != want + 7.0).sum()
        assert int(wrong) == 0, f"{name}: {int(wrong)} elements"


HOLD = r"""
extern "C" __global__ void hold(unsigned long long nanoseconds) {
  extern __shared__ char all_of_it[];
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


@pytest.mark.parametrize("free", [0, 1, 2, 37])
@pytest.mark.parametrize("tile", WALKING_AND_CHEAPEST)
def test_beside_a_kernel_that_holds_multiprocessors(tile: str, free: int, generator: torch.Generator) -> None:
    """Report 28: fewer clusters run than were planned for, at 0 and 1 none for a while. Same bits, nothing left out."""
    cp: Any = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")
    hold = cp.RawKernel(HOLD, "hold")
    properties: Any = torch.cuda.get_device_properties(0)
    shared = properties.shared_memory_per_block_optin
    hold.max_dynamic_shared_size_bytes = shared
    a, b = small_problem(generator, k=4096, n=1000)
    other, mine = torch.cuda.Stream(), torch.cuda.Stream()
    for name, plan in itertools.product(variants(tile), [*SPLIT_PLANS, {"schedule": "data_parallel"}]):
        runs = Repeats(a, b, torch.float32, tile=name, **plan)
        torch.cuda.synchronize()
        with cp.cuda.ExternalStream(other.cuda_stream):
            hold((properties.multi_processor_count - free,), (64,), (6_000_000,), shared_mem=shared)
        with torch.cuda.stream(mine):
            for out in runs.outs[:20]:
                gemm(a, b, out, tile=name, **plan)
        torch.cuda.synchronize()
        assert bool((bits(runs.outs[:20]) == bits(runs.first)).all()), (name, plan)
        runs.check(f"{name} {plan}")


@pytest.mark.parametrize("byte", [0xFF, 0x7F])
@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_garbage_in_the_workspace(tile: str, byte: int, generator: torch.Generator) -> None:
    """NaN in every partial and -1 in every flag; 3.4e38 in every partial, and flags that look raised."""
    a = embed(integers(1, 400, 2048, dtype=torch.bfloat16, generator=generator), "rows")
    b = embed(integers(1, 2048, 520, dtype=torch.bfloat16, generator=generator), "rows")
    want = Product(a, b).value.float()
    with Failures() as failures:
        for name, plan in itertools.product(variants(tile), SPLIT_PLANS):
            out = output((1, 400, 520), torch.float32)
            memory = PoisonedAllocator(byte)
            with memory.in_use():
                gemm(a, b, out.tensor, tile=name, **plan)
            with failures.case(f"{name} {plan}"):
                assert memory.was_used(), "no workspace came out of the poisoned memory"
                assert torch.equal(out.tensor, want)
                out.check("out")


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_more_tickets_than_clusters(tile: str, generator: torch.Generator) -> None:
    """Thousands of launches, each of some six tickets a cluster: a CTA once missed the ticket that its cluster drew."""
    a, b = small_problem(generator)
    a, b = a.repeat(1, 8, 1), b.repeat(1, 1, 8)
    for name in variants(tile):
        outs = [filled(1, 2400, 2368, dtype=torch.bfloat16) for _ in range(2)]
        for _ in range(500):
            for out in outs:
                gemm(a, b, out, tile=name, schedule="stream_k", workers=400)
        torch.cuda.synchronize()
        assert torch.equal(*outs), name
        assert not bool(outs[0].isnan().any()), name


@pytest.mark.parametrize("tile", WALKING_AND_CHEAPEST)
def test_multiprocessors_size_the_plan(tile: str, generator: torch.Generator) -> None:
    """60 of them: the bits of as many workers, and not those of all."""
    a = randn(1, 1000, 4096, dtype=torch.bfloat16, generator=generator)
    b = randn(1, 4096, 1048, dtype=torch.bfloat16, generator=generator)

    def run(**options: Any) -> Tensor:
        out = filled(1, 1000, 1048, dtype=torch.float32)
        gemm(a, b, out, schedule="stream_k", **options)
        return out

    for name in variants(tile):
        fewer = run(tile=name, multiprocessors=60)
        if is_hopper(tile):
            workers = 60 if name.endswith("/1x1") else 30
            assert torch.equal(fewer, run(tile=name, workers=workers)), name
        assert torch.equal(fewer, run(tile=name, multiprocessors=60)), name
        assert not torch.equal(fewer, run(tile=name)), name


@hopper_only
def test_multiprocessors_bound_the_launch(tmp_path: Path, generator: torch.Generator) -> None:
    """As a profiler sees it: no more CTAs than 60, also of plans with more workers."""
    a, b = small_problem(generator)
    big_a, big_b = a.repeat(1, 8, 1), b.repeat(1, 1, 8)
    out = filled(1, 2400, 2368, dtype=torch.bfloat16)
    plans: list[dict[str, Any]] = [{"schedule": "data_parallel"}, {"schedule": "stream_k"}]
    plans += [{"schedule": "split_k", "splits": 4}, {"schedule": "stream_k", "workers": 132}]
    calls = [(name, plan) for tile in HOPPER_TILES for name in variants(tile) for plan in plans]
    gemm(big_a, big_b, out)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for name, plan in calls:
            gemm(big_a, big_b, out, tile=name, multiprocessors=60, **plan)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [e["args"] for e in events if "streamk_gemm" in e.get("name", "")]
    grids = [math.prod(args["grid"]) for args in kernels if "grid" in args]
    if not grids:
        pytest.skip("the profiler saw no kernel")
    assert len(grids) == len(calls)
    assert all(grid <= 60 for grid in grids), grids
