"""NumPy arrays between ranks."""

from __future__ import annotations

import numpy as np

import tpkernels as tpk


def _numpy(ctx, seed):
    draw, world = np.random.default_rng(seed), ctx.world
    rows = [3 + rank for rank in range(world)]
    a, bs = draw.standard_normal((sum(rows), 6)), draw.standard_normal((world, 2, 6, 5))
    begin = sum(rows[: ctx.rank])
    mine, (b, c) = a[begin : begin + rows[ctx.rank]], bs[ctx.rank]
    (p, q), whole = tpk.all_gather_matmul(
        mine, [b, c], ctx.group, shard_sizes=rows, biases=[None, np.ones(5)], return_gathered=True
    )
    for got, want in (
        (p, a @ b),
        (q, a @ c + 1),
        (whole, a),
        (tpk.matmul_replicated(a, b, ctx.group), a @ b),
    ):
        assert type(got) is np.ndarray
        np.testing.assert_allclose(got, want, atol=1e-12)
    total = sum(a @ each[0] for each in bs)
    out = tpk.matmul_reduce_scatter(a, b, ctx.group, shard_sizes=rows)
    np.testing.assert_allclose(out, total[begin : begin + rows[ctx.rank]], atol=1e-12)
    np.testing.assert_allclose(tpk.matmul_all_reduce([a], [b], ctx.group), total, atol=1e-12)


def test_numpy(ranks, seed):
    ranks.run(_numpy, seed, world=3)
