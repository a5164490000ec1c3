"""Delayed weight gradients: what layers of one or several ranks must do, on the CPU and on GPUs.

Every rank draws the same; tensors are made on the default device.
"""

from __future__ import annotations

import torch
from main_grad_checks import batch, cases, count, expected, fused, make, step

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.testing import RankContext


def check_sums(ctx: RankContext, dtype: torch.dtype) -> None:
    """Three backward passes in flight: all as without, but for the weight's gradient, which comes one a call."""
    for case in cases(ctx.world):
        late, plain = make(ctx, case, dtype, delay_wgrad=True), make(ctx, case, dtype)
        batches = [batch(ctx, case, late, dtype) for _ in range(3)]
        with tpk.record_paths() as log:
            got = [t for b in batches for t in step(late, case, b)]
        assert late.weight.grad is None
        assert late.pending_dw == 3
        with tpk.record_paths() as before:
            partial = []
            want = []
            for b in batches:
                want += step(plain, case, b)
                partial.append(plain.weight.grad.clone())
        for g, w in zip([*got, late.bias.grad], [*want, plain.bias.grad], strict=True):
            assert torch.equal(g, w), f"{case} {dtype}: changed"
        if case.rows is None:  # otherwise one op makes all gradients, where none is left for later
            assert count(log, "matmul") == count(before, "matmul") - 3, f"{case}: {log}"
        with tpk.record_paths() as then:
            for i, sum_so_far in enumerate(partial):
                late.backward_dw()
                assert late.pending_dw == 2 - i
                assert torch.equal(late.weight.grad, sum_so_far), f"{case} {dtype}: after {i + 1} calls"
        assert sum(then.counts.values()) == 3, f"{case}: {then}"  # products, and nothing that travels
        assert late.weight.grad.stride() == plain.weight.grad.stride()


def check_main_grad(ctx: RankContext, dtype: torch.dtype) -> None:
    for case in cases(ctx.world):
        late = make(ctx, case, dtype, delay_wgrad=True)
        fused(late)
        batches = [batch(ctx, case, late, dtype) for _ in range(2)]
        for b in batches:
            step(late, case, b)
        assert not late.weight.main_grad.any(), case
        tnn.backward_dw(late)
        late.backward_dw()
        assert late.weight.grad is None, case
        sums, scale = expected(ctx, case, late, batches)
        rows = 2 * sums.new_ones(case.shape).sum().item()
        unit = torch.finfo(accumulate_dtype(dtype)).eps
        assert ((late.weight.main_grad - sums).abs() <= rows * unit * scale).all(), case
