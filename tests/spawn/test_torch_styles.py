"""Colwise, Rowwise and SequenceParallel, one layer each, beside torch's styles and nn.Linear in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from nn_dense import close
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel
from torch.distributed.tensor.placement_types import Placement
from torch.profiler import ProfilerActivity, profile
from torch_plans import F64, fresh, full, given, grads_of, local_part, mesh_of, placements_of, plain

import tpkernels as tpk
from tpkernels.integrations.torch import Colwise, Rowwise, SequenceParallel
from tpkernels.ops import _agreement
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
    """Features fewer than ranks, one row without a batch, no rows, two and four dimensions; replicated as plain tensors
    too."""
    mesh = mesh_of(ctx)
    kinds = ((Colwise, Replicate(), True), (Colwise, Replicate(), False), (Rowwise, Shard(-1), True))
    for shape in ((3,), (0, 3), (4, 3), (2, 1, 2, 3)):
        dense = nn.Linear(3, 3, dtype=F64)
        x = torch.randn(*shape, dtype=F64)
        expected = dense(x)
        for style, layout, as_dtensor in kinds:
            ours = parallelize_module(fresh(dense), mesh, style(use_local_output=False))
            mine = given(x, layout, mesh, as_dtensor)
            out = ours(mine)
            close(out.full_tensor(), expected, f"{style.__name__} {shape}")
            out.sum().backward()
            close(full(mine.grad), dense.weight.sum(0).expand(shape), f"{style.__name__} {shape}: input")


@pytest.mark.parametrize("world", WORLDS)
def test_other_shapes(ranks: RankPool, world: int) -> None:
    ranks.run(other_shapes, world=world)


def count_collectives(layer: nn.Module, case: Case, x: Tensor, mesh: object) -> int:
    """Of a forward and a backward pass, as gloo counts them."""
    mine = given(x, case.input, mesh, case.as_dtensor)
    with _agreement.suspended(), profile(activities=[ProfilerActivity.CPU]) as seen:
        out = plain(layer(mine))
        out.backward(torch.ones_like(out))
        for grad in (mine.grad, *(p.grad for p in layer.parameters())):
            plain(grad).sum().item()  # what is on its way counts when it has come
    return sum(e.count for e in seen.key_averages() if e.key.startswith("gloo:"))


def no_more_collectives(ctx: RankContext, style: type[ParallelStyle]) -> None:
    mesh = mesh_of(ctx)
    x = torch.randn(2, 4, 6, dtype=F64)
    for case in (case for case in cases(style) if not case.uneven):
        layouts = {"input_layouts": case.input, "output_layouts": case.output}
        counts = [
            count_collectives(
                parallelize_module(
                    nn.Linear(6, 10, bias=case.bias, dtype=F64),
                    mesh,
                    kind(**layouts, use_local_output=case.local),
                ),
                case,
                x,
                mesh,
            )
            for kind in (style, TORCHS[style])
        ]
        assert counts[0] <= counts[1], (case, counts)


@pytest.mark.parametrize("style", [Colwise, Rowwise])
def test_no_more_collectives_than_torchs_style(ranks: RankPool, style: type[ParallelStyle]) -> None:
    ranks.run(no_more_collectives, style, world=2, timeout=120)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, dtype=F64), nn.Linear(12, 6, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def mixed(ctx: RankContext) -> None:
    """Styles of torch's and of ours in one plan, also where torch hands over plain tensors still on their way."""
    mesh = mesh_of(ctx)
    dense = FeedForward()
    x = torch.randn(2, 2 * ctx.world, 6, dtype=F64)
    leaf = x.clone().requires_grad_()
    dense(leaf).square().sum().backward()
    for up, down, local in itertools.product(
        (Colwise, ColwiseParallel), (Rowwise, RowwiseParallel), (True, False)
    ):
        ours = parallelize_module(
            fresh(dense),
            mesh,
            {
                "": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=local
                ),
                "up": up(),
                "down": down(output_layouts=Shard(1)),
            },
        )
        mine = given(x, Shard(1), mesh, False)
        out = ours(mine)
        close(out, local_part(dense(x), Shard(1), mesh), f"{up} {down} {local}")
        out.square().sum().backward()
        close(mine.grad, local_part(leaf.grad, Shard(1), mesh), f"{up} {down} {local}: input")
        for name, value in grads_of(ours).items():
            close(value, dense.get_parameter(name).grad, f"{up} {down} {local}: {name}")


@pytest.mark.parametrize("world", [2, 3])
def test_beside_torchs_styles(ranks: RankPool, world: int) -> None:
    ranks.run(mixed, world=world)


def from_meta(ctx: RankContext) -> None:
    """Parallelized before there is memory, then filled: torchtitan's way."""
    mesh = mesh_of(ctx)
    dense = FeedForward()
    with torch.device("meta"):
        ours = FeedForward()
    parallelize_module(ours, mesh, {"up": Colwise(), "down": Rowwise()})
    assert all(p.is_meta for p in ours.parameters())
    ours.to_empty(device="cpu")
    set_model_state_dict(ours, dense.state_dict(), options=StateDictOptions(full_state_dict=True))
    x = torch.randn(4, 6, dtype=F64)
    close(ours(x), dense(x), "from meta")


def test_made_on_the_meta_device(ranks: RankPool) -> None:
    ranks.run(from_meta, world=2)


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


def whole_gradients(ctx: RankContext) -> None:
    """Asked for, they are whole behind every backward pass, of copies and of what came from the meta device too."""
    mesh = mesh_of(ctx)

    def after_two(module: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        for _ in range(2):
            x = torch.randn(2, 2 * ctx.world, 6, dtype=F64)
            module(
                x if not isinstance(next(module.parameters()), DTensor) else part(x)
            ).square().sum().backward()
        return [p.grad for p in module.parameters()]

    def part(x: Tensor) -> Tensor:
        return local_part(x, Shard(1), mesh)

    for kind in (nn.LayerNorm, nn.RMSNorm):
        dense = kind(6, dtype=F64)
        nn.init.normal_(dense.weight)
        partial = parallelize_module(
            fresh(dense), mesh, SequenceParallel(use_local_output=True, whole_gradients=False)
        )
        style = SequenceParallel(use_local_output=True, whole_gradients=True)
        whole = parallelize_module(fresh(dense), mesh, style)
        with torch.device("meta"):
            late = kind(6, dtype=F64)
        late = parallelize_module(late, mesh, style).to_empty(device="cpu")
        late.load_state_dict(whole.state_dict())
        expected = after_two(dense)
        assert all(g.placements[0].is_partial() == (ctx.world > 1) for g in after_two(partial))
        for module in (whole, fresh(whole), late):
            for grad, want in zip(after_two(module), expected, strict=True):
                assert grad.placements == (Replicate(),), kind
                close(grad.to_local(), want, f"{kind.__name__}: on this rank")
        frozen = parallelize_module(fresh(dense).requires_grad_(False), mesh, style)
        assert not frozen(part(torch.randn(2, 2 * ctx.world, 6, dtype=F64))).requires_grad
        torch._dynamo.reset()
        compiled = torch.compile(whole, backend="aot_eager", dynamic=False)
        whole.zero_grad()
        for grad, want in zip(after_two(compiled), expected, strict=True):
            assert grad.placements == (Replicate(),)
            close(grad.to_local(), want, "compiled")


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_of_norms_are_whole_where_asked_for(ranks: RankPool, world: int) -> None:
    ranks.run(whole_gradients, world=world)


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
