"""LoRA on column- and row-parallel layers against the unsharded sum in float64, on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_dense import assert_grads, close, layouts, part, shard_of
from nn_lora import (
    ALPHA,
    F64,
    INSIDE,
    OUTSIDE,
    RANK,
    WORLDS,
    DenseLoRA,
    assert_equal_on_ranks,
    make,
    set_alike,
    travelled,
)
from torch import Tensor, nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool


def check_layers(ctx: RankContext) -> None:
    for shape, dim, sizes in layouts(ctx.world):
        rows = sizes or tpk.shard_sizes(shape[dim], ctx.world)
        cases = [
            (k, sp, b, f)
            for k in ("column", "row")
            for sp in (False, True)
            for b in (False, True)
            for f in (False, True)
        ]
        for kind, sp, bias, freeze in cases:
            note = f"{kind} {shape} dim={dim} {sizes} sp={sp} bias={bias} freeze={freeze}"
            layer, dense = make(ctx, kind, freeze=freeze, bias=bias, sequence_parallel=sp, sequence_dim=dim)
            x = torch.randn(*shape, INSIDE, dtype=F64, requires_grad=True)
            y = dense(x)
            weight = torch.randn_like(y)
            y.backward(weight)

            def own_rows(t: Tensor, sp: bool = sp, dim: int = dim, rows: list[int] = rows) -> Tensor:
                return part(t, dim, rows, ctx.rank) if sp else t

            def features(t: Tensor, sizes: tuple[int, ...]) -> Tensor:
                return part(t, -1, list(sizes), ctx.rank)

            if kind == "column":
                give, get = own_rows, lambda t, s=layer.out_sizes: features(t, s)
            else:
                give, get = (lambda t, s=layer.in_sizes: features(t, s)), own_rows
            mine = give(x.detach()).clone().requires_grad_()
            out = layer(mine, shard_sizes=sizes if sp else None)
            close(out, get(y.detach()), note)
            out.backward(get(weight))
            close(mine.grad, give(x.grad), f"{note}: x")
            for name, p in layer.named_parameters():
                expected = dense.get_parameter(name).grad
                assert (p.grad is None) == (expected is None), f"{note}: {name}"
                if expected is not None:
                    close(p.grad, shard_of(p, expected), f"{note}: {name}")
            assert_equal_on_ranks(ctx, layer, note)


def check_dtypes(ctx: RankContext) -> None:
    """Lower types follow float64 within their rounding."""
    for dtype, tolerance in ((torch.bfloat16, 0.03), (torch.float16, 0.004), (torch.float32, 2e-6)):
        for kind in ("column", "row"):
            for sp in (False, True):
                layer, _ = make(ctx, kind, dtype=dtype, sequence_parallel=sp)
                fine, _ = make(ctx, kind, sequence_parallel=sp)
                state = {k: v.double() for k, v in tnn.full_state_dict(layer).items()}
                tnn.load_full_state_dict(fine, state)
                width = fine.weight.shape[1]
                shape = (3, 5, width) if kind == "column" and sp else (3 * ctx.world, 5, width)
                torch.manual_seed(ctx.rank if sp or kind == "row" else 0)
                x = torch.randn(shape).to(dtype)
                for some in (layer, fine):
                    xi = x.to(some.weight.dtype, copy=True).requires_grad_()
                    y = some(xi)
                    assert y.dtype == some.weight.dtype
                    y.square().mean().backward()
                    some.made = [y, xi.grad, some.lora_A.grad, some.lora_B.grad]
                for a, b in zip(layer.made, fine.made, strict=True):
                    assert a.dtype == dtype
                    error = (a.double() - b).norm() / b.norm().clamp_min(1e-30)
                    assert error < tolerance, f"{kind} {dtype} sp={sp}: {error:.3g}"
                torch.manual_seed(0)


def check_start(ctx: RankContext) -> None:
    """A as the whole tensor has it, whatever the world, B zero: the layer begins as it was without."""
    bound = 1 / INSIDE**0.5
    whole = tnn.init.uniform_(
        torch.empty(RANK, INSIDE, dtype=F64), seed=7, name="layer.lora_A", low=-bound, high=bound
    )
    for kind in (tnn.ColumnParallelLinear, tnn.RowParallelLinear):
        layer = kind(INSIDE, OUTSIDE, group=ctx.group, dtype=F64, name="layer", seed=7)
        x = torch.randn(4, layer.weight.shape[1], dtype=F64)
        before = layer(x)
        tnn.add_lora_(layer, RANK)
        assert torch.equal(layer.lora_A, shard_of(layer.lora_A, whole))
        assert not layer.lora_B.any()
        assert layer.lora.scale == 1
        close(layer(x), before, "at the start")
        assert f"rank={RANK}, alpha={float(RANK)}" in repr(layer)
    model = nn.ModuleDict(
        {"layer": tnn.RowParallelLinear(INSIDE, OUTSIDE, group=ctx.group, dtype=F64, name="x")}
    )
    tnn.add_lora_(model, RANK, seed=7)  # named by where it is
    assert torch.equal(model["layer"].lora_A, shard_of(model["layer"].lora_A, whole))


def check_collectives(ctx: RankContext) -> None:
    """As the table in ``tpkernels.nn.lora`` has it; with three layers on one gather no more than with one."""
    more = {
        ("column", False): ({}, {"all_reduce": 1}),
        ("column", True): ({"all_gather": 1}, {"reduce_scatter": 1, "all_reduce": 1}),
        ("row", False): ({}, {"all_reduce": 1}),
        ("row", True): ({}, {"all_reduce": 1}),
    }
    for (kind, sp), (forward, backward) in more.items():
        for together in (False, True) if kind == "column" else (False,):
            options: dict[str, Any] = {"group": ctx.group, "dtype": F64, "sequence_parallel": sp}
            if together:
                layer: Any = tnn.ColumnParallelLinears(INSIDE, {"q": 9, "k": 5, "v": 5}, **options)
            else:
                of = tnn.ColumnParallelLinear if kind == "column" else tnn.RowParallelLinear
                layer = of(INSIDE, OUTSIDE, **options)
            layer.requires_grad_(False)
            found = []
            for adapted in (False, True):
                if adapted:
                    tnn.add_lora_(layer, RANK)
                width = next(p for p in layer.parameters() if p.dim() == 2).shape[1]
                x = torch.randn(2 * ctx.world, width, dtype=F64, requires_grad=True)
                with tpk.record_paths() as first:
                    y = layer(x)
                with tpk.record_paths() as second:
                    sum(o.sum() for o in (y if together else [y])).backward()
                found.append((travelled(first), travelled(second)))
            for plain, with_lora, extra in zip(*found, (forward, backward), strict=True):
                merged = {op: plain.get(op, 0) + extra.get(op, 0) for op in plain.keys() | extra.keys()}
                assert with_lora == merged, f"{kind} sp={sp} together={together}: {plain} {with_lora}"


def check_together(ctx: RankContext) -> None:
    """Layers on one gather, of which some have factors, of different ranks; activations; gathered outputs; no bias."""
    for sp in (False, True):
        for options in ({}, {"activation": "gelu_tanh"}, {"gather_output": True}, {"skip_bias_add": True}):
            layers = tnn.ColumnParallelLinears(
                6, {"q": 9, "k": 5, "v": 4}, group=ctx.group, dtype=F64, sequence_parallel=sp, **options
            )
            tnn.add_lora_(layers["q"], 2, alpha=3, freeze=False)
            tnn.add_lora_(layers, 4, targets=["v"], freeze=False)
            dense = nn.ModuleDict(
                {
                    "q": DenseLoRA(6, 9, True, 2, 3),
                    "k": nn.Linear(6, 5, dtype=F64),
                    "v": DenseLoRA(6, 4, True, 4, 4),
                }
            )
            set_alike(layers, dense)
            x = torch.randn(2 * ctx.world, 6, dtype=F64, requires_grad=True)
            mine = (part(x, 0, [2] * ctx.world, ctx.rank) if sp else x).detach().clone().requires_grad_()
            outs = layers(mine)
            if "skip_bias_add" in options:
                outs = [y + bias for y, bias in outs]
            loss = 0
            for key, out in zip(layers, outs, strict=True):
                y = dense[key](x)
                y = F.gelu(y, approximate="tanh") if "activation" in options else y
                columns = list(layers[key].out_sizes)
                close(
                    out,
                    y if "gather_output" in options else part(y, -1, columns, ctx.rank),
                    f"{key} {sp} {options}",
                )
                loss = loss + y.square().sum()
            loss.backward()
            sum(out.square().sum() for out in outs).backward()
            close(
                mine.grad, part(x.grad, 0, [2] * ctx.world, ctx.rank) if sp else x.grad, f"{sp} {options}: x"
            )
            assert_grads(layers, dense, f"{sp} {options}")


def check_dropout(ctx: RankContext) -> None:
    """Off in eval; on, the factors see the masked input alone, and whole factors get one gradient everywhere."""
    for kind in ("column", "row"):
        for sp in (False, True):
            layer, _ = make(ctx, kind, sequence_parallel=sp)
            tnn.remove_lora_(layer)
            tnn.add_lora_(layer, RANK, alpha=ALPHA, dropout=0.4)
            with torch.no_grad():
                layer.lora_B.copy_(shard_of(layer.lora_B, torch.randn(OUTSIDE, RANK, dtype=F64)))
            replicated = kind == "column" and not sp
            torch.manual_seed(5 if replicated else 5 + ctx.rank)
            x = torch.randn(4 if kind == "column" else 4 * ctx.world, layer.weight.shape[1], dtype=F64)
            with torch.no_grad():
                layer.eval()
                assert torch.equal(layer(x), layer(x))
                layer.train()
                state = torch.get_rng_state()
                out = layer(x)
                torch.set_rng_state(state)
                masked = F.dropout(x, 0.4)
                torch.set_rng_state(state)
                layer.lora_B.neg_()
                base = (out + layer(x)) / 2
                layer.lora_B.neg_()
                inner = masked @ layer.lora_A.t() * layer.lora.scale
                if kind == "row":
                    low = inner @ layer.lora_B.t()
                    low = (
                        tpk.regions.reduce_scatter(low, 0, ctx.group)
                        if sp
                        else tpk.regions.all_reduce(low, ctx.group)
                    )
                else:
                    inner = tpk.regions.all_gather(inner, 0, ctx.group) if sp else inner
                    low = inner @ layer.lora_B.t()
                close(out - base, low, f"{kind} sp={sp}")
            layer(x).square().sum().backward()
            assert_equal_on_ranks(ctx, layer, f"dropout {kind} sp={sp}")


def check_held(ctx: RankContext) -> None:
    """With a frozen base autograd holds the input once, and the narrow product."""
    from test_nn_linear_options import Held

    wide = 1000
    for sp in (False, True):
        layer = tnn.ColumnParallelLinear(wide, OUTSIDE, group=ctx.group, dtype=F64, sequence_parallel=sp)
        tnn.add_lora_(layer, RANK)
        x = torch.randn(5, wide, dtype=F64)
        with Held(layer) as held:
            y = layer(x)
        rows = 5 * ctx.world if sp else 5
        factor = RANK * wide * 8  # A as all ranks' rows share it
        assert held.bytes == x.numel() * 8 + rows * RANK * 8 + factor, f"sp={sp}: {held.bytes}"
        y.sum().backward()
        assert layer.lora_A.grad is not None


def check_autocast_and_recompute(ctx: RankContext) -> None:
    from torch.utils.checkpoint import checkpoint

    for kind in ("column", "row"):
        for sp in (False, True):
            layer, _ = make(ctx, kind, dtype=torch.float32, sequence_parallel=sp)
            x = torch.randn(2 * ctx.world, layer.weight.shape[1])
            results = []
            for recompute in (False, True):
                layer.zero_grad()
                xi = x.clone().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16):
                    y = checkpoint(layer, xi, use_reentrant=False) if recompute else layer(xi)
                assert y.dtype == torch.bfloat16
                y.float().square().sum().backward()
                assert layer.lora_A.grad.dtype == torch.float32
                results.append([y, xi.grad, layer.lora_A.grad, layer.lora_B.grad])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b)


def check_compiled(ctx: RankContext) -> None:
    """One graph, the same gradients."""
    for kind in ("column", "row"):
        for sp in (False, True):
            layer, _ = make(ctx, kind, sequence_parallel=sp)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            x = torch.randn(2 * ctx.world, layer.weight.shape[1], dtype=F64)
            results = []
            for some in (layer, compiled):
                layer.zero_grad()
                xi = x.clone().requires_grad_()
                y = some(xi)
                y.square().sum().backward()
                results.append([y, xi.grad, layer.lora_A.grad, layer.lora_B.grad])
            for a, b in zip(*results, strict=True):
                close(b, a, f"{kind} sp={sp}")


CHECKS = {
    f.__name__: f
    for f in (
        check_layers,
        check_dtypes,
        check_start,
        check_collectives,
        check_together,
        check_dropout,
        check_held,
        check_autocast_and_recompute,
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", WORLDS)
def test_lora(ranks: RankPool, world: int, check: str) -> None:
    ranks.run(CHECKS[check], world=world)


def test_compiled(ranks: RankPool) -> None:
    ranks.run(check_compiled, world=2)
