"""A gather beneath a reduce-scatter begins when nothing of the other can fail any more: peers would wait for it."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from few_rows import overlaps
from fused_fakes import on_fakes
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.comm import fused, ranks, runtime, workspace

BF16 = torch.bfloat16
ROWS, K, N = 16, 20, 72  # of a rank
WIDE = 24  # K in whole units of 16 bytes: what is sent is so wide, what is gathered is not


def _calls(ctx):
    """Loss of a block whose operand is gathered again in the backward pass; the gather's memory is there then."""
    draw = torch.Generator().manual_seed(7 + ctx.rank)
    x, w = (torch.randn(*shape, generator=draw).to(BF16).requires_grad_() for shape in ((ROWS, K), (K, N)))
    return x, w, tpk.all_gather_matmul(x, w, ctx.group, keep_gathered=False, path="fused").float().sum()


def _allocation_fails(monkey):
    """Of the rows that are sent, M x WIDE: the last thing that is made."""
    real = torch.Tensor.new_empty

    def new_empty(self, *size, **options):
        if size[-1] == WIDE and size[0] > ROWS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *size, **options)

    monkey.setattr(torch.Tensor, "new_empty", new_empty)


def _growth_fails(monkey):
    monkey.setattr(runtime.active, "fail", "allocate")


def _factors_fail(monkey):
    def fail(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkey.setattr(fused, "_factors", fail)


def _a_check_fails(monkey):
    monkey.setenv("TPK_COMM_TIMEOUT_S", "soon")


def _ranks_cannot(monkey):
    for key, (group, _) in list(ranks._missing.items()):
        monkey.setitem(ranks._missing, key, (group, "a reason"))


FAILURES = {
    "allocation": (_allocation_fails, torch.OutOfMemoryError, "out of memory"),
    "growth": (_growth_fails, tpk.errors.BackendError, "could not be had"),
    "factors": (_factors_fail, torch.OutOfMemoryError, "out of memory"),
    "check": (_a_check_fails, tpk.errors.ArgumentError, "TPK_COMM_TIMEOUT_S"),
    "ranks": (_ranks_cannot, tpk.errors.BackendError, "a reason"),
}


@overlaps()
def _nothing_has_begun(ctx, kind):
    fake, (patch, error, words) = runtime.active, FAILURES[kind]
    x, w, loss = _calls(ctx)
    if kind == "allocation":  # so that it is no growth that fails
        tpk.reserve(ctx.group, max_m=ROWS * ctx.world, n=K)
    fake.log.clear()
    with pytest.MonkeyPatch.context() as monkey:
        patch(monkey)
        expect(error, [words], lambda: loss.backward(retain_graph=True))
    assert not {"begin gather", "scatter"} & set(fake.log), fake.log
    # Nothing is left behind: the same pass goes through.
    loss.backward()
    order = [fake.log.index(step) for step in ("begin gather", "scatter", "end gather")]
    assert order == sorted(order), fake.log
    ones = torch.ones(ROWS * ctx.world, N, dtype=BF16)
    assert torch.equal(x.grad, tpk.matmul_reduce_scatter(ones, w.detach().t(), ctx.group, path="fused"))
    whole = tpk.regions.all_gather(x.detach(), 0, ctx.group)
    assert torch.allclose(w.grad.float(), whole.float().sum(0)[:, None].expand(K, N), atol=0.5)


@pytest.mark.parametrize("kind", list(FAILURES))
def test_nothing_has_begun_when_it_fails(ranks, kind):
    ranks.run(on_fakes, _nothing_has_begun, kind, world=2)


@overlaps()
def _nothing_between(ctx):
    """Between the two only the launch: no memory is made, of ranks or of this one, and nothing is looked up."""
    fake = runtime.active
    *_, loss = _calls(ctx)
    made, begin, scatter = [], fake.begin_gather, fake.scatter

    @contextmanager
    def watched():
        with pytest.MonkeyPatch.context() as monkey:
            for owner, name in (
                (torch.Tensor, "new_empty"), (torch.Tensor, "new_zeros"), (torch.Tensor, "contiguous"), (torch, "cat"),
                (workspace, "ensure"), (ranks, "require"),
            ):  # fmt: skip
                real = getattr(owner, name)
                monkey.setattr(
                    owner, name, lambda *a, real=real, name=name, **k: (made.append(name), real(*a, **k))[1]
                )
            monkey.setattr(fake, "begin_gather", lambda *a: (begin(*a), made.append("begin"))[0])
            monkey.setattr(fake, "scatter", lambda *a: (made.append("scatter"), scatter(*a))[1])
            yield

    with watched():
        loss.backward()
    steps = [step for step in made if step in ("begin", "scatter")]
    assert steps == ["begin", "scatter"] and ("begin", "scatter") in pairwise(made), made


def test_nothing_between_begin_and_launch(ranks):
    ranks.run(on_fakes, _nothing_between, world=2)


@overlaps()
def _no_copy_of_what_is_gathered(ctx):
    """Products for weights read it where it came to, in both backward passes, also into a main_grad."""
    rows, made, real = ROWS * ctx.world, [], torch.Tensor.new_empty
    *_, gather = _calls(ctx)
    left, right = (torch.ones(*shape, dtype=BF16, requires_grad=True) for shape in ((rows, N), (K, N)))
    right.main_grad = torch.ones(K, N)
    y = tpk.matmul_reduce_scatter(left, right.t(), ctx.group, main_grad_of=right, path="fused")
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(torch.Tensor, "new_empty", lambda *a, **k: (made.append(real(*a, **k)), made[-1])[1])
        gather.backward()
        y.backward(torch.full_like(y, ctx.rank + 1))
    assert any(x.shape == (rows, WIDE) for x in made), "what is sent"
    assert not [x.shape for x in made if x.shape == (rows, K)], "what is gathered"
    total = ROWS * sum(range(1, ctx.world + 1))
    assert torch.equal(right.main_grad, torch.full((K, N), 1.0 + total)) and right.grad is None


def test_no_copy_of_what_is_gathered(ranks):
    ranks.run(on_fakes, _no_copy_of_what_is_gathered, world=3)


@overlaps()
def _compiled_into_main_grad(ctx):
    """In a compiled graph too the gather goes beneath the product, and the gradient of the weight to main_grad."""
    x, w, _ = _calls(ctx)
    weight = torch.nn.Parameter(w.detach().t().contiguous())
    weight.main_grad = torch.ones(N, K)

    def loss(x):
        y = tpk.all_gather_matmul(x, weight.t(), ctx.group, main_grad_of=weight, path="fused")
        return y.float().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x)
    runtime.active.log.clear()
    compiled.backward()
    order = [runtime.active.log.index(step) for step in ("begin gather", "scatter", "end gather")]
    assert order == sorted(order), runtime.active.log
    whole = tpk.regions.all_gather(x.detach(), 0, ctx.group).float().sum(0)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 1, whole.expand(N, K), rtol=0, atol=1e-3)


def test_compiled_into_main_grad(ranks):
    ranks.run(on_fakes, _compiled_into_main_grad, world=2, timeout=120)
