"""Command line, plans, the supervisor's decisions, and what is shown: nothing here starts a process that measures."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_fake_suite import FakeSuite

from bench import cli, environment, live, plan, records, start, suites
from bench.errors import BenchError
from bench.plan import Item, Job, Profile, Selection, Settings, Strikes
from bench.ranks import FOLLOWED
from bench.records import Header, Row, Stats
from bench.suite import Options
from bench.supervisor import Step, find_failure

OPTIONS = Options(device="cpu", world=2, small=True)


@pytest.fixture(autouse=True)
def fake_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TPK_BENCH_SUITES", "fake=bench_fake_suite")
    monkeypatch.setattr(FakeSuite, "variant_names", ("base", "fine", "alone isolated"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence that these arguments give."""
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gem"], "suite: 'gem' is not known.*Did you mean 'gemm'"),
        (["link,gem"], "suite: 'gem' is not known"),
        (["fake", "--device", "cpu", "--peer", "bse"], "variant of fake: 'bse'.*Did you mean 'base'"),
        (["fake", "--device", "cpu", "--skip-peer", "nix"], "variant of fake: 'nix' is not known"),
        (["fake", "--device", "cpu", "--set", "smal"], "set: 'smal'.*Did you mean 'small'"),
        (["fake", "--device", "cpu", "--dtype", "int8"], "dtype: expected float64, got int8"),
        (["fake", "--device", "cpu", "--case", "smalll"], "none of 3 cases.*The nearest is 'small'"),
        (["fake", "--gpus", "64"], r"gpus: 64 asked for, \d+ found"),
        (["fake", "--device", "cuda", "--gpus", "64"], r"gpus: 64 asked for, \d+ found.*use --"),
        (["gemm", "--device", "cpu", "--gpus", "2"], "gemm runs on one GPU; leave --gpus out"),
        (["overlap", "--device", "cpu", "--gpus", "1"], "overlap: needs 2 or more ranks, got 1"),
        (["fake", "--device", "cpu", "--resume", "--out", "nowhere.jsonl"], r"nowhere\.jsonl does not exist"),
        (["fake", "--device", "cpu", "--profile", "kineto"], "exactly one case and one variant, got 3 cases"),
        (["report", "nowhere.jsonl"], "nowhere.jsonl"),
        (["compare", "nowhere.jsonl", "nix.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    import re

    assert re.search(sentence, fails(capsys, *arguments))


@pytest.mark.parametrize(
    "arguments", [[], ["fake", "--gpus", "0"], ["fake", "--time-limit", "-1"], ["fake", "--rows", "x"]]
)
def test_what_argparse_refuses_ends_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "bench: error" in capsys.readouterr().err


def test_a_file_of_another_schema_is_refused_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.jsonl").write_text('{"kind": "header", "run": "r", "suite": "s", "started": "", "schema": 0}\n')
    assert "schema 0" in fails(capsys, "fake", "--device", "cpu", "--out", "old.jsonl")


def test_help_and_list_import_no_torch() -> None:
    code = (
        "import sys\nfrom bench.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    root = Path(records.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    for arguments in (["--help"], ["report", "--help"], ["list", "all"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert "gemm" in result.stdout or arguments[0] == "report"


def test_list_shows_cases_and_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fake", "--device", "cpu", "--list"]) == 0
    said = capsys.readouterr().out
    assert "3 cases on 2 cpu rank(s)" in said and "middle" in said
    assert "in processes of its own: alone isolated" in said
    assert "base" in said and "(baseline)" in said
    assert cli.main(["list", "fake", "--device", "cuda", "--gpus", "8"]) == 0  # no GPU needed
    assert "3 cases on 8 cuda rank(s)" in capsys.readouterr().out


def test_report_and_compare_get_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import compare, report

    got: dict[str, Any] = {}
    monkeypatch.setattr(report, "run", lambda *a, **k: got.update(report=(a, k)) or 0)  # type: ignore[func-returns-value]
    monkeypatch.setattr(compare, "run", lambda *a, **k: got.update(compare=(a, k)) or 1)  # type: ignore[func-returns-value]
    assert cli.main(["report", "a.jsonl", "b.jsonl", "--out", "page.html"]) == 0
    files, options = got["report"]
    assert files == ([Path("a.jsonl"), Path("b.jsonl")],)
    assert (options["out"], options["markdown"], options["readme"]) == (Path("page.html"), None, None)
    assert cli.main(["compare", "a.jsonl", "b.jsonl", "--threshold", "0.1", "--relative-to", "cublas"]) == 1
    assert got["compare"][0] == (Path("a.jsonl"), Path("b.jsonl"))
    assert (got["compare"][1]["threshold"], got["compare"][1]["relative_to"]) == (0.1, "cublas")


def test_torchrun_decides_the_world(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["fake", "--device", "cpu", "--list"]) == 0
    assert "on 4 cpu rank(s)" in capsys.readouterr().out
    assert "torchrun started 4 ranks" in fails(capsys, "fake", "--device", "cpu", "--gpus", "2")
    assert "gemm: runs in one process" in fails(capsys, "gemm", "--device", "cpu")


def test_suites_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suites.load("fake").name == "fake"
    assert [suites.load(name).name for name in suites.SUITES] == list(suites.SUITES)
    monkeypatch.setenv("TPK_BENCH_SUITES", "mine=no_such_module")
    with pytest.raises(BenchError, match="'no_such_module' of suite 'mine' is not importable"):
        suites.load("mine")
    monkeypatch.setenv("TPK_BENCH_SUITES", "mine=json")
    with pytest.raises(BenchError, match="expected an instance of Suite named SUITE"):
        suites.load("mine")
    monkeypatch.setenv("TPK_BENCH_SUITES", "mine")
    with pytest.raises(BenchError, match="expected name=module, got 'mine'"):
        suites.load("mine")


def plans(*, done: Sequence[plan.Key] = (), **selection: Any) -> list[Job]:
    return plan.plan(FakeSuite(), OPTIONS, Selection(**selection), set(done), Settings())


def test_a_plan_has_the_main_job_and_one_for_each_isolated_variant() -> None:
    main, alone = plans()
    assert [item.case for item in main.items] == ["small", "middle", "large"]
    assert {(item.variants, item.companion) for item in main.items} == {(("base", "fine"), "")}
    assert (main.isolated, alone.isolated) == ("", "alone isolated")
    assert {(item.variants, item.companion) for item in alone.items} == {(("alone isolated",), "base")}
    assert alone.items[0].runs == ("base", "alone isolated")


def test_selections() -> None:
    assert [i.case for i in plans(cases=("MID", "la*"))[0].items] == ["middle", "large"]
    assert [job.items[0].variants for job in plans(variants=("fine",))] == [("base", "fine")]
    assert [job.items[0].variants for job in plans(skip=("base", "alone isolated"))] == [("fine",)]
    assert plans(skip=("base",))[0].items[0].companion == ""
    assert [job.isolated for job in plans(variants=("alone isolated",))] == ["", "alone isolated"]


def test_what_is_done_is_left_out_and_the_baseline_runs_beside_the_rest() -> None:
    def key(case: str, variant: str) -> plan.Key:
        return ("fake", case, "float64", 2, variant)

    main, _ = plans(done=[key("small", "base"), key("middle", "base"), key("middle", "fine")])
    assert [(i.case, i.variants, i.companion) for i in main.items] == [
        ("small", ("fine",), "base"),
        ("large", ("base", "fine"), ""),
    ]
    everything = [key(c, v) for c in ("small", "middle", "large") for v in ("base", "fine", "alone isolated")]
    assert plans(done=everything) == []


def test_retry_measures_again_what_did_not_come_to_an_end() -> None:
    reasons = {"ok": "", "failed": "", "skipped": "", "timeout": "", "crashed": "", "error": ""}
    rows = [Row("fake", status, "double", "fine", "ours", status=status) for status in reasons]  # type: ignore[arg-type]
    rows.append(Row("fake", "out", "double", "fine", "ours", status="skipped", reason=Strikes().reason))
    assert {key[1] for key in plan.measured(rows, retry=False)} == {*reasons, "out"}
    assert {key[1] for key in plan.measured(rows, retry=True)} == {"ok", "skipped"}


def test_a_baseline_without_its_second_row_is_not_done() -> None:
    base = Row("fake", "small", "double", "base", "peer", us=Stats.of([1.0]), extra={"calls": 3})
    again = replace(base, variant="base again", role="noise", partner="base")
    fine = replace(base, variant="fine")
    sampled = replace(base, case="middle", extra={})  # is not measured twice
    wrong = replace(base, case="large", status="failed")
    baselines = {("fake", "base")}

    def done(*rows: Row) -> set[tuple[str, str]]:
        return {(key[1], key[4]) for key in plan.measured(rows, retry=False, baselines=baselines)}

    assert done(base, fine, sampled, wrong) == {("small", "fine"), ("middle", "base"), ("large", "base")}
    assert ("small", "base") in done(base, again)
    assert ("small", "base") not in done(base, replace(again, case="middle"))
    assert len(plan.measured([base], retry=False)) == 1


def test_jobs_travel_as_json() -> None:
    import json

    job = Job(
        "gemm",
        Options(device="cpu", dtypes=("bfloat16",), rows=(16, 32), sweep=3),
        (Item("a", "bfloat16", ("x", "y"), "z"),),
        "y",
        Settings(rounds=3, deadline=12.5),
        Profile("kineto", 4, "out"),
    )
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_what_is_left_after_a_crash() -> None:
    items = [
        Item("a", "f", ("base", "x", "y")),
        Item("b", "f", ("base", "x")),
        Item("c", "f", ("x",), "base"),
    ]
    left = plan.without(items, {("a", "f")}, ("b", "f", "x"))
    assert left == [Item("b", "f", ("base",)), items[2]]
    assert plan.without(items, set(), ("b", "f", "")) == [items[0], items[2]]  # its inputs
    assert plan.without(items, set(), ("c", "f", "base"))[2] == Item("c", "f", ("x",))
    assert plan.without(items, set(), ("c", "f", "x")) == items[:2]
    assert plan.without(items, {("a", "f")}, None) == items[1:]


def test_two_strikes() -> None:
    strikes = Strikes()
    strikes.add("x", "no sign of life")
    strikes.add("y", "ended by SIGSEGV")
    assert strikes.out() == []
    strikes.add("x", "ended by SIGSEGV")
    assert strikes.out() == ["x"]


@pytest.mark.parametrize(
    "reason",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "not enough memory: Tried to allocate 2 GiB",
        "rank 1 ended with exit code 1: torch.OutOfMemoryError",
        "rank 1 was ended by SIGKILL (out of memory?)",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_lack_of_memory_is_no_strike(reason: str) -> None:
    strikes = Strikes()
    for _ in range(3):
        strikes.add("x", reason)
    assert strikes.out() == []


def step(number: int, since: float = 0.0, variant: str = "v", limit: float = 0.0) -> Step:
    return Step(number, since, "case", "f", f"{variant}{number}", "check", limit)


def test_who_is_to_blame_for_a_crash() -> None:
    steps = [step(7), step(5), step(6)]
    assert find_failure([None, None, None], steps, {}, 1.0, 120.0) is None
    assert find_failure([0, None, None], steps, {}, 1.0, 120.0) is None  # done before the others
    crashed = find_failure([1, -11, None], steps, {}, 1.0, 120.0)
    assert crashed is not None and (crashed.status, crashed.rank, crashed.variant) == ("crashed", 1, "v5")
    followed = find_failure([FOLLOWED, None, 3], steps, {}, 1.0, 120.0)
    assert followed is not None and (followed.rank, followed.variant) == (2, "v6")
    explained = find_failure([None, None, 4], steps, {2: (0.5, "an illegal access")}, 1.0, 120.0)
    assert explained is not None and explained.reason == "an illegal access"
    silent = find_failure([0, 0, 0], steps, {}, 1.0, 120.0)
    assert silent is not None and silent.status == "crashed"


def test_who_is_to_blame_for_a_hang() -> None:
    steps = [step(7, 100.0), step(5, 90.0), step(7, 99.0)]
    assert find_failure([None] * 3, steps, {}, 219.0, 120.0) is None
    hung = find_failure([None] * 3, steps, {}, 221.0, 120.0)
    assert hung is not None and (hung.status, hung.rank, hung.variant) == ("timeout", 1, "v5")
    assert "no sign of life for 120 s (check)" in hung.reason
    slow = [step(7, 100.0), step(5, 90.0, limit=600.0), step(7, 99.0)]
    assert find_failure([None] * 3, slow, {}, 221.0, 120.0) is None
    assert find_failure([None] * 3, slow, {}, 701.0, 120.0) is not None
    starting = [Step(since=100.0)] * 2
    assert find_failure([None] * 2, starting, {}, 230.0, 120.0) is None
    start_hung = find_failure([None] * 2, starting, {}, 290.0, 120.0)
    assert start_hung is not None and start_hung.case == ""


def test_ranks_that_wait_for_one_that_raised_do_not_wait_for_the_time_limit() -> None:
    steps = [step(5, 100.0), step(5, 100.0)]
    trouble = {1: (101.0, "ValueError: no")}
    assert find_failure([None] * 2, steps, trouble, 105.0, 120.0) is None
    failed = find_failure([None] * 2, steps, trouble, 130.0, 120.0)
    assert failed is not None and (failed.status, failed.rank) == ("error", 1)
    assert "rank 1: ValueError: no" in failed.reason
    everyone = {0: (101.0, "ValueError: no"), **trouble}
    assert find_failure([None] * 2, steps, everyone, 130.0, 120.0) is None


def row(variant: str, us: float | None = 10.0, host: float | None = None, **fields: Any) -> Row:
    times = {"us": Stats.of([us]) if us else None, "host_us": Stats.of([host]) if host else None}
    return Row("fake", "small", "double", variant, fields.pop("role", "peer"), **times, **fields)


def test_cells() -> None:
    base = row("base", 10.0, 30.0)
    assert live.cell(base, base) == ("10.0", "")
    assert live.cell(row("a", 5.0), base) == ("5.0 2.00x", "green")
    assert live.cell(row("a", 20.0), base) == ("20.0 0.50x", "red")
    assert live.cell(row("a", None, 60.0), base) == ("60.0 0.50x", "red")  # times of one kind are compared
    assert live.cell(row("a", 5.0, extra={"timed": "queued"}), base) == ("5.0 2.00x queued", "green")
    assert live.cell(row("gemm", 5.0, role="part"), base) == ("5.0", "")
    assert live.cell(row("a", 1.0, status="failed"), base) == ("FAILED 1.0", "bold red")
    assert live.cell(row("a", None, status="skipped"), base)[0] == "-"
    assert live.cell(row("a", None, status="timeout"), base) == ("timeout", "bold red")
    assert live.cell(row("a", 5.0, extra={"baseline_us": 15.0}), base) == ("5.0 3.00x", "green")
    assert live.cell(row("a", 1234.5), None) == ("1,234.5", "")
    assert live.ratio(row("a", 5.0), row("base", None, 9.0)) is None


def test_the_plain_display_prints_every_row() -> None:
    out = io.StringIO()
    display = live.Display(out)
    display.begin("fake on 1 CPU rank", "base", 2)
    display.case(
        [row("base"), row("fine", 5.0, flops=1e7), row("nix", None, status="skipped", reason="not installed")]
    )
    said = out.getvalue()
    assert "[1/2] small" in said and "5.0 2.00x   2 TFLOP/s" in said and "not installed" in said


@pytest.mark.parametrize("width", [200, 40])
def test_the_live_table_fits_the_terminal(width: int) -> None:
    pytest.importorskip("rich")
    display = live.LiveDisplay()
    display.console.width = width
    display.console.file = io.StringIO()
    names = ["base", "ours:gloo+streamk", "symm_mem:one_shot", "another"]
    display.begin("fake", "base", 1)
    display.at("small", "base", "time")
    display.case([row(name, 1234.5) for name in names])
    display.end()
    lines = display.console.file.getvalue().splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "us of a call" in line) :]
    assert all(len(line) <= width for line in table)
    assert "1.00x" in "".join(table)
    assert ("1,234.5 1.00x" in "".join(table)) == (width == 200)


def test_environment_without_a_gpu() -> None:
    env = environment.collect("cpu", 2)
    assert env["gpu"] == "" and env["world"] == 2 and env["torch"] and env["cpu"]
    assert set(env["multicast"]) == set(environment.NO_MULTICAST)
    assert environment.collect("cpu", 1, "abc")["commit"] == "abc"


def test_names_of_gpus_for_files() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "Tesla V100": "v100",
    }
    names |= {"NVIDIA GeForce RTX 4090": "rtx-4090", "NVIDIA RTX A6000": "rtx-a6000", "NVIDIA B200": "b200"}
    assert {name: environment.short_name(name) for name in names} == names
    assert environment.gpu_short_name("cpu") == "cpu"


def test_the_default_file_names_date_and_machine() -> None:
    path = start._default_path("cpu", 4)
    assert path.parent == Path("bench-results") and path.name.endswith("_cpux4.jsonl")


def test_a_finished_file_is_not_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("done.jsonl")
    records.append(path, Header("r", "fake", ""))
    for case in ("small", "middle", "large"):
        for variant in ("base", "fine", "alone isolated"):
            records.append(path, Row("fake", case, "double", variant, "peer", dtype="float64", world=2))
    before = path.read_bytes()
    assert cli.main(["fake", "--device", "cpu", "--out", str(path), "--resume"]) == 0
    assert "everything asked for is in done.jsonl already" in capsys.readouterr().out
    assert path.read_bytes() == before
