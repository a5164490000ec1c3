"""Cases of the overlap suite on gloo ranks, for its tests."""

from __future__ import annotations

from bench.context import Context
from bench.suite import Options
from bench.suites.overlap import SUITE


def make(ctx, op, *, dtype="bfloat16", rows=()):
    """Context, options and the small cases of one operation."""
    options = Options(
        device="cpu", world=ctx.world, small=True, ops=(op,), dtypes=(dtype,), rows=rows, seed=7
    )
    context = Context(options, ctx.rank, ctx.world, ctx.device, ctx.group, ctx.group)
    return context, options, SUITE.cases(options)


def run_all(runnable):
    """One call on every buffer set."""
    for i in range(runnable.copies):
        runnable.launch(i)
