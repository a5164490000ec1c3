"""FP8 operations on 1 to 4 gloo ranks: values, gradients, bytes that travel, equal results for every world."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tpkernels.errors import ArgumentError, DTypeError, MismatchError, ShapeError
from tpkernels.fp8._quantize import Quantized
from tpkernels.testing import RankContext, RankPool, assert_close_tiles

WORLDS = (1, 2, 3, 4)
RECIPES = ("tensorwise", "rowwise", "blockwise")
F32 = torch.float32


def part(x: Tensor, dim: int, sizes: list[int], rank: int) -> Tensor:
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def uneven(*shape: int) -> Tensor:
    """Rows and columns of different size; every rank draws the same."""
    x = torch.randn(shape) * 4.0 ** torch.randint(-2, 3, (shape[0], *[1] * (len(shape) - 1)))
    return x * 2.0 ** torch.randint(-2, 3, (shape[-1],))


def rows_of(world: int, even: bool) -> list[int]:
    return [5] * world if even else [7, 0, 3, 4][:world]


def stands_for(
    x: Tensor, scaling: str, dtype: torch.dtype, recipe: tpk.Fp8Recipe, amax: Tensor | None = None
) -> Tensor:
    """What the FP8 copy of x stands for, in float64."""
    power = recipe.power_of_2
    return tpk.quantize(x, scaling, dtype, round_scales_to_power_of_2=power, amax=amax).dequantize().double()


def amax(recipe: tpk.Fp8Recipe, *parts: Tensor) -> Tensor | None:
    return torch.cat([p.flatten() for p in parts]).abs().amax() if recipe.scaling == "tensorwise" else None


def column_oracle(recipe, x, ws, dys, world):
    """Every rank's outputs and gradients, from what FP8 operands stand for; blocks begin anew with each part."""
    forward, back = recipe.forward_dtype, recipe.grad_dtype
    of_rows, of_weight = recipe.operand_scaling, recipe.weight_scaling
    flat = x.flatten(0, -2)
    xq = stands_for(flat, of_rows, forward, recipe)
    x_t = xq.t() if recipe.scaling == "tensorwise" else stands_for(xq.t().float(), of_rows, forward, recipe)
    outs, grad_x, grads = [], 0.0, []
    w_max = [amax(recipe, *[ws[r][i] for r in range(world)]) for i in range(2)]
    dy_max = [amax(recipe, *[dys[r][i] for r in range(world)]) for i in range(2)]
    for r in range(world):
        for i, (w, dy) in enumerate(zip(ws[r], dys[r], strict=True)):
            dy = dy.flatten(0, -2)
            outs.append(xq @ stands_for(w, of_weight, forward, recipe, w_max[i]).t())
            grad_x = (
                grad_x
                + stands_for(dy, of_rows, back, recipe, dy_max[i])
                @ stands_for(w.t(), of_weight, forward, recipe, w_max[i]).t()
            )
            grads.append(stands_for(dy.t(), of_rows, back, recipe, dy_max[i]) @ x_t.t())
    return outs, grad_x.view(x.shape), grads


def check_column(ctx: RankContext, name: str) -> None:
    """Two weights, one with a bias; with a gather and without; 2-D and 3-D, both dimensions, uneven rows."""
    recipe, world, rank = tpk.Fp8Recipe(name), ctx.world, ctx.rank
    for k, features in ((200, [9, 130]), (16, [16, 16])):
        for even, lead, dim in ((True, 0, 0), (False, 3, 0), (False, 3, 1)):
            sizes = rows_of(world, even)
            shape = [sum(sizes)] if not lead else [sum(sizes), lead] if dim == 0 else [lead, sum(sizes)]
            x = uneven(*shape, k)
            ws = [[uneven(n, k) for n in features] for _ in range(world)]
            dys = [[uneven(*shape, n) for n in features] for _ in range(world)]
            bias = torch.randn(features[1])
            outs, grad_x, grads = column_oracle(recipe, x, ws, dys, world)
            for gather, keep in ((True, False), (True, True), (False, False)):
                note = f"{name} {shape} k={k} gather={gather} keep={keep}"
                xi = (part(x, dim, sizes, rank) if gather else x).clone().requires_grad_()
                mine = [w.clone().requires_grad_() for w in ws[rank]]
                c = bias.clone().requires_grad_()
                common = {"recipe": recipe, "biases": [None, c]}
                if gather:
                    given = None if even else sizes
                    ys = tpk.fp8.all_gather_matmul(
                        xi, [w.t() for w in mine], ctx.group, gather_dim=dim, shard_sizes=given,
                        keep_gathered=keep, **common,
                    )  # fmt: skip
                    assert tpk.last_path().op == "all_gather_scaled_matmul"
                    assert tpk.last_path().path == ("blas" if world == 1 else "gloo+blas")
                else:
                    ys = tpk.fp8.matmul_replicated(xi, [w.t() for w in mine], ctx.group, **common)
                torch.autograd.backward(ys, dys[rank])
                for i in range(2):
                    wanted = outs[2 * rank + i] + (bias if i else 0)
                    assert_close_tiles(ys[i].detach().flatten(0, -2), wanted, F32, k=k, slack=4, name=note)
                    got, of = mine[i].grad, grads[2 * rank + i]
                    assert_close_tiles(got, of, F32, k=x[..., 0].numel(), slack=4, name=f"{note} w{i}")
                end = part(grad_x, dim, sizes, rank) if gather else grad_x
                terms = 2 * sum(features)
                assert_close_tiles(
                    xi.grad.flatten(0, -2),
                    end.flatten(0, -2),
                    F32,
                    k=terms,
                    world=world,
                    slack=4,
                    name=f"{note} x",
                )
                torch.testing.assert_close(c.grad, dys[rank][1].flatten(0, -2).sum(0), rtol=1e-5, atol=1e-3)


def check_row(ctx: RankContext, name: str) -> None:
    """Scattered along both dimensions, and whole; bias and residual once."""
    recipe, world, rank = tpk.Fp8Recipe(name), ctx.world, ctx.rank
    forward, back = recipe.forward_dtype, recipe.grad_dtype
    of_rows, of_weight = recipe.operand_scaling, recipe.weight_scaling
    n, k = 40, 144
    for even, lead, dim in ((True, 0, 0), (False, 3, 0), (False, 3, 1)):
        sizes = rows_of(world, even)
        shape = [sum(sizes)] if not lead else [sum(sizes), lead] if dim == 0 else [lead, sum(sizes)]
        xs, ws = [uneven(*shape, k) for _ in range(world)], [uneven(n, k) for _ in range(world)]
        dy, bias, residual = uneven(*shape, n), torch.randn(n), torch.randn(*shape, n)
        x_max, w_max = amax(recipe, *xs), amax(recipe, *ws)
        flat = [x.flatten(0, -2) for x in xs]
        xqs = [stands_for(x, of_rows, forward, recipe, x_max) for x in flat]
        y = (
            sum(
                xq @ stands_for(w, of_weight, forward, recipe, w_max).t()
                for xq, w in zip(xqs, ws, strict=True)
            )
            + bias
            + residual.flatten(0, -2)
        )
        dyq = stands_for(dy.flatten(0, -2), of_rows, back, recipe)
        w_t = stands_for(ws[rank].t(), of_weight, forward, recipe, w_max)
        xq, grad_x = xqs[rank], dyq @ w_t.t()
        x_t = (
            xq.t() if recipe.scaling == "tensorwise" else stands_for(xq.t().float(), of_rows, forward, recipe)
        )
        for cut in (True, False):
            note = f"{name} {shape} cut={cut}"
            x, w = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
            c = bias.clone().requires_grad_()
            r = (part(residual, dim, sizes, rank) if cut else residual).clone().requires_grad_()
            common = {"recipe": recipe, "bias": c, "residual": r}
            if cut:
                out = tpk.fp8.matmul_reduce_scatter(
                    x, w.t(), ctx.group, scatter_dim=dim, shard_sizes=None if even else sizes, **common
                )
            else:
                out = tpk.fp8.matmul_all_reduce(x, w.t(), ctx.group, **common)
            grad = part(dy, dim, sizes, rank) if cut else dy
            out.backward(grad)
            wanted = y.view(*shape, n)
            wanted = part(wanted, dim, sizes, rank) if cut else wanted
            close = {"k": k * world, "world": world, "slack": 4, "name": note}
            assert_close_tiles(out.detach().flatten(0, -2), wanted.flatten(0, -2), F32, **close)
            assert_close_tiles(x.grad.flatten(0, -2), grad_x, F32, k=n, slack=4, name=f"{note} x")
            source = (
                dyq.t().float() if cut else dy.flatten(0, -2).t()
            )  # what was gathered, or what is at hand
            dy_t = dyq.t() if recipe.scaling == "tensorwise" else stands_for(source, of_rows, back, recipe)
            assert_close_tiles(w.grad, dy_t @ x_t.t(), F32, k=dy[..., 0].numel(), slack=4, name=f"{note} w")
            torch.testing.assert_close(c.grad, dy.flatten(0, -2).sum(0), rtol=1e-5, atol=1e-3)
            assert torch.equal(r.grad, grad)
            alone = w.detach().clone().requires_grad_()  # the weight's gradient, where nobody wants that of x
            if cut:
                place = {"scatter_dim": dim, "shard_sizes": None if even else sizes}
                out = tpk.fp8.matmul_reduce_scatter(xs[rank], alone.t(), ctx.group, **place, recipe=recipe)
            else:
                out = tpk.fp8.matmul_all_reduce(xs[rank], alone.t(), ctx.group, recipe=recipe)
            out.backward(grad)
            assert torch.equal(alone.grad, w.grad)


@pytest.mark.parametrize("check", [check_column, check_row])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", WORLDS)
def test_equals_what_the_operands_stand_for(ranks: RankPool, world: int, recipe: str, check: object) -> None:
    ranks.run(check, recipe, world=world)


# Equal for every world


def small_integers(*shape: int) -> Tensor:
    """Sums of their products are exact in float32 in any order, scales powers of two (448 is 7 times one)."""
    return torch.tensor([1.0, 2, 4, 7])[torch.randint(0, 4, shape)] * (2 * torch.randint(0, 2, shape) - 1)


def of_one_world(ctx: RankContext, name: str) -> dict[str, Tensor]:
    """Outputs and gradients of an MLP's two products, put together from all ranks; the same inputs for every world."""
    torch.manual_seed(7)
    k, hidden = 128, 512
    x, up, down = small_integers(24, k), small_integers(hidden, k), small_integers(k, hidden)
    h, dh, dy = small_integers(24, hidden), small_integers(24, hidden), small_integers(24, k)
    rows, features = [24 // ctx.world] * ctx.world, [hidden // ctx.world] * ctx.world
    own = lambda t, dim, sizes: part(t, dim, sizes, ctx.rank).contiguous().requires_grad_()  # noqa: E731
    whole = lambda t, dim: tpk.regions.all_gather(t.detach(), dim, ctx.group)  # noqa: E731
    xs, ups, downs, hs = own(x, 0, rows), own(up, 0, features), own(down, 1, features), own(h, 1, features)
    y = tpk.fp8.all_gather_matmul(xs, ups.t(), ctx.group, recipe=name)
    y.backward(part(dh, 1, features, ctx.rank))
    z = tpk.fp8.matmul_reduce_scatter(hs, downs.t(), ctx.group, recipe=name)
    z.backward(part(dy, 0, rows, ctx.rank))
    return {
        "y": whole(y, 1), "x": whole(xs.grad, 0), "up": whole(ups.grad, 0),
        "z": whole(z, 0), "h": whole(hs.grad, 1), "down": whole(downs.grad, 1),
    }  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_world_gives_the_same_bits(ranks: RankPool, recipe: str) -> None:
    """Tensorwise scales are of all ranks' parts; blockwise, parts are whole blocks."""
    alone = ranks.run(of_one_world, recipe, world=1)[0]
    for world in (2, 4):
        for got in ranks.run(of_one_world, recipe, world=world):
            for name, value in alone.items():
                assert torch.equal(got[name], value), (world, name)


def check_scales(ctx: RankContext, world: int) -> None:
    """Any values: tensorwise, FP8 bytes are those of the dense tensor, whatever part of it a rank has."""
    x, w = uneven(12, 96), uneven(48, 96)
    seen: list[Quantized] = []
    from tpkernels.fp8 import _linear

    plain = _linear.make

    def spy(*args: object, **kwargs: object) -> list[Quantized]:
        seen.extend(made := plain(*args, **kwargs))
        return made

    _linear.make = spy
    try:
        shard = part(x, 0, [12 // world] * world, ctx.rank)
        rows = part(w, 0, [48 // world] * world, ctx.rank)
        tpk.fp8.all_gather_matmul(shard, rows.t(), ctx.group, recipe="tensorwise")
    finally:
        _linear.make = plain
    for mine, dense, n in zip(seen, (x, w), (12, 48), strict=True):
        of_all = tpk.quantize(dense)
        wanted = part(of_all.data.view(torch.uint8), 0, [n // world] * world, ctx.rank)
        assert torch.equal(mine.data.view(torch.uint8), wanted) and torch.equal(mine.scale, of_all.scale)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_tensorwise_bytes_are_those_of_the_dense_tensor(ranks: RankPool, world: int) -> None:
    ranks.run(check_scales, world, world=world)


# What travels


class Wire:
    """Bytes that this rank hands to torch.distributed, by function."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self._plain: dict[str, object] = {}

    def __enter__(self) -> Wire:
        from tpkernels.ops import _collectives

        def count(name: str, function, size):
            def counted(*args, **kwargs):
                x = size(args)
                self.sent[name] = self.sent.get(name, 0) + x.numel() * x.element_size()
                return function(*args, **kwargs)

            return counted

        self._gather, self._scatter, self._max = (
            _collectives._all_gather_single, dist.all_to_all_single, dist.all_reduce
        )  # fmt: skip
        _collectives._all_gather_single = count("gather", self._gather, lambda args: args[1])
        dist.all_to_all_single = count("scatter", self._scatter, lambda args: args[1])
        dist.all_reduce = count("max", self._max, lambda args: args[0])
        return self

    def __exit__(self, *_: object) -> None:
        from tpkernels.ops import _collectives

        _collectives._all_gather_single, dist.all_to_all_single, dist.all_reduce = (
            self._gather, self._scatter, self._max
        )  # fmt: skip


def check_bytes(ctx: RankContext, name: str) -> None:
    """What is gathered is FP8 and scales, forward and backward; sums travel in bfloat16."""
    from tpkernels.ops import _agreement

    m, k, n = 8, 512, 64
    half = torch.bfloat16
    scales = {"tensorwise": 0, "rowwise": 4 * m, "blockwise": 4 * m * (k // 128)}[name]
    with _agreement.suspended():
        x = torch.randn(m, k).to(half).requires_grad_()
        w = torch.randn(n, k).to(half).requires_grad_()
        with Wire() as wire:
            y = tpk.fp8.all_gather_matmul(x, w.t(), ctx.group, recipe=name)
        assert wire.sent["gather"] == m * k + scales
        with Wire() as plain:
            tpk.all_gather_matmul(x, w.t(), ctx.group)
        assert plain.sent == {"gather": 2 * m * k}
        with Wire() as wire:
            y.backward(torch.randn_like(y))
        # X again in FP8; the sum of dX in bfloat16.
        assert wire.sent["gather"] == m * k + scales and wire.sent["scatter"] == 2 * m * ctx.world * k
        maxima = 4 if name == "tensorwise" else 0  # one float32: dY's amax
        assert wire.sent.get("max", 0) == maxima
        h = torch.randn(m * ctx.world, n).to(half).requires_grad_()
        v = torch.randn(k, n).to(half).requires_grad_()
        with Wire() as wire:
            z = tpk.fp8.matmul_reduce_scatter(h, v.t(), ctx.group, recipe=name)
        assert wire.sent["scatter"] == 2 * m * ctx.world * k and "gather" not in wire.sent
        with Wire() as wire:
            z.backward(torch.randn_like(z))
        assert wire.sent["gather"] == m * k + scales and "scatter" not in wire.sent


@pytest.mark.parametrize("recipe", RECIPES)
def test_half_the_bytes(ranks: RankPool, recipe: str) -> None:
    ranks.run(check_bytes, recipe, world=2)


# Compilation, checks, refusals


def check_graph(ctx: RankContext, name: str) -> None:
    x, w, v = torch.randn(6, 64), torch.randn(32, 64), torch.randn(64, 32)

    def loss(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = torch.relu(tpk.fp8.all_gather_matmul(x, w.t(), ctx.group_name, recipe=name))
        y = tpk.fp8.matmul_reduce_scatter(h, v.t(), ctx.group_name, recipe=name)
        z = tpk.fp8.matmul_all_reduce(h, v.t(), ctx.group_name, recipe=name)
        return (
            y.square().mean()
            + tpk.fp8.matmul_replicated(z, w.t(), ctx.group_name, recipe=name).square().mean()
        )

    torch._dynamo.reset()
    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, w, v)]
        value = run(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_one_graph(ranks: RankPool, recipe: str) -> None:
    ranks.run(check_graph, recipe, world=2, timeout=150)


def check_opcheck(ctx: RankContext) -> None:
    """Fakes and registrations; torch compares no FP8 arguments, hence not the schemas (they are read only)."""
    ops, name, tests = torch.ops.tpkernels, ctx.group_name, ("test_autograd_registration", "test_faketensor")
    for scaling in ("tensorwise", "rowwise", "blockwise_1x128"):
        x, w = tpk.quantize(torch.randn(4, 3, 140), scaling), tpk.quantize(torch.randn(7, 140), scaling).t()
        gather = (x.data, x.scale, [w.data], [w.scale], [torch.randn(7)], [0], 1, None, name)
        torch.library.opcheck(
            ops.all_gather_scaled_matmul.default, (*gather, F32, False, True, "auto"), test_utils=tests
        )
        sums = ([x.data] * 2, [w.data] * 2, [x.scale] * 2, [w.scale] * 2, torch.randn(7), None)
        for op, place in ((ops.scaled_matmul_reduce_scatter, (0, None)), (ops.scaled_matmul_all_reduce, ())):
            torch.library.opcheck(
                op.default, (*sums, *place, name, torch.bfloat16, False, "auto"), test_utils=tests
            )


def test_opcheck(ranks: RankPool) -> None:
    ranks.run(check_opcheck, world=2)


def check_refusals(ctx: RankContext) -> None:
    x, w = torch.randn(6, 16), torch.randn(8, 16)
    gather, scatter = tpk.fp8.all_gather_matmul, tpk.fp8.matmul_reduce_scatter
    for call, error, words in (
        (lambda: gather(x, w.t(), ctx.group, recipe="int8"), ArgumentError, "recipe: expected one of"),
        (lambda: gather(x, [], ctx.group, recipe="rowwise"), ArgumentError, "at least one weight"),
        (
            lambda: gather(x, [w.t()], ctx.group, recipe="rowwise", biases=[None, None]),
            ArgumentError,
            "1 in all, got 2",
        ),
        (
            lambda: gather(x, w.t(), ctx.group, recipe="rowwise", gather_dim=1),
            ArgumentError,
            "which is K of a_shard",
        ),
        (
            lambda: gather(x, w.t(), ctx.group, recipe="rowwise", shard_sizes=[6]),
            ArgumentError,
            "one size per rank",
        ),
        (
            lambda: gather(x, w.t(), ctx.group, recipe="rowwise", path="fused"),
            ArgumentError,
            "no FP8 kernel yet",
        ),
        (
            lambda: gather(x, w.t(), ctx.group, recipe="rowwise", path="nccl"),
            ArgumentError,
            "carries these tensors",
        ),
        (
            lambda: scatter(x, w, ctx.group, recipe="rowwise"),
            ShapeError,
            r"b: expected \[K, N\] with 16 rows",
        ),
        (
            lambda: scatter(x, w.t(), ctx.group, recipe="rowwise", residual=x),
            ShapeError,
            "this rank's output",
        ),
        (lambda: scatter(x.double(), w.t(), ctx.group, recipe="rowwise"), DTypeError, "to be quantised here"),
    ):
        with pytest.raises(error, match=words):
            call()
    # Wrong on one rank: an error on all.
    mine = x if ctx.rank else x[:, :4]
    with pytest.raises(ShapeError if ctx.rank == 0 else MismatchError, match="expected \\[K, N\\]"):
        gather(mine, w.t(), ctx.group, recipe="tensorwise")
    weight = torch.nn.Parameter(w.clone())
    weight.main_grad = torch.zeros_like(w)
    later = tpk.ops._main_grad.Delayed(weight, True, lambda *_: None)
    with pytest.raises(ArgumentError, match="cannot be delayed"):
        gather(x, weight.t(), ctx.group, recipe="rowwise", main_grad_of=later)


def test_refusals(ranks: RankPool) -> None:
    ranks.run(check_refusals, world=2)
