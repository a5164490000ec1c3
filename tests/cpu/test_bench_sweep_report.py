"""What is made of the sweep's rows: bars, statistics, classes, the cost model, pictures, and what auto would win."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path

import bench_samples as samples
import pytest

from bench import fit_auto
from bench.cli import main
from bench.errors import BenchError
from bench.live import Display
from bench.records import Row, geomean, load
from bench.report import markdown_report, run
from bench.report.analysis import group_cases
from bench.report.charts_sweep import figures, model_scatter, speedups, utilisation, waves_scatter
from bench.report.draw import COLORS
from bench.report.page import html_page
from bench.report.summary import headlines
from bench.report.sweep import (
    CLASSES,
    Statistics,
    bars_of,
    classes,
    is_compute_bound,
    model_error,
    ratios,
    regrets,
)
from bench.report.tables import select, suite_tables
from bench.report.tables_sweep import sweep_bars_tables, sweep_tables
from bench.suites.gemm_shapes import sweep

SIZE = (1024, 2048, 4096)


def of_times(ours: list[float], cublas: float = 10.0, plain: float = 20.0, auto: float = 10.0) -> list[Row]:
    """Rows of the bars' first shapes, in which ours takes these times."""
    rows = []
    for i, (us, shape) in enumerate(zip(ours, sweep(len(ours), 0), strict=True)):
        size = (shape.m, shape.n, shape.k)
        for name, time in (
            ("cublas", cublas),
            ("streamk", us),
            ("streamk:dp-same-tile", plain),
            ("auto", auto),
        ):
            rows.append(samples.sweep_row(i, size, name, time))
    return rows


def groups_of(rows: list[Row]):
    return group_cases(rows, "sweep")


# --- statistics and bars -------------------------------------------------------------------------------------


def test_statistics_are_the_papers():
    stats = Statistics.of([0.5, 1.0, 2.0, 4.0])
    assert stats is not None
    assert (stats.n, stats.min, stats.max, stats.won) == (4, 0.5, 4.0, 0.75)
    assert stats.geomean == pytest.approx(2**0.5) and stats.average == 1.875
    assert stats.deviation == pytest.approx(1.3405, abs=1e-4)
    assert stats.p5 == pytest.approx(0.575) and stats.median == 1.5
    assert Statistics.of([]) is None


def test_ratios_are_against_cublas_or_the_same_tile():
    groups = groups_of(of_times([8.0, 5.0]))
    assert [v for _, v in ratios(groups, "streamk", "cublas")] == pytest.approx([1.25, 2.0])
    assert [v for _, v in ratios(groups, "streamk", "same tile")] == pytest.approx([2.5, 4.0])
    assert [v for _, v in ratios(groups, "auto", "cublas")] == pytest.approx([1.0, 1.0])


def test_bars_hold_only_of_the_whole_sample():
    rows = of_times([8.0] * 1000, plain=33.0)
    found = {(b.bar.ours, b.bar.statistic): b for b in bars_of(groups_of(rows))}
    assert {b.verdict for b in found.values()} == {"holds"}
    assert found["streamk", "geomean"].value == pytest.approx(1.25)
    found = {(b.bar.ours, b.bar.statistic): b for b in bars_of(groups_of(rows[:-4]))}
    assert {b.verdict for b in found.values()} == {"incomplete"}
    assert found["streamk", "p5"].missing == 1
    assert bars_of(groups_of([samples.sweep_row(0, SIZE, "streamk", 1.0)])) == []  # another sample


def test_bars_are_missed_by_what_is_slow_or_wrong():
    slow = {b.bar.statistic: b.verdict for b in bars_of(groups_of(of_times([12.0] * 1000)))}
    assert slow == {"geomean": "missed", "p5": "missed", "min": "holds", "average": "holds", "max": "missed"}
    # One shape below a minimum is enough, though others were not measured yet.
    (lowest,) = (b for b in bars_of(groups_of(of_times([8.0] * 3, auto=11.0))) if b.bar.statistic == "min")
    assert lowest.verdict == "missed" and lowest.at == "sweep 00000 4288x2992x736"
    rows = of_times([8.0] * 1000, plain=33.0)
    rows[1] = dataclasses.replace(rows[1], status="failed", reason="relative error 1")
    (mean,) = (b for b in bars_of(groups_of(rows)) if b.bar.statistic == "geomean")
    assert (mean.verdict, mean.wrong, mean.n) == ("missed", 1, 999)
    table = sweep_bars_tables(rows)[0]
    assert "999 of 1000, 1 wrong" in [row[2].text for row in table.rows]
    assert sweep_bars_tables(rows)[1].notes[0].startswith("1 wrong: sweep 00000")


def test_compute_bound_is_the_papers_limit():
    (small,) = groups_of([samples.sweep_row(0, (512, 512, 512), "streamk", 1.0)])
    (large,) = groups_of([samples.sweep_row(0, (4096, 4096, 4096), "streamk", 1.0)])
    assert (is_compute_bound(small), is_compute_bound(large)) == (False, True)


def test_classes_are_ascending_and_hold_every_shape_once():
    groups = groups_of(samples.sweep_rows(200))
    for by in CLASSES.values():
        parts = classes(groups, by)
        assert sorted(g.case for _, part in parts for g in part) == sorted(g.case for g in groups)
    parts = classes(groups, CLASSES["k"])
    assert parts[0][0] == "below 256" and parts[-1][0] == "4096 and more"
    assert all(g.first.params["k"] < 256 for g in parts[0][1])
    assert all(256 <= g.first.params["k"] < 512 for g in parts[1][1])


# --- the cost model --------------------------------------------------------------------------------------------


def planned(us: float, predicted: float, variant: str = "streamk", tile: str = samples.TILE_NAME) -> Row:
    plan = {"tile_name": tile, "schedule": "data_parallel", "predicted_us": predicted, "multiprocessors": 132}
    return samples.sweep_row(0, SIZE, variant, us, extra={"plan": plan})


def test_errors_of_predictions_are_symmetric():
    error = model_error(
        [planned(10, 12), planned(12, 10), planned(10, 10), samples.sweep_row(0, SIZE, "cublas", 1)]
    )
    assert error is not None
    assert (error.n, error.bias) == (3, 1.0)
    assert error.median == pytest.approx(0.2) and error.p90 == pytest.approx(0.2)
    assert model_error([]) is None


def test_regret_is_over_the_fastest_tile():
    rows = [
        planned(12, 10),
        planned(10, 11, "streamk:data_parallel@A"),
        planned(15, 11, "streamk:data_parallel@B"),
    ]
    wrong = dataclasses.replace(planned(1, 1, "streamk:data_parallel@C"), status="failed")
    ((_, value, best),) = regrets(groups_of([*rows, wrong]))
    assert value == pytest.approx(1.2) and best.variant.endswith("@A")
    assert regrets(groups_of(rows[:1])) == []


# --- tables, pictures ------------------------------------------------------------------------------------------


def test_every_table_is_there():
    rows = samples.sweep_rows(60, tiles=True)
    titles = [table.title.removeprefix("sweep, bfloat16").strip(", ") for table in sweep_tables(rows)]
    assert titles[:2] == ["sweep bars, bfloat16", ""]
    assert {"by K", "by our plan", "the worst 10", "the cost model", "what the planner loses"} <= set(titles)
    text = markdown_report(load_of(rows))
    assert "## sweep" in text and "Compute-bound: more than 400 flop/byte" in text
    worst = next(t for t in sweep_tables(rows) if t.title.endswith("the worst 10"))
    values = [float(row[5].text) for row in worst.rows]
    assert values == sorted(values) and len(values) == 10
    loses = next(t for t in sweep_tables(rows) if t.title.endswith("loses"))
    assert "geomean 1.100" in loses.caption
    assert suite_tables(rows, "sweep")[0].title == sweep_tables(rows)[0].title


def test_how_often_auto_took_ours_is_told():
    rows = of_times([8.0, 9.0])
    assert "auto took" not in sweep_bars_tables(rows)[1].caption
    rows = [
        dataclasses.replace(r, extra={"took": "streamk" if "00000" in r.case else "cublas"})
        if r.variant == "auto"
        else r
        for r in rows
    ]
    assert "auto took our kernel in 50 % of them." in sweep_bars_tables(rows)[1].caption


def test_a_readme_names_bars_or_everything():
    rows = samples.sweep_rows(30)
    assert len(select(rows, "sweep-bars bfloat16")) == 2
    assert len(select(rows, "sweep bfloat16")) > 6
    with pytest.raises(BenchError, match="float16"):
        select(rows, "sweep-bars float16")


def test_pictures_say_what_they_show():
    rows = samples.sweep_rows(80)
    groups = groups_of(rows)
    picture = speedups(groups, None)
    assert picture is not None and "against cublas: geometric mean" in picture.label
    assert any("× cublas" in tip for tip in picture.tips.values())
    for other in (utilisation(groups, rows), waves_scatter(groups, None), model_scatter(groups)):
        assert other is not None and "var(--ours)" in other.svg("f1")
    assert speedups([], None) is None and model_scatter([]) is None
    page = html_page(load_of(rows))
    assert 'id="sweep"' in page and page.count("<svg") == 4
    assert headlines(rows)[0].suite == "sweep"


def load_of(rows: list[Row]):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return load(samples.write(Path(folder) / "r.jsonl", rows))


def test_pictures_for_documents_are_light_and_dark(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = samples.write(tmp_path / "r.jsonl", samples.sweep_rows(20))
    before = dict(COLORS)
    assert main(["report", str(path), "--figures", str(tmp_path / "docs")]) == 0
    assert before == COLORS
    names = sorted(p.name for p in (tmp_path / "docs").iterdir())
    assert len(names) == 8 and "sweep-speedup-bfloat16-dark.png" in names
    assert len(figures(samples.sweep_rows(3))) == 4
    import matplotlib.image

    light, dark = (
        matplotlib.image.imread(tmp_path / "docs" / f"sweep-speedup-bfloat16{s}.png") for s in ("", "-dark")
    )
    assert light.shape == dark.shape
    assert light[0, 0, :3].min() == 1.0 and dark[0, 0, :3].max() < 0.2
    assert not (path.with_suffix(".html")).exists()
    other = samples.write(tmp_path / "o.jsonl", samples.gemm_rows(sweep=0))
    assert main(["report", str(other), "--figures", str(tmp_path / "docs")]) == 2
    assert "--figures draws suite sweep, of which these files have no rows" in capsys.readouterr().err


def test_pictures_are_of_one_card(tmp_path: Path):
    files = [
        samples.write(tmp_path / f"{gpu}.jsonl", samples.sweep_rows(5), run=gpu, env={"gpu": gpu})
        for gpu in ("A", "B")
    ]
    with pytest.raises(BenchError, match="one card"):
        run(files, figures=tmp_path, stdout=io.StringIO())


def test_a_line_is_enough_for_a_shape_of_a_thousand():
    out = io.StringIO()
    display = Display(out)
    display.begin("sweep on 1 GPU", "cublas", 2, brief=True)
    display.case(of_times([8.0]))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and lines[1].startswith("[1/2, ")
    assert "s left] sweep 00000 4288x2992x736 bfloat16: cublas 10.0, streamk 8.0 1.25x" in lines[1]


# --- what auto would win -----------------------------------------------------------------------------------------


def shape(ours: float, cublas: float, predicted: float, case: str = "a") -> fit_auto.Measured:
    return fit_auto.Measured(case, 4096, 4096, 4096, 132, cublas, ours, predicted)


def test_a_rule_is_judged_by_measured_times():
    shapes = [shape(10, 12, 0), shape(15, 12, 0), shape(12.2, 12, 0)]
    never, always = fit_auto.judge(shapes, lambda s: False), fit_auto.judge(shapes, lambda s: True)
    assert (never.taken, never.geomean, never.min, never.below) == (0, 1, 1, 0)
    assert never.loss == pytest.approx(1.2 ** (1 / 3) - 1)
    assert always.min == 0.8 and always.below == 1 and always.taken == 1
    assert always.geomean == pytest.approx(geomean([1.2, 0.8, 12 / 12.2]))
    best = fit_auto.judge(shapes, lambda s: s.ours_us < s.cublas_us)
    assert best.loss == pytest.approx(0) and best.min == 1


def test_the_rule_is_the_librarys():
    from tpkernels.ops._plans import CUBLAS_H100, Machine, Product, estimate_us, prefers_streamk

    beside = estimate_us(Product(1, 4096, 4096, 4096), 132) - CUBLAS_H100.launch_us
    for limit in (0.99 * beside, 1.01 * beside):
        s = shape(1, 1, 1)
        expected = prefers_streamk(Product(1, s.m, s.n, s.k), Machine("sm90", 132), limit)
        assert fit_auto.library_rule(limit)(s) == expected == (limit > beside)


def test_files_are_judged_dtype_by_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = samples.write(tmp_path / "r.jsonl", samples.sweep_rows(40))
    assert main(["fit-auto", str(path)]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("bfloat16, 40 shapes")
        and "always cuBLAS" in said
        and "the library's, 0.7 us" in said
        and "likewise, 1.0 us" in said
    )
    found = fit_auto.measured_of(samples.sweep_rows(40))
    assert len(found["bfloat16"]) == 40 and all(math.isfinite(s.predicted_us) for s in found["bfloat16"])
    path = samples.write(tmp_path / "few.jsonl", samples.sweep_rows(3))
    assert main(["fit-auto", str(path)]) == 2
    assert "expected at least 10 shapes" in capsys.readouterr().err


def test_the_model_is_fitted_to_the_sweep_too():
    from test_bench_fit import made_row

    from bench.fit import samples_of

    tile = "128x128x64/1x2"
    rows = [
        made_row(SIZE, tile, "data_parallel", 30.0, suite=suite) for suite in ("gemm", "sweep", "overlap")
    ]
    samples_, changed = samples_of(rows)
    assert [s.us for s in samples_] == [30.0, 30.0] and changed == 0
