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
KINDS = ("data_parallel", "split_k", "stream_k", "hybrid_first", "hybrid_last", "hybrid_aligned")
DIVIDED = "hybrid_aligned"

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
            assert bar.start < bar.products_end <= bar.write_end <= bar.wait_end <= bar.fixup_end <= bar.end
            assert bar.writes == (bar.write_end > bar.products_end)
            assert (bar.finishes > 0) == (bar.end > bar.fixup_end), "an epilogue for what it finishes"
            clock = bar.end
            parts[bar.tile].append(bar)
    assert len(line.rows) == 66 and sorted(parts) == list(range(16 * 9))
    for tile, found in parts.items():
        done = [k for bar in found for k in range(bar.k_begin, bar.k_end)]
        assert sorted(done) == list(range(112)), f"tile {tile}"
        assert sum(bar.finishes for bar in found) == pytest.approx(1), f"tile {tile}"
        assert {bar.split for bar in found} == {len(found) > 1}, "marked as split where it is not"


def split_tiles(maker: Any, kind: str) -> dict[int, list[Any]]:
    """Tile -> its bars, in the order of K."""
    found = defaultdict(list)
    for bar in sorted(maker.timeline(kind).bars, key=lambda bar: bar.k_begin):
        if bar.split:
            found[bar.tile].append(bar)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_partials_are_added_after_they_are_written(maker: Any, kind: str) -> None:
    for bars in split_tiles(maker, kind).values():
        for bar in bars:
            if bar.finishes:
                assert bar.wait_end == max(b.write_end for b in bars), (
                    "adds what is there, and as soon as it is"
                )
            else:
                assert bar.end == bar.write_end, "waits for nothing"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != DIVIDED])
def test_the_last_of_k_finishes_alone(maker: Any, kind: str) -> None:
    cost = maker.costs()
    for *others, last in split_tiles(maker, kind).values():
        assert last.finishes == 1 and not last.writes and last.k_end == 112
        assert all(bar.writes and not bar.finishes and bar.ticket < last.ticket for bar in others)
        assert (last.fixup_end - last.wait_end) * cost["iter"] == pytest.approx(cost["add"] * len(others))


def test_fixup_is_divided_where_the_kernel_divides_it(maker: Any) -> None:
    """Where a cluster has a second worker, one ends each tile, whatever the schedule allows."""
    for splits in range(2, 9):
        s = maker.plan("split_k", splits).schedule
        assert s.divided_shares == splits and s.workers == 16 * 9 * splits > maker.clusters()
        assert not maker.is_divided(s)
    s = maker.plan(DIVIDED).schedule
    assert s.divided_shares and s.workers <= maker.clusters() and maker.is_divided(s)


def test_divided_fixup_is_drawn_and_charged(maker: Any) -> None:
    """The model's exchanges and one epilogue, in equal shares, each by its worker."""
    line, cost = maker.timeline(DIVIDED), maker.costs()
    s = maker.plan(DIVIDED).schedule
    tiles = split_tiles(maker, DIVIDED)
    assert len(tiles) == 16 * 9 % 66
    for bars in tiles.values():
        assert len(bars) == s.divided_shares and all(bar.writes for bar in bars)
        assert [bar.finishes * len(bars) for bar in bars] == pytest.approx([1] * len(bars))
        busy = sum(bar.end - bar.products_end - (bar.wait_end - bar.write_end) for bar in bars)
        assert busy * cost["iter"] == pytest.approx(len(bars) * cost["exchange"] + cost["epilogue"])
    last = [row[-1] for row in line.rows if any(bar.split for bar in row)]
    assert len(last) == 60 == sum(bar.split for bar in line.bars), "one run each"
    assert all(bar.split for bar in last), "its last work"


def test_model_of_the_table_is_that_of_the_planner(maker: Any) -> None:
    """Where all memory traffic is hidden, the drawn time is what the planner predicts, to a run's last iteration."""
    cost_of_one = maker.costs()["iter"]
    for kind in ("data_parallel", "stream_k", "hybrid_aligned"):
        problem = (maker.M, maker.N, maker.K)
        found = maker._host.hopper_plans(
            *problem, schedule=kind, tile=f"{maker.TILE}/{maker.CLUSTER}", multiprocessors=132
        )[0]
        cost = maker._host.hopper_cost() | {"overlap": 0.0, "bytes_per_us": 1e12}
        predicted = maker._host.hopper_predict_us(*problem, plan=found, multiprocessors=132, cost=cost)
        assert maker.facts(kind)["us"] == pytest.approx(predicted, abs=cost_of_one), kind


def test_what_the_text_says_without_numbers(maker: Any) -> None:
    facts = {kind: maker.facts(kind) for kind in KINDS}
    for kind in KINDS:
        assert kind == DIVIDED or facts[kind]["waits"] == 0, "no finisher ever waits"
    waits = {round(bar.wait_end - bar.write_end, 6) for bar in maker.timeline("hybrid_aligned").bars}
    assert waits == {0, 1}, "shorter runs wait for an iteration"
    aligned = [facts["hybrid_aligned"], facts["stream_k"]]
    assert all(aligned[0][what] < aligned[1][what] for what in ("split", "depths")), "few tiles at few depths"
    assert facts["split_k"]["split"] == 16 * 9 > facts["stream_k"]["split"]
    shares = [sum(bar.k_end - bar.k_begin for bar in row) for row in maker.timeline("stream_k").rows]
    assert max(shares) - min(shares) == 1, "shares differ by one iteration"
    per_tile: dict[int, int] = defaultdict(int)
    for bar in maker.timeline("hybrid_first").bars:
        per_tile[bar.tile] += bar.writes
    assert max(per_tile.values()) == 1, "a split tile of the hybrid has one partial to add"


def test_pictures_are_drawn_alike_on_every_run(maker: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS))
    import draw_schedules

    for name in ("one", "two"):
        draw_schedules.draw_timeline("hybrid_first", "dark", tmp_path / f"{name}.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
