"""Whole runs in processes of their own: crashes, hangs, interruptions, torchrun, and every suite small on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import records, suites
from bench.blocks.variants import COMPILED
from bench.records import Results, Row

ROOT = Path(__file__).parents[2]
CASES = ["small", "middle", "large"]


def start(*arguments: str, launcher: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("FAKE_")}
    env |= {"TPK_BENCH_SUITES": "fake=bench_fake_suite", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, *launcher, "-m", "bench", *arguments]
    return subprocess.Popen(
        command,
        env={**env, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore it, and what they start inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str], *, expect: int = 0) -> str:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == expect, f"{out}\n{err}"
    return out + err


def measure(path: Path, *arguments: str, expect: int = 0, **variables: str) -> tuple[Results, str]:
    said = finish(
        start("fake", "--device", "cpu", "--out", str(path), *arguments, **variables), expect=expect
    )
    return records.load(path), said


def statuses(results: Results, variant: str) -> list[tuple[str, str]]:
    return [(row.case, row.status) for row in results.latest() if row.variant == variant]


def everywhere(status: str) -> list[tuple[str, str]]:
    return [(case, status) for case in CASES]


def test_variants_that_go_wrong_leave_the_others_alone_and_ranks_are_restarted(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    variants = "base,hangs,wrong,uneven,crashes,fine"
    results, said = measure(
        path, "--set", "small", "--time-limit", "5", FAKE_VARIANTS=variants, FAKE_TROUBLE_RANK="1"
    )
    found = {row.variant: (row.status, row.reason) for row in results.rows if row.op == "double"}
    assert found.pop("base") == found.pop("fine") == found.pop("base again") == ("ok", "")
    assert found.pop("wrong") == ("failed", "relative error 5.0e-02, allowed 1.0e-12")
    assert found.pop("uneven") == ("error", "rank 1: ValueError: only here")
    assert found.pop("crashes") == ("crashed", "rank 1 was ended by SIGSEGV")
    status, reason = found.pop("hangs")
    assert status == "timeout" and not found
    assert "no sign of life for 5 s (check); rank 1 was in bench_fake_suite.py" in reason
    assert results.footers[-1].complete
    assert "r.logs" in said and len(list(path.with_suffix(".logs").glob("*-rank1.log"))) == 2
    header = results.headers[0]
    assert (header.env["world"], header.env["multicast"]["NCCL_NVLS_ENABLE"]) == (2, "0")
    assert {row.run for row in results.rows} == {header.run}


def test_isolated_variants_run_beside_the_baseline_and_after_two_crashes_not_again(tmp_path: Path) -> None:
    variants = "base,crashes isolated,fine isolated"
    results, _ = measure(tmp_path / "r.jsonl", "--gpus", "1", FAKE_VARIANTS=variants)
    assert statuses(results, "base") == statuses(results, "fine isolated") == everywhere("ok")
    assert all(r.extra["baseline_us"] > 0 for r in results.rows if r.variant == "fine isolated")
    assert sum(row.variant == "base" for row in results.rows) == 3
    assert statuses(results, "crashes isolated") == [
        ("small", "crashed"),
        ("middle", "crashed"),
        ("large", "skipped"),
    ]
    assert "twice before" in next(row.reason for row in results.rows if row.status == "skipped")
    assert [row.params["cases"] for row in results.rows if row.op == "fit"] == [3]


def test_a_rank_that_raises_before_a_collective_does_not_cost_the_time_limit(tmp_path: Path) -> None:
    arguments = ("--set", "small", "--time-limit", "40")  # of which it takes a quarter
    results, _ = measure(tmp_path / "r.jsonl", *arguments, FAKE_VARIANTS="base,waits", FAKE_TROUBLE_RANK="0")
    assert statuses(results, "waits") == [("small", "error")]
    assert statuses(results, "base") == [("small", "ok")]
    assert "rank 0: ValueError: gone before the collective" in next(
        r.reason for r in results.rows if r.reason
    )


def test_an_interrupted_run_is_kept_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    arguments = ("fake", "--device", "cpu", "--gpus", "1", "--out", str(path))
    process = start(*arguments, FAKE_VARIANTS="base,slow", FAKE_SLOW="0.4")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (
        not path.exists() or b'"variant": "slow"' not in path.read_bytes()
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = finish(process, expect=130)
    assert f"--out {path} --resume" in said
    first = records.load(path)
    assert [f.complete for f in first.footers] == [False]
    assert statuses(first, "slow")[0] == ("small", "ok") and len(statuses(first, "slow")) < 3

    with path.open("ab") as file:  # as if it had been killed while writing
        file.write(b'{"kind": "row", "suite": "fa')
    said = finish(start(*arguments, "--resume", FAKE_VARIANTS="base,slow", FAKE_SLOW="0.01"))
    results = records.load(path)
    assert statuses(results, "slow") == statuses(results, "base") == everywhere("ok")
    assert [f.complete for f in results.footers] == [False, True]
    kept = [row for row in first.rows if row.variant == "slow"]
    assert [row for row in results.rows if row.variant == "slow"][: len(kept)] == kept
    assert len([row for row in results.rows if row.variant == "slow"]) == 3


def test_the_ranks_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    arguments = ("fake", "--device", "cpu", "--gpus", "1", "--out", str(path))
    mark = str(tmp_path)  # in the environment of the ranks alone
    process = start(*arguments, FAKE_VARIANTS="slow", FAKE_SLOW="30", FAKE_MARK=mark)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(_marked(mark)) < 2:
        time.sleep(0.1)
    assert len(_marked(mark)) == 2
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _marked(mark):
        time.sleep(0.1)
    assert _marked(mark) == []


def _marked(mark: str) -> list[int]:
    """Processes that have FAKE_MARK in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"FAKE_MARK={mark}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_spent_budget_is_said_and_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    results, said = measure(path, "--gpus", "1", "--budget", "0.1", FAKE_VARIANTS="base")
    assert "the time budget is spent" in said and "--resume" in said
    assert results.rows == [] and not results.footers[-1].complete


def test_several_worlds_one_after_the_other_and_the_exit_code_of_a_failure_of_ours(tmp_path: Path) -> None:
    variables = {"FAKE_VARIANTS": "base,fine", "FAKE_FINE_IS": "wrong"}
    results, said = measure(tmp_path / "r.jsonl", "--gpus", "1,2", "--case", "small", expect=1, **variables)
    found = [(row.variant, row.world) for row in results.rows if row.role != "noise"]
    assert found == [("base", 1), ("fine", 1), ("base", 2), ("fine", 2), ("fit", 1), ("fit", 2)]
    assert said.count("fake small, fine: FAILED: relative error") == 2


def torchrun(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    )
    return start(*arguments, launcher=launcher, **variables)


def test_ranks_started_by_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    said = finish(
        torchrun(
            "fake", "--device", "cpu", "--out", str(path), FAKE_VARIANTS="base,fine,uneven,alone isolated"
        )
    )
    results = records.load(path)
    assert statuses(results, "base") == statuses(results, "fine") == everywhere("ok")
    assert {row.world for row in results.rows} == {2}
    assert said.count("rows in") == 1
    assert "alone isolated: runs in processes of its own" in said
    assert [f.complete for f in results.footers] == [True]
    # What is left is isolated: not for these processes.
    variants = "base,fine,uneven,alone isolated"
    said = finish(torchrun("fake", "--device", "cpu", "--out", str(path), "--resume", FAKE_VARIANTS=variants))
    assert said.count("alone isolated: runs in processes of its own") == 1
    assert records.load(path) == results


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_crash_under_torchrun_is_left_out_on_resume(rank: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    arguments = ("fake", "--device", "cpu", "--set", "small", "--out", str(path))
    variables = {"FAKE_VARIANTS": "base,exits,fine", "FAKE_TROUBLE_RANK": rank}
    finish(torchrun(*arguments, **variables), expect=1)
    finish(torchrun(*arguments, "--resume", **variables))
    results = records.load(path)
    assert statuses(results, "exits") == [("small", "crashed")]
    assert statuses(results, "base") == statuses(results, "fine") == [("small", "ok")]
    (crashed,) = [row for row in results.rows if row.variant == "exits"]
    assert crashed.run == results.headers[0].run
    assert "the run ended while this was measured (check)" in crashed.reason or "RanksLost" in crashed.reason
    assert list(tmp_path.iterdir()) == [path]


def test_a_rank_that_raises_under_torchrun_says_why(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    arguments = ("fake", "--device", "cpu", "--set", "small", "--out", str(path), "--time-limit", "20")
    variables = {"FAKE_VARIANTS": "base,waits,fine", "FAKE_TROUBLE_RANK": "1"}
    finish(torchrun(*arguments, **variables), expect=1)
    (row,) = records.load(path).rows
    assert (row.variant, row.status) == ("waits", "error")
    assert row.reason == "rank 1: ValueError: gone before the collective; the other ranks waited for it"
    finish(torchrun(*arguments, "--resume", **variables))
    assert statuses(records.load(path), "fine") == [("small", "ok")]


def test_an_interrupted_torchrun_blames_no_variant(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    process = torchrun("fake", "--device", "cpu", "--out", str(path), FAKE_VARIANTS="slow", FAKE_SLOW="0.5")
    side = tmp_path / "r.jsonl.in-progress"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (side.exists() and "check" in side.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not side.exists() and records.load(path).rows == []


def test_a_hang_under_torchrun_is_ended_by_the_watchdog_and_left_out_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    arguments = ("fake", "--device", "cpu", "--set", "small", "--out", str(path), "--time-limit", "4")
    said = finish(torchrun(*arguments, FAKE_VARIANTS="base,fine,hangs", FAKE_TROUBLE_RANK="1"), expect=1)
    assert "small, hangs: no sign of life for 4 s" in said and "again with --resume" in said
    assert statuses(records.load(path), "hangs") == [("small", "timeout")]
    finish(torchrun(*arguments, "--resume", FAKE_VARIANTS="base,fine,hangs", FAKE_TROUBLE_RANK="1"))
    results = records.load(path)
    assert statuses(results, "base") == statuses(results, "fine") == [("small", "ok")]


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_suite_runs_small_on_the_cpu(name: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    # Compilation has tests of its own.
    skip = ("--skip-peer", ",".join(COMPILED)) if name in ("layer", "train") else ()
    finish(start(name, "--device", "cpu", "--rounds", "2", "--out", str(path), *skip))
    results = records.load(path)
    assert results.footers[-1].complete
    assert {row.status for row in results.rows} <= {"ok", "skipped"}
    measured: list[Row] = [row for row in results.rows if row.us is not None]
    assert measured and {row.suite for row in measured} == {name}
    assert any(row.role == "ours" for row in measured) or name == "link"
    assert all(row.error is None or row.error <= (row.tolerance or 0) for row in measured)
    assert all(row.reason for row in results.rows if row.status == "skipped")
