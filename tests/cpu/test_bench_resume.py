"""What --resume goes by: the side file of a run that ended, and whether the file fits to this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cli, environment, records, resume
from bench.errors import BenchError
from bench.plan import Settings
from bench.records import Header, Results, Row
from bench.resume import InProgress, Note

ROWS = [Row("fake", "small", "double", name, "ours", dtype="float64", world=2, run="r") for name in "abc"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r[1].jsonl"


# --- the side file -------------------------------------------------------------------------------------------------


def test_a_case_that_is_done_leaves_nothing(path: Path) -> None:
    progress = InProgress(path)
    progress.begin(ROWS)
    progress.at("a", "prepare")
    progress.clear()
    progress.clear()
    assert list(path.parent.iterdir()) == []
    assert resume.left_over(path) == []


def test_what_was_in_progress_becomes_a_crash(path: Path) -> None:
    progress = InProgress(path)
    progress.begin(ROWS)
    assert [(r.variant, r.status) for r in resume.left_over(path)] == [
        (v, "crashed") for v in "abc"
    ]  # inputs
    for variant, phase in (("a", "prepare"), ("b", "capture"), ("b", "time")):
        progress.at(variant, phase)
        reason = f"the run ended while this was measured ({phase})"
        want = replace(ROWS["abc".index(variant)], status="crashed", reason=reason)
        assert resume.left_over(path) == [want]
    progress.at("the baseline beside them", "a phase with a name that is longer than it may be, by far")
    assert [r.variant for r in resume.left_over(path)] == ["a", "b", "c"]
    progress.begin(ROWS[2:])
    progress.at("c", "check")
    assert [r.variant for r in resume.left_over(path)] == ["c"]
    resume.clear(path)
    assert resume.left_over(path) == []


def test_only_another_step_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(resume.os, "pwrite", lambda file, text, at: written.append(text))
    progress = InProgress(path)
    progress.begin(ROWS)
    for _ in range(3):
        progress.at("a", "time")
    progress.at("a", "host")
    assert len(written) == 2 and {len(text) for text in written} == {46}


@pytest.mark.parametrize(
    "text", ["", "x", "   0 check\n{", '   0 check\n{"kind": "thing"}\n', "   7 check\n"]
)
def test_a_damaged_side_file_is_nothing(path: Path, text: str) -> None:
    path.with_name(path.name + ".in-progress").write_text(text)
    assert resume.left_over(path) == []


def test_notes_of_other_ranks_are_in_the_reason(path: Path) -> None:
    progress = InProgress(path)
    progress.begin(ROWS)
    progress.at("b", "check")
    Note(1, "small", "float64", "b", "ValueError: no").write(path)
    Note(2, "small", "float64", "a", "of another step").write(path)
    path.with_name(path.name + ".rank3").write_text("{")
    assert [note.rank for note in resume.notes(path, "small", "float64", "b")] == [1]
    (row,) = resume.left_over(path)
    assert row.reason == "the run ended while this was measured (check); rank 1: ValueError: no"
    Note.remove(path, 1)
    assert resume.notes(path, "small", "float64", "b") == []
    resume.clear(path)
    assert list(path.parent.iterdir()) == []


# --- the machine ---------------------------------------------------------------------------------------------------

ENV = {"gpu": "H100", "cpu": "Xeon", "torch": "2.11.0", "nccl": "2.28.9", "commit": "abc", "dirty": False}
NOW: dict[str, Any] = {
    **{name: ENV[name] for name in ("torch", "nccl", "commit", "dirty")},
    "cards": ["H100"],
    "quick": False,
    "rounds": 0,
}


def checked(env: dict[str, Any], **now: Any) -> list[str]:
    other = Header("other", "link", "", env={"gpu": "A100"})
    known = Results(
        [other, Header("r", "fake", "", env=env)], [*ROWS, replace(ROWS[0], suite="link", run="other")]
    )
    return resume.check(Path("r.jsonl"), known, ["fake"], {**NOW, **now})


def test_the_same_machine_and_what_is_unknown_go_on() -> None:
    assert checked(ENV) == []
    assert checked({}) == []
    assert checked(ENV, cards=[], torch="", nccl="", commit="") == []
    assert checked({**ENV, "gpu": ""}, cards=["Xeon"]) == []


def test_another_card_or_torch_is_refused() -> None:
    with pytest.raises(
        BenchError, match=r"r\.jsonl was measured on H100, this is H200; choose another file with --out"
    ):
        checked(ENV, cards=["H200"])
    with pytest.raises(BenchError, match=r"measured with torch 2\.11\.0, this is 2\.12\.0; choose another"):
        checked(ENV, torch="2.12.0")
    resume.check(
        Path("r.jsonl"), Results([Header("r", "fake", "", env=ENV)]), ["fake"], {**NOW, "cards": ["H200"]}
    )


def test_another_commit_or_other_settings_are_said() -> None:
    assert checked(ENV, commit="def") == ["resume: r.jsonl has rows with commit abc, new ones are with def."]
    assert "commit abc, new ones are with abc with changes" in checked(ENV, dirty=True)[0]
    assert "NCCL 2.28.9, new ones are with 2.29" in checked(ENV, nccl="2.29")[0]
    how = {**ENV, "quick": False, "rounds": 0}
    assert "--quick False, new ones are with True" in checked(how, quick=True)[0]
    assert "--rounds 0, new ones are with 5" in checked(how, rounds=5)[0]


def test_what_is_present_agrees_with_what_ranks_record() -> None:
    env, now = environment.collect("cpu", 2), resume.present("cpu", Settings(quick=True))
    assert now["torch"] == env["torch"]
    assert now["cards"] == [records.card(env)]
    assert (now["commit"], now["dirty"], now["quick"]) == (env["commit"], env["dirty"], True)
    assert resume.present("cpu", Settings(commit="mine"))["commit"] == "mine"


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TPK_BENCH_SUITES", "fake=bench_fake_suite")
    monkeypatch.chdir(tmp_path)
    path = Path("r.jsonl")
    env = {"cpu": environment.cards("cpu")[0], "commit": "long ago"}
    records.append(path, Header("r", "fake", "", env=env))
    for case in ("small", "middle", "large"):
        for variant in ("base", "fine"):
            if (case, variant) != ("large", "fine"):
                records.append(
                    path, Row("fake", case, "double", variant, "peer", dtype="float64", world=2, run="r")
                )
    return path


def test_a_left_over_side_file_is_written_and_left_out(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = Row("fake", "large", "double", "fine", "ours", dtype="float64", world=2, run="r")
    progress = InProgress(fake)
    progress.begin([lost])
    progress.at("fine", "check")
    before = fake.read_bytes()
    arguments = ["fake", "--device", "cpu", "--out", str(fake), "--resume"]
    assert cli.main([*arguments, "--list"]) == 0
    assert fake.read_bytes() == before and resume.left_over(fake)
    assert cli.main([*arguments, "--list", "--retry"]) == 0
    assert "large" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert "everything asked for is in r.jsonl already" in said.out
    assert "fake large, fine: CRASHED: the run ended while this was measured (check)" in said.err
    assert "warning: resume: r.jsonl has rows with commit long ago" in said.err
    row = records.load(fake).rows[-1]
    assert (row.variant, row.status, row.run) == ("fine", "crashed", "r")
    assert list(Path().iterdir()) == [fake]


def test_a_row_that_was_written_after_all_stays(fake: Path) -> None:
    rows = records.load(fake).rows
    InProgress(fake).begin(rows[-1:])
    arguments = ["fake", "--device", "cpu", "--out", str(fake), "--resume", "--case", "small"]
    assert cli.main(arguments) == 0
    assert records.load(fake).rows == rows and list(Path().iterdir()) == [fake]


def test_another_card_ends_with_a_sentence(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.append(fake, Header("s", "fake", "", env={"gpu": "NVIDIA H200"}))
    records.append(fake, Row("fake", "small", "double", "base", "peer", run="s"))
    assert cli.main(["fake", "--device", "cpu", "--out", str(fake), "--resume"]) == 2
    assert "was measured on NVIDIA H200, this is" in capsys.readouterr().err
