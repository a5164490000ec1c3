"""Hooks of the Hopper kernel (csrc/kernels/gemm_hooks.hpp): arrivals and doorbells; streams play other ranks.

The data that a flag announces is written after a delay on another stream, over NaN: a product that reads too early
shows.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from streamk_cases import HOPPER_TILES, randn

from tpkernels.testing import assert_close_tiles

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]


def hooked(a: Tensor, b: Tensor, out: Tensor, tile: str, schedule: str = "data_parallel", **kw: Any) -> None:
    torch.ops.tpkernels.streamk_gemm_hooked(
        a, b, out, schedule, kw.get("workers", 0), kw.get("splits", 1), tile,
        kw.get("arrival_flags"), kw.get("epoch"), kw.get("arrival_rows", []), kw.get("slab_k", 0),
        kw.get("counters"), kw.get("bells"), kw.get("bell_rows", []),
        kw.get("timeout_s", 20.0),
    )  # fmt: skip


def words(count: int, value: int = 0) -> Tensor:
    return torch.full((count,), value, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("tile", HOPPER_TILES)
@pytest.mark.parametrize("schedule", ["data_parallel", "hybrid_aligned", "stream_k"])
def test_no_chunk_is_read_before_its_flag(tile: str, schedule: str, generator: torch.Generator) -> None:
    """Blocks of rows, in slabs of K, land one after another in an order that is not the tiles'."""
    m, n, k, slab_k, epoch = 700, 520, 1600, 512, 7
    rows = [100, 100, 391, 700]  # one is empty, none is a multiple of a tile
    values = randn(1, m, k, dtype=torch.bfloat16, generator=generator)
    b = randn(1, k, n, dtype=torch.bfloat16, generator=generator)
    a = torch.full_like(values, math.nan)
    out = torch.full((1, m, n), math.nan, dtype=torch.bfloat16, device="cuda")
    slabs = math.ceil(k / slab_k)
    flags = words(len(rows) * slabs, epoch - 1)
    sender, now = torch.cuda.Stream(), words(1, epoch)

    def send() -> None:
        with torch.cuda.stream(sender):
            for slab in range(slabs):
                for chunk in (3, 0, 2, 1):
                    begin, end = (rows[chunk - 1] if chunk else 0), rows[chunk]
                    torch.cuda._sleep(20_000)
                    where = (slice(None), slice(begin, end), slice(slab * slab_k, (slab + 1) * slab_k))
                    a[where].copy_(values[where])
                    flags[chunk * slabs + slab].fill_(epoch)

    # Every kernel once before one waits: CUDA loads them at their first launch, for which it waits in turn.
    send()
    hooked(values, b, out.clone(), tile, schedule)
    torch.cuda.synchronize()
    a.fill_(math.nan)
    flags.fill_(epoch - 1)
    torch.cuda.synchronize()
    hooked(a, b, out, tile, schedule, arrival_flags=flags, epoch=now, arrival_rows=rows, slab_k=slab_k)
    send()
    torch.cuda.synchronize()
    assert_close_tiles(out, values.double() @ b.double(), torch.bfloat16, k=k)


@pytest.mark.parametrize("tile", HOPPER_TILES)
@pytest.mark.parametrize("schedule", ["data_parallel", "hybrid_aligned"])
def test_a_bell_rings_when_its_rows_are_in_memory(
    tile: str, schedule: str, generator: torch.Generator
) -> None:
    """Rung once a launch, counters back at zero, all rows there; three launches and a graph replay."""
    m, n, k = 900, 408, 1104
    rows = [256, 300, 300, 899, 900]
    a = randn(1, m, k, dtype=torch.float16, generator=generator)
    b = randn(1, k, n, dtype=torch.float16, generator=generator)
    counters, bells = words(len(rows)), words(len(rows))
    out = torch.empty((1, m, n), dtype=torch.float16, device="cuda")
    want = a.double() @ b.double()

    def launch() -> None:
        hooked(a, b, out, tile, schedule, counters=counters, bells=bells, bell_rows=rows)

    launch()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch()
    for run in (launch, launch, graph.replay):
        bells.zero_()
        out.fill_(math.nan)
        run()
        torch.cuda.synchronize()
        assert bells.tolist() == [1, 1, 0, 1, 1], "every chunk that has rows, once"
        assert counters.tolist() == [0] * len(rows)
        assert_close_tiles(out, want, torch.float16, k=k)


def test_rows_can_be_taken_when_their_bell_rings(generator: torch.Generator) -> None:
    """A kernel on another stream waits for the bell of the first rows and copies them while the product goes on."""
    cp: Any = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")
    take = cp.RawKernel(
        r"""extern "C" __global__ void take(volatile unsigned* bell, const volatile unsigned short* from,
        unsigned short* to, int count) {
          while (*bell == 0) __nanosleep(100);
          __threadfence_system();
          for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
        }""",
        "take",
    )
    m, n, k, first = 8192, 1024, 2048, 512
    a = randn(1, m, k, dtype=torch.bfloat16, generator=generator)
    b = randn(1, k, n, dtype=torch.bfloat16, generator=generator)
    counters, bells = words(2), words(2)
    out = torch.full((1, m, n), math.nan, dtype=torch.bfloat16, device="cuda")
    taken = torch.full((first, n), math.nan, dtype=torch.bfloat16, device="cuda")
    bell_args = {"counters": counters, "bells": bells, "bell_rows": [first, m]}
    hooked(a, b, out, "128x256x64", **bell_args)
    torch.cuda.synchronize()
    bells.zero_()
    out.fill_(math.nan)
    take.compile()
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with cp.cuda.ExternalStream(other.cuda_stream):
        take((1,), (256,), (bells.data_ptr(), out.data_ptr(), taken.data_ptr(), first * n))
    hooked(a, b, out, "128x256x64", **bell_args)
    torch.cuda.synchronize()
    assert torch.equal(taken, out[0, :first])


LATE = """
import torch, tpkernels
a = torch.ones(1, 256, 256, dtype=torch.bfloat16, device="cuda"); b = torch.ones_like(a); out = torch.empty_like(a)
call = torch.ops.tpkernels.streamk_gemm_hooked
w = lambda v: torch.full((1,), v, dtype=torch.int32, device="cuda")
call(a, b, out, "data_parallel", 0, 1, "", w(4), w(5), [256], 0, None, None, [], 0.05)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("stopped")
try:
    call(a, b, out, "data_parallel", 0, 1, "", None, None, [], 0, None, None, [], 0.05)
except RuntimeError as error:
    print(error)
"""


def test_a_chunk_that_never_comes_stops_the_kernel_and_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, check=False
    )
    assert "stopped" in done.stdout, done.stderr
    assert "waited 50 ms for slab 0 of chunk 0 of a: its flag is 4, expected 5" in done.stdout, done.stdout
