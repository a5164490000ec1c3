"""The best schedule in the report: a column of the overlap tables, and which bars hold."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import bench_samples as samples
import pytest
from bench_samples import stats

from bench.bars import COMPUTE_BOUND, OVERLAP_BARS
from bench.errors import BenchError
from bench.links import COSTS, MEASURED, Constants, links_of
from bench.records import Row, load
from bench.report import markdown_report, run
from bench.report.analysis import group_cases
from bench.report.best_schedule import best_schedule, describe_best, over_best
from bench.report.sections import sections
from bench.report.table import Table
from bench.report.tables import select, suite_tables
from bench.report.tables_overlap_bars import Line, lines, overlap_bars_tables
from bench.schedules import Tiles, best
from bench.suite import Options
from bench.suites.overlap_shapes import AG, AR, OPS, RS, shapes

RESULTS = Path(__file__).parents[2] / "bench/results"
LINKS = {4: MEASURED["NVIDIA H200", 4], 2: MEASURED["NVIDIA H200", 2]}
GEMM = 100.0  # us


def rows(over: dict[str, float] | float = 1.05, world: int = 4, **more: Any) -> list[Row]:
    """All shapes of the set: the product takes 100 us, ours so many times the best schedule (of some cases: others)."""
    found = []
    for s in shapes(Options(world=world, sets=("measured",))):
        size = -(-s.m // world) * (s.k if s.short == "AG" else s.n) * 2
        kind = {"AG": "gather", "RS": "scatter", "AR": "sums"}[s.short]
        ideal = best(kind, Tiles.of(world, s.m, s.n, s.k), size, GEMM, COSTS, LINKS[world].link).us  # type: ignore[arg-type]
        factor = over if isinstance(over, float) else over.get(s.name, 1.05)
        for variant, role, us in (("gemm", "part", GEMM), ("ours", "ours", ideal * factor)):
            fields: dict[str, Any] = {
                "shape_set": "measured",
                "dtype": "bfloat16",
                "world": world,
                "run": "r",
                **more,
            }
            params = {"m": s.m, "n": s.n, "k": s.k}
            found.append(
                Row("overlap", s.name, OPS[s.short], variant, role, us=stats(us), params=params, **fields)  # type: ignore[arg-type]
            )
    return found


def of_op(found: list[Row], links: dict[int, Constants] = LINKS) -> dict[str, Line]:
    return {line.op: line for line in lines(group_cases(found, "overlap"), links)}


def changed(found: list[Row], case: str, **fields: Any) -> list[Row]:
    """With other fields of our row of that case."""
    return [dataclasses.replace(r, **fields) if (r.case, r.role) == (case, "ours") else r for r in found]


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in line] for line in table.rows]


def test_the_bars_are_those_of_the_issue():
    assert [(b.shape_set, b.op, b.most) for b in OVERLAP_BARS] == [
        ("measured", "AG", 1.1),
        ("measured", "RS", 1.1),
    ]
    assert {("gpt3", 8192), ("llama70b", 8192)} == COMPUTE_BOUND
    found = of_op(rows())
    names = ["gpt3 M2048", "gpt3 M1024", "llama70b M2048", "llama8b M8192", "llama70b qkv M8192"]
    assert {op: set(line.ratios) for op, line in found.items()} == {
        AG: {f"AG {name}" for name in names},
        RS: {f"RS {name}" for name in names},
    }


def test_verdicts():
    assert {line.verdict for line in of_op(rows(1.0999)).values()} == {"holds"}
    slow = rows({"AG llama8b M8192": 1.101, "RS gpt3 M8192": 9.0, "AR gpt3 M2048": 9.0})
    found = of_op(slow)  # the last two have no such bar
    assert (found[AG].verdict, found[AG].worst) == ("missed", "AG llama8b M8192")
    assert found[RS].verdict == "holds"
    assert found[AG].ratios["AG llama8b M8192"] == pytest.approx(1.101)

    part = [r for r in rows() if r.case != "RS gpt3 M1024"]
    assert [of_op(part)[op].verdict for op in (AG, RS)] == ["holds", "incomplete"]
    skipped = changed(rows(), "RS gpt3 M1024", status="skipped", us=None)
    assert of_op(skipped)[RS].verdict == "incomplete"
    for status in ("failed", "crashed", "timeout", "error"):
        line = of_op(changed(rows(), "RS gpt3 M1024", status=status, us=None))[RS]
        assert (line.verdict, line.worst) == ("missed", "RS gpt3 M1024")
    assert of_op([r for r in rows() if r.role != "ours"]) == {}
    assert of_op(rows(), {}) == {} == of_op([])


def test_a_world_none_of_whose_rows_divide():
    links = {3: LINKS[4]}
    found = [dataclasses.replace(r, world=3) for r in rows() if r.op == AR]
    assert of_op(found, links) == {}
    assert suite_tables(found, "overlap", links)


def test_table_of_bars():
    slow = rows({"AG llama8b M8192": 1.2})
    (table,) = overlap_bars_tables(slow, LINKS)
    assert table.title == "bars, 4 ranks, bfloat16"
    assert table.caption.startswith("Time of ours over that of the best schedule. ")
    assert describe_best(LINKS[4]) in table.caption
    assert texts(table) == [
        ["all-gather + GEMM", "5", "1.078", "1.200", "AG llama8b M8192", "each ≤ 1.10", "missed"],
        ["GEMM + reduce-scatter", "5", "1.050", "1.050", "RS gpt3 M2048", "each ≤ 1.10", "holds"],
    ]
    again = [
        Row("overlap", "AG x", AG, v, role, dtype="bfloat16", world=4, us=stats(us), partner="nccl+cublas")  # type: ignore[arg-type]
        for v, role, us in (("nccl+cublas", "peer", 100.0), ("nccl+cublas again", "noise", 110.0))
    ]
    (table,) = overlap_bars_tables([*slow, *again], LINKS)
    assert texts(table)[0][-1] == "missed, within the noise"
    lost = changed([r for r in slow if r.case != "AG gpt3 M2048"], "AG gpt3 M1024", status="failed")
    assert texts(overlap_bars_tables(lost, LINKS)[0])[0][1:5] == ["3 of 5", "1.098", "wrong", "AG gpt3 M1024"]
    all_lost = [dataclasses.replace(r, status="crashed", us=None) if r.role == "ours" else r for r in slow]
    assert texts(overlap_bars_tables(all_lost, LINKS)[0])[0][1:4] == ["0 of 5", "–", "wrong"]
    assert overlap_bars_tables(slow) == []
    two = [*rows(), *rows(world=2), *rows(dtype="float16")]
    titles = [t.title for t in overlap_bars_tables(two, LINKS)]
    assert titles == ["bars, 4 ranks, bfloat16", "bars, 2 ranks, bfloat16", "bars, 4 ranks, float16"]


def test_columns_of_the_tables():
    tables = {t.title: t for t in suite_tables(rows(), "overlap", LINKS)}
    assert next(iter(tables)) == "bars, 4 ranks, bfloat16"
    for op in ("all-gather + GEMM", "GEMM + reduce-scatter", "GEMM + all-reduce"):
        table = tables[f"{op}, 4 ranks, bfloat16"]
        assert [c.name for c in table.columns[-2:]] == ["best schedule, us", "ours / best"]
        assert describe_best(LINKS[4]) in table.caption
        for line in table.rows:
            few = int(line[1].text) < 1024  # no column for small all-reduces
            assert line[-1].text == ("–" if few else "1.05")
            assert few or "copies of a shard" in line[-2].title
    plain = suite_tables(rows(), "overlap")
    assert not any("best schedule" in c.name for t in plain for c in t.columns)
    assert not any("Best schedule" in t.caption for t in plain)
    single = [t for t in suite_tables(rows(dtype="float32"), "overlap", LINKS) if "bars" in t.title]
    assert single == []  # its tiles are others


def test_what_has_no_best_schedule():
    (group,) = group_cases([r for r in rows() if r.case == "AG gpt3 M2048"], "overlap")
    assert over_best(group, group.ours, LINKS) == pytest.approx(1.05)
    assert over_best(group, None, LINKS) is None
    assert over_best(group, dataclasses.replace(group.rows["ours"], status="failed"), LINKS) is None
    hosted = dataclasses.replace(group.rows["ours"], us=None, host_us=stats(9.0))
    assert over_best(group, hosted, LINKS) is None
    del group.rows["gemm"]
    assert best_schedule(group, LINKS) is None


def test_a_block_of_a_readme(tmp_path):
    found = load(RESULTS / "2026-11-28_h200x2_fused.jsonl")
    wanted = [t.markdown(heading="") for t in overlap_bars_tables(found.latest(), links_of(found))]
    (tmp_path / "r.jsonl").write_bytes((RESULTS / "2026-11-28_h200x2_fused.jsonl").read_bytes())
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench: overlap-bars w2 from r.jsonl -->\n<!-- bench: end -->\n", encoding="utf-8")
    assert run([], readme=readme, stdout=io.StringIO()) == 0
    assert len(wanted) == 1 and wanted[0] in readme.read_text(encoding="utf-8")
    assert wanted[0] in markdown_report(found)
    (page,) = sections(found)
    assert page.tables[0].markdown(heading="") == wanted[0]
    with pytest.raises(BenchError, match="'overlap-bar' is not known"):
        select(rows(), "overlap-bar")


def test_the_rows_of_a_file_bring_their_own_link():
    """The samples are of four H100, and have constants of their own, without all that the model needs."""
    text = markdown_report(load(RESULTS / "2026-11-28_h100x4.jsonl"))
    assert "copies of 381 GB/s and 4.6 us each (bench link on these GPUs)" in text
    assert samples.ENV["gpu"] == "NVIDIA H100 80GB HBM3"
