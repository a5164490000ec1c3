"""Linear2D, Linear2p5D, Linear3D and LinearSpatialTemporal on 4, 8, 9 and 16 gloo ranks, against dense float64."""

from __future__ import annotations

import grid_checks as checks
import grid_ways as ways
import pytest
from grid_checks import CASES, Case

from tpkernels.testing import RankPool


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "check",
    [
        checks.check_against_dense,
        checks.check_at_rest,
        checks.check_partly_frozen,
        checks.check_dtypes,
        checks.check_main_grad,
        checks.check_state,
        ways.check_copies,
        ways.check_shared_input,
    ],
    ids=lambda f: f.__name__.removeprefix("check_"),
)
def test_layer(many_ranks: RankPool, seed: int, check: object, case: Case) -> None:
    many_ranks.run(check, case, seed, world=case.world)


@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[6], CASES[9]], ids=str)
def test_ranks_that_are_late(many_ranks: RankPool, seed: int, case: Case) -> None:
    many_ranks.run(checks.check_against_dense, case, seed, world=case.world, jitter=0.2)


# One of each kind, and both orders of 3-D.
@pytest.mark.parametrize("case", [CASES[0], CASES[4], *CASES[6:9]], ids=str)
def test_training(many_ranks: RankPool, seed: int, case: Case) -> None:
    many_ranks.run(ways.check_training, case, seed, world=case.world)


@pytest.mark.parametrize("world", [1, 4, 8, 9, 16])
def test_redistribution(many_ranks: RankPool, seed: int, world: int) -> None:
    many_ranks.run(ways.check_redistribute, seed, world=world)


def test_meshes(many_ranks: RankPool, seed: int) -> None:
    many_ranks.run(ways.check_meshes, seed, world=16)


def test_methods_in_a_row(many_ranks: RankPool, seed: int) -> None:
    many_ranks.run(ways.check_in_a_row, seed, world=4)


def test_refusals(many_ranks: RankPool) -> None:
    many_ranks.run(ways.check_refusals, world=8)


def test_a_rank_that_does_not_come(many_ranks: RankPool) -> None:
    """Last: the group that was waited for is of no use any more."""
    many_ranks.run(ways.check_time_out, world=16)
    many_ranks.close()
