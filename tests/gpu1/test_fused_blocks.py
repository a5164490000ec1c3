"""fused_block_matmul: factors in blocks on all ranks of a grid, one launch a rank; virtual ranks on one GPU."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from streamk_cases import HOPPER_TILES, hopper_only
from virtual_ranks import Ranks, filled, pitched, whole

from tpkernels.grids import (
    Method,
    grid_2d,
    grid_2p5d,
    grid_spatial_temporal,
    spatial_temporal,
    stationary,
    summa,
)
from tpkernels.grids.method import Pass
from tpkernels.grids.one_launch import owners
from tpkernels.testing import assert_close_tiles

Tensor = torch.Tensor
pytestmark = [pytest.mark.gpu1, hopper_only]

METHODS = [
    summa(grid_2d(4)),
    summa(grid_2d(9)),
    summa(grid_2p5d(8, 2)),
    spatial_temporal(grid_spatial_temporal(4)),
]
BUFFER = 96 << 20


def tables(method: Method, kind: Pass) -> tuple[list[int], list[int]]:
    still = stationary(method)
    assert still is not None
    left, right = owners(still, kind)
    return [r for some in left for r in some], [r for some in right for r in some]


def sums_rows(kind: Pass) -> tuple[bool, bool]:
    return kind is Pass.WEIGHT_GRAD, kind is not Pass.FORWARD


def expected(
    lefts: list[Tensor], rights: list[Tensor], of: tuple[list[int], list[int]], turned: Any
) -> list[Tensor]:
    steps = len(of[0]) // len(lefts)
    found = []
    for rank in range(len(lefts)):
        total: Any = 0
        for left, right in zip(*(t[rank * steps : (rank + 1) * steps] for t in of), strict=True):
            a, b = lefts[left].double(), rights[right].double()
            total = total + (a.t() if turned[0] else a) @ (b if turned[1] else b.t())
        found.append(total)
    return found


def factors(
    world: int,
    m: int,
    n: int,
    k: int,
    turned: tuple[bool, bool],
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    shapes = ((k, m) if turned[0] else (m, k)), ((k, n) if turned[1] else (n, k))
    lefts, rights = (
        [pitched(whole(*shape, generator=generator, dtype=dtype)) for _ in range(world)] for shape in shapes
    )
    return lefts, rights


@pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.name)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_values(method: Method, kind: Pass, seed: int, generator: torch.Generator) -> None:
    """Small and large, odd sizes, either side the larger; three calls by graphs; memory full of NaN before each."""
    draw = random.Random(seed)
    world, turned, of = method.grid.world, sums_rows(kind), tables(method, kind)
    ranks = Ranks(world, BUFFER)
    sizes = [(64, 72, 40), (700, 300, 200), (264, 2100, 328), (2300, 136, 520)]
    for m, n, k in sizes:
        dtype = draw.choice([torch.bfloat16, torch.float16])
        out_dtype = draw.choice([dtype, torch.float32])
        lefts, rights = factors(world, m, n, k, turned, generator, dtype)
        bias = whole(1, n, generator=generator, dtype=dtype)[0] if kind is Pass.FORWARD else None
        ranks.poison()
        order = draw.sample(range(world), world)
        outs = ranks.blocks(
            lefts, rights, of, sums_rows=turned, bias=bias, out_dtype=out_dtype, times=3, order=order
        )
        for out, want in zip(outs, expected(lefts, rights, of, turned), strict=True):
            exact = want if bias is None else want + bias.double()
            assert torch.equal(out, exact.to(out_dtype)), (m, n, k, dtype)


@pytest.mark.parametrize("tile", [*HOPPER_TILES, "128x256x64/1x1", "128x256x64/1x2"])
@pytest.mark.parametrize("schedule", ["data_parallel", "hybrid_aligned", "stream_k"])
def test_plans(tile: str, schedule: str, generator: torch.Generator) -> None:
    """Every tile, in schedules that begin at any depth of K, with several blocks a factor."""
    method, kind, dtype = METHODS[0], Pass.INPUT_GRAD, torch.bfloat16
    turned, of = sums_rows(kind), tables(method, kind)
    ranks = Ranks(4, BUFFER)
    lefts, rights = factors(4, 520, 4200, 1096, turned, generator, dtype)
    ranks.poison()
    outs = ranks.blocks(lefts, rights, of, sums_rows=turned, tile=tile, schedule=schedule, times=2)
    for out, want in zip(outs, expected(lefts, rights, of, turned), strict=True):
        assert_close_tiles(out, want, dtype, k=2 * 1096)


def test_calls_in_turn(seed: int, generator: torch.Generator) -> None:
    """Passes and sizes in any order, each into memory that the one before has used; the same bits each time."""
    draw, ranks = random.Random(seed), Ranks(4, BUFFER)
    made: dict[Any, list[Tensor]] = {}
    given: dict[Any, Any] = {}
    for _ in range(60):
        kind, (m, n, k) = (
            draw.choice(list(Pass)),
            draw.choice([(130, 514, 72), (512, 256, 1000), (33, 40, 8)]),
        )
        key, turned = (kind, m, n, k), sums_rows(kind)
        of = tables(METHODS[0], kind)
        if key not in given:
            given[key] = factors(4, m, n, k, turned, generator, torch.bfloat16)
        outs = ranks.blocks(*given[key], of, sums_rows=turned)
        if key not in made:
            made[key] = outs
            for out, want in zip(outs, expected(*given[key], of, turned), strict=True):
                assert torch.equal(out, want.bfloat16())
        assert all(map(torch.equal, outs, made[key]))


def test_refusals() -> None:
    ranks = Ranks(2, 1 << 20)
    x = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
    out = filled(16, 16, dtype=torch.bfloat16)

    def call(
        *, left: Tensor = x, right: Tensor = x, of: Any = ([0, 1, 0, 1], [1, 0, 1, 0]), out: Tensor = out
    ) -> None:
        torch.ops.tpkernels.fused_block_matmul(
            left, right, False, False, *of, None, out, 0, ranks.addresses, 20.0, "auto", "", 8
        )

    with pytest.raises(RuntimeError, match="must name a rank for each of 1 to 4 steps"):
        call(of=([0] * 3, [1] * 3))
    with pytest.raises(RuntimeError, match="must name ranks below 2, but they name 2"):
        call(of=([0, 1, 0, 2], [1, 0, 1, 0]))
    with pytest.raises(RuntimeError, match="one length to sum over, and one dtype, but they have 16 and 8"):
        call(right=x[:, :8])
    with pytest.raises(RuntimeError, match=r"out must be a CUDA tensor \[16, 16\]"):
        call(out=out[:8])
    with pytest.raises(
        RuntimeError, match="left must begin, and have its rows begin, at multiples of 16 bytes"
    ):
        call(left=torch.zeros(16, 20, dtype=torch.bfloat16, device="cuda")[:, 1:17])


LATE = """
import sys; sys.path[:0] = ["tests", "tests/gpu1"]
import torch, tpkernels
from virtual_ranks import OPS, Ranks
ranks = Ranks(2, 1 << 20, timeout_s=0.3)
x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
outs = [torch.empty_like(x) for _ in range(2)]
def call(rank, wrong):
    of = ([1, 0], [0, 1]) if wrong and rank == 0 else ([0, 1], [0, 1])
    OPS.fused_block_matmul(x, x, False, False, *of, None, outs[rank], rank, ranks.addresses, 0.3, "auto", "", 60)
ranks.run(lambda rank: call(rank, False))
try:
    ranks.run(lambda rank: call(rank, True))
except RuntimeError as error:
    print("stopped")
print(torch.ops.tpkernels.comm_fault())
"""


def test_a_block_that_never_comes_is_named() -> None:
    """Rank 0 waits for what rank 1 does not know of."""
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, check=False
    )
    assert "stopped" in done.stdout, done.stderr
    assert "waited 300 ms for block 0 of the factors, at K = " in done.stdout, done.stdout
    assert "Rank 1, which sends it, did not." in done.stdout
