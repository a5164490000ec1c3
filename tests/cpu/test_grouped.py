"""Grouped products on the CPU: values, gradients, sizes in every form, bad input, compilation, docs/grouped.md."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from grouped_checks import SIZES, check
from pages import snippets

import tpkernels as tpk
from tpkernels.errors import ArgumentError, DTypeError, ShapeError
from tpkernels.ops._activation import ACTIVATIONS
from tpkernels.testing import canary_view

PATHS = ["blas", "streamk"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ops = torch.ops.tpkernels


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(path, dtype, rng):
    options = itertools.cycle(itertools.product(ACTIVATIONS, [True, False], [True, False]))
    for i, sizes in enumerate(SIZES):
        activation, save_preact, bias = next(options)
        check(
            sizes, 37, 70, dtype, rng, path, bias=bias, activation=activation, save_preact=save_preact,
            transposed=i % 2 == 0, laid_out=i % 3 == 0,
        )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(path, dtype, rng):
    options = itertools.cycle(itertools.product(ACTIVATIONS, [True, False]))
    for i, sizes in enumerate(SIZES + SIZES[1:3]):
        activation, save_preact = next(options)
        check(
            sizes, 37, 70, dtype, rng, path, gated=True, activation=activation, save_preact=save_preact,
            transposed=i % 2 == 0, laid_out=i % 3 == 0,
        )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_out_dtype_and_empty(path, rng):
    for dtype, out_dtype in itertools.product([torch.bfloat16, torch.float32], DTYPES):
        check([3, 0, 6], 9, 12, dtype, rng, path, out_dtype=out_dtype)
        check([3, 0, 6], 9, 12, dtype, rng, path, gated=True, activation="silu", out_dtype=out_dtype)
    for sizes, n, k in [([0, 0, 0], 5, 4), ([2, 3], 0, 4), ([2, 3], 5, 0), ([0], 0, 0)]:
        check(sizes, n, k, torch.float32, rng, path, bias=True, activation="relu")
        for save_preact in (True, False):
            check(
                sizes, n, k, torch.float32, rng, path, gated=True, activation="silu", save_preact=save_preact
            )
    y = tpk.grouped_matmul(torch.ones(0, 4), torch.ones(0, 4, 5), [], path=path)
    assert y.shape == (0, 5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("save_preact", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_gradcheck(path, activation, save_preact, gated):
    a = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    third = torch.randn((3, 5, 4) if gated else (3, 5), dtype=torch.float64, requires_grad=True)

    def run(a, w, third):
        options = {"gate": third.mT} if gated else {"bias": third}
        options |= {"activation": activation, "save_preact": save_preact, "path": path}
        return tpk.grouped_matmul(a, w.mT, [4, 0, 5], **options)

    assert torch.autograd.gradcheck(run, (a, w, third))
    assert torch.autograd.gradgradcheck(run, (a, w, third))


@pytest.mark.parametrize("path", PATHS)
def test_gradient_of_the_gate_alone(path):
    a, b = torch.randn(6, 4), torch.randn(2, 4, 5)
    gate = torch.randn(2, 5, 4, requires_grad=True)
    y = tpk.grouped_matmul(a, b, [2, 4], gate=gate.mT, activation="silu", path=path)
    with tpk.record_paths() as log:
        y.sum().backward()
    assert log.counts == {("grouped_weight_grad", path): 1}
    again = gate.detach().requires_grad_()
    parts = zip(a.split([2, 4]), b, again, strict=True)
    torch.cat([torch.nn.functional.silu(x @ g.t()) * (x @ w) for x, w, g in parts]).sum().backward()
    assert gate.grad.is_contiguous() and torch.allclose(gate.grad, again.grad, atol=1e-4)


def test_one_call_of_a_gate_where_nothing_is_kept(rng):
    """Without gradients the kernel makes both products in one call; with them, apart, with the same results."""
    a, b, gate = torch.randn(9, 4), torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    one = tpk.grouped_matmul(a, b, [4, 0, 5], gate=gate, activation="gelu", path="streamk")
    kept = tpk.grouped_matmul(a, b.requires_grad_(), [4, 0, 5], gate=gate, activation="gelu", path="streamk")
    assert torch.allclose(one, kept, atol=1e-5)
    out = torch.full((9, 5), torch.nan)
    ops.streamk_gemm_grouped(a, b.detach(), None, out, None, "gelu", [4, 0, 5], gate=gate)
    assert torch.equal(out, one)


def test_gradients_only_where_asked():
    a, w = torch.randn(6, 4), torch.randn(2, 5, 4, requires_grad=True)
    with tpk.record_paths() as log:
        tpk.grouped_matmul(a, w.mT, [2, 4]).sum().backward()
    assert log.counts == {("grouped_matmul", "blas"): 1, ("grouped_weight_grad", "blas"): 1}
    assert w.grad.is_contiguous()  # made as the weight lies: autograd takes it as it is
    assert torch.allclose(w.grad[1], a[2:].sum(0).expand(5, 4), atol=1e-5)


def test_every_form_of_sizes():
    a, b = torch.randn(9, 4), torch.randn(3, 4, 5)
    want = tpk.grouped_matmul(a, b, [4, 0, 5])
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(tpk.grouped_matmul(a, b, torch.tensor([4, 0, 5], dtype=dtype)), want)
        assert torch.equal(tpk.grouped_matmul(a, b, offs=torch.tensor([4, 4, 9], dtype=dtype)), want)
    assert torch.equal(tpk.grouped_matmul(a, b, group_sizes=(4, 0, 5)), want)
    assert torch.equal(tpk.grouped_matmul(a, b, offs=[4, 4, 9]), want)
    assert torch.allclose(want, torch.cat([a[:4] @ b[0], a[4:] @ b[2]]), atol=1e-5)
    one_bias = torch.randn(5)
    assert torch.allclose(tpk.grouped_matmul(a, b, [4, 0, 5], bias=one_bias), want + one_bias, atol=1e-5)


def test_what_is_refused():
    a, b = torch.randn(9, 4), torch.randn(3, 4, 5)
    cases = [
        (
            lambda: tpk.grouped_matmul(a, b),
            ArgumentError,
            "group_sizes, offs: expected one of the two.*got neither",
        ),
        (lambda: tpk.grouped_matmul(a, b, [4, 0, 5], offs=[4, 4, 9]), ArgumentError, "got both"),
        (lambda: tpk.grouped_matmul(a, b, [4, 5]), ShapeError, "for each of the 3 weights, got 2"),
        (
            lambda: tpk.grouped_matmul(a, b, [4, 0, 6]),
            ShapeError,
            r"rows of a, 9, got \[4, 0, 6\], 10 in all",
        ),
        (lambda: tpk.grouped_matmul(a, b, [10, -1, 0]), ShapeError, "0 or more, got -1 for group 1"),
        (lambda: tpk.grouped_matmul(a, b, offs=[4, 3, 9]), ShapeError, "got -1 for group 1"),
        (lambda: tpk.grouped_matmul(a, b, [4.0, 0, 5]), DTypeError, "expected integers, got 4.0 for group 0"),
        (
            lambda: tpk.grouped_matmul(a, b, 9),
            DTypeError,
            "expected a list of integers or a tensor of them, got int",
        ),
        (lambda: tpk.grouped_matmul(a, b, torch.ones(3)), ShapeError, "expected integers.*float32"),
        (
            lambda: tpk.grouped_matmul(a, b, torch.ones(1, 3).int()),
            ShapeError,
            r"one dimension, got .* \[1, 3\]",
        ),
        (
            lambda: tpk.grouped_matmul(a[None], b, [4, 0, 5]),
            ShapeError,
            "a: expected 2 dimensions.*tpkernels.matmul",
        ),
        (lambda: tpk.grouped_matmul(a, b[0], [9]), ShapeError, "b: expected at least 3 dimensions"),
        (
            lambda: tpk.grouped_matmul(a, b.mT, [4, 0, 5]),
            ShapeError,
            "b: expected 4 rows in each matrix.*weight.mT",
        ),
        (lambda: tpk.grouped_matmul(a, b.double(), [4, 0, 5]), DTypeError, "b: expected dtype float32"),
        (
            lambda: tpk.grouped_matmul(a, b, [4, 0, 5], bias=torch.ones(2, 5)),
            ShapeError,
            r"bias: expected .*\[3, 5\]",
        ),
        (
            lambda: tpk.grouped_matmul(a, b, [4, 0, 5], activation="tanh"),
            ArgumentError,
            "activation: expected one of",
        ),
        (
            lambda: tpk.grouped_matmul(a, b, [4, 0, 5], path="cublas"),
            ArgumentError,
            "path: 'cublas' is not a path",
        ),
        (
            lambda: tpk.grouped_matmul(a, b, [4, 0, 5], gate=b[0]),
            ShapeError,
            r"gate: expected the shape of b, \[3, 4, 5\], got \[4, 5\]",
        ),
        (lambda: tpk.grouped_matmul(a, b, [4, 0, 5], gate=b.double()), DTypeError, "gate: expected dtype"),
        (
            lambda: tpk.grouped_matmul(a, b, [4, 0, 5], gate=b, bias=torch.ones(3, 5)),
            ArgumentError,
            "bias: expected None where there is a gate",
        ),
        (lambda: tpk.explain("grouped_matmul", a, b), ArgumentError, "got neither"),
        (lambda: tpk.explain("grouped_matmul", a, b, [4, 0, 6]), ShapeError, "10 in all"),
    ]
    for call, kind, said in cases:
        with pytest.raises(kind, match=said):
            call()


def test_what_the_kernel_refuses():
    a, b = torch.randn(9, 4), torch.randn(3, 4, 5)
    out = torch.empty(9, 5)
    sizes = [4, 0, 5]

    def run(a=a, b=b, bias=None, out=out, preact=None, sizes=sizes, **options):
        ops.streamk_gemm_grouped(a, b, bias, out, preact, "none", sizes, **options)

    for options, said in [
        ({"sizes": [4, 5]}, "b must have shape .* with 2 groups"),
        ({"sizes": [4, 0, 4]}, "must add up to the rows of a, 9, but they add up to 8"),
        ({"sizes": [4, -1, 6]}, "must not be negative, but entry 1 is -1"),
        ({"a": a[None]}, r"a must have shape \[rows, K\]"),
        ({"a": a.int()}, "a must be float64"),
        ({"b": b.double()}, "b must have the dtype of a"),
        ({"bias": torch.ones(5, 3)}, r"bias must have shape \[groups, N\] = \[3, 5\]"),
        ({"out": torch.empty(8, 5)}, r"out must have shape \[rows, N\] = \[9, 5\]"),
        ({"out": torch.empty(1, 5).expand(9, 5)}, "must not be broadcast"),
        ({"preact": torch.empty(9, 5).double()}, "preact must have the dtype of out"),
        ({"preact": out}, "out must not share memory with preact"),
        ({"gate": b[0]}, r"gate must have shape \[groups, K, N\] with 3 groups"),
        ({"gate": b[:, :, :4]}, r"gate must have shape \[groups, K, N\] = \[3, 4, 5\]"),
        ({"gate": b.double()}, "gate must have the dtype of a"),
        ({"gate": b, "bias": torch.ones(3, 5)}, "bias must be None where there is a gate"),
        ({"gate": b, "preact": torch.empty(9, 5)}, "preact must be None where there is a gate"),
        ({"gate": out[:4].expand(3, 4, 5)}, "gate must not share memory with out"),
        ({"workers": -1}, "workers must be 0"),
        ({"tile": "3x3x3"}, "tile must be"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            run(**options)


@pytest.mark.parametrize("schedule", ["auto", "data_parallel", "stream_k", "split_k", "hybrid_first"])
def test_a_group_is_the_product_of_its_own(schedule, rng):
    """Bit for bit, and nothing is written beside the rows and columns of the output."""
    sizes, n, k = [7, 0, 64, 129, 1], 72, 300
    a, b = torch.randn(sum(sizes), k), torch.randn(len(sizes), k, n)
    out, preact = (canary_view((sum(sizes), n), torch.float32, "cpu", pad=3, offset=2) for _ in range(2))
    plan = {"schedule": schedule, "splits": 2, "tile": "64x64x128"}
    ops.streamk_gemm_grouped(a, b, None, out.tensor, preact.tensor, "relu", sizes, **plan)
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        alone = torch.empty(1, size, n)
        ops.streamk_gemm(a[None, rows], b[None, group], None, alone, None, "relu", False, **plan)
        assert torch.equal(out.tensor[rows], alone[0]), group
        begin += size
    assert torch.equal(out.tensor, preact.tensor.relu())
    out.check("out")
    preact.check("preact")


def test_main_grad():
    a = torch.randn(9, 4, requires_grad=True)
    w, plain = (torch.nn.Parameter(torch.randn(3, 5, 4)) for _ in range(2))
    plain.data.copy_(w)
    w.main_grad = torch.ones(3, 5, 4)
    dy = torch.randn(9, 5)
    tpk.grouped_matmul(a, plain.mT, [4, 0, 5]).backward(dy)
    want, a.grad = a.grad, None
    for path in PATHS:
        tpk.grouped_matmul(a, w.mT, [4, 0, 5], main_grad_of=w, path=path).backward(dy)
        assert tpk.last_path().op == "grouped_weight_grad_accumulate"
    assert w.grad is None and torch.allclose(w.main_grad, 1 + 2 * plain.grad, atol=1e-5)
    assert torch.allclose(a.grad, 2 * want, atol=1e-5)
    w.grad_added_to_main_grad = False
    tpk.grouped_matmul(a, w.mT, [4, 0, 5], main_grad_of=w).backward(dy)
    assert w.grad_added_to_main_grad and w.grad.shape == w.shape
    with pytest.raises(ShapeError, match=r"main_grad_of\[0\]: b must be the parameter's .mT"):
        tpk.grouped_matmul(a, w.detach().mT.contiguous(), [4, 0, 5], main_grad_of=w)
    gate, plain_gate = (torch.nn.Parameter(torch.randn(3, 5, 4)) for _ in range(2))
    plain_gate.data.copy_(gate)
    w.main_grad, gate.main_grad, plain.grad = torch.zeros(3, 5, 4), torch.ones(3, 5, 4), None
    for weights, into in (((plain, plain_gate), None), ((w, gate), [w, gate])):
        options = {"gate": weights[1].mT, "activation": "silu", "main_grad_of": into}
        tpk.grouped_matmul(a, weights[0].mT, [4, 0, 5], **options).backward(dy)
    assert torch.allclose(w.main_grad, plain.grad, atol=1e-5)
    assert torch.allclose(gate.main_grad, 1 + plain_gate.grad, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"one parameter .* per weight, 2 in all, got 1"):
        tpk.grouped_matmul(a, w.mT, [4, 0, 5], gate=gate.mT, main_grad_of=w)
    bf16 = torch.nn.Parameter(torch.randn(3, 5, 4, dtype=torch.bfloat16))
    bf16.main_grad = torch.zeros(3, 5, 4)
    half = a.detach().bfloat16()
    tpk.grouped_matmul(half, bf16.mT, [4, 0, 5], main_grad_of=bf16).backward(dy.bfloat16())
    exact = dy.bfloat16().float()[:4].t() @ half.float()[:4]
    assert torch.allclose(bf16.main_grad[0], exact, atol=1e-5)  # never rounded to bfloat16


def test_opcheck():
    a, dy = (torch.randn(9, n, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    b = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    sizes = [4, 0, 5]
    op = ops.grouped_matmul.default
    none = (None, None, None)
    torch.library.opcheck(op, (a, b, None, bias, sizes, "gelu", None, True, "auto", *none))
    torch.library.opcheck(op, (a, b, None, None, sizes, "none", torch.float32, False, "streamk", *none))
    into, other = (torch.zeros(3, 5, 4, dtype=torch.float64) for _ in range(2))
    torch.library.opcheck(op, (a, b, None, bias, sizes, "none", None, False, "auto", [into], [0], [True]))
    gate = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    for kept in (True, False):
        for main_grads in (none, ([into], [1], [False]), ([into, other], [0, 1], [True, False])):
            args = (a, b, gate, None, sizes, "silu", None, kept, "streamk", *main_grads)
            torch.library.opcheck(op, args)
    for transposed in (False, True):
        torch.library.opcheck(ops.grouped_weight_grad.default, (a, dy, sizes, transposed, "auto"))
    acc = torch.zeros(3, 4, 5, dtype=torch.float64)
    plain = (a.detach(), dy.detach(), acc, sizes, "auto")
    torch.library.opcheck(ops.grouped_weight_grad_accumulate.default, plain)


def test_compile_is_one_graph_for_all_sizes():
    compiled_for: list[int] = []

    def backend(graph, inputs):
        compiled_for.append(len(graph.graph.nodes))
        return graph.forward

    def run(a, w, bias, sizes):
        return tpk.grouped_matmul(a, w.mT, sizes, bias=bias, activation="silu").sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    w, bias = torch.randn(3, 5, 4, requires_grad=True), torch.randn(3, 5)
    for sizes in ([4, 3, 5], [2, 9, 7], [8, 6, 20]):
        a = torch.randn(sum(sizes), 4, requires_grad=True)
        out = compiled(a, w, bias, sizes)
        got = torch.autograd.grad(out, (a, w))
        expected = run(a, w, bias, sizes)
        want = torch.autograd.grad(expected, (a, w))
        assert torch.allclose(out, expected)
        assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(got, want, strict=True))
    assert len(compiled_for) == 1


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_compile_into_main_grad(flag, gated):
    """One graph, and two passes in flight."""

    def run(a, w, gate):
        weights = [w, gate] if gated else [w]
        options = {"gate": gate.mT} if gated else {}
        h = tpk.grouped_matmul(a, w.mT, [4, 0, 5], activation="gelu", main_grad_of=weights, **options)
        return h.square().sum()

    a = torch.randn(9, 4, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(3, 5, 4)) for _ in range(2)]
    used = weights[: 1 + gated]
    for w in used:
        w.main_grad = torch.zeros(3, 5, 4)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    grads, sums = [], []
    for f in (run, compiled):
        for w in used:
            if flag:
                w.grad_added_to_main_grad = False
            w.main_grad.zero_()
        first, second = f(a, *weights), f(a.detach() * 2, *weights)
        second.backward()
        first.backward()
        for w in used:
            assert (w.grad is not None) == flag and getattr(w, "grad_added_to_main_grad", False) == flag
            w.grad = None
        grads.append(a.grad)
        sums.append(torch.stack([w.main_grad for w in used]))
        a.grad = None
    assert sums[0][:, 0].any(-1).any(-1).all() and sums[0][:, 2].any(-1).any(-1).all()
    assert torch.allclose(*sums, atol=1e-4) and torch.allclose(*grads, atol=1e-4)


def test_compile_into_main_grad_of_the_gate_alone():
    def run(a, w, gate):
        return tpk.grouped_matmul(
            a, w.mT, [4, 0, 5], gate=gate.mT, activation="silu", main_grad_of=[None, gate]
        ).sum()

    a, (w, gate) = torch.randn(9, 4), (torch.nn.Parameter(torch.randn(3, 5, 4)) for _ in range(2))
    torch._dynamo.reset()
    plain = tpk.grouped_matmul(a, w.mT, [4, 0, 5], gate=gate.mT, activation="silu")
    want = torch.autograd.grad(plain.sum(), [w, gate])
    gate.main_grad = torch.ones(3, 5, 4)
    torch.compile(run, fullgraph=True, backend="aot_eager")(a, w, gate).backward()
    assert gate.grad is None and torch.allclose(gate.main_grad, 1 + want[1], atol=1e-5)
    assert torch.allclose(w.grad, want[0], atol=1e-5)


def test_compile_with_gradients_traced():
    def run(a, w):
        h = tpk.grouped_matmul(a, w.mT, [4, 0, 5], gate=2 * w.mT, activation="silu")
        return h.sum() + tpk.grouped_matmul(a, w.mT, [4, 0, 5], activation="gelu").square().sum()

    a, w = torch.randn(9, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for x, y in zip(
        torch.autograd.grad(compiled(a, w), (a, w)), torch.autograd.grad(run(a, w), (a, w)), strict=True
    ):
        assert torch.allclose(x, y, atol=1e-5)


def test_autocast_and_arrays():
    a, b = torch.randn(9, 4), torch.randn(3, 4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tpk.grouped_matmul(a, b, [4, 0, 5]).dtype == torch.bfloat16
    y = tpk.grouped_matmul(a.numpy(), b.numpy(), np.array([4, 0, 5]).tolist())
    assert isinstance(y, np.ndarray) and np.allclose(y, tpk.grouped_matmul(a, b, [4, 0, 5]))


def test_explain_says_what_runs():
    a, b = torch.randn(9, 4), torch.randn(3, 4, 5)
    for sizes in ({"group": [4, 0, 5]}, {"group_sizes": [4, 0, 5]}, {"offs": [4, 4, 9]}):
        explained = tpk.explain("grouped_matmul", a, b, **sizes)
        assert explained.path == "blas" and explained.plan["tiles"] == 2
        assert "2 of 3 groups, a product for each" in str(explained)
    tpk.grouped_matmul(a, b, [4, 0, 5])
    assert tpk.last_path().detail == explained.product
    gated = tpk.explain("grouped_matmul", a, b, [4, 0, 5], gate=b)
    tpk.grouped_matmul(a, b, [4, 0, 5], gate=b)
    assert tpk.last_path().detail == gated.product and "gated" in gated.product


def test_plan_of_one_launch():
    """On Hopper all tiles of all groups are one list; more than 64 groups that have rows take more launches."""

    def plan(sizes, device, **options):
        return ops.streamk_plan(1, sum(sizes), 512, 4096, device, group_sizes=sizes, **options)[1]

    one_tile = {"tile": "128x128x64/1x1", "schedule": "data_parallel"}
    tiles = plan([1, 0, 128, 129], "sm90", **one_tile)[3]
    assert tiles == 4 * (1 + 1 + 2)
    assert plan([128] * 64, "sm90", **one_tile)[3:6] == [256, 64, 132]
    assert plan([128] * 65, "sm90", **one_tile)[3] == 260
    assert plan([128] * 4, "sm80", tile="128x128x32", schedule="data_parallel")[3] == 16
    assert plan([1, 0, 128, 129], "sm90", gated=True, **one_tile)[3] == 2 * tiles  # half of a tile's columns
    with pytest.raises(RuntimeError, match=r"must add up to m = 5, below 2\^31, but they add up to 4"):
        ops.streamk_plan(1, 5, 512, 4096, "sm90", group_sizes=[4])


def test_page():
    for code in snippets("grouped.md"):
        exec(compile(code, "docs/grouped.md", "exec"), {})
