"""Layers on path "fused", a rank on each GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import layer_checks
import pytest
import torch
from hopper_gpus import WORLDS, hopper_gpus
from op_checks import on_device

if TYPE_CHECKING:
    from tpkernels.testing import RankPool

pytestmark = hopper_gpus()


@pytest.mark.parametrize("world", [world for world in WORLDS if 12 % world == 0])
@pytest.mark.parametrize("style", layer_checks.STYLES)
def test_block(gpu_ranks: RankPool, style: str, world: int) -> None:
    gpu_ranks.run(on_device, layer_checks.check_block, "fused", style, torch.bfloat16, world=world)
