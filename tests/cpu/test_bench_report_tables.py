"""bench report: the tables of each suite, with values by hand, and their selection."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import bench_samples as samples
import pytest
from bench_samples import fused, row, stats

from bench.errors import BenchError
from bench.records import Row
from bench.report.analysis import (
    forward_backward,
)
from bench.report.summary import headlines
from bench.report.table import Cell, Column, Table, number
from bench.report.tables import select, suite_tables, suites_of


def texts(table: Table, line: int = 0) -> dict[str, str]:
    """Cells of a line by column, with the number of the footnote."""
    cells = table.rows[line]
    return {
        c.name: cell.text + (f" [{cell.note}]" if cell.note else "")
        for c, cell in zip(table.columns, cells, strict=True)
    }


# --- tables ----------------------------------------------------------------------------------------------------


def test_gemm_table():
    plan = {"schedule": "stream_k", "tile": [128, 256, 64], "tiles": 198, "workers": 132, "splits": 1}
    rows = [
        row("cublas", 100),
        row("cublas again", 101, "noise", partner="cublas"),
        row("cublaslt-fp8", 60),
        row("streamk", 80, "ours", flops=8e9, extra={"plan": plan}),
        row("streamk:dp-same-tile", 100, "ours"),
        row("streamk:stream_k", 100.5, "ours"),
        row("streamk:split_k", None, "ours", status="skipped", reason="nothing to stream"),
        row("streamk:hybrid_first", 50, "ours", status="failed", error=0.5, tolerance=0.01),
    ]
    (table,) = suite_tables(rows, "gemm")
    assert table.title == "square, bfloat16"
    assert texts(table) == {
        "shape": "square 64x64x64",
        "M × N × K": "64 × 64 × 64",
        "cublas, us": "100",
        "cublaslt-fp8, us": "60.0",
        "streamk, us": "80.0",
        "TFLOP/s": "100",
        "× cublas": "1.25",
        "× data-parallel, same tile": "1.25",
        "stream_k ×": "≈1.00",
        "hybrid_first ×": "FAILED [1]",
        "plan of ours": "stream_k 128×256×64, 1.50 waves",
    }
    assert table.notes == ["wrong result: relative error 5.0e-01, allowed is 1.0e-02"]
    assert "Noise floor 1.0 % (a variant against itself, 1 time)" in table.caption
    assert "**FAILED** [1]" in table.markdown()


def test_batches_and_groups_have_tables_of_their_own():
    """With a size that tells how many products there are; the schedule of groups is not compared with a product's."""

    def case(op: str, **params: int) -> list[Row]:
        params = {"m": 64, "n": 32, "k": 16, **params}
        more = {"op": op, "case": f"{op} x", "shape_set": op, "params": params}
        found = [row("cublas", 100, **more), row("streamk", 80, "ours", **more)]
        return found if op == "batched" else [*found, row("torch:grouped_mm", 90, **more)]

    rows = [
        row("cublas", 100),
        row("streamk", 80, "ours"),
        *case("batched", batch=8),
        *case("grouped", groups=4),
        *case("grouped_swiglu", groups=4),
    ]
    tables = {table.title: texts(table) for table in suite_tables(rows, "gemm")}
    assert list(tables) == [
        f"{name}, bfloat16" for name in ("square", "batched", "grouped", "grouped_swiglu")
    ]
    assert tables["batched, bfloat16"]["M × N × K"] == "8 × (64 × 32 × 16)"
    assert tables["grouped, bfloat16"]["M × N × K"] == "64 × 32 × 16 in 4 groups"
    assert tables["grouped_swiglu, bfloat16"]["torch:grouped_mm, us"] == "90.0"
    assert all(of_set["× cublas"] == "1.25" for of_set in tables.values())


def test_a_failed_row_of_ours_is_failed_in_its_time_and_its_ratio():
    rows = [row("cublas", 100), row("streamk", 10, "ours", status="failed", reason="NaN in the result")]
    (table,) = suite_tables(rows, "gemm")
    shown = texts(table)
    assert shown["streamk, us"] == shown["× cublas"] == "FAILED [1]"
    assert table.notes == ["NaN in the result"]
    assert headlines(rows) == []


def test_ratio_of_two_runs_is_marked():
    (table,) = suite_tables([row("cublas", 100), row("streamk", 80, "ours", run="later")], "gemm")
    assert texts(table)["× cublas"] == "1.25 [1]"
    assert "different runs" in table.notes[0]


def test_sweep_table():
    def shape(i: int, us: float, **more: Any) -> list[Row]:
        common = {"case": f"sweep {i}", "shape_set": "sweep"}
        return [row("cublas", 100, **common), row("streamk", us, "ours", **common, **more)]

    rows = [*shape(1, 50), *shape(2, 100), *shape(3, 200), *shape(4, 1, status="failed")]
    summary, extremes = suite_tables(rows, "gemm")
    assert texts(summary) == {
        "variant": "streamk",
        "shapes": "3",
        "geomean": "1.00",
        "5th percentile": "0.55",
        "median": "1.00",
        "95th percentile": "1.90",
        "min": "0.50",
        "max": "2.00",
        "at least 1": "67 %",
        "not timed": "1 FAILED [1]",
    }
    assert summary.notes == ["1 wrong: sweep 4"]
    assert [texts(extremes, i)["× cublas"] for i in range(3)] == ["0.50", "1.00", "2.00"]


def test_overlap_table():
    rows = [
        fused("gemm", 100, "part"),
        fused("comm", 60, "part"),
        fused("ceiling", 105, "ceiling"),
        fused("nccl+cublas", 160),
        fused("nccl+cublas again", 161, "noise", partner="nccl+cublas"),
        fused("symm_mem", 130),
        dataclasses.replace(fused("cublasmp", None), host_us=stats(150), extra={"baseline_host_us": 180.0}),
        fused("ours:nccl+streamk", 115, "ours"),
        fused("ours:nccl+cublas", None, "ours", status="crashed", reason="signal 11"),
    ]
    (table,) = suite_tables(rows, "overlap")
    assert table.title == "all-gather + GEMM, 4 ranks, bfloat16"
    shown = texts(table)
    assert (shown["M"], shown["N, K of a rank"]) == ("8192", "32, 16")
    assert (shown["gemm, us"], shown["comm, us"], shown["ceiling, us"]) == ("100", "60.0", "105")
    assert shown["cublasmp, us"] == "150 [1]"
    assert shown["ours:nccl+cublas, us"] == "crashed [2]"
    assert table.notes == ["launched from the host, not from a CUDA graph", "signal 11"]
    assert (shown["× nccl+cublas"], shown["× best peer"]) == ("1.39", "1.13")
    assert (shown["exposed, us"], shown["hidden"]) == ("15.0", "75 %")


def test_a_peer_that_never_ran_is_named_above_the_table():
    rows = [
        fused("nccl+cublas", 160),
        fused("ours:a", 120, "ours"),
        fused("cublasmp", None, status="skipped", reason="no wheel."),
    ]
    (table,) = suite_tables(rows, "overlap")
    assert "cublasmp, us" not in texts(table)
    assert table.caption.endswith("Not run: cublasmp (no wheel).")


def test_layer_and_train_tables():
    _, table = suite_tables(samples.layer_rows(), "layer")
    ours = next(texts(table, i) for i, line in enumerate(table.rows) if line[1].text == "ours")
    times = [float(ours[f"{part}, us"].replace(",", "")) for part in ("forward", "backward", "both")]
    assert times[0] + times[1] == pytest.approx(times[2], rel=1e-3)
    assert ours["peak memory, MiB"] == number(1.4 * 1024)
    crashed = next(i for i, line in enumerate(table.rows) if line[4].text == "crashed")
    assert texts(table, crashed)["both, us"] == "crashed [1]"
    assert table.notes == ["torch._dynamo.exc.Unsupported: <flash | attention>"]
    assert "&lt;flash \\| attention>" in table.markdown()

    assert "sent by a rank, MiB" not in ours, "nobody told"
    rows = samples.layer_rows()
    on_grid = dataclasses.replace(rows[0], variant="ours-2d", role="ours", extra={"sent_bytes": 3 << 19})
    _, table = suite_tables([*rows, on_grid], "layer")
    sent = {line[1].text: texts(table, i)["sent by a rank, MiB"] for i, line in enumerate(table.rows)}
    assert sent["ours-2d"] == "1.50" and set(sent.values()) == {"", "1.50"}

    (table,) = suite_tables(samples.train_rows(), "train")
    assert texts(table)["variant"] == "nccl+cublas"
    assert texts(table)["× nccl+cublas"] == "1"


def test_backward_is_what_forward_leaves():
    both = row("ours", 100, "ours", suite="layer", extra={"forward_us": 30.0})
    assert forward_backward(both) == (30, 70)
    assert forward_backward(dataclasses.replace(both, extra={"forward_us": 30.0, "backward_us": 65.0})) == (
        30,
        65,
    )
    assert forward_backward(dataclasses.replace(both, extra={})) == (None, None)
    assert forward_backward(dataclasses.replace(both, status="failed")) == (None, None)


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.3), (0.02, 1.1), (0.95, 40), (0.99, 1.02)])
def test_ticks_of_ratios_are_apart_and_have_1(low, high):
    from bench.report.draw import _ratio_ticks

    ticks = _ratio_ticks(low, high, 7)
    assert 1 in ticks
    assert ticks == sorted(ticks)
    assert low <= ticks[0] <= ticks[-1] <= high
    assert 1 <= len(ticks) <= 8
    assert all(b / a >= (high / low) ** (1 / 7) * 0.999 for a, b in itertools.pairwise(ticks))


def test_link_tables():
    tables = {t.title: t for t in suite_tables(samples.link_rows(), "link")}
    push = tables["push, 4 ranks"]
    assert [c.name for c in push.columns] == [
        "transport",
        "1 MiB",
        "2 MiB",
        "4 MiB",
        "8 MiB",
        "16 MiB",
        "64 MiB",
    ]
    assert [line[0].text for line in push.rows] == ["engine", "bulk 8 SMs", "bulk 16 SMs", "bulk 32 SMs"]
    assert push.rows[0][1].text == number((1 << 20) / (5.5 + (1 << 20) / 360e3) / 1e3)
    beside = texts(tables["a GEMM beside each transport, 4 ranks"])
    assert (beside["GEMM alone, us"], beside["GEMM slower by"]) == ("1,597", "2 %")
    assert tables["constants of the models, 4 ranks"].rows[0][1].text == "2,900"


def test_quantize_tables():
    (table,) = suite_tables(samples.quantize_rows(), "quantize")
    assert table.title == "quantize, bfloat16" and [line[1].text for line in table.rows][1] == "rowwise"
    line = texts(table)
    assert (line["M × K"], line["scales"], line["MB"]) == ("8192 × 8192", "tensorwise", "336")
    at = [c.name for c in table.columns].index("ours, GB/s")
    assert [cell.text for cell in table.rows[0][at : at + 2]] == [number(samples.HBM * 0.9 / 1e3), "90 %"]


def test_every_table_copes_with_what_is_missing():
    rows = samples.few_rows()
    for suite in suites_of(rows):
        own = [r for r in rows if r.suite == suite]
        for gone in {r.variant for r in own}:
            for table in suite_tables([r for r in own if r.variant != gone], suite):
                assert all(len(line) == len(table.columns) for line in table.rows)
        for status in ("failed", "skipped", "timeout", "crashed", "error"):
            lost = [dataclasses.replace(r, status=status, us=None, host_us=None) for r in own]
            suite_tables(lost, suite)
    assert suites_of(rows) == ["link", "gemm", "sweep", "quantize", "overlap", "layer", "train"]


def test_markdown_escapes_and_aligns():
    table = Table("a|b", [Column("x", numeric=False), Column("y")], [[Cell("<b> | c\nd"), Cell("1", note=1)]])
    table.note("why\n not")
    assert table.markdown(heading="##", pad=True).splitlines() == [
        "## a\\|b",
        "",
        "| x             |     y |",
        "| ------------- | ----: |",
        "| &lt;b> \\| c d | 1 [1] |",
        "",
        "[1] why not",
    ]


def test_select():
    rows = samples.few_rows()
    assert [t.title for t in select(rows, "gemm square bfloat16")] == ["square, bfloat16"]
    assert [t.title for t in select(rows, "overlap w2 AG")] == ["all-gather + GEMM, 2 ranks, bfloat16"]
    (table,) = select(rows, "gemm square", ["variants=cublas,streamk", "cases=*1024*"])
    assert len(table.rows) == 1
    assert not any("stream_k" in c.name for c in table.columns)
    assert "Noise floor" in table.caption  # the second measurement of the baseline stays
    for name, options, message in [
        ("nonsense", [], "'nonsense' is not known; expected one of link, gemm"),
        ("gemm sqare", [], "'sqare' is not known.*Did you mean 'square'"),
        ("gemm square float64", [], "'float64' is not known"),
        ("gemm square", ["variants=cublass"], "Did you mean 'cublas'"),
        ("gemm square", ["cases=zzz"], "no case matches 'zzz'"),
        ("gemm square", ["color=red"], "'color' is not known"),
    ]:
        with pytest.raises(BenchError, match=message):
            select(rows, name, options)
    with pytest.raises(BenchError, match="no rows of suite train"):
        select([r for r in rows if r.suite == "gemm"], "train")


def test_noise_is_of_the_world_and_dtype():
    noisy = [
        dataclasses.replace(r, us=stats(1.2 * r.us.p50)) if r.role == "noise" and r.us else r
        for r in samples.overlap_rows((2,), (2048,))
    ]
    calm = samples.overlap_rows((4,), (2048,))
    captions = [t.caption for t in suite_tables([*noisy, *calm], "overlap")]
    assert all("Noise floor 2" in c for c in captions[:3])
    assert all("Noise floor 0" in c for c in captions[3:])
