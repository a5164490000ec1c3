"""What the distributed operations must satisfy, run on the ranks of a pool: gloo in tests/spawn, nccl in tests/gpun.

Every check compares with float64 products of the whole tensors, which each rank can form because all ranks draw the
same random numbers.
"""

from __future__ import annotations

import torch

import tpkernels as tpk
from tpkernels.testing import assert_close_tiles, gradcheck_ranks

F64 = torch.float64


def on_device(ctx, check, *args):
    """Run a check with the rank's device as the default one. cuBLAS sums in fp32, as all else here."""
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    with ctx.device:
        return check(ctx, *args)


def pieces(total, world, uneven):
    """Rows per rank: equal-ish, or uneven with an empty rank."""
    if not uneven:
        return tpk.shard_sizes(total, world)
    sizes = [0] * world
    for i in range(total):
        sizes[(i * i) % world if world > 1 else 0] += 1
    sizes[-1], sizes[0] = (0, sizes[0] + sizes[-1]) if world > 1 else (sizes[-1], sizes[0])
    return sizes


def own(x, dim, sizes, rank):
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def check_all_gather_matmul(ctx, dtype, uneven, path):
    """2-D and 3-D, both gather dimensions, several weights, biases, activation; forward and backward."""
    for shape, dim in [((11, 6), 0), ((5, 3, 6), 0), ((3, 7, 6), 1), ((3, 7, 6), -2)]:
        d = dim % len(shape)
        sizes = pieces(shape[d], ctx.world, uneven)
        if not uneven and len(set(sizes)) > 1:  # equal shards need no sizes
            shape = tuple(n if i != d else n // 1 * ctx.world for i, n in enumerate(shape))
            sizes = [shape[d] // ctx.world] * ctx.world
        x = torch.randn(shape, dtype=F64).to(dtype)
        ns = [4, 5]  # columns of this rank; equal on all ranks here, unequal features are the layers' tests
        ws = [torch.randn(ctx.world, n, 6, dtype=F64).to(dtype) for n in ns]
        cs = [torch.randn(ctx.world, n, dtype=F64).to(dtype) for n in ns]
        gs = [torch.randn(ctx.world, *shape[:-1], n, dtype=F64).to(dtype) for n in ns]
        for keep, save in [(False, True), (True, True), (False, False)]:
            shard = own(x, d, sizes, ctx.rank).clone().requires_grad_()
            weights = [w[ctx.rank].clone().requires_grad_() for w in ws]
            biases = [cs[0][ctx.rank].clone().requires_grad_(), None]
            outs = tpk.all_gather_matmul(
                shard,
                [w.t() for w in weights],
                ctx.group,
                gather_dim=dim,
                shard_sizes=sizes if uneven else None,
                biases=biases,
                activation="gelu",
                keep_gathered=keep,
                save_preact=save,
                path=path,
            )
            torch.autograd.backward(outs, [g[ctx.rank] for g in gs])
            # Oracle: every rank's products of the whole operand, in float64.
            whole = x.double().clone().requires_grad_()
            dense_w = [w.double().clone().requires_grad_() for w in ws]
            dense_c = cs[0].double().clone().requires_grad_()
            loss = 0
            for r in range(ctx.world):
                for i in range(2):
                    y = whole @ dense_w[i][r].t() + (dense_c[r] if i == 0 else 0)
                    y = torch.nn.functional.gelu(y)
                    loss = loss + (y * gs[i][r].double()).sum()
                    if r == ctx.rank:
                        assert outs[i].shape == y.shape and outs[i].dtype == dtype
                        size = whole.abs() @ dense_w[i][r].abs().t() + (dense_c[r].abs() if i == 0 else 0)
                        flat = [t.detach().flatten(0, -2) for t in (outs[i], y, size)]
                        assert_close_tiles(flat[0], flat[1], dtype, k=6, magnitude=flat[2])
            loss.backward()
            close(shard.grad, own(whole.grad, d, sizes, ctx.rank), dtype, "gradient of a_shard")
            for i in range(2):
                close(weights[i].grad, dense_w[i].grad[ctx.rank], dtype, f"gradient of b[{i}]")
            terms = gs[0][ctx.rank].double().flatten(0, -2)  # gelu' is about 1 at the most
            scale = terms.square().sum(0).sqrt()
            close(biases[0].grad, dense_c.grad[ctx.rank], dtype, "gradient of the bias", scale=scale)


def close(actual, expected, dtype, what, scale=None):
    """Gradients pass through rounded intermediates: compare by norm with a bound per dtype."""
    bound = {F64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert actual.shape == expected.shape, what
    if expected.numel() == 0:
        return
    # A sum whose terms cancel is as exact as its terms: ``scale`` is how large it would be if they did not.
    reference = expected.norm().clamp_min(1e-30)
    if scale is not None:
        reference = torch.maximum(reference, scale.norm())
    error = (actual.double() - expected).norm() / reference
    assert error < bound, f"{what}: relative error {error:.2e}, bound {bound}"


def check_reduce(ctx, dtype, uneven, path):
    """matmul_reduce_scatter over both dimensions and matmul_all_reduce; bias and residual once."""
    for shape, dim in [((11, 4), 0), ((5, 3, 4), 0), ((3, 7, 4), 1), ((2, 4), 0)]:
        d = dim % len(shape)
        sizes = pieces(shape[d], ctx.world, uneven)
        n = 5
        xs = torch.randn(ctx.world, 2, *shape, dtype=F64).to(dtype)
        ws = torch.randn(ctx.world, 2, n, shape[-1], dtype=F64).to(dtype)
        bias, residual = torch.randn(n, dtype=F64).to(dtype), torch.randn(*shape[:-1], n, dtype=F64).to(dtype)
        g = torch.randn(*shape[:-1], n, dtype=F64).to(dtype)

        dense = [t.double().clone().requires_grad_() for t in (xs, ws, bias, residual)]
        products = [dense[0][r][i] @ dense[1][r][i].t() for r in range(ctx.world) for i in range(2)]
        y = sum(products) + dense[2] + dense[3]
        y.backward(g.double())

        for scatter in (True, False):
            a = [x.clone().requires_grad_() for x in xs[ctx.rank]]
            b = [w.clone().requires_grad_() for w in ws[ctx.rank]]
            c = bias.clone().requires_grad_()
            mine = own(residual, d, sizes, ctx.rank) if scatter else residual
            r = mine.clone().requires_grad_()
            operands = (list(a), [w.t() for w in b])
            if scatter:
                out = tpk.matmul_reduce_scatter(
                    *operands,
                    ctx.group,
                    scatter_dim=dim,
                    shard_sizes=sizes if uneven else None,
                    bias=c,
                    residual=r,
                    path=path,
                )
                out.backward(own(g, d, sizes, ctx.rank))
                expected = own(y, d, sizes, ctx.rank)
            else:
                out = tpk.matmul_all_reduce(*operands, ctx.group, bias=c, residual=r, path=path)
                out.backward(g)
                expected = y
            assert out.shape == expected.shape and out.dtype == dtype
            close(out, expected.detach(), dtype, "value")
            for i in range(2):
                close(a[i].grad, dense[0].grad[ctx.rank][i], dtype, f"gradient of a[{i}]")
                close(b[i].grad, dense[1].grad[ctx.rank][i], dtype, f"gradient of b[{i}]")
            close(c.grad, dense[2].grad, dtype, "gradient of the bias (complete on every rank)")
            expected_r = own(dense[3].grad, d, sizes, ctx.rank) if scatter else dense[3].grad
            close(r.grad, expected_r, dtype, "gradient of the residual")


def check_matmul_replicated(ctx):
    x = torch.randn(2, 7, 6, dtype=F64)
    ws = torch.randn(ctx.world, 2, 5, 6, dtype=F64)
    g = torch.randn(ctx.world, 2, 2, 7, 5, dtype=F64)
    a = x.clone().requires_grad_()
    b = [w.clone().requires_grad_() for w in ws[ctx.rank]]
    outs = tpk.matmul_replicated(a, [w.t() for w in b], ctx.group, activation="silu")
    torch.autograd.backward(outs, list(g[ctx.rank]))
    dense_x, dense_w = x.clone().requires_grad_(), ws.clone().requires_grad_()
    loss = sum(
        (torch.nn.functional.silu(dense_x @ dense_w[r][i].t()) * g[r][i]).sum()
        for r in range(ctx.world)
        for i in range(2)
    )
    loss.backward()
    close(a.grad, dense_x.grad, F64, "gradient of a (complete on every rank)")
    for i in range(2):
        close(b[i].grad, dense_w.grad[ctx.rank][i], F64, "gradient of b")
    return a.grad


def check_gradcheck(ctx):
    """Finite differences of one loss over all ranks, replicated arguments moved on all ranks together."""
    group, rank = ctx.group, ctx.rank
    own_gen = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(3, 4, dtype=F64, generator=own_gen, device="cpu").to(ctx.device)
    w = torch.randn(4, 2, dtype=F64, generator=own_gen, device="cpu").to(ctx.device)
    bias = torch.randn(2, dtype=F64)  # the same on every rank
    gradcheck_ranks(lambda x, w: tpk.all_gather_matmul(x, w, group, activation="gelu"), [x, w], group=group)
    gradcheck_ranks(
        lambda x, w: tpk.all_gather_matmul(x, w, group, return_gathered=True), [x, w], group=group
    )
    rows = torch.randn(2 * ctx.world + 1, 4, dtype=F64, generator=own_gen, device="cpu").to(ctx.device)
    residual = torch.randn(
        tpk.shard_sizes(rows.shape[0], ctx.world)[rank], 2, dtype=F64, generator=own_gen, device="cpu"
    ).to(ctx.device)
    gradcheck_ranks(
        lambda a, b, c, r: tpk.matmul_reduce_scatter(a, b, group, bias=c, residual=r),
        [rows, w, bias, residual],
        replicated=[False, False, True, False],
        group=group,
    )
    whole = torch.randn(2 * ctx.world + 1, 2, dtype=F64)
    gradcheck_ranks(
        lambda a, b, c, r: tpk.matmul_all_reduce(a, b, group, bias=c, residual=r),
        [rows, w, bias, whole],
        replicated=[False, False, True, True],
        output_replicated=True,
        group=group,
    )
    same = torch.randn(3, 4, dtype=F64)
    gradcheck_ranks(
        lambda a, b: tpk.matmul_replicated(a, b, group, activation="silu"),
        [same, w],
        replicated=[True, False],
        group=group,
    )


def check_regions(ctx):
    regions, group = tpk.regions, ctx.group
    sizes = pieces(7, ctx.world, True)
    x = torch.randn(7, 3, dtype=F64, generator=torch.Generator().manual_seed(ctx.rank), device="cpu").to(
        ctx.device
    )
    same = torch.randn(7, 3, dtype=F64)
    shard = own(x, 0, sizes, ctx.rank).clone()
    gradcheck_ranks(
        lambda x: regions.copy_to_group(x, group) * (ctx.rank + 1), [same], replicated=True, group=group
    )
    gradcheck_ranks(lambda x: regions.all_reduce(x, group), [x], output_replicated=True, group=group)
    gradcheck_ranks(
        lambda x: regions.all_gather(x, 0, group, shard_sizes=sizes) * (ctx.rank + 1), [shard], group=group
    )
    gradcheck_ranks(
        lambda x: regions.all_gather(x, 0, group, shard_sizes=sizes, replicated_grad=True),
        [shard],
        output_replicated=True,
        group=group,
    )
    gradcheck_ranks(lambda x: regions.reduce_scatter(x, 1, group), [x], group=group)
    gradcheck_ranks(
        lambda x: regions.split(x, 0, group, shard_sizes=sizes), [same], replicated=True, group=group
    )
    assert torch.equal(
        regions.all_reduce(torch.tensor(float(ctx.rank)), group, op="max"), torch.tensor(ctx.world - 1.0)
    )
    assert regions.all_reduce(torch.tensor(1.0), group) == ctx.world
    ids = regions.all_gather(torch.tensor([ctx.rank]), 0, group)  # integers may be gathered
    assert ids.tolist() == list(range(ctx.world))


def check_sums(ctx, rows, cols):
    """Bitwise: rank-ordered float32 sum of bfloat16 partials, whatever the collective below."""
    world, dtype = ctx.world, torch.bfloat16
    a = torch.randn(world, rows, 8).to(dtype)
    b = torch.randn(world, 8, cols).to(dtype)
    bias = torch.randn(cols).to(dtype)
    partials = [tpk.matmul(a[r], b[r]) for r in range(world)]
    total = partials[0].float() if world > 1 else tpk.matmul(a[0], b[0], out_dtype=torch.float32)
    for partial in partials[1:]:
        total = total + partial
    expected = (total + bias).to(dtype)
    first = None
    for _ in range(5):
        out = tpk.matmul_all_reduce(a[ctx.rank], b[ctx.rank], ctx.group, bias=bias)
        assert torch.equal(out, expected)
        shard = tpk.matmul_reduce_scatter(a[ctx.rank], b[ctx.rank], ctx.group, bias=bias)
        assert torch.equal(shard, own(expected, 0, tpk.shard_sizes(rows, world), ctx.rank))
        first = out if first is None else first
        assert torch.equal(out, first)


def check_empty(ctx):
    world, group = ctx.world, ctx.group
    for rows in (0, 1):  # fewer rows than ranks
        sizes = tpk.shard_sizes(rows, world)
        x = torch.randn(sizes[ctx.rank], 4, requires_grad=True)
        y, gathered = tpk.all_gather_matmul(
            x, torch.ones(4, 3), group, shard_sizes=sizes, return_gathered=True
        )
        assert y.shape == (rows, 3) and gathered.shape == (rows, 4)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 3.0 * world))
        z = tpk.matmul_reduce_scatter(torch.ones(rows, 4), torch.ones(4, 3), group)
        assert torch.equal(z, torch.full((sizes[ctx.rank], 3), 4.0 * world))
    bias = torch.arange(3.0)
    for out in (
        tpk.matmul_all_reduce(torch.ones(2, 0), torch.ones(0, 3), group, bias=bias),
        tpk.all_gather_matmul(torch.ones(1, 0), torch.ones(0, 3), group, biases=bias)[:2],
    ):
        assert torch.equal(out, bias.expand(out.shape[0], 3))
    assert tpk.matmul_all_reduce(torch.ones(2, 4), torch.ones(4, 0), group).shape == (2, 0)


def check_non_contiguous(ctx):
    group = ctx.group
    x = torch.randn(6, 5, 4).permute(2, 0, 1)[::2]  # [2, 6, 5], no unit stride in the last dimension
    w = torch.randn(8, 10)[::2, ::2].t()
    gathered = tpk.regions.all_gather(x, 1, group)
    assert torch.allclose(tpk.all_gather_matmul(x, w, group, gather_dim=1), gathered @ w, atol=1e-5)
    whole = tpk.matmul_all_reduce(x, w, group)
    assert torch.allclose(whole, ctx.world * (x @ w), atol=1e-4)
    shard = tpk.matmul_reduce_scatter(x, w, group, scatter_dim=1)
    assert torch.equal(shard, own(whole, 1, tpk.shard_sizes(6, ctx.world), ctx.rank))


def check_reference(ctx, seed, dtype_name):
    """Random cases against tpkernels.reference (NumPy float64, all ranks simulated): per tile, and gradients."""
    import numpy as np

    from tpkernels import reference as ref

    dtype = getattr(torch, dtype_name)
    world, rank = ctx.world, ctx.rank
    draw = np.random.default_rng(seed)  # the same on every rank

    def tensor(array):
        return torch.tensor(array, dtype=F64, device=ctx.device).to(dtype)

    def random(*shape):
        """A tensor and the float64 values that it really holds."""
        x = tensor(draw.standard_normal(shape))
        return x, x.double().cpu().numpy()

    def cpu(array):
        return torch.tensor(np.ascontiguousarray(array), dtype=F64, device="cpu")

    def gradient(actual, expected, name, magnitude, terms):
        """``magnitude`` is the gradient of the absolute values: a sum of ``terms`` numbers without cancellation."""
        close(actual.cpu(), cpu(expected), dtype, name, scale=cpu(magnitude) / max(1, terms) ** 0.5)

    def absolute(values):
        return [np.abs(v) for v in values]

    for _ in range(4):
        k, n, m = (int(draw.integers(1, high)) for high in (200, 150, 60))
        dim = int(draw.integers(0, 2))
        sizes = [int(s) for s in draw.multinomial(m, [1 / world] * world)]
        lead = int(draw.integers(1, 4))

        def shaped(rows, cols, lead=lead, dim=dim):
            return (rows, lead, cols) if dim == 0 else (lead, rows, cols)

        activation = str(draw.choice(["none", "relu", "silu", "gelu", "gelu_tanh"]))
        xs = [random(*shaped(s, k)) for s in sizes]
        ws = [random(k, n) for _ in range(world)]
        cs = [random(n) for _ in range(world)]
        dys = [random(*shaped(m, n)) for _ in range(world)]
        x, w, c = (t.clone().requires_grad_() for t in (xs[rank][0], ws[rank][0], cs[rank][0]))
        path = "auto" if dtype == F64 else f"{ctx.backend}+streamk"
        out = tpk.all_gather_matmul(
            x, w, ctx.group, gather_dim=dim, shard_sizes=sizes, biases=c, activation=activation, path=path
        )
        args = ([v for _, v in xs], [v for _, v in ws])
        options = {"gather_dim": dim, "biases": [v for _, v in cs], "activation": activation}
        expected = ref.all_gather_matmul(*args, **options)[rank]
        assert_close_tiles(
            out.flatten(0, 1),
            expected.reshape(-1, n),
            dtype,
            k=k,
            magnitude=k * np.ones((out[..., 0].numel(), n)),
        )
        out.backward(dys[rank][0])
        grads = ref.all_gather_matmul_backward([v for _, v in dys], *args, **options)
        plain = {"gather_dim": dim, "biases": absolute(v for _, v in cs)}
        size = ref.all_gather_matmul_backward(
            absolute(v for _, v in dys), *(absolute(some) for some in args), **plain
        )
        rows = m * lead
        gradient(x.grad, grads.a[rank], "a_shard", size.a[rank], n * world)
        gradient(w.grad, grads.b[rank], "b", size.b[rank], rows)
        gradient(c.grad, grads.bias[rank], "bias", size.bias[rank], rows)

        as_ = [random(*shaped(m, k)) for _ in range(world)]
        bias = random(n)
        residuals = [random(*shaped(s, n)) for s in sizes]
        dys = [random(*shaped(s, n)) for s in sizes]
        a, w, c, r = (
            t.clone().requires_grad_() for t in (as_[rank][0], ws[rank][0], bias[0], residuals[rank][0])
        )
        out = tpk.matmul_reduce_scatter(
            a, w, ctx.group, scatter_dim=dim, shard_sizes=sizes, bias=c, residual=r, path=path
        )
        args = ([v for _, v in as_], [v for _, v in ws])
        options = {"scatter_dim": dim, "bias": bias[1], "residuals": [v for _, v in residuals]}
        expected = ref.matmul_reduce_scatter(*args, sizes=sizes, **options)[rank]
        assert_close_tiles(out.flatten(0, 1), expected.reshape(-1, n), dtype, k=k * world, world=world)
        out.backward(dys[rank][0])
        grads = ref.matmul_reduce_scatter_backward([v for _, v in dys], *args, **options)
        plain = {**options, "bias": np.abs(bias[1]), "residuals": absolute(v for _, v in residuals)}
        size = ref.matmul_reduce_scatter_backward(
            absolute(v for _, v in dys), *(absolute(some) for some in args), **plain
        )
        gradient(a.grad, grads.a[rank], "a", size.a[rank], n)
        gradient(w.grad, grads.b[rank], "b", size.b[rank], rows)
        gradient(c.grad, grads.bias, "bias", size.bias, rows)
        close(r.grad.cpu(), cpu(grads.residual[rank]), dtype, "residual")

        whole, dy = random(*shaped(m, n)), random(*shaped(m, n))
        a, w, c, r = (t.clone().requires_grad_() for t in (as_[rank][0], ws[rank][0], bias[0], whole[0]))
        out = tpk.matmul_all_reduce(a, w, ctx.group, bias=c, residual=r, path=path)
        expected = ref.matmul_all_reduce(*args, bias=bias[1], residual=whole[1])
        assert_close_tiles(out.flatten(0, 1), expected.reshape(-1, n), dtype, k=k * world, world=world)
        out.backward(dy[0])
        grads = ref.matmul_all_reduce_backward(dy[1], *args, bias=bias[1], residual=whole[1])
        size = ref.matmul_all_reduce_backward(
            np.abs(dy[1]),
            *(absolute(some) for some in args),
            bias=np.abs(bias[1]),
            residual=np.abs(whole[1]),
        )
        gradient(a.grad, grads.a[rank], "a", size.a[rank], n)
        gradient(w.grad, grads.b[rank], "b", size.b[rank], rows)
        gradient(c.grad, grads.bias, "bias", size.bias, rows)
        close(r.grad.cpu(), cpu(grads.residual), dtype, "residual")
