"""Results that stay where they are made: over messages on any ranks, and by one launch a pass on path "fused"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grid_checks import Case, Dense, Problem, close, dense, make, placed, problem, total
from torch import Tensor

from tpkernels.errors import BackendError, MismatchError
from tpkernels.grids import backward, forward, stationary
from tpkernels.nn import grids
from tpkernels.testing import RankContext, assert_close_tiles

CASES = [
    Case(4, "Linear2D"),
    Case(9, "Linear2D"),
    Case(16, "Linear2D"),
    Case(8, "Linear2p5D", (("depth", 2),)),
    Case(4, "LinearSpatialTemporal"),
    Case(16, "LinearSpatialTemporal"),
    Case(4, "Linear2p5D", (("depth", 4),)),  # one step: nothing travels
]
FUSED_CASES = CASES[:-1]


def check_messages(ctx: RankContext, case: Case, seed: int) -> None:
    """By the executor, in float64; bytes as the programs have them."""
    p = problem(ctx, case, seed)
    still = stationary(p.layer.method)
    assert still is not None and all(still.home(o) == p.layer.method.home(o) for o in "XWYB")
    p.layer.method = still
    want = dense(p)
    x = p.my_x.requires_grad_()
    with grids.record_traffic() as there:
        y = p.layer(x)
    with grids.record_traffic() as back:
        y.backward(p.mine(p.dy))
    close(y, p.mine(want.y), "y")
    close(x.grad, p.mine(want.dx, "X"), "x.grad")
    close(p.layer.weight.grad, placed(p.layer.weight, want.dw), "weight.grad")
    close(p.layer.bias.grad, placed(p.layer.bias, want.db), "bias.grad")
    moved = [total(ctx, t.sent_bytes) for t in (there, back)]
    programs = forward(still, bias=True), backward(still, bias_grad=True)
    assert moved == [8 * program.sent_elements(p.sizes) for program in programs]


def check_fused(ctx: RankContext, case: Case, seed: int, dtype: torch.dtype) -> None:
    """Against dense, twice, with and without bias, in sizes that are no multiples of anything; the same bits each
    time."""
    for bias, odd in ((True, False), (False, True)):
        p = problem(ctx, case, seed, dtype, times=3 if odd else 16, bias=bias, path="fused")
        want = dense(p)
        made = []
        for _ in range(2):
            x = p.my_x.requires_grad_()
            p.layer.zero_grad()
            with grids.record_traffic() as there:
                y = p.layer(x)
            y.backward(p.mine(p.dy))
            made.append([y.detach(), x.grad, p.layer.weight.grad, *([p.layer.bias.grad] if bias else [])])
        _compare(ctx, p, want, *made)
        program = forward(stationary(p.layer.method), bias=bias)
        assert total(ctx, there.sent_bytes) == dtype.itemsize * program.sent_elements(p.sizes)


def _compare(ctx: RankContext, p: Problem, want: Dense, first: list[Any], second: list[Any]) -> None:
    whole = [
        ("y", p.mine(want.y), p.sizes.k),
        ("x.grad", p.mine(want.dx, "X"), p.sizes.n),
        ("weight.grad", placed(p.layer.weight, want.dw), p.sizes.m),
        ("bias.grad", None if want.db is None else placed(p.layer.bias, want.db), p.sizes.m),
    ]
    for one, other, (name, full, k) in zip(first, second, whole, strict=False):
        assert one is not None and one.dtype == p.x.dtype and torch.equal(one, other), name
        if name == "bias.grad":
            bound = 2 ** (-8 if one.dtype == torch.bfloat16 else -11) * (
                full.abs() + 4 * (ctx.world * k) ** 0.5
            )
            assert ((one.double() - full).abs() <= bound).all(), name
            continue
        size = torch.full_like(full, k**0.5)
        assert_close_tiles(one, full, one.dtype, k=k, world=ctx.world, magnitude=size, name=name)


def check_fused_ways(ctx: RankContext, case: Case, seed: int) -> None:
    """Layers that share an input, with and without biases; main_grad; frozen parts; no rows; three dimensions."""
    torch.manual_seed(seed)
    p = problem(ctx, case, seed, torch.bfloat16, path="fused")
    cuts = p.layer.method.cuts
    layers = [
        make(ctx, case, p.sizes.k, cuts.n * size, bias=bias, path="fused", dtype=torch.bfloat16, seed=size)
        for size, bias in ((8, True), (24, False))
    ]
    alone = [make(ctx, case, p.sizes.k, cuts.n * size, bias=bias, dtype=torch.bfloat16, seed=size)
             for size, bias in ((8, True), (24, False))]  # fmt: skip
    results: list[list[Tensor]] = []
    for group in (layers, alone):
        for layer in group:
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
            if layer.bias is not None:
                layer.bias.data.fill_(0.5)
        x = p.my_x.requires_grad_()
        ys = grids.shared_input(group, x) if group is layers else [layer(x) for layer in group]
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        assert all(layer.weight.grad is None for layer in group)
        grads = [layer.weight.main_grad for layer in group]
        results.append([*(y.detach() for y in ys), x.grad, group[0].bias.grad, *grads])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(
            one.double(), other.double(), rtol=2e-2, atol=2e-2 * float(other.abs().max())
        )
    p.layer.weight.requires_grad_(False)
    x = p.my_x.requires_grad_()
    p.layer(x).sum().backward()
    assert p.layer.weight.grad is None and x.grad is not None
    nothing = x[:0].detach().requires_grad_()
    y = p.layer(nothing)
    y.sum().backward()
    assert y.shape[0] == 0 and nothing.grad.shape == nothing.shape and not p.layer.bias.grad.isnan().any()


def check_refused(ctx: RankContext) -> None:
    """On 8 ranks without a GPU: 3-D, and any other."""
    layer = grids.Linear3D(16, 16, group=ctx.group, path="fused", dtype=torch.bfloat16)
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(
        BackendError, match="'fused' was asked for, but 3-D gathers blocks that no rank has whole"
    ):
        layer(x)
    layer = grids.Linear2p5D(16, 16, depth=2, group=ctx.group, path="fused", dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="it is made of CUDA kernels, and the tensors are on cpu"):
        layer(x)


def check_block(ctx: RankContext, method: str, seed: int) -> None:
    """A transformer block, forward and backward, beside the same one by messages."""
    on = grids.GridStrategy(method, group=ctx.group)
    torch.manual_seed(seed)
    x, dy = torch.randn(2, 4, 6, 64, dtype=torch.bfloat16).unbind()
    made: list[list[Tensor]] = []
    for path in ("fused", "auto"):
        block = grids.TransformerBlock(64, 160, heads=8, on=on, path=path, dtype=torch.bfloat16, seed=3)
        mine = grids.take_block(x, on.layout, on.grid.position).clone().requires_grad_()
        y = block(mine)
        y.backward(grids.take_block(dy, on.layout, on.grid.position))
        grads = [p.grad for p in block.parameters()]
        made.append([y.detach(), mine.grad, *(g for g in grads if g is not None)])
        assert len(grads) == len(made[-1]) - 2
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(
            one.double(), other.double(), rtol=3e-2, atol=3e-2 * float(other.abs().max())
        )


def check_paths_differ(ctx: RankContext) -> None:
    """One rank alone on path "fused" would wait for the others: TPK_CHECK=1 tells."""
    options: dict[str, Any] = {"group": ctx.group, "dtype": torch.bfloat16}
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    grids.Linear2D(32, 32, path="fused", **options)(x)
    layer = grids.Linear2D(32, 32, path="fused" if ctx.rank == 1 else "auto", **options)
    with pytest.raises(MismatchError, match="path is fused"):
        layer(x)
