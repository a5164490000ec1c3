"""The bars of the gemm suite: which hold, from rows with known times; and their table in a README."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import bench_samples as samples
import pytest
from bench_samples import stats

from bench import compare
from bench.bars import BARS
from bench.errors import BenchError
from bench.live import Display
from bench.recorder import Recorder
from bench.records import Row, load
from bench.report import check_readme
from bench.report.analysis import group_cases
from bench.report.readme import render_readme
from bench.report.sections import sections
from bench.report.tables import select, suite_tables
from bench.report.tables_bars import Line, bars_tables, bars_text, lines
from bench.suites.gemm import SUITE
from bench.suites.gemm_shapes import BAR_SETS, BLAS_LAYOUTS, EPILOGUES, LAYOUTS, Shape
from bench.suites.gemm_shapes import select as shapes_of


def row(shape: Shape, variant: str, us: float | None, **more: Any) -> Row:
    role = "ours" if variant.startswith("streamk") else "part" if variant.endswith("plain") else "peer"
    fields: dict[str, Any] = {"shape_set": shape.shape_set, "dtype": "bfloat16", "run": samples.RUN}
    fields["params"] = {"m": shape.m, "n": shape.n, "k": shape.k, "layout": shape.layout}
    return Row(
        "gemm", shape.name, shape.op, variant, role, us=stats(us) if us else None, **{**fields, **more}
    )


def rows(times: dict[str, float], sets: tuple[str, ...] = BAR_SETS) -> list[Row]:
    """Rows of all shapes of the sets: each variant takes the time that is given for it, else 100 us."""
    found = []
    for shape in shapes_of(sets):
        if shape.op == LAYOUTS:
            names = [n if b == "TN" else f"{n}:{b}" for b in BLAS_LAYOUTS for n in ("cublas", "streamk")]
        elif shape.op in EPILOGUES:
            names = ["cublas", "streamk", "streamk:plain"]
        else:
            names = ["cublas", "streamk", "streamk:data_parallel"]
        found += [row(shape, name, times.get(name, 100.0)) for name in names]
    return found


def barred(found: list[Row]) -> dict[tuple[str, str, str], Line]:
    return {(x.shape_set, x.op, x.against): x for x in lines(group_cases(found, "gemm")) if x.bar}


def test_the_bars_are_those_of_the_issue():
    assert {bar.shape_set for bar in BARS} == set(BAR_SETS)
    shown = {(b.shape_set, b.op, b.against): (round(b.each, 3), b.mean) for b in BARS}
    assert len(shown) == len(BARS)
    assert shown["large", "matmul", "cublas"] == (0.95, 1.0)
    assert shown["waves", "matmul", "cublas"] == (0, 1.05) and shown["waves", "matmul", "data-parallel"] == (
        0,
        1.15,
    )
    assert shown["long-k", "matmul", "cublas"] == (0, 0.97) and shown["measured", "matmul", "cublas"] == (
        0,
        1.0,
    )
    assert shown["transposes", "layouts", "TN"] == (0.952, 0)
    assert {shown["epilogues", op, "plain"] for op in ("bias_gelu", "bias_silu", "swiglu", "accumulate")} == {
        (0.971, 0)
    }
    assert shown["epilogues", "swiglu", "cublas"] == (1.1, 0)


def test_all_hold_or_all_are_missed():
    fast = rows({"cublas": 112.0, "streamk:data_parallel": 120.0})
    assert {line.verdict for line in barred(fast).values()} == {"holds"}
    (table,) = bars_tables(fast)
    assert table.caption.startswith(f"{len(BARS)} of {len(BARS)} bars hold.")
    others = {f"streamk:{name}": 106.0 for name in ("NN", "NT", "TT")}
    slow = rows({"cublas": 94.0, "streamk:data_parallel": 114.0, "streamk:plain": 97.0, **others})
    assert {line.verdict for line in barred(slow).values()} == {"missed"}


def test_at_the_bar_it_holds():
    assert barred(rows({}))["large", "matmul", "cublas"].verdict == "holds"  # 1.00 of 1.00
    assert barred(rows({"streamk:plain": 97.1}))["epilogues", "bias_gelu", "plain"].verdict == "holds"
    assert barred(rows({"streamk:plain": 97.0}))["epilogues", "bias_gelu", "plain"].verdict == "missed"


def test_one_shape_misses_what_each_must_reach():
    found = rows({"cublas": 110.0})
    i = next(i for i, r in enumerate(found) if r.case == "large 8192x1280x8192" and r.variant == "streamk")
    found[i] = dataclasses.replace(found[i], us=stats(120.0))
    line = barred(found)["large", "matmul", "cublas"]
    assert line.verdict == "missed" and line.worst is not None and line.worst.name == "large 8192x1280x8192"
    # A geometric mean may hold all the same.
    waves = rows({"cublas": 110.0}, ("waves",))
    waves[1] = dataclasses.replace(waves[1], us=stats(120.0))
    assert barred(waves)["waves", "matmul", "cublas"].verdict == "holds"


def test_what_is_missing_makes_it_incomplete_and_what_went_wrong_missed():
    found = rows({"cublas": 110.0})
    part = [r for r in found if r.case != "large 8192x1280x8192"]
    line = barred(part)["large", "matmul", "cublas"]
    assert (line.verdict, line.missing, len(line.values)) == ("incomplete", 1, 10)
    without_own = [r for r in found if r.variant != "streamk:data_parallel"]
    assert barred(without_own)["waves", "matmul", "data-parallel"].verdict == "incomplete"
    for status, verdict in (("failed", "missed"), ("crashed", "missed"), ("skipped", "incomplete")):
        lost = [
            dataclasses.replace(r, status=status) if (r.case, r.variant) == (part[1].case, "streamk") else r
            for r in found
        ]
        assert barred(lost)["large", "matmul", "cublas"].verdict == verdict
    # A missing shape is no excuse for one that is there.
    slow = [r for r in rows({"cublas": 90.0}) if r.case != "large 8192x1280x8192"]
    assert barred(slow)["large", "matmul", "cublas"].verdict == "missed"


def test_shapes_that_are_not_of_the_bar_do_not_count():
    other = Shape("waves", "1.01", 896, 4864, 4096)
    found = [*rows({}, ("waves",)), row(other, "cublas", 1000.0), row(other, "streamk", 1.0)]
    line = barred(found)["waves", "matmul", "cublas"]
    assert len(line.values) == 9 and set(line.values) == {1.0}
    small = Shape("large", "", 160, 160, 1024)
    assert barred([row(small, "cublas", 1.0), row(small, "streamk", 2.0)]) == {}


def test_layouts_are_compared_with_TN_of_the_same_case():
    found = rows(
        {"streamk": 100.0, "streamk:NN": 104.0, "streamk:NT": 110.0, "streamk:TT": 95.0}, ("transposes",)
    )
    line = barred(found)["transposes", "layouts", "TN"]
    assert len(line.values) == 12 and line.worst is not None
    assert line.worst.name.endswith(" NT") and line.worst.value == pytest.approx(100 / 110)
    against_cublas = next(x for x in lines(group_cases(found, "gemm")) if x.against == "cublas")
    assert len(against_cublas.values) == 16 and against_cublas.bar is None


def test_missed_within_the_noise_is_said():
    found = rows({"cublas": 99.5}, ("measured",))
    again = [dataclasses.replace(r, variant="cublas again", role="noise", partner="cublas") for r in found]
    again = [dataclasses.replace(r, us=stats(101.0)) for r in again if r.variant == "cublas again"][:1]
    (table,) = bars_tables([*found, *again])
    assert table.rows[0][-1].text == "missed, within the noise"
    assert bars_tables(found)[0].rows[0][-1].text == "missed"


def test_table_and_text():
    found = rows({"cublas": 112.0, "streamk:data_parallel": 100.0})
    (table,) = bars_tables(found)
    line = [cell.text for cell in table.rows[3]]
    assert line[:5] == ["waves", "own data-parallel", "9", "1.000", "1.000"]
    assert line[6:] == ["geomean ≥ 1.15", "missed"]
    assert "bars, bfloat16" in bars_text(
        found
    ) and f"{len(BARS) - 1} of {len(BARS)} bars hold (1 missed)" in bars_text(found)
    assert bars_tables([]) == [] and bars_text([]) == ""
    fp16 = [dataclasses.replace(r, dtype="float16") for r in found]
    assert [t.title for t in bars_tables([*found, *fp16])] == ["bars, bfloat16", "bars, float16"]


def test_the_report_has_bars_layouts_epilogues_and_tiles(tmp_path):
    shape = shapes_of(["large"])[0]
    plan = {
        "schedule": "stream_k",
        "tile": [128, 256, 64],
        "tile_name": "128x256x64/2x1",
        "predicted_us": 90.0,
    }
    extra = {"plan": plan}
    tiles = [
        row(shape, f"streamk:{s}@128x256x64/2x1", us, extra=extra)
        for s, us in (("stream_k", 80), ("split_k", 95))
    ]
    tables = {t.title: t for t in suite_tables([*rows({}), *tiles], "gemm")}
    expected = ["bars", "large", "waves", "long-k", "measured", "layouts", "epilogues", "tiles"]
    assert list(tables) == [f"{name}, bfloat16" for name in expected]
    assert [c.text for c in tables["tiles, bfloat16"].rows[0]][4:] == [
        "stream_k 128x256x64/2x1", "80.0", "90.0", "2", "1.250",
    ]  # fmt: skip
    assert not any("@" in c.name for c in tables["large, bfloat16"].columns)
    assert len(tables["layouts, bfloat16"].rows) == 16 and len(tables["epilogues, bfloat16"].rows) == 20
    for table in tables.values():
        assert all(len(line) == len(table.columns) for line in table.rows)
    (section,) = sections(load(samples.write(tmp_path / "r.jsonl", [*rows({}), *tiles])))
    assert [t.title for t in section.tables] == list(tables)
    assert len(section.parts) == 1 and all(
        "transposes" not in shown.title for shown in section.parts[0].shown
    )


def test_every_table_copes_with_what_is_missing():
    found = rows({})
    for gone in {r.variant for r in found}:
        suite_tables([r for r in found if r.variant != gone], "gemm")
    for status in ("failed", "skipped", "crashed"):
        suite_tables([dataclasses.replace(r, status=status, us=None) for r in found], "gemm")


def test_a_block_of_a_readme(tmp_path):
    samples.write(tmp_path / "r.jsonl", rows({"cublas": 112.0}))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench: gemm-bars bfloat16 from r.jsonl -->\n<!-- bench: end -->\n")
    text, changed = render_readme(readme)
    assert [block.name for block in changed] == ["gemm-bars bfloat16"]
    assert "| large | cublas | 11 | 1.120 |" in text and "H100" in text
    readme.write_text(text)
    assert check_readme(readme) == []
    (table,) = select(rows({}), "gemm-bars large")
    assert {line[0].text for line in table.rows} == {"large"}
    with pytest.raises(BenchError, match=r"'gemm-bar' is not known.*Did you mean 'gemm-bars'"):
        select(rows({}), "gemm-bar")


def test_bars_are_no_part_of_other_blocks():
    assert [t.title for t in select(rows({}), "gemm large bfloat16")] == ["large, bfloat16"]


def test_files_with_the_new_cases_are_compared(tmp_path):
    for name in ("a", "b"):
        samples.write(tmp_path / f"{name}.jsonl", rows({}), run=name)
    a, b = (load(tmp_path / f"{name}.jsonl") for name in ("a", "b"))
    found = compare.compare(a, b)
    assert not found.broken and not found.missing and len(found.changes) == len(rows({}))


def test_a_run_ends_with_the_bars_of_its_card(tmp_path):
    path = samples.write(tmp_path / "r.jsonl", rows({}, ("waves",)), env={"gpu": "another card"})
    recorder = Recorder(path, Display(io.StringIO()), ["gemm"], SUITE)
    assert recorder.conclusion() == ""  # nothing was measured
    recorder.begin({**samples.ENV, "device": "cpu"})
    recorder.rows(rows({"cublas": 112.0}, ("large",)))
    said = recorder.conclusion()
    assert "1 of 1 bars hold." in said and "| large |" in " ".join(said.split()) and "waves" not in said
    assert Recorder(path, Display(io.StringIO()), ["gemm"], SUITE, silent=True).conclusion() == ""
