"""Weight gradients in ``main_grad`` under torch.compile(fullgraph=True): one graph, the sums of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import main_grad_checks as checks
import pytest
import torch
from nn_dense import VOCAB, DenseLM, ParallelLM, perturb, shard_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

F64 = torch.float64


def whole(f: Callable[..., Any], backend: str = "aot_eager") -> tuple[Callable[..., Any], Any]:
    """``f`` as one graph, and the counter of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(f, backend=counter, fullgraph=True), counter


def check_layers(ctx: RankContext, backend: str) -> None:
    """Three micro-batches of each kind of layer: main_grad, input, bias and output as without a compiler."""
    for case in checks.cases(ctx.world):
        layer, plain = checks.make(ctx, case, torch.float32), checks.make(ctx, case, torch.float32)
        checks.fused(layer)
        checks.fused(plain)

        def run(x: Tensor, layer: Any, case: checks.Case = case) -> Tensor:
            return layer(x * 2, shard_sizes=case.sizes)

        compiled, counter = whole(run, backend)
        for _ in range(3):
            b = checks.batch(ctx, case, layer, torch.float32)
            results = []
            for f, some in ((compiled, layer), (run, plain)):
                x = b.my_x.clone().requires_grad_()
                y = f(x, some)
                y.backward(b.my_dy)
                results.append((y.detach(), x.grad))
            torch.testing.assert_close(*results)
        assert layer.weight.grad is None and plain.weight.grad is None
        assert layer.weight.main_grad.any()
        torch.testing.assert_close(layer.weight.main_grad, plain.weight.main_grad, msg=str(case))
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
        assert counter.frame_count == 1, case


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layers(ranks: RankPool, world: int, backend: str) -> None:
    if backend == "inductor" and world == 3:
        pytest.skip("inductor: one and two ranks")
    ranks.run(check_layers, backend, world=world, timeout=300)


def check_model(ctx: RankContext, sp: bool) -> None:
    """A whole model, two micro-batches, against the unsharded one in float64."""
    dense = tnn.init_weights_(DenseLM(bias=True), seed=3)
    model = ParallelLM(ctx.group_name, bias=True, sequence_parallel=sp)
    tnn.init_weights_(model, seed=3)
    perturb(dense, 5)
    perturb(model, 5)
    checks.fused(model)

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        return tnn.vocab_parallel_cross_entropy(model(ids), targets.t(), ctx.group_name, VOCAB)

    compiled, counter = whole(loss)
    for _ in range(2):
        ids, targets = torch.randint(0, VOCAB, (2, 2, 6)).unbind()
        F.cross_entropy(dense(ids).flatten(0, 1), targets.flatten()).backward()
        with tpk.record_paths() as log:
            compiled(ids, targets).backward()
    assert counter.frame_count == 1
    full = dict(dense.named_parameters())
    fused = 0
    for name, p in model.named_parameters():
        got = getattr(p, "main_grad", None)
        fused += got is not None
        assert (p.grad is None) == (got is not None), name
        want = shard_of(p, full[name].grad)
        torch.testing.assert_close(p.grad if got is None else got, want, rtol=1e-9, atol=1e-11)
    assert fused == 2 * 7 + 1
    assert checks.count(log, "matmul_accumulate") == fused, log


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sp", [False, True])
def test_model(ranks: RankPool, world: int, sp: bool) -> None:
    ranks.run(check_model, sp, world=world, timeout=200)


def check_in_flight(ctx: RankContext) -> None:
    """Two forward passes before their backward passes, as in a pipeline, and a main_grad zeroed in between."""
    for case in checks.cases(ctx.world)[::3]:
        layer = checks.make(ctx, case, F64, bias=False)
        checks.fused(layer)
        compiled, _ = whole(lambda x, layer=layer, case=case: layer(x, shard_sizes=case.sizes))
        batches = [checks.batch(ctx, case, layer, F64) for _ in range(3)]
        for order in ([0, 1, 2], [2, 1, 0]):
            ys = [compiled(b.my_x.clone().requires_grad_()) for b in batches]
            layer.weight.main_grad.zero_()
            for i in order:
                ys[i].backward(batches[i].my_dy)
            sums, _ = checks.expected(ctx, case, layer, batches)
            torch.testing.assert_close(layer.weight.main_grad, sums, rtol=1e-12, atol=1e-12)


def check_together(ctx: RankContext) -> None:
    """Layers with one gather: one without main_grad, one frozen, one whose output is not used; an activation."""
    for sp in (False, True):
        for options in ({}, {"activation": "gelu"}, {"keep_gathered": sp}):
            kinds = {"sequence_parallel": sp, "group": ctx.group_name, "dtype": F64, "name": "l", **options}
            names = {"q": 9, "k": 5, "v": 6, "g": 4, "unused": 3}
            layers, plain = (tnn.ColumnParallelLinears(7, names, **kinds) for _ in range(2))
            checks.fused(layers)
            del layers["k"].weight.main_grad
            for some in (layers, plain):
                some["v"].weight.requires_grad_(False)
            layers["v"].weight.main_grad.fill_(3.0)
            layers["unused"].weight.main_grad.fill_(4.0)

            def loss(x: Tensor, some: Any) -> Tensor:
                return sum((y * (i + 1)).square().sum() for i, y in enumerate(some(x)[:4]))

            compiled, counter = whole(loss)
            for _ in range(2):
                x = torch.randn(2 * ctx.world, 7, dtype=F64)
                x = checks.part(x, 0, [2] * ctx.world, ctx.rank) if sp else x
                mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
                compiled(mine, layers).backward()
                loss(other, plain).backward()
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
            for k in ("q", "g"):
                assert layers[k].weight.grad is None
                want = plain[k].weight.grad
                torch.testing.assert_close(layers[k].weight.main_grad, want, rtol=1e-12, atol=1e-12)
            want = plain["k"].weight.grad
            torch.testing.assert_close(layers["k"].weight.grad, want, rtol=1e-12, atol=1e-12)
            assert (layers["v"].weight.main_grad == 3.0).all()
            assert (layers["unused"].weight.main_grad == 4.0).all()
            assert counter.frame_count == 1, (sp, options)


def check_several_uses(ctx: RankContext) -> None:
    """One weight used twice in a graph, and twice by two graphs, with and without recomputation."""
    from torch.utils.checkpoint import checkpoint

    for case in checks.cases(ctx.world)[::3]:
        for recompute in (False, True):
            layer = checks.make(ctx, case, F64, bias=False)
            checks.fused(layer)
            batches = [checks.batch(ctx, case, layer, F64) for _ in range(2)]

            def call(x: Tensor, layer: Any = layer, case: checks.Case = case) -> Tensor:
                return layer(x.sin(), shard_sizes=case.sizes)

            def loss(x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, recompute: bool = recompute) -> Tensor:
                outs = [checkpoint(call, t, use_reentrant=False) if recompute else call(t) for t in (x, y)]
                return (outs[0] * dx).sum() + (outs[1] * dy).sum()

            compiled, counter = whole(loss)
            inputs = [b.my_x.clone().requires_grad_() for b in batches] + [b.my_dy for b in batches]
            (compiled(*inputs) + compiled(*inputs)).backward()
            sines = [b._replace(x=b.x.sin()) for b in batches]
            sums, _ = checks.expected(ctx, case, layer, sines * 2)
            torch.testing.assert_close(layer.weight.main_grad, sums, rtol=1e-12, atol=1e-12)
            assert counter.frame_count == 1, case


def check_megatron(ctx: RankContext) -> None:
    """With grad_added_to_main_grad: hooks as Megatron's DDP registers run and find zeros to drop, at every step."""
    for case in checks.cases(ctx.world)[::3]:
        layer = checks.make(ctx, case, torch.bfloat16, bias=False)
        checks.fused(layer)
        weight, seen = layer.weight, []

        def hook(*_: Any, weight: Any = weight, seen: list[bool] = seen) -> None:
            assert weight.grad is not None and not weight.grad.any()
            assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
            seen.append(weight.grad_added_to_main_grad)
            weight.grad = None

        accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(hook)
        compiled, counter = whole(lambda x, layer=layer, case=case: layer(x, shard_sizes=case.sizes))
        batches = [checks.batch(ctx, case, layer, torch.bfloat16) for _ in range(2)]
        for b in batches:
            weight.grad_added_to_main_grad = False
            compiled(b.my_x.clone().requires_grad_()).backward(b.my_dy)
        assert seen == [True, True], case
        sums, scale = checks.expected(ctx, case, layer, batches)
        assert ((weight.main_grad - sums).abs() <= 1e-5 * scale).all()
        assert counter.frame_count == 1, case


def check_other_main_grad(ctx: RankContext) -> None:
    """Taken away and given back, and replaced by another: what is there when the forward pass runs is added to."""
    case = checks.cases(ctx.world)[1]
    layer = checks.make(ctx, case, F64, bias=False)
    compiled, counter = whole(lambda x: layer(x, shard_sizes=case.sizes))
    b = checks.batch(ctx, case, layer, F64)
    sums, _ = checks.expected(ctx, case, layer, [b])
    for there in (False, True, True, False):
        if there and torch.__version__ < "2.12":
            torch._dynamo.reset()  # it does not notice that the attribute is there now
        layer.weight.grad = None
        if hasattr(layer.weight, "main_grad"):
            del layer.weight.main_grad
        if there:
            checks.fused(layer)
        compiled(b.my_x.clone().requires_grad_()).backward(b.my_dy)
        got = layer.weight.main_grad if there else layer.weight.grad
        torch.testing.assert_close(got, sums, rtol=1e-12, atol=1e-12)
        assert (layer.weight.grad is None) == there
    assert counter.frame_count <= 4


def check_shared(ctx: RankContext) -> None:
    """A weight that all ranks hold, whose gradient is summed over them first; with and without a stand-in."""
    for flag in (False, True):
        sums = []
        for compile in (False, True):
            layer = tnn.SharedColumnParallelLinear(4, 6, 1, group=ctx.group_name, dtype=F64)
            layer.weight.data.copy_(torch.arange(24.0).view(6, 4))
            checks.fused(layer)
            if flag:
                layer.weight.grad_added_to_main_grad = False
            run, counter = whole(layer) if compile else (layer, None)
            for scale in (1.0, 3.0):
                run(torch.full((2, 4), scale + ctx.rank, dtype=F64)).square().sum().backward()
            assert counter is None or counter.frame_count <= 2  # torch 2.11 looks at weight.grad
            assert (layer.weight.grad is not None) == flag
            assert not flag or layer.weight.grad_added_to_main_grad
            sums.append(layer.weight.main_grad)
        assert sums[0].all()
        torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)


def check_delayed(ctx: RankContext) -> None:
    """A gradient that is left for later breaks the graph: fullgraph says why, and without it the sum is right."""
    case = checks.cases(ctx.world)[0]
    layer = checks.make(ctx, case, torch.float32, delay_wgrad=True)
    checks.fused(layer)
    b = checks.batch(ctx, case, layer, torch.float32)
    compiled, _ = whole(layer)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"for later outside of compiled graphs|requires_grad_"
    ):
        compiled(b.my_x)
    torch._dynamo.reset()
    torch.compile(layer, backend="aot_eager")(b.my_x).backward(b.my_dy)
    layer.backward_dw()
    sums, scale = checks.expected(ctx, case, layer, [b])
    assert ((layer.weight.main_grad - sums).abs() <= 1e-5 * scale).all()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "check",
    [
        check_in_flight,
        check_together,
        check_several_uses,
        check_megatron,
        check_other_main_grad,
        check_shared,
        check_delayed,
    ],
)
def test_check(ranks: RankPool, world: int, check: object) -> None:
    ranks.run(check, world=world, timeout=200)
