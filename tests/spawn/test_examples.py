"""The programs in examples/ run, on every grid with the same losses, and go on from each other's checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "examples").exists(), reason="examples/ is not beside the tests")


def run(ranks: int, program: str, *args: object) -> str:
    """What it prints, on stdout and stderr."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [sys.executable, *launch, str(ROOT / "examples" / program), *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", printed)}


def test_training_goes_on_on_another_grid_and_generates(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = run(4, "train.py", "--tp", 2, "--steps", 6, "--checkpoint", kept)
    assert "all_gather_matmul: gloo" in first and "matmul_reduce_scatter: gloo" in first
    assert "Warning" not in first, first
    second = run(2, "train.py", "--tp", 1, "--steps", 12, "--checkpoint", kept)
    whole = losses(run(1, "train.py", "--steps", 12))
    assert losses(first).keys() == {0, 5} and losses(second).keys() == {10, 11}
    for step, loss in {**losses(first), **losses(second)}.items():
        if step in whole:
            assert loss == pytest.approx(whole[step], abs=2e-4), step
    assert whole[11] < whole[0] - 1, "it learns"
    text = [run(ranks, "generate.py", "--checkpoint", kept, "--bytes", 6).splitlines()[0] for ranks in (1, 2)]
    assert text[0].startswith("def ") and text[0] == text[1]


def test_a_grid_that_cannot_be() -> None:
    with pytest.raises(AssertionError, match="--tp 3: 2 ranks must divide by it"):
        run(2, "train.py", "--tp", 3)
