"""The demo on GPUs: trained over NCCL, held step by step to the unsharded model within its stated tolerances."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tpkernels.demo.config import tolerance

pytestmark = pytest.mark.gpun

ROOT = Path(__file__).parents[2]
WORLD = 4 if torch.cuda.device_count() >= 4 else 2


@pytest.mark.parametrize(
    ("dtype", "path", "gather"),
    [
        ("float64", "auto", "nccl+cublas"),
        ("bfloat16", "nccl", "nccl+streamk"),
        ("float16", "nccl+cublas", "nccl+cublas"),
    ],
)
def test_loss_equals_the_unsharded_one(tmp_path: Path, dtype: str, path: str, gather: str) -> None:
    env = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TPK_PATH")
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    options = ["--tp", str(WORLD), "--size", "small", "--steps", "30", "--dtype", dtype, "--path", path]
    command = [sys.executable, "-m", "tpkernels.demo", *options, "--out", str(tmp_path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    bound = tolerance(dtype)
    assert summary["max_loss_difference"] <= bound.loss
    assert summary["first_gradients"]["difference"] <= bound.grad
    paths = {(row["phase"], row["op"]): row["path"] for row in summary["paths"]}
    assert paths["forward", "all_gather_matmul"] == gather
    assert paths["backward", "matmul_reduce_scatter"] == gather
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 1  # it learns
