"""The portable Stream-K kernel (torch.ops.tpkernels.streamk_gemm on CUDA) against float64.

Inputs lie inside buffers full of NaN, so a read beside a matrix shows; outputs start as NaN inside canaries, so an
element that is left out, or a write beside the output, shows.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

import tpkernels  # noqa: F401  (loads the ops)
from tpkernels.testing import Canary, assert_close_tiles, canary_view

pytestmark = pytest.mark.gpu1

DTYPES = [torch.bfloat16, torch.float16]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ACTIVATIONS = ["none", "relu", "silu", "gelu", "gelu_tanh"]
SCHEDULES = [
    "auto",
    "data_parallel",
    "stream_k",
    "split_k",
    "hybrid_first",
    "hybrid_last",
    "own_first",
    "every_shard",
]
# How a matrix lies in memory: which dim is contiguous, whether 16-byte loads are possible.
FAST = ["rows", "cols"]
SLOW = ["rows_odd", "cols_odd", "strided"]

Tensor = torch.Tensor


def embed(values: Tensor, layout: str) -> Tensor:
    """The same values [batch, rows, cols] in another layout, surrounded by NaN."""
    batch, rows, cols = values.shape
    fast, slow = (cols, rows) if layout.startswith(("rows", "strided")) else (rows, cols)
    step = 3 if layout == "strided" else 1
    if layout in FAST:
        pitch, offset = (fast + 7) // 8 * 8 + 8, 16
    else:
        pitch, offset = step * fast + 1 - fast % 2 + 2, 1
    buffer = torch.full(
        (offset + batch * slow * pitch + 64,), math.nan, dtype=values.dtype, device=values.device
    )
    strides = (
        (slow * pitch, pitch, step)
        if fast == cols and slow == rows and not layout.startswith("cols")
        else None
    )
    if strides is None:
        strides = (slow * pitch, step, pitch)
    view = buffer.as_strided((batch, rows, cols), strides, offset)
    view.copy_(values)
    return view


def output(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "rows") -> Canary:
    """A NaN-filled output inside a canary."""
    options: dict[str, Any] = {
        "rows": {"pad": 8 - shape[-1] % 8, "offset": 16},
        "rows_odd": {"pad": 7, "offset": 1},
        "cols": {"order": [0, 2, 1], "pad": 8, "offset": 16},
        "strided": {"pad": 5, "offset": 3, "step": 2},
    }[layout]
    return canary_view(shape, dtype, "cuda", **options)


def activate(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return x.clamp(min=0)
    if name == "silu":
        return torch.nn.functional.silu(x)
    if name == "gelu":
        return torch.nn.functional.gelu(x)
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    return x


def randn(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    preact: Tensor | None = None,
    activation: str = "none",
    accumulate: bool = False,
    schedule: str = "auto",
    workers: int = 0,
    splits: int = 1,
) -> None:
    torch.ops.tpkernels.streamk_gemm(
        a, b, bias, out, preact, activation, accumulate, schedule, workers, splits
    )


def check(a: Tensor, b: Tensor, out: Canary, *, preact: Canary | None = None, **options: Any) -> None:
    """Runs the kernel and compares everything it may and may not write with float64."""
    bias, accumulate = options.get("bias"), options.get("accumulate", False)
    a64, b64 = a.double(), b.double()
    want, size = a64 @ b64, a64.abs() @ b64.abs()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    want_preact = want
    want = activate(want, options.get("activation", "none"))
    if accumulate:
        want, size = want + out.tensor.double(), size + out.tensor.double().abs()
    gemm(a, b, out.tensor, preact=None if preact is None else preact.tensor, **options)
    torch.cuda.synchronize()
    k = max(1, a.shape[-1])
    assert_close_tiles(out.tensor, want, out.tensor.dtype, k=k, magnitude=size, slack=1.25, name="out")
    out.check("out")
    if preact is not None:
        assert_close_tiles(
            preact.tensor, want_preact, preact.tensor.dtype, k=k, magnitude=size, name="preact"
        )
        preact.check("preact")


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


SHAPES = [
    (1, 1, 1),
    (5, 7, 3),
    (64, 64, 32),
    (128, 128, 64),
    (129, 257, 100),
    (300, 200, 520),
    (1000, 72, 1031),
]


@pytest.mark.parametrize("layout_b", FAST)
@pytest.mark.parametrize("layout_a", FAST)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_layouts(dtype: torch.dtype, layout_a: str, layout_b: str, generator: torch.Generator) -> None:
    for m, n, k in SHAPES:
        a = embed(randn(1, m, k, dtype=dtype, generator=generator), layout_a)
        b = embed(randn(1, k, n, dtype=dtype, generator=generator), layout_b)
        # data_parallel over few and over many tiles picks the two tile sizes; stream_k goes through the fix-up.
        for schedule in ("data_parallel", "stream_k"):
            check(a, b, output((1, m, n), dtype), schedule=schedule)


@pytest.mark.parametrize("layout_b", FAST + SLOW)
@pytest.mark.parametrize("layout_a", FAST + SLOW)
def test_any_strides_and_alignment(layout_a: str, layout_b: str, generator: torch.Generator) -> None:
    for dtype, (m, n, k) in zip(itertools.cycle(DTYPES), SHAPES, strict=False):
        a = embed(randn(2, m, k, dtype=dtype, generator=generator), layout_a)
        b = embed(randn(2, k, n, dtype=dtype, generator=generator), layout_b)
        check(a, b, output((2, m, n), dtype), schedule="hybrid_first")


@pytest.mark.parametrize("out_layout", ["rows", "rows_odd", "cols", "strided"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_epilogues(out_dtype: torch.dtype, out_layout: str, generator: torch.Generator) -> None:
    m, n, k = 150, 203, 96
    for dtype, activation, accumulate, schedule in itertools.product(
        DTYPES, ACTIVATIONS, [False, True], ["data_parallel", "split_k"]
    ):
        a = randn(2, m, k, dtype=dtype, generator=generator) / 4
        b = randn(2, k, n, dtype=dtype, generator=generator) / 4
        out, preact = output((2, m, n), out_dtype, out_layout), output((2, m, n), out_dtype, out_layout)
        if accumulate:
            out.tensor.copy_(randn(2, m, n, dtype=out_dtype, generator=generator))
        check(
            a,
            b,
            out,
            bias=randn(n, dtype=out_dtype, generator=generator),
            preact=preact,
            activation=activation,
            accumulate=accumulate,
            schedule=schedule,
            splits=3,
        )


@pytest.mark.parametrize("bias_dtype", OUT_DTYPES, ids=str)
def test_bias_of_any_dtype_and_stride(bias_dtype: torch.dtype, generator: torch.Generator) -> None:
    for n in (1, 3, 64, 130):
        bias = randn(n, 3, dtype=bias_dtype, generator=generator)[:, 1]
        a = randn(1, 70, 40, dtype=torch.bfloat16, generator=generator)
        b = randn(1, 40, n, dtype=torch.bfloat16, generator=generator)
        check(a, b, output((1, 70, n), torch.float32), bias=bias)
        check(a, b, output((1, 70, n), torch.float32), bias=bias[:1].expand(n))


@pytest.mark.parametrize("part", range(4))
def test_random_problems(part: int, seed: int, generator: torch.Generator) -> None:
    pick = random.Random(seed)
    for _ in range(60):
        dtype, out_dtype = pick.choice(DTYPES), pick.choice(OUT_DTYPES)
        batch = pick.choice([1, 1, 2, 5])
        m, n, k = (round(math.exp(pick.uniform(0, math.log(700)))) for _ in range(3))
        k = pick.choice([k, 8 * k, 0]) if pick.random() < 0.5 else k
        a = embed(randn(batch, m, k, dtype=dtype, generator=generator), pick.choice(FAST + FAST + SLOW))
        b = embed(randn(batch, k, n, dtype=dtype, generator=generator), pick.choice(FAST + FAST + SLOW))
        out = output((batch, m, n), out_dtype, pick.choice(["rows", "rows", "rows_odd", "cols", "strided"]))
        accumulate = pick.random() < 0.3
        if accumulate:
            out.tensor.copy_(randn(batch, m, n, dtype=out_dtype, generator=generator))
        check(
            a,
            b,
            out,
            preact=output((batch, m, n), out_dtype) if pick.random() < 0.3 else None,
            bias=randn(n, dtype=dtype, generator=generator) if pick.random() < 0.5 else None,
            activation=pick.choice(ACTIVATIONS),
            accumulate=accumulate,
            schedule=pick.choice(SCHEDULES),
            workers=pick.choice([0, 0, 1, 7, 100, 1000]),
            splits=pick.choice([1, 2, 5]),
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_workers_and_splits(schedule: str, generator: torch.Generator) -> None:
    for m, n, k in [(300, 520, 1000), (64, 64, 8192), (512, 1024, 256), (40, 3000, 2050)]:
        a = randn(1, m, k, dtype=torch.bfloat16, generator=generator)
        b = randn(1, n, k, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
        for workers in (0, 1, 2, 7, 132, 5000):  # 5000: far more tickets than CTAs
            for splits in (1, 2, 3, 16) if schedule == "split_k" else (1,):
                check(
                    a, b, output((1, m, n), torch.float32), schedule=schedule, workers=workers, splits=splits
                )


def test_partials_are_fp32(generator: torch.Generator) -> None:
    """Halves of K that cancel: partials of 16 bits would leave errors of a thousandth of them."""
    m, n, k = 128, 128, 4096
    half = randn(1, m, k // 2, dtype=torch.bfloat16, generator=generator).abs()
    a = torch.cat([half, -half], 2)
    b = randn(1, k // 2, n, dtype=torch.bfloat16, generator=generator).abs().repeat(1, 2, 1)
    out = output((1, m, n), torch.float32)
    gemm(a, b, out.tensor, schedule="split_k", splits=2)
    scale = float((half.double() @ b[:, : k // 2].double()).abs().max())
    assert float(out.tensor.abs().max()) < 2e-5 * scale


@pytest.mark.parametrize("layout", ["rows", "rows_odd"])
def test_batch_with_broadcast_and_permuted_strides(layout: str, generator: torch.Generator) -> None:
    m, n, k, batch = 70, 90, 130, 6
    one_a = embed(randn(1, m, k, dtype=torch.bfloat16, generator=generator), layout)
    one_b = embed(randn(1, k, n, dtype=torch.bfloat16, generator=generator), layout)
    a = embed(randn(batch, m, k, dtype=torch.bfloat16, generator=generator), layout)
    b = embed(randn(batch, k, n, dtype=torch.bfloat16, generator=generator), layout)
    check(one_a.expand(batch, m, k), b, output((batch, m, n), torch.bfloat16))
    check(a, one_b.expand(batch, k, n), output((batch, m, n), torch.bfloat16))
    interleaved = randn(m, batch, 136, dtype=torch.bfloat16, generator=generator)[..., :k].transpose(0, 1)
    check(interleaved, b, output((batch, m, n), torch.bfloat16), schedule="stream_k")
    out = canary_view((batch, m, n), torch.bfloat16, "cuda", order=[1, 0, 2], pad=4, offset=8)
    check(a, b, out, schedule="stream_k")
    # Broadcast rows and columns: strides of 0 within a matrix.
    check(a[:, :1].expand(batch, m, k), b[:, :, :1].expand(batch, k, n), output((batch, m, n), torch.float32))
    # More batches than a grid's z dimension would take.
    many = randn(70_000, 1, 8, dtype=torch.bfloat16, generator=generator)
    other = randn(70_000, 8, 2, dtype=torch.bfloat16, generator=generator)
    check(many, other, output((70_000, 1, 2), torch.float32))


@pytest.mark.parametrize("schedule", ["auto", "stream_k", "split_k"])
def test_empty_extents(schedule: str, generator: torch.Generator) -> None:
    for batch, m, n, k in itertools.product((0, 2), (0, 3), (0, 5), (0, 4)):
        a = randn(batch, m, k, dtype=torch.bfloat16, generator=generator)
        b = randn(batch, k, n, dtype=torch.bfloat16, generator=generator)
        bias = randn(n, dtype=torch.float32, generator=generator)
        for accumulate in (False, True):
            out = output((batch, m, n), torch.float32)
            if accumulate:
                out.tensor.fill_(3.0)
            options = {"bias": bias, "activation": "silu", "accumulate": accumulate, "schedule": schedule}
            if out.tensor.numel():
                check(a, b, out, **options)
            else:
                gemm(a, b, out.tensor, **options)
                out.check("out")


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


@pytest.mark.parametrize("free", [0, 1, 5])
def test_beside_a_kernel_that_holds_multiprocessors(free: int, generator: torch.Generator) -> None:
    """Fewer resident CTAs than tickets: the plan finishes all the same, with the same bits."""
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
        gemm(a, b, alone, schedule=schedule, splits=6)
        torch.cuda.synchronize()
        other, mine = torch.cuda.Stream(), torch.cuda.Stream()
        with cp.cuda.ExternalStream(other.cuda_stream):
            hold((properties.multi_processor_count - free,), (64,), (30_000_000,), shared_mem=shared)
        with torch.cuda.stream(mine):
            gemm(a, b, beside, schedule=schedule, splits=6)
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
        (lambda: bad(a=torch.zeros(1, 4, 8, device="cuda")), "a must be bfloat16 or float16"),
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
            lambda: bad(out=torch.zeros(1, 4, 16, dtype=torch.float64, device="cuda")),
            "out must be bfloat16, float16 or",
        ),
        (lambda: bad(out=torch.zeros(1, 4, 1, device="cuda").expand(1, 4, 16)), "out must not be broadcast"),
        (lambda: bad(bias=torch.zeros(15, device="cuda")), r"bias must have shape \[N\] = \[16\]"),
        (
            lambda: bad(bias=torch.zeros(16, dtype=torch.int32, device="cuda")),
            "bias must be bfloat16, float16 or",
        ),
        (
            lambda: bad(preact=torch.zeros(1, 4, 16, dtype=torch.float16, device="cuda")),
            "preact must have the dtype of",
        ),
        (lambda: bad(activation="tanh"), "activation must be one of none, relu, silu, gelu or gelu_tanh"),
        (lambda: bad(schedule="magic"), "schedule must be"),
        (lambda: bad(workers=-1), "workers must be 0"),
        (lambda: bad(splits=0), "splits must be at least 1"),
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
