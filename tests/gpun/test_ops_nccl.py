"""Distributed operations on NCCL ranks, one GPU each: path "nccl" (our kernel) and "nccl+cublas"."""

from __future__ import annotations

import op_behaviour
import op_checks
import pytest
import torch
from op_checks import F64, on_device

pytestmark = pytest.mark.gpun

WORLDS = sorted({1, 2, torch.cuda.device_count()} - {0}) if torch.cuda.device_count() >= 2 else [2]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("check", [op_checks.check_all_gather_matmul, op_checks.check_reduce])
@pytest.mark.parametrize(
    "dtype,path",
    [
        (torch.bfloat16, "nccl"),
        (torch.float16, "nccl"),
        (torch.bfloat16, "nccl+cublas"),
        (torch.float32, "auto"),
        (F64, "auto"),
    ],
)
def test_values_and_gradients(gpu_ranks, check, dtype, path, uneven, world):
    gpu_ranks.run(on_device, check, dtype, uneven, path, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rows,cols", [(5, 3), (3, 33000), (300, 257)])
def test_sums_are_bitwise_defined(gpu_ranks, rows, cols, world):
    gpu_ranks.run(on_device, op_checks.check_sums, rows, cols, world=world)


@pytest.mark.parametrize(
    "check",
    [
        op_checks.check_matmul_replicated,
        op_checks.check_gradcheck,
        op_checks.check_regions,
        op_checks.check_empty,
        op_checks.check_non_contiguous,
        op_behaviour.check_group_forms,
        op_behaviour.check_large,
        op_behaviour.check_cuda_graph,
        op_behaviour.check_side_stream,
        op_behaviour.check_disagreement,
        op_behaviour.check_autocast,
    ],
)
def test_check(gpu_ranks, check):
    gpu_ranks.run(on_device, check, world=2)


def test_cpu_tensors_are_refused(gpu_ranks):
    gpu_ranks.run(on_device, op_behaviour.check_wrong_device, world=2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_against_the_numpy_reference(gpu_ranks, seed, dtype, world):
    gpu_ranks.run(on_device, op_checks.check_reference, seed, dtype, world=world)
