"""torchtitan's small Llama, built from its configuration, with its dist_gemm layers on our operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nn_dense import close
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.testing import RankContext, RankPool

pytest.importorskip(
    "torchtitan.models.common.dist_gemm", reason="needs torchtitan 0.3 or newer (docs/torchtitan.md)"
)

F64 = torch.float64
LAYERS, VOCAB, B, S = 2, 2048, 2, 12


def build(tp_gemm_backend: str, seed: int, sharded: bool = True) -> nn.Module:
    """The first layers of ``debugmodel`` with starting values; attention is torch's own, which runs on CPUs at once."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    config = model_registry("debugmodel", tp_gemm_backend=tp_gemm_backend).model
    config.layers = config.layers[:LAYERS]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if sharded:
        set_llama3_sharding_config(config, enable_sp=True)
    torch.manual_seed(seed)
    model: nn.Module = config.build()
    model.init_states()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # norms away from 1
                p.add_(torch.randn(p.shape) / 4)
    return model


def parallel(model: nn.Module, world: int, checkpointing: bool) -> AbstractContextManager[None]:
    """Cuts ``model`` over the ranks as torchtitan does; returns the context that its steps run in."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.utils import get_spmd_context

    with mock.patch.object(parallel_dims, "device_type", "cpu"):  # it takes CUDA where there is no device
        dims = ParallelDims.from_config(ParallelismConfig(tensor_parallel_degree=world), world)
        dims.build_mesh()
    model.parallelize(dims)
    if checkpointing:
        FullAC.Config().build(dump_folder="").apply(model)
    return get_spmd_context(parallel_dims=dims)()


def part_like(whole: Tensor, mine: Tensor, ctx: RankContext) -> Tensor:
    """This rank's part of ``whole``, cut along the dimension in which ``mine`` is smaller."""
    for dim, size in enumerate(mine.shape):
        if size != whole.shape[dim]:
            return whole.chunk(ctx.world, dim)[ctx.rank]
    return whole


def near(actual: Tensor, expected: Tensor, what: str) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5 * scale, msg=lambda m: f"{what}: {m}")


def check_model(ctx: RankContext, checkpointing: bool, seed: int) -> None:
    from tpkernels.integrations import titan as ours

    dense, model = build("default", seed, sharded=False), build("dist_gemm", seed)
    step = parallel(model, ctx.world, checkpointing)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (B, S), generator=generator)
    outer = torch.randn(B, S, VOCAB, generator=generator)
    positions = torch.arange(S).expand(B, S)
    expected = dense(ids, positions)
    (expected * outer).sum().backward()

    with step, ours.enable(), tpk.record_paths() as paths:
        out = model(ids, positions)
        near(out, part_like(expected, out, ctx), "logits")
        (out * part_like(outer, out, ctx)).sum().backward()
    ran = Counter({op: n for (op, _), n in paths.counts.items()})
    times = 2 + checkpointing  # forward, backward, and forward again
    assert ran["all_gather_matmul"] >= 2 * LAYERS * times, ran
    assert ran["matmul_reduce_scatter"] >= 2 * LAYERS * times, ran
    for (name, p), q in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        if p.dim() == 1:  # a norm has the gradient of its rank's rows: torchtitan's trainer sums them
            dist.all_reduce(p.grad)
        near(p.grad, part_like(q[1].grad, p, ctx), name)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Pools of the job's own size: torchtitan's meshes are made of the default group."""
    with RankPool(2) as two, RankPool(4) as four:
        yield {2: two, 4: four}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_equal_to_dense(pools: dict[int, RankPool], world: int, checkpointing: bool, seed: int) -> None:
    pools[world].run(check_model, checkpointing, seed, timeout=120)


def check_single(ctx: RankContext, seed: int) -> None:
    """Each function by itself against a dense product, biases too, in float64."""
    from tpkernels.integrations import titan as ours

    torch.manual_seed(seed)
    rows, inside, out = 3 * ctx.world, 5 * ctx.world, 7 * ctx.world
    x, a, b = (torch.randn(*shape, dtype=F64) for shape in ((rows, inside), (out, inside), (out, inside)))
    bias, outer = torch.randn(out, dtype=F64), torch.randn(rows, out, dtype=F64)
    group, name = ctx.group, ctx.group.group_name

    def mine(whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(ctx.world, dim)[ctx.rank].clone().requires_grad_()

    for kind in ("gather", "multi", "scatter"):
        dense = [t.clone().requires_grad_() for t in (x, a, b, bias)]
        y = dense[0] @ dense[1].t() + (0 if kind == "multi" else dense[3])
        y = y + 2 * (dense[0] @ dense[2].t()) if kind == "multi" else y
        y.backward(outer)
        if kind == "scatter":
            given, cuts = [mine(x, 1), mine(a, 1), bias.clone().requires_grad_()], (1, 1, None)
            got = ours.LinearReduceScatter.apply(*given, group, name)
            wanted, back, oracle = mine(y, 0), mine(outer, 0), (dense[0], dense[1], dense[3])
        elif kind == "gather":
            given, cuts = [mine(x, 0), mine(a, 0), mine(bias, 0)], (0, 0, 0)
            got = ours.AllGatherLinear.apply(*given, group, name)
            wanted, back, oracle = mine(y, 1), mine(outer, 1), (dense[0], dense[1], dense[3])
        else:
            given, cuts = [mine(x, 0), mine(a, 0), mine(b, 0)], (0, 0, 0)
            first, second = ours.AllGatherLinearMulti.apply(*given, group, name)
            got = first + 2 * second
            wanted, back, oracle = mine(y, 1), mine(outer, 1), (dense[0], dense[1], dense[2])
        close(got, wanted, kind)
        got.backward(back)
        for p, q, cut in zip(given, oracle, cuts, strict=True):
            close(p.grad, q.grad if cut is None else mine(q.grad, cut), f"{kind}: gradient")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_single_functions(ranks: RankPool, world: int, seed: int) -> None:
    ranks.run(check_single, seed, world=world)


def test_enable_and_disable() -> None:
    from torchtitan.models.common import dist_gemm as theirs

    from tpkernels.integrations import titan as ours

    names = ("AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter")
    before = {name: getattr(theirs, name) for name in names}
    with ours.enable():
        assert all(getattr(theirs, name) is getattr(ours, name) for name in names)
    handle = ours.enable()
    handle.disable()
    handle.disable()
    assert {name: getattr(theirs, name) for name in names} == before
