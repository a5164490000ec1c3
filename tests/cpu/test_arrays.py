"""Operations on arrays of other libraries: docs/arrays.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pages import snippets

import tpkernels as tpk
from tpkernels.ops import _arrays


def test_the_page():
    for code in snippets("arrays.md"):
        exec(compile(code, "docs/arrays.md", "exec"), {})


def test_results_are_of_the_library_of_the_arrays(rng):
    a, b, bias = rng.standard_normal((3, 4)), rng.standard_normal((4, 5)), rng.standard_normal(5)
    y = tpk.matmul(a, b, bias=bias, residual=np.ones((3, 5)))
    assert type(y) is np.ndarray and np.allclose(y, a @ b + bias + 1)
    y = tpk.matmul(a=a[:, ::2], b=b[::2])
    assert type(y) is np.ndarray and np.allclose(y, a[:, ::2] @ b[::2])
    assert tpk.matmul(a[:0], b).shape == (0, 5)


def test_a_tensor_among_them_makes_tensors(rng):
    a, b = rng.standard_normal((3, 4)), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    y = tpk.matmul(a, b)
    y.sum().backward()
    assert isinstance(y, torch.Tensor) and torch.equal(b.grad, torch.tensor(a.sum(0))[:, None].expand(4, 5))


def test_what_the_library_cannot_take(rng):
    a = rng.standard_normal((2, 2)).astype(np.float32)
    with pytest.raises(tpk.errors.DTypeError, match=r"out_dtype: .*bfloat16.*numpy.*torch tensors"):
        tpk.matmul(a, a, out_dtype=torch.bfloat16)


class _Bare:
    """An array that only speaks DLPack."""

    def __init__(self, value):
        self.value = value

    def __dlpack__(self, **options):
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.value.__dlpack_device__()


def test_an_array_without_a_namespace_gives_tensors(rng):
    a = rng.standard_normal((2, 2))
    y = tpk.matmul(_Bare(a), _Bare(a))
    assert isinstance(y, torch.Tensor) and np.allclose(y.numpy(), a @ a)


def test_an_array_without_a_namespace_is_its_packages(rng):
    """As those of CuPy 14."""
    array = type("ndarray", (_Bare,), {"__module__": "numpy.core"})
    a = rng.standard_normal((2, 2))
    y = tpk.matmul(array(a), array(a))
    assert type(y) is np.ndarray and np.allclose(y, a @ a)


def test_lists_keep_their_places(rng):
    made = []

    @_arrays.gives_back
    def operation(a, bs):
        made.append(_arrays.tensor("a", a))
        return [made[0], *(_arrays.tensor("b", b) for b in bs)], made[0] + 1

    a, b = rng.standard_normal(3), rng.standard_normal(2)
    (first, second), third = operation(a, [b])
    assert [type(x) for x in (first, second, third)] == [np.ndarray] * 3
    assert np.array_equal(first, a) and np.array_equal(second, b) and np.array_equal(third, a + 1)
    assert np.shares_memory(first, a), "a copy was made"
