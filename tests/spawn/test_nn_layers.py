"""Norm, attention, embedding, loss and errors against torch's own, on 1 to 4 ranks: outputs, gradients, odd shards."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from nn_dense import after_step, assert_follows, close, layouts, part
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
F64 = torch.float64


def check_norm(ctx: RankContext) -> None:
    uneven = [3, 0, 2, 1][: ctx.world]
    for kind in (tnn.RMSNorm, tnn.LayerNorm):
        x = torch.randn(sum(uneven), 2, 8, dtype=F64, requires_grad=True)
        w = (torch.arange(8) / 5.0).to(F64).requires_grad_()
        b = (torch.arange(8) / 7.0).to(F64).requires_grad_()
        if kind is tnn.RMSNorm:
            y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w
        else:
            centred = x - x.mean(-1, keepdim=True)
            y = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w + b
        coefficient = torch.randn_like(y)
        y.backward(coefficient)
        for sp in (False, True):
            note = f"{kind.__name__} sp={sp}"
            norm = kind(8, group=ctx.group, sequence_parallel=sp, dtype=F64)
            names = {name: full for name, full in (("weight", w), ("bias", b)) if full.grad is not None}
            assert dict(norm.named_parameters()).keys() == names.keys()
            assert norm.weight.eq(1).all()
            assert kind is tnn.RMSNorm or norm.bias.eq(0).all()
            norm.load_state_dict({name: full.detach() for name, full in names.items()})

            def mine(t: Tensor, sp: bool = sp) -> Tensor:
                return part(t, 0, uneven, ctx.rank) if sp else t

            xi = mine(x.detach()).clone().requires_grad_()
            with tpk.record_paths() as log:
                out = norm(xi)
                close(out, mine(y), note)
                out.backward(mine(coefficient))
            assert sum(log.counts.values()) == int(sp), f"{note}: one sum for all parameters"
            close(xi.grad, mine(x.grad), f"{note}: x")
            for name, full in names.items():
                close(norm.get_parameter(name).grad, full.grad, f"{note}: {name}")
            for name, full in names.items():  # one of them frozen
                norm.zero_grad(set_to_none=True)
                for other, p in norm.named_parameters():
                    p.requires_grad_(other == name)
                norm(mine(x.detach())).backward(mine(coefficient))
                close(norm.get_parameter(name).grad, full.grad, f"{note}: {name} alone")


def check_embedding(ctx: RankContext) -> None:
    for vocab in (2, 5, 12):  # on 4 ranks 2 is 1, 1, 0, 0
        dense = tnn.init_weights_(nn.Embedding(vocab, 3, dtype=F64), seed=1, prefix="e")
        for shape, dim, sizes in layouts(ctx.world):
            for sp in (False, True):
                note = f"embedding {vocab} {shape} {sizes} sp={sp}"
                layer = tnn.VocabParallelEmbedding(
                    vocab,
                    3,
                    group=ctx.group,
                    sequence_parallel=sp,
                    sequence_dim=dim,
                    seed=1,
                    name="e",
                    dtype=F64,
                )
                ids = torch.randint(0, vocab, shape, dtype=torch.int32 if dim else torch.int64)
                rows = sizes or tpk.shard_sizes(shape[dim], ctx.world)
                dense.zero_grad(set_to_none=True)
                y = dense(ids)
                coefficient = torch.randn_like(y)
                y.backward(coefficient)
                out = layer(ids, sizes if sp else None)
                assert torch.equal(out, part(y, dim, rows, ctx.rank) if sp else y), note
                out.backward(part(coefficient, dim, rows, ctx.rank) if sp else coefficient)
                vocab_sizes = list(layer.vocab_sizes)
                close(layer.weight.grad, part(dense.weight.grad, 0, vocab_sizes, ctx.rank), note)
    with pytest.raises(
        tpk.errors.ArgumentError, match=r"ids: every index must be from 0 to 11, but there is 12"
    ):
        layer(torch.tensor([[0, 12]]))
    with pytest.raises(tpk.errors.DTypeError, match=r"ids: indices must be int64 or int32"):
        layer(torch.zeros(2, 2))


def check_loss(ctx: RankContext) -> None:
    vocab = 11
    custom = {1: [11], 2: [11, 0], 3: [0, 4, 7], 4: [5, 0, 5, 1]}[ctx.world]
    for sizes in (vocab, custom):
        rows = tpk.shard_sizes(vocab, ctx.world) if isinstance(sizes, int) else sizes
        for scale, dtype in ((1.0, F64), (3e4, torch.float32), (1e300, F64), (1.0, torch.bfloat16)):
            for ignore, reduction in ((-100, "mean"), (4, "none"), (4, "mean")):
                note = f"loss {sizes} {scale} {dtype} {ignore} {reduction}"
                z = (torch.randn(3, 5, vocab, dtype=F64) * scale).to(dtype)
                z[0, 0, 3] = float("-inf")
                t = torch.randint(0, vocab, (3, 5))
                t[1, :2], t[0, 0] = ignore, 1
                full = z.to(F64, copy=True).requires_grad_()
                want = F.cross_entropy(
                    full.flatten(0, 1), t.flatten(), ignore_index=ignore, reduction=reduction
                )
                coefficient = torch.rand_like(want)
                want.backward(coefficient)
                mine = part(z, -1, rows, ctx.rank).clone().requires_grad_()
                got = tnn.vocab_parallel_cross_entropy(
                    mine, t, ctx.group, sizes, reduction=reduction, ignore_index=ignore
                )
                assert got.dtype == (F64 if dtype == F64 else torch.float32)
                got.backward(coefficient.reshape(got.shape).to(got.dtype))
                tolerance = {F64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
                note_of = {"msg": lambda m, n=note: f"{n}: {m}"}
                torch.testing.assert_close(
                    got.to(F64),
                    want.reshape(got.shape),
                    rtol=max(tolerance, 1e-6) if dtype != F64 else 1e-12,
                    atol=1e-12 if dtype == F64 else 1e-5,
                    **note_of,
                )
                expected = part(full.grad, -1, rows, ctx.rank)
                torch.testing.assert_close(
                    mine.grad.to(F64), expected, rtol=tolerance, atol=tolerance, **note_of
                )
    none = torch.full((2,), -100)
    z = torch.randn(2, rows[ctx.rank], requires_grad=True)
    assert tnn.vocab_parallel_cross_entropy(z, none, ctx.group, sizes).isnan()
    with pytest.raises(
        tpk.errors.ArgumentError, match=r"targets: every index must be from 0 to 10 or ignore_index -100"
    ):
        tnn.vocab_parallel_cross_entropy(z, torch.tensor([0, 11]), ctx.group, sizes)
    with pytest.raises(
        tpk.errors.ShapeError, match=r"pass the output of the column-parallel head without gathering it"
    ):
        tnn.vocab_parallel_cross_entropy(torch.randn(2, 12), none, ctx.group, sizes)


def check_smoothed_loss(ctx: RankContext) -> None:
    """Label smoothing over the whole vocabulary, which divides by the world or not; ranks without any of it."""
    for vocab, custom in (
        (11, {1: [11], 2: [11, 0], 3: [0, 4, 7], 4: [5, 0, 5, 1]}[ctx.world]),
        (12, 12),
        (2, 2),
    ):
        for sizes in (vocab, custom):
            rows = tpk.shard_sizes(vocab, ctx.world) if isinstance(sizes, int) else sizes
            for smoothing in (0.1, 1.0):
                for scale, reduction in ((1.0, "mean"), (1.0, "none"), (1e6, "mean")):
                    note = f"smoothed loss {sizes} {smoothing} {scale} {reduction}"
                    full = (torch.randn(3, 5, vocab, dtype=F64) * scale).requires_grad_()
                    t = torch.randint(0, vocab, (3, 5))
                    t[1, :2] = -100
                    want = F.cross_entropy(
                        full.flatten(0, 1), t.flatten(), reduction=reduction, label_smoothing=smoothing
                    )
                    coefficient = torch.rand_like(want)
                    want.backward(coefficient)
                    mine = part(full.detach(), -1, rows, ctx.rank).clone().requires_grad_()
                    with tpk.record_paths() as log:
                        got = tnn.vocab_parallel_cross_entropy(
                            mine, t, ctx.group, sizes, reduction=reduction, label_smoothing=smoothing
                        )
                        got.backward(coefficient.reshape(got.shape))
                    assert [op for op, _ in log.counts] == ["all_gather"], note
                    close(got, want.reshape(got.shape), note)
                    close(mine.grad, part(full.grad, -1, rows, ctx.rank), note)
    z, ids = torch.zeros(2, 2, rows[ctx.rank]), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(
        tpk.errors.ArgumentError, match=r"label_smoothing: it must be from 0 to 1, but it is -0.1"
    ):
        tnn.vocab_parallel_cross_entropy(z, ids, ctx.group, 2, label_smoothing=-0.1)


def check_errors(ctx: RankContext) -> None:
    group = ctx.group
    column = tnn.ColumnParallelLinear(8, 12, group=group)
    share = 12 // ctx.world
    assert f"in_features=8, out_features=12, local weight=[{share}, 8]" in repr(column)
    assert f"rank={ctx.rank}/{ctx.world}" in repr(column)
    x = torch.randn(3, 8)

    def make(kind: type[nn.Module], *args: int, **kinds: object) -> nn.Module:
        return kind(*args, group=group, **kinds)

    def wide() -> nn.Module:
        return make(tnn.ColumnParallelLinear, 9, 12)

    ids, logits = torch.tensor([1, 2, 0]), torch.randn(3, share)

    def loss(sizes: object = 12, **kinds: object) -> Tensor:
        return tnn.vocab_parallel_cross_entropy(logits, ids, group, sizes, **kinds)

    for sizes in (np.int64(12), [np.int32(share)] * ctx.world):
        assert torch.equal(loss(sizes, ignore_index=np.int64(2)), loss(ignore_index=2))
    pair = [tnn.ColumnParallelLinear(8, 12, group=group, activation=a) for a in (None, "none")]
    assert len(tnn.column_parallel(pair, x)) == 2

    linear, row, attention = tnn.ColumnParallelLinear, tnn.RowParallelLinear, tnn.ParallelAttention
    cases = [
        (lambda: column(torch.randn(3, 7)), r"x: .* must be 8 \(in_features\).*\[3, 7\]"),
        (lambda: column(x, [3] * ctx.world), r"shard_sizes: .* made without sequence_parallel"),
        (lambda: make(linear, 8, 12, activation="tanh"), r"activation: .*'tanh'"),
        (lambda: make(linear, 0, 12), r"in_features: a linear layer needs at least 1, but it is 0"),
        (lambda: make(linear, 8, 12, sequence_dim=-2), r"sequence_dim: it counts from the front"),
        (
            lambda: make(linear, 8, 12, sequence_parallel=True, sequence_dim=1)(x),
            r"along dimension 1, so x must have more than 2 dimensions .*\[3, 8\]",
        ),
        (
            lambda: make(row, 8, 12, sequence_parallel=True, input_is_parallel=False),
            r"input_is_parallel: it must be True with sequence_parallel",
        ),
        (lambda: make(row, 8, 12)(torch.randn(3, 9)), r"share of 8 features\), but x has shape \[3, 9\]"),
        (lambda: make(tnn.ParallelMLP, 8, 12, activation="geglu"), r"activation: it must be one of 'swiglu'"),
        (lambda: make(attention, 24, 12, 5), r"kv_heads: the 12 heads must be a multiple of it.* is 5"),
        (lambda: make(attention, 24, 7), r"heads: 24 hidden features are not a multiple of 7 heads"),
        (lambda: make(attention, 24, 12)(torch.randn(3, 24)), r"x: attention takes three dimensions"),
        (lambda: tnn.column_parallel([column, wide()], x), r"one in_features, but it is 8 in one and 9 in"),
        (lambda: column(torch.randn(8)), r"x: ColumnParallelLinear takes at least 2 dimensions.*\[8\]"),
        (lambda: make(row, 8, 12)(torch.randn(8)), r"x: RowParallelLinear takes at least 2 dimensions"),
        (lambda: make(attention, 32, 0), r"heads: attention needs at least 1, but it is 0"),
        (
            lambda: make(tnn.VocabParallelEmbedding, 9, 4, sequence_parallel=True, sequence_dim=-1),
            r"sequence_dim: it counts from the front",
        ),
        (
            lambda: make(tnn.VocabParallelEmbedding, 9, 4, sequence_parallel=True, sequence_dim=1)(ids),
            r"ids: .* along dimension 1, so ids must have more than 1 dimensions",
        ),
        (lambda: loss(ignore_index=None), r"ignore_index: it must be an integer, but it is None"),
        (lambda: loss(1.5), r"vocab_sizes: it must be the size of the whole vocabulary"),
    ]
    for action, pattern in cases:
        with pytest.raises(tpk.errors.ArgumentError, match=pattern):
            action()
    # No numbers of kv heads and ranks are refused (values: test_nn_gqa.py).
    y = tnn.ParallelAttention(20, 7 * ctx.world, 7, head_dim=4, group=group)(torch.randn(3, 2, 20))
    assert y.shape == (3, 2, 20)
    with pytest.raises(tpk.errors.GroupError):
        tnn.RMSNorm(8, group="no such group")
    mesh = DeviceMesh.from_group(group, "cpu")
    assert tnn.RMSNorm(8, group=mesh).group_name == ctx.group_name


def check_one_wrong_rank(ctx: RankContext) -> None:
    """What a layer finds wrong on one rank is an error on all of them, under TPK_CHECK, and the group still works."""
    if ctx.world == 1:
        return
    kinds = {"group": ctx.group, "sequence_parallel": True}
    wrong = ctx.rank == 0
    column, row = tnn.ColumnParallelLinear(8, 12, **kinds), tnn.RowParallelLinear(12, 8, **kinds)
    norm, attention = tnn.RMSNorm(8, **kinds), tnn.ParallelAttention(24, 12, **kinds)
    embedding = tnn.VocabParallelEmbedding(9, 4, group=ctx.group)
    held = row.in_sizes[ctx.rank]
    share = tpk.shard_sizes(9, ctx.world)[ctx.rank]
    rows = 2 * ctx.world

    def loss(targets: list[int], **others: object) -> Tensor:
        logits = torch.zeros(2, share)
        return tnn.vocab_parallel_cross_entropy(logits, torch.tensor(targets), ctx.group, 9, **others)

    for action in (
        lambda odd: column(torch.randn(2, 2, 7 if odd else 8)),
        lambda odd: column(torch.randn(2, 2, 8), [9] if odd else None),
        lambda odd: row(torch.randn(rows, held + 1 if odd else held)),
        lambda odd: norm(torch.randn(2, 7 if odd else 8)),
        lambda odd: attention(torch.randn(*((2, 24) if odd else (2, 2, 24)))),
        lambda odd: embedding(torch.tensor([3, 9 if odd else 8])),
        lambda odd: loss([1, 9 if odd else 2]),
        lambda odd: loss([1, 2], reduction="sum" if odd else "mean"),
        lambda odd: tnn.column_parallel(
            [column, tnn.ColumnParallelLinear(8, 12, group=ctx.group, sequence_parallel=not odd)],
            torch.randn(2, 2, 8),
        ),
    ):
        kind = tpk.errors.ArgumentError if wrong else tpk.errors.MismatchError
        with pytest.raises(kind) as caught:
            action(wrong)
        assert wrong or "rank 0 raised" in str(caught.value)
        action(False)
    with pytest.raises(tpk.errors.MismatchError, match="checksum of targets"):
        loss([1, 3 if wrong else 2])
    assert loss([1, 2]).item() == pytest.approx(math.log(9))


def check_autocast_block(ctx: RankContext) -> None:
    """The residual stream stays float32 under autocast, as x + nn.Linear(x) does."""
    for sp in (False, True):
        block = tnn.ParallelTransformerBlock(48, 64, 12, 12, group=ctx.group, sequence_parallel=sp, bias=True)
        x = torch.randn(2 * ctx.world, 2, 48)
        x = x[2 * ctx.rank :][:2] if sp else x
        outs = []
        for on in (False, True):
            block.zero_grad(set_to_none=True)
            xi = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                y = block(xi)
            assert y.dtype == torch.float32
            y.square().mean().backward()
            outs.append(after_step(block, xi, y))
        assert all(coarse.dtype == torch.float32 for coarse in outs[1].values())
        assert_follows(*outs, f"autocast sp={sp}")
        assert not torch.equal(outs[0]["y"], outs[1]["y"])
        row = tnn.RowParallelLinear(12, 8, group=ctx.group, sequence_parallel=sp)
        with torch.autocast("cpu", torch.bfloat16):
            assert row(torch.randn(2 * ctx.world, row.in_sizes[ctx.rank])).dtype == torch.bfloat16


def check_bfloat16_block(ctx: RankContext) -> None:
    """A bfloat16 block follows the float64 one; no step leaves the type."""
    kinds = {"group": ctx.group, "sequence_parallel": True, "seed": 2, "bias": True}
    fine = tnn.ParallelTransformerBlock(48, 64, 12, 12, dtype=F64, **kinds)
    half = tnn.ParallelTransformerBlock(48, 64, 12, 12, dtype=torch.bfloat16, **kinds)
    tnn.load_full_state_dict(fine, {k: v.double() for k, v in tnn.full_state_dict(half).items()})
    x = torch.randn(3 * ctx.world, 2, 48).bfloat16()[3 * ctx.rank :][:3]
    outs = []
    for block, dtype in ((fine, F64), (half, torch.bfloat16)):
        xi = x.to(dtype, copy=True).requires_grad_()
        y = block(xi)
        assert y.dtype == dtype
        y.square().mean().backward()
        outs.append(after_step(block, xi, y))
    assert_follows(*outs, "bfloat16")


def check_attention(ctx: RankContext) -> None:
    """Without positions, without a mask, with heads wider than hidden / heads."""
    heads, size = 12, 3
    for dim in (0, 1):
        layer = tnn.ParallelAttention(
            10,
            heads,
            head_dim=size,
            causal=False,
            rotary_base=None,
            group=ctx.group,
            sequence_dim=dim,
            dtype=F64,
        )
        w = tnn.full_state_dict(layer)
        x = torch.randn(2, 5, 10, dtype=F64)
        q, k, v = ((x @ w[f"{n}_proj.weight"].t()).view(2, 5, heads, size).transpose(1, 2) for n in "qkv")
        y = ((q @ k.mT / size**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["o_proj.weight"].t()
        out = layer(x.transpose(0, 1)).transpose(0, 1) if dim == 0 else layer(x)
        close(out, y, f"attention dim={dim}")


def check_bfloat16(ctx: RankContext) -> None:
    """Embedding, loss and clipping keep bfloat16 where it came in."""
    layer = tnn.VocabParallelEmbedding(9, 4, group=ctx.group, dtype=torch.bfloat16)
    head = tnn.ColumnParallelLinear(4, 9, group=ctx.group, dtype=torch.bfloat16, bias=False)
    ids = torch.randint(0, 9, (5,))
    x = layer(ids)
    assert x.dtype == torch.bfloat16
    (1e4 * tnn.vocab_parallel_cross_entropy(head(x), ids, ctx.group, 9)).backward()
    both = [*layer.parameters(), *head.parameters()]
    norm = tnn.clip_grad_norm_(both, 1.0, ctx.group)
    assert norm > 1
    assert all(p.grad.dtype == torch.bfloat16 for p in both)
    torch.testing.assert_close(tnn.grad_norm(both, ctx.group).item(), 1.0, rtol=1e-2, atol=0)
    both[0].grad.fill_(float("nan"))
    with pytest.raises(
        tpk.errors.ArgumentError, match="norm of their gradients must be finite, but it is nan"
    ):
        tnn.clip_grad_norm_(both, 1.0, ctx.group, error_if_nonfinite=True)
    assert tnn.grad_norm([torch.zeros(2)], ctx.group) == 0  # no gradient at all


CHECKS = {
    f.__name__: f
    for f in (
        check_norm,
        check_attention,
        check_embedding,
        check_loss,
        check_smoothed_loss,
        check_errors,
        check_one_wrong_rank,
        check_autocast_block,
        check_bfloat16_block,
        check_bfloat16,
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", WORLDS)
def test_layer(ranks: RankPool, world: int, check: str) -> None:
    ranks.run(CHECKS[check], world=world)
