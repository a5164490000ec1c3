"""The collectives below path "nccl" on GPUs of their own, bit for bit; the checks are in tests/collective_checks.py."""

from __future__ import annotations

import collective_checks
import pytest
import torch
from op_checks import on_device

pytestmark = pytest.mark.gpun

WORLDS = list(range(2, torch.cuda.device_count() + 1)) or [2]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "check",
    [
        collective_checks.check_reduce_scatter,
        collective_checks.check_all_reduce,
        collective_checks.check_all_gather,
    ],
)
def test_bits(gpu_ranks, seed, check, dtype, world):
    gpu_ranks.run(on_device, check, dtype, seed, world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_captured_in_a_graph(gpu_ranks, seed, world):
    gpu_ranks.run(on_device, collective_checks.check_graph, seed, world=world)
