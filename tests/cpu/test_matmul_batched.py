"""Batched products: leading dimensions of both operands, broadcast, as views; sums over them are rounded once."""

from __future__ import annotations

import itertools

import pytest
import torch
from matmul_checks import Case, check

import tpkernels as tpk
from tpkernels.ops import _gemm

SHAPES = [
    ((4, 6, 5), (4, 5, 7)),
    ((2, 3, 6, 5), (2, 1, 5, 7)),  # heads that share keys
    ((2, 3, 6, 5), (3, 5, 7)),
    ((2, 3, 6, 5), (1, 1, 5, 7)),
    ((6, 5), (3, 5, 7)),
    ((2, 1, 6, 5), (3, 5, 7)),
    ((0, 6, 5), (0, 5, 7)),
]


@pytest.mark.parametrize("path", ["blas", "streamk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_both_operands_batched(path, dtype, rng):
    kinds = itertools.cycle([None, dtype, torch.float32])
    for (a, b), gated, laid_out in itertools.product(SHAPES, [False, True], [False, True]):
        case = Case(
            a, b, dtype, gated=gated, bias=not gated, residual=next(kinds), activation="silu", laid_out=laid_out,
            save_preact=not laid_out,
        )  # fmt: skip
        check(case, rng, path)


def test_matrices_that_share_a_factor_are_one():
    """The rows of all heads that have the same keys, without a copy."""
    a, b = torch.randn(2, 3, 6, 5), torch.randn(2, 1, 5, 7)
    for right in (b, b.expand(2, 3, 5, 7)):
        joined, one = _gemm._as_batched(a, right)
        assert joined.shape == (2, 18, 5) and one.shape == (2, 5, 7)
        assert joined.data_ptr() == a.data_ptr() and one.data_ptr() == b.data_ptr()
    # A gate of other strides: neither factor may change within what is joined.
    assert [x.shape[0] for x in _gemm._as_batched(a, b.expand(2, 3, 5, 7), torch.randn(2, 3, 5, 7))] == [
        6,
        6,
        6,
    ]
    apart = torch.randn(2, 6, 3, 5).transpose(1, 2)  # rows of a head are not beside each other
    assert _gemm._as_batched(apart, b)[0].shape == (6, 6, 5)
    heads = torch.randn(6, 4, 5).transpose(0, 1)  # any batch strides: views
    assert all(x.data_ptr() == heads.data_ptr() for x in _gemm._as_batched(heads, heads.mT))


@pytest.mark.parametrize("path", ["blas", "streamk"])
@pytest.mark.parametrize("b_shape", [(1, 1, 4, 8), (2, 1, 4, 8), (64, 4, 8)])
def test_weight_gradients_over_shared_dimensions_are_rounded_once(path, b_shape):
    a = torch.randn(2, 64, 3, 4, dtype=torch.bfloat16)
    b = torch.randn(b_shape, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(2, 64, 3, 8, dtype=torch.bfloat16)
    tpk.matmul(a, b, path=path).backward(dy)
    exact = (a.double().mT @ dy.double()).sum_to_size(b_shape)
    spacing = torch.finfo(torch.bfloat16).eps * exact.abs()
    assert bool(
        ((b.grad.double() - exact).abs() <= 0.51 * spacing + 1e-4).all()
    )  # the latter: fp32 sums of 384
