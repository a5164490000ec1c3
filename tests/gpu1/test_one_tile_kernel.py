"""The Hopper kernel for products of less than a few waves: every tile, swapped and straight, in every cluster.

Epilogues, layouts and views of some of these tiles are in test_gemm_values.py and test_gemm_epilogue.py, sums of
products in test_pairs_kernel.py.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from gemm_checks import Failures, Product
from streamk_cases import (
    DTYPES,
    LAYOUTS,
    OUT_DTYPES,
    WHOLE_CLUSTERS,
    embed,
    gemm,
    hopper_only,
    integers,
    output,
    randn,
    takes,
)

from tpkernels.ops import _plans

pytestmark = [pytest.mark.gpu1, hopper_only]

# Rows of wgmma, and the first and the last of its columns, of each kernel; its rows are columns of a swapped tile.
KERNELS = [(64, 16, 128), (64, 144, 256), (128, 16, 128), (128, 144, 256), (192, 80, 192)]
NAMES = [
    tile + cluster
    for rows, first, last in KERNELS
    for columns in range(first, last + 1, 16)
    for tile in (f"{columns}x{rows}x64s", f"{rows}x{columns}x64w")
    for cluster in WHOLE_CLUSTERS
    if takes(tile, cluster)
]


def shape_of(name: str) -> tuple[int, int]:
    bm, bn = map(int, name.split("x")[:2])
    return bm, bn


@pytest.mark.parametrize("suffix", ["s", "w"])
@pytest.mark.parametrize(("rows", "first", "last"), KERNELS)
def test_every_tile_in_every_cluster(
    rows: int, first: int, last: int, suffix: str, seed: int, generator: torch.Generator
) -> None:
    """All layouts, types and epilogues in turn; rows and columns that end inside a tile, a unit, a cluster."""
    pick = random.Random(seed)
    layouts, outs = itertools.cycle(LAYOUTS), itertools.cycle(["rows", "rows_odd", "cols", "batch_inside"])
    sizes = itertools.cycle([(1, 64 * 11), (2, 72), (1, 8), (3, 64 * 5 + 24)])
    tiles = {f"{c}x{rows}x64s" if suffix == "s" else f"{rows}x{c}x64w" for c in range(first, last + 1, 16)}
    with Failures() as failures:
        for name in (name for name in NAMES if name.partition("/")[0] in tiles):
            bm, bn = shape_of(name)
            for batch, k in itertools.islice(sizes, 2):
                m, n = pick.randint(1, 3 * bm), pick.randint(1, 3 * bn)
                layout_a, layout_b = next(layouts)
                dtype, out_dtype = pick.choice(DTYPES), pick.choice(OUT_DTYPES)
                a = embed(integers(batch, m, k, dtype=dtype, generator=generator), layout_a)
                b = embed(integers(batch, k, n, dtype=dtype, generator=generator), layout_b)
                what = f"{name} {(batch, m, n, k)} {layout_a} x {layout_b} {dtype} to {out_dtype}"
                with failures.case(what):
                    Product(a, b).run(out_dtype, tile=name)
                    more = Product(
                        a, b, activation="relu", alpha=0.5,
                        bias=integers(n, dtype=out_dtype, generator=generator),
                        residual=integers(batch, m, n, dtype=dtype, generator=generator),
                    )  # fmt: skip
                    old = integers(batch, m, n, dtype=out_dtype, generator=generator)
                    more.run(out_dtype, next(outs), old=old, preact_layout="rows", tile=name)


@pytest.mark.parametrize("suffix", ["s", "w"])
def test_errors_of_long_sums(suffix: str, seed: int, generator: torch.Generator) -> None:
    """Random numbers: CTAs along K add in fp32, tile by tile no worse than one sum."""
    names = [name for name in NAMES if name.partition("/")[0].endswith(suffix)]
    with Failures() as failures:
        for name in random.Random(seed).sample(names, 150):
            m, n, k = 150, 392, 4104
            a = randn(1, m, k, dtype=torch.bfloat16, generator=generator)
            b = randn(1, n, k, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
            with failures.case(name):
                Product(a, b).run(torch.float32, exact=False, tile=name)


@pytest.mark.parametrize("suffix", ["s", "w"])
def test_more_tiles_than_run_at_once(suffix: str, seed: int, generator: torch.Generator) -> None:
    """Clusters walk from tile to tile where nothing but the product is stored, from one matrix of the batch into the
    next, in all layouts and types; with an epilogue they do not. Integers: to the bit."""
    pick, layouts = random.Random(seed), itertools.cycle(LAYOUTS)
    names = [name for name in NAMES if name.partition("/")[0].endswith(suffix)]
    with Failures() as failures:
        for name in pick.sample(names, 40):
            bm, bn = shape_of(name)
            wide = pick.choice([3, 7, 20])
            batch, m, n = 3, bm * wide - pick.randint(0, bm - 1), bn * (140 // wide) - pick.randint(0, bn - 1)
            k = pick.choice([8, 200, 64 * 9])
            layout_a, layout_b = next(layouts)
            dtype = pick.choice(DTYPES)
            a = embed(integers(batch, m, k, dtype=dtype, generator=generator), layout_a)
            b = embed(integers(batch, k, n, dtype=dtype, generator=generator), layout_b)
            with failures.case(f"{name} {(batch, m, n, k)} {layout_a} x {layout_b} {dtype}"):
                Product(a, b).run(dtype, tile=name)
                Product(a, b, activation="relu").run(dtype, tile=name)


def test_a_chain_of_launches_in_a_graph(generator: torch.Generator) -> None:
    """Each product reads what the one before wrote, and starts before that has ended: it has to wait. To the bit."""
    size, names = 256, random.Random(0).sample(NAMES, 40)
    factor = torch.eye(size, dtype=torch.bfloat16, device="cuda").roll(1, 0)[None].contiguous()
    start = integers(1, size, size, dtype=torch.bfloat16, generator=generator)
    buffers = [torch.full_like(start, float("nan")) for _ in range(3)]

    def chain() -> torch.Tensor:
        source = start
        for i, name in enumerate(names):
            gemm(source, factor, buffers[i % 3], tile=name)
            source = buffers[i % 3]
        return source

    want = start.roll(-len(names) % size, 2)
    assert torch.equal(chain(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = chain()
    for _ in range(50):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(last, want)


def test_bits_are_the_plans_alone(generator: torch.Generator) -> None:
    """A thousand repeats on two streams, beside a product that holds multiprocessors."""
    a = randn(1, 200, 2056, dtype=torch.bfloat16, generator=generator)
    b = randn(1, 2056, 520, dtype=torch.bfloat16, generator=generator)
    big = torch.randn(4096, 4096, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    for name in ["64x64x64s/2x1x4", "112x128x64s/2x2x2", "64x32x64w/1x1x8", "128x128x64w/2x4"]:
        first, again = (
            torch.full((1, 200, 520), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        gemm(a, b, first, tile=name)
        torch.cuda.synchronize()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(250):
            with torch.cuda.stream(side):
                torch.mm(big, big)
            gemm(a, b, again, tile=name)
            wrong += (again != first).sum()
            if i % 50 == 0:
                again.fill_(float("nan"))
        assert int(wrong) == 0, name


def test_what_a_whole_tile_does_not_take(generator: torch.Generator) -> None:
    a = integers(1, 64, 64, dtype=torch.bfloat16, generator=generator)
    out = output((1, 64, 64), torch.bfloat16).tensor
    op = torch.ops.tpkernels.streamk_gemm
    plain = dict(bias=None, preact=None, activation="none", accumulate=False, tile="64x64x64s")
    for plan in [{"schedule": "stream_k"}, {"schedule": "split_k", "splits": 2}, {"workers": 3}]:
        with pytest.raises(
            RuntimeError, match=r"tile '64x64x64s' is of the kernel whose CTAs take whole tiles, one each, so"
        ):
            op(a=a, b=a, out=out, **plain, **plan)
    with pytest.raises(RuntimeError, match="takes all multiprocessors of a device"):
        op(a=a, b=a, out=out, **plain, multiprocessors=60)
    many = a.expand(70_000, 64, 64)
    wide = torch.empty(70_000, 64, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(
        RuntimeError, match="no more than 65535 products in a batch, but it is asked for 70000"
    ):
        op(a=many, b=many, out=wide, **plain)
    gemm(many, many, wide)  # unnamed, another tile serves
    assert torch.equal(wide[69_999], a[0] @ a[0])
    with pytest.raises(RuntimeError, match="tile '64x64x64s' takes no gate"):
        op(a=a, b=a, out=out, gate=a, **plain)


def test_auto_takes_it_for_small_products(generator: torch.Generator) -> None:
    """What is reported is what ran: one CTA a tile, in a grid of whole clusters."""
    for m, n, k in [(512, 512, 512), (100, 1000, 700), (1, 8192, 1024)]:
        a = integers(1, m, k, dtype=torch.bfloat16, generator=generator)
        b = integers(1, n, k, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
        machine = _plans.machine_of("cuda", a.device)
        chosen = _plans.plan(_plans.Product(1, m, n, k), machine)
        assert chosen["suffix"], chosen
        Product(a, b).run(torch.bfloat16)
