"""Random masks by region: the same where activations are replicated, their part where they are cut; recomputation."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from nn_dense import WIDTH, after_step, assert_follows, close, part
from nn_gpt import HEADS, SEED, DenseGPTAttention

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
F64 = torch.float64


def regions(ctx: RankContext) -> list[torch.Tensor]:
    """Returns masks: of a replicated activation, then of this rank's part of the sequence."""
    uneven = [3, 0, 2, 1][: ctx.world]
    found = []
    for dim in (0, 1):
        for sizes in (uneven, [2] * ctx.world):
            whole = torch.randn(2, sum(sizes), 5, dtype=F64)
            want = tnn.dropout(whole, 0.4, seed=SEED, name="d", step=9)
            x, y = (t.transpose(0, 1) if dim == 0 else t for t in (whole, want))
            for sp in (False, True):
                layer = tnn.Dropout(
                    0.4,
                    name="d",
                    group=ctx.group_name,
                    sequence_parallel=sp,
                    sequence_dim=dim,
                    seed=SEED,
                )
                mine, expected = (part(t, dim, sizes, ctx.rank) if sp else t for t in (x, y))
                xi = mine.clone().requires_grad_()
                out = layer(xi, 9, sizes if sp and sizes is uneven else None)
                assert torch.equal(out, expected), f"dim={dim} sizes={sizes} sp={sp}"
                out.sum().backward()
                assert torch.equal(xi.grad != 0, out != 0)
                assert not torch.equal(layer(mine, 10, sizes if sp else None), expected) or mine.numel() < 8
                assert layer.eval()(mine) is mine
                if sizes is not uneven:
                    found.append(xi.grad != 0)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_regions(ranks: RankPool, world: int) -> None:
    results = ranks.run(regions, world=world)
    for other in results[1:]:
        for i, (a, b) in enumerate(zip(other, results[0], strict=True)):
            assert torch.equal(a, b) is (i % 2 == 0), "replicated masks are equal, those of parts are not"


def attention(ctx: RankContext, seed: int) -> None:
    """Probabilities of the heads of each rank are dropped as the unsharded layer drops them."""
    for kv_heads in {HEADS, 1, ctx.world}:
        for dim, recompute in ((0, False), (1, True)):
            note = f"kv_heads={kv_heads} dim={dim} recompute={recompute}"
            dense = tnn.init_weights_(DenseGPTAttention(HEADS, kv_heads, 0.3, "a").double(), seed=seed)
            layer = tnn.ParallelAttention(
                WIDTH,
                HEADS,
                kv_heads,
                group=ctx.group_name,
                bias=True,
                out_bias=True,
                rotary_base=None,
                sequence_dim=dim,
                dropout=0.3,
                recompute_core=recompute,
                seed=SEED,
                name="a",
                dtype=F64,
            )
            tnn.load_full_state_dict(layer, dense.state_dict())
            x = torch.randn(2, 6, WIDTH, dtype=F64, requires_grad=True)
            y = dense(x, 5)
            coefficient = torch.randn_like(y)
            y.backward(coefficient)
            turned = [t.detach().transpose(0, 1) if dim == 0 else t.detach() for t in (x, y, coefficient)]
            xi = turned[0].clone().requires_grad_()
            out = layer(xi, step=5)
            close(out, turned[1], note)
            out.backward(turned[2])
            close(xi.grad.transpose(0, 1) if dim == 0 else xi.grad, x.grad, note)
            full = {n: p.grad for n, p in dense.named_parameters()}
            mine = tnn.full_tensors(
                {n: p.grad for n, p in layer.named_parameters()}, dict(layer.named_parameters())
            )
            for name, grad in mine.items():
                close(grad, full[name], f"{note}: {name}")


@pytest.mark.parametrize("world", WORLDS)
def test_attention_drops_what_the_unsharded_one_drops(ranks: RankPool, world: int, seed: int) -> None:
    ranks.run(attention, seed, world=world)


def recomputation(ctx: RankContext) -> None:
    """Whatever draws in between, in any order of micro-batches, with either kind of checkpoint."""
    block = tnn.ParallelTransformerBlock(
        WIDTH,
        16,
        HEADS,
        group=ctx.group_name,
        sequence_parallel=True,
        dropout=0.3,
        attention_dropout=0.3,
        name="b",
        dtype=F64,
    )
    draw = torch.Generator().manual_seed(ctx.rank)
    inputs = [torch.randn(2, 2, WIDTH, dtype=F64, generator=draw) for _ in range(2)]

    def run(kinds: dict[str, bool] | None) -> list[torch.Tensor]:
        block.zero_grad(set_to_none=True)
        xs = [x.clone().requires_grad_() for x in inputs]
        outs = []
        for step, x in enumerate(xs):
            torch.rand(3 + ctx.rank)  # others draw, not equally on every rank
            if kinds is None:
                outs.append(block(x, None, None, step))
            else:
                outs.append(torch.utils.checkpoint.checkpoint(block, x, None, None, step, **kinds))
        for y in outs:  # both are in flight
            torch.rand(5)
            y.square().sum().backward()
        return [*(y.detach() for y in outs), *(x.grad for x in xs), *(p.grad for p in block.parameters())]

    plain = run(None)
    for reentrant in (False, True):
        for keep in (False, True):
            again = run({"use_reentrant": reentrant, "preserve_rng_state": keep})
            assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert not torch.equal(plain[2], plain[3])


@pytest.mark.parametrize("world", [1, 3])
def test_recomputation_finds_the_same_masks(ranks: RankPool, world: int) -> None:
    ranks.run(recomputation, world=world)


def narrow(ctx: RankContext) -> None:
    """bfloat16, as the type of the block and by autocast, beside float64 with the same masks."""
    kinds = {"group": ctx.group_name, "sequence_parallel": True, "dropout": 0.2, "attention_dropout": 0.2}
    made = {
        dtype: tnn.ParallelTransformerBlock(48, 64, 12, 12, bias=True, name="b", dtype=dtype, **kinds)
        for dtype in (F64, torch.float32, torch.bfloat16)
    }
    state = tnn.full_state_dict(made[torch.bfloat16])
    x = torch.randn(3 * ctx.world, 2, 48).bfloat16()[3 * ctx.rank :][:3]
    outs = []
    for dtype, autocast in ((F64, False), (torch.bfloat16, False), (torch.float32, True)):
        block = made[dtype]
        tnn.load_full_state_dict(block, state)
        xi = x.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = block(xi, step=3)
        assert y.dtype == dtype
        y.square().mean().backward()
        outs.append(after_step(block, xi, y))
    assert_follows(outs[0], outs[1], "bfloat16")
    assert_follows(outs[0], outs[2], "autocast")


@pytest.mark.parametrize("world", [1, 3])
def test_narrow_types(ranks: RankPool, world: int) -> None:
    ranks.run(narrow, world=world)


def disagreeing(ctx: RankContext) -> None:
    """Steps that differ, and sizes that do not fit on one rank, are errors on every rank under TPK_CHECK."""
    layer = tnn.Dropout(0.5, name="d", group=ctx.group_name, sequence_parallel=True)
    x = torch.ones(2, 3, 4)
    with pytest.raises(tpk.errors.MismatchError, match="step"):
        layer(x, ctx.rank)
    kind = tpk.errors.ShapeError if ctx.rank == 0 else tpk.errors.MismatchError
    with pytest.raises(kind, match="shard_sizes"):
        layer(x, 0, [3 if ctx.rank == 0 else 2, 2])
    with pytest.raises(tpk.errors.MismatchError, match="rows of the sequence, without shard_sizes"):
        layer(torch.ones(2 + ctx.rank, 3, 4), 0)
    with pytest.raises(
        tpk.errors.ShapeError, match=r"rows of the sequence of each of the 2 ranks.* but they are \[2\]"
    ):
        layer(x, 0, [2])
    with pytest.raises(tpk.errors.ArgumentError, match="step: dropout in training"):
        layer(x)
    with pytest.raises(tpk.errors.ShapeError, match="along dimension 0"):
        layer(torch.ones(4), 0)
    assert layer(x, 0).shape == x.shape
    with pytest.raises(tpk.errors.ArgumentError, match=r"p: the part that is dropped"):
        tnn.Dropout(1.5, name="d", group=ctx.group_name)
    with pytest.raises(tpk.errors.ArgumentError, match=r"name: dropout needs one"):
        tnn.Dropout(0.5, name="", group=ctx.group_name)
    attention = tnn.ParallelAttention(WIDTH, HEADS, group=ctx.group_name, dropout=0.5, name="a")
    with pytest.raises(tpk.errors.MismatchError, match="step"):
        attention(torch.ones(2, 2, WIDTH), step=ctx.rank)


def test_bad_input_of_dropout(ranks: RankPool) -> None:
    ranks.run(disagreeing, world=2)
