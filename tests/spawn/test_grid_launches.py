"""Grids whose results stay where they are made: by messages on gloo, and on path "fused" without a GPU."""

from __future__ import annotations

import grid_launches as checks
import pytest
import torch
from fused_fakes import on_fakes
from grid_checks import Case
from grid_launches import CASES, FUSED_CASES

from tpkernels.testing import RankPool


@pytest.mark.parametrize("case", CASES, ids=str)
def test_messages(many_ranks: RankPool, seed: int, case: Case) -> None:
    many_ranks.run(checks.check_messages, case, seed, world=case.world)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FUSED_CASES, ids=str)
def test_fused(many_ranks: RankPool, seed: int, case: Case, dtype: torch.dtype) -> None:
    many_ranks.run(on_fakes, checks.check_fused, case, seed, dtype, world=case.world)


@pytest.mark.parametrize("case", FUSED_CASES[::3], ids=str)
def test_fused_ways(many_ranks: RankPool, seed: int, case: Case) -> None:
    many_ranks.run(on_fakes, checks.check_fused_ways, case, seed, world=case.world)


def test_refused(many_ranks: RankPool) -> None:
    many_ranks.run(checks.check_refused, world=8)


@pytest.mark.parametrize("method", ["2d", "spatial_temporal"])
def test_fused_block(many_ranks: RankPool, seed: int, method: str) -> None:
    many_ranks.run(on_fakes, checks.check_block, method, seed, world=4)


def test_paths_that_differ(many_ranks: RankPool) -> None:
    many_ranks.run(on_fakes, checks.check_paths_differ, world=4)
