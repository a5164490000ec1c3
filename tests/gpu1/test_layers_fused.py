"""Layers on path "fused", several processes on one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import layer_checks
import pytest
import torch
from op_checks import on_device
from streamk_cases import hopper_only

if TYPE_CHECKING:
    from tpkernels.testing import RankPool

pytestmark = [pytest.mark.gpu1, hopper_only]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("style", layer_checks.STYLES)
def test_block(shared_gpu_ranks: RankPool, style: str, world: int) -> None:
    dtype = torch.bfloat16 if world == 2 else torch.float16
    shared_gpu_ranks.run(on_device, layer_checks.check_block, "fused", style, dtype, world=world)
