"""Norms, embedding, cross-entropy, blocks and models on grids against plain torch; run on the ranks of a pool."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from grid_checks import F64, close, placed
from torch import Tensor, nn
from torch.nn import functional as F

from tpkernels import nn as tnn
from tpkernels.errors import ArgumentError, MismatchError, ShapeError
from tpkernels.grids import grid_1d, rows_over
from tpkernels.nn import grids
from tpkernels.ops import _agreement
from tpkernels.testing import RankContext


class Kind(NamedTuple):
    """A method on ``world`` ranks."""

    world: int
    method: str
    depth: int | None = None
    keep_gathered: bool = False

    def on(self, ctx: RankContext) -> grids.GridStrategy:
        return grids.GridStrategy(
            self.method, group=ctx.group, depth=self.depth, keep_gathered=self.keep_gathered
        )

    def __str__(self) -> str:
        return " ".join(map(str, self[:2])) + (f" depth {self.depth}" if self.depth else "")


KINDS = [
    Kind(4, "2d"),
    Kind(9, "2d"),
    Kind(16, "2d"),
    Kind(8, "2.5d", 2),
    Kind(8, "3d"),
    Kind(4, "spatial_temporal"),
    Kind(16, "spatial_temporal"),
]


def block(full: Tensor, on: grids.GridStrategy, inner: bool = False) -> Tensor:
    return grids.take_block(full, on.inner_layout if inner else on.layout, on.grid.position)


class PlainRMSNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


def draw_(module: nn.Module) -> None:
    """Values away from 0 and 1 for all parameters."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))


def same_gradients(sharded: nn.Module, plain: nn.Module) -> None:
    named = dict(plain.named_parameters())
    assert named.keys() == dict(sharded.named_parameters()).keys()
    for name, p in sharded.named_parameters():
        close(p.grad, placed(p, named[name].grad), name)


def check_norms(ctx: RankContext, kind: Kind, seed: int) -> None:
    """y, dx, dweight, dbias, in both layouts; a mean far from 0 costs LayerNorm no digits; 16 bits; replicated bits."""
    torch.manual_seed(seed)
    on = kind.on(ctx)
    features, rows = on.grid.grid.world * 3, on.cuts.m * on.cuts.n * 2
    for layout in (on.layout, on.inner_layout):
        for make, plain in (
            (grids.RMSNorm, PlainRMSNorm(features)),
            (grids.LayerNorm, nn.LayerNorm(features, dtype=F64)),
        ):
            norm = make(features, layout=layout, grid=on.grid, dtype=F64)
            draw_(plain)
            tnn.load_full_state_dict(norm, plain.state_dict())
            assert sum(p.numel() for p in norm.parameters()) * ctx.world == sum(
                p.numel() for p in plain.parameters()
            )
            x = (1e3 + torch.randn(rows, 3, features, dtype=F64)).requires_grad_()
            dy = torch.randn_like(x)
            y = plain(x)
            y.backward(dy)
            mine = grids.take_block(x.detach(), layout, on.grid.position).clone().requires_grad_()
            out = norm(mine)
            # With a mean of 1000, squares summed as they are would leave 1e-10 of the variance.
            torch.testing.assert_close(
                out, grids.take_block(y.detach(), layout, on.grid.position), rtol=1e-9, atol=1e-9
            )
            out.backward(grids.take_block(dy, layout, on.grid.position))
            close(mine.grad, grids.take_block(x.grad, layout, on.grid.position), "dx")
            same_gradients(norm, plain)
            low = make(features, layout=layout, grid=on.grid, dtype=torch.bfloat16)
            x16 = torch.randn(rows, features).bfloat16()
            got = low(grids.take_block(x16, layout, on.grid.position))
            want = plain.__class__(features).double()(x16.double())
            error = (got.double() - grids.take_block(want.detach(), layout, on.grid.position)).abs().max()
            assert got.dtype == torch.bfloat16 and error < 0.02
    with pytest.raises(ArgumentError, match=f"features: .* but they are {features + 1}; "):
        grids.RMSNorm(features + 1, layout=on.layout, grid=on.grid)
    with pytest.raises(ShapeError, match="this rank's part of"):
        norm(torch.zeros(2, 1, dtype=F64))


def check_embedding(ctx: RankContext, kind: Kind, seed: int) -> None:
    """Vectors, gradient of the table with ids that repeat, 1/P at rest, refusals."""
    torch.manual_seed(seed)
    on = kind.on(ctx)
    count, size, rows = ctx.world * 2, on.cuts.k * on.cuts.n * 2, on.cuts.m * 2
    plain = nn.Embedding(count, size, dtype=F64)
    layer = grids.Embedding(count, size, layout=on.layout, grid=on.grid, dtype=F64, name="e", seed=3)
    tnn.init_weights_(plain, seed=3, prefix="e")
    assert torch.equal(layer.weight, placed(layer.weight, plain.weight))
    assert layer.weight.numel() * ctx.world == plain.weight.numel()
    for shape in ((rows, 5), (rows,), (rows, 2, 2)):
        ids = torch.randint(0, count, shape)
        layer.weight.grad = plain.weight.grad = None
        y, out = plain(ids), layer(ids)
        assert torch.equal(out, block(y.detach(), on))
        dy = torch.randn_like(y)
        y.backward(dy)
        out.backward(block(dy, on))
        close(layer.weight.grad, placed(layer.weight, plain.weight.grad), "table")
    half = grids.Embedding(count, size, layout=on.layout, grid=on.grid, dtype=torch.bfloat16)
    assert half(ids).dtype == torch.bfloat16
    with pytest.raises(ArgumentError, match="every index must be from 0"):
        layer(torch.full((rows, 2), count))
    with pytest.raises(ShapeError, match=r"ids: .* cuts the first dimension in \d+ equal parts"):
        layer(ids[:-1])
    with pytest.raises(
        ArgumentError, match=f"num_embeddings: the vocabulary .* but it is {count + 1}; {count} or "
    ):
        grids.Embedding(count + 1, size, layout=on.layout, grid=on.grid)
    with pytest.raises(MismatchError, match="checksum of ids"):
        layer(ids if ctx.rank else (ids + 1) % count)


def check_cross_entropy(ctx: RankContext, kind: Kind, seed: int) -> None:
    """Loss and gradient, huge logits, ignored targets, smoothing; the same bits everywhere."""
    torch.manual_seed(seed)
    on = kind.on(ctx)
    vocab, rows = on.cuts.n * 5, on.cuts.m * 2
    where = {"layout": on.inner_layout, "grid": on.grid}
    for smoothing in (0.0, 0.1):
        for scale in (1.0, 1e4):
            logits = (scale * torch.randn(rows, 3, vocab, dtype=F64)).requires_grad_()
            targets = torch.randint(0, vocab, (rows, 3))
            targets[torch.rand(rows, 3) < 0.3] = -100
            want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
            (3 * want).backward()
            mine = block(logits.detach(), on, True).clone().requires_grad_()
            loss = grids.cross_entropy(mine, targets, vocab, label_smoothing=smoothing, **where)
            (3 * loss).backward()
            torch.testing.assert_close(loss, want.detach(), rtol=1e-10, atol=1e-10)
            close(mine.grad, block(logits.grad, on, True), f"{smoothing} {scale}")
            each = grids.cross_entropy(mine, targets, vocab, reduction="none", **where)
            assert each.shape == mine.shape[:-1]
    with pytest.raises(ShapeError, match="logits: expected"):
        grids.cross_entropy(mine[:, :, :-1], targets, vocab, **where)
    with pytest.raises(ArgumentError, match=f"vocab: .* but they are {vocab + 1}; {vocab} or"):
        grids.cross_entropy(mine, targets, vocab + 1, **where)


def check_refusals(ctx: RankContext) -> None:
    """What cannot be built, in sentences. 8 ranks."""
    on = grids.GridStrategy("3d", group=ctx.group)
    norm = grids.RMSNorm(16, layout=on.layout, grid=on.grid)
    grids.Residual(norm, on.into(16, 16), nn.GELU(), on.back(16, 16))
    with pytest.raises(
        ArgumentError, match=r"one layout, but rank 1 at \(0, 0, 1\) has rows 0 of 4, columns 1 of 2 in front"
    ):
        grids.Residual(norm, on.into(16, 16))
    with pytest.raises(ArgumentError, match=r"'1' \(Linear3D\) must take what .* rank 1"):
        grids.Residual(on.into(16, 16), on.into(16, 16))
    with pytest.raises(ArgumentError, match="at least one layer on a grid"):
        grids.Residual(nn.GELU())
    for make, words in (
        (
            lambda: grids.GridStrategy("4d", group=ctx.group),
            "'2d', '2.5d', '3d', 'spatial_temporal', but it is '4d'",
        ),
        (lambda: grids.GridStrategy("2.5d", group=ctx.group), "depth: method '2.5d' needs one"),
        (
            lambda: grids.GridStrategy("3d", depth=2, group=ctx.group),
            "depth: method '3d' has none, but it is 2",
        ),
        (
            lambda: grids.GridStrategy("2.5d", depth=2, keep_gathered=True, group=ctx.group),
            "gathers nothing whole",
        ),
        (lambda: grids.Attention(24, 3, on=on), "heads: .* 2 equal parts, but they are 3; 2 or 4 would fit"),
        (lambda: grids.Attention(24, 4, 1, on=on), "kv_heads: .* but they are 1; 2 would fit"),
        (lambda: grids.Attention(20, 8, on=on), "hidden must be a multiple"),
        (lambda: grids.Attention(8, 8, on=on), "turn pairs of elements, but head_dim is 1"),
        (
            lambda: grids.MLP(16, 16, on=on, activation="tanh"),
            "activation: it must be one of 'swiglu', 'gelu'",
        ),
        (
            lambda: grids.TransformerBlock(16, 16, 4, on=on, norm="batch"),
            "norm: it must be one of 'rms', 'layer'",
        ),
        (
            lambda: grids.TransformerBlock(16, 18, 4, on=on),
            "in_features: .* but it is 18; 16 or 20 would fit",
        ),
        (lambda: grids.RMSNorm(16, layout=rows_over(grid_1d(4)), grid=on.grid), "one of 8 ranks"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make()


class PlainBlock(nn.Module):
    """Plain torch under the names of ``TransformerBlock``."""

    def __init__(
        self, hidden: int, inner: int, heads: int, kv_heads: int, norm: str, activation: str, bias: bool
    ) -> None:
        super().__init__()
        normalised = PlainRMSNorm if norm == "rms" else lambda n: nn.LayerNorm(n, dtype=F64)
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.attention_norm, self.mlp_norm = normalised(hidden), normalised(hidden)

        def linear(a: int, b: int) -> nn.Linear:
            return nn.Linear(a, b, bias=bias, dtype=F64)

        kv = kv_heads * self.size
        self.attention = nn.ModuleDict(
            {
                "q_proj": linear(hidden, hidden),
                "k_proj": linear(hidden, kv),
                "v_proj": linear(hidden, kv),
                "o_proj": linear(hidden, hidden),
            }
        )
        gate = {"gate_proj": linear(hidden, inner)} if activation == "swiglu" else {}
        self.mlp = nn.ModuleDict(
            {**gate, "up_proj": linear(hidden, inner), "down_proj": linear(inner, hidden)}
        )

    def forward(self, x: Tensor) -> Tensor:
        a, m = self.attention, self.mlp
        n = self.attention_norm(x)
        q, k, v = (
            a[key](n).unflatten(-1, (-1, self.size)).transpose(1, 2) for key in ("q_proj", "k_proj", "v_proj")
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / self.size**0.5).masked_fill(hidden, float("-inf"))
        h = x + a["o_proj"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        n = self.mlp_norm(h)
        inner = F.silu(m["gate_proj"](n)) * m["up_proj"](n) if "gate_proj" in m else F.gelu(m["up_proj"](n))
        return h + m["down_proj"](inner)

    def rotate(self, x: Tensor) -> Tensor:
        """By complex numbers, another way than the one under test."""
        n, d = x.shape[-2:]
        angle = torch.arange(n)[:, None] * 10000.0 ** (-2.0 * torch.arange(d // 2) / d).double()
        turn = torch.complex(angle.cos().float().double(), angle.sin().float().double())
        z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat((z.real, z.imag), dim=-1)


class LM(nn.Module):
    """Embedding, blocks, norm and head of either kind."""

    def __init__(self, embed: nn.Module, blocks: list[nn.Module], norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm, self.head = embed, nn.ModuleList(blocks), norm, head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for each in self.blocks:
            x = each(x)
        return self.head(self.norm(x))


class Pair(NamedTuple):
    sharded: LM
    plain: LM
    on: grids.GridStrategy
    vocab: int
    batch: int


def models(ctx: RankContext, kind: Kind, layers: int, norm: str, activation: str, bias: bool) -> Pair:
    """A language model on the grid, and the plain one, from one seed."""
    on = kind.on(ctx)
    q = on.cuts.n
    heads, kv_heads = 2 * q, q
    hidden = heads * 2 * on.cuts.k // q * (2 if kind.method == "3d" else 1)
    inner, vocab, batch = on.cuts.k * q * 3, ctx.world * q * 2, on.cuts.m
    shape = (hidden, inner, heads, kv_heads)
    style: dict[str, Any] = {"norm": norm, "activation": activation, "bias": bias}
    where = {"layout": on.layout, "grid": on.grid}
    final = grids.RMSNorm if norm == "rms" else grids.LayerNorm
    sharded = LM(
        grids.Embedding(vocab, hidden, dtype=F64, **where),
        [grids.TransformerBlock(*shape, on=on, dtype=F64, **style) for _ in range(layers)],
        final(hidden, dtype=F64, **where),
        on.into(hidden, vocab, bias=False, dtype=F64),
    )
    plain = LM(
        nn.Embedding(vocab, hidden, dtype=F64),
        [PlainBlock(*shape, **style) for _ in range(layers)],
        PlainRMSNorm(hidden) if norm == "rms" else nn.LayerNorm(hidden, dtype=F64),
        nn.Linear(hidden, vocab, bias=False, dtype=F64),
    )
    for model in (sharded, plain):
        tnn.init_weights_(model, seed=11, std=0.1)
    return Pair(sharded, plain, on, vocab, batch)


def losses(pair: Pair, ids: Tensor) -> tuple[Tensor, Tensor]:
    tokens, targets = ids[:, :-1], ids[:, 1:]
    where = {"layout": pair.on.inner_layout, "grid": pair.on.grid}
    loss = grids.cross_entropy(pair.sharded(tokens), targets, pair.vocab, **where)
    return loss, F.cross_entropy(pair.plain(tokens).flatten(0, 1), targets.flatten())


def check_block(ctx: RankContext, kind: Kind, seed: int) -> None:
    """A whole model in two styles: loss and every gradient; parameters' names and values are those of plain torch."""
    torch.manual_seed(seed)
    for norm, activation, bias in (("rms", "swiglu", False), ("layer", "gelu", True)):
        pair = models(ctx, kind, 1, norm, activation, bias)
        full = tnn.full_state_dict(pair.sharded)
        for name, want in pair.plain.state_dict().items():
            assert torch.equal(full[name], want), name
        draw = {name: 0.3 * torch.randn_like(t) for name, t in pair.plain.state_dict().items()}
        pair.plain.load_state_dict(draw)
        tnn.load_full_state_dict(pair.sharded, draw)
        loss, want = losses(pair, torch.randint(0, pair.vocab, (pair.batch, 6)))
        torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
        loss.backward()
        want.backward()
        same_gradients(pair.sharded, pair.plain)


def check_compiled(ctx: RankContext, kind: Kind, seed: int) -> None:
    """torch.compile breaks its graph where ranks exchange something, and changes nothing."""
    torch.manual_seed(seed)
    pair = models(ctx, kind, 1, "layer", "swiglu", True)
    ids = torch.randint(0, pair.vocab, (pair.batch, 6))
    losses(pair, ids)[0].backward()
    before = [p.grad.clone() for p in pair.sharded.parameters()]
    pair.sharded.zero_grad()
    loss = losses(pair._replace(sharded=torch.compile(pair.sharded, backend="eager")), ids)[0]
    loss.backward()
    for p, grad in zip(pair.sharded.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


def check_training(ctx: RankContext, kind: Kind, steps: int, seed: int) -> None:
    """Steps of a small model, with clipping, equal those of the plain one."""
    torch.manual_seed(seed)
    pair = models(ctx, kind, 1, "rms", "swiglu", False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (pair.sharded, pair.plain)]
    data = torch.randint(0, pair.vocab, (pair.batch, 5))
    first = None
    for step in range(steps):
        with _agreement.suspended() if step else nullcontext():  # (an exchange a layer: half of the time)
            both = losses(pair, data)
        torch.testing.assert_close(*both, rtol=1e-8, atol=1e-10, msg=lambda m, s=step: f"step {s}: {m}")
        first = first or both[1].item()
        for optimizer, loss in zip(optimizers, both, strict=True):
            optimizer.zero_grad()
            loss.backward()
        tnn.clip_grad_norm_(pair.sharded.parameters(), 1.0)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    assert both[1].item() < 0.9 * first, "nothing was learned"
