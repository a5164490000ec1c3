"""bench report: the command, the page, the README blocks, and what it says to bad input."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import bench_samples as samples
import pytest
from bench_samples import stats

from bench import records
from bench.errors import BenchError
from bench.report import check_readme, run
from bench.report.readme import render_readme

# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A result file with hostile names, and two traces."""
    folder = tmp_path_factory.mktemp("report")
    rows = samples.few_rows()
    evil = "square <script>alert(1)</script> & 'x' $y_1$"
    rows += [dataclasses.replace(r, case=evil) for r in rows if r.case.startswith("square 1024x")]
    broken = next(r for r in rows if r.variant == "streamk" and r.case.startswith("square 2048x"))
    rows[rows.index(broken)] = dataclasses.replace(
        broken, status="failed", reason="error <b>0.5</b>", us=stats(1)
    )
    found = {"results": samples.write(folder / "r.jsonl", rows)}
    for name, is_fused in (("pair", False), ("fused", True)):
        found[name] = folder / f"{name}.json"
        samples.trace(f"{name} <i>", fused=is_fused, path=found[name])
    return found


@pytest.fixture(scope="module")
def page(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("page") / "deep" / "r.html"
    stdout = io.StringIO()
    assert run(list(files.values()), out=out, stdout=stdout) == 0
    assert stdout.getvalue() == f"wrote {out}\n"
    return out.read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Tags with their attributes; complains about tags that do not match."""

    VOID = frozenset({"meta", "br", "input", "link", "img", "use", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else(page):
    elements = Elements(page)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\((?!#)", page)
    for tag, attributes in elements.found:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
        assert tag not in ("link", "img", "iframe", "object")


def test_the_page_is_safe_from_names(page):
    assert page.count("<script>") == 2  # the page's own
    assert "alert(1)</script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "error &lt;b&gt;0.5&lt;/b&gt;" in page
    assert "<i>" not in page
    assert "$y_1$" in page  # not set as a formula


def test_the_page_has_both_themes(page):
    from bench.report.draw import COLORS
    from bench.report.page import PALETTE

    assert set(COLORS) <= set(PALETTE)
    used = set(re.findall(r"var\(--([a-z0-9]+)\)", page))
    assert used <= {*PALETTE, "font"}
    assert {"ours", "baseline", "gemm", "comm", "ink"} <= used
    for light, dark in PALETTE.values():
        assert light in page
        assert dark in page
    assert "prefers-color-scheme: dark" in page
    assert "data-theme=dark" in page
    # Every stand-in was replaced, and no other colour is fixed in a picture.
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    for picture in pictures:
        assert not re.search(r"#[0-9a-f]{6}\b", picture), re.findall(r".{80}#[0-9a-f]{6}", picture)[:3]


def test_the_page_has_every_picture_and_table(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {"link", "gemm", "sweep", "quantize", "overlap", "layer", "train", "traces"} <= set(ids)
    for title in (
        "Transports",
        "A GEMM beside each transport",
        "Against cublas: square",
        "Against cublas: decode",
        "Roofline",
        "Sweep: 6 log-sampled shapes",
        "Stream-K against data-parallel",
        "all-gather + GEMM: speed-up against M",
        "GEMM + all-reduce: where the time goes",
        "Time and memory",
        "Tokens a second",
        "Timeline",
    ):
        assert f"<b>{title}" in page, title
    assert page.count("<svg") == page.count("<figure") == page.count('role="img"')
    assert "FAILED" in page
    assert "NVIDIA H100 80GB HBM3" in page
    assert "2.11.0+cu130" in page


def test_fonts_are_the_page_s():
    """matplotlib writes them as one property or as several, by version."""
    from bench.report.draw import _for_page

    for style in (
        "font: 700 11px 'DejaVu Sans', sans-serif; text-anchor: end",
        "font-size: 11px; font-family: 'DejaVu Sans'",
    ):
        svg = _for_page(
            f'<?xml?>\n<svg viewBox="0 0 1 1"><text style="{style}">a</text></svg>', "f1", "<b>", {}
        )
        assert "DejaVu" not in svg
        assert "11px" in svg
        assert 'aria-label="&lt;b&gt;"' in svg
        assert "text-anchor: end" in svg or "anchor" not in style


def test_tooltips_name_what_they_belong_to(page):
    tips = re.findall(r"<title>(.*?)</title>", page, re.S)
    assert any("streamk" in t and "× cublas" in t for t in tips)
    assert any("hidden" in t for t in tips)
    assert any("streamk_gemm&lt;128, 256&gt;" in t for t in tips)


def test_printed_tables_and_the_page_beside(files, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.jsonl"
    path.write_bytes(files["results"].read_bytes())
    stdout = io.StringIO()
    only = [r for r in samples.few_rows() if r.suite == "train"]
    samples.write(path, only)
    assert run([path], stdout=stdout) == 0
    text = stdout.getvalue()
    assert text.startswith("# NVIDIA H100 80GB HBM3\n")
    assert "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, NCCL 2.28.9, commit ec1131a." in text
    assert "### training, 2 ranks, bfloat16" in text
    assert (tmp_path / "run.html").exists()


def test_markdown_file(files, tmp_path):
    out = tmp_path / "r.md"
    assert run([files["results"], files["fused"], files["pair"]], markdown=out, stdout=io.StringIO()) == 0
    text = out.read_text(encoding="utf-8")
    assert "**FAILED** [1]" in text
    assert "> **Note:**" in text
    assert "| fused &lt;i> | 0 | 634 | 380 | 20.0 | 95 % |" in text
    assert list(tmp_path.iterdir()) == [out]  # no page was asked for


def test_without_matplotlib(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r'pip install "tpkernels\[bench\]"'):
        run([files["results"]], out=tmp_path / "r.html", stdout=io.StringIO())
    stdout = io.StringIO()
    path = samples.write(tmp_path / "r.jsonl", samples.train_rows())
    assert run([path], stdout=stdout) == 0
    assert "No page: " in stdout.getvalue()
    assert "### training" in stdout.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("hello\n", "begins with 'hello'"),
        ("[1, 2]", "begins with"),
        ('{"traceEvents": []}', "Chrome trace"),
        ('{"kind": "photo"}\n', "kind 'photo'"),
        (
            '{"kind": "header", "schema": 9, "run": "a", "suite": "gemm", "started": ""}\n',
            "schema 9.*reads schema 1",
        ),
        (
            '{"kind": "header", "schema": 1, "run": "a", "suite": "gemm", "started": ""}\n',
            "nothing was measured",
        ),
        ('{"kind": "row", "suite": "gemm"}\n', "not a row of schema 1"),
        ('{"kind": "trace_summary", "schema": 7, "ranks": []}', "schema 7.*reads schema 1"),
        ('{"kind": "trace_summary", "schema": 1, "title": "x"}', "missing"),
        ('{"kind": "trace_summary", "schema": 1, "ranks": [{"rank": 0}]}', "missing"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(BenchError, match=message) as error:
        run([path], stdout=io.StringIO())
    assert str(path) in str(error.value)


def test_bad_arguments(tmp_path, files):
    with pytest.raises(BenchError, match="at least one result file"):
        run([], stdout=io.StringIO())
    with pytest.raises(BenchError, match="cannot be read"):
        run([tmp_path / "none.jsonl"], stdout=io.StringIO())
    with pytest.raises(BenchError, match="cannot be written"):
        run([files["results"]], markdown=tmp_path, stdout=io.StringIO())


def test_an_interrupted_file_is_reported(tmp_path):
    path = samples.write(tmp_path / "r.jsonl", samples.train_rows())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:8]) + lines[8][:40])  # cut off in a line
    out = tmp_path / "r.md"
    run([path], markdown=out, stdout=io.StringIO())
    assert "is not complete: --resume measures the rest" in out.read_text()
    assert len(records.load(path).rows) == 7


def test_a_trace_alone(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "t.json"
    samples.trace("alone", fused=True, path=path)
    run([path], out=tmp_path / "t.html", stdout=io.StringIO())
    text = (tmp_path / "t.html").read_text()
    assert "<title>tpkernels: traces</title>" in text
    assert text.count("<svg") == 1


# --- README --------------------------------------------------------------------------------------------------------

README = """# Title

<!-- bench: gemm square bfloat16 from data/r.jsonl variants=cublas,streamk -->
<!-- bench: end -->

text <!-- a comment -->

<!-- bench: overlap w2 AG from data/r.jsonl cases=*gpt3* -->
old
<!-- bench: end -->
The end.
"""


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    samples.write(
        tmp_path / "data" / "r.jsonl", [*samples.gemm_rows(sweep=0), *samples.overlap_rows((2,), (2048,))]
    )
    path = tmp_path / "README.md"
    path.write_text(README, encoding="utf-8")
    return path


def test_readme_is_filled_and_held(readme):
    before = check_readme(readme)
    assert len(before) == 2
    assert "README.md:3: the table 'gemm square bfloat16' is not what data/r.jsonl gives" in before[0]
    stdout = io.StringIO()
    assert run([], readme=readme, stdout=stdout) == 0
    assert "filled gemm square bfloat16, overlap w2 AG" in stdout.getvalue()
    assert check_readme(readme) == []
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("# Title\n\n<!-- bench: gemm square")
    assert text.endswith("<!-- bench: end -->\nThe end.\n")
    assert "text <!-- a comment -->" in text
    assert "old" not in text
    assert text.count("| AG gpt3 M2048 |") == 1
    assert "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, NCCL 2.28.9, commit ec1131a." in text

    again = io.StringIO()
    run([], readme=readme, stdout=again)
    assert "up to date" in again.getvalue()
    readme.write_text(
        text.replace("1024 × 1024 × 1024", "9 × 9 × 9"), encoding="utf-8"
    )  # somebody edits a number
    assert len(check_readme(readme)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench: gemm from data/r.jsonl -->\n", r"README.md:1: the block has no end"),
        ("\n<!-- bench: end -->\n", r"README.md:2: an end without a beginning"),
        ("<!-- bench: gemm from a -->\n<!-- bench: gemm from b -->\n<!-- bench: end -->\n", "inside another"),
        ("<!-- bench: gemm square -->\n<!-- bench: end -->\n", "expected <!-- bench: NAME from FILE"),
        (
            "<!-- bench: gemm from data/r.jsonl oops -->\n<!-- bench: end -->\n",
            "expected <!-- bench: NAME from FILE",
        ),
        ("<!-- bench: gemm from data/r.jsonl --> x\n<!-- bench: end -->\n", "must end its line"),
        (
            "<!-- bench: gemm zzz from data/r.jsonl -->\n<!-- bench: end -->\n",
            "README.md:1: table 'gemm zzz': 'zzz' is not known",
        ),
        ("<!-- bench: gemm from none.jsonl -->\n<!-- bench: end -->\n", "none.jsonl: cannot be read"),
    ],
)
def test_bad_readme(readme, text, message):
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match=message):
        render_readme(readme)


def test_readme_of_two_cards(readme):
    data = readme.parent / "data"
    samples.write(data / "h200.jsonl", samples.gemm_rows(sweep=0), run="other", env={"gpu": "NVIDIA H200"})
    text = "<!-- bench: gemm square from data/r.jsonl,data/h200.jsonl -->\n<!-- bench: end -->\n"
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match="several cards"):
        render_readme(readme)


def test_samples_are_the_same_on_every_call():
    assert samples.rows() == samples.rows()
    assert json.dumps(samples.trace("x", fused=True)) == json.dumps(samples.trace("x", fused=True))


def test_report_needs_no_torch(tmp_path):
    """Importing the report, and what it imports, is quick: no torch, no matplotlib."""
    import subprocess

    heavy = ["torch", "matplotlib", "numpy", "jinja2"]
    code = f"import sys, bench.report, bench.compare; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
