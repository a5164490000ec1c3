"""Fixtures of the tests for one GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
        pytest.fail(f"CUDA reports, once all kernels have run: {error}")
