"""Sums of several products in one launch of the Hopper kernel: its own op, and the reductions of virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from streamk_cases import (
    DTYPES,
    HOPPER_NAMES,
    HOPPER_TILES,
    LAYOUTS,
    PLANS,
    WHOLE_TILES,
    embed,
    hopper_only,
    integers,
    randn,
)
from virtual_ranks import OPS, Ranks, filled, pitched, split, whole

from tpkernels.testing import assert_close_tiles

Tensor = torch.Tensor
pytestmark = [pytest.mark.gpu1, hopper_only]

# K of every pair: a schedule cuts tiles inside any of them, and many end inside an iteration.
KS = [(64, 128), (1000, 72), (65, 1, 200), (7, 64, 130, 1500), (1, 1, 1, 1), (2048, 1984)]


def hooked(as_: Sequence[Tensor], bs: Sequence[Tensor], out: Tensor, tile: str, **plan: Any) -> None:
    if tile.partition("/")[0].endswith(("s", "w")):
        plan = {}  # each CTA takes a whole tile
    OPS.streamk_gemm_hooked(
        as_[0], bs[0], out, plan.get("schedule", "data_parallel"), plan.get("workers", 0), plan.get("splits", 1), tile,
        None, None, [], 0, None, None, [], 20.0, list(as_[1:]), list(bs[1:]),
    )  # fmt: skip


def summed(as_: Sequence[Tensor], bs: Sequence[Tensor]) -> Tensor:
    return sum((a.double() @ b.double() for a, b in zip(as_, bs, strict=True)), torch.zeros(1, device="cuda"))


@pytest.mark.parametrize("tile", HOPPER_NAMES)
def test_values(tile: str, generator: torch.Generator) -> None:
    """Small integers among NaN: every order of sums is exact. All layouts, odd M and N, batches, every plan."""
    for i, ks in enumerate(KS):
        for j, (layout_a, layout_b) in enumerate(LAYOUTS):
            dtype = DTYPES[(i + j) % 2]
            batch, m, n = [(1, 333, 203), (1, 700, 1040), (3, 65, 264)][(i + j) % 3]
            as_ = [embed(integers(batch, m, k, dtype=dtype, generator=generator), layout_a) for k in ks]
            bs = [embed(integers(batch, k, n, dtype=dtype, generator=generator), layout_b) for k in ks]
            want = summed(as_, bs)
            for plan in PLANS:
                out = filled(batch, m, n, dtype=torch.float32)
                hooked(as_, bs, out, tile, **plan)
                assert torch.equal(out.double(), want), (
                    f"K {ks}, {m} x {n}, a {layout_a}, b {layout_b}, {plan}"
                )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [*HOPPER_TILES, *WHOLE_TILES])
def test_bits_of_one_product(tile: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Where K of all but the last is whole iterations: those of operands side by side, with the same plan."""
    m, n = 517, 776
    for ks in [(640, 1000), (64, 192, 2048, 8)]:
        as_ = [randn(1, m, k, dtype=dtype, generator=generator) for k in ks]
        bs = [randn(1, k, n, dtype=dtype, generator=generator) for k in ks]
        for plan in PLANS:
            got, want = (filled(1, m, n, dtype=dtype) for _ in range(2))
            hooked(as_, bs, got, tile, **plan)
            hooked([torch.cat(as_, 2)], [torch.cat(bs, 1)], want, tile, **plan)
            assert torch.equal(got, want), (ks, plan)
            assert_close_tiles(got, summed(as_, bs), dtype, k=sum(ks))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("tile", [*HOPPER_TILES, ""])
def test_reductions(tile: str, world: int, generator: torch.Generator) -> None:
    """Ranks have K of their own, and different numbers of pairs; the last rank has one."""
    ranks, every = Ranks(world, 8 << 20), Ranks(world, 16 << 20)
    cases = [
        (1024, False, 512, "rows", "cols"),
        (997, True, 264, "rows", "rows"),
        (512, False, 333, "cols", "rows"),
        (2, False, 8, "rows", "cols"),
    ]
    for total, uneven, n, layout_a, layout_b in cases:
        rows = split(total, world, uneven)
        by_columns = all(sum(rows[:r]) % 8 == 0 for r in range(world))
        layout_a = layout_a if by_columns else "rows"
        factors: list[tuple[list[Tensor], list[Tensor]]] = []
        for rank in range(world):
            ks = (200 + 8 * rank,) if rank == world - 1 else KS[(rank + total) % len(KS)]
            as_ = [embed(whole(1, total, k, generator=generator), layout_a)[0] for k in ks]
            factors.append((as_, [embed(whole(1, k, n, generator=generator), layout_b)[0] for k in ks]))
        want = sum((summed(as_, bs) for as_, bs in factors), torch.zeros(1, device="cuda"))
        first = [[some[0] for some in both] for both in zip(*factors, strict=True)]
        more = [(as_[1:], bs[1:]) for as_, bs in factors]
        options: dict[str, Any] = {"more": more, "tile": tile, "out_dtype": torch.float32}
        ranks.poison()
        every.poison()
        for schedule in ["auto", "data_parallel"]:
            parts = ranks.reduce(*first, rows, schedule=schedule, **options)
            assert torch.equal(torch.cat(parts).double(), want), f"{rows} rows, N {n}, {schedule}"
            if uneven:
                continue
            for out in every.reduce(
                *first, rows, schedule=schedule, op=OPS.fused_matmul_all_reduce, **options
            ):
                assert torch.equal(out.double(), want), f"all-reduce, {rows} rows, N {n}, {schedule}"


def test_reduction_has_the_bits_of_operands_side_by_side(generator: torch.Generator) -> None:
    """With the same plan; bias and residual, rounded. Deep, so that a plan may cut tiles."""
    world, total, n, ks = 2, 400, 264, (2048, 1024, 72)
    ranks, rows = Ranks(world, 4 << 20), [216, 184]
    dtype = torch.bfloat16
    make = lambda *shape: randn(1, *shape, dtype=dtype, generator=generator)[0]  # noqa: E731
    as_ = [[make(total, k) for k in ks] for _ in rows]
    bs = [[make(k, n) for k in ks] for _ in rows]
    added = {
        "bias": randn(n, dtype=torch.float32, generator=generator),
        "residuals": [make(r, n) for r in rows],
    }
    for schedule in ["auto", "data_parallel"]:
        got = ranks.reduce(
            [a[0] for a in as_],
            [b[0] for b in bs],
            rows,
            more=[(a[1:], b[1:]) for a, b in zip(as_, bs, strict=True)],
            schedule=schedule,
            **added,
        )
        joined = [torch.cat(a, 1) for a in as_], [torch.cat(b, 0) for b in bs]
        want = ranks.reduce(*joined, rows, schedule=schedule, **added)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), schedule


def test_what_is_refused(generator: torch.Generator) -> None:
    dtype = torch.bfloat16
    a = integers(1, 128, 64, dtype=dtype, generator=generator)
    b = integers(1, 64, 136, dtype=dtype, generator=generator)
    out = filled(1, 128, 136, dtype=torch.float32)
    by_columns = a.transpose(1, 2).contiguous().transpose(1, 2)
    for as_, bs, said in [
        ([a, by_columns], [b, b], "must lie in memory alike"),
        ([a, a], [b, pitched(b[0].t()).t()[None]], "must lie in memory alike"),
        ([a] * 5, [b] * 5, "must be as many tensors, at most 3"),
        ([a, a], [b], "must be as many tensors, at most 3"),
        ([a, a[:, :, :8]], [b, b], "must be of the device, dtype and shape"),
        ([a, a[:, :, :0]], [b, b[:, :0]], "must be of the device, dtype and shape"),
        ([a, a.half()], [b, b.half()], "must be of the device, dtype and shape"),
        ([a, a[:, 1:]], [b, b], "must be of the device, dtype and shape"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            hooked(as_, bs, out, "")
    ranks = Ranks(2, 1 << 20)
    with pytest.raises(RuntimeError, match="must lie in memory alike"):
        ranks.reduce([a[0]] * 2, [b[0]] * 2, [64, 64], more=[([by_columns[0]], [b[0]])] * 2)
    torch.cuda.synchronize()
    assert not OPS.comm_fault()
