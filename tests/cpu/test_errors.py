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
            ["accumulate_into", "expanded"],
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
