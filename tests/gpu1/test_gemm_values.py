"""Plain products on the GPU, right to the bit: layouts, types, tiles, clusters, schedules, ragged shapes, batches.

Tiles of the Hopper kernel and of the portable one go through the same tests; "" is what the device takes by itself.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from gemm_checks import Failures, Product, embed, gemm, integers, output
from streamk_cases import (
    ANY_TILE,
    ANY_WALKING_TILE,
    DTYPES,
    FAST,
    GATED_TILES,
    HOPPER_AND_CHEAPEST,
    HOPPER_NAMES,
    HOPPER_TILES,
    LAYOUTS,
    OUT_DTYPES,
    PLANS,
    SCHEDULES,
    SLOW,
    WALKING_AND_CHEAPEST,
    WHOLE_TILES,
    filled,
    hopper_only,
    is_hopper,
    variants,
)

pytestmark = pytest.mark.gpu1

SHAPES = [(1, 300, 392, 1000), (2, 129, 257, 520), (1, 65, 127, 4096), (1, 520, 264, 585)]


@pytest.mark.parametrize(("layout_a", "layout_b"), LAYOUTS, ids=["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("tile", ANY_TILE)
def test_layouts_types_clusters_schedules(
    tile: str, layout_a: str, layout_b: str, generator: torch.Generator
) -> None:
    """All of them with each other."""
    first = LAYOUTS.index((layout_a, layout_b))
    with Failures() as failures:
        for i, dtype in enumerate(DTYPES):
            batch, m, n, k = SHAPES[(first + i) % len(SHAPES)]
            a = embed(integers(batch, m, k, dtype=dtype, generator=generator), layout_a)
            b = embed(integers(batch, k, n, dtype=dtype, generator=generator), layout_b)
            product = Product(a, b)
            for name, schedule, out_dtype in itertools.product(variants(tile), SCHEDULES, OUT_DTYPES):
                with failures.case(f"{name} {schedule} {dtype} to {out_dtype} {(batch, m, n, k)}"):
                    product.run(out_dtype, tile=name, schedule=schedule, splits=3)


EXTENTS = [1, 7, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300]
DEPTHS = [1, 7, 8, 63, 64, 65, 72, 127, 128, 129, 257, 520, 1000, 65 * 64]


@pytest.mark.parametrize("tile", ANY_TILE)
def test_ragged_shapes(tile: str, seed: int, generator: torch.Generator) -> None:
    """Each M with each N, three times; K, layout, cluster, plan and types in turn."""
    pick = random.Random(seed)
    depths, layouts = itertools.cycle(DEPTHS), itertools.cycle(LAYOUTS)
    outs = itertools.cycle(["rows", "rows_odd", "rows", "cols", "rows"])
    with Failures() as failures:
        for m, n, name in itertools.product(EXTENTS, EXTENTS, (variants(tile) * 3)[:3]):
            k, (layout_a, layout_b), dtype = next(depths), next(layouts), pick.choice(DTYPES)
            plan, out_layout, out_dtype = pick.choice(PLANS), next(outs), pick.choice(OUT_DTYPES)
            a = embed(integers(1, m, k, dtype=dtype, generator=generator), layout_a)
            b = embed(integers(1, k, n, dtype=dtype, generator=generator), layout_b)
            what = f"{name} {(m, n, k)} {layout_a} x {layout_b} {dtype} to {out_dtype} {out_layout} {plan}"
            with failures.case(what):
                Product(a, b).run(out_dtype, out_layout, tile=name, **plan)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_every_depth(tile: str, generator: torch.Generator) -> None:
    """K from nothing to 65 iterations: fewer iterations than stages, as many, one more; each with each cluster."""
    m, n = 136, 264
    long_a = integers(1, m, 4161, dtype=torch.bfloat16, generator=generator)
    long_b = integers(1, 4161, n, dtype=torch.bfloat16, generator=generator)
    depths = [0, *range(1, 66, 7), 8, 63, 64, 65, *range(72, 900, 56), 1000, 4096, 4160, 4161]
    with Failures() as failures:
        for k, (layout_a, layout_b) in zip(depths, itertools.cycle(LAYOUTS), strict=False):
            product = Product(embed(long_a[:, :, :k], layout_a), embed(long_b[:, :k], layout_b))
            names = [""] if k == 0 and is_hopper(tile) else variants(tile)
            for name, plan in itertools.product(names, PLANS[:3]):
                with failures.case(f"{name} K = {k} {layout_a} x {layout_b} {plan}"):
                    product.run(torch.float32, tile=name, **plan)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_views_of_larger_matrices(tile: str, generator: torch.Generator) -> None:
    """Offsets and pitches that 16-byte loads take; NaN all around."""
    with Failures() as failures:
        for dtype, (m, n, k) in itertools.product(DTYPES, [(120, 200, 264), (256, 256, 1024), (33, 9, 700)]):
            rows = filled(3, m + 40, k + 72, dtype=dtype)
            columns = filled(3, k + 24, n + 56 - n % 8, dtype=dtype)
            a, b = rows[:2, 17 : 17 + m, 8 : 8 + k], columns[1:, 5 : 5 + k, 16 : 16 + n]
            a.copy_(integers(2, m, k, dtype=dtype, generator=generator))
            b.copy_(integers(2, k, n, dtype=dtype, generator=generator))
            pitch_is_right = rows.stride(1) % 8 == 0
            for name, plan in itertools.product(variants(tile), PLANS[:4]):
                with failures.case(f"{name} {(m, n, k)} {dtype} {plan}"):
                    if is_hopper(name) and not pitch_is_right:
                        with pytest.raises(RuntimeError, match="a cannot be loaded by TMA"):
                            gemm(a, b, output((2, m, n), dtype).tensor, tile=name, **plan)
                    else:
                        Product(a, b).run(dtype, tile=name, **plan)


@pytest.mark.parametrize("layout_b", FAST + SLOW)
@pytest.mark.parametrize("layout_a", FAST + SLOW)
def test_strides_that_tma_cannot_take_are_no_error(
    layout_a: str, layout_b: str, generator: torch.Generator
) -> None:
    """Another kernel takes them; a Hopper tile that is named says why it cannot."""
    slow = layout_a in SLOW or layout_b in SLOW
    with Failures() as failures:
        for dtype, (m, n, k) in zip(
            itertools.cycle(DTYPES), [(5, 7, 3), (129, 257, 100), (300, 200, 1031), (8, 8, 64)], strict=False
        ):
            a = embed(integers(2, m, k, dtype=dtype, generator=generator), layout_a)
            b = embed(integers(2, k, n, dtype=dtype, generator=generator), layout_b)
            for plan in PLANS:
                with failures.case(f"{(m, n, k)} {dtype} {plan}"):
                    Product(a, b).run(torch.float32, **plan)
            if slow and torch.cuda.get_device_capability() == (9, 0):
                out = filled(2, m, n, dtype=torch.float32)
                which = "a" if layout_a in SLOW else "b"
                with (
                    failures.case(f"{(m, n, k)} with a named tile"),
                    pytest.raises(
                        RuntimeError, match=f"cannot be used here: {which} cannot be loaded by TMA"
                    ),
                ):
                    gemm(a, b, out, tile="128x256x64")
                assert bool(out.isnan().all())


@pytest.mark.parametrize("tile", HOPPER_AND_CHEAPEST)
def test_batches(tile: str, generator: torch.Generator) -> None:
    """Three matrices; one of them for all, on either side; batches inside rows; an output whose batches are inside."""
    batch, m, n, k = 3, 150, 280, 600
    make: dict[str, Any] = {"dtype": torch.bfloat16, "generator": generator}
    with Failures() as failures:
        for layout_a, layout_b in LAYOUTS:
            a, b = (
                embed(integers(batch, m, k, **make), layout_a),
                embed(integers(batch, k, n, **make), layout_b),
            )
            inside = integers(m, batch, k, **make).transpose(0, 1)
            products = {
                "own": Product(a, b),
                "one b": Product(a, b[:1].expand(batch, k, n)),
                "one a": Product(a[1:2].expand(batch, m, k), b),
                "one of each": Product(a[:1].expand(batch, m, k), b[2:].expand(batch, k, n)),
                "batches inside rows": Product(inside, b),
            }
            for (what, product), name, plan in itertools.product(products.items(), variants(tile), PLANS[:5]):
                with failures.case(f"{what}, {name} {layout_a} x {layout_b} {plan}"):
                    product.run(torch.bfloat16, tile=name, **plan)
                    product.run(torch.float32, "batch_inside", tile=name, **plan)


@pytest.mark.parametrize("tile", WALKING_AND_CHEAPEST)
def test_seventy_thousand_batches(tile: str, generator: torch.Generator) -> None:
    """More than a grid's second or third dimension takes."""
    batch = 70_000
    a = integers(batch, 1, 8, dtype=torch.bfloat16, generator=generator)
    b = integers(batch, 2, 8, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
    one = integers(1, 8, 2, dtype=torch.bfloat16, generator=generator).expand(batch, 8, 2)
    wide = integers(batch, 8, 8, dtype=torch.bfloat16, generator=generator)
    with Failures() as failures:
        for name in variants(tile):
            with failures.case(name):
                Product(a, b).run(torch.float32, tile=name)
                Product(a, wide).run(torch.bfloat16, "batch_inside", tile=name)
        with failures.case("one b, of rows of two"):
            Product(a, one).run(torch.float32)


@pytest.mark.parametrize("tile", ANY_WALKING_TILE)
def test_more_tickets_than_clusters(tile: str, generator: torch.Generator) -> None:
    """Any number of workers finishes, with the bits that are right: fewer than fit, odd numbers, far more."""
    with Failures() as failures:
        for m, n, k in [(300, 520, 1000), (64, 64, 8192), (40, 3000, 2056), (1024, 900, 192)]:
            a = integers(1, m, k, dtype=torch.bfloat16, generator=generator)
            b = integers(1, n, k, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
            product = Product(a, b)
            for name, schedule, workers in itertools.product(
                variants(tile),
                ["data_parallel", "stream_k", "hybrid_last", "hybrid_aligned"],
                [1, 2, 7, 131, 5000],
            ):
                with failures.case(f"{name} {(m, n, k)} {schedule} workers={workers}"):
                    product.run(torch.float32, tile=name, schedule=schedule, workers=workers, splits=3)
            for name, splits in itertools.product(variants(tile), [2, 3, 16]):
                with failures.case(f"{name} {(m, n, k)} split_k splits={splits}"):
                    product.run(torch.float32, tile=name, schedule="split_k", splits=splits)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_infinities_and_nan_go_where_they_belong(tile: str, generator: torch.Generator) -> None:
    """One in a operand reaches its row or column and nothing else."""
    m, n, k = 200, 300, 1000
    for name, plan in itertools.product(variants(tile), PLANS[:3]):
        a = integers(1, m, k, dtype=torch.bfloat16, generator=generator)
        b = embed(integers(1, k, n, dtype=torch.bfloat16, generator=generator), "rows")
        clean = Product(a.clone(), b).run(torch.float32, tile=name, **plan)
        a[0, 77, 999] = float("nan")
        a[0, 130, 0] = float("inf")
        b[0, 0] = 1.0
        want = a.double() @ b.double()
        out = output((1, m, n), torch.float32)
        gemm(a, b, out.tensor, tile=name, **plan)
        assert torch.equal(out.tensor.isnan(), want.isnan()), (name, plan)
        finite = want.isfinite()
        assert torch.equal(out.tensor[finite].double(), want[finite]), (name, plan)
        assert bool((out.tensor[0, 130] == float("inf")).all()), (name, plan)
        assert not bool(clean.isnan().any())


@hopper_only
def test_names_of_tiles() -> None:
    """What a name means, and what a name that cannot be used answers."""
    a = torch.ones(1, 64, 64, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    for tile in [*HOPPER_TILES, *WHOLE_TILES, *HOPPER_NAMES]:
        gemm(a, a, out.fill_(0), tile=tile)
        assert bool((out == 64).all()), tile
    for tile in [
        "128x256x64/2x2", "128x256x64/", "128x256", "128x256x64/1x4", "256x256x64", "128x256x64/1x1x2", "128x256x64s",
        "64x128x64", "16x128x64s/1x4", "64x128x64s/1x1x3", "64x128x64s/1x1x1", "64x256x64s", "8x64x64s", "272x64x64s",
        "64x24x64w", "256x128x64w", "192x192x64w/1x1x2", "48x192x64s",
    ]:  # fmt: skip
        with pytest.raises(RuntimeError, match="tile must be"):
            gemm(a, a, out, tile=tile)
    for tile in [*HOPPER_TILES, *WHOLE_TILES]:
        if tile not in GATED_TILES:
            with pytest.raises(RuntimeError, match="takes no gate"):
                gemm(a, a, out, tile=tile, gate=a)
    with pytest.raises(RuntimeError, match="no cluster of tile '128x256x64/2x1' fits"):
        gemm(a, a, out, tile="128x256x64/2x1", multiprocessors=1)
    with pytest.raises(RuntimeError, match="cannot be used here: K is 0"):
        gemm(a[:, :, :0], a[:, :0], out, tile="128x256x64")
