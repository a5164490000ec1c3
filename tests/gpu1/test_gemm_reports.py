"""What users of other Stream-K kernels reported, tried here. The numbers are those of the list that the kernel was
designed by; each test says what went wrong there. Elsewhere: 7 and 22 (repeats) and 28's contention in
test_gemm_repeats.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from gemm_checks import Failures, Product, embed, gemm, integers, randn
from streamk_cases import (
    ANY_WALKING_TILE,
    DTYPES,
    LAYOUTS,
    OUT_DTYPES,
    PLANS,
    SPLIT_PLANS,
    WALKING_AND_CHEAPEST,
    WALKING_NAMES,
    filled,
    hopper_only,
    is_hopper,
    need_memory,
    variants,
)

pytestmark = pytest.mark.gpu1
Tensor = torch.Tensor


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_report_1_wide_and_flat(tile: str, generator: torch.Generator) -> None:
    """8 x 8192 x K with clusters: the workspace was sized for other clusters than were launched."""
    m, n = 8, 8192
    long_a = integers(1, m, 8192, dtype=torch.bfloat16, generator=generator)
    long_b = integers(1, n, 8192, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
    with Failures() as failures:
        for k in [8192, 64, 448, 512, 576, 1024, 1032, 2048, 4160]:
            product = Product(long_a[:, :, :k], long_b[:, :k])
            for name, plan in itertools.product(
                variants(tile), [*PLANS, {"splits": 8, "schedule": "split_k"}]
            ):
                with failures.case(f"{name} K = {k} {plan}"):
                    product.run(torch.bfloat16, tile=name, **plan)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_report_3_clusters_that_divide_nothing(tile: str, generator: torch.Generator) -> None:
    """Grids that are no multiple of the cluster; sums into an old output hung."""
    with Failures() as failures:
        for m, n, k in [(300, 1300, 640), (900, 130, 1024), (257, 385, 2048)]:
            a = integers(1, m, k, dtype=torch.float16, generator=generator)
            b = embed(integers(1, k, n, dtype=torch.float16, generator=generator), "rows")
            product = Product(a, b)
            for name, plan, count in itertools.product(variants(tile), PLANS[:4], [0, 131, 13, 3]):
                dtype = OUT_DTYPES[(m + count) % 3]
                old = integers(1, m, n, dtype=dtype, generator=generator)
                with failures.case(f"{name} {(m, n, k)} {plan} on {count} multiprocessors, {dtype}"):
                    product.run(dtype, old=old, tile=name, multiprocessors=count, **plan)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_report_4_workers_with_few_or_no_iterations(tile: str, generator: torch.Generator) -> None:
    """Barriers counted on every CTA having work, and as much as the others."""
    with Failures() as failures:
        for m, n, k in [
            (1, 1, 8),
            (1, 1, 8192),
            (130, 10, 64),
            (10, 400, 576),
            (600, 600, 520),
            (130, 700, 1096),
        ]:
            a = embed(integers(1, m, k, dtype=torch.bfloat16, generator=generator), "rows")
            b = embed(integers(1, k, n, dtype=torch.bfloat16, generator=generator), "cols")
            product = Product(a, b)
            for name, schedule, workers in itertools.product(
                variants(tile), ["data_parallel", "stream_k", "hybrid_first", "split_k"], [0, 3, 17, 1000]
            ):
                with failures.case(f"{name} {(m, n, k)} {schedule} workers={workers}"):
                    product.run(torch.float32, tile=name, schedule=schedule, workers=workers, splits=7)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_report_10_output_that_was_never_zeroed(tile: str, generator: torch.Generator) -> None:
    """Split K by atomics into torch.empty: right only where memory happened to be zero."""
    a = integers(1, 300, 4096, dtype=torch.bfloat16, generator=generator)
    b = integers(1, 4096, 264, dtype=torch.bfloat16, generator=generator)
    want = Product(a, b).value
    for name, plan, dtype in itertools.product(variants(tile), SPLIT_PLANS, OUT_DTYPES):
        for value in (math.nan, math.inf, 1.0):
            out = filled(1, 300, 264, dtype=dtype, value=value)
            gemm(a, b, out, tile=name, **plan)
            assert torch.equal(out, want.to(dtype)), (name, plan, dtype, value)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_report_12_strides_and_offsets_of_views(tile: str, generator: torch.Generator) -> None:
    """A 512 x 512 view of 1024 x 1024, and one that starts one element later."""
    with Failures() as failures:
        for dtype, offset in itertools.product(DTYPES, [0, 8, 1]):
            big = [filled(1024, 1024, dtype=dtype) for _ in range(2)]
            views = [x[256:768, 256 + offset : 768 + offset] for x in big]
            for view in views:
                view.copy_(integers(512, 512, dtype=dtype, generator=generator))
            a, b = (view.unsqueeze(0) for view in views)
            for x, y in [(a, b), (a.mT, b), (a, b.mT), (a.mT, b.mT)]:
                for name, plan in itertools.product(variants(tile), PLANS[:2]):
                    where = filled(1024, 1024, dtype=dtype, value=7.0)
                    out = where[256:768, 256 + offset : 768 + offset].unsqueeze(0)
                    what = f"{name} {dtype} offset {offset}, strides {x.stride()} {y.stride()} {plan}"
                    with failures.case(what):
                        if is_hopper(name) and offset == 1:
                            with pytest.raises(RuntimeError, match="a cannot be loaded by TMA"):
                                gemm(x, y, out, tile=name, **plan)
                            gemm(x, y, out, **plan)
                        else:
                            gemm(x, y, out, tile=name, **plan)
                        assert torch.equal(out, (x.double() @ y.double()).to(dtype))
                        out.fill_(7.0)
                        assert bool((where == 7).all()), "written beside the view"


@pytest.mark.parametrize(("m", "n", "k"), [(512, 1024, 147456), (1538, 256, 2048)])
@pytest.mark.parametrize("tile", WALKING_AND_CHEAPEST)
def test_report_14_long_k_of_weight_gradients(
    tile: str, m: int, n: int, k: int, generator: torch.Generator
) -> None:
    """Illegal accesses, of products whose operands are both outer-major; fp32 sums."""
    need_memory(6)
    a = integers(1, k, m, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
    b = integers(1, k, n, dtype=torch.bfloat16, generator=generator)
    if m % 8 and is_hopper(tile):
        a = embed(a, "cols")  # a pitch that TMA takes
    product = Product(a, b)
    old = integers(1, m, n, dtype=torch.float32, generator=generator)
    with Failures() as failures:
        for name, plan in itertools.product(variants(tile), PLANS[:4]):
            with failures.case(f"{name} {plan}"):
                product.run(torch.float32, old=old, tile=name, **plan)
                product.run(torch.bfloat16, tile=name, **plan)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_report_18_addresses_of_least_alignment(tile: str, generator: torch.Generator) -> None:
    """Everything 16 bytes behind a larger boundary, and the allocator's blocks small and many."""
    m, n, k = 200, 328, 1096

    def shifted(x: Tensor, elements: int) -> Tensor:
        buffer = filled(x.numel() + 512, dtype=x.dtype)
        view = buffer[elements : elements + x.numel()].view_as(x)
        view.copy_(x)
        assert view.data_ptr() % 256 == elements * x.element_size()
        return view

    small = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in range(1, 4000, 97)]
    with Failures() as failures:
        for shift, dtype in itertools.product([8, 16, 24, 64], DTYPES):
            a = shifted(integers(1, m, k, dtype=dtype, generator=generator), shift)
            b = shifted(integers(1, k, n, dtype=dtype, generator=generator), shift)
            residual = shifted(integers(1, m, n, dtype=dtype, generator=generator), 1)
            bias = shifted(integers(n, dtype=torch.float32, generator=generator), 1)
            product = Product(a, b, residual=residual, bias=bias)
            for name, plan in itertools.product(variants(tile), SPLIT_PLANS):
                out = shifted(filled(1, m, n, dtype=dtype), shift)
                with failures.case(f"{name} {dtype} at {2 * shift} bytes {plan}"):
                    gemm(a, b, out, bias=bias, residual=residual, tile=name, **plan)
                    assert torch.equal(out, product.value.to(dtype))
    del small


@pytest.mark.gpun(2)
@pytest.mark.parametrize("tile", WALKING_AND_CHEAPEST)
def test_reports_6_and_20_two_devices_in_one_thread(tile: str, seed: int) -> None:
    """A workspace of another device; kernels launched on the current device, on its current stream."""
    sets = []
    for device in ("cuda:0", "cuda:1"):
        generator = torch.Generator(device).manual_seed(seed)
        a = integers(1, 300, 2048, dtype=torch.bfloat16, generator=generator)
        b = integers(1, 2048, 520, dtype=torch.bfloat16, generator=generator)
        sets.append((device, a, b, (a.double() @ b.double()).float(), torch.cuda.Stream(device)))
    for device in ("cuda:0", "cuda:1"):
        torch.cuda.synchronize(device)
    for name, plan, current in itertools.product(variants(tile), SPLIT_PLANS, (0, 1)):
        outs = []
        with torch.cuda.device(current):
            for device, a, b, _, stream in sets * 3:
                out = torch.full((1, 300, 520), math.nan, device=device)
                torch.cuda.synchronize(device)
                with torch.cuda.stream(stream), torch.cuda.device(current):
                    gemm(a, b, out, tile=name, **plan)
                    assert torch.cuda.current_device() == current
                outs.append(out)
        for device in ("cuda:0", "cuda:1"):
            torch.cuda.synchronize(device)
        for out, (_, _, _, want, _) in zip(outs, sets * 3, strict=True):
            assert torch.equal(out, want), (name, plan, current)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_report_21_inputs_that_the_kernel_before_wrote(tile: str, generator: torch.Generator) -> None:
    """Launched before the last kernel has ended, it must not read before that. A hundred products, each of the last
    one's output: permutations of columns, so that what comes out is known to the bit. Old data are NaN.
    """
    m, n = 300, 520
    permutation = torch.randperm(n, device="cuda", generator=generator)
    b = torch.eye(n, dtype=torch.bfloat16, device="cuda")[permutation].unsqueeze(0).contiguous()
    start = integers(1, m, n, dtype=torch.bfloat16, generator=generator, most=100)
    want, order = start, torch.empty_like(permutation)
    order[permutation] = torch.arange(n, device="cuda")
    for _ in range(100):
        want = want[:, :, order]
    zero = torch.zeros(1, m, n, dtype=torch.bfloat16, device="cuda")
    with Failures() as failures:
        for name, plan, late in itertools.product(variants(tile), PLANS[:4], ["a", "residual", "accumulate"]):
            steps = filled(101, 1, m, n, dtype=torch.bfloat16)
            x = steps[0].copy_(start)
            for i in range(1, 101):
                if late == "a":
                    gemm(x, b, steps[i], tile=name, **plan)
                elif late == "residual":
                    gemm(zero, b, steps[i], residual=x, tile=name, **plan)
                else:
                    gemm(zero, b, x, accumulate=True, tile=name, **plan)
                    gemm(x, b, steps[i], tile=name, **plan)
                x = steps[i]
            with failures.case(f"{name} {plan} {late}"):
                assert torch.equal(x, start if late == "residual" else want)


@pytest.mark.parametrize("schedule", ["auto", "stream_k", "split_k", "hybrid_aligned"])
def test_report_23_nothing_to_multiply(schedule: str, generator: torch.Generator) -> None:
    """M, N, K of 0 in all combinations, batches too: zeros and what is added, or nothing at all."""
    make: dict[str, Any] = {"dtype": torch.bfloat16, "generator": generator}
    with Failures() as failures:
        for (batch, m, n, k), dtype in itertools.product(
            itertools.product((0, 2), (0, 130), (0, 72), (0, 64)), OUT_DTYPES
        ):
            a, b = integers(batch, m, k, **make), integers(batch, k, n, **make)
            bias, residual = integers(n, **make), integers(batch, m, n, **make)
            old = integers(batch, m, n, dtype=dtype, generator=generator)
            products = {
                "plain": Product(a, b),
                "bias, relu": Product(a, b, bias=bias, activation="relu"),
                "residual": Product(a, b, residual=residual, alpha=2.0),
                "gate": Product(a, b, gate=b.clone(), residual=residual),
            }
            for (what, product), start in itertools.product(products.items(), [None, old]):
                with failures.case(f"{(batch, m, n, k)} {dtype} {what} accumulate={start is not None}"):
                    product.run(dtype, old=start, schedule=schedule, splits=3)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_report_24_halves_that_cancel(tile: str, generator: torch.Generator) -> None:
    """Partials rounded to bfloat16 leave a thousandth of what cancels."""
    m, n, k = 264, 264, 4096
    half = randn(1, m, k // 2, dtype=torch.bfloat16, generator=generator).abs()
    a = torch.cat([half, -half], 2)
    b = randn(1, k // 2, n, dtype=torch.bfloat16, generator=generator).abs().repeat(1, 2, 1)
    scale = float((half.double() @ b[:, : k // 2].double()).abs().max())
    for name, splits in itertools.product(variants(tile), [2, 4, 8]):
        out = filled(1, m, n, dtype=torch.float32)
        gemm(a, b, out, tile=name, schedule="split_k", splits=splits)
        assert float(out.abs().max()) < 2e-5 * scale, (name, splits)


@hopper_only
def test_report_28_odd_numbers_of_tiles(generator: torch.Generator) -> None:
    """The second CTA of a cluster has no tile, no rows, no columns: it must still take part, and write nothing."""
    with Failures() as failures:
        for rows, columns, (layout_a, layout_b) in itertools.product([1, 2, 3], [1, 2, 3], LAYOUTS):
            for name in WALKING_NAMES:
                bm, bn = (int(x) for x in name.split("x")[:2])
                m, n, k = rows * bm - 3, columns * bn - 8 * (rows % 2), 712
                a = embed(integers(1, m, k, dtype=torch.bfloat16, generator=generator), layout_a)
                b = embed(integers(1, k, n, dtype=torch.bfloat16, generator=generator), layout_b)
                product = Product(a, b)
                for plan in PLANS[:3]:
                    with failures.case(f"{name} {(m, n, k)} {layout_a} x {layout_b} {plan}"):
                        product.run(torch.bfloat16, tile=name, **plan)
