"""Redistribution, meshes, refusals, time-outs and small models on grids; run on the ranks of a pool."""

from __future__ import annotations

import copy
import datetime
import pickle
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grid_checks import F64, Case, close, dense, make, placed, problem, total
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tpkernels import errors
from tpkernels import nn as tnn
from tpkernels.errors import ArgumentError, DTypeError, GroupError, MismatchError, ShapeError
from tpkernels.grids import (
    Layout,
    Sizes,
    formula,
    grid_1d,
    grid_2d,
    grid_2p5d,
    grid_3d,
    messages,
    rows_over,
    sent_elements,
    spatial_temporal,
    summa,
    three_d,
    whole,
)
from tpkernels.nn import grids
from tpkernels.ops import _agreement
from tpkernels.testing import RankContext


def some_layouts(world: int) -> list[Layout]:
    found = [rows_over(grid_1d(world)), whole(grid_1d(world))]
    for make_method in (
        lambda: summa(grid_2d(world)),
        lambda: summa(grid_2p5d(world, 2)),
        lambda: summa(grid_2p5d(world, 4)),
        lambda: three_d(grid_3d(world)),
        lambda: spatial_temporal(grid_2d(world)),
    ):
        try:
            found += [make_method().home(operand) for operand in "XWY"]
        except GroupError:
            continue
    return found


def check_redistribute(ctx: RankContext, seed: int) -> None:
    """Layouts of all methods, also sizes that they do not cut evenly; gradients; bytes as the pure function
    says."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    here = grids.bind(grid_1d, ctx.group)
    layouts = some_layouts(ctx.world)
    for _ in range(12):
        source, target = draw.choice(layouts), draw.choice(layouts)
        shape = draw.randint(0, 40), draw.randint(0, 30)
        middle = draw.choice([(), (3,), (2, 2)])
        full, grad = torch.randn(2, shape[0], *middle, shape[1], dtype=F64).unbind()

        def block(of: Tensor, layout: Layout) -> Tensor:
            (a, b), (c, d) = (
                span.elements(size)
                for span, size in zip(layout.block(ctx.rank)[:2], (of.shape[0], of.shape[-1]), strict=True)
            )
            return of[a:b, ..., c:d]

        x = block(full, source).clone().requires_grad_()
        with grids.record_traffic() as traffic:
            moved = grids.redistribute(x, source, target, here, shape=shape)
        assert torch.equal(moved, block(full, target))
        expected = sent_elements(messages(source, target), *shape)
        assert total(ctx, traffic.sent_bytes) == 8 * torch.Size(middle).numel() * expected
        moved.backward(block(grad, target))
        assert torch.equal(x.grad, block(grad, source))
    x = torch.zeros(4, 6, dtype=F64)
    with pytest.raises(ShapeError, match="this rank's block of"):
        grids.redistribute(x, rows_over(grid_1d(ctx.world)), whole(grid_1d(ctx.world)), here, shape=(99, 7))
    with pytest.raises(ArgumentError, match=f"source: expected a layout of {ctx.world} ranks"):
        grids.redistribute(x, rows_over(grid_1d(2)), whole(grid_1d(ctx.world)), here)


def check_meshes(ctx: RankContext, seed: int) -> None:
    """A mesh of the grid's shape, in any order of ranks; a part of a larger mesh; what is refused. 16 ranks."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).view(4, 4)
    for ranks in (torch.arange(16).view(4, 4), order):
        mesh = DeviceMesh("cpu", ranks)
        for kind in ("Linear2D", "LinearSpatialTemporal"):
            p = problem(_on(ctx, mesh), Case(16, kind), seed)
            at = p.layer.process_grid.coordinates
            assert ranks[at] == ctx.rank
            close(p.layer(p.my_x), p.mine(F.linear(p.x, p.weight, p.bias)), kind)
    plain = grids.Linear2D(p.sizes.k, p.sizes.n, group=ctx.group)  # whose ranks stand in order
    moved = grids.redistribute(
        p.my_x, p.layer.input_layout, plain.input_layout, p.layer.process_grid, target_grid=plain.process_grid
    )
    assert torch.equal(moved, plain.local_input(p.x))
    _check_meshes_of_depths(ctx, seed, order.view(2, 2, 4))
    mesh = DeviceMesh("cpu", torch.arange(16).view(2, 2, 2, 2), mesh_dim_names=("data", "a", "b", "c"))
    cube = mesh["a", "b", "c"]
    p = problem(_on(ctx, cube), Case(8, "Linear3D"), seed + ctx.rank // 8)
    close(p.layer(p.my_x), p.mine(F.linear(p.x, p.weight, p.bias)), "cube")
    with pytest.raises(GroupError, match=r"expected a device mesh of 4 x 4, got 2 x 8"):
        grids.Linear2D(16, 16, group=DeviceMesh("cpu", torch.arange(16).view(2, 8)))
    with pytest.raises(GroupError, match="got one of 2 x 2 x 2"):
        grids.Linear2p5D(16, 16, depth=8, group=p.layer.process_grid)
    assert grids.Linear3D(16, 16, group=p.layer.process_grid).process_grid is p.layer.process_grid


def _check_meshes_of_depths(ctx: RankContext, seed: int, order: Tensor) -> None:
    """2 x 2 x 4: a mesh has its own order, a group has the depth outermost."""
    in_order = torch.arange(16)
    for ranks in (in_order.view(2, 2, 4), order, in_order.view(4, 2, 2).permute(1, 2, 0)):
        p = problem(_on(ctx, DeviceMesh("cpu", ranks)), Case(16, "Linear2p5D", (("depth", 4),)), seed)
        assert ranks[p.layer.process_grid.coordinates] == ctx.rank
        want, x = dense(p), p.my_x.requires_grad_()
        y = p.layer(x)
        y.backward(p.mine(p.dy))
        close(y, p.mine(want.y), "y")
        close(x.grad, p.mine(want.dx, "X"), "x.grad")
        close(p.layer.weight.grad, placed(p.layer.weight, want.dw), "weight.grad")
    flat = grids.Linear2p5D(p.sizes.k, p.sizes.n, depth=4, group=ctx.group)
    assert flat.process_grid.coordinates == p.layer.process_grid.coordinates
    assert torch.equal(flat.local_input(p.x), p.my_x)


def _on(ctx: RankContext, mesh: DeviceMesh) -> Any:
    made = copy.copy(ctx)
    object.__setattr__(made, "group", mesh)
    return made


def check_refusals(ctx: RankContext) -> None:
    """At construction, in sentences that say what would fit. 8 ranks."""
    for make_layer, error, words in (
        (
            lambda: grids.Linear2D(8, 8, group=ctx.group),
            GroupError,
            r"has 8; .*4 or 9 ranks, or use 2.5-D with depth 2",
        ),
        (
            lambda: grids.LinearSpatialTemporal(8, 8, group=ctx.group),
            GroupError,
            "has 8; make a group of 4 or 16",
        ),
        (
            lambda: grids.Linear2p5D(8, 8, depth=3, group=ctx.group),
            GroupError,
            r"depth 3 .* fit: 2 \(2 x 2 x 2\)",
        ),
        (
            lambda: grids.Linear3D(6, 8, group=ctx.group),
            ArgumentError,
            "in_features: .* 4 equal .*6; 4 or 8 would fit",
        ),
        (
            lambda: grids.Linear3D(8, 7, group=ctx.group),
            ArgumentError,
            "out_features: .* 2 equal .*7; 6 or 8 would",
        ),
        (lambda: grids.Linear2p5D(1, 8, depth=2, group=ctx.group), ArgumentError, "but it is 1; 2 would fit"),
        (lambda: grids.Linear3D(0, 8, group=ctx.group), ArgumentError, "needs at least 1, but it is 0"),
    ):
        with pytest.raises(error, match=words):
            make_layer()
    layer = grids.Linear3D(8, 4, group=ctx.group, dtype=F64)
    with pytest.raises(
        ShapeError, match=r"cuts its rows \(dimension 0\) in 4 equal parts, but there are 6; 4 or 8"
    ):
        layer.local_input(torch.zeros(6, 3, 8))
    x = layer.local_input(torch.randn(8, 3, 8, dtype=F64))
    with pytest.raises(ShapeError, match=r"must be 4 \(this rank's part of in_features, 8\)"):
        layer(torch.zeros(2, 8, dtype=F64))
    with pytest.raises(ShapeError, match="at least 2 dimensions"):
        layer(torch.zeros(4, dtype=F64))
    with pytest.raises(DTypeError, match=r"expected torch.float64, as the weight's, got torch.float32"):
        layer(x.float())
    layer.path = "carrier pigeon"
    with pytest.raises(ArgumentError, match="path: 'carrier pigeon' is not a path on cpu"):
        layer(x)
    layer.path = "auto"
    layer.weight.main_grad = torch.zeros(1)
    with pytest.raises(ShapeError, match="main_grad"):
        layer(x)
    del layer.weight.main_grad
    with pytest.raises(
        (MismatchError, ShapeError),
        match=r"shape of x of layer 0 is \[2, 3, 4\] on rank 0, \[1, 3, 4\] on rank 1",
    ):
        layer(x if ctx.rank == 0 else x[:1])
    with pytest.raises(
        MismatchError, match="requires_grad of x of layer 0 is True on rank 0, False on rank 1"
    ):
        layer(x.clone().requires_grad_(ctx.rank == 0))
    y = layer(x.clone().requires_grad_())
    with pytest.raises(
        ArgumentError, match="create_graph: gradients of Linear3D cannot be differentiated again"
    ):
        torch.autograd.grad(y.sum(), [layer.weight], create_graph=True)


def check_time_out(ctx: RankContext) -> None:
    """A rank that does not come: the others stop after the group's timeout, and say so. 16 ranks, of which 4 take
    part."""
    group = dist.new_group(list(range(4)), timeout=datetime.timedelta(seconds=2))
    if ctx.rank < 4:
        layer = grids.LinearSpatialTemporal(4, 4, group=group, name="proj")
        if ctx.rank != 1:
            with _agreement.suspended(), pytest.raises(errors.CommTimeoutError) as info:
                layer(torch.randn(2, 2))
            assert "LinearSpatialTemporal 'proj', forward" in str(info.value)
            assert "timeout to receive from ranks" in str(info.value)
    ctx.barrier()


def check_copies(ctx: RankContext, case: Case, seed: int) -> None:
    """deepcopy, pickle, meta device, recomputation, autocast, no rows, a single row of blocks, other strides."""
    p = problem(ctx, case, seed)
    want = p.mine(F.linear(p.x, p.weight, p.bias))
    for twin in (copy.deepcopy(p.layer), pickle.loads(pickle.dumps(p.layer))):
        assert twin.method is p.layer.method
        close(twin(p.my_x), want, "copy")
        assert isinstance(tnn.placement_of(twin.weight), tnn.BlockShard)
    empty = make(ctx, case, p.sizes.k, p.sizes.n, device="meta", dtype=F64)
    empty.to_empty(device="cpu")
    empty.load_state_dict(p.layer.state_dict())
    x = p.my_x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y = checkpoint(empty, x, use_reentrant=False)
    close(y, want, "recomputed")
    y.backward(p.mine(p.dy).transpose(0, 1).contiguous().transpose(0, 1))
    assert empty.weight.grad is not None and x.grad is not None and x.grad.shape == x.shape
    assert p.layer(p.my_x[:0]).shape == want[:0].shape
    with torch.no_grad():
        close(p.layer(p.my_x), want, "no_grad")
    p.layer.path = "streamk"  # our own executor makes the products, too
    close(p.layer(p.my_x), want, "streamk")
    single = make(ctx, case, p.sizes.k, p.sizes.n, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = single(p.my_x.float().requires_grad_())
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert single.weight.grad.dtype == single.bias.grad.dtype == torch.float32


class Model(nn.Module):
    """Two layers and a residual around them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


def check_training(ctx: RankContext, case: Case, seed: int) -> None:
    """8 steps of a residual MLP equal those of the unsharded one; the two layers end in the layout they began
    in."""
    torch.manual_seed(seed)
    cuts = make(ctx, case, 720, 720, device="meta").method.cuts
    hidden, rows = cuts.k * cuts.n * 2, cuts.m * 4
    back = case
    if case.kind == "Linear3D":
        swapped = not dict(case.options).get("swapped", False)
        back = case._replace(options=tuple({**dict(case.options), "swapped": swapped}.items()))
    model = Model(
        make(ctx, case, hidden, 2 * hidden, dtype=F64), make(ctx, back, 2 * hidden, hidden, dtype=F64)
    )
    dense = Model(nn.Linear(hidden, 2 * hidden, dtype=F64), nn.Linear(2 * hidden, hidden, dtype=F64))
    for each in (model, dense):
        tnn.init_weights_(each, seed=seed)
    assert model.first.input_layout == model.second.output_layout
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, dense)]
    layer = model.first
    for step in range(8):
        x, goal = torch.randn(2, rows, hidden, dtype=F64).unbind()
        mine, my_goal = layer.local_input(x), layer.local_input(goal)
        losses = (model(mine) - my_goal).square().sum() / x.numel(), (dense(x) - goal).square().mean()
        for optimizer, loss, each in zip(optimizers, losses, (model, dense), strict=True):
            optimizer.zero_grad()
            loss.backward()
            if each is model:
                tnn.clip_grad_norm_(each.parameters(), 0.05)
            else:
                nn.utils.clip_grad_norm_(each.parameters(), 0.05)
            optimizer.step()
        everyone = [torch.zeros((), dtype=F64) for _ in range(ctx.world)]
        dist.all_gather(everyone, losses[0].detach(), group=ctx.group)
        torch.testing.assert_close(sum(everyone), losses[1].detach(), rtol=1e-9, atol=0.0, msg=f"step {step}")
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, placed(p, q), rtol=1e-7, atol=1e-9, msg=name)


def check_in_a_row(ctx: RankContext, seed: int) -> None:
    """Layers of two methods on one group, with a redistribution between them. 4 ranks."""
    torch.manual_seed(seed)
    first = grids.LinearSpatialTemporal(8, 12, group=ctx.group, dtype=F64, seed=1)
    second = grids.Linear2p5D(12, 4, depth=4, group=ctx.group, dtype=F64, seed=2)
    x = torch.randn(8, 8, dtype=F64, requires_grad=True)
    dense = F.linear(F.linear(x, tnn.full_state_dict(first)["weight"]), tnn.full_state_dict(second)["weight"])
    dy = torch.randn_like(dense)
    dense.backward(dy)
    mine = first.local_input(x.detach()).clone().requires_grad_()
    between = grids.redistribute(first(mine), first.output_layout, second.input_layout, first.process_grid)
    y = second(between)

    def block(full: Tensor, layout: Layout, of: grids.GridLinear) -> Tensor:
        return grids.take_block(full, layout, of.process_grid.position)

    close(y, block(dense.detach(), second.output_layout, second), "y")
    y.backward(block(dy, second.output_layout, second))
    close(mine.grad, block(x.grad, first.input_layout, first), "x.grad")


def check_shared_input(ctx: RankContext, case: Case, seed: int) -> None:
    """Layers with one input: outputs and gradients are theirs, x moves once, one may be frozen, one have main_grad."""
    torch.manual_seed(seed)
    cuts = make(ctx, case, 720, 720, device="meta").method.cuts
    inside, rows = cuts.k * 2, cuts.m * 3
    outs = [cuts.n * n for n in (3, 1, 2)]
    layers = [make(ctx, case, inside, out, dtype=F64, name=str(out), bias=out != outs[1]) for out in outs]
    for layer in layers:
        tnn.load_full_state_dict(
            layer, {n: torch.randn_like(t) for n, t in tnn.full_state_dict(layer).items()}
        )
    layers[1].weight.requires_grad_(False)
    layers[2].weight.main_grad = torch.zeros_like(layers[2].weight)
    x = layers[0].local_input(torch.randn(rows, inside, dtype=F64)).clone().requires_grad_()
    dys = [torch.randn(x.shape[0], out // cuts.n, dtype=F64) for out in outs]
    apart = [layer(x) for layer in layers]
    torch.autograd.backward(apart, dys)
    want = [
        x.grad,
        layers[0].weight.grad,
        layers[2].weight.main_grad.clone(),
        layers[0].bias.grad,
        layers[2].bias.grad,
    ]
    x.grad = layers[0].weight.grad = layers[0].bias.grad = layers[2].bias.grad = None
    layers[2].weight.main_grad.zero_()
    with grids.record_traffic() as there:
        together = grids.shared_input(layers, x)
    with grids.record_traffic() as back:
        torch.autograd.backward(together, dys)
    for one, other in zip(apart, together, strict=True):
        close(other, one.detach(), "y")
    got = [
        x.grad,
        layers[0].weight.grad,
        layers[2].weight.main_grad,
        layers[0].bias.grad,
        layers[2].bias.grad,
    ]
    for one, other in zip(want, got, strict=True):
        close(other, one, "gradient")
    assert layers[1].weight.grad is None and layers[2].weight.grad is None
    sizes = Sizes(rows, inside, sum(outs))
    volume = formula(layers[0].method, sizes, kept=layers[0].keep_gathered)
    biases = formula(layers[0].method, sizes._replace(n=outs[0] + outs[2]))["bias"]
    assert total(ctx, there.sent_bytes) == 8 * ctx.world * (volume["forward"] + biases)
    assert total(ctx, back.sent_bytes) == 8 * ctx.world * (
        volume["input_grad"] + volume["weight_grad"] + biases
    )
    other = make(ctx, case, 2 * inside, outs[0], dtype=F64)
    with pytest.raises(
        ArgumentError, match=f"must have one in_features, but it is {inside} in one and {2 * inside}"
    ):
        grids.shared_input([layers[0], other], x)
    with pytest.raises(ArgumentError, match="at least one layer is needed"):
        grids.shared_input([], x)
