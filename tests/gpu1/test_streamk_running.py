"""The portable Stream-K kernel at work: bitwise repeats, graphs, busy devices, huge sizes, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from streamk_cases import gemm, randn

from tpkernels.testing import assert_close_tiles

pytestmark = pytest.mark.gpu1


def test_bitwise_equal_on_every_run(generator: torch.Generator) -> None:
    a = randn(1, 1111, 3000, dtype=torch.bfloat16, generator=generator)
    b = randn(1, 3000, 777, dtype=torch.bfloat16, generator=generator)
    for schedule in ("stream_k", "hybrid_first", "split_k", "auto"):
        first = torch.empty(1, 1111, 777, device="cuda")
        gemm(a, b, first, schedule=schedule, splits=4)
        differs = torch.zeros((), dtype=torch.bool, device="cuda")
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        outs = []
        for i in range(200):
            with torch.cuda.stream(streams[i % 3]):
                out = torch.full_like(first, math.nan)
                gemm(a, b, out, schedule=schedule, splits=4)
                outs.append(out)
        torch.cuda.synchronize()
        for out in outs:
            differs |= (out.view(torch.int32) != first.view(torch.int32)).any()
        assert not bool(differs), schedule


def test_cuda_graph(generator: torch.Generator) -> None:
    m, n, k = 260, 390, 2048
    a = torch.empty(1, m, k, dtype=torch.float16, device="cuda")
    b = torch.empty(1, k, n, dtype=torch.float16, device="cuda")
    outs = [torch.empty(1, m, n, dtype=torch.float16, device="cuda") for _ in range(3)]
    schedules = ("stream_k", "split_k", "auto")
    for out, schedule in zip(outs, schedules, strict=True):  # loads the kernels outside the capture
        gemm(a, b, out, schedule=schedule, splits=3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out, schedule in zip(outs, schedules, strict=True):
            gemm(a, b, out, schedule=schedule, splits=3)
    for _ in range(20):
        a.copy_(randn(1, m, k, dtype=torch.float16, generator=generator))
        b.copy_(randn(1, k, n, dtype=torch.float16, generator=generator))
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        eager = torch.full_like(outs[0], math.nan)
        gemm(a, b, eager, schedule="stream_k")
        torch.cuda.synchronize()
        want = a.double() @ b.double()
        for out in outs:
            assert_close_tiles(out, want, torch.float16, k=k)
        assert torch.equal(eager, outs[0])


HOLD = r"""
extern "C" __global__ void hold(unsigned long long nanoseconds) {
  extern __shared__ char all_of_it[];
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


@pytest.mark.parametrize("tile", ["", "64x64x32"])  # the second is the portable kernel's
@pytest.mark.parametrize("free", [0, 1, 5])
def test_beside_a_kernel_that_holds_multiprocessors(free: int, tile: str, generator: torch.Generator) -> None:
    """Fewer resident CTAs than workers: the plan finishes all the same, with the same bits."""
    cp: Any = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")
    hold = cp.RawKernel(HOLD, "hold")
    properties = torch.cuda.get_device_properties(0)
    shared = properties.shared_memory_per_block_optin
    hold.max_dynamic_shared_size_bytes = shared
    a = randn(1, 900, 4096, dtype=torch.bfloat16, generator=generator)
    b = randn(1, 4096, 800, dtype=torch.bfloat16, generator=generator)
    want = a.double() @ b.double()
    for schedule in ("stream_k", "split_k", "hybrid_last"):
        alone, beside = (torch.full((1, 900, 800), math.nan, device="cuda") for _ in range(2))
        gemm(a, b, alone, schedule=schedule, splits=6, tile=tile)
        torch.cuda.synchronize()
        other, mine = torch.cuda.Stream(), torch.cuda.Stream()
        with cp.cuda.ExternalStream(other.cuda_stream):
            hold((properties.multi_processor_count - free,), (64,), (30_000_000,), shared_mem=shared)
        with torch.cuda.stream(mine):
            gemm(a, b, beside, schedule=schedule, splits=6, tile=tile)
        torch.cuda.synchronize()
        assert torch.equal(alone, beside), schedule
        assert_close_tiles(beside, want, torch.float32, k=4096)


def need_memory(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, found {free}")


def test_offsets_beyond_int32(generator: torch.Generator) -> None:
    need_memory(20)
    pitch = 2**30 + 8
    m, n, k = 4, 96, 64
    values = randn(1, m, k, dtype=torch.bfloat16, generator=generator)
    buffer = torch.empty(3 * pitch + 4096, dtype=torch.bfloat16, device="cuda")
    weight = randn(1, k, n, dtype=torch.bfloat16, generator=generator)
    want = values.double() @ weight.double()
    for step, first in ((1, 0), (1, 1), (2, 0)):  # vector loads, misaligned, strided
        a = buffer.as_strided((1, m, k), (0, pitch, step), first)
        out = buffer.as_strided((1, m, n), (0, pitch, step), 2048 + first)
        b = buffer.as_strided((1, m, k), (0, pitch, step), first).transpose(1, 2)
        a.copy_(values)
        out.fill_(math.nan)
        gemm(a, weight, out, schedule="stream_k")
        assert_close_tiles(out, want, torch.bfloat16, k=k)
        small = torch.full((1, m, m), math.nan, device="cuda")
        gemm(a, b, small)
        assert_close_tiles(small, values.double() @ values.double().transpose(1, 2), torch.float32, k=k)


def test_more_than_2_to_31_results(generator: torch.Generator) -> None:
    need_memory(20)
    m, n, k = 65_600, 32_800, 16
    a = randn(1, m, k, dtype=torch.bfloat16, generator=generator)
    b = randn(1, k, n, dtype=torch.bfloat16, generator=generator)
    out = torch.full((1, m, n), math.nan, dtype=torch.bfloat16, device="cuda")
    gemm(a, b, out)
    assert not bool(out.view(-1)[: 2**31].isnan().any())
    assert not bool(out.view(-1)[2**31 :].isnan().any())
    rows = torch.tensor([0, 1, 127, 128, 32_767, 40_000, 65_471, 65_535, 65_536, m - 1], device="cuda")
    assert_close_tiles(out[:, rows], a[:, rows].double() @ b.double(), torch.bfloat16, k=k)


def bad(**changes: Any) -> dict[str, Any]:
    a = torch.zeros(1, 4, 8, dtype=torch.bfloat16, device="cuda")
    b = torch.zeros(1, 8, 16, dtype=torch.bfloat16, device="cuda")
    arguments: dict[str, Any] = {"a": a, "b": b, "out": torch.full((1, 4, 16), 7.0, device="cuda")}
    return arguments | changes


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: bad(a=torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda")),
            r"a must have shape \[batch, M, K\]",
        ),
        (
            lambda: bad(a=torch.zeros(1, 4, 8, dtype=torch.int32, device="cuda")),
            "a must be bfloat16, float16, float32 or float64",
        ),
        (lambda: bad(a=torch.zeros(1, 4, 8, device="cuda")), "b must have the dtype of a"),
        (
            lambda: bad(b=torch.zeros(1, 8, 16, dtype=torch.float16, device="cuda")),
            "b must have the dtype of a",
        ),
        (
            lambda: bad(b=torch.zeros(1, 9, 16, dtype=torch.bfloat16, device="cuda")),
            r"rows as a has columns \(K = 8\)",
        ),
        (
            lambda: bad(b=torch.zeros(2, 8, 16, dtype=torch.bfloat16, device="cuda")),
            "batch size of a, 1, but it has 2",
        ),
        (lambda: bad(b=torch.zeros(1, 8, 16, dtype=torch.bfloat16)), "b must be a CUDA tensor"),
        (lambda: bad(out=torch.zeros(1, 4, 15, device="cuda")), r"out must have shape .* = \[1, 4, 16\]"),
        (
            lambda: bad(out=torch.zeros(1, 4, 16, dtype=torch.int32, device="cuda")),
            "out must be bfloat16, float16, float32 or float64",
        ),
        (lambda: bad(out=torch.zeros(1, 4, 1, device="cuda").expand(1, 4, 16)), "out must not be broadcast"),
        (lambda: bad(bias=torch.zeros(15, device="cuda")), r"bias must have shape \[N\] = \[16\]"),
        (
            lambda: bad(bias=torch.zeros(16, dtype=torch.int32, device="cuda")),
            "bias must be bfloat16, float16, float32 or float64",
        ),
        (
            lambda: bad(preact=torch.zeros(1, 4, 16, dtype=torch.float16, device="cuda")),
            "preact must have the dtype of",
        ),
        (lambda: bad(activation="tanh"), "activation must be one of none, relu, silu, gelu or gelu_tanh"),
        (lambda: bad(schedule="magic"), "schedule must be"),
        (lambda: bad(workers=-1), "workers must be 0"),
        (lambda: bad(splits=0), "splits must be at least 1"),
        (
            lambda: bad(tile="64x64x128"),
            "tile must be 128x256x32, 128x128x32 or 64x64x32, or empty for the cheapest, but",
        ),
    ],
)
def test_errors_are_sentences_and_write_nothing(make: Any, sentence: str) -> None:
    arguments = make()
    with pytest.raises(RuntimeError, match=sentence):
        gemm(**arguments)
    torch.cuda.synchronize()
    if arguments["out"].stride(2) and arguments["out"].shape == (1, 4, 16):
        assert bool(((arguments["out"] == 7) | (arguments["out"] == 0)).all())


def test_output_that_is_an_input() -> None:
    square = torch.zeros(1, 8, 8, dtype=torch.bfloat16, device="cuda")
    other = torch.zeros_like(square)
    with pytest.raises(RuntimeError, match="a must not share memory with out"):
        gemm(square, other, square)
    with pytest.raises(RuntimeError, match="b must not share memory with out"):
        gemm(other, square, square)


@pytest.mark.gpun(2)
def test_tensors_on_another_device_than_the_current_one(seed: int) -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        generator = torch.Generator(device).manual_seed(seed)
        a = torch.randn(1, 200, 1000, device=device, generator=generator).bfloat16()
        b = torch.randn(1, 1000, 300, device=device, generator=generator).bfloat16()
        out = torch.full((1, 200, 300), math.nan, device=device)
        with torch.cuda.device(0):
            gemm(a, b, out, schedule="stream_k")
            assert torch.cuda.current_device() == 0
        assert_close_tiles(out, a.double() @ b.double(), torch.float32, k=1000)
