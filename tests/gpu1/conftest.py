"""Fixtures of the tests for one GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)
