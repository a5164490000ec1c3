"""Weight gradients in ``main_grad``: what layers of one or several ranks must do, on the CPU and on GPUs.

Every rank draws the same; tensors are made on the default device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.testing import RankContext

F64 = torch.float64
INSIDE, OUTSIDE = 20, 27  # no multiple of any world but 1, 2 (4, 5) and 3 (9)


class Case(NamedTuple):
    """A layer and a whole input: ``rows`` of the sequence on every rank, None without sequence parallelism."""

    kind: str
    shape: tuple[int, ...]
    dim: int
    rows: list[int] | None

    @property
    def sizes(self) -> list[int] | None:
        """As layers take them: None where all are equal."""
        return None if self.rows is None or len(set(self.rows)) == 1 else self.rows

    @property
    def widths(self) -> tuple[int, int]:
        return (INSIDE, OUTSIDE) if self.kind == "column" else (OUTSIDE, INSIDE)


def cases(world: int) -> list[Case]:
    uneven = [5, 0, 8, 2][:world]
    layouts: list[tuple[tuple[int, ...], int, list[int]]] = [
        ((6 * world, 3), 0, [6] * world),
        ((2, sum(uneven)), 1, uneven),
    ]
    return [
        Case(kind, shape, dim, rows if sp else None)
        for kind in ("column", "row")
        for shape, dim, rows in layouts
        for sp in (False, True)
    ]


def part(full: Tensor, dim: int, sizes: Iterable[int], rank: int) -> Tensor:
    sizes = list(sizes)
    return full.narrow(dim, sum(sizes[:rank]), sizes[rank])


def make(ctx: RankContext, case: Case, dtype: torch.dtype, path: str = "auto", **options: Any) -> Any:
    kind = tnn.ColumnParallelLinear if case.kind == "column" else tnn.RowParallelLinear
    sp = {"sequence_parallel": case.rows is not None, "sequence_dim": case.dim}
    return kind(*case.widths, group=ctx.group_name, dtype=dtype, name="layer", path=path, **sp, **options)


def fused(layer: nn.Module) -> None:
    """Gives every weight of a linear layer a main_grad of zeros."""
    for module in layer.modules():
        if isinstance(module, (tnn.ColumnParallelLinear, tnn.RowParallelLinear)):
            weight: Any = module.weight
            weight.main_grad = torch.zeros_like(weight, dtype=accumulate_dtype(weight.dtype))


class Batch(NamedTuple):
    """Whole tensors, of the layer's dtype, and this rank's parts."""

    x: Tensor
    dy: Tensor
    my_x: Tensor
    my_dy: Tensor


def batch(ctx: RankContext, case: Case, layer: Any, dtype: torch.dtype) -> Batch:
    inside, outside = case.widths
    x, dy = torch.randn(*case.shape, inside).to(dtype), torch.randn(*case.shape, outside).to(dtype)

    def rows(t: Tensor) -> Tensor:
        return t if case.rows is None else part(t, case.dim, case.rows, ctx.rank)

    if case.kind == "column":
        return Batch(x, dy, rows(x), part(dy, -1, layer.out_sizes, ctx.rank))
    return Batch(x, dy, part(x, -1, layer.in_sizes, ctx.rank), rows(dy))


def expected(ctx: RankContext, case: Case, layer: Any, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """This rank's part of sum dY^T X in float64, and of sum |dY|^T |X|, to which errors are in proportion."""
    sums = []
    for f in (torch.Tensor.double, lambda t: t.double().abs()):
        whole = sum(f(b.dy).flatten(0, -2).t() @ f(b.x).flatten(0, -2) for b in batches)
        dim, sizes = (0, layer.out_sizes) if case.kind == "column" else (1, layer.in_sizes)
        sums.append(part(whole, dim, sizes, ctx.rank))
    return sums[0], sums[1]


def step(layer: Any, case: Case, b: Batch) -> list[Tensor]:
    """One micro-batch: output and gradient of the input."""
    x = b.my_x.clone().requires_grad_()
    y = layer(x, shard_sizes=case.sizes)
    y.backward(b.my_dy)
    assert x.grad is not None
    return [y.detach(), x.grad]


def check_sums(ctx: RankContext, dtype: torch.dtype, path: str = "auto") -> None:
    """Two micro-batches: main_grad against float64, all else as without it, and no product but the sum itself."""
    for case in cases(ctx.world):
        note = f"{case} {dtype} {path}"
        layer, plain = make(ctx, case, dtype, path), make(ctx, case, dtype, path)
        fused(layer)
        batches = [batch(ctx, case, layer, dtype) for _ in range(2)]
        with tpk.record_paths() as log:
            got = [t for b in batches for t in step(layer, case, b)]
        with tpk.record_paths() as before:
            want = [t for b in batches for t in step(plain, case, b)]
        for g, w in zip([*got, layer.bias.grad], [*want, plain.bias.grad], strict=True):
            assert torch.equal(g, w), f"{note}: changed"
        assert layer.weight.grad is None, note
        sums, scale = expected(ctx, case, layer, batches)
        rows = 2 * sums.new_ones(case.shape).sum().item()
        unit = torch.finfo(accumulate_dtype(dtype)).eps
        error = (layer.weight.main_grad - sums).abs()
        assert (error <= rows * unit * scale).all(), f"{note}: {error.max()}"
        if dtype in (torch.bfloat16, torch.float16) and sums.numel():
            rounded = (plain.weight.grad.double() - sums).abs()
            assert rounded.mean() > 20 * error.mean(), f"{note}: no better than {dtype}"
        products, products_before = (count(some, "matmul") for some in (log, before))
        assert count(log, "matmul_accumulate") == 2, f"{note}: {log}"
        assert products == products_before - 2, f"{note}: {log}"


def count(log: tpk.PathLog, op: str) -> int:
    return sum(n for (name, _), n in log.counts.items() if name == op)


def check_small_updates(ctx: RankContext, dtype: torch.dtype, path: str = "auto") -> None:
    """A step of 1 on 4096 is lost in 16 bits and kept in float32."""
    layer = tnn.RowParallelLinear(ctx.world, 1, group=ctx.group_name, dtype=dtype, bias=False, path=path)
    fused(layer)
    for value in (4096.0, 1.0):
        layer(torch.ones(1, 1, dtype=dtype)).backward(torch.full((1, 1), value, dtype=dtype))
    assert layer.weight.main_grad.item() == 4097.0


def check_together(ctx: RankContext) -> None:
    """Layers with one gather, one of them without main_grad, one frozen; an activation; all features gathered."""
    for sp in (False, True):
        for options in ({}, {"activation": "gelu"}, {"gather_output": True}):
            kinds = {"sequence_parallel": sp, "group": ctx.group_name, "dtype": F64, "name": "l", **options}
            names = {"q": 9, "k": 5, "v": 6, "g": 4}
            layers, plain = (tnn.ColumnParallelLinears(7, names, **kinds) for _ in range(2))
            fused(layers)
            del layers["k"].weight.main_grad
            for some in (layers, plain):
                some["v"].weight.requires_grad_(False)
            layers["v"].weight.main_grad.fill_(3.0)
            for _ in range(2):
                x = torch.randn(2 * ctx.world, 7, dtype=F64)
                x = part(x, 0, [2] * ctx.world, ctx.rank) if sp else x
                results = []
                for some in (layers, plain):
                    xi = x.clone().requires_grad_()
                    outs = some(xi)
                    sum((o * (i + 1)).square().sum() for i, o in enumerate(outs)).backward()
                    results.append([*outs, xi.grad, *(some[k].bias.grad for k in names)])
                for a, b in zip(*results, strict=True):
                    assert torch.equal(a, b), f"{sp} {options}"
            for k in ("q", "g"):
                assert layers[k].weight.grad is None
                torch.testing.assert_close(
                    layers[k].weight.main_grad, plain[k].weight.grad, rtol=1e-12, atol=1e-12
                )
            assert torch.equal(layers["k"].weight.grad, plain["k"].weight.grad)
            assert torch.equal(
                layers["v"].weight.main_grad, torch.full_like(layers["v"].weight.main_grad, 3.0)
            )


def check_several_uses(ctx: RankContext) -> None:
    """One weight used three times in a step, with and without recomputation, of both kinds."""
    from torch.utils.checkpoint import checkpoint

    for case in cases(ctx.world):
        for recompute in (None, False, True):
            layer, plain = make(ctx, case, F64), make(ctx, case, F64)
            fused(layer)
            batches = [batch(ctx, case, layer, F64) for _ in range(3)]
            grads = []
            for some in (layer, plain):
                xs = [b.my_x.clone().requires_grad_() for b in batches]

                def call(x: Tensor, some: Any = some, case: Case = case) -> Tensor:
                    return some(x, shard_sizes=case.sizes)

                if recompute is None:
                    ys = [call(x) for x in xs]
                else:
                    ys = [checkpoint(call, x, use_reentrant=recompute) for x in xs]
                sum((y * b.my_dy).sum() for y, b in zip(ys, batches, strict=True)).backward()
                grads.append([x.grad for x in xs])
            for a, b in zip(*grads, strict=True):
                assert torch.equal(a, b), case
            assert layer.weight.grad is None
            torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


def check_other_gradients_alone(ctx: RankContext) -> None:
    """What asks for the input's gradient alone adds nothing; what asks for the weight's alone adds it."""
    for case in cases(ctx.world):
        layer = make(ctx, case, F64, bias=False)
        fused(layer)
        b = batch(ctx, case, layer, F64)
        x = b.my_x.clone().requires_grad_()
        y = layer(x, shard_sizes=case.sizes)
        (first,) = torch.autograd.grad(y, [x], b.my_dy, retain_graph=True)
        y.backward(b.my_dy, inputs=[x], retain_graph=True)
        assert torch.equal(x.grad, first)
        assert not layer.weight.main_grad.any(), case
        y.backward(b.my_dy, inputs=[layer.weight])
        sums, _ = expected(ctx, case, layer, [b])
        torch.testing.assert_close(layer.weight.main_grad, sums, rtol=1e-12, atol=1e-12)
        with pytest.raises(tpk.errors.ArgumentError, match="create_graph"):
            layer(x, shard_sizes=case.sizes).backward(b.my_dy, create_graph=True)


def check_megatron(ctx: RankContext) -> None:
    """With grad_added_to_main_grad: hooks as Megatron's DDP registers run and find a gradient to drop."""
    for case in cases(ctx.world):
        for zero in (False, True):
            layer = make(ctx, case, torch.bfloat16, bias=False)
            fused(layer)
            weight = layer.weight
            weight.grad_added_to_main_grad = False
            if zero:
                weight.zero_out_wgrad = True
            seen = []

            def hook(*_: Any, weight: Any = weight, seen: list[bool] = seen, zero: bool = zero) -> None:
                assert weight.grad is not None
                assert weight.grad.shape == weight.shape
                assert weight.grad.dtype == weight.dtype
                assert not zero or not weight.grad.any()
                seen.append(weight.grad_added_to_main_grad)
                weight.grad = None

            accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
            accumulator.register_hook(hook)
            batches = [batch(ctx, case, layer, torch.bfloat16) for _ in range(2)]
            for b in batches:
                step(layer, case, b)
            assert seen == [True, True], case
            sums, scale = expected(ctx, case, layer, batches)
            assert ((weight.main_grad - sums).abs() <= 1e-5 * scale).all()


def check_off(ctx: RankContext) -> None:
    """gradient_accumulation_fusion=False leaves main_grad alone; no gradients, no need of one."""
    case = cases(ctx.world)[1]
    layer = make(ctx, case, F64, gradient_accumulation_fusion=False)
    fused(layer)
    step(layer, case, batch(ctx, case, layer, F64))
    assert layer.weight.grad is not None
    assert not layer.weight.main_grad.any()
    asked = make(ctx, case, F64, gradient_accumulation_fusion=True)
    x = batch(ctx, case, asked, F64).my_x
    with torch.no_grad():
        asked(x)
    asked.weight.requires_grad_(False)
    asked(x)


def check_refusals(ctx: RankContext) -> None:
    for case in cases(ctx.world):
        layer = make(ctx, case, torch.bfloat16, gradient_accumulation_fusion=True)
        b = batch(ctx, case, layer, torch.bfloat16)
        weight = layer.weight
        shape = list(weight.shape)
        float32 = {"dtype": torch.float32}
        bad = [
            (None, tpk.errors.ArgumentError, ["missing", "torch.zeros_like(weight, dtype=torch.float32)"]),
            (3, tpk.errors.ArgumentError, ["main_grad", "3"]),
            (torch.zeros(shape[::-1], **float32), tpk.errors.ShapeError, [str(shape), str(shape[::-1])]),
            (torch.zeros(shape, dtype=torch.bfloat16), tpk.errors.DTypeError, ["float32", "bfloat16"]),
            (torch.zeros(shape, dtype=F64), tpk.errors.DTypeError, ["float32", "float64"]),
            (torch.zeros(shape, device="meta"), tpk.errors.DeviceError, ["meta", str(weight.device)]),
        ]
        for value, kind, words in bad:
            weight.main_grad = value
            with pytest.raises(kind) as caught:
                step(layer, case, b)
            assert all(word in str(caught.value) for word in ["weight.main_grad", *words]), str(caught.value)
        weight.main_grad = torch.zeros(shape, **float32)
        weight.overwrite_main_grad = True
        with pytest.raises(tpk.errors.ArgumentError, match="overwrite_main_grad"):
            step(layer, case, b)
        weight.overwrite_main_grad = False
        step(layer, case, b)
        # It goes, or changes, between the two passes.
        for value, kind, _ in bad[:3]:
            weight.main_grad = torch.zeros(shape, **float32)
            y = layer(b.my_x.clone().requires_grad_(), shard_sizes=case.sizes)
            weight.main_grad = value
            with pytest.raises(kind):
                y.backward(b.my_dy)


def check_clipping(ctx: RankContext) -> None:
    """The norm counts main_grad, and clipping scales it."""
    norms = []
    for with_main_grad in (False, True):
        mlp = tnn.ParallelMLP(6, 10, group=ctx.group_name, bias=True, dtype=F64, name="mlp")
        if with_main_grad:
            fused(mlp)
        draw = torch.Generator().manual_seed(7)
        x = torch.randn(4, 6, dtype=F64, generator=draw, device="cpu").to(ctx.device)
        mlp(x).square().sum().backward()
        before = tnn.clip_grad_norm_(mlp.parameters(), 0.5)
        norms.append([before, tnn.grad_norm(mlp.parameters())])
    torch.testing.assert_close(norms[0], norms[1])
    assert norms[1][0] > 0.6
    assert abs(norms[1][1] - 0.5) < 1e-5
    weight: Any = mlp.up_proj.weight
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(tpk.errors.ArgumentError, match="in grad and in main_grad"):
        tnn.grad_norm(mlp.parameters())
    weight.grad_added_to_main_grad = True  # then grad is a dummy
    torch.testing.assert_close(tnn.grad_norm(mlp.parameters()), norms[1][1])
