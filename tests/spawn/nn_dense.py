"""The unsharded twin of a model of parallel layers (plain torch, batch first, the same names), and comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpkernels import nn as tnn

WIDTH, FFN, HEADS, KV_HEADS, VOCAB = 24, 37, 12, 12, 29  # 37 and 29 divide by no world but 1


class DenseAttention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, WIDTH // heads
        self.q_proj = nn.Linear(WIDTH, heads * self.size, bias=bias)
        self.k_proj = nn.Linear(WIDTH, kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(WIDTH, kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=bias)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions by complex numbers, another way than the one under test."""
        n, d = x.shape[-2:]
        positions, pairs = torch.arange(n, device=x.device), torch.arange(d // 2, device=x.device)
        angle = positions[:, None] * 10000.0 ** (-2.0 * pairs / d).double()
        turn = torch.complex(angle.cos().float().double(), angle.sin().float().double())
        z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            p(x).view(b, s, -1, self.size).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        scores = scores.masked_fill(
            torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1), float("-inf")
        )
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))


class DenseNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


class DenseMLP(nn.Module):
    def __init__(self, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        if activation == "swiglu":
            self.gate_proj = nn.Linear(WIDTH, FFN, bias=bias)
        self.up_proj = nn.Linear(WIDTH, FFN, bias=bias)
        self.down_proj = nn.Linear(FFN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        how = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down_proj(F.gelu(self.up_proj(x), approximate=how))


class DenseBlock(nn.Module):
    def __init__(self, heads: int, kv_heads: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.attention_norm = DenseNorm()
        self.attention = DenseAttention(heads, kv_heads, bias)
        self.mlp_norm = DenseNorm()
        self.mlp = DenseMLP(activation, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class DenseLM(nn.Module):
    """Ids [B, S] to logits [B, S, VOCAB]."""

    def __init__(
        self, heads: int = HEADS, kv_heads: int = KV_HEADS, activation: str = "swiglu", bias: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(DenseBlock(heads, kv_heads, activation, bias) for _ in range(2))
        self.norm = DenseNorm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ParallelLM(nn.Module):
    """The same model from our layers; ids [B, S], logits [B, S, local] or [S, B, local] as the layout says."""

    def __init__(
        self,
        group: str,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        activation: str = "swiglu",
        bias: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.recompute = False
        sp = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        self.embed = tnn.VocabParallelEmbedding(VOCAB, WIDTH, group=group, dtype=dtype, **sp)
        self.blocks = nn.ModuleList(
            tnn.ParallelTransformerBlock(
                WIDTH, FFN, heads, kv_heads, group=group, activation=activation, bias=bias, dtype=dtype, **sp
            )
            for _ in range(2)
        )
        self.norm = tnn.RMSNorm(WIDTH, group=group, sequence_parallel=sequence_parallel, dtype=dtype)
        self.head = tnn.ColumnParallelLinear(WIDTH, VOCAB, group=group, bias=bias, dtype=dtype, **sp)

    def forward(self, ids: Tensor, sizes: list[int] | None = None) -> Tensor:
        x = self.embed(ids.t() if self.sequence_dim == 0 else ids, sizes)
        for block in self.blocks:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, sizes, use_reentrant=False)
            else:
                x = block(x, sizes)
        return self.head(self.norm(x), sizes)


def perturb(module: nn.Module, seed: int) -> None:
    """Moves the biases and norm weights away from 0 and 1, equally in every model, so that they matter."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 1:
                placement = tnn.placement_of(p)
                where = (
                    {}
                    if placement is None
                    else {
                        "global_shape": placement.global_shape(p.shape),
                        "offset": placement.offset(1),
                    }
                )
                p += tnn.init.normal_(
                    torch.empty_like(p), seed=seed, name=f"{name}/perturb", std=0.3, **where
                )


def shard_of(p: Tensor, full: Tensor) -> Tensor:
    """The part of ``full`` that parameter ``p`` stands for."""
    placement = tnn.placement_of(p)
    return full if placement is None else placement.take(full)


def assert_grads(parallel: nn.Module, dense: nn.Module, note: str) -> None:
    """Every parameter of ``parallel`` has its part of the dense gradient."""
    expected = dict(dense.named_parameters())
    assert dict(parallel.named_parameters()).keys() == expected.keys()
    for name, p in parallel.named_parameters():
        assert p.grad is not None, f"{note}: {name} has no gradient"
        torch.testing.assert_close(
            p.grad,
            shard_of(p, expected[name].grad),
            rtol=1e-9,
            atol=1e-11,
            msg=lambda m, n=name: f"{note}: gradient of {n}: {m}",
        )


def close(actual: Tensor | None, expected: Tensor | None, note: str) -> None:
    assert actual is not None, note
    assert expected is not None, note
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12, msg=lambda m: f"{note}: {m}")


def after_step(block: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
    """y, and the gradients of x and the parameters, by name."""
    return {"y": y, "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}


def assert_follows(fine: dict[str, Tensor], coarse: dict[str, Tensor], note: str) -> None:
    """Within bfloat16's rounding, by norm."""
    for name, value in fine.items():
        # Of the gradient of k's bias little is left: softmax does not see what all keys share.
        limit = 0.15 if name.endswith("k_proj.bias") else 0.03
        error = (value - coarse[name].to(value.dtype)).norm() / value.norm().clamp_min(1e-30)
        assert error < limit, f"{note}: {name} is off by {error:.3g}"


def part(full: Tensor, dim: int, sizes: list[int], rank: int) -> Tensor:
    return full.narrow(dim, sum(sizes[:rank]), sizes[rank])


def layouts(world: int) -> list[tuple[tuple[int, ...], int, list[int] | None]]:
    """Shape of the whole x without features, sequence dim, sizes."""
    uneven = [3, 0, 2, 1][:world]
    return [
        ((4 * world, 2), 0, None),
        ((2, 2 * world), 1, None),
        ((sum(uneven), 2), 0, uneven),
        ((3, sum(uneven)), 1, uneven),
        ((4 * world,), 0, None),
    ]
