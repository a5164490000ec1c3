"""Layers with recipe=: every kind, with sequence parallelism and without, against the layer in high precision."""

from __future__ import annotations

import pytest
import torch
from nn_dense import part
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.errors import ArgumentError, DTypeError
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
RECIPES = ("tensorwise", "rowwise", "blockwise")
# Relative errors by norm that a product of random operands in e4m3 has are near 0.037, with a gradient in e5m2 near
# 0.06 (docs/fp8.md); one product behind another adds up in squares. A block has a chain of four.
NEAR = {"tensorwise": 0.09, "rowwise": 0.06, "blockwise": 0.06}


def off(actual: Tensor | None, wanted: Tensor | None) -> float:
    assert actual is not None and wanted is not None and actual.shape == wanted.shape
    assert actual.dtype == wanted.dtype
    if wanted.numel() == 0:
        return 0.0
    return float((actual - wanted).double().norm() / wanted.double().norm().clamp_min(1e-30))


def step(module: nn.Module, x: Tensor, dy: Tensor, **options: object) -> dict[str, Tensor]:
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = module(x, **options)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def check_linear(ctx: RankContext, recipe: str) -> None:
    """Column and row, bias, gathered output, kept gather, uneven rows, activation, residual, both sequence dims."""
    inside, outside = 60, 52
    uneven = [3, 0, 2, 4][: ctx.world]
    layouts = [((4 * ctx.world, 2), 0, [4] * ctx.world), ((2, sum(uneven)), 1, uneven)]
    for shape, dim, sizes in layouts:
        for sp in (False, True):
            common = {
                "group": ctx.group_name,
                "seed": 1,
                "name": "layer",
                "sequence_parallel": sp,
                "sequence_dim": dim,
            }
            columns = [
                {"gather_output": True},
                {"activation": "gelu"},
                *([{"keep_gathered": True}] if sp else []),
            ]
            for kind, options in [("column", o) for o in columns] + [("row", {}), ("row", {"bias": False})]:
                of = tnn.ColumnParallelLinear if kind == "column" else tnn.RowParallelLinear
                mine, plain = (of(inside, outside, recipe=r, **common, **options) for r in (recipe, None))
                assert mine.state_dict().keys() == plain.state_dict().keys()
                assert all(
                    torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True)
                )
                assert mine.weight.dtype == torch.float32
                x, dy = torch.randn(*shape, inside), torch.randn(*shape, outside)
                if kind == "column":
                    x = part(x, dim, sizes, ctx.rank) if sp else x
                    dy = dy if options.get("gather_output") else part(dy, -1, list(mine.out_sizes), ctx.rank)
                else:
                    x = part(x, -1, list(mine.in_sizes), ctx.rank)
                    dy = part(dy, dim, sizes, ctx.rank) if sp else dy
                given = {"shard_sizes": sizes} if sp else {}
                if kind == "row":
                    given["residual"] = torch.randn_like(dy)
                got, wanted = step(mine, x, dy, **given), step(plain, x, dy, **given)
                for name, value in wanted.items():
                    limit = 2 * NEAR[recipe] if "activation" in options else NEAR[recipe]
                    error = off(got[name], value)
                    assert error < limit, (
                        f"{recipe} {kind} {options} sp={sp} {shape}: {name} is off by {error:.3g}"
                    )
                    if name == "bias" and "activation" not in options:
                        assert error < 1e-5  # no product makes it


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", WORLDS)
def test_linear(ranks: RankPool, world: int, recipe: str) -> None:
    ranks.run(check_linear, recipe, world=world)


def check_block(ctx: RankContext, recipe: str, dtype: torch.dtype) -> None:
    """A whole block in the styles of Llama (kv heads fewer than ranks) and GPT, recomputed or not."""
    styles = [
        ((64, 96, 8, 2), {}),
        ((64, 80, 4), {"norm": "layer", "activation": "gelu", "bias": True, "rotary_base": None}),
    ]
    for sizes, style in styles:
        for sp, recompute in ((False, "none"), (True, "none"), (True, "full"), (True, "selective")):
            common = {
                "group": ctx.group_name,
                "sequence_parallel": sp,
                "seed": 2,
                "name": "b",
                "dtype": dtype,
            }
            mine, plain = (
                tnn.ParallelTransformerBlock(*sizes, recompute=recompute, recipe=r, **style, **common)
                for r in (recipe, None)
            )
            x, dy = torch.randn(2, 4 * ctx.world, 3, 64).to(dtype).unbind()
            if sp:
                x, dy = (part(t, 0, [4] * ctx.world, ctx.rank) for t in (x, dy))
            got, wanted = step(mine, x, dy), step(plain, x, dy)
            for name, value in wanted.items():
                if name.endswith(("k_proj.bias", "q_proj.bias")):
                    continue  # softmax leaves next to nothing of them
                error = off(got[name], value)
                assert error < 3 * NEAR[recipe], (
                    f"{recipe} {style} sp={sp} {recompute}: {name} is off by {error:.3g}"
                )
            if recompute == "full":  # the same bits as without
                again = step(mine, x, dy)
                assert all(torch.equal(again[name], value) for name, value in got.items())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_block(ranks: RankPool, world: int, recipe: str) -> None:
    ranks.run(check_block, recipe, torch.float32 if world < 4 else torch.bfloat16, world=world)


def check_main_grad(ctx: RankContext) -> None:
    """Weight gradients of two passes, added in float32."""
    for of in (tnn.ColumnParallelLinear, tnn.RowParallelLinear):
        layer = of(
            32, 48, group=ctx.group_name, recipe="blockwise", dtype=torch.bfloat16, sequence_parallel=True
        )
        width = 32 if of is tnn.ColumnParallelLinear else layer.in_sizes[ctx.rank]
        rows = 4 if of is tnn.ColumnParallelLinear else 4 * ctx.world
        x = torch.randn(2, rows, width).to(torch.bfloat16)
        for xi in x:
            layer(xi).sum().backward()
        plain, layer.weight.grad = layer.weight.grad, None
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        for xi in x:
            layer(xi).sum().backward()
        assert layer.weight.grad is None
        torch.testing.assert_close(layer.weight.main_grad, plain.float(), rtol=0.02, atol=0.1)


def test_main_grad(ranks: RankPool) -> None:
    ranks.run(check_main_grad, world=2)


def check_refusals(ctx: RankContext) -> None:
    common = {"group": ctx.group_name}
    with pytest.raises(
        ArgumentError, match="recipe: expected one of 'tensorwise', 'rowwise', 'blockwise' or a"
    ):
        tnn.ColumnParallelLinear(8, 8, recipe="fp8", **common)
    with pytest.raises(
        DTypeError, match=r"recipe: a layer in FP8 has bfloat16, float16 or float32 .* float64"
    ):
        tnn.RowParallelLinear(8, 8, recipe="rowwise", dtype=torch.float64, **common)
    with pytest.raises(ArgumentError, match="recipe: weight gradients in FP8 cannot be delayed"):
        tnn.ParallelMLP(8, 16, recipe="rowwise", delay_wgrad=True, **common)
    layer = tnn.ColumnParallelLinear(8, 8, recipe="rowwise", name="up", **common)
    with pytest.raises(ArgumentError, match="recipe: up multiplies in FP8 and takes no LoRA factors"):
        tnn.add_lora_(layer, 2)
    assert layer.lora is None
    layer.delay_wgrad = True
    with pytest.raises(ArgumentError, match="cannot be delayed, but delay_wgrad is set"):
        layer(torch.randn(4, 8))
    layer.delay_wgrad = False
    other = tnn.ColumnParallelLinear(8, 8, **common)
    with pytest.raises(ArgumentError, match="must have one recipe"):
        tnn.column_parallel([layer, other], torch.randn(4, 8))
    assert "FP8: rowwise, e4m3 forward, e4m3 backward" in repr(layer)
    assert (
        tnn.ColumnParallelLinear(8, 8, recipe=tpk.Fp8Recipe("blockwise"), **common).recipe.scaling
        == "blockwise"
    )


def test_refusals(ranks: RankPool) -> None:
    ranks.run(check_refusals, world=2)


def check_checkpoint(ctx: RankContext) -> None:
    """States move between layers with a recipe and without: weights are in high precision in both."""
    plain = tnn.ParallelMLP(16, 24, group=ctx.group_name, seed=5, name="m")
    mine = tnn.ParallelMLP(16, 24, group=ctx.group_name, seed=6, name="m", recipe="tensorwise")
    tnn.load_full_state_dict(mine, tnn.full_state_dict(plain))
    for a, b in zip(plain.parameters(), mine.parameters(), strict=True):
        assert torch.equal(a, b)


def test_checkpoint(ranks: RankPool) -> None:
    ranks.run(check_checkpoint, world=2)


def check_graph(ctx: RankContext, sp: bool) -> None:
    block = tnn.ParallelTransformerBlock(
        32, 48, 4, 4, group=ctx.group_name, sequence_parallel=sp, recipe="blockwise"
    )
    x = torch.randn(4, 2, 32)
    torch._dynamo.reset()
    eager = step(block, x, torch.ones_like(x))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = step(compiled, x, torch.ones_like(x))
    for (name, value), other in zip(eager.items(), got.values(), strict=True):
        torch.testing.assert_close(other, value, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("sp", [False, True])
def test_one_graph(ranks: RankPool, sp: bool) -> None:
    ranks.run(check_graph, sp, world=2, timeout=200)
