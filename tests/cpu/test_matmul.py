"""The local product: values, gradients, strides, batches, empty sizes, dtypes, on every CPU path."""

from __future__ import annotations

import itertools

import pytest
import torch

import tpkernels as tpk
from tpkernels.ops._activation import ACTIVATIONS
from tpkernels.testing import assert_close_tiles, poison_

PATHS = ["blas", "streamk"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def exact(a, b, bias=None, activation="none"):
    """Float64 result from the values that the operation really sees."""
    y = torch.matmul(a.double(), b.double())
    if bias is not None:
        y = y + bias.double()
    functional = torch.nn.functional
    return {
        "none": lambda: y,
        "relu": lambda: functional.relu(y),
        "silu": lambda: functional.silu(y),
        "gelu": lambda: functional.gelu(y),
        "gelu_tanh": lambda: functional.gelu(y, approximate="tanh"),
    }[activation]()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 53, 29), (130, 200, 300), (5, 300, 4)])
def test_values(path, dtype, shape):
    m, n, k = shape
    a, b, bias = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.randn(n).to(dtype)
    for activation in ACTIVATIONS:
        y = tpk.matmul(a, b, bias=bias, activation=activation, path=path)
        assert y.dtype == dtype
        # Behind an activation results can be far smaller than what was summed, and its error is relative to that.
        magnitude = a.double().abs() @ b.double().abs() + bias.double().abs()
        assert_close_tiles(y, exact(a, b, bias, activation), dtype, k=k, magnitude=magnitude)
    assert tpk.last_path().path == path


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_out_dtype(path, dtype, out_dtype):
    a, b = torch.randn(33, 70).to(dtype), torch.randn(70, 41).to(dtype)
    y = tpk.matmul(a, b, out_dtype=out_dtype, path=path)
    assert y.dtype == out_dtype
    # Sums are float32 even where the output is wider.
    assert_close_tiles(y, exact(a, b), torch.float32 if out_dtype == torch.float64 else out_dtype, k=70)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("a_t,b_t", list(itertools.product([False, True], repeat=2)))
def test_strides(path, a_t, b_t):
    """All four layouts, offsets, padded rows and steps, without the caller making copies."""
    k, m, n = 45, 31, 27
    a = torch.randn(k, m).t() if a_t else torch.randn(m, k)
    b = torch.randn(n, k).t() if b_t else torch.randn(k, n)
    assert_close_tiles(tpk.matmul(a, b, path=path), exact(a, b), torch.float32, k=k)
    wide = torch.full((2 * m + 3, k + 9), torch.nan)
    view = wide[3:, 5 : 5 + k][::2]
    view.copy_(a)
    assert not view.is_contiguous()
    assert_close_tiles(tpk.matmul(view, b, path=path), exact(a, b), torch.float32, k=k)


@pytest.mark.parametrize("path", PATHS)
def test_batches(path):
    a = torch.randn(2, 3, 5, 7)
    for b in (torch.randn(7, 4), torch.randn(3, 7, 4), torch.randn(2, 1, 7, 4), torch.randn(1, 1, 7, 4)):
        y = tpk.matmul(a, b, path=path)
        assert y.shape == (2, 3, 5, 4)
        assert_close_tiles(y.reshape(-1, 4), exact(a, b).reshape(-1, 4), torch.float32, k=7)
    # Leading dimensions that no view can join.
    a = torch.randn(5, 3, 7, 2).permute(3, 1, 0, 2)
    b = torch.randn(7, 4)
    assert_close_tiles(
        tpk.matmul(a, b, path=path).reshape(-1, 4), exact(a, b).reshape(-1, 4), torch.float32, k=7
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("m,n,k", [s for s in itertools.product([0, 3], repeat=3) if 0 in s])
def test_empty(path, m, n, k):
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    y = tpk.matmul(a, b, bias=bias, activation="relu", path=path)
    assert y.shape == (m, n)
    assert torch.equal(y, torch.relu(bias).expand(m, n) if k == 0 else y)
    acc = torch.ones(m, n)
    assert torch.equal(tpk.matmul(a, b, accumulate_into=acc, path=path), torch.ones(m, n))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("save_preact", [True, False])
def test_gradcheck(path, activation, save_preact):
    a = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def run(a, b, bias):
        return tpk.matmul(a, b.t(), bias=bias, activation=activation, save_preact=save_preact, path=path)

    assert torch.autograd.gradcheck(run, (a, b, bias))
    assert torch.autograd.gradgradcheck(run, (a, b, bias))


def test_gradcheck_batched_and_broadcast():
    for a_shape, b_shape in [
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((3, 4), (2, 4, 5)),
    ]:
        a = torch.randn(a_shape, dtype=torch.float64, requires_grad=True)
        b = torch.randn(b_shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda a, b: tpk.matmul(a, b), (a, b))


def test_gradients_only_where_asked():
    a, b = torch.randn(4, 5), torch.randn(5, 3, requires_grad=True)
    with tpk.record_paths() as log:
        tpk.matmul(a, b).sum().backward()
    assert log.counts == {("matmul", "blas"): 2}  # forward, and one product backward
    assert torch.allclose(b.grad, a.t() @ torch.ones(4, 3))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("acc_dtype", [torch.float32, torch.bfloat16])
def test_accumulate_into(path, dtype, acc_dtype):
    a, b = torch.randn(40, 33).to(dtype), torch.randn(33, 21).to(dtype)
    start = torch.randn(40, 21).to(acc_dtype)
    acc = start.clone()
    assert tpk.matmul(a, b, accumulate_into=acc, path=path) is acc
    narrow = acc_dtype if acc_dtype == torch.bfloat16 else torch.float32
    assert_close_tiles(acc, start.double() + exact(a, b), narrow, k=33)
    # Into a view of a larger buffer: nothing outside is touched.
    buffer = poison_(torch.empty(60, 50, dtype=acc_dtype))
    view = buffer[7:47, 3:24]
    view.copy_(start)
    tpk.matmul(a, b, accumulate_into=view, path=path)
    assert_close_tiles(view, start.double() + exact(a, b), narrow, k=33)
    view.fill_(torch.nan)
    assert torch.isnan(buffer).all()


def test_accumulate_keeps_small_updates():
    """256 + 1 is 256 in bfloat16; in a float32 accumulator it is 257."""
    acc = torch.full((1, 1), 256.0)
    tpk.matmul(
        torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16), accumulate_into=acc
    )
    assert acc.item() == 257.0


def test_opcheck():
    a = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    op = torch.ops.tpkernels.matmul.default
    torch.library.opcheck(op, (a, b, None, bias, None, 1.0, "gelu", None, True, "auto"))
    torch.library.opcheck(op, (a, b, None, None, None, 1.0, "none", torch.float32, False, "auto"))
    torch.library.opcheck(
        op,
        (torch.randn(2, 3, 5), torch.randn(2, 5, 4), None, None, None, 1.0, "none", None, False, "streamk"),
    )
    torch.library.opcheck(
        torch.ops.tpkernels.matmul_accumulate.default,
        (torch.randn(3, 5), torch.randn(5, 4), torch.zeros(3, 4), "auto"),
    )


def test_compile_is_one_graph():
    compiled_for: list[int] = []

    def backend(graph, inputs):
        compiled_for.append(len(graph.graph.nodes))
        return graph.forward

    def run(a, b, bias):
        return tpk.matmul(a, b.t(), bias=bias, activation="gelu").sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for m in (3, 8, 17):
        a = torch.randn(m, 5, requires_grad=True)
        b, bias = torch.randn(4, 5), torch.randn(4)
        out = compiled(a, b, bias)
        out.backward()
        grad, a.grad = a.grad, None
        expected = run(a, b, bias)
        expected.backward()
        assert torch.allclose(out, expected) and torch.allclose(grad, a.grad)
    assert len(compiled_for) == 1


def test_compile_inductor_matches_eager():
    def run(a, b):
        return torch.sin(tpk.matmul(a, b, activation="silu")) * 2

    a, b = torch.randn(6, 5), torch.randn(5, 4)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.allclose(compiled(a, b), run(a, b))


def test_grad_modes():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    with torch.no_grad():
        assert not tpk.matmul(a, b, activation="gelu").requires_grad
    with torch.inference_mode():
        assert torch.allclose(tpk.matmul(a, b), a @ b)


def test_checkpoint_recompute():
    a = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, 2, dtype=torch.float64)
    torch.utils.checkpoint.checkpoint(
        lambda x: tpk.matmul(x, b, activation="gelu"), a, use_reentrant=False
    ).sum().backward()
    grad, a.grad = a.grad, None
    tpk.matmul(a, b, activation="gelu").sum().backward()
    assert torch.equal(grad, a.grad)


def test_autocast():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tpk.matmul(a, b, bias=torch.randn(2))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert a.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tpk.matmul(a.double(), b.double()).dtype == torch.float64


def test_dlpack_arrays():
    np = pytest.importorskip("numpy")
    a, b, acc = np.random.randn(3, 4), np.random.randn(4, 2), np.ones((3, 2))
    assert np.allclose(tpk.matmul(a, b, bias=np.ones(2)), a @ b + 1)
    assert tpk.matmul(a, b, accumulate_into=acc) is acc  # the array's own memory was written
    assert np.allclose(acc, a @ b + 1)
