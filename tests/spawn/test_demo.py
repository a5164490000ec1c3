"""The demo as a user runs it: processes, exit codes, files."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tpkernels.demo import data, dense

TINY = ["--device", "cpu", "--size", "tiny", "--steps", "3", "--batch", "2", "--seq", "32", "--sample", "6"]
TIMEOUT = 280
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    env = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TPK_PATH")
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env["OMP_NUM_THREADS"] = "1"
    return env


def python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def torchrun(ranks: int, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    return python("-m", "torch.distributed.run", *options, *arguments, cwd=cwd)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("tp", "options"),
    [
        (2, []),
        (2, ["--no-sequence-parallel"]),
        # 32 bytes over 3 ranks: shards of 11, 11 and 10 rows; every product by our Stream-K executor.
        (3, ["--path", "gloo+streamk"]),
    ],
)
def test_sharded_equals_unsharded_in_float64(tmp_path: Path, tp: int, options: list[str]) -> None:
    run = python("-m", "tpkernels.demo", *TINY, "--dtype", "float64", "--tp", str(tp), *options, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "sharded and unsharded model agree" in run.stdout
    assert "Traceback" not in run.stderr
    out = tmp_path / "demo-out"
    summary = json.loads((out / "summary.json").read_text())
    steps = lines_of(out / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(record["difference"] < 1e-9 for record in steps)
    assert summary["max_loss_difference"] < 1e-9
    assert summary["first_gradients"]["difference"] < 1e-11
    assert summary["weights"]["difference"] < 1e-9
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    paths = {(row["phase"], row["op"]): row["path"] for row in summary["paths"]}
    gather = "matmul_replicated" if "--no-sequence-parallel" in options else "all_gather_matmul"
    assert ("forward", gather) in paths
    assert ("backward", "matmul") in paths
    if "--path" in options:
        assert paths["forward", gather] == "gloo+streamk"

    # The checkpoint is a plain PyTorch model: it gives the held-out loss that the sharded model gave.
    model = dense.load_checkpoint(out)
    batches = data.heldout_batches(data.load_corpus().heldout, batch=2, seq=32, count=8)
    with torch.no_grad():
        loss = statistics.fmean(float(model.loss(tokens, targets)) for tokens, targets in batches)
    assert abs(loss - summary["heldout_loss"]) < 1e-11
    if tp == 2 and not options:
        sample = python("-m", "tpkernels.demo.dense", out, "def f(", "--length", "5", cwd=tmp_path)
        assert sample.returncode == 0, sample.stderr
        assert sample.stdout.startswith("def f(")


def test_under_torchrun_in_bfloat16_without_twin(tmp_path: Path) -> None:
    run = torchrun(
        2, "-m", "tpkernels.demo", *TINY, "--dtype", "bfloat16", "--no-dense", "--out", "o", cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["options"]["tp"] == 2
    assert summary["max_loss_difference"] is None
    assert dense.load_checkpoint(tmp_path / "o").head.weight.dtype == torch.bfloat16


def test_launcher_with_another_world(tmp_path: Path) -> None:
    run = torchrun(2, "-m", "tpkernels.demo", *TINY, "--tp", "3", cwd=tmp_path)
    assert run.returncode != 0
    sentence = "error: --tp 3 was asked for, but the launcher started 2 ranks"
    assert run.stderr.count(sentence) == 1, run.stderr


def test_user_errors_are_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = python("-m", "tpkernels.demo", *TINY, "--out", "file/out", cwd=tmp_path)
    assert run.returncode == 1
    assert run.stderr.startswith("error: --out file/out cannot be written")
    assert len(run.stderr.splitlines()) == 1
    assert run.stdout == ""


SABOTAGE = """
import os, sys
import tpkernels.demo.train as train
from tpkernels.demo.__main__ import main

def crash(self, step):
    raise ValueError("made to fail")

whole = train.ParallelModel.loss
if sys.argv[1] == "crash" and os.environ["RANK"] == "1":
    train.Trainer._step = crash
if sys.argv[1] == "loss":
    train.ParallelModel.loss = lambda self, tokens, targets: whole(self, tokens, targets) + 1e-6
if sys.argv[1] == "gradient":  # the same loss, gradients too large by a millionth
    def loss(self, tokens, targets):
        value = whole(self, tokens, targets)
        return value + 1e-6 * (value - value.detach())
    train.ParallelModel.loss = loss
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("crash", "ValueError: made to fail"),
        ("loss", "error: at step 1 the sharded loss is"),
        ("gradient", "error: the first gradient of"),
    ],
)
def test_a_wrong_or_failing_rank_ends_the_run(tmp_path: Path, how: str, sentence: str) -> None:
    script = tmp_path / "sabotage.py"
    script.write_text(SABOTAGE)
    run = torchrun(2, script, how, *TINY, "--dtype", "float64", "--out", tmp_path / "o", cwd=tmp_path)
    assert run.returncode != 0
    assert run.stderr.count(sentence) == 1, run.stderr
    assert not (tmp_path / "o" / "model.pt").exists()
