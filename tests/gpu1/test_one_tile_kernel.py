"""The Hopper kernel for products of less than a few waves: every height and width of its tiles, in every cluster.

Epilogues, layouts and views of some of these tiles are in test_gemm_values.py and test_gemm_epilogue.py, sums of
products in test_pairs_kernel.py.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from gemm_checks import Failures, Product
from streamk_cases import DTYPES, LAYOUTS, OUT_DTYPES, embed, gemm, hopper_only, integers, output, randn

from tpkernels.ops import _plans

pytestmark = [pytest.mark.gpu1, hopper_only]

HEIGHTS = range(16, 129, 16)
NAMES = _plans.SWAPPED_TILES


def names_of(rows: int) -> list[str]:
    return [name for name in NAMES if name.startswith(f"{rows}x")]


@pytest.mark.parametrize("rows", HEIGHTS)
def test_every_tile_in_every_cluster(rows: int, seed: int, generator: torch.Generator) -> None:
    """All layouts, types and epilogues in turn; rows and columns that end inside a tile, a unit, a cluster."""
    pick = random.Random(seed)
    layouts, outs = itertools.cycle(LAYOUTS), itertools.cycle(["rows", "rows_odd", "cols", "batch_inside"])
    with Failures() as failures:
        for name in names_of(rows):
            for batch, k in [(1, 64 * 11), (2, 72), (1, 8), (3, 64 * 5 + 24)]:
                m, n = pick.randint(1, 3 * rows), pick.randint(1, 500)
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


@pytest.mark.parametrize("columns", [64, 128])
def test_errors_of_long_sums(columns: int, generator: torch.Generator) -> None:
    """Random numbers: CTAs along K add in fp32, tile by tile no worse than one sum."""
    with Failures() as failures:
        for name in [name for name in NAMES if f"x{columns}x64s" in name]:
            m, n, k = 150, 392, 4104
            a = randn(1, m, k, dtype=torch.bfloat16, generator=generator)
            b = randn(1, n, k, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
            with failures.case(name):
                Product(a, b).run(torch.float32, exact=False, tile=name)


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
    for name in ["64x64x64s/2x1x4", "112x128x64s/2x2x2", "32x64x64s/1x1x8", "128x128x64s/4x2"]:
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


def test_what_a_swapped_tile_does_not_take(generator: torch.Generator) -> None:
    a = integers(1, 64, 64, dtype=torch.bfloat16, generator=generator)
    out = output((1, 64, 64), torch.bfloat16).tensor
    op = torch.ops.tpkernels.streamk_gemm
    plain = dict(bias=None, preact=None, activation="none", accumulate=False, tile="64x64x64s")
    for plan in [{"schedule": "stream_k"}, {"schedule": "split_k", "splits": 2}, {"workers": 3}]:
        with pytest.raises(
            RuntimeError, match=r"tile '64x64x64s' is swapped: its CTAs take whole tiles, one each, so"
        ):
            op(a=a, b=a, out=out, **plain, **plan)
    with pytest.raises(RuntimeError, match="it takes all multiprocessors of a device"):
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
        assert chosen["swapped"], chosen
        Product(a, b).run(torch.bfloat16)
