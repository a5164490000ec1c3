"""What tests of tpkernels.integrations.torch share: layouts of tensors, a model, plans for torch's styles and ours."""

from __future__ import annotations

import copy

import torch
import torch.distributed.tensor.parallel as tp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tpkernels.integrations.torch import Colwise, GatherOnce, Rowwise, SequenceParallel
from tpkernels.testing import RankContext

F64 = torch.float64


def mesh_of(ctx: RankContext) -> DeviceMesh:
    return DeviceMesh.from_group(ctx.group, "cpu", mesh_dim_names=("tp",))


def local_part(full: Tensor, layout: Placement, mesh: DeviceMesh) -> Tensor:
    """What this rank has of ``full`` in that layout."""
    rank, world = mesh.get_local_rank(), mesh.size()
    if isinstance(layout, Shard):
        sizes = tpk.shard_sizes(full.shape[layout.dim], world)
        return full.narrow(layout.dim, sum(sizes[:rank]), sizes[rank])
    if isinstance(layout, Partial):
        return full * ((rank + 1) / (world * (world + 1) / 2))
    return full


def given(full: Tensor, layout: Placement, mesh: DeviceMesh, as_dtensor: bool) -> Tensor:
    """A leaf with this rank's part of ``full``, plain or as DTensor."""
    if as_dtensor and not isinstance(layout, Partial):
        return distribute_tensor(full, mesh, [layout]).detach().requires_grad_()
    leaf = local_part(full, layout, mesh).clone()
    if as_dtensor:
        leaf = DTensor.from_local(leaf, mesh, [layout])
    return leaf.detach().requires_grad_()


def plain(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    """Whole gradients, whose placements are those of their parameters."""
    out = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            assert isinstance(p.grad, DTensor) == isinstance(p, DTensor), name
            if isinstance(p, DTensor):
                where = p.grad.placements
                # torch 2.11 gathers the gradient of a weight whose columns are cut unevenly, when it is accumulated.
                gathered = torch.__version__ < (2, 14) and where == (Replicate(),)
                assert where == p.placements or gathered, (name, where, p.placements)
            out[name] = full(p.grad)
        else:
            assert p.grad is None, name
    return out


def placements_of(module: nn.Module) -> dict[str, object]:
    return {n: getattr(p, "placements", None) for n, p in module.named_parameters()}


def fresh(module: nn.Module) -> nn.Module:
    out = copy.deepcopy(module)
    out.zero_grad(set_to_none=True)
    return out


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.wq = nn.Linear(width, heads * self.head, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head, bias=False)
        self.wo = nn.Linear(heads * self.head, width, bias=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        batch, rows = x.shape[:2]
        q, k, v = (
            y.view(batch, rows, -1, self.head).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=True)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, inner)
        self.attention_norm = nn.RMSNorm(width)
        self.ffn_norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), None)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The names and the forward pass of torchtitan's, small; heads divide by 1 to 4 ranks."""

    vocab, width = 24, 24

    def __init__(self, layers: int = 2, heads: int = 12, kv_heads: int = 12, inner: int = 36) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(self.vocab, self.width)
        self.layers = nn.ModuleList(Block(self.width, heads, kv_heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(self.width)
        self.output = nn.Linear(self.width, self.vocab, bias=False)
        self.recompute = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.output(self.norm(x))


def dense_llama(seed: int, **arguments: int) -> Llama:
    """In float64, with norm weights and biases that matter."""
    torch.manual_seed(seed)
    model = Llama(**arguments).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) / 4)
    return model


def tokens(seed: int, batch: int, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    both = torch.randint(0, Llama.vocab, (2, batch, rows), generator=draw)
    return both[0], both[1]


def parallelized(
    model: Llama,
    mesh: DeviceMesh,
    *,
    ours: bool = True,
    gather_once: bool = False,
    loss_parallel: bool = False,
    local: bool = True,
) -> Llama:
    """The plan of torchtitan with torch's styles or ours; without ``local`` activations of the sequence are DTensors,
    as sequences have to be that do not divide by the ranks."""
    col, row, seq = (
        (Colwise, Rowwise, SequenceParallel)
        if ours
        else (tp.ColwiseParallel, tp.RowwiseParallel, tp.SequenceParallel)
    )
    tp.parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": row(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local),
            "norm": seq(),
            "output": col(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    for layer in model.layers:
        tp.parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": seq(),
                "attention": GatherOnce("wq", "wk", "wv")
                if gather_once
                else tp.PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": col(),
                "attention.wk": col(),
                "attention.wv": col(),
                "attention.wo": row(output_layouts=Shard(1), use_local_output=local),
                "ffn_norm": seq(),
                "feed_forward": GatherOnce("w1", "w3")
                if gather_once
                else tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w[13]": col(),
                "feed_forward.w2": row(output_layouts=Shard(1), use_local_output=local),
            },
        )
    return model


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
