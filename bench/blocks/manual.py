"""Transformer layers by hand: collectives of torch.distributed, F.linear, sequence parallel as in Megatron.

As Megatron-LM does it (core/tensor_parallel/layers.py): q, k, v are one packed weight, gate and up too; a
column-parallel product keeps this rank's part of its input and gathers it again in backward for the weight's
gradient; the weights of the norms get their gradients summed over the ranks after backward, all in one
collective. ``overlap`` adds Megatron's tricks: in backward that second gather runs beside the product for the
input's gradient, and the reduce-scatter of this gradient beside the product for the weight's. Left out are its
fused kernels for RoPE and SwiGLU, which no implementation here has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ..context import Context
from ..models import Model
from .dense import Rotary, attend, norm_of, rotary_of
from .implementation import Implementation, parts_of
from .shapes import Layer, Size

__all__ = ["language_model", "layer"]

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# torch 2.14 renamed them; both names are the same collectives.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class _Pending:
    """A tensor that a collective is still writing."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class _Comm:
    """The group's collectives along dimension 0. ``overlap``: let backward run them beside products."""

    group: dist.ProcessGroup
    rank: int
    world: int
    overlap: bool

    def gather(self, x: Tensor, *, later: bool = False) -> _Pending:
        out = x.new_empty(x.shape[0] * self.world, *x.shape[1:])
        return _Pending(out, _gather_single(out, x.contiguous(), group=self.group, async_op=later))

    def reduce_scatter(self, x: Tensor, *, later: bool = False) -> _Pending:
        out = x.new_empty(x.shape[0] // self.world, *x.shape[1:])
        return _Pending(out, _scatter_single(out, x.contiguous(), group=self.group, async_op=later))

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        x = x.contiguous()  # NCCL takes nothing else; gloo does
        dist.all_reduce(x, op, group=self.group)
        return x


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


class _ColumnProduct(torch.autograd.Function):
    """all_gather(x) W^T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: _Comm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.biased = comm, bias is not None
        return F.linear(comm.gather(x).wait(), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        comm: _Comm = ctx.comm
        gathered = comm.gather(x, later=comm.overlap)
        whole = dy @ weight
        whole_x = gathered.wait()
        dx = comm.reduce_scatter(whole, later=comm.overlap)
        dweight = _weight_gradient(dy, whole_x)
        dbias = dy.flatten(0, -2).sum(0) if ctx.biased else None
        return dx.wait(), dweight, dbias, None


class _RowProduct(torch.autograd.Function):
    """reduce_scatter(x W^T)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: _Comm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return comm.reduce_scatter(F.linear(x, weight)).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        whole = ctx.comm.gather(dy).wait()
        return whole @ weight, _weight_gradient(whole, x), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: _Comm) -> Tensor:
        ctx.comm = comm
        return comm.reduce_scatter(x).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.gather(dy).wait(), None


class _CrossEntropy(torch.autograd.Function):
    """Mean over the tokens, logits cut along the vocabulary: three all-reduces forward, none backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, comm: _Comm) -> Tensor:
        wide = logits.float()
        top = comm.all_reduce(wide.amax(-1), dist.ReduceOp.MAX)
        wide = wide - top.unsqueeze(-1)
        held = wide.shape[-1]
        index = targets - comm.rank * held
        mine = (index >= 0) & (index < held)
        index = torch.where(mine, index, 0).unsqueeze(-1)
        picked = comm.all_reduce(torch.where(mine, wide.gather(-1, index).squeeze(-1), 0.0))
        softmax = wide.exp_()
        total = comm.all_reduce(softmax.sum(-1))
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, mine, index)
        ctx.dtype = logits.dtype
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        softmax, mine, index = ctx.saved_tensors
        at_target = mine.unsqueeze(-1).to(softmax.dtype)
        softmax.scatter_add_(-1, index, -at_target)
        return (softmax * (dloss / mine.numel())).to(ctx.dtype), None, None


class _Column(nn.Module):
    """Weight and bias are parts."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        comm: _Comm,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(torch.empty(outputs // comm.world, inputs, dtype=dtype, device=device))
        own = torch.empty(outputs // comm.world, dtype=dtype, device=device) if bias else None
        self.bias = None if own is None else nn.Parameter(own)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _ColumnProduct.apply(x, self.weight, self.bias, self.comm)
        return y


class _Row(nn.Module):
    """The weight is a part; the bias is whole, and added to this rank's rows."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        comm: _Comm,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(torch.empty(outputs, inputs // comm.world, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _RowProduct.apply(x, self.weight, self.comm)
        return y if self.bias is None else y + self.bias


class _Attention(nn.Module):
    def __init__(self, model: Model, comm: _Comm, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.kv_width = model.kv_heads * model.head_dim // comm.world
        self.qkv_proj = _Column(model.hidden, model.qkv, comm, dtype, device, model.biases)
        self.o_proj = _Row(model.heads * model.head_dim, model.hidden, comm, dtype, device, model.biases)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        qkv = self.qkv_proj(x)
        q, k, v = qkv.split((qkv.shape[-1] - 2 * self.kv_width, self.kv_width, self.kv_width), dim=-1)
        out: Tensor = self.o_proj(attend(q, k, v, self.head_dim, rotary))
        return out


class _MLP(nn.Module):
    def __init__(self, model: Model, comm: _Comm, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gated = model.gated
        up = _Column(model.hidden, model.up, comm, dtype, device, model.biases)
        if model.gated:
            self.gate_up_proj = up
        else:
            self.up_proj = up
        self.down_proj = _Row(model.ffn, model.hidden, comm, dtype, device, model.biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(self.up_proj(x), approximate="tanh")
        out: Tensor = self.down_proj(inner)
        return out


class _Block(nn.Module):
    def __init__(self, model: Model, comm: _Comm, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention_norm = norm_of(model, dtype=dtype, device=device)
        self.attention = _Attention(model, comm, dtype, device)
        self.mlp_norm = norm_of(model, dtype=dtype, device=device)
        self.mlp = _MLP(model, comm, dtype, device)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class _LanguageModel(nn.Module):
    """Token ids and targets [B, S] to the mean loss; embedding and head are cut along the vocabulary."""

    def __init__(self, size: Size, comm: _Comm, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.model, self.comm = size.model, comm
        hidden = size.model.hidden
        self.embed = nn.Embedding(size.vocab // comm.world, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(_Block(size.model, comm, dtype, device) for _ in range(size.model.layers))
        self.norm = norm_of(size.model, dtype=dtype, device=device)
        self.head = _Column(hidden, size.vocab, comm, dtype, device)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rotary = rotary_of(self.model, tokens.shape[1], tokens.device)
        held = self.embed.num_embeddings
        index = tokens.t() - self.comm.rank * held
        mine = (index >= 0) & (index < held)
        found = self.embed(torch.where(mine, index, 0)).masked_fill(~mine.unsqueeze(-1), 0.0)
        x = _ReduceScatter.apply(found, self.comm)
        for block in self.layers:
            x = block(x, rotary)
        loss: Tensor = _CrossEntropy.apply(self.head(self.norm(x)), targets.t(), self.comm)
        return loss


def _comm(context: Context, overlap: bool) -> _Comm:
    assert context.group is not None
    return _Comm(context.group, context.rank, context.world, overlap)


def _complete(module: nn.Module, comm: _Comm, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of what every rank has whole (norms, biases of rows) summed over the ranks, in one all-reduce."""
    cut = {p for m in module.modules() if isinstance(m, _Column) for p in m.parameters()}
    shared = [g.dim() == 1 and p not in cut for p, g in zip(module.parameters(), gradients, strict=True)]
    if not any(shared):
        return list(gradients)
    parts = [g for g, mine in zip(gradients, shared, strict=True) if mine]
    summed = iter(comm.all_reduce(torch.cat(parts)).split([g.numel() for g in parts]))
    return [next(summed) if mine else g for g, mine in zip(gradients, shared, strict=True)]


def layer(shape: Layer, context: Context, dtype: torch.dtype, *, overlap: bool) -> Implementation:
    """A layer of the layer suite."""
    comm = _comm(context, overlap)
    kind: Any = {"mlp": _MLP, "attention": _Attention, "block": _Block}[shape.part]
    module: nn.Module = kind(shape.model, comm, dtype, context.device)
    arguments = (rotary_of(shape.model, shape.tokens.seq, context.device),) if shape.has_attention else ()
    return Implementation(
        module,
        lambda x: module(x, *arguments),
        parts_of(module, shape.weights, comm.rank, comm.world, PACKED),
        lambda gradients: _complete(module, comm, gradients),
    )


def language_model(size: Size, context: Context, dtype: torch.dtype, *, overlap: bool) -> Implementation:
    """The model of the train suite."""
    comm = _comm(context, overlap)
    module = _LanguageModel(size, comm, dtype, context.device)
    return Implementation(
        module,
        module,
        parts_of(module, size.weights, comm.rank, comm.world, PACKED),
        lambda gradients: _complete(module, comm, gradients),
    )
