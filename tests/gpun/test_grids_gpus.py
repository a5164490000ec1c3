"""Layers on grids over NCCL, one GPU a rank: the checks of gloo ranks, 2 x 2 on 4 GPUs and 2 x 2 x 2 on 8."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from op_checks import on_device

sys.path.append(str(Path(__file__).resolve().parents[1] / "spawn"))
import grid_checks as checks
import grid_launches as launches
import grid_models as models
import grid_ways as ways
from grid_checks import Case
from grid_models import Kind
from hopper_gpus import hopper_gpus

from tpkernels.testing import RankPool

FOUR = [Case(4, "Linear2D"), Case(4, "Linear2p5D", (("depth", 4),)), Case(4, "LinearSpatialTemporal")]
EIGHT = [
    Case(8, "Linear2p5D", (("depth", 2),)),
    Case(8, "Linear3D"),
    Case(8, "Linear3D", (("keep_gathered", True),)),
]
LINEAR = [
    checks.check_against_dense,
    checks.check_partly_frozen,
    checks.check_dtypes,
    checks.check_main_grad,
    ways.check_shared_input,
    ways.check_training,
]
HOPPER = hopper_gpus()[-1]  # skips where path "fused" cannot run
PARTS = [models.check_norms, models.check_embedding, models.check_cross_entropy, models.check_block]


@pytest.mark.gpun(4)
@pytest.mark.parametrize("case", FOUR, ids=str)
@pytest.mark.parametrize("check", LINEAR, ids=lambda f: f.__name__)
def test_linear_on_four(gpu_ranks: RankPool, seed: int, check: object, case: Case) -> None:
    gpu_ranks.run(on_device, check, case, seed, world=4)


@pytest.mark.gpun(8)
@pytest.mark.parametrize("case", EIGHT, ids=str)
@pytest.mark.parametrize("check", LINEAR, ids=lambda f: f.__name__)
def test_linear_on_eight(gpu_ranks: RankPool, seed: int, check: object, case: Case) -> None:
    gpu_ranks.run(on_device, check, case, seed, world=8)


@pytest.mark.gpun(4)
@pytest.mark.parametrize("kind", [Kind(4, "2d"), Kind(4, "spatial_temporal")], ids=str)
@pytest.mark.parametrize("check", PARTS, ids=lambda f: f.__name__)
def test_parts_on_four(gpu_ranks: RankPool, seed: int, check: object, kind: Kind) -> None:
    gpu_ranks.run(on_device, check, kind, seed, world=4)


@pytest.mark.gpun(8)
@pytest.mark.parametrize("kind", [Kind(8, "2.5d", 2), Kind(8, "3d")], ids=str)
@pytest.mark.parametrize("check", PARTS, ids=lambda f: f.__name__)
def test_parts_on_eight(gpu_ranks: RankPool, seed: int, check: object, kind: Kind) -> None:
    gpu_ranks.run(on_device, check, kind, seed, world=8)


@HOPPER
@pytest.mark.gpun(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [c for c in launches.FUSED_CASES if c.world == 4], ids=str)
def test_launches_on_four(gpu_ranks: RankPool, seed: int, case: Case, dtype: torch.dtype) -> None:
    """Path "fused": each pass one launch."""
    gpu_ranks.run(on_device, launches.check_fused, case, seed, dtype, world=4)


@HOPPER
@pytest.mark.gpun(8)
@pytest.mark.parametrize("case", [c for c in launches.FUSED_CASES if c.world == 8], ids=str)
def test_launches_on_eight(gpu_ranks: RankPool, seed: int, case: Case) -> None:
    gpu_ranks.run(on_device, launches.check_fused, case, seed, torch.bfloat16, world=8)


@HOPPER
@pytest.mark.gpun(4)
def test_launches_in_all_ways(gpu_ranks: RankPool, seed: int) -> None:
    gpu_ranks.run(on_device, launches.check_fused_ways, launches.FUSED_CASES[0], seed, world=4)
