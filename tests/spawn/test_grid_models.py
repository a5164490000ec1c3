"""Norms, embedding, cross-entropy, transformer blocks and a small language model on grids of gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grid_models as checks
import pytest
import torch
from grid_models import KINDS, Kind
from pages import snippets

from tpkernels.testing import RankContext, RankPool


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "check",
    [checks.check_norms, checks.check_embedding, checks.check_cross_entropy, checks.check_block],
    ids=lambda f: f.__name__.removeprefix("check_"),
)
def test_part(many_ranks: RankPool, seed: int, check: object, kind: Kind) -> None:
    many_ranks.run(check, kind, seed, world=kind.world)


@pytest.mark.parametrize(
    "kind, steps",
    # 8 ranks on the 2 cores of a small machine take their time for messages: fewer steps. (50 have been run.)
    [(KINDS[0], 50), (KINDS[3], 15), (KINDS[4], 15), (KINDS[5], 50)],
    ids=str,
)
def test_training(many_ranks: RankPool, seed: int, kind: Kind, steps: int) -> None:
    many_ranks.run(checks.check_training, kind, steps, seed, world=kind.world)


def test_compiled(many_ranks: RankPool, seed: int) -> None:
    many_ranks.run(checks.check_compiled, KINDS[0], seed, world=4)


def test_refusals(many_ranks: RankPool) -> None:
    many_ranks.run(checks.check_refusals, world=8)


def run_snippets(ctx: RankContext, parts: list[str], folder: str) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"group": ctx.group, "folder": folder, "batch": torch.randn(8, 1024)}
    for part in parts:
        exec(compile(part, "grids.md", "exec"), names)
    assert names["y"].shape[0] in (2, 4)


def test_the_page(many_ranks: RankPool, tmp_path: Path) -> None:
    """docs/grids.md: its snippets run as they are, on 4 ranks."""
    code = snippets("grids.md")
    assert len(code) == 3
    many_ranks.run(run_snippets, code, str(tmp_path), world=4)
