"""bench report: bars of the overlap suite against others and the product alone, and means over layers."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import bench_samples as samples
import pytest
from bench_samples import stats

from bench.bars import COMPUTE_BOUND, PEER_BARS
from bench.links import links_of
from bench.records import Row, geomean, load
from bench.report import run
from bench.report.analysis import group_cases
from bench.report.table import Table
from bench.report.tables import select, suite_tables
from bench.report.tables_peers import (
    PeerLine,
    layer_peers_tables,
    overlap_peers_tables,
    peer_lines,
)
from bench.suite import Options
from bench.suites.overlap_shapes import OPS, shapes

RESULTS = Path(__file__).parents[2] / "bench/results"
GEMM, BASELINE, PEER, OURS = 100.0, 150.0, 140.0, 104.0  # us


def rows(
    ours: dict[str, float] | float = OURS, world: int = 2, ops: tuple[str, ...] = (), **more: Any
) -> list[Row]:
    """All shapes of the set, every one with the same times; of some cases others of ours."""
    found = []
    for s in shapes(Options(world=world, sets=("measured",), ops=ops)):
        mine = ours if isinstance(ours, float) else ours.get(s.name, OURS)
        times = {"nccl+cublas": BASELINE, "gemm": GEMM, "ours": mine}
        if s.short != "AR":
            times["symm_mem"] = PEER
        for variant, us in times.items():
            role = {"gemm": "part", "ours": "ours"}.get(variant, "peer")
            fields: dict[str, Any] = {"dtype": "bfloat16", "world": world, "run": "r", **more}
            params = {"m": s.m, "n": s.n, "k": s.k}
            found.append(
                Row(
                    "overlap",
                    s.name,
                    OPS[s.short],
                    variant,
                    role,  # type: ignore[arg-type]
                    us=stats(us),
                    shape_set="measured",
                    params=params,
                    **fields,
                )
            )
    return found


def line_of(found: list[Row], op: str, against: str, least: int = 1) -> PeerLine:
    lines = peer_lines(group_cases(found, "overlap"))
    (line,) = (
        x for x in lines if (x.bar.op, x.bar.against, x.bar.rows[0], x.bar.label) == (op, against, least, "")
    )
    return line


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in line] for line in table.rows]


def test_the_bars_are_those_of_the_issue():
    bars = {(b.op, b.against, b.rows[0], b.rows[1], b.label): b for b in PEER_BARS}
    assert len(bars) == len(PEER_BARS) == 13
    for op in ("AG", "RS"):
        assert bars[op, "product", 1, 1 << 31, ""].each == 1.07
        assert bars[op, "hidden", 1, 1 << 31, ""].each == 0.90
        assert all(bars[op, what, 1, 1 << 31, ""].compute_bound for what in ("product", "hidden"))
    for op in OPS:
        large = bars[op, "baseline", 2048, 1 << 31, ""]
        assert (large.each, *(large.least_mean(world) for world in (8, 4, 2))) == (1.15, 1.45, 1.45, 1.35)
        assert bars[op, "baseline", 128, 1024, ""].each == 1.00
    gathers, scatters = (bars[op, "best peer", 1, 1 << 31, ""] for op in ("AG", "RS"))
    assert (gathers.each, gathers.least_mean(8), gathers.least_mean(2)) == (0.98, 1.10, 1.03)
    assert (scatters.each, scatters.least_mean(8), scatters.least_mean(2)) == (0.98, 1.40, 1.40)
    assert bars["AR", "baseline", 1, 256, "llama70b"].each == 1.20


def test_which_shapes_a_bar_is_about():
    found = {
        (x.bar.op, x.bar.against, x.bar.rows[0]): set(x.ratios)
        for x in peer_lines(group_cases(rows(), "overlap"))
    }
    bound = {f"AG {label} M{m}" for label, m in COMPUTE_BOUND}
    assert found["AG", "product", 1] == found["AG", "hidden", 1] == bound
    assert found["RS", "baseline", 128] == {"RS gpt3 M1024"}
    assert found["AR", "baseline", 1] == {
        f"AR {label} M{m}" for label in ("llama70b", "llama70b qkv") for m in (16, 64, 256)
    }
    assert len(found["AG", "best peer", 1]) == 7 and len(found["AG", "baseline", 2048]) == 6


def test_ratios_and_verdicts():
    assert line_of(rows(), "AG", "product").ratios["AG gpt3 M8192"] == pytest.approx(1.04)
    # 4 us exposed of the 50 that the baseline takes beside the product.
    assert line_of(rows(), "AG", "hidden").ratios["AG gpt3 M8192"] == pytest.approx(0.92)
    assert line_of(rows(), "AG", "best peer").ratios["AG gpt3 M1024"] == pytest.approx(PEER / OURS)
    assert {x.verdict for x in peer_lines(group_cases(rows(), "overlap")) if x.bar.op != "RS"} == {"holds"}
    scatters = line_of(rows(), "RS", "best peer")  # 1.346 in the mean, and 1.40 is wanted
    assert (scatters.verdict, scatters.mean) == ("missed", pytest.approx(PEER / OURS))

    slow = rows({"AG llama70b M8192": 107.1})
    assert line_of(slow, "AG", "product").verdict == line_of(slow, "AG", "hidden").verdict == "missed"
    assert line_of(slow, "AG", "product").worst == "AG llama70b M8192"
    slow = rows({"AG llama8b M8192": 131.0})
    assert (line_of(slow, "AG", "baseline", 2048).verdict, line_of(slow, "AG", "baseline", 2048).worst) == (
        "missed",
        "AG llama8b M8192",
    )
    # The mean of two ranks is less than that of more.
    assert line_of(rows(107.0), "AG", "baseline", 2048).verdict == "holds"
    assert line_of(rows(107.0, world=4), "AG", "baseline", 2048).verdict == "missed"


def test_what_was_not_measured_or_went_wrong():
    part = [r for r in rows(107.0, world=4) if r.case != "AG gpt3 M2048"]
    line = line_of(
        part, "AG", "baseline", 2048
    )  # too slow in the mean of those there are, which decides nothing
    assert (line.verdict, line.wanted, len(line.ratios)) == ("incomplete", 6, 5)
    part = [dataclasses.replace(r, us=stats(140.0)) if r.variant == "ours" else r for r in part]
    assert line_of(part, "AG", "baseline", 2048).verdict == "missed"
    for status in ("failed", "crashed", "timeout", "error"):
        lost = [
            dataclasses.replace(r, status=status, us=None)  # type: ignore[arg-type]
            if (r.case, r.variant) == ("RS gpt3 M8192", "ours")
            else r
            for r in rows()
        ]
        line = line_of(lost, "RS", "baseline", 2048)
        assert (line.verdict, line.worst) == ("missed", "RS gpt3 M8192")
        assert texts(overlap_peers_tables(lost)[0])[1][3:5] == ["wrong", "RS gpt3 M8192"]
    without = [r for r in rows() if r.variant != "gemm"]
    assert {x.bar.against for x in peer_lines(group_cases(without, "overlap"))} == {"baseline", "best peer"}
    alone = [r for r in rows() if r.variant in ("gemm", "ours")]
    assert {x.bar.against for x in peer_lines(group_cases(alone, "overlap"))} == {"product"}
    assert overlap_peers_tables([r for r in rows() if r.role != "ours"]) == [] == overlap_peers_tables([])


def test_table_of_bars():
    (table,) = overlap_peers_tables(rows({"AR llama70b M16": 126.0}))
    assert table.title == "beside others, 2 ranks, bfloat16"
    assert table.caption.startswith("Of ours. × NAME: its time over ours; ")
    lines = texts(table)
    assert lines[0] == [
        "AG, / product, bound by arithmetic",
        "2",
        "1.040",
        "1.040",
        lines[0][4],
        "each ≤ 1.07",
        "holds",
    ]
    assert lines[2][1:4] == ["2", "–", "92 %"] and lines[2][5] == "each ≥ 90 %"
    assert lines[4][0] == "AG, × nccl+cublas, M ≥ 2048" and lines[4][5] == "each ≥ 1.15, geomean ≥ 1.35"
    assert lines[8] == [
        "RS, × best peer",
        "7",
        "1.346",
        "1.346",
        lines[8][4],
        "each ≥ 0.98, geomean ≥ 1.40",
        "missed",
    ]
    assert lines[-1] == [
        "AR llama70b, × nccl+cublas, M 1 to 256",
        "6",
        f"{geomean([BASELINE / OURS] * 5 + [BASELINE / 126.0]):.3f}",
        "1.190",
        "AR llama70b M16",
        "each ≥ 1.20",
        "missed",
    ]
    again = Row(
        "overlap",
        "AR gpt3 M16",
        OPS["AR"],
        "nccl+cublas again",
        "noise",
        dtype="bfloat16",
        world=2,
        run="r",
        shape_set="measured",
        us=stats(BASELINE * 1.02),
        partner="nccl+cublas",
    )
    (table,) = overlap_peers_tables([*rows({"AR llama70b M16": 126.0}), again])
    assert texts(table)[-1][-1] == "missed, within the noise"
    titles = [t.title for t in overlap_peers_tables([*rows(world=4), *rows()])]
    assert titles == ["beside others, 4 ranks, bfloat16", "beside others, 2 ranks, bfloat16"]


def layer(case: str, variant: str, us: float | None, **more: Any) -> Row:
    role = "ours" if variant.startswith("ours") else "peer"
    fields: dict[str, Any] = {"dtype": "bfloat16", "world": 2, "run": "r", **more}
    found = None if us is None else stats(us)
    return Row("layer", case, case.split()[0], variant, fields.pop("role", role), us=found, **fields)


def test_means_over_layers():
    found = [
        layer("mlp x", "nccl+cublas", 100.0),
        layer("mlp x", "nccl+cublas again", 101.0, role="noise", partner="nccl+cublas"),
        layer("mlp x", "torch-tp-async", 90.0),
        layer("mlp x", "ours", 80.0),
        layer("mlp x", "ours-styles", 50.0),
        layer("block x", "nccl+cublas", 400.0),
        layer("block x", "torch-tp-async", 320.0),
        layer("block x", "torch-tp", None, status="crashed", reason="signal 11"),
        layer("block x", "ours", 400.0),
        layer("block x", "ours-styles", None, status="failed"),
    ]
    (table,) = layer_peers_tables(found)
    assert table.title == "layers beside others, 2 ranks, bfloat16"
    assert [c.name for c in table.columns[2:4]] == ["× nccl+cublas", "× torch-tp-async"]
    # sqrt(100 / 80 * 400 / 400), sqrt(90 / 80 * 320 / 400); the best peer of each is torch-tp-async.
    assert texts(table) == [
        ["ours", "2", "1.12", "0.95", "0.95", "0.80", "block x"],
        ["ours-styles", "1 of 2", "2.00", "1.80", "1.80", "1.80", "mlp x"],
    ]
    found[7] = layer("block x", "torch-tp", 440.0)
    (table,) = layer_peers_tables(found)
    line = next(x for x in table.rows if x[0].text == "ours")
    at = [c.name for c in table.columns].index("× torch-tp")
    assert (line[at].text, line[at].note) == ("1.10", 1) and table.notes == [
        "of fewer cases: the peer has no time in the others"
    ]
    assert layer_peers_tables([r for r in found if r.role != "ours"]) == []
    assert layer_peers_tables([r for r in found if r.role == "ours"]) == []


def test_reports_begin_with_them():
    found = load(RESULTS / "2026-11-29_h200x2_overlap.jsonl")
    titles = [t.title for t in suite_tables(found.latest(), "overlap", links_of(found))]
    assert titles[:2] == ["bars, 2 ranks, bfloat16", "beside others, 2 ranks, bfloat16"]
    titles = [t.title for t in suite_tables(samples.layer_rows(), "layer")]
    assert titles == ["layers beside others, 4 ranks, bfloat16", "layers, 4 ranks, bfloat16"]


def test_blocks_of_a_readme(tmp_path):
    names = {
        "overlap-peers w2": "2026-11-29_h200x2_overlap.jsonl",
        "layer-peers w2": "2026-11-29_h200x2_layer.jsonl",
    }
    readme = tmp_path / "README.md"
    text = ""
    for name, file in names.items():
        (tmp_path / file).write_bytes((RESULTS / file).read_bytes())
        text += f"<!-- bench: {name} from {file} -->\n<!-- bench: end -->\n"
    readme.write_text(text, encoding="utf-8")
    assert run([], readme=readme, stdout=io.StringIO()) == 0
    for name, file in names.items():
        (table,) = select(load(RESULTS / file).latest(), name)
        assert table.markdown(heading="") in readme.read_text(encoding="utf-8")
