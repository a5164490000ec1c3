"""docs/schedules.md shows the schedules that the kernel walks, as they are now."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
REMAKE = "it is old; run: PYTHONPATH=. python docs/make_schedules.py"
KINDS = ("data_parallel", "split_k", "stream_k", "hybrid_first", "hybrid_last")

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="docs/ is not beside the tests")


@pytest.fixture(scope="module")
def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_schedules", DOCS / "make_schedules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_schedules"] = module  # dataclasses and the drawing module look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_schedules"]


def test_the_page_is_what_the_script_writes(maker: Any) -> None:
    text = (DOCS / "schedules.md").read_text()
    assert maker.page_text(text) == text, f"docs/schedules.md: {REMAKE}"
    assert tuple(maker.KINDS) == KINDS
    for name in maker.captions():
        assert f"<!-- made: figure {name} -->" in text, f"the page does not show {name}"


def test_pictures_show_the_present_schedules(maker: Any) -> None:
    names = {maker.picture_file(name, theme).name for name in maker.captions() for theme in maker.THEMES}
    assert {path.name for path in maker.PICTURES.iterdir()} == names, (
        "a picture is missing, or nobody draws it"
    )
    for name in maker.captions():
        for theme in maker.THEMES:
            path = maker.picture_file(name, theme)
            assert maker.digest(name) in path.read_text(), f"{path.name}: {REMAKE}"
            assert path.stat().st_size < 150_000, path.name


@pytest.mark.parametrize("kind", KINDS)
def test_every_iteration_is_drawn_once(maker: Any, kind: str) -> None:
    line = maker.timeline(kind)
    parts = defaultdict(list)
    for row in line.rows:
        clock = 0.0
        for bar in row:
            assert bar.start == pytest.approx(clock), "a cluster does one thing at a time, without a gap"
            assert bar.products_end - bar.start == pytest.approx(bar.k_end - bar.k_begin)
            assert bar.start < bar.products_end <= bar.wait_end <= bar.fixup_end <= bar.end
            clock = bar.end
            parts[bar.tile].append((bar.k_begin, bar.k_end, bar.finishes, bar.split))
    assert len(line.rows) == 66 and sorted(parts) == list(range(16 * 9))
    for tile, found in parts.items():
        done = [k for begin, end, _, _ in found for k in range(begin, end)]
        assert sorted(done) == list(range(112)), f"tile {tile}"
        assert [finishes for _, end, finishes, _ in found if end == 112] == [True]
        assert sum(finishes for _, _, finishes, _ in found) == 1
        assert {split for _, _, _, split in found} == {len(found) > 1}, "marked as split where it is not"


@pytest.mark.parametrize("kind", KINDS)
def test_partials_are_added_after_they_are_written(maker: Any, kind: str) -> None:
    bars = maker.timeline(kind).bars
    written = defaultdict(list)
    for bar in bars:
        if not bar.finishes:
            written[bar.tile].append(bar)
    for bar in bars:
        for partial in written[bar.tile] if bar.finishes else ():
            assert partial.fixup_end <= bar.wait_end and partial.ticket < bar.ticket


def test_what_the_text_says_without_numbers(maker: Any) -> None:
    facts = {kind: maker.facts(kind) for kind in maker.IN_TABLE}
    assert all(f["waits"] == 0 for f in facts.values()), "no cluster ever waits"
    assert facts["split_k"]["split"] == 16 * 9 > facts["stream_k"]["split"]
    shares = [sum(bar.k_end - bar.k_begin for bar in row) for row in maker.timeline("stream_k").rows]
    assert max(shares) - min(shares) == 1, "shares differ by one iteration"
    last, aligned = (
        [(b.tile, b.k_begin, b.k_end) for b in maker.timeline(kind).bars]
        for kind in ("hybrid_last", "hybrid_aligned")
    )
    assert last == aligned, "hybrid_aligned needs a picture of its own"
    per_tile = defaultdict(int)
    for bar in maker.timeline("hybrid_first").bars:
        per_tile[bar.tile] += not bar.finishes
    assert max(per_tile.values()) == 1, "a split tile of the hybrid has one partial to add"


def test_pictures_are_drawn_alike_on_every_run(maker: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS))
    import draw_schedules

    for name in ("one", "two"):
        draw_schedules.draw_timeline("hybrid_first", "dark", tmp_path / f"{name}.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
