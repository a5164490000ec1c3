"""Result files: what is written is read back, whatever happened to the process that wrote them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import records
from bench.errors import BenchError, check_known
from bench.records import Footer, Header, Row, Stats

HEADER = Header("run1", "gemm", "2026-11-28T00:00:00+00:00", ["gemm"], {"gpu": "H100"})


def make_row(variant: str = "cublas", *, us: float = 10.0, **fields: object) -> Row:
    known = {"case": "square", "op": "matmul", "role": "peer", "dtype": "bfloat16", "run": "run1"}
    return Row(suite="gemm", variant=variant, us=Stats.of([us, us + 1, us + 2]), **{**known, **fields})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    row = make_row(
        params={"m": 8}, extra={"plan": ["dp", 1]}, host_us=Stats(1.0, 2.0, 3.0, 0.5, 4), error=0.1
    )
    footer = Footer("run1", "2026-11-28T00:01:00+00:00", 60.0, {"gpus": []}, complete=False)
    for record in (HEADER, row, footer):
        records.append(path, record)
    found = records.load(path)
    assert (found.headers, found.rows, found.footers) == ([HEADER], [row], [footer])
    assert found.header_of(row) == HEADER
    assert found.header_of(make_row(run="other")) is None


def test_a_footer_without_word_of_completeness_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records.append(path, HEADER)
    with path.open("a") as file:
        file.write(json.dumps({"kind": "footer", "run": "run1", "finished": "", "seconds": 1.0}) + "\n")
    assert records.load(path).footers[0].complete


def test_a_cut_off_line_is_dropped_and_the_file_stays_usable(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records.append(path, HEADER)
    records.append(path, make_row("first"))
    whole = len(path.read_bytes())
    records.append(path, make_row("second"))
    path.write_bytes(path.read_bytes()[: whole + 40])
    assert [row.variant for row in records.load(path).rows] == ["first"]
    records.append(path, make_row("third"))
    assert [row.variant for row in records.load(path).rows] == ["first", "third"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_cut_line_longer_than_a_block_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records.append(path, HEADER)
    with path.open("ab") as file:
        file.write(b'{"kind": "row", "x": "' + b"y" * 200_000)
    records.append(path, make_row("after"))
    assert [row.variant for row in records.load(path).rows] == ["after"]


def test_a_file_of_a_single_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"kind": "hea')
    with pytest.raises(BenchError, match="found no header"):
        records.load(path)
    records.append(path, HEADER)
    assert records.load(path).headers == [HEADER]


def test_infinity_and_nan_become_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records.append(path, HEADER)
    records.append(path, make_row(error=math.inf, extra={"a": [math.nan, {"b": -math.inf}]}))
    text = path.read_text()
    assert "Infinity" not in text and "NaN" not in text
    assert records.load(path).rows[0].error == 1e308


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            '{"kind": "header", "schema": 99, "run": "r", "suite": "s", "started": ""}',
            "schema 99.*reads schema 1",
        ),
        ('{"name": "square", "us": 3}', "expected a header, row or footer.*got kind None"),
        ("[1, 2]", "got kind None"),
        ("square 3", "expected a JSON object, got 'square 3'"),
        ('{"kind": "row", "suite": "s", "colour": "red"}', "not a row of schema 1"),
        ('{"kind": "row", "suite": "s", "us": {"p50": 1}}', "not a row of schema 1"),
    ],
)
def test_a_foreign_file_is_refused_with_the_place(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(BenchError, match=rf"foreign\.jsonl:1: .*{sentence}"):
        records.load(path)


def test_a_missing_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"nowhere\.jsonl: cannot be read"):
        records.load(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BenchError, match="found no header"):
        records.load(tmp_path / "empty.jsonl")


def test_latest_keeps_the_last_of_each_measurement(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for record in (
        HEADER,
        make_row(us=1.0),
        make_row(us=2.0),
        make_row("other", us=3.0),
        make_row(us=4.0, world=2),
    ):
        records.append(path, record)
    assert [(r.variant, r.world, r.us.min) for r in records.load(path).latest() if r.us] == [
        ("cublas", 1, 2.0),
        ("other", 1, 3.0),
        ("cublas", 2, 4.0),
    ]


def test_latest_keeps_every_card(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for run, gpu, us in (("run1", "H100", 1.0), ("run2", "H200", 2.0), ("run3", "H100", 3.0)):
        records.append(path, Header(run, "gemm", "", env={"gpu": gpu, "cpu": "some"}))
        records.append(path, make_row(us=us, run=run))
    records.append(path, Header("run4", "gemm", "", env={"gpu": "", "cpu": "some"}))
    records.append(path, make_row(us=4.0, run="run4"))
    results = records.load(path)
    found = {results.card_of(r.run): r.us.min for r in results.latest() if r.us}
    assert found == {"H100": 3.0, "H200": 2.0, "some": 4.0} and len(results.latest()) == 3


def test_statistics_of_samples() -> None:
    stats = Stats.of([10.0 * i for i in range(11)])
    assert (stats.p20, stats.p50, stats.p80, stats.min, stats.n) == (20.0, 50.0, 80.0, 0.0, 11)
    assert stats.spread == pytest.approx(1.2)
    assert Stats.of([3]) == Stats(3.0, 3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="expected at least one"):
        Stats.of([])


def test_rates_come_from_the_graph_time_and_else_from_the_host() -> None:
    row = make_row(us=9.0, flops=2e7, bytes=1e4, host_us=Stats.of([40.0]))
    assert row.tflops == pytest.approx(2.0)
    assert row.gbps == pytest.approx(1.0)
    host = Row("gemm", "c", "matmul", "v", "peer", host_us=Stats.of([40.0]), flops=2e7)
    assert host.tflops == pytest.approx(0.5)
    assert Row("gemm", "c", "matmul", "v", "peer", flops=2e7).tflops is None


def test_geometric_mean() -> None:
    assert records.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(records.geomean([]))


def test_an_unknown_name_is_told_the_nearest() -> None:
    check_known("suite", "gemm", ["link", "gemm"])
    with pytest.raises(
        BenchError, match=r"suite: 'gem' is not known; expected one of link, gemm\. Did you mean 'gemm'\?"
    ):
        check_known("suite", "gem", ["link", "gemm"])


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match=r"r\.jsonl: cannot be written \([\w ]+\); name another file"):
        records.append(tmp_path / "file" / "r.jsonl", Header("a", "gemm", "now"))
