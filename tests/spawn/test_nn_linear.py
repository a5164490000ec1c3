"""Column- and row-parallel layers against nn.Linear in float64, on 1 to 4 ranks: outputs, gradients, uneven shards."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from nn_dense import close, layouts, part, shard_of
from torch import Tensor, nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
F64 = torch.float64


def twin(layer: nn.Module, inside: int, outside: int, bias: bool) -> nn.Linear:
    """nn.Linear with the same start as ``layer``, both with biases away from zero."""
    dense = tnn.init_weights_(nn.Linear(inside, outside, bias=bias, dtype=F64), seed=1, prefix="layer")
    if bias:
        with torch.no_grad():
            dense.bias.copy_(torch.arange(outside) / 7 - 0.3)
    tnn.load_full_state_dict(layer, dense.state_dict())
    return dense


ACTIVATIONS = {
    None: lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
}


def check_column(ctx: RankContext) -> None:
    inside, outside = 6, 10  # 10 features: on 4 ranks 3, 3, 3, 1
    common = {"group": ctx.group_name, "dtype": F64, "seed": 1, "name": "layer"}
    for bias in (False, True):
        for shape, dim, sizes in layouts(ctx.world):
            for sp in (False, True):
                for gather in (False, True):
                    note = f"column bias={bias} {shape} dim={dim} {sizes} sp={sp} gather={gather}"
                    kinds = {
                        "bias": bias,
                        "sequence_parallel": sp,
                        "sequence_dim": dim,
                        "gather_output": gather,
                    }
                    layer = tnn.ColumnParallelLinear(inside, outside, **kinds, **common)
                    fresh = layer.weight.clone()
                    dense = twin(layer, inside, outside, bias)
                    assert torch.equal(layer.weight, fresh), f"{note}: start"
                    rows = sizes or tpk.shard_sizes(shape[dim], ctx.world)
                    check_linear(
                        ctx,
                        layer,
                        dense,
                        shape,
                        dim,
                        rows if sp else None,
                        sizes if sp else None,
                        gather,
                        note,
                    )
    for activation, f in ACTIVATIONS.items():
        layer = tnn.ColumnParallelLinear(inside, outside, activation=activation, **common)
        dense = twin(layer, inside, outside, True)
        x = torch.randn(4, inside, dtype=F64)
        close(layer(x), part(f(dense(x)), -1, list(layer.out_sizes), ctx.rank), f"activation {activation}")


def check_linear(
    ctx: RankContext,
    layer: tnn.ColumnParallelLinear,
    dense: nn.Linear,
    shape: tuple[int, ...],
    dim: int,
    rows: list[int] | None,
    sizes: list[int] | None,
    gather: bool,
    note: str,
) -> None:
    x = torch.randn(*shape, dense.in_features, dtype=F64, requires_grad=True)
    y = dense(x)
    weight = torch.randn_like(y)  # of the loss; the ranks draw alike
    y.backward(weight)
    mine = x.detach() if rows is None else part(x.detach(), dim, rows, ctx.rank)
    mine = mine.clone().requires_grad_()
    out = layer(mine, sizes)
    columns = list(layer.out_sizes)
    close(out, y if gather else part(y, -1, columns, ctx.rank), note)
    out.backward(weight if gather else part(weight, -1, columns, ctx.rank))
    close(mine.grad, x.grad if rows is None else part(x.grad, dim, rows, ctx.rank), f"{note}: x")
    close(layer.weight.grad, part(dense.weight.grad, 0, columns, ctx.rank), f"{note}: weight")
    if layer.bias is not None:
        close(layer.bias.grad, part(dense.bias.grad, 0, columns, ctx.rank), f"{note}: bias")


def check_row(ctx: RankContext) -> None:
    inside, outside = 10, 6
    common = {"group": ctx.group_name, "dtype": F64, "seed": 1, "name": "layer"}
    for bias in (False, True):
        for shape, dim, sizes in layouts(ctx.world):
            for sp in (False, True):
                for whole_input in (False,) if sp else (False, True):
                    note = f"row bias={bias} {shape} dim={dim} {sizes} sp={sp} whole={whole_input}"
                    layer = tnn.RowParallelLinear(
                        inside,
                        outside,
                        bias=bias,
                        input_is_parallel=not whole_input,
                        sequence_parallel=sp,
                        sequence_dim=dim,
                        **common,
                    )
                    fresh = layer.weight.clone()
                    dense = twin(layer, inside, outside, bias)
                    assert torch.equal(layer.weight, fresh), f"{note}: start"
                    x = torch.randn(*shape, inside, dtype=F64, requires_grad=True)
                    r = torch.randn(*shape, outside, dtype=F64, requires_grad=True)
                    y = dense(x) + r
                    weight = torch.randn_like(y)
                    y.backward(weight)
                    columns = list(layer.in_sizes)
                    rows = sizes or tpk.shard_sizes(shape[dim], ctx.world)

                    def rows_of(t: Tensor, sp: bool = sp, dim: int = dim, rows: list[int] = rows) -> Tensor:
                        return part(t, dim, rows, ctx.rank) if sp else t

                    mine = x.detach() if whole_input else part(x.detach(), -1, columns, ctx.rank)
                    mine = mine.clone().requires_grad_()
                    my_r = rows_of(r.detach()).clone().requires_grad_()
                    out = layer(mine, my_r, sizes if sp else None)
                    close(out, rows_of(y), note)
                    out.backward(rows_of(weight))
                    close(
                        mine.grad,
                        x.grad if whole_input else part(x.grad, -1, columns, ctx.rank),
                        f"{note}: x",
                    )
                    close(my_r.grad, rows_of(r.grad), f"{note}: residual")
                    close(layer.weight.grad, part(dense.weight.grad, 1, columns, ctx.rank), f"{note}: weight")
                    if bias:
                        close(layer.bias.grad, dense.bias.grad, f"{note}: bias")

    # A bias that is added on every rank would give the world here, one divided by the world a wrong gradient.
    for sp in (False, True):
        layer = tnn.RowParallelLinear(inside, outside, sequence_parallel=sp, **common)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.fill_(1)
        out = layer(torch.randn(ctx.world, layer.in_sizes[ctx.rank], dtype=F64))
        assert torch.equal(out, torch.ones_like(out))
        out.sum().backward()
        assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, float(ctx.world)))


def check_dtypes(ctx: RankContext) -> None:
    """Every type, both layers, uneven features and rows: each element within what its products allow."""
    cases = [
        (kind, bias, sp, dtype, layout)
        for kind in ("column", "row")
        for bias in (False, True)
        for sp in (False, True)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, F64)
        for layout in layouts(ctx.world)[2:4]
    ]
    inside, outside = 10, 7
    for kind, bias, sp, dtype, (shape, dim, sizes) in cases:
        of = tnn.ColumnParallelLinear if kind == "column" else tnn.RowParallelLinear
        layer = of(
            inside,
            outside,
            group=ctx.group_name,
            bias=bias,
            dtype=dtype,
            sequence_parallel=sp,
            sequence_dim=dim,
            name="layer",
        )
        if bias:
            with torch.no_grad():
                layer.bias.copy_(shard_of(layer.bias, torch.randn(outside).to(dtype)))
        state = {k: v.double() for k, v in tnn.full_state_dict(layer).items()}
        x, dy = torch.randn(*shape, inside).to(dtype), torch.randn(*shape, outside).to(dtype)

        def rows(t: Tensor, sp: bool = sp, dim: int = dim, sizes: list[int] = sizes) -> Tensor:
            return part(t, dim, sizes, ctx.rank) if sp else t

        def columns(t: Tensor, layer: nn.Module = layer, kind: str = kind) -> Tensor:
            return part(t, -1, list(layer.out_sizes if kind == "column" else layer.in_sizes), ctx.rank)

        give, get = (rows, columns) if kind == "column" else (columns, rows)
        mine = give(x).clone().requires_grad_()
        y = layer(mine, shard_sizes=sizes if sp else None)
        y.backward(get(dy))
        note = f"{kind} bias={bias} sp={sp} {dtype} {shape} dim={dim}"
        results = {"y": (y, get), "x": (mine.grad, give), "weight": (layer.weight.grad, None)}
        if bias:
            results["bias"] = (layer.bias.grad, None)
        exact, scale = (linear_grads(x, dy, state, f) for f in (Tensor.double, lambda t: t.double().abs()))
        terms = max(inside, outside, x[..., 0].numel())
        unit = (terms + 4) * torch.finfo(accumulate_dtype(dtype)).eps + 3 * torch.finfo(dtype).eps
        for name, (value, cut) in results.items():
            assert value.dtype == dtype, f"{note}: {name}"
            cut = cut or functools.partial(shard_of, layer.get_parameter(name))
            error, allowed = (value.double() - cut(exact[name])).abs(), unit * cut(scale[name])
            assert (error <= allowed).all(), f"{note}: {name} is off by {(error - allowed).max()}"


def linear_grads(
    x: Tensor, dy: Tensor, state: dict[str, Tensor], to: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Output and gradients of the whole layer; with absolute values, what rounding errors are in proportion to."""
    x, dy, w = to(x), to(dy), to(state["weight"])
    y = x @ w.t() + (to(state["bias"]) if "bias" in state else 0)
    flat_x, flat_dy = x.flatten(0, -2), dy.flatten(0, -2)
    return {"y": y, "x": dy @ w, "weight": flat_dy.t() @ flat_x, "bias": flat_dy.sum(0)}


def check_several(ctx: RankContext) -> None:
    """One gather for three layers gives what three layers give; frozen weights take part without a gradient."""
    sizes = {"q": 9, "k": 5, "v": 5}
    for sp in (False, True):
        layers = tnn.ColumnParallelLinears(
            6, sizes, group=ctx.group, dtype=F64, sequence_parallel=sp, name="qkv"
        )
        assert [n for n, _ in layers.named_parameters()] == [
            f"{k}.{p}" for k in sizes for p in ("weight", "bias")
        ]
        layers["k"].weight.requires_grad_(False)
        layers["q"].bias.requires_grad_(False)
        x = torch.randn(ctx.world * 2, 6, dtype=F64)
        x = part(x, 0, [2] * ctx.world, ctx.rank) if sp else x
        results = []
        for together in (True, False):
            layers.zero_grad(set_to_none=True)
            xi = x.clone().requires_grad_()
            outs = layers(xi) if together else [layers[k](xi) for k in sizes]
            sum((o * (i + 1)).square().sum() for i, o in enumerate(outs)).backward()
            assert layers["k"].weight.grad is None
            assert layers["q"].bias.grad is None
            grads = [p.grad for p in layers.parameters() if p.requires_grad]
            results.append([*outs, xi.grad, *grads])
        for a, b in zip(*results, strict=True):
            close(a, b, f"several, sp={sp}")
    row = tnn.RowParallelLinear(10, 4, group=ctx.group, dtype=F64, bias=False)
    row.weight.requires_grad_(False)
    x = torch.randn(3, row.in_sizes[ctx.rank], dtype=F64, requires_grad=True)
    row(x).sum().backward()
    close(x.grad, row.weight.sum(0).expand(3, -1), "frozen row")
    assert row.weight.grad is None


CHECKS = {f.__name__: f for f in (check_column, check_row, check_dtypes, check_several)}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", WORLDS)
def test_layer(ranks: RankPool, world: int, check: str) -> None:
    ranks.run(CHECKS[check], world=world)
