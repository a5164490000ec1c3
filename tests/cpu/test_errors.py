"""Bad input of each kind: an exception of the documented type whose sentence names the argument."""

from __future__ import annotations

import pytest
import torch

import tpkernels as tpk
from tpkernels import errors

a, b = torch.randn(3, 4), torch.randn(4, 5)


@pytest.mark.parametrize(
    "call,kind,words",
    [
        (lambda: tpk.matmul(a.long(), b), errors.DTypeError, ["a", "float", "int64"]),
        (lambda: tpk.matmul(a, b.long()), errors.DTypeError, ["b", "int64"]),
        (lambda: tpk.matmul(a.to(torch.complex64), b), errors.DTypeError, ["a", "complex64"]),
        (lambda: tpk.matmul(a.bool(), b), errors.DTypeError, ["a", "bool"]),
        (lambda: tpk.matmul(a.bfloat16(), b.half()), errors.DTypeError, ["b", "bfloat16", "float16"]),
        (lambda: tpk.matmul([1.0], b), errors.DTypeError, ["a", "Tensor", "list"]),
        (lambda: tpk.matmul(a, b.t()), errors.ShapeError, ["b", "4 rows", "[3, 4]", "[5, 4]"]),
        (lambda: tpk.matmul(a[0], b), errors.ShapeError, ["a", "2 dimensions", "[4]"]),
        (lambda: tpk.matmul(a.expand(2, 3, 4), b.expand(3, 4, 5)), errors.ShapeError, ["b", "broadcast"]),
        (lambda: tpk.matmul(a, b, bias=torch.randn(4)), errors.ShapeError, ["bias", "[5]", "[4]"]),
        (
            lambda: tpk.matmul(a, b, bias=torch.randn(5).half()),
            errors.DTypeError,
            ["bias", "float32", "float16"],
        ),
        (lambda: tpk.matmul(a, b, activation="tanh"), errors.ArgumentError, ["activation", "gelu", "'tanh'"]),
        (lambda: tpk.matmul(a, b, out_dtype=torch.int8), errors.DTypeError, ["out_dtype", "int8"]),
        (lambda: tpk.matmul(a, b, path="cublas"), errors.ArgumentError, ["path", "'cublas'", "blas", "cpu"]),
        (lambda: tpk.matmul(a, b, path="fast"), errors.ArgumentError, ["path", "'fast'"]),
        (lambda: tpk.matmul(a.to_sparse(), b), errors.TpkError, ["a", "to_dense"]),
        (
            lambda: tpk.matmul(a, b, accumulate_into=torch.zeros(3, 4)),
            errors.ShapeError,
            ["accumulate_into", "[3, 5]"],
        ),
        (
            lambda: tpk.matmul(a, b, accumulate_into=torch.zeros(3, 5), activation="relu"),
            errors.ArgumentError,
            ["accumulate_into", "activation"],
        ),
        (
            lambda: tpk.matmul(a, b, accumulate_into=torch.zeros(3, 5, dtype=torch.int32)),
            errors.DTypeError,
            ["accumulate_into", "int32"],
        ),
        (
            lambda: tpk.matmul(a, b, accumulate_into=torch.zeros(1, 5).expand(3, 5)),
            errors.AliasError,
            ["accumulate_into", "distinct", "[0, 1]"],
        ),
        (lambda: tpk.explain("gemm", a, b), errors.ArgumentError, ["op", "'gemm'"]),
        (lambda: tpk.all_gather_matmul(a, b, "nowhere"), errors.GroupError, ["group", "'nowhere'"]),
        (lambda: tpk.all_gather_matmul(a, b), errors.GroupError, ["group", "init_process_group"]),
        (lambda: tpk.all_gather_matmul(a, b, 7), errors.GroupError, ["group", "int"]),
    ],
)
def test_sentence(call, kind, words):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert message.rstrip().endswith(".")
    for word in words:
        assert word in message, message


def test_accumulate_aliases():
    buffer = torch.zeros(8, 8)
    with pytest.raises(errors.AliasError, match="accumulate_into: it shares memory with a"):
        tpk.matmul(buffer, torch.randn(8, 8), accumulate_into=buffer)
    with pytest.raises(errors.AliasError, match="with b"):
        tpk.matmul(torch.randn(8, 4), buffer[2:6], accumulate_into=buffer)
    before = buffer.clone()
    assert torch.equal(buffer, before)  # nothing was written
    # Neighbours in one buffer are separate memory, by rows and by columns.
    tpk.matmul(buffer[:4, :4], torch.randn(4, 8), accumulate_into=buffer[4:])
    tpk.matmul(buffer[:, :4], torch.randn(4, 4), accumulate_into=buffer[:, 4:])
    with pytest.raises(errors.AliasError):
        tpk.matmul(buffer[:, :5], torch.randn(5, 4), accumulate_into=buffer[:, 4:])


def test_errors_are_also_builtin():
    """Callers who know nothing of our classes catch what they expect."""
    with pytest.raises(ValueError):
        tpk.matmul(a, b.t())
    with pytest.raises(TypeError):
        tpk.matmul(a.long(), b)
    assert issubclass(errors.MismatchError, RuntimeError)


def test_errors_hold_under_compile():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: tpk.matmul(x, y), backend="eager")
    with pytest.raises(Exception, match="expected 4 rows"):
        compiled(a, b.t())


def test_numpy_views_of_one_array_are_aliases():
    """Through DLPack each view has a storage of its own; only addresses tell."""
    np = pytest.importorskip("numpy")
    rows = np.random.randn(96, 8).astype("f4")
    weight = torch.randn(8, 8)
    for path in ("blas", "streamk"):
        with pytest.raises(errors.AliasError, match="shares memory with a"):
            tpk.matmul(rows[:64], weight, accumulate_into=rows[32:96], path=path)
    columns = np.random.randn(16, 16).astype("f4")
    with pytest.raises(errors.AliasError):
        tpk.matmul(columns[:, :9], torch.randn(9, 8), accumulate_into=columns[:, 8:])
    expected = columns[:, 8:] + columns[:, :8] @ weight.numpy()
    for path in ("blas", "streamk"):  # neighbouring columns are separate memory
        acc = columns.copy()
        tpk.matmul(acc[:, :8], weight, accumulate_into=acc[:, 8:], path=path)
        assert np.allclose(acc[:, 8:], expected, atol=1e-4)


def test_an_accumulator_that_overlaps_itself():
    acc = torch.zeros(20).as_strided((4, 4), (1, 1))
    with pytest.raises(errors.AliasError, match="several share memory"):
        tpk.matmul(torch.ones(4, 1), torch.ones(1, 4), accumulate_into=acc)


def test_the_kernel_op_refuses_aliases_too():
    x, w = torch.randn(1, 8, 8), torch.randn(1, 8, 8)
    gemm = torch.ops.tpkernels.streamk_gemm
    before = x.clone()
    with pytest.raises(RuntimeError, match="a must not share memory with out"):
        gemm(x, w, None, x, None, "none", False)
    out = torch.empty(1, 8, 8)
    with pytest.raises(RuntimeError, match="out must not share memory with preact"):
        gemm(x, w, None, out, out, "none", False)
    buffer = torch.randn(1, 12, 8)
    with pytest.raises(RuntimeError, match="a must not share memory with out"):
        gemm(buffer[:, :8], w, None, buffer[:, 4:], None, "none", False)
    assert torch.equal(x, before)


def test_arrays_that_dlpack_cannot_share():
    np = pytest.importorskip("numpy")
    for array in (np.ones((4, 3))[::-1], np.ones((4, 3), dtype=">f4"), np.ones((4, 3), dtype=object)):
        with pytest.raises(errors.DTypeError, match="a: the ndarray cannot be shared through DLPack"):
            tpk.matmul(array, torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    "options,word",
    [
        ({"activation": 3}, "activation: expected str or None, got 3"),
        ({"path": None}, "path: expected str, got None"),
        ({"out_dtype": "float32"}, "out_dtype: expected dtype or None, got 'float32'"),
    ],
)
def test_types_of_options(options, word):
    with pytest.raises(errors.DTypeError, match=word):
        tpk.matmul(a, b, **options)


def test_shard_sizes_refuses_nonsense():
    for total in (-5, 5.5):
        with pytest.raises(errors.ArgumentError, match="total: expected an integer"):
            tpk.shard_sizes(total, 2)


def test_kernel_timeout_must_be_a_number(monkeypatch):
    monkeypatch.setenv("TPK_KERNEL_TIMEOUT_S", "soon")
    with pytest.raises(RuntimeError, match="TPK_KERNEL_TIMEOUT_S must be a number of seconds"):
        tpk.matmul(a, b, path="streamk")
    monkeypatch.setenv("TPK_KERNEL_TIMEOUT_S", "1e30")
    assert torch.allclose(tpk.matmul(a, b, path="streamk"), a @ b, atol=1e-5)


def test_the_kernel_op_takes_separate_columns_of_one_buffer():
    buffer = torch.randn(1, 6, 40)
    for step in (1, 2):
        x, out = buffer[:, :, : 8 * step : step], buffer[:, :, 20 : 20 + 5 * step : step]
        w = torch.randn(1, 8, 5)
        expected = x.clone() @ w
        torch.ops.tpkernels.streamk_gemm(x, w, None, out, None, "none", False)
        assert torch.allclose(out, expected, atol=1e-5)
