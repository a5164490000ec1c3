"""Sums of several products on path "fused": factors as they are, or side by side by copies; run as fused_checks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from few_rows import overlaps
from fused_checks import FUSED, laid_out, rows_of_ranks
from fused_small import forced
from gemm_checks import Failures, differences, integers
from op_checks import own

import tpkernels as tpk
from tpkernels.comm import runtime
from tpkernels.testing import poison_

Tensor = torch.Tensor


@dataclass(frozen=True)
class Pairs:
    """K of each, layouts of a and of b of gemm_checks.embed (the last one stands for those behind it), and how many
    pairs the kernel is given; ``mixed``: if a cannot be loaded by columns, so that all have to lie by rows.
    """

    ks: tuple[int, ...]
    a: tuple[str, ...] = ("rows",)
    b: tuple[str, ...] = ("cols",)
    given: int = 2
    mixed: int = 0

    def layout(self, some: tuple[str, ...], i: int, rank: int) -> str:
        layout = some[min(i, len(some) - 1)]
        return ("rows", "cols")[rank % 2 if i == 0 else 0] if layout == "by rank" else layout


PAIRS = [
    Pairs((64, 128)),
    Pairs((136, 72), b=("rows",)),
    Pairs((1000, 65, 1), a=("cols",), b=("rows",), given=3),
    Pairs((63, 7, 200, 64), a=("cols",), given=4),
    Pairs((64,) * 5, given=1),
    Pairs((64, 0, 136)),
    Pairs((0, 72), given=1),
    Pairs((0, 0), given=1),
    Pairs((65, 130), a=("rows_odd",), b=("strided",)),
    Pairs((64, 72), a=("rows", "cols"), given=1, mixed=2),
    Pairs((72, 64, 8), b=("rows", "cols"), given=1),
    Pairs((64, 64), a=("by rank", "rows"), given=0),
]


@overlaps()
def check_pairs(ctx: Any, path: str, dtype: torch.dtype, seed: int) -> None:
    """Reduce-scatters and all-reduces of small integers: the result is defined to the bit."""
    generator = torch.Generator(ctx.device).manual_seed(seed)  # the same data on every rank
    some = rows_of_ranks(ctx.world)
    with Failures() as failures, forced(None):
        for i, case in enumerate(PAIRS):
            for rows in (some[0], some[1 + i % (len(some) - 1)]):
                with failures.case(f"{case}, rows {rows}"):
                    _check_case(ctx, path, dtype, case, rows, generator)


def _check_case(
    ctx: Any, path: str, dtype: torch.dtype, case: Pairs, rows: tuple[int, ...], generator: torch.Generator
) -> None:
    m, n, rank = sum(rows), 136, ctx.rank
    make = lambda *shape: integers(ctx.world, *shape, dtype=dtype, generator=generator)  # noqa: E731
    as_, bs = [make(m, k) for k in case.ks], [make(k, n) for k in case.ks]
    want = sum((a.double() @ b.double()).sum(0) for a, b in zip(as_, bs, strict=True)).float()
    bias = make(n)[0]
    for scatters in (True, False):
        left = [laid_out(a[rank], case.layout(case.a, i, rank)) for i, a in enumerate(as_)]
        right = [laid_out(b[rank], case.layout(case.b, i, rank)) for i, b in enumerate(bs)]
        options = {"bias": bias, "out_dtype": torch.float32, "path": path}
        shards = list(rows)
        if scatters:
            out = tpk.matmul_reduce_scatter(left, right, ctx.group, shard_sizes=shards, **options)
        else:
            out = tpk.matmul_all_reduce(left, right, ctx.group, **options)
            shards = tpk.shard_sizes(m, ctx.world)
        for operand in (*left, *right):
            if operand.numel() > 0:
                poison_(operand)
        wanted = want + bias.float()
        different = differences(out, own(wanted, 0, rows, rank) if scatters else wanted)
        assert not different, different
        if path == FUSED and m > 0 and case.given > 0:
            by_columns = all(end % 8 == 0 for end in accumulate(shards))
            _check_given(case.given if by_columns else case.mixed or case.given)
        poison_(out)


def _check_given(pairs: int) -> None:
    """Only fakes tell what they were given."""
    given = getattr(runtime.active, "pairs", None)
    assert given is None or given[-1] == pairs, (given, pairs)
