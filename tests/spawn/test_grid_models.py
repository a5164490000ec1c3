"""Norms, embedding, cross-entropy, transformer blocks and a small language model on grids of gloo ranks."""

from __future__ import annotations

import grid_models as checks
import pytest
from grid_models import KINDS, Kind

from tpkernels.testing import RankPool


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "check",
    [checks.check_norms, checks.check_embedding, checks.check_cross_entropy, checks.check_block],
    ids=lambda f: f.__name__.removeprefix("check_"),
)
def test_part(many_ranks: RankPool, seed: int, check: object, kind: Kind) -> None:
    many_ranks.run(check, kind, seed, world=kind.world)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, steps",
    # 8 ranks on the 2 cores of a small machine take their time for messages: fewer steps.
    [(KINDS[0], 50), (KINDS[3], 20), (KINDS[4], 20), (KINDS[5], 50)],
    ids=str,
)
def test_training(many_ranks: RankPool, seed: int, kind: Kind, steps: int) -> None:
    many_ranks.run(checks.check_training, kind, steps, seed, world=kind.world)


def test_refusals(many_ranks: RankPool) -> None:
    many_ranks.run(checks.check_refusals, world=8)
