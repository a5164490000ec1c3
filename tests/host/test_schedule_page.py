"""docs/schedules.md shows the schedules that the kernel walks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_schedules", DOCS / "make_schedules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_schedules(maker: Any) -> None:
    page = (DOCS / "schedules.md").read_text()
    assert maker.table() in page, "run: PYTHONPATH=. python docs/make_schedules.py"
    assert all(f"(schedule-{kind}.svg)" in page for kind in maker.KINDS)


@pytest.mark.parametrize("kind", ["data_parallel", "split_k", "stream_k", "hybrid_first", "hybrid_aligned"])
def test_every_iteration_is_drawn_once(maker: Any, kind: str) -> None:
    rows = maker.timelines(kind)
    tiles, k_iters = 8 * 20, 128
    done = [0] * tiles
    for row in rows:
        clock = 0
        for start, length, tile, _ in row:
            assert start == clock and length > 0
            clock += length
            done[tile] += length
    assert done == [k_iters] * tiles
    assert (DOCS / f"schedule-{kind}.svg").stat().st_size < 150_000
