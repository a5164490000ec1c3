"""Linear layers on grids: what the ranks of a pool do with one, against the dense layer in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tpkernels import nn as tnn
from tpkernels.grids import Sizes, backward, formula, forward, peak
from tpkernels.nn import grids
from tpkernels.testing import UNIT_ROUNDOFF, RankContext, assert_close_tiles

F64 = torch.float64


class Case(NamedTuple):
    """A kind of layer and what its constructor takes besides."""

    world: int
    kind: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join([str(self.world), self.kind, *(f"{k}={v}" for k, v in self.options)])


CASES = [
    Case(4, "Linear2D"),
    Case(9, "Linear2D"),
    Case(16, "Linear2D"),
    Case(4, "Linear2p5D", (("depth", 4),)),
    Case(8, "Linear2p5D", (("depth", 2),)),
    Case(16, "Linear2p5D", (("depth", 4),)),
    Case(8, "Linear3D"),
    Case(8, "Linear3D", (("swapped", True), ("keep_gathered", True))),
    Case(4, "LinearSpatialTemporal"),
    Case(16, "LinearSpatialTemporal"),
]


class Problem(NamedTuple):
    """A layer, and whole tensors that all ranks draw alike, with this rank's blocks of x and dy."""

    layer: grids.GridLinear
    weight: Tensor
    bias: Tensor | None
    x: Tensor
    dy: Tensor
    sizes: Sizes

    @property
    def my_x(self) -> Tensor:
        return self.layer.local_input(self.x).clone()

    def mine(self, full: Tensor, operand: str = "Y") -> Tensor:
        layer = self.layer
        return grids.take_block(full, layer.method.home(operand), layer.process_grid.position)


def make(ctx: RankContext, case: Case, inside: int, outside: int, **options: Any) -> grids.GridLinear:
    kind = getattr(grids, case.kind)
    layer: grids.GridLinear = kind(inside, outside, group=ctx.group, **dict(case.options), **options)
    return layer


def problem(
    ctx: RankContext, case: Case, seed: int, dtype: torch.dtype = F64, times: int = 1, **options: Any
) -> Problem:
    """Sizes with no more in common than the grid needs; every block different from every other."""
    torch.manual_seed(seed)
    cuts = make(ctx, case, 720, 720, device="meta").method.cuts
    inside, outside, rows = cuts.k * 3 * times, cuts.n * 5 * times, cuts.m * 2 * times
    layer = make(ctx, case, inside, outside, dtype=dtype, **options)
    weight, x, dy = torch.randn(outside, inside), torch.randn(rows, 3, inside), torch.randn(rows, 3, outside)
    bias = torch.randn(outside) if layer.bias is not None else None
    weight, x, dy = (t.to(dtype) for t in (weight, x, dy))
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias.to(dtype)}
    tnn.load_full_state_dict(layer, state)
    return Problem(layer, weight, state.get("bias"), x, dy, Sizes(rows * 3, inside, outside))


class Dense(NamedTuple):
    y: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor | None


def dense(p: Problem) -> Dense:
    """In float64."""
    x, w = (t.double().clone().requires_grad_() for t in (p.x, p.weight))
    b = None if p.bias is None else p.bias.double().clone().requires_grad_()
    y = F.linear(x, w, b)
    y.backward(p.dy.double())
    assert x.grad is not None and w.grad is not None
    return Dense(y.detach(), x.grad, w.grad, None if b is None else b.grad)


def placed(parameter: Tensor, full: Tensor) -> Tensor:
    placement = tnn.placement_of(parameter)
    assert placement is not None
    return placement.take(full)


def close(got: Tensor | None, want: Tensor, note: str) -> None:
    assert got is not None, note
    assert got.shape == want.shape, f"{note}: {got.shape} for {want.shape}"
    torch.testing.assert_close(got.double(), want, rtol=1e-10, atol=1e-10, msg=lambda m: f"{note}: {m}")


def total(ctx: RankContext, number: int) -> int:
    everyone: list[Any] = [None] * ctx.world
    dist.all_gather_object(everyone, number, group=ctx.group)
    return sum(everyone)


def check_against_dense(ctx: RankContext, case: Case, seed: int) -> None:
    """Y, dX, dW, dbias by block; bytes that left the ranks against the closed formulas; memory against the
    program's."""
    for bias in (True, False):
        p = problem(ctx, case, seed, bias=bias)
        want = dense(p)
        x = p.my_x.requires_grad_()
        with grids.record_traffic() as there:
            y = p.layer(x)
        close(y, p.mine(want.y), "y")
        with grids.record_traffic() as back:
            y.backward(p.mine(p.dy))
        close(x.grad, p.mine(want.dx, "X"), "x.grad")
        close(p.layer.weight.grad, placed(p.layer.weight, want.dw), "weight.grad")
        if bias:
            close(p.layer.bias.grad, placed(p.layer.bias, want.db), "bias.grad")
        check_volume(ctx, p, bias, there, back)


def check_volume(ctx: RankContext, p: Problem, bias: bool, there: grids.Traffic, back: grids.Traffic) -> None:
    method, keep, sizes = p.layer.method, p.layer.keep_gathered, p.sizes
    volume = formula(method, sizes, kept=keep)
    extra = volume["bias"] if bias else 0
    moved = total(ctx, there.sent_bytes), total(ctx, back.sent_bytes)
    assert total(ctx, there.received_bytes) == moved[0] and total(ctx, back.received_bytes) == moved[1]
    assert moved[0] == 8 * ctx.world * (volume["forward"] + extra)
    assert moved[1] == 8 * ctx.world * (volume["input_grad"] + volume["weight_grad"] + extra)
    programs = [forward(method, bias=bias, keep=keep)]
    held = {o: programs[0].outputs[o].layout for o in ("X", "W") if o in programs[0].outputs}
    programs.append(backward(method, bias_grad=bias, held=held))
    for program, traffic in zip(programs, (there, back), strict=True):
        assert traffic.peak_elements == peak(program, sizes, p.layer.process_grid.position).elements


def check_at_rest(ctx: RankContext, case: Case, seed: int) -> None:
    """Parameters, input and output are 1/P of the whole, or of W one block for all depths; nothing else is kept for
    the backward pass but, where asked for, what was gathered."""
    p = problem(ctx, case, seed)
    copies = dict(case.options).get("depth", 1)
    assert p.layer.weight.numel() * ctx.world == p.weight.numel() * copies
    x = p.my_x.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = p.layer(x)
    assert x.numel() * ctx.world == p.x.numel() and y.numel() * ctx.world == p.dy.numel()
    times = p.layer.method.grid.shape[0] if p.layer.keep_gathered else 1
    assert sum(t.numel() for t in saved) == times * (x.numel() + p.layer.weight.numel())


def check_partly_frozen(ctx: RankContext, case: Case, seed: int) -> None:
    """An input without gradient, a frozen weight, a frozen bias: the others are right, what they need is not
    kept."""
    for x_grad in (True, False):
        for weight_grad in (True, False):
            for bias_grad in (True, False):
                p = problem(ctx, case, seed)
                p.layer.weight.requires_grad_(weight_grad)
                p.layer.bias.requires_grad_(bias_grad)
                want = dense(p)
                x = p.my_x.requires_grad_(x_grad)
                y = p.layer(x)
                close(y, p.mine(want.y), "y")
                if not (x_grad or weight_grad or bias_grad):
                    assert not y.requires_grad
                    continue
                y.backward(p.mine(p.dy))
                for grad, wanted, full in (
                    (x.grad, x_grad, p.mine(want.dx, "X")),
                    (p.layer.weight.grad, weight_grad, placed(p.layer.weight, want.dw)),
                    (p.layer.bias.grad, bias_grad, placed(p.layer.bias, want.db)),
                ):
                    if wanted:
                        close(grad, full, f"{x_grad} {weight_grad} {bias_grad}")
                    else:
                        assert grad is None


def check_dtypes(ctx: RankContext, case: Case, seed: int) -> None:
    """In 16 and 32 bits: within what the products, and one rounding of each partial that travels, allow; the same
    bits on every run, and in all replicas of a weight."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        p = problem(ctx, case, seed, dtype, times=2)
        want = dense(p)
        grads = []
        for _ in range(2):
            x = p.my_x.requires_grad_()
            p.layer.zero_grad()
            y = p.layer(x)
            y.backward(p.mine(p.dy))
            grads.append([y.detach(), x.grad, p.layer.weight.grad, p.layer.bias.grad])
        names = ("y", "x.grad", "weight.grad", "bias.grad")
        whole = (
            (p.mine(want.y), p.sizes.k),
            (p.mine(want.dx, "X"), p.sizes.n),
            (placed(p.layer.weight, want.dw), p.sizes.m),
            (placed(p.layer.bias, want.db), p.sizes.m),
        )
        for name, first, second, (full, k) in zip(names, *grads, whole, strict=True):
            assert first is not None and first.dtype == dtype and torch.equal(first, second), name
            size = torch.full_like(full, k**0.5)
            if first.dim() == 1:  # too few elements to tell from them how large partial sums are
                bound = UNIT_ROUNDOFF[dtype] * (full.abs() + 4 * ctx.world**0.5 * size)
                assert ((first.double() - full).abs() <= bound).all(), name
                continue
            assert_close_tiles(first, full, dtype, k=k, world=ctx.world, magnitude=size, name=name)
        check_replicas(ctx, p.layer)


def check_replicas(ctx: RankContext, layer: grids.GridLinear) -> None:
    place = tnn.placement_of(layer.weight)
    mine = (layer.process_grid.position, layer.weight.grad.view(torch.uint8).cpu().numpy().tobytes())
    everyone: list[Any] = [None] * ctx.world
    dist.all_gather_object(everyone, mine, group=ctx.group)
    bits = dict(everyone)
    for holders in place.layout.holders.values():
        assert len({bits[position] for position in holders}) == 1


def check_main_grad(ctx: RankContext, case: Case, seed: int) -> None:
    """Two micro-batches in bfloat16: main_grad in float32 to its own accuracy, nothing in grad; and who may leave
    it."""
    p = problem(ctx, case, seed, torch.bfloat16)
    layer = p.layer
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    batches = [p, p._replace(x=torch.randn_like(p.x), dy=torch.randn_like(p.dy))]
    for b in batches:
        layer(b.my_x.requires_grad_()).backward(b.mine(b.dy))
    assert layer.weight.grad is None
    want = placed(layer.weight, sum(dense(b).dw for b in batches))
    error = (layer.weight.main_grad.double() - want).abs().max()
    assert error < 1e-4 * want.abs().max(), error
    # A bfloat16 gradient would be off by more than that, so it is the float32 sum that is there.
    assert (want.bfloat16().double() - want).abs().max() > error
    before = layer.weight.main_grad.clone()
    x = p.my_x.requires_grad_()
    torch.autograd.grad(layer(x).sum(), [x])  # asks for no other gradient
    assert torch.equal(layer.weight.main_grad, before)
    layer.weight.grad_added_to_main_grad = False
    layer(p.my_x).backward(p.mine(p.dy))
    assert layer.weight.grad_added_to_main_grad and layer.weight.grad.shape == layer.weight.shape
    layer.gradient_accumulation_fusion = False
    layer.weight.grad = None
    layer(p.my_x).backward(p.mine(p.dy))
    close(layer.weight.grad.float(), layer.weight.grad.double(), "not fused")


def check_state(ctx: RankContext, case: Case, seed: int) -> None:
    """Starting values and state dicts are those of the unsharded layer; the norm of all gradients counts each
    once."""
    p = problem(ctx, case, seed, name="a.b")
    p.layer.seed = 7
    plain = nn.Linear(p.sizes.k, p.sizes.n, dtype=F64)
    p.layer.reset_parameters()
    tnn.init_weights_(plain, seed=7, prefix="a.b")
    full = tnn.full_state_dict(p.layer)
    for name, want in plain.state_dict().items():
        assert torch.equal(full[name], want), name
    with torch.no_grad():
        plain.bias.copy_(torch.randn(p.sizes.n, dtype=F64))
    tnn.load_full_state_dict(p.layer, plain.state_dict())
    assert torch.equal(tnn.full_state_dict(p.layer)["bias"], plain.bias)
    p.layer(p.my_x).backward(p.mine(p.dy))
    plain(p.x).backward(p.dy)
    norm = torch.nn.utils.get_total_norm([q.grad for q in plain.parameters()])
    torch.testing.assert_close(tnn.grad_norm(p.layer.parameters()), norm, rtol=1e-10, atol=0.0)
