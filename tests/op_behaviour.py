"""How the distributed operations behave: errors, disagreement, compilation, graphs, streams; run on pool ranks."""

from __future__ import annotations

import torch
from op_checks import own
from torch.distributed.device_mesh import DeviceMesh

import tpkernels as tpk
from tpkernels.testing import assert_close_tiles


def check_group_forms(ctx):
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    by_object = tpk.all_gather_matmul(x, w, ctx.group)
    assert torch.equal(by_object, tpk.all_gather_matmul(x, w, ctx.group_name))
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    assert torch.equal(by_object, tpk.all_gather_matmul(x, w, mesh))
    explanation = tpk.explain("all_gather_matmul", x, w, ctx.group)
    expected = "nccl+cublas" if x.is_cuda else "gloo+blas"
    assert explanation.path == expected == tpk.last_path().path
    assert explanation.wire_bytes == (ctx.world - 1) * x.numel() * 4
    assert tpk.explain("matmul_replicated", x, w, ctx.group).path == expected.partition("+")[2]
    # Meta tensors stand for tensors on the group's device; bytes are those that really travel.
    meta = [t.to("meta") for t in (x, w)]
    if x.is_cuda or not torch.cuda.is_available():  # gloo's groups have both
        assert tpk.explain("all_gather_matmul", *meta, ctx.group) == explanation
    sizes = [2, *[0] * (ctx.world - 1)]
    scatter = tpk.explain(
        "matmul_reduce_scatter", x, w, ctx.group, shard_sizes=sizes, out_dtype=torch.float64
    )
    assert scatter.wire_bytes == (ctx.world - 1) * sizes[ctx.rank] * 4 * 8
    assert tpk.explain("matmul_all_reduce", x, w, ctx.group).wire_bytes == (ctx.world - 1) * 2 * 4 * 4


def expect(kind, words, call):
    """``call`` raises an exception of this kind whose message holds all the words."""
    try:
        call()
    except kind as error:
        missing = [w for w in words if w not in str(error)]
        assert not missing, f"missing {missing} in: {error}"
        return
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")


def check_disagreement(ctx):
    """Under TPK_CHECK=1 ranks that disagree all get an error, nobody hangs, and the group still works."""
    group, rank = ctx.group, ctx.rank
    last = ctx.world - 1
    mismatch, w = tpk.errors.MismatchError, torch.randn(4, 5)
    odd = rank == last
    expect(
        mismatch,
        ["all_gather_matmul", "gather_dim", "shape", f"on rank {last}"],
        lambda: tpk.all_gather_matmul(
            torch.randn(3, 6 if odd else 4), torch.randn(6 if odd else 4, 5), group
        ),
    )
    expect(
        mismatch, ["shard_sizes"], lambda: tpk.all_gather_matmul(torch.randn(4 if odd else 3, 4), w, group)
    )
    dtype = torch.float16 if odd else torch.bfloat16
    expect(
        mismatch,
        ["dtype", "bfloat16", "float16"],
        lambda: tpk.matmul_all_reduce(torch.randn(3, 4).to(dtype), w.to(dtype), group),
    )
    expect(
        mismatch,
        ["product's shape"],
        lambda: tpk.matmul_reduce_scatter(torch.randn(6, 4), torch.randn(4, 7 if odd else 5), group),
    )
    expect(
        mismatch,
        ["operation", "matmul_reduce_scatter", "matmul_all_reduce"],
        lambda: (tpk.matmul_reduce_scatter if odd else tpk.matmul_all_reduce)(torch.randn(6, 4), w, group),
    )
    expect(
        mismatch,
        ["bias given"],
        lambda: tpk.matmul_all_reduce(torch.randn(6, 4), w, group, bias=torch.randn(5) if odd else None),
    )
    # A bad argument on one rank only: that rank says what is wrong, the others say which rank failed.
    kind, words = (
        (tpk.errors.ShapeError, ["b: expected 3 rows"])
        if odd
        else (mismatch, [f"rank {last} raised ShapeError"])
    )
    expect(kind, words, lambda: tpk.matmul_all_reduce(torch.randn(6, 3 if odd else 4), w, group))
    kind, words = (tpk.errors.DTypeError, ["a_shard"]) if odd else (mismatch, ["DTypeError"])
    x = torch.ones(3, 4, dtype=torch.int64) if odd else torch.ones(3, 4)
    expect(kind, words, lambda: tpk.all_gather_matmul(x, w, group))
    x = torch.ones(3, 4)
    # Errors found before the operation starts, and differing needs for gradients, are told as well.
    kind, words = (
        (tpk.errors.ArgumentError, ["biases"]) if odd else (mismatch, ["raised ArgumentError: biases"])
    )
    biases = [None, None] if odd else [None]
    expect(kind, words, lambda: tpk.all_gather_matmul(torch.ones(3, 4), [w], group, biases=biases))
    kind, words = (tpk.errors.DTypeError, ["scatter_dim"]) if odd else (mismatch, ["DTypeError"])
    expect(kind, words, lambda: tpk.matmul_reduce_scatter(x, w, group, scatter_dim=0.5 if odd else 0))
    y = torch.ones(3, 4, requires_grad=odd)
    expect(mismatch, ["gradients wanted"], lambda: tpk.all_gather_matmul(y, w, group))
    expect(mismatch, ["split", "shape"], lambda: tpk.regions.split(torch.ones(5 if odd else 4, 6), 0, group))
    # Uneven shards that fit are fine, and nothing was left behind in the group.
    sizes = [2] * last + [5]
    y = tpk.all_gather_matmul(torch.ones(sizes[rank], 4), torch.ones(4, 3), group, shard_sizes=sizes)
    assert torch.equal(y, torch.full((sum(sizes), 3), 4.0))


def check_arguments(ctx):
    """Bad arguments that every rank passes alike."""
    group, errors = ctx.group, tpk.errors
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    sizes = [3] * ctx.world
    gather = tpk.all_gather_matmul
    expect(errors.ShapeError, ["b", "4 rows", "[5, 4]"], lambda: gather(x, w.t(), group))
    expect(errors.ShapeError, ["b[1]", "4 rows"], lambda: gather(x, [w, w.t()], group))
    expect(errors.ShapeError, ["b", "2 dimensions"], lambda: gather(x, w.expand(2, 4, 5), group))
    expect(errors.ArgumentError, ["b", "empty list"], lambda: gather(x, [], group))
    expect(
        errors.ArgumentError, ["biases", "2 in all, got 1"], lambda: gather(x, [w, w], group, biases=[None])
    )
    expect(
        errors.ShapeError,
        ["biases[1]", "[5]"],
        lambda: gather(x, [w, w], group, biases=[None, torch.ones(4)]),
    )
    expect(errors.ArgumentError, ["gather_dim", "which is K"], lambda: gather(x, w, group, gather_dim=1))
    expect(errors.ArgumentError, ["gather_dim", "-2 to 1"], lambda: gather(x, w, group, gather_dim=2))
    expect(
        errors.ArgumentError,
        ["shard_sizes", "one size per rank"],
        lambda: gather(x, w, group, shard_sizes=[3]),
    )
    expect(
        errors.ArgumentError,
        ["shard_sizes", "a_shard has 3"],
        lambda: gather(x, w, group, shard_sizes=[4] * ctx.world),
    )
    expect(
        errors.ArgumentError,
        ["shard_sizes", "0 or more"],
        lambda: gather(x, w, group, shard_sizes=[*sizes[1:], -3]),
    )
    expect(errors.ArgumentError, ["activation"], lambda: gather(x, w, group, activation="swish"))
    expect(errors.DTypeError, ["b", "bfloat16"], lambda: gather(x, w.bfloat16(), group))
    expect(errors.DTypeError, ["a_shard", "complex64"], lambda: gather(x.to(torch.complex64), w, group))
    expect(errors.DTypeError, ["b[0]", "Tensor"], lambda: gather(x, [3], group))
    scatter = tpk.matmul_reduce_scatter
    expect(errors.ArgumentError, ["shard_sizes", "sum to"], lambda: scatter(x, w, group, shard_sizes=sizes))
    expect(errors.ArgumentError, ["a, b", "2 and 1"], lambda: scatter([x, x], w, group))
    expect(errors.ShapeError, ["a[1], b[1]"], lambda: scatter([x, x[:2]], [w, w], group))
    expect(
        errors.ShapeError,
        ["residual", "this rank's output"],
        lambda: scatter(x, w, group, residual=torch.randn(9, 5)),
    )
    expect(
        errors.DTypeError,
        ["residual", "float32", "float64"],
        lambda: tpk.matmul_all_reduce(x, w, group, residual=torch.randn(3, 5).double()),
    )
    expect(errors.ShapeError, ["bias", "[5]"], lambda: tpk.matmul_all_reduce(x, w, group, bias=torch.ones(4)))
    wrong = "nccl" if ctx.backend == "gloo" else "gloo"
    expect(errors.ArgumentError, ["path", wrong], lambda: tpk.matmul_all_reduce(x, w, group, path=wrong))
    expect(errors.ArgumentError, ["op", "'mean'"], lambda: tpk.regions.all_reduce(x, group, op="mean"))
    expect(errors.ArgumentError, ["dim"], lambda: tpk.regions.split(x, 5, group))


def check_not_a_member(ctx):
    """Ranks outside a group get a sentence; its members work."""
    import torch.distributed as dist

    group = dist.new_group([0])
    call = lambda: tpk.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 4), group)  # noqa: E731
    if ctx.rank == 0:
        assert call().shape == (2, 4)
    else:
        expect(tpk.errors.GroupError, ["group", "not a member"], call)


def check_wrong_device(ctx):
    """NCCL with CPU tensors."""
    x, w = torch.ones(2, 3, device="cpu"), torch.ones(3, 4, device="cpu")
    for call in (
        tpk.all_gather_matmul,
        tpk.matmul_reduce_scatter,
        tpk.matmul_all_reduce,
        tpk.matmul_replicated,
    ):
        expect(tpk.errors.DeviceError, ["on cpu", "nccl"], lambda call=call: call(x, w, ctx.group))
    expect(
        tpk.errors.DeviceError,
        ["b", "cuda", "cpu"],
        lambda: tpk.all_gather_matmul(x.to(ctx.device), w, ctx.group),
    )


def check_large(ctx):
    """Sizes at which the kernel splits tiles and collectives take their bulk paths."""
    dtype, world = torch.bfloat16, ctx.world
    m, n, k = 512, 768, 1024
    x = torch.randn(world * m, k).to(dtype)
    w = torch.randn(world, n, k).to(dtype)
    out = tpk.all_gather_matmul(own(x, 0, [m] * world, ctx.rank), w[ctx.rank].t(), ctx.group, path="nccl")
    assert_close_tiles(out, x.double() @ w[ctx.rank].double().t(), dtype, k=k)
    parts = torch.randn(world, world * m, k).to(dtype)
    y = tpk.matmul_reduce_scatter(parts[ctx.rank], w[ctx.rank].t(), ctx.group, path="nccl")
    whole = sum(parts[r].double() @ w[r].double().t() for r in range(world))
    expected = own(whole, 0, [m] * world, ctx.rank)
    # Every partial was rounded once for the wire: its error is relative to the partials, not to their sum.
    scale = max(float((parts[r].double() @ w[r].double().t()).abs().max()) for r in range(world))
    assert float((y.double() - expected).abs().max()) < world * scale * 2.0**-8
    first = y
    for _ in range(200):
        assert torch.equal(
            first, tpk.matmul_reduce_scatter(parts[ctx.rank], w[ctx.rank].t(), ctx.group, path="nccl")
        )


def check_cuda_graph(ctx):
    """Captured and replayed with new data, mixed with eager calls."""
    dtype, group = torch.bfloat16, ctx.group
    x, w = torch.randn(64, 128).to(dtype), torch.randn(128, 96).to(dtype)

    def step():
        y = tpk.all_gather_matmul(x, w, group, path="nccl", activation="gelu")
        return tpk.matmul_reduce_scatter(y, w.t(), group, path="nccl")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    for _ in range(20):
        x.copy_(torch.randn(64, 128))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, step())


def check_side_stream(ctx):
    """On a stream of the caller's: no use of the default stream behind its back."""
    dtype = torch.bfloat16
    x, w = torch.randn(256, 512).to(dtype), torch.randn(512, 256).to(dtype)
    expected = tpk.matmul_all_reduce(x, w, ctx.group, path="nccl")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = x * 1
        out = tpk.matmul_all_reduce(late, w, ctx.group, path="nccl")
    side.synchronize()
    assert torch.equal(out, expected)


def check_compile(ctx):
    """One graph under torch.compile(fullgraph=True, dynamic=True), equal to eager, forward and backward."""
    group = ctx.group
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def block(x, w1, w2, bias):
        h = tpk.all_gather_matmul(x, [w1.t(), w1.t()], group, activation="silu", biases=[bias, None])
        y = tpk.matmul_reduce_scatter(h[0] * h[1], w2.t(), group, residual=x)
        y = tpk.matmul_replicated(y, w1.t(), group.group_name)
        return tpk.regions.all_reduce(tpk.matmul_all_reduce(y, w2.t(), group), group)

    w1, w2, bias = (torch.randn(s, requires_grad=True) for s in ((6, 4), (4, 6), (6,)))
    for name, sizes in ((backend, (5, 8, 13)), ("aot_eager", (5, 8)), ("inductor", (5, 8))):
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=name)
        for rows in sizes:
            x = torch.randn(rows, 4, requires_grad=True)
            results = []
            for run in (compiled, block):
                out = run(x, w1, w2, bias)
                out.square().sum().backward()
                results.append((out.detach(), *(t.grad for t in (x, w1, w2, bias))))
                for t in (x, w1, w2, bias):
                    t.grad = None
            for got, expected in zip(*results, strict=True):
                # Cancellation leaves rounding errors of the largest values: 0.004 beside 20, and 6e5 elsewhere.
                atol = 1e-3 + 5e-7 * expected.abs().max().item()
                assert torch.allclose(got, expected, rtol=1e-4, atol=atol), (name, rows)
    assert len(graphs) == 1, len(graphs)


def check_opcheck(ctx):
    """torch.library.opcheck of every distributed op (schema, fake, autograd registration, AOT dispatch)."""
    ops, name = torch.ops.tpkernels, ctx.group_name
    x = torch.randn(4, 3, requires_grad=True)
    w, u, v = (torch.randn(3, 5, requires_grad=needed) for needed in (True, True, False))
    bias = torch.randn(5, requires_grad=True)
    y = torch.randn(2 * ctx.world, 3, requires_grad=True)
    none = (None, None, None)
    main_grad, other = torch.zeros(5, 3), torch.zeros(5, 3)
    gather = (0, None, name, None)
    cases = [
        (
            ops.all_gather_matmul,
            (x, [w, v], [bias], [1], "gelu", *gather, True, True, True, "auto", *none),
        ),
        (
            ops.all_gather_matmul,
            (x, [w], [], [], "none", 0, [4] * ctx.world, name, None, False, False, False, "auto", *none),
        ),
        (ops.matmul_replicated, (x, [w, v], [bias], [0], "silu", name, None, True, "auto", *none)),
        (ops.matmul_reduce_scatter, ([y], [w], bias, None, 0, None, name, None, "auto", *none)),
        (
            ops.matmul_reduce_scatter,
            ([y, y], [w, v], None, torch.randn(2, 5), 0, [2] * ctx.world, name, None, "auto", *none),
        ),
        (ops.matmul_all_reduce, ([y], [w], bias, torch.randn(2 * ctx.world, 5), name, None, "auto", *none)),
        # Into main_grad: one weight of two, both, with a gradient that stands for it.
        (
            ops.all_gather_matmul,
            (x, [v, w], [bias], [1], "gelu", *gather, True, True, False, "auto", [main_grad], [1], [False]),
        ),
        (
            ops.all_gather_matmul,
            (x, [w, u], [], [], "none", *gather, False, False, False, "auto",
             [main_grad, other], [0, 1], [True, False]),
        ),
        (
            ops.matmul_replicated,
            (x, [v, w], [], [], "none", name, None, False, "auto", [main_grad], [1], [True]),
        ),
        (
            ops.matmul_reduce_scatter,
            ([y, y], [w, u], bias, None, 0, None, name, None, "auto", [main_grad], [0], [False]),
        ),
        (
            ops.matmul_all_reduce,
            ([y], [w], bias, None, name, None, "auto", [main_grad], [0], [False]),
        ),
        (
            ops.all_gather_matmul_grads_into,
            ([torch.randn(4 * ctx.world, 5)] * 2, x.detach(), [w.detach(), v], [torch.zeros(3, 5)], [1], *gather[:3],
             "auto"),
        ),
        (ops.copy_to_group, (x, name)),
        (ops.all_reduce, (x, "sum", name)),
        (ops.all_gather, (x, 0, None, name, False)),
        (ops.reduce_scatter, (x, 0, None, name)),
        (ops.split, (x, 0, None, name)),
    ]  # fmt: skip
    for op, args in cases:
        torch.library.opcheck(op.default, args)


def check_autocast(ctx):
    """Operands are narrowed; a residual stays as wide as the sum that it is added to."""
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    residual = torch.randn(4, 5)
    with torch.autocast(ctx.device.type, torch.bfloat16):
        wide = tpk.matmul_all_reduce(x, w, ctx.group, residual=residual, out_dtype=torch.float32)
        narrow = tpk.matmul_all_reduce(x, w, ctx.group, residual=residual)
    assert wide.dtype == torch.float32
    assert narrow.dtype == torch.bfloat16
    expected = ctx.world * (x.bfloat16().float() @ w.bfloat16().float()) + residual
    assert torch.allclose(wide, expected, atol=1e-3)


def check_one_rank(ctx):
    """Where nothing travels, the path names no transport."""
    if ctx.world == 1:
        tpk.all_gather_matmul(torch.randn(2, 3), torch.randn(3, 4), ctx.group)
        assert tpk.last_path().transport == "none"
        explanation = tpk.explain("all_gather_matmul", torch.randn(2, 3), torch.randn(3, 4), ctx.group)
        assert explanation.path == tpk.last_path().path
