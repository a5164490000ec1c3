"""Delayed weight gradients on gloo ranks: what backward() leaves, backward_dw() adds; refusals; a pipeline's order."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import main_grad_checks as checks
import pytest
import torch
from delayed_checks import check_main_grad, check_sums
from main_grad_checks import batch, cases, expected, fused, make
from nn_dense import VOCAB, DenseLM, ParallelLM, assert_grads, perturb
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
F64 = torch.float64
DTYPES = (torch.bfloat16, torch.float16, torch.float32, F64)


def check_hooks(ctx: RankContext) -> None:
    """Hooks of the weight run in backward_dw(), with the gradient; and Megatron's with its stand-in."""
    for case in cases(ctx.world)[:2]:
        late = make(ctx, case, F64, bias=False, delay_wgrad=True)
        seen: list[Tensor | None] = []
        late.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
        b = batch(ctx, case, late, F64)
        checks.step(late, case, b)
        seen.clear()
        late.backward_dw()
        sums, _ = expected(ctx, case, late, [b])
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], sums, rtol=1e-12, atol=1e-12)
        megatron = make(ctx, case, torch.bfloat16, bias=False, delay_wgrad=True)
        fused(megatron)
        weight: Any = megatron.weight
        weight.grad_added_to_main_grad = False
        checks.step(megatron, case, batch(ctx, case, megatron, torch.bfloat16))
        assert not weight.grad_added_to_main_grad
        assert weight.grad is None
        megatron.backward_dw()
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape
        assert weight.main_grad.any()


def check_model(ctx: RankContext, sp: bool, recompute: bool, main: bool) -> None:
    """A whole model, two micro-batches in flight, against the unsharded one in float64, and as a pipeline calls it."""
    dense = tnn.init_weights_(DenseLM(bias=True), seed=3)
    model = ParallelLM(ctx.group_name, bias=True, sequence_parallel=sp)
    tnn.init_weights_(model, seed=3)
    perturb(dense, 5)
    perturb(model, 5)
    model.recompute = recompute
    linears = [m for m in model.modules() if hasattr(m, "delay_wgrad")]
    for layer in linears:
        layer.delay_wgrad = True
    if main:
        fused(model)
    runners = []
    for _ in range(2):
        ids, targets = torch.randint(0, VOCAB, (2, 2, 6)).unbind()
        F.cross_entropy(dense(ids).flatten(0, 1), targets.flatten()).backward()
        tnn.vocab_parallel_cross_entropy(model(ids), targets.t(), ctx.group_name, VOCAB).backward()
        runners.append(functools.partial(tnn.backward_dw, model))
    assert {layer.pending_dw for layer in linears} == {2}
    assert all(layer.weight.grad is None for layer in linears)
    for run in runners:
        run()
    assert {layer.pending_dw for layer in linears} == {0}
    if main:
        for layer in linears:
            layer.weight.grad = layer.weight.main_grad
    assert_grads(model, dense, f"sp={sp} recompute={recompute} main={main}")


def check_other_gradients_alone(ctx: RankContext) -> None:
    """What asks for the input's gradient alone leaves nothing behind."""
    for case in cases(ctx.world):
        late = make(ctx, case, F64, bias=False, delay_wgrad=True)
        x = batch(ctx, case, late, F64).my_x.clone().requires_grad_()
        y = late(x, shard_sizes=case.sizes)
        (first,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
        assert late.pending_dw == 0
        y.sum().backward()
        assert torch.equal(x.grad, first)
        assert late.pending_dw == 1
        x = x.detach()
        late(x, shard_sizes=case.sizes).sum().backward()  # an input without a gradient, as a first layer has
        late.backward_dw()
        late.backward_dw()
        assert late.pending_dw == 0


def check_autocast(ctx: RankContext) -> None:
    for case in cases(ctx.world):
        grads = []
        for delay in (False, True):
            layer = make(ctx, case, torch.float32, delay_wgrad=delay)
            torch.manual_seed(3)
            b = batch(ctx, case, layer, torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(b.my_x, shard_sizes=case.sizes)
            y.backward(b.my_dy.to(y.dtype))
            if delay:
                layer.backward_dw()
            grads.append(layer.weight.grad)
        assert grads[1].dtype == torch.float32
        assert torch.equal(*grads), case


def check_operands_held(ctx: RankContext) -> None:
    """A residual whose gradient autograd adds to in place does not change what is left for later; writing to x does."""
    for sp in (False, True):
        row = tnn.RowParallelLinear(6, 5, group=ctx.group, dtype=F64, sequence_parallel=sp, delay_wgrad=True)
        held = row.in_sizes[ctx.rank]
        residual = torch.zeros(*((2 if sp else 2 * ctx.world), 3, 5), dtype=F64, requires_grad=True)
        total = torch.zeros_like(row.weight)
        xs = [torch.randn(2 * ctx.world, 3, held, dtype=F64) for _ in range(2)]
        for x in xs:
            y = row(x, residual)
            (y * 1.5).sum().backward()
            total += 1.5 * x.sum((0, 1))
        row.backward_dw()
        row.backward_dw()
        torch.testing.assert_close(row.weight.grad, total, rtol=1e-12, atol=1e-12)
    row(xs[0], residual).sum().backward()
    if held:
        xs[0].zero_()
        with pytest.raises(
            tpk.errors.ArgumentError, match=r"backward_dw: the input of the layer.*written to"
        ):
            row.backward_dw()
        assert row.pending_dw == 1


def check_copies(ctx: RankContext) -> None:
    """A copy of a layer has nothing pending; gradients wait for the layer that left them."""
    case = cases(ctx.world)[0]
    late = make(ctx, case, F64, delay_wgrad=True)
    checks.step(late, case, batch(ctx, case, late, F64))
    for other in (copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        assert other.pending_dw == 0
        checks.step(other, case, batch(ctx, case, other, F64))
        assert other.pending_dw == 1
    assert late.pending_dw == 1


def check_refusals(ctx: RankContext) -> None:
    error = tpk.errors.ArgumentError
    for case in cases(ctx.world)[:2]:
        late = make(ctx, case, F64, delay_wgrad=True)
        b = batch(ctx, case, late, F64)
        with pytest.raises(error, match=r"no weight gradient pending; call backward_dw\(\) once after each"):
            late.backward_dw()
        with pytest.raises(error, match=r"no layer below Sequential has a weight gradient pending"):
            tnn.backward_dw(nn.Sequential(late))
        with pytest.raises(
            error, match=r"create_graph: a gradient that is delayed cannot .*delay_wgrad = False"
        ):
            late(b.my_x.clone().requires_grad_(), shard_sizes=case.sizes).backward(b.my_dy, create_graph=True)
        late.weight.requires_grad_(False)
        checks.step(late, case, b)
        with pytest.raises(error, match=r"no weight gradient pending; its weight is frozen"):
            late.backward_dw()
        plain = make(ctx, case, F64)
        checks.step(plain, case, b)
        with pytest.raises(error, match=r"it has delay_wgrad=False, and backward\(\) has made it"):
            plain.backward_dw()
        asked = make(ctx, case, F64, delay_wgrad=True, gradient_accumulation_fusion=True)
        with pytest.raises(error, match=r"weight.main_grad: .*missing"):
            asked(b.my_x, shard_sizes=case.sizes)
        fused(asked)
        checks.step(asked, case, b)
        del asked.weight.main_grad
        with pytest.raises(error, match=r"weight.main_grad: .*missing"):
            asked.backward_dw()


def check_zero_bubble(ctx: RankContext) -> None:
    """Two stages on each of two pipeline ranks, each cut over two, in a schedule that delays weight gradients."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("pp", "tp"))
    width, hidden, parts = 6, 10, 4
    place = mesh["pp"].get_local_rank()

    def dense_part() -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden, dtype=F64), nn.Linear(hidden, width, dtype=F64))

    dense = tnn.init_weights_(nn.ModuleList(dense_part() for _ in range(4)), seed=2)
    stages, modules = [], []
    for index in (place, place + 2):
        kinds: dict[str, Any] = {"group": mesh["tp"], "dtype": F64, "delay_wgrad": True}
        module = nn.Sequential(
            tnn.ColumnParallelLinear(width, hidden, **kinds), tnn.RowParallelLinear(hidden, width, **kinds)
        )
        tnn.load_full_state_dict(module, dense[index].state_dict())
        builder = functools.partial(functools.partial, tnn.backward_dw, module)
        stages.append(
            PipelineStage(
                module, index, 4, torch.device("cpu"), group=mesh.get_group("pp"), dw_builder=builder
            )
        )
        modules.append((index, module))
    x, y = torch.randn(8, 3, width, dtype=F64), torch.randn(8, 3, width, dtype=F64)
    schedule = ScheduleInterleavedZeroBubble(stages, parts, loss_fn=F.mse_loss)
    schedule.step(*([x] if place == 0 else []), **({"target": y} if place == 1 else {}))
    whole = x
    for stage in dense:
        whole = stage(whole)
    F.mse_loss(whole, y).backward()
    for index, module in modules:
        assert all(layer.pending_dw == 0 for layer in module)
        assert_grads(module, dense[index], f"stage {index}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", [check_sums, check_main_grad])
def test_sums(ranks: RankPool, world: int, check: Any, dtype: torch.dtype) -> None:
    ranks.run(check, dtype, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "check",
    [
        check_hooks,
        check_other_gradients_alone,
        check_autocast,
        check_operands_held,
        check_copies,
        check_refusals,
    ],
)
def test_check(ranks: RankPool, world: int, check: Any) -> None:
    ranks.run(check, world=world)


def test_zero_bubble(ranks: RankPool) -> None:
    ranks.run(check_zero_bubble, world=4)


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_model(ranks: RankPool, world: int, sp: bool, recompute: bool, main: bool) -> None:
    ranks.run(check_model, sp, recompute, main, world=world)
