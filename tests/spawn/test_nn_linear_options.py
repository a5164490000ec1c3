"""Options of the linear layers: skip_bias_add, keep_gathered, frozen weights, meta construction, on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_dense import assert_grads, close, layouts, part
from torch import Tensor, nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
F64 = torch.float64
INSIDE, OUTSIDE = 10, 7

# What callers make of (y, bias): plainly, fused with what follows, and with the bias used twice.
USES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda y, b: y + b,
    lambda y, b: F.gelu(y + b) * 3,
    lambda y, b: y * (1 + b) + b,
)


def started(layer: nn.Module, inside: int = INSIDE, outside: int = OUTSIDE) -> nn.Linear:
    """nn.Linear with the layer's weight and bias, which are set to something first."""
    dense = tnn.init_weights_(nn.Linear(inside, outside, dtype=F64), seed=1)
    with torch.no_grad():
        dense.bias.copy_(torch.arange(outside) / 5 - 0.7)
    tnn.load_full_state_dict(layer, dense.state_dict())
    return dense


def run_dense(
    dense: nn.Linear, x: Tensor, use: Callable[[Tensor, Tensor], Tensor], weight: Tensor
) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = use(F.linear(x, dense.weight), dense.bias)
    out.backward(weight)
    assert x.grad is not None
    return out.detach(), x.grad


def check_column_skips(ctx: RankContext) -> None:
    for shape, dim, sizes in layouts(ctx.world):
        rows = sizes or tpk.shard_sizes(shape[dim], ctx.world)
        for sp, gather, use in ((sp, g, u) for sp in (False, True) for g in (False, True) for u in USES):
            note = f"column {shape} dim={dim} {sizes} sp={sp} gather={gather}"
            layer = tnn.ColumnParallelLinear(
                INSIDE,
                OUTSIDE,
                group=ctx.group,
                dtype=F64,
                sequence_parallel=sp,
                sequence_dim=dim,
                gather_output=gather,
                skip_bias_add=True,
            )
            dense = started(layer)
            x, weight = torch.randn(*shape, INSIDE, dtype=F64), torch.randn(*shape, OUTSIDE, dtype=F64)
            y, grad = run_dense(dense, x, use, weight)
            mine = (part(x, dim, rows, ctx.rank) if sp else x).clone().requires_grad_()
            out = use(*layer(mine, sizes if sp else None))
            columns = list(layer.out_sizes)
            close(out, y if gather else part(y, -1, columns, ctx.rank), note)
            out.backward(weight if gather else part(weight, -1, columns, ctx.rank))
            close(mine.grad, part(grad, dim, rows, ctx.rank) if sp else grad, f"{note}: x")
            assert_grads(layer, dense, note)


def check_row_skips(ctx: RankContext) -> None:
    for shape, dim, sizes in layouts(ctx.world):
        rows = sizes or tpk.shard_sizes(shape[dim], ctx.world)
        for sp, use in ((sp, u) for sp in (False, True) for u in USES):
            note = f"row {shape} dim={dim} {sizes} sp={sp}"
            layer = tnn.RowParallelLinear(
                INSIDE,
                OUTSIDE,
                group=ctx.group,
                dtype=F64,
                sequence_parallel=sp,
                sequence_dim=dim,
                skip_bias_add=True,
            )
            dense = started(layer)
            x, weight = torch.randn(*shape, INSIDE, dtype=F64), torch.randn(*shape, OUTSIDE, dtype=F64)
            y, grad = run_dense(dense, x, use, weight)

            def mine(
                t: Tensor, sp: bool = sp, dim: int = dim, rows: list[int] = rows, rank: int = ctx.rank
            ) -> Tensor:
                return part(t, dim, rows, rank) if sp else t

            columns = list(layer.in_sizes)
            xi = part(x, -1, columns, ctx.rank).clone().requires_grad_()
            with tpk.record_paths() as log:
                out = use(*layer(xi, shard_sizes=sizes if sp else None))
                out.backward(mine(weight))
            close(out, mine(y), note)
            close(xi.grad, part(grad, -1, columns, ctx.rank), f"{note}: x")
            assert_grads(layer, dense, note)
            reductions = sum(n for (op, _), n in log.counts.items() if op == "all_reduce")
            assert reductions == (1 if sp else 0), f"{note}: {log}"
            gathered = tpk.regions.all_gather(layer.bias.grad[None], 0, ctx.group)
            assert (gathered == gathered[0]).all(), f"{note}: the bias's gradients differ between ranks"


def check_skips_together(ctx: RankContext) -> None:
    """Layers of one gather return what each returns alone; without a bias there is None to add."""
    kinds: dict[str, Any] = {"group": ctx.group, "dtype": F64, "skip_bias_add": True}
    layers = tnn.ColumnParallelLinears(6, {"q": 9, "k": 5}, **kinds)
    with torch.no_grad():
        for p in layers.parameters():
            p.normal_()
    x = torch.randn(3, 6, dtype=F64)
    for (y, bias), key in zip(layers(x), ("q", "k"), strict=True):
        assert bias is layers[key].bias
        close(y, F.linear(x, layers[key].weight), key)
    for layer in (
        tnn.ColumnParallelLinear(6, 6, bias=False, gather_output=True, **kinds),
        tnn.RowParallelLinear(6, 6, bias=False, sequence_parallel=True, **kinds),
    ):
        inside = layer.weight.shape[1]
        y, bias = layer(torch.randn(ctx.world, inside, dtype=F64))
        assert bias is None
        assert y.shape[-1] == 6
    row = tnn.RowParallelLinear(6, 5, **kinds)
    x, r = torch.randn(4, row.weight.shape[1], dtype=F64), torch.randn(4, 5, dtype=F64)
    with torch.no_grad():
        close(row(x, r)[0], row(x)[0] + r, "residual")


class Held:
    """What autograd holds of the calls made inside, parameters apart, in bytes; every storage once."""

    def __init__(self, module: nn.Module) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.kept: dict[int, Tensor] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)

    def pack(self, t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in self.own:
            self.kept[t.untyped_storage().data_ptr()] = t
        return t

    def __enter__(self) -> Held:
        self.hooks.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.hooks.__exit__(*args)

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.kept.values())


def check_keep_gathered(ctx: RankContext) -> None:
    """The same gradients, one gather less, all of the sequence held instead of this rank's part."""
    shape = (4 * ctx.world, 3, INSIDE)
    whole = torch.randn(shape, dtype=F64)
    shard_bytes = 4 * 3 * INSIDE * 8
    results, gathers, held = [], [], []
    for keep in (False, True):
        layer = tnn.ColumnParallelLinear(
            INSIDE, OUTSIDE, group=ctx.group, dtype=F64, sequence_parallel=True, keep_gathered=keep
        )
        x = part(whole, 0, [4] * ctx.world, ctx.rank).clone().requires_grad_()
        with tpk.record_paths() as log:
            with Held(layer) as kept:
                y = layer(x)
            y.square().sum().backward()
        held.append(kept.bytes)
        gathers.append(sum(n for (op, _), n in log.counts.items() if "gather" in op))
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert held == [shard_bytes, ctx.world * shard_bytes]
    assert gathers == [2, 1]


def check_frozen_holds_nothing(ctx: RankContext) -> None:
    """Nothing of the input where the weight is frozen, all of it where it is not; the gradients that are left."""
    rows = 2 * ctx.world
    for sp in (False, True):
        for frozen in (False, True):
            for kind in (tnn.ColumnParallelLinear, tnn.RowParallelLinear):
                options: dict[str, Any] = {"group": ctx.group, "dtype": F64, "sequence_parallel": sp}
                if kind is tnn.ColumnParallelLinear and sp:
                    options["keep_gathered"] = True
                layer = kind(INSIDE, OUTSIDE, **options)
                dense = started(layer)
                layer.weight.requires_grad_(not frozen)
                x = torch.randn(rows, INSIDE, dtype=F64)
                _, grad = run_dense(dense, x, USES[0], torch.ones(rows, OUTSIDE, dtype=F64))
                column = kind is tnn.ColumnParallelLinear
                places = (0, [2] * ctx.world) if column else (-1, list(getattr(layer, "in_sizes", [])))
                cut = sp or not column
                xi = (part(x, *places, ctx.rank) if cut else x).clone().requires_grad_()
                with Held(layer) as held:
                    out = layer(xi)
                note = f"{kind.__name__} sp={sp} frozen={frozen}"
                whole = x if column else xi
                assert held.bytes == (0 if frozen else whole.numel() * 8), f"{note}: {held.bytes}"
                with tpk.record_paths() as log:
                    out.sum().backward()
                if frozen and column and sp:
                    assert not any("gather" in op for op, _ in log.counts), f"{note}: {log}"
                close(xi.grad, part(grad, *places, ctx.rank) if cut else grad, note)
                close(
                    layer.bias.grad,
                    part(dense.bias.grad, 0, layer.out_sizes, ctx.rank) if column else dense.bias.grad,
                    note,
                )
                assert (layer.weight.grad is None) == frozen, note


def check_frozen_with_activation(ctx: RankContext) -> None:
    """The input is kept where it is needed to compute the activation's input again."""
    layer = tnn.ColumnParallelLinear(INSIDE, OUTSIDE, group=ctx.group, dtype=F64, activation="gelu")
    dense = started(layer)
    layer.weight.requires_grad_(False)
    x = torch.randn(5, INSIDE, dtype=F64)
    xi, xd = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(xi).sum().backward()
    F.gelu(dense(xd)).sum().backward()
    close(xi.grad, xd.grad, "activation")
    for op in (tpk.matmul_replicated, tpk.all_gather_matmul):  # the layer keeps what is in front of it
        xi = x.clone().requires_grad_()
        xd = (x if op is tpk.matmul_replicated else x.repeat(ctx.world, 1)).clone().requires_grad_()
        op(xi, layer.weight.t(), ctx.group, activation="gelu", save_preact=False).sum().backward()
        F.gelu(xd @ dense.weight.t()).sum().backward()
        close(xi.grad, xd.grad[:5], f"{op.__name__}, computed again")


def check_meta(ctx: RankContext) -> None:
    """Meta, to_empty and either way of filling: the same bits as direct construction."""
    common: dict[str, Any] = {"group": ctx.group, "dtype": torch.bfloat16, "seed": 5}

    def all_layers(**more: Any) -> nn.ModuleDict:
        kinds = {**common, **more}
        return nn.ModuleDict(
            {
                "column": tnn.ColumnParallelLinear(INSIDE, OUTSIDE, name="column", **kinds),
                "row": tnn.RowParallelLinear(INSIDE, OUTSIDE, init_std=0.3, name="row", **kinds),
                "both": tnn.ColumnParallelLinears(6, {"q": 9, "k": 5}, name="both", **kinds),
                "embed": tnn.VocabParallelEmbedding(11, 6, name="embed", **kinds),
                "mlp": tnn.ParallelMLP(6, 9, name="mlp", **kinds),
                "attention": tnn.ParallelAttention(24, 12, name="attention", **kinds),
                "norm": tnn.RMSNorm(6, group=ctx.group, dtype=torch.bfloat16, device=more.get("device")),
            }
        )

    for adapted in (False, True):
        for fill in ("reset_parameters", "init_weights_"):
            direct, late = all_layers(), all_layers(device="meta")
            if fill == "init_weights_":
                tnn.init_weights_(direct, seed=5, std=0.1)
            if adapted:
                for model in (direct, late):
                    tnn.add_lora_(model, 3, alpha=6, seed=5)
            assert all(p.is_meta for p in late.parameters())
            late.to_empty(device="cpu")
            with torch.no_grad():
                for p in late.parameters():
                    p.fill_(float("nan"))
            if fill == "init_weights_":
                tnn.init_weights_(late, seed=5, std=0.1)
            else:
                for module in late.modules():
                    if hasattr(module, "reset_parameters"):
                        module.reset_parameters()
            mine, other = dict(direct.named_parameters()), dict(late.named_parameters())
            assert mine.keys() == other.keys()
            for name, p in mine.items():
                assert torch.equal(p, other[name]), f"{name}, {fill}, lora={adapted}"
                assert tnn.placement_of(p) == tnn.placement_of(other[name])
                assert p.requires_grad == other[name].requires_grad


def check_refusals(ctx: RankContext) -> None:
    column, row = tnn.ColumnParallelLinear, tnn.RowParallelLinear
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: column(4, 4, group=ctx.group, keep_gathered=True),
            tpk.errors.ArgumentError,
            r"keep_gathered: only a layer with sequence_parallel=True",
        ),
        (
            lambda: column(4, 4, group=ctx.group, skip_bias_add=True, activation="relu"),
            tpk.errors.ArgumentError,
            r"skip_bias_add: the activation 'relu' comes behind the bias",
        ),
        (
            lambda: column(4, 4, group=ctx.group, biases=True),
            TypeError,
            r"unexpected keyword argument 'biases'",
        ),
        (lambda: row(4, 4, group=ctx.group, keep_gathered=True), TypeError, r"'keep_gathered'"),
        (
            lambda: tnn.ColumnParallelLinears(4, {"a": 4}, group=ctx.group, biases=True),
            TypeError,
            r"unexpected keyword argument 'biases'",
        ),
        (
            lambda: tnn.column_parallel(
                [
                    column(4, 4, group=ctx.group, sequence_parallel=True, keep_gathered=keep)
                    for keep in (False, True)
                ],
                torch.randn(2, 4),
            ),
            tpk.errors.ArgumentError,
            r"one keep_gathered, but it is False in one and True in another",
        ),
    ]
    for action, kind, pattern in cases:
        with pytest.raises(kind, match=pattern):
            action()


CHECKS = {
    f.__name__: f
    for f in (
        check_column_skips,
        check_row_skips,
        check_skips_together,
        check_keep_gathered,
        check_frozen_holds_nothing,
        check_frozen_with_activation,
        check_meta,
        check_refusals,
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", WORLDS)
def test_option(ranks: RankPool, world: int, check: str) -> None:
    ranks.run(CHECKS[check], world=world)
