"""Layers on path "fused" without a GPU."""

from __future__ import annotations

import layer_checks
import pytest
import torch
from fused_fakes import on_fakes

from tpkernels.testing import RankPool


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("style", layer_checks.STYLES)
def test_block(ranks: RankPool, style: str, world: int) -> None:
    ranks.run(on_fakes, layer_checks.check_block, "fused", style, torch.bfloat16, world=world)
