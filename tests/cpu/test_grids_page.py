"""docs/grids.md shows the methods as they are: its pictures and tables are what docs/make_grids.py makes now."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpkernels.grids import Pass, backward, forward

DOCS = Path(__file__).resolve().parents[2] / "docs"
REMAKE = "it is old; run: PYTHONPATH=. python docs/make_grids.py"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="docs/ is not beside the tests")


@pytest.fixture(scope="module")
def maker() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("make_grids", DOCS / "make_grids.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_grids"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_grids"]


def test_the_page_is_what_the_script_writes(maker: Any) -> None:
    text = (DOCS / "grids.md").read_text()
    assert maker.page_text(text) == text, f"docs/grids.md: {REMAKE}"


def test_pictures_are_what_the_script_draws(maker: Any) -> None:
    assert {path.stem for path in maker.PICTURES.iterdir()} == set(maker.METHODS) == set(maker.CAPTIONS)
    for name in maker.METHODS:
        path = maker.PICTURES / f"{name}.svg"
        assert path.read_text() == maker.picture(name), f"{path.name}: {REMAKE}"
        assert path.stat().st_size < 150_000


@pytest.mark.parametrize("name", ["2d", "2p5d", "3d", "spatial_temporal"])
def test_every_product_has_a_panel_with_its_messages(maker: Any, name: str) -> None:
    method = maker.METHODS[name]()
    programs = forward(method), backward(method, held=maker._held(method))
    drawn = [panel for program in programs for panel in maker.panels(program)]
    assert [(p.kind, p.step) for p in drawn] == [(kind, t) for kind in Pass for t in range(method.steps)]
    for program in programs:
        shown = [p for p in drawn if any(p.work in step.work for step in program.steps)]
        brought = sum(len(who) for p in shown for ranks in p.came.values() for who in ranks.values())
        taken = sum(len(who) for p in shown for who in p.goes.values())
        sent = [
            sum(m.source != m.target for m in e.messages)
            for e in program.exchanges
            if "/" not in e.source.buffer
        ]
        if name != "2p5d":  # whose sum over depths is not drawn
            assert brought + taken == sum(sent)
