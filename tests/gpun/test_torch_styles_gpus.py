"""Colwise, Rowwise, GatherOnce and enable_async_tp on NCCL ranks, one GPU each, beside nn.Linear in float64."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hopper_gpus import COUNT, WORLDS
from op_checks import on_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import tpkernels as tpk
from tpkernels.integrations.async_tp import enable_async_tp
from tpkernels.integrations.torch import Colwise, GatherOnce, Rowwise, SequenceParallel
from tpkernels.testing import RankContext, RankPool

pytestmark = [pytest.mark.gpun, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]

BF16, F32 = torch.bfloat16, torch.float32
BOUND = {BF16: 0.02, F32: 1e-3}  # of norms; float32 products may be TF32
INSIDE, INNER = 96, 128


def mesh_of(ctx: RankContext) -> DeviceMesh:
    return DeviceMesh.from_group(ctx.group, "cuda", mesh_dim_names=("tp",))


def near(got: Tensor, expected: Tensor, dtype: torch.dtype, note: str) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    assert got.shape == expected.shape, note
    error = (got.double() - expected).norm() / expected.norm()
    assert error < BOUND[dtype], f"{note}: {error:.2e}"


def check_layer(ctx: RankContext, style: type[ParallelStyle], dtype: torch.dtype, rows: int) -> None:
    """Every layout that a DTensor can have, output, input's, weight's and bias's gradient; rows need not divide."""
    mesh = mesh_of(ctx)
    outputs = (Shard(2), Replicate(), Shard(1), *([] if style is Colwise else [Partial()]))
    for layout, output in itertools.product((Replicate(), Shard(1), Shard(2)), outputs):
        note = f"{style.__name__} {layout} {output}"
        made = nn.Linear(INSIDE, INNER, dtype=dtype)
        dense = copy.deepcopy(made).double()
        x = torch.randn(2, rows, INSIDE).to(dtype)
        leaf = x.double().requires_grad_()
        weights = torch.randn(2, rows, INNER).to(dtype)
        expected = dense(leaf)
        (expected * weights.double()).sum().backward()
        arguments = {"input_layouts": layout, "output_layouts": output, "use_local_output": False}
        ours = parallelize_module(made, mesh, style(**arguments))
        mine = distribute_tensor(x, mesh, [layout]).detach().requires_grad_()
        out = ours(mine)
        assert out.placements == (output,), note
        near(out, expected.detach(), dtype, note)
        (
            out.redistribute(placements=[Replicate()]) * distribute_tensor(weights, mesh, [Replicate()])
        ).sum().backward()
        near(mine.grad, leaf.grad, dtype, f"{note}: input")
        for name, p in ours.named_parameters():
            assert p.grad.placements == p.placements, (note, name)
            near(p.grad, dense.get_parameter(name).grad, dtype, f"{note}: {name}")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("style", [Colwise, Rowwise])
def test_a_layer(gpu_ranks: RankPool, style: type[ParallelStyle], dtype: torch.dtype, world: int) -> None:
    gpu_ranks.run(on_device, check_layer, style, dtype, 8 * world, world=world, timeout=120)
    gpu_ranks.run(on_device, check_layer, style, dtype, 8 * world + 1, world=world, timeout=120)


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(INSIDE, INNER, dtype=dtype) for _ in range(2))
        self.w2 = nn.Linear(INNER, INSIDE, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.tanh(self.w1(x)) * self.w3(x))


def check_mlp(ctx: RankContext, dtype: torch.dtype, rows: int) -> None:
    """A norm and an MLP with one gather for both products, sequence parallel."""
    mesh = mesh_of(ctx)
    made = nn.Sequential(nn.LayerNorm(INSIDE, dtype=dtype), Mlp(dtype))
    dense = copy.deepcopy(made).double()
    plan = {
        "0": SequenceParallel(),
        "1": GatherOnce("w1", "w3"),
        "1.w[13]": Colwise(use_local_output=False),
        "1.w2": Rowwise(output_layouts=Shard(1), use_local_output=False),
    }
    ours = parallelize_module(made, mesh, plan)
    x = torch.randn(2, rows, INSIDE).to(dtype)
    leaf = x.double().requires_grad_()
    expected = dense(leaf)
    expected.square().sum().backward()
    mine = distribute_tensor(x, mesh, [Shard(1)]).detach().requires_grad_()
    with tpk.record_paths() as log:
        out = ours(mine)
    assert sum(n for (op, _), n in log.counts.items() if op == "all_gather_matmul") == 1, log
    near(out, expected.detach(), dtype, "output")
    out.square().sum().backward()
    near(mine.grad, leaf.grad, dtype, "input")
    for name, p in ours.named_parameters():
        near(p.grad, dense.get_parameter(name).grad, dtype, name)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_an_mlp(gpu_ranks: RankPool, dtype: torch.dtype, world: int) -> None:
    for rows in (8 * world, 8 * world + 1):
        gpu_ranks.run(on_device, check_mlp, dtype, rows, world=world, timeout=120)


def check_async_tp(ctx: RankContext, dtype: torch.dtype) -> None:
    """torch's operations on ours, for every dimension but the last; torch's kernels are back afterwards."""
    group, world = ctx.group_name, ctx.world
    ops = torch.ops.symm_mem
    with enable_async_tp() as ran:
        for dim in range(2):
            whole = torch.randn(2 * world, 3 * world, INSIDE).to(dtype)
            w, back = torch.randn(INSIDE, INNER).to(dtype), torch.randn(INNER, INSIDE).to(dtype)
            mine = whole.chunk(world, dim)[ctx.rank].contiguous()
            gathered, (y,) = ops.fused_all_gather_matmul(mine, [w], dim, group)
            assert torch.equal(gathered, whole)
            near(y, whole.double() @ w.double(), dtype, f"gather {dim}")
            part = ops.fused_matmul_reduce_scatter(y, back, "avg", dim, group)
            expected = (y.double() @ back.double()).chunk(world, dim)[ctx.rank]  # the same on all ranks
            near(part, expected, dtype, f"scatter {dim}")
    assert (ran.calls("fused_all_gather_matmul"), ran.calls("fused_matmul_reduce_scatter")) == (2, 2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_async_tp(gpu_ranks: RankPool, dtype: torch.dtype, world: int) -> None:
    gpu_ranks.run(on_device, check_async_tp, dtype, world=world)
