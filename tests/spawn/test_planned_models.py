"""``tpkernels.build``: models of plans, on gloo ranks, equal to the unsharded one."""

from __future__ import annotations

from pathlib import Path

import planned_models as checks
import pytest
from pages import snippets

from tpkernels.testing import RankPool


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_one_strategy_throughout(many_ranks: RankPool, seed: int, style: str) -> None:
    many_ranks.run(checks.check_alone, style, seed, world=4)


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_strategies_mixed(many_ranks: RankPool, seed: int, style: str) -> None:
    many_ranks.run(checks.check_mixed, style, [seed, seed + 1], world=4)


def test_strategies_of_eight_ranks_mixed(many_ranks: RankPool, seed: int) -> None:
    """3-D and 2.5-D among them."""
    many_ranks.run(checks.check_mixed, "llama", [seed], world=8)


@pytest.mark.parametrize(("style", "world"), [("llama", 4), ("gpt", 4), ("llama", 8)])
def test_figures(many_ranks: RankPool, style: str, world: int) -> None:
    many_ranks.run(checks.check_figures, style, world=world)


def test_what_the_planner_chooses(many_ranks: RankPool, seed: int) -> None:
    many_ranks.run(checks.check_planned, seed, world=4)


def test_on_the_whole_job(ranks: RankPool, seed: int) -> None:
    """Whose groups are made otherwise than those of a part of it, as which the others run."""
    ranks.run(checks.check_mixed, "llama", [seed], world=4)


def test_training(many_ranks: RankPool, seed: int) -> None:
    many_ranks.run(checks.check_training, seed, world=4)


def test_the_page(many_ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    many_ranks.run(checks.check_page, *snippets("planner.md"), str(tmp_path), world=4)


def test_refusals(many_ranks: RankPool) -> None:
    many_ranks.run(checks.check_refusals, world=4)
