"""enable_async_tp: torch's fused symm_mem operations run on ours, in compiled programs too, and only inside."""

from __future__ import annotations

import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from nn_dense import close
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpkernels as tpk
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.integrations.async_tp import AsyncTP, enable_async_tp
from tpkernels.testing import RankContext, RankPool

F64 = torch.float64
GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
OPS = torch.ops.symm_mem


def gathered_products(
    a: Tensor, bs: list[Tensor], dim: int, group: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """What torch's operation is defined to compute."""
    return symm_mem._fused_all_gather_matmul_fallback(a, bs, dim, group, return_A=return_A)


def scattered_product(a: Tensor, b: Tensor, op: str, dim: int, group: str) -> Tensor:
    """What torch's operation is defined to compute, apart from the mean, which gloo has not."""
    out = funcol.wait_tensor(funcol.reduce_scatter_tensor((a @ b).contiguous(), "sum", dim, group))
    return (
        out / torch.distributed.distributed_c10d._resolve_process_group(group).size() if op == "avg" else out
    )


def same(got: object, expected: object, note: str) -> None:
    if isinstance(expected, Tensor):
        close(got, expected, note)
        assert got.stride() == expected.stride(), note
    elif expected is None:
        assert got is None, note
    else:
        assert len(got) == len(expected), note
        for a, b in zip(got, expected, strict=True):
            same(a, b, note)


def direct(ctx: RankContext, compiled: bool) -> None:
    group, gathers, scatters = ctx.group_name, 0, 0

    def wrapped(op: object) -> object:
        if not compiled:
            return op
        torch._dynamo.reset()
        return torch.compile(op, backend="aot_eager", fullgraph=True)

    with enable_async_tp() as ran:
        for shape, n, return_a in itertools.product(((4, 6), (2, 3, 6), (0, 6)), (1, 3), (True, False)):
            a = torch.randn(*shape, dtype=F64)
            for dim in range(len(shape)):
                inside = shape[-1] * (ctx.world if dim == len(shape) - 1 else 1)
                bs = [torch.randn(inside, 3 + i, dtype=F64) for i in range(n)]
                expected = gathered_products(a, bs, dim, group, return_A=return_a)
                got = wrapped(OPS.fused_all_gather_matmul)(a, bs, dim, group, return_A=return_a)
                same(got, expected, f"{shape} {dim} {n} {return_a}")
                gathers += 1
        w = ctx.world
        for shape, op in itertools.product(((2 * w, 6), (2 * w, 3 * w, 6)), ("sum", "avg")):
            a, b = torch.randn(*shape, dtype=F64), torch.randn(6, 2 * w, dtype=F64)
            for dim in range(len(shape)):
                expected = scattered_product(a, b, op, dim, group)
                got = wrapped(OPS.fused_matmul_reduce_scatter)(a, b, op, dim, group)
                same(got, expected, f"{shape} {dim} {op}")
                scatters += 1
        for refused, kind, words in (
            (lambda: OPS.fused_matmul_reduce_scatter(a, b, "max", 0, group), ArgumentError, "'max'"),
            (
                lambda: OPS.fused_matmul_reduce_scatter(a, b, "sum", 3, group),
                ArgumentError,
                "scatter_dim is 3",
            ),
            (lambda: OPS.fused_all_gather_matmul(a, [b], 5, group), ArgumentError, "gather_dim is 5"),
        ):
            with pytest.raises(kind, match=words):
                refused()
        if w > 1:
            with pytest.raises(ShapeError, match=f"{w} ranks get equal parts of dimension 0 .* it has 1"):
                OPS.fused_matmul_reduce_scatter(a[:1], b, "sum", 0, group)
    assert ran.calls(GATHER) == gathers
    assert ran.calls(SCATTER) == scatters
    assert f"symm_mem.{GATHER}: {gathers} calls (" in repr(ran)
    assert "gloo+blas x " in repr(ran) or w == 1


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_called_directly(ranks: RankPool, world: int) -> None:
    ranks.run(direct, False, world=world)


def kernels() -> str:
    return "".join(torch._C._dispatch_dump(f"symm_mem::{op}") for op in (GATHER, SCATTER))


def undone(ctx: RankContext) -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 4)
    before = kernels()

    def runs() -> bool:
        try:
            OPS.fused_all_gather_matmul(a, [b], 0, ctx.group_name)
        except NotImplementedError:
            return False
        return True

    assert not runs()
    with enable_async_tp() as outer:
        assert kernels() != before
        assert runs()
        with enable_async_tp() as inner:
            assert runs()
        assert runs()
        assert (outer.calls(GATHER), inner.calls(GATHER)) == (3, 1)
    assert kernels() == before
    assert not runs()
    with pytest.raises(ZeroDivisionError), enable_async_tp():
        raise ZeroDivisionError
    assert not runs()
    assert kernels() == before
    for _ in range(20):
        with tpk.enable_async_tp() as ran:
            assert runs()
        assert ran.calls(GATHER) == 1
        assert ran.calls(SCATTER) == 0
    assert kernels() == before
    assert repr(AsyncTP()) == f"symm_mem.{GATHER}: 0 calls\nsymm_mem.{SCATTER}: 0 calls"


def cannot_begin(ctx: RankContext) -> None:
    """What fails on entering leaves nothing behind, and the next context begins anew. Kernels that torch has registered
    in Python are replaced by leave, which torch 2.11 asks for."""
    before, real = kernels(), torch.library.Library.impl

    def impl(library: object, name: str, fn: object, key: str, *, allow_override: bool = False) -> None:
        assert allow_override
        if (name, key) == (SCATTER, "CUDA"):
            raise RuntimeError("registered by another")
        real(library, name, fn, key, allow_override=allow_override)

    with (
        mock.patch.object(torch.library.Library, "impl", impl),
        pytest.raises(RuntimeError, match="by another"),
        enable_async_tp(),
    ):
        pass
    assert kernels() == before
    with enable_async_tp() as ran:
        OPS.fused_all_gather_matmul(torch.randn(4, 6), [torch.randn(6, 4)], 0, ctx.group_name)
    assert ran.calls(GATHER) == 1
    assert kernels() == before


def test_undone_where_it_cannot_begin(ranks: RankPool) -> None:
    ranks.run(cannot_begin, world=1)


def test_undone_on_leaving(ranks: RankPool) -> None:
    ranks.run(undone, world=2)


def step(x: Tensor, w1: Tensor, w2: Tensor, group: str) -> Tensor:
    """A layer as torch's async tensor parallelism leaves it in a graph."""
    _, (h,) = OPS.fused_all_gather_matmul(x, [w1], 1, group, return_A=False)
    return OPS.fused_matmul_reduce_scatter(torch.relu(h), w2, "sum", 1, group)


def in_a_program(ctx: RankContext) -> None:
    """Compiled before, inside or between contexts, a program runs ours inside, and is not compiled again."""
    group = ctx.group_name
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(step, backend=counter, fullgraph=True)
    x = torch.randn(2, 3, 6, dtype=F64)
    w1, w2 = torch.randn(6, 5, dtype=F64), torch.randn(5, 4, dtype=F64)
    gathered = gathered_products(x, [w1], 1, group)[1][0]
    expected = scattered_product(gathered.relu(), w2, "sum", 1, group)
    with pytest.raises(NotImplementedError):
        run(x, w1, w2, group)
    for _ in range(3):
        with enable_async_tp() as ran:
            same(run(x, w1, w2, group), expected, "compiled")
        assert (ran.calls(GATHER), ran.calls(SCATTER)) == (1, 1)
    assert counter.frame_count == 1


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def made_by_inductor(ctx: RankContext) -> None:
    """torch's own styles under torch's own pass, which only the lack of NCCL and a group's mark keep from running."""
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    torch._dynamo.reset()
    dense = Mlp()
    model = copy.deepcopy(dense)
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh, plan)
    x = torch.randn(4 * ctx.world, 6)
    mine = x.chunk(ctx.world)[ctx.rank].clone().requires_grad_()
    leaf = x.clone().requires_grad_()
    dense(leaf).square().sum().backward()
    patched = mock.patch("torch.distributed.is_nccl_available", return_value=True)
    config = inductor_config.patch(_micro_pipeline_tp=True)
    with patched, config, symm_mem._test_mode(), enable_async_tp() as ran:
        run = torch.compile(model, fullgraph=True)
        out = run(mine)
        forward = (ran.calls(GATHER), ran.calls(SCATTER))
        out.square().sum().backward()
    assert forward == (1, 1), ran
    assert (ran.calls(GATHER), ran.calls(SCATTER)) == (2, 2), ran
    torch.testing.assert_close(out, dense(x).chunk(ctx.world)[ctx.rank])
    torch.testing.assert_close(mine.grad, leaf.grad.chunk(ctx.world)[ctx.rank])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), dense.get_parameter(name).grad)


@pytest.mark.slow
def test_what_inductor_makes_of_torchs_styles(ranks: RankPool) -> None:
    ranks.run(made_by_inductor, world=2, timeout=200)


def test_in_a_compiled_program(ranks: RankPool) -> None:
    ranks.run(in_a_program, world=2)
    ranks.run(direct, True, world=2)
