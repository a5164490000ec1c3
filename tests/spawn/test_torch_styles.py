"""Colwise, Rowwise and SequenceParallel, one layer each, beside torch's styles and nn.Linear in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from nn_dense import close
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel
from torch.distributed.tensor.placement_types import Placement
from torch_plans import F64, fresh, full, given, grads_of, local_part, mesh_of, placements_of, plain

import tpkernels as tpk
from tpkernels.integrations.torch import Colwise, Rowwise, SequenceParallel
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
ROWS = (Shard(0), Shard(1))
TORCHS = {Colwise: ColwiseParallel, Rowwise: RowwiseParallel, SequenceParallel: TorchSequenceParallel}


class Case(NamedTuple):
    style: type[ParallelStyle]
    input: Placement
    output: Placement
    bias: bool
    as_dtensor: bool
    local: bool
    uneven: bool


def expected_ops(case: Case) -> set[str]:
    """The operations that have to carry the forward pass."""
    if case.style is Colwise:
        if case.input in ROWS:
            return {"all_gather_matmul"}
        plain_replica = isinstance(case.input, Replicate) and not case.as_dtensor
        return {"matmul_replicated" if plain_replica else "matmul"}
    if isinstance(case.output, Replicate):
        return {"matmul_all_reduce"}
    return {"matmul_reduce_scatter"} if case.output in ROWS else {"matmul"}


def cases(style: type[ParallelStyle]) -> Iterable[Case]:
    inputs = (Replicate(), *ROWS, Shard(-1), Partial())
    outputs = (Shard(-1), Replicate(), Shard(1), *([] if style is Colwise else [Shard(0), Partial()]))
    flags = itertools.cycle(itertools.product((True, False), (True, False), (True, False)))
    for layout, output in itertools.product(inputs, outputs):
        for _ in range(2):  # two of the eight combinations for each pair of layouts, in turn
            bias, as_dtensor, local = next(flags)
            yield Case(style, layout, output, bias, as_dtensor, local, False)
    for layout, output, bias in itertools.product((Replicate(), *ROWS, Shard(-1)), outputs, (True, False)):
        yield Case(style, layout, output, bias, True, False, True)


def run(layer: nn.Module, case: Case, x: Tensor, seed_of_y: Tensor, mesh: object) -> dict[str, Tensor]:
    """Output and gradients, all whole."""
    mine = given(x, case.input, mesh, case.as_dtensor)
    out = layer(mine)
    assert isinstance(out, DTensor) != case.local
    local = plain(out)
    if isinstance(case.output, Partial):
        expected_rows: Placement = Replicate()
    else:
        expected_rows = case.output
        assert local.shape == local_part(seed_of_y, case.output, mesh).shape
    (local * local_part(seed_of_y, expected_rows, mesh)).sum().backward()
    whole = DTensor.from_local(
        local.detach(), mesh, [case.output], shape=seed_of_y.shape, stride=seed_of_y.stride()
    )
    grad = mine.grad
    if isinstance(grad, DTensor):
        grad = grad.full_tensor()
    elif isinstance(case.input, Shard):
        grad = DTensor.from_local(grad, mesh, [case.input], shape=x.shape, stride=x.stride()).full_tensor()
    return {"output": whole.full_tensor(), "input": grad, **grads_of(layer)}


def compare(ctx: RankContext, style: type[ParallelStyle]) -> None:
    mesh = mesh_of(ctx)
    for case in cases(style):
        note = f"{style.__name__} {case}"
        rows = 5 if case.uneven else 2 * ctx.world
        batch = 3 if case.uneven else ctx.world  # Shard(0) cuts the batch
        inside, outside = (6 if ctx.world == 2 else 7), 10  # torch's wants plain tensors of equal parts
        dense = nn.Linear(inside, outside, bias=case.bias, dtype=F64)
        x = torch.randn(batch, rows, inside, dtype=F64)
        weights = torch.randn(batch, rows, outside, dtype=F64)
        leaf = x.clone().requires_grad_()
        y = dense(leaf)
        (y * weights).sum().backward()
        expected = {"output": y.detach(), "input": leaf.grad, "weight": dense.weight.grad}
        if case.bias:
            expected["bias"] = dense.bias.grad
        arguments = {
            "input_layouts": case.input,
            "output_layouts": case.output,
            "use_local_output": case.local,
        }
        ours = parallelize_module(fresh(dense), mesh, style(**arguments))
        theirs = parallelize_module(fresh(dense), mesh, TORCHS[style](**arguments))
        assert placements_of(ours) == placements_of(theirs), note
        assert isinstance(ours, nn.Linear)
        with tpk.record_paths() as log:
            got = run(ours, case, x, weights, mesh)
        ops = {op for op, _ in log.counts}
        assert expected_ops(case) <= ops, f"{note}: {log}"
        assert got.keys() == expected.keys(), note
        for name, value in expected.items():
            close(got[name], value, f"{note}: {name}")
        if not case.uneven and ctx.world == 2:
            for name, value in run(theirs, case, x, weights, mesh).items():
                close(got[name], value, f"{note}: {name}, torch's")


@pytest.mark.parametrize("style", [Colwise, Rowwise])
@pytest.mark.parametrize("world", WORLDS)
def test_a_layer(ranks: RankPool, world: int, style: type[ParallelStyle]) -> None:
    ranks.run(compare, style, world=world, timeout=120)


def frozen(ctx: RankContext) -> None:
    mesh = mesh_of(ctx)
    for style, names in itertools.product((Colwise, Rowwise), (("weight",), ("bias",), ("weight", "bias"))):
        dense = nn.Linear(6, 10, dtype=F64)
        for name in names:
            dense.get_parameter(name).requires_grad_(False)
        layouts = {"input_layouts": Shard(1)} if style is Colwise else {"output_layouts": Shard(1)}
        ours = parallelize_module(fresh(dense), mesh, style(**layouts, use_local_output=False))
        x = torch.randn(2, 5, 6, dtype=F64)
        mine = given(x, Shard(1) if style is Colwise else Shard(2), mesh, True)
        leaf = x.clone().requires_grad_()
        dense(leaf).square().sum().backward()
        ours(mine).square().sum().backward()
        close(full(mine.grad), leaf.grad, "input")
        got = grads_of(ours)
        assert got.keys() == {"weight", "bias"} - set(names)
        for name, value in got.items():
            close(value, dense.get_parameter(name).grad, name)


@pytest.mark.parametrize("world", [2, 3])
def test_frozen_parameters_take_part_without_a_gradient(ranks: RankPool, world: int) -> None:
    ranks.run(frozen, world=world)


def one_bias(ctx: RankContext) -> None:
    """A bias added on every rank would give the world here, one divided by the world a wrong gradient."""
    mesh = mesh_of(ctx)
    for layout in (Replicate(), Shard(0), Shard(-1), Partial()):
        dense = nn.Linear(6, 2 * ctx.world, dtype=F64)
        nn.init.zeros_(dense.weight)
        nn.init.ones_(dense.bias)
        ours = parallelize_module(dense, mesh, Rowwise(output_layouts=layout, use_local_output=False))
        out = ours(given(torch.randn(ctx.world, 6, dtype=F64), Shard(-1), mesh, True))
        whole = out.full_tensor()
        assert torch.equal(whole, torch.ones_like(whole)), layout
        whole.sum().backward()
        assert torch.equal(full(ours.bias.grad), torch.full((2 * ctx.world,), float(ctx.world), dtype=F64)), (
            layout
        )


@pytest.mark.parametrize("world", WORLDS)
def test_a_row_bias_counts_once(ranks: RankPool, world: int) -> None:
    ranks.run(one_bias, world=world)


def other_shapes(ctx: RankContext) -> None:
    """Features fewer than ranks, one row without a batch, no rows, two and four dimensions."""
    mesh = mesh_of(ctx)
    for shape in ((3,), (0, 3), (4, 3), (2, 1, 2, 3)):
        dense = nn.Linear(3, 3, dtype=F64)
        x = torch.randn(*shape, dtype=F64)
        expected = dense(x)
        for style, layout in ((Colwise, Replicate()), (Rowwise, Shard(-1))):
            ours = parallelize_module(fresh(dense), mesh, style(use_local_output=False))
            mine = given(x, layout, mesh, True)
            out = ours(mine)
            close(out.full_tensor(), expected, f"{style.__name__} {shape}")
            out.sum().backward()
            close(full(mine.grad), dense.weight.sum(0).expand(shape), f"{style.__name__} {shape}: input")


@pytest.mark.parametrize("world", WORLDS)
def test_other_shapes(ranks: RankPool, world: int) -> None:
    ranks.run(other_shapes, world=world)


def norms(ctx: RankContext) -> None:
    mesh = mesh_of(ctx)
    for kind, rows, local in itertools.product((nn.LayerNorm, nn.RMSNorm), (5, 2 * ctx.world), (True, False)):
        dense = kind(6, dtype=F64)
        nn.init.normal_(dense.weight)  # the ranks draw alike
        x, weights = torch.randn(2, 3, rows, 6, dtype=F64).unbind()
        leaf = x.clone().requires_grad_()
        (dense(leaf) * weights).sum().backward()
        ours = fresh(dense)
        if ctx.rank > 0:
            nn.init.zeros_(ours.weight)  # rank 0's count
        ours = parallelize_module(ours, mesh, SequenceParallel(use_local_output=local))
        assert placements_of(ours) == {n: (Replicate(),) for n, _ in dense.named_parameters()}
        mine = given(x, Shard(1), mesh, rows == 5)
        out = ours(mine)
        assert isinstance(out, DTensor) != local
        close(plain(out), local_part(dense(x), Shard(1), mesh), "output")
        (plain(out) * local_part(weights, Shard(1), mesh)).sum().backward()
        for name, p in ours.named_parameters():
            close(full(p.grad), dense.get_parameter(name).grad, f"{kind.__name__} {name}")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_norms(ranks: RankPool, world: int) -> None:
    ranks.run(norms, world=world)


def embeddings(ctx: RankContext) -> None:
    """nn.Embedding goes torch's way."""
    mesh = mesh_of(ctx)
    ids = torch.randint(0, 11, (2, 4 * ctx.world))
    for style, layout in ((Rowwise, Shard(1)), (Rowwise, Replicate()), (Colwise, Replicate())):
        dense = nn.Embedding(11, 6, dtype=F64)
        arguments = {"input_layouts": Replicate(), "output_layouts": layout, "use_local_output": False}
        ours = parallelize_module(fresh(dense), mesh, style(**arguments))
        assert placements_of(ours) == {"weight": (Shard(0 if style is Rowwise else 1),)}
        out = ours(ids)
        assert out.placements == (layout,)
        close(out.full_tensor(), dense(ids), "embedding")
        dense(ids).square().sum().backward()
        out.full_tensor().square().sum().backward()
        close(full(ours.weight.grad), dense.weight.grad, "embedding")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_embeddings(ranks: RankPool, world: int) -> None:
    ranks.run(embeddings, world=world)
