"""docs/planner.md prints what ``tpk plan`` prints now, and its first snippet runs; the second one does on ranks
(``tests/spawn/test_planned_models.py``)."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import snippets

from tpkernels.planner import Plan, Topology

DOCS = Path(__file__).resolve().parents[2] / "docs"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="docs/ is not beside the tests")


@pytest.fixture(scope="module")
def maker() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("make_planner", DOCS / "make_planner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_planner"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_planner"]


def test_the_page_is_what_the_script_writes(maker: Any) -> None:
    text = (DOCS / "planner.md").read_text()
    assert maker.page_text(text) == text, (
        "docs/planner.md is old; run: PYTHONPATH=. python docs/make_planner.py"
    )


def test_what_the_page_says_of_the_tables(maker: Any) -> None:
    """Its sentences, as far as they have numbers."""
    host = maker.printed(maker.COMMANDS["host"])
    assert re.search(r"1-D, sequence parallel +2 x 1-D.* 1\.01x", host), "the plan is 1 % ahead of it"
    hosts = maker.printed(maker.COMMANDS["hosts"])
    times = re.findall(r"^2-D .* (\d\.\d\d)x +\S+ +yes$", hosts, re.M)
    assert times == ["1.06"], "6 % ahead of the best single method"
    assert len(re.findall(r"^norm, up +2 x 1-D, sequence parallel of 32 ", hosts, re.M)) == 2
    assert re.findall(r"^norm, qkv +(.*?)  ", hosts, re.M) == ["2-D of 8 x 8"] * 2
    assert re.findall(r"^out +(.*?)  ", hosts, re.M) == ["8 x 1-D, sequence parallel of 8", "2-D of 8 x 8"]
    weak = maker.printed(maker.COMMANDS["weak"])
    rows = [line for line in weak.splitlines() if re.match(r"\d+ ", line) and "*" in line]
    columns = {len(re.split(r" {2,}", line.partition("*")[0])) for line in rows}
    assert len(rows) == 8 and columns == {6}, "from 64 ranks on 2-D takes least of what fits"


def test_snippets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    first = snippets("planner.md")[0]
    exec(compile(first, "planner.md", "exec"), {})
    assert "small: 4 layers" in capsys.readouterr().out
    assert Plan.load("plan.json").world == 4 and Path("plan.svg").exists()
    topology = tmp_path / "ours.json"
    topology.write_text(snippets("planner.md", "json")[0])
    assert Topology.load(topology).ranks == 16384


def test_the_picture_is_there() -> None:
    path = DOCS / "planner.svg"
    assert path.exists() and path.stat().st_size < 300_000
