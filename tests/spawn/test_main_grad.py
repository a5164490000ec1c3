"""Weight gradients in ``main_grad`` on gloo ranks: sums over micro-batches, recomputation, hooks, refusals."""

from __future__ import annotations

import main_grad_checks as checks
import pytest
import torch
from nn_dense import VOCAB, DenseLM, ParallelLM, perturb, shard_of
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("path", ["auto", "gloo"])  # gloo: with our Stream-K executor
def test_sums(ranks: RankPool, world: int, dtype: torch.dtype, path: str) -> None:
    ranks.run(checks.check_sums, dtype, path, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("path", ["auto", "gloo"])
def test_small_updates_are_kept(ranks: RankPool, world: int, path: str) -> None:
    ranks.run(checks.check_small_updates, torch.bfloat16, path, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "check",
    [
        checks.check_together,
        checks.check_several_uses,
        checks.check_other_gradients_alone,
        checks.check_megatron,
        checks.check_off,
        checks.check_refusals,
        checks.check_clipping,
    ],
)
def test_check(ranks: RankPool, world: int, check: object) -> None:
    ranks.run(check, world=world)


def check_model(ctx: RankContext, sp: bool, recompute: bool) -> None:
    """A whole model, two micro-batches, against the unsharded one in float64."""
    dense = tnn.init_weights_(DenseLM(bias=True), seed=3)
    model = ParallelLM(ctx.group_name, bias=True, sequence_parallel=sp)
    tnn.init_weights_(model, seed=3)
    perturb(dense, 5)
    perturb(model, 5)
    model.recompute = recompute
    checks.fused(model)
    for _ in range(2):
        ids, targets = torch.randint(0, VOCAB, (2, 2, 6)).unbind()
        F.cross_entropy(dense(ids).flatten(0, 1), targets.flatten()).backward()
        tnn.vocab_parallel_cross_entropy(model(ids), targets.t(), ctx.group_name, VOCAB).backward()
    full = dict(dense.named_parameters())
    fused = 0
    for name, p in model.named_parameters():
        got = getattr(p, "main_grad", None)
        fused += got is not None
        assert (p.grad is None) == (got is not None), name
        want = shard_of(p, full[name].grad)
        torch.testing.assert_close(p.grad if got is None else got, want, rtol=1e-9, atol=1e-11)
    assert fused == 2 * 7 + 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_model(ranks: RankPool, world: int, sp: bool, recompute: bool) -> None:
    ranks.run(check_model, sp, recompute, world=world)


def check_asked_in_a_block(ctx: RankContext) -> None:
    """The argument reaches every linear layer of a block."""
    for value in (True, False, None):
        block = tnn.ParallelTransformerBlock(
            12, 10, 6, group=ctx.group_name, gradient_accumulation_fusion=value
        )
        linear = [
            m for m in block.modules() if isinstance(m, (tnn.ColumnParallelLinear, tnn.RowParallelLinear))
        ]
        assert [m.gradient_accumulation_fusion for m in linear] == [value] * 7
    layers = tnn.ColumnParallelLinears(6, {"a": 3}, group=ctx.group_name, gradient_accumulation_fusion=True)
    assert layers["a"].gradient_accumulation_fusion


def check_autocast(ctx: RankContext) -> None:
    """A float32 weight that is multiplied in bfloat16."""
    for case in checks.cases(ctx.world):
        layer = checks.make(ctx, case, torch.float32, bias=False)
        checks.fused(layer)
        b = checks.batch(ctx, case, layer, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(b.my_x.float().requires_grad_(), shard_sizes=case.sizes)
        y.backward(b.my_dy)
        sums, scale = checks.expected(ctx, case, layer, [b])
        assert layer.weight.grad is None
        assert ((layer.weight.main_grad - sums).abs() <= 1e-5 * scale).all(), case


def check_functions(ctx: RankContext) -> None:
    """``main_grad_of`` of the functions, whose list form sums products, and what they refuse."""
    x = torch.randn(6, 4)
    first, second = (torch.nn.Parameter(torch.randn(5, 4)) for _ in range(2))
    for p in (first, second):
        p.main_grad = torch.zeros(5, 4)
    y = tpk.matmul_all_reduce([x, x], [first.t(), second.t()], ctx.group_name, main_grad_of=[first, None])
    y.sum().backward()
    assert first.grad is None
    assert not second.main_grad.any()
    torch.testing.assert_close(first.main_grad, second.grad)
    for wrong, words in (
        ([first], "one parameter"),
        ([first, torch.nn.Parameter(torch.randn(4, 5))], r"main_grad_of\[1\]: b must be"),
    ):
        with pytest.raises(tpk.errors.TpkError, match=words):
            tpk.matmul_all_reduce([x, x], [first.t(), second.t()], ctx.group_name, main_grad_of=wrong)
    square = torch.nn.Parameter(torch.randn(4, 4))
    square.main_grad = torch.zeros(4, 4)
    with pytest.raises(tpk.errors.ShapeError, match="strides"):
        tpk.matmul_replicated(x, square, ctx.group_name, main_grad_of=square)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("check", [check_asked_in_a_block, check_autocast, check_functions])
def test_other(ranks: RankPool, world: int, check: object) -> None:
    ranks.run(check, world=world)
