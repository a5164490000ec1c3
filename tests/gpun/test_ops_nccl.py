"""Distributed operations on NCCL ranks, one GPU each: path "nccl" (our kernel) and "nccl+cublas"."""

from __future__ import annotations

import pytest
import torch
from op_checks import F64, on_device

pytestmark = pytest.mark.gpun

WORLDS = sorted({1, 2, torch.cuda.device_count()} - {0}) if torch.cuda.device_count() >= 2 else [2]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("check", ["check_all_gather_matmul", "check_reduce"])
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
    gpu_ranks.run(on_device, "check_sums", rows, cols, world=world)


@pytest.mark.parametrize(
    "check",
    [
        "check_matmul_replicated",
        "check_gradcheck",
        "check_regions",
        "check_empty",
        "check_non_contiguous",
        "check_group_forms",
        "check_large",
        "check_cuda_graph",
        "check_side_stream",
        "check_disagreement",
    ],
)
def test_check(gpu_ranks, check):
    gpu_ranks.run(on_device, check, world=2)


def test_cpu_tensors_are_refused(gpu_ranks):
    gpu_ranks.run(on_device, "check_wrong_device", world=2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_against_the_numpy_reference(gpu_ranks, seed, dtype, world):
    gpu_ranks.run(on_device, "check_reference", seed, dtype, world=world)
