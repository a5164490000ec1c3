"""Fixtures of the tests for one GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tpkernels.testing import RankPool

# Streams that share a hardware queue wait for each other, and virtual ranks have more of them than there are queues.
# Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_broken_by: list[str] = []


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@pytest.fixture
def cublas_sums_in_fp32() -> Iterator[None]:
    """cuBLAS may not reduce in 16 bits."""
    settings = torch.backends.cuda.matmul
    before = (
        settings.allow_bf16_reduced_precision_reduction,
        settings.allow_fp16_reduced_precision_reduction,
    )
    settings.allow_bf16_reduced_precision_reduction = False
    settings.allow_fp16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before


@pytest.fixture(autouse=True)
def _errors_belong_to_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Waits for the device after each test. A CUDA error lasts as long as the process: what follows is skipped."""
    if _broken_by:
        pytest.skip(f"CUDA is unusable in this process since {_broken_by[0]}")
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        _broken_by.append(request.node.nodeid)
        fault = torch.ops.tpkernels.comm_fault()
        pytest.fail(f"CUDA reports, once all kernels have run: {fault or error}")


@pytest.fixture(scope="module")
def shared_gpu_ranks() -> Iterator[RankPool]:
    """Pool of 4 processes on one GPU; see RankPool's ``share_gpu``. For one file: they hold memory of the GPU."""
    from tpkernels.testing import RankPool

    seed = int(os.environ["TPK_TEST_SEED"])
    with RankPool(4, share_gpu=True, timeout=150.0, seed=seed, env={"TPK_COMM_TIMEOUT_S": "60"}) as pool:
        yield pool
