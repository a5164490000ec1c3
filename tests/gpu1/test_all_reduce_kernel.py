"""The kernel of small all-reduces on virtual ranks. Whole calls: test_fused_one_gpu.py and tests/gpun."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from small_ranks import BF16, F16, F32, OPS, Ranks, Tensor, draw, summed
from streamk_cases import hopper_only, randn

from tpkernels.comm import choice, small

pytestmark = [pytest.mark.gpu1, hopper_only]

# Odd numbers of columns and bytes, less than a unit, units that cross rows, several rounds of a thread.
SHAPES = [(1, 1), (1, 8), (3, 5), (7, 333), (16, 1024), (129, 255), (64, 4096)]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("way", small.SUM_WAYS)
def test_bitwise_the_rank_ordered_sum(
    way: str, dtype: torch.dtype, world: int, generator: torch.Generator
) -> None:
    ranks = Ranks(world)
    ranks.poison()
    for i, shape in enumerate(SHAPES):
        partials = draw(world, shape, dtype, generator)
        if way == small.PACKETS and 2 * world * partials[0].nbytes > small.PACKET_BYTES:
            continue
        bias = randn(shape[1], dtype=(F32, dtype, F16)[i % 3], generator=generator) if i % 2 else None
        residual = randn(*shape, dtype=dtype, generator=generator) if i % 3 else None
        want = summed(partials, bias, residual)
        for ctas in (0, 1, 3):
            outs = ranks.reduce(way, partials, bias=bias, residual=residual, ctas=ctas)
            for rank, out in enumerate(outs):
                assert torch.equal(out, want), f"rank {rank} of {world}, {shape}, {ctas} CTAs"
        exact = sum(partial.double() for partial in partials)
        exact = exact + sum(term.double() for term in (bias, residual) if term is not None)
        error = (want.double() - exact).abs()
        size = sum(partial.double().abs() for partial in partials) + exact.abs() + 1
        assert bool((error <= size * 2.0 ** (-7 if dtype == BF16 else -10)).all())


@pytest.mark.parametrize("way, world", [(small.ONE_SHOT, 2), (small.TWO_SHOT, 4)])
def test_the_largest(way: str, world: int, generator: torch.Generator) -> None:
    """As many bytes as go this way."""
    most = small.MOST_BYTES[choice.SUM]
    ranks = Ranks(world, most_bytes=most)
    partials = draw(world, (most // (2 * 4096), 4096), BF16, generator)
    assert partials[0].nbytes == most
    want = summed(partials, None, None)
    for rank, out in enumerate(ranks.reduce(way, partials)):
        assert torch.equal(out, want), f"rank {rank} of {world}"


@pytest.mark.parametrize("way", small.SUM_WAYS)
def test_tensors_that_begin_anywhere(way: str, generator: torch.Generator) -> None:
    """Addresses that are no multiples of 16 bytes, in memory that nobody may touch around them."""
    ranks, shape = Ranks(2), (5, 77)
    for offset in (1, 3, 8):
        spaces = [torch.full((1000,), math.nan, dtype=BF16, device="cuda") for _ in range(6)]
        views = [space[offset : offset + 385].view(shape) for space in spaces]
        for view in views[:4]:
            view.copy_(randn(*shape, dtype=BF16, generator=generator))
        partials, residual, outs = views[:2], views[2], views[4:]
        ranks.run(lambda r, p=partials, o=outs, a=residual: ranks.launch(r, way, p[r], o[r], residual=a))
        for out, space in zip(outs, spaces[4:], strict=True):
            assert torch.equal(out, summed(partials, residual)), offset
            assert space.isnan().sum() == 1000 - 385, "beyond the output"


@pytest.mark.parametrize("world", [2, 4])
def test_calls_in_turn(world: int, generator: torch.Generator) -> None:
    """Ways, sizes and numbers of CTAs change from call to call; ranks start in any order; nothing is waited for."""
    ranks, together = Ranks(world), random.Random(generator.initial_seed())
    torch.cuda._sleep(1)  # loaded at its first use, which waits for running kernels
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    cases = []
    for shape in SHAPES:
        partials = draw(world, shape, BF16, generator)
        cases.append((partials, summed(partials)))
    torch.cuda.synchronize()
    for _ in range(40):
        picks = [
            (together.choice(cases), together.choice(small.SUM_WAYS), together.randrange(1, 9))
            for _ in range(25)
        ]
        outs = [[torch.full_like(p, math.nan) for p in partials] for (partials, _), _, _ in picks]
        torch.cuda.synchronize()
        for i, ((partials, _), way, ctas) in enumerate(picks):
            if way == small.PACKETS and 2 * world * partials[0].nbytes > small.PACKET_BYTES:
                way = small.TWO_SHOT
            for rank in together.sample(range(world), world):
                with torch.cuda.stream(ranks.streams[rank]):
                    if together.random() < 0.1:
                        torch.cuda._sleep(together.randrange(200_000))
                    ranks.launch(rank, way, partials[rank], outs[i][rank], ctas=ctas)
        torch.cuda.synchronize()
        for ((_, want), _, _), some in zip(picks, outs, strict=True):
            for out in some:
                wrong += (out.view(torch.int16) != want.view(torch.int16)).any()
    assert not wrong
    assert [int(m[:4].view(torch.int32)) for m in ranks.memory] == [1000] * world, "epochs"


def test_epochs_begin_anew(generator: torch.Generator) -> None:
    """After 2^32 - 1 calls; 0 is left out."""
    ranks, partials = Ranks(2), draw(2, (16, 1024), BF16, generator)
    for memory in ranks.memory:
        memory[:4].view(torch.int32).fill_(-5)
    for way in [*small.SUM_WAYS, *small.SUM_WAYS, *small.SUM_WAYS]:
        for out in ranks.reduce(way, partials):
            assert torch.equal(out, summed(partials)), way
    assert int(ranks.memory[1][:4].view(torch.int32)) == 6


@pytest.mark.parametrize("way", small.SUM_WAYS)
def test_graphs(way: str, generator: torch.Generator) -> None:
    """1,000 replays of graphs with an odd number of calls, with new data, between eager calls of other sizes."""
    world = 3
    ranks = Ranks(world)
    partials = [draw(world, shape, BF16, generator) for shape in ((4, 520), (32, 1024), (1, 24))]
    others = draw(world, (61, 333), BF16, generator)
    outs = [[torch.full_like(x, math.nan) for x in some] for some in partials]
    ranks.reduce(way, others)
    graphs = []
    for rank in range(world):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=ranks.streams[rank]):
            for some, out in zip(partials, outs, strict=True):
                ranks.launch(rank, way, some[rank], out[rank])
    together = random.Random(generator.initial_seed())
    for turn in range(100):
        for some in partials:
            for x in some:
                x.copy_(randn(*x.shape, dtype=BF16, generator=generator))
        for out in [x for some in outs for x in some]:
            out.fill_(math.nan)
        torch.cuda.synchronize()
        for _ in range(10):
            for rank in together.sample(range(world), world):
                with torch.cuda.stream(ranks.streams[rank]):
                    graphs[rank].replay()
        torch.cuda.synchronize()
        for some, out in zip(partials, outs, strict=True):
            assert all(torch.equal(x, summed(some)) for x in out), turn
        if turn % 3 == 0:
            other = together.choice(small.SUM_WAYS)
            assert all(torch.equal(x, summed(others)) for x in ranks.reduce(other, others)), turn


def test_behind_a_product(generator: torch.Generator) -> None:
    """It starts early, and reads the partial when it is there: large products, one after the other."""
    world, k = 2, 4096
    ranks = Ranks(world)
    as_ = [draw(world, (64, k), BF16, generator) for _ in range(5)]
    b = randn(k, 2048, dtype=BF16, generator=generator)
    wants = [summed([a @ b for a in some]) for some in as_]
    partials, outs = ([draw(world, (64, 2048), BF16, generator) for _ in as_] for _ in range(2))
    ranks.run(
        lambda rank: torch.mm(as_[0][rank], b, out=partials[0][rank])
    )  # cuBLAS takes memory for each stream

    def call(rank: int, way: str) -> None:
        for some, partial, out in zip(as_, partials, outs, strict=True):
            torch.mm(some[rank], b, out=partial[rank])
            ranks.launch(rank, way, partial[rank], out[rank])

    for turn in range(40):
        for x in [x for some in (*partials, *outs) for x in some]:
            x.fill_(math.nan)
        ranks.run(lambda rank, way=(small.ONE_SHOT, small.TWO_SHOT)[turn % 2]: call(rank, way))
        for some, want in zip(outs, wants, strict=True):
            assert all(torch.equal(out, want) for out in some), turn


LATE = """
import torch, tpkernels
memory = [torch.zeros(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
addresses = [m.data_ptr() for m in memory]
ops = torch.ops.tpkernels
for rank in range(2): ops.fused_warm_up(0, rank, addresses)
partial = torch.ones(64, 512, device="cuda").bfloat16()
out = torch.empty_like(partial)
ops.fused_all_reduce(partial, None, None, out, {way!r}, 0, addresses, memory[0].numel(), 0.5, 2)
try:
    torch.cuda.synchronize()
except RuntimeError:
    print(ops.comm_fault())
"""


@pytest.mark.parametrize(
    "way,said",
    [
        ("packets", r"a packet of an all-reduce, packet "),
        ("one-shot", r"the partial of an all-reduce, word "),
        ("two-shot", r"the partial of an all-reduce, word "),
    ],
)
def test_a_rank_that_does_not_come_is_named(way: str, said: str) -> None:
    code = LATE.format(way=way)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert f"waited 500 ms for {said}" in run.stdout, run.stdout + run.stderr
    assert "its flag is 0, expected 1. Rank 1, which sends it, did not." in run.stdout


def test_bad_calls_are_refused() -> None:
    ranks, x = Ranks(2), torch.ones(4, 8, dtype=BF16, device="cuda")
    size = ranks.memory[0].numel()

    def call(
        partial: Tensor = x,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor = x,
        way: str = "packets",
        rank: int = 0,
        addresses: Sequence[int] = tuple(ranks.addresses),
        size: int = size,
        ctas: int = 1,
    ) -> None:
        OPS.fused_all_reduce(partial, bias, residual, out, way, rank, list(addresses), size, 1.0, ctas)

    for options, said in [
        ({"way": "three-shot"}, "way must be one of packets, one-shot or two-shot, but it is 'three-shot'"),
        ({"rank": 2}, r"rank must lie in \[0, 2\), but it is 2"),
        ({"addresses": ranks.addresses[:1]}, "addresses must name 2 to 16 ranks, but it names 1"),
        ({"addresses": [ranks.addresses[0], 8]}, "entry 1 is 8"),
        ({"ctas": 65}, r"ctas must lie in \[0, 64\]"),
        ({"size": 1 << 20}, "do not fit a buffer of 1048576 bytes by way of packets"),
        ({"partial": x.double(), "out": x.double()}, "partial must be bfloat16, float16 or float32"),
        ({"partial": x.t()}, "partial must be a contiguous CUDA tensor"),
        ({"partial": x[:0], "out": x[:0]}, "partial must have elements"),
        ({"out": x.float()}, "out must be contiguous and of partial's dtype"),
        ({"residual": x[:2]}, r"residual must be a CUDA tensor of shape \[4, 8\]"),
        ({"bias": x[0, :4]}, r"bias must be a contiguous CUDA tensor \[N\]"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            call(**options)
    torch.cuda.synchronize()
    assert not OPS.comm_fault()
    assert int(ranks.memory[0][:4].view(torch.int32)) == 0, "nobody has begun a call"
