"""Products of fp8 operands with scales on the Hopper kernel: right to the bit, accurate, the same each time."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from gemm_checks import Failures, output
from scaled_cases import (
    ALONG_ALL_OF_K,
    ANY_TILE,
    BLOCKS,
    E4M3,
    E5M2,
    GRANULARITIES,
    PAIRS,
    PLANS,
    TILES,
    Scaled,
    amid_nan,
    blocks,
    integers,
    scaled_gemm,
    scales,
    shapes_of,
    spread,
    variants,
)
from streamk_cases import OUT_DTYPES, hopper_only

pytestmark = [pytest.mark.gpu1, hopper_only]
Tensor = torch.Tensor


def operands(
    m: int,
    n: int,
    k: int,
    granularity: str,
    generator: torch.Generator,
    pair: tuple[torch.dtype, torch.dtype],
    most: int = 4,
) -> Scaled:
    a, b = integers(m, k, pair[0], generator, most), integers(n, k, pair[1], generator, most)
    return Scaled(a, b, *scales(granularity, m, n, k, generator))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("tile", ANY_TILE)
def test_types_clusters_schedules(tile: str, granularity: str, generator: torch.Generator) -> None:
    """All of them with each other; scales of a tensor, of rows and of columns differ by 2^60."""
    with Failures() as failures:
        for (m, n, k), pair in zip(
            [(300, 392, 1000), (129, 260, 2064), (520, 264, 528), (64, 640, 4096)], PAIRS, strict=True
        ):
            product = operands(m, n, k, granularity, generator, pair)
            outs = [torch.float32] if granularity in ALONG_ALL_OF_K else OUT_DTYPES
            for name, plan, out_dtype in itertools.product(variants(tile), PLANS, outs):
                with failures.case(f"{name} {plan} {pair} to {out_dtype} {(m, n, k)}"):
                    product.check(out_dtype, tile=name, **plan)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_fast_accumulation_of_what_14_bits_hold(tile: str, generator: torch.Generator) -> None:
    """-1, 0 and 1: no sum exceeds K."""
    with Failures() as failures:
        for (granularity, pair), k in itertools.product(
            zip(ALONG_ALL_OF_K, PAIRS, strict=True), (16, 640, 4096)
        ):
            product = operands(260, 520, k, granularity, generator, pair, most=1)
            for name, plan in itertools.product(variants(tile), PLANS):
                with failures.case(f"{name} {plan} {pair} {granularity} K = {k}"):
                    product.check(torch.float32, tile=name, fast_accumulation=True, **plan)


EXTENTS = [1, 7, 64, 65, 127, 128, 129, 255, 257, 300]
DEPTHS = [1, 16, 17, 48, 127, 128, 129, 144, 255, 500, 1024 + 16, 33 * 128, 63]


@pytest.mark.parametrize("tile", ANY_TILE)
def test_ragged_shapes(tile: str, seed: int, generator: torch.Generator) -> None:
    """Each M with each N; K, granularity, cluster, plan, types, layout in turn."""
    pick = random.Random(seed)
    depths, names = itertools.cycle(DEPTHS), itertools.cycle(variants(tile))
    with Failures() as failures:
        for m, n in itertools.product(EXTENTS, EXTENTS):
            k, name, plan = next(depths), next(names), pick.choice(PLANS)
            granularity, pair, out_dtype = (
                pick.choice(GRANULARITIES),
                pick.choice(PAIRS),
                pick.choice(OUT_DTYPES),
            )
            layout = pick.choice(["rows", "rows", "rows_odd", "cols"])
            if granularity in ALONG_ALL_OF_K:
                out_dtype = torch.float32  # of 2 bytes, what is scaled by 2^60 overflows
            product = operands(m, n, k, granularity, generator, pair)
            with failures.case(f"{name} {(m, n, k)} {granularity} {pair} to {out_dtype} {layout} {plan}"):
                product.check(out_dtype, layout, tile=name, **plan)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_lie_anyhow(granularity: str, generator: torch.Generator) -> None:
    """Transposed, amid NaN, apart; one for all by a stride of 0."""
    m, n, k = 300, 520, 1000
    product = operands(m, n, k, granularity, generator, (E4M3, E4M3))

    def transposed(scale: Tensor) -> Tensor:
        return scale if scale.dim() < 2 else scale.t().contiguous().t()

    def apart(scale: Tensor) -> Tensor:
        if scale.dim() < 2:
            return scale
        buffer = torch.full([2 * e + 3 for e in scale.shape], math.nan, device="cuda")
        view = buffer[1:-1:2, 2::2][: scale.shape[0], : scale.shape[1]]
        return view.copy_(scale)

    want = product.run(torch.float32)
    for change in (transposed, apart):
        again = Scaled(product.a, product.b, change(product.scale_a), change(product.scale_b))
        for tile in TILES:
            again.check(torch.float32, tile=tile)
    assert torch.equal(want, product.value.float())
    one = torch.full((1, 1), 0.25, device="cuda")
    rows, columns = (one.expand(s) if len(s) == 2 else one for s in shapes_of(granularity, m, n, k))
    Scaled(product.a, product.b, rows, columns).check(torch.float32)


@pytest.mark.parametrize("bias_dtype", OUT_DTYPES)
def test_bias(bias_dtype: torch.dtype, generator: torch.Generator) -> None:
    """Once, whatever is split; strided."""
    m, n, k = 260, 392, 2000
    bias = torch.randint(-64, 65, (2 * n,), device="cuda", generator=generator).to(bias_dtype)[::2]
    with Failures() as failures:
        for granularity, tile, plan in itertools.product(("tensor x column", *BLOCKS[:2]), TILES, PLANS):
            a, b = integers(m, k, E4M3, generator), integers(n, k, E5M2, generator)
            of_a, of_b = scales(granularity, m, n, k, generator, most=1)
            product = Scaled(a, b, of_a, of_b, bias)
            for out_dtype, layout in (
                (torch.float32, "rows"),
                (torch.bfloat16, "rows"),
                (torch.float16, "rows_odd"),
            ):
                with failures.case(f"{tile} {granularity} {plan} to {out_dtype} {layout}"):
                    product.check(out_dtype, layout, tile=tile, **plan)


def test_no_elements(generator: torch.Generator) -> None:
    """M, N or K of 0; without K there is the bias."""
    for m, n, k in ((0, 8, 32), (8, 0, 32), (0, 0, 0), (8, 24, 0)):
        a, b = torch.empty(m, k, device="cuda").to(E4M3), torch.empty(n, k, device="cuda").to(E4M3)
        bias = torch.randn(n, device="cuda", generator=generator)
        for granularity, with_bias in itertools.product(GRANULARITIES, (False, True)):
            of_a, of_b = (torch.ones(s, device="cuda") for s in shapes_of(granularity, m, n, k))
            out = output((1, m, n), torch.bfloat16)
            scaled_gemm(a, b.t(), of_a, of_b, out.tensor[0], bias=bias if with_bias else None)
            out.check()
            want = bias.to(torch.bfloat16).expand(m, n) if with_bias else torch.zeros_like(out.tensor[0])
            assert torch.equal(out.tensor[0], want)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_scales_of_any_magnitude(tile: str, generator: torch.Generator) -> None:
    """Random operands, scales from 2^-40 to 2^40 in one tile: each element has the error of its own sum."""
    m, n, k = 384, 520, 2000
    for granularity in GRANULARITIES:
        a = amid_nan(torch.randn(m, k, device="cuda", generator=generator).to(E4M3))
        b = amid_nan(torch.randn(n, k, device="cuda", generator=generator).to(E5M2))
        of_a, of_b = scales(granularity, m, n, k, generator, most=20)
        product = Scaled(a, b, of_a, of_b)
        size = (a.double().abs() * spread(of_a, m, k)) @ (b.double().abs().t() * spread(of_b, k, n))
        for name in variants(tile):
            error = (product.run(torch.float32, tile=name).double() - product.value).abs() / size
            # A tensor core cuts each product to some 14 bits of the largest beside it.
            assert float(error.max()) < 2**-11, f"{name} {granularity}: {float(error.max()):.1e}"


@pytest.mark.parametrize(
    "granularity", ["tensor x tensor", "row x column", "1x128 x 128x128", "1x128 x 1x128"]
)
def test_accuracy(granularity: str, generator: torch.Generator) -> None:
    """Tile by tile, on random data: what rounding products to 14 bits every 128 leaves, and rounding the output."""
    m, n, k = 512, 768, 4096
    a = torch.randn(m, k, device="cuda", generator=generator).to(E4M3)
    b = torch.randn(n, k, device="cuda", generator=generator).to(E4M3)
    of_a, of_b = (
        torch.rand(s, device="cuda", generator=generator) + 0.5 for s in shapes_of(granularity, m, n, k)
    )
    product = Scaled(a, b, of_a, of_b)
    bounds = {torch.float32: 3e-4, torch.bfloat16: 2.5e-3, torch.float16: 6e-4}
    for tile, (out_dtype, bound) in itertools.product(TILES, bounds.items()):
        error = product.run(out_dtype, tile=tile).double() - product.value
        by_tile = [
            x.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).pow(2).sum((1, 3)).sqrt()
            for x in (error, product.value)
        ]
        worst = float((by_tile[0] / by_tile[1]).max())
        assert worst < bound, f"{tile} {out_dtype}: {worst:.1e}"


def test_two_levels_are_what_fast_accumulation_is_not(generator: torch.Generator) -> None:
    """Sums of K = 16384 positive products lose bits in the tensor cores' accumulators, and keep them in two levels."""
    k = 16384
    a, b = (torch.rand(256, k, device="cuda", generator=generator).to(E4M3) for _ in range(2))
    one = torch.ones(1, device="cuda")
    product = Scaled(a, b, one, one)
    for tile in TILES:
        errors = {}
        for fast in (False, True):
            out = product.run(torch.float32, tile=tile, fast_accumulation=fast, schedule="data_parallel")
            errors[fast] = float(((out.double() - product.value).abs() / product.value).max())
        assert errors[False] < 2e-3 and errors[True] > 5 * errors[False], f"{tile}: {errors}"


@pytest.mark.parametrize("granularity", ["row x column", "1x128 x 128x128", "1x128 x 1x128"])
def test_a_thousand_runs(granularity: str, generator: torch.Generator) -> None:
    """The same bits each time, whatever is split and however."""
    m, n, k = 300, 520, 4096
    a = torch.randn(m, k, device="cuda", generator=generator).to(E4M3)
    b = torch.randn(n, k, device="cuda", generator=generator).to(E4M3)
    of_a, of_b = (torch.rand(s, device="cuda", generator=generator) for s in shapes_of(granularity, m, n, k))
    for tile, plan in itertools.product(TILES, PLANS[2:5]):
        outs = torch.full((100, m, n), math.nan, device="cuda")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        first = torch.empty(m, n, device="cuda")
        name = tile + random.Random(str(plan)).choice(["/2x1", "/1x2", "/1x1"])
        scaled_gemm(a, b.t(), of_a, of_b, first, tile=name, **plan)
        for _ in range(10):
            outs.fill_(math.nan)
            for out in outs:
                scaled_gemm(a, b.t(), of_a, of_b, out, tile=name, **plan)
            wrong += (outs != first).flatten(1).any(1).sum()
        assert not bool(first.isnan().any()) and int(wrong) == 0, f"{name} {plan}: {int(wrong)} runs differ"


def test_graph_replays_see_new_values(generator: torch.Generator) -> None:
    """Of operands, of scales on the device, of nothing on the host."""
    m, n, k = 260, 520, 1040
    product = operands(m, n, k, "1x128 x 128x128", generator, (E4M3, E4M3))
    out = torch.empty(m, n, device="cuda")
    arguments = (product.a, product.b.t(), product.scale_a, product.scale_b, out)
    scaled_gemm(*arguments, schedule="stream_k")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled_gemm(*arguments, schedule="stream_k")
    for _ in range(3):
        fresh = operands(m, n, k, "1x128 x 128x128", generator, (E4M3, E4M3))
        for old, new in ((product.a, fresh.a), (product.b, fresh.b)):
            old.view(torch.uint8).copy_(new.view(torch.uint8))
        product.scale_a.copy_(fresh.scale_a)
        product.scale_b.copy_(fresh.scale_b)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, fresh.value.float())


def test_sentences() -> None:
    """What cannot be done is said, and nothing is written."""
    m, n, k = 32, 48, 256
    a, b = torch.ones(m, k, device="cuda").to(E4M3), torch.ones(n, k, device="cuda").to(E4M3)
    one, out = torch.ones(1, device="cuda"), torch.full((m, n), math.nan, device="cuda")
    rows, k_blocks = torch.ones(m, blocks(k), device="cuda"), torch.ones(blocks(k), n, device="cuda")
    narrow = torch.ones(m, 24, device="cuda").to(E4M3)
    wrong: list[tuple[str, dict[str, object]]] = [
        ("fast_accumulation must be False with scales", {"scale_a": rows, "fast_accumulation": True}),
        ("fast_accumulation must be False with scales", {"scale_b": k_blocks, "fast_accumulation": True}),
        ("a must be float8_e4m3fn or float8_e5m2", {"a": a.to(torch.bfloat16)}),
        ("b must be float8_e4m3fn or float8_e5m2", {"b": b.t().float()}),
        (r"a and b must have shapes \[M, K\] and \[K, N\]", {"b": b}),
        ("b must have K contiguous", {"b": b.t().contiguous()}),
        (
            "a must have rows that start at multiples of 16 bytes",
            {"a": narrow, "b": b[:, :24].contiguous().t()},
        ),
        ("a must start at a multiple of 16 bytes", {"a": a[:, 1:17], "b": b[:, :16].t()}),
        ("scale_a must be float32", {"scale_a": one.double()}),
        (r"scale_a must have one element, shape \[M, 1\]", {"scale_a": torch.ones(m, 3, device="cuda")}),
        (r"scale_b must have one element, shape \[1, N\]", {"scale_b": torch.ones(n, 1, device="cuda")}),
        ("scale_a must be on the device of a", {"scale_a": one.cpu()}),
        (r"out must have shape \[M, N\] = \[32, 48\]", {"out": out.t()}),
        ("out must be bfloat16, float16 or float32", {"out": out.double()}),
        ("out must not be broadcast", {"out": out[:1].expand(m, n)}),
        (r"bias must have shape \[N\] = \[48\]", {"bias": torch.ones(m, device="cuda")}),
        ("tile must be one of 128x256x128, 128x128x128", {"tile": "128x256x64"}),
        ("schedule must be one of", {"schedule": "fastest"}),
        ("workers must be 0", {"workers": -1}),
        ("multiprocessors must be 0", {"multiprocessors": 10_000}),
    ]
    arguments: dict[str, object] = {"a": a, "b": b.t(), "scale_a": one, "scale_b": one, "out": out}
    for sentence, change in wrong:
        with pytest.raises(RuntimeError, match=f"scaled_gemm: .*{sentence}"):
            scaled_gemm(**(arguments | change))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    assert bool(out.isnan().all())
