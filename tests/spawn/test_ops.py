"""Distributed operations on gloo ranks; the checks are in tests/op_checks.py and tests/op_behaviour.py."""

from __future__ import annotations

import op_behaviour
import op_checks
import pytest
import torch
from op_checks import F64, on_device


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("uneven", [False, True])
def test_all_gather_matmul(ranks, world, uneven):
    ranks.run(on_device, op_checks.check_all_gather_matmul, F64, uneven, "auto", world=world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ["gloo", "gloo+blas"])
def test_all_gather_matmul_dtypes(ranks, dtype, path):
    ranks.run(on_device, op_checks.check_all_gather_matmul, dtype, True, path, world=3)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("uneven", [False, True])
def test_reduce(ranks, world, uneven):
    ranks.run(on_device, op_checks.check_reduce, F64, uneven, "auto", world=world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ["gloo", "gloo+blas"])
def test_reduce_dtypes(ranks, dtype, path):
    ranks.run(on_device, op_checks.check_reduce, dtype, True, path, world=3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_matmul_replicated(ranks, world):
    grads = ranks.run(on_device, op_checks.check_matmul_replicated, world=world)
    assert all(torch.equal(grads[0], g) for g in grads)  # bitwise


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradcheck(ranks, world):
    ranks.run(on_device, op_checks.check_gradcheck, world=world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_regions(ranks, world):
    ranks.run(on_device, op_checks.check_regions, world=world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("rows,cols", [(5, 3), (3, 33000), (300, 257)])  # one-shot and two-step
def test_sums_are_bitwise_defined(ranks, world, rows, cols):
    ranks.run(on_device, op_checks.check_sums, rows, cols, world=world)


@pytest.mark.parametrize("world", [2, 4])
def test_empty(ranks, world):
    ranks.run(on_device, op_checks.check_empty, world=world)


def test_non_contiguous(ranks):
    ranks.run(on_device, op_checks.check_non_contiguous, world=3)


def test_group_forms_and_explain(ranks):
    ranks.run(on_device, op_behaviour.check_group_forms, world=2)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("check", [op_behaviour.check_disagreement, op_behaviour.check_arguments])
def test_errors(ranks, check, world):
    ranks.run(on_device, check, world=world)


def test_not_a_member(ranks):
    ranks.run(on_device, op_behaviour.check_not_a_member, world=4)


@pytest.mark.parametrize("check", [op_behaviour.check_compile, op_behaviour.check_opcheck])
def test_compiler(ranks, check):
    ranks.run(on_device, check, world=2, timeout=180)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_against_the_numpy_reference(ranks, seed, dtype, world):
    ranks.run(on_device, op_checks.check_reference, seed, dtype, world=world)


def test_autocast(ranks):
    ranks.run(on_device, op_behaviour.check_autocast, world=2)


def test_one_rank(ranks):
    ranks.run(on_device, op_behaviour.check_one_rank, world=1)
