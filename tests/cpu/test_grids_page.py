"""docs/grids.md and docs/grids/ show the methods as they are: pictures and tables are what docs/make_grids.py makes
now. Snippets run in ``tests/spawn/test_grid_pages.py``."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tpkernels.grids import Pass, backward, formula, forward, grid_2p5d

DOCS = Path(__file__).resolve().parents[2] / "docs"
REMAKE = "it is old; run: PYTHONPATH=. python docs/make_grids.py"
PICTURES = ("1d_column", "1d_row", "2d", "2p5d", "3d", "spatial_temporal")
PAGES = ("grids.md", *(f"grids/{name}.md" for name in ("1d", "2d", "2p5d", "3d", "spatial_temporal")))

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="docs/ is not beside the tests")


@pytest.fixture(scope="module")
def docs() -> Iterator[Any]:
    """Modules of the script, by name."""
    before = set(sys.modules)
    sys.path.insert(0, str(DOCS))
    yield import_module
    sys.path.remove(str(DOCS))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(DOCS)):
            del sys.modules[name]


# ---- What is made.


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_what_the_script_writes(docs: Any, page: str) -> None:
    maker = docs("make_grids")
    assert ("grids.md", *maker.PAGES) == PAGES
    text = (DOCS / page).read_text()
    assert maker.page_text(page, text) == text, f"docs/{page}: {REMAKE}"
    assert set(re.findall(r"<!-- made: (.*?) -->", text)) == set(maker.made(page))


def test_pictures_are_what_the_script_draws(docs: Any) -> None:
    maker, draw = docs("make_grids"), docs("draw_grids")
    assert {path.stem for path in maker.PICTURES.glob("*.svg")} == set(draw.METHODS) == set(draw.CAPTIONS)
    assert set(draw.METHODS) == set(PICTURES)
    for name in PICTURES:
        path = maker.PICTURES / f"{name}.svg"
        assert path.read_text() == draw.picture(name), f"{path.name}: {REMAKE}"
        assert path.stat().st_size < 150_000


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text()
    for link in re.findall(r"\]\((?!http)(.*?)\)", text):
        path, _, anchor = link.partition("#")
        target = (DOCS / page).parent / path if path else DOCS / page
        assert target.exists(), f"{page}: {link}"
        if anchor and target.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert anchor in {_anchor(head) for head in heads}, f"{page}: {link}"


def _anchor(head: str) -> str:
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")


# ---- Pictures and tables of one rank.


@pytest.mark.parametrize("name", PICTURES)
def test_every_product_has_a_panel_with_its_messages(docs: Any, name: str) -> None:
    draw = docs("draw_grids")
    method = draw.METHODS[name]()
    programs = draw.programs(method)
    drawn = [panel for program in programs for panel in draw.panels(program)]
    assert [(p.kind, p.step) for p in drawn] == [(kind, t) for kind in Pass for t in range(method.steps)]
    for program in programs:
        shown = [p for p in drawn if any(p.work in step.work for step in program.steps)]
        brought = sum(len(who) for p in shown for ranks in p.came.values() for who in ranks.values())
        taken = sum(len(who) for p in shown for who in p.goes.values())
        behind = sum(len(who) for _, came, _ in draw.sums(program) for who in came.values())
        sent = [sum(m.source != m.target for m in e.messages) for e in program.exchanges]
        assert brought + taken + behind == sum(sent)
        if name != "2p5d":
            assert behind == 0


Table = list[list[str]]


def table_of(docs: Any, name: str, position: int | None = None) -> Table:
    lines = docs("grid_steps").table(name, position).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def moved(cell: str, word: str) -> Counter[tuple[str, str]]:
    """Blocks of a cell, each with whom it comes from or goes to."""
    found: Counter[tuple[str, str]] = Counter()
    for block, others in re.findall(rf"(\S+) {word} (\d+(?:, \d+\b)*)", cell):
        found.update((block, other) for other in others.split(", "))
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_what_one_rank_sends_another_gets(docs: Any, name: str) -> None:
    """The tables of all ranks, line by line; the page has that of one."""
    draw = docs("draw_grids")
    method = draw.METHODS[name]()
    tables = {draw.who(method, p): table_of(docs, name, p) for p in range(method.grid.world)}
    messages = 0
    for line in range(len(next(iter(tables.values())))):
        gets, gives = (
            Counter(
                {(who, *move): n for who, t in tables.items() for move, n in moved(t[line][at], word).items()}
            )
            for at, word in ((3, "from"), (4, "to"))
        )
        assert gets == Counter({(to, block, by): n for (by, block, to), n in gives.items()})
        messages += gets.total()
    assert f"{messages / method.grid.world:g} messages a rank" in draw.captions()[name]


@pytest.mark.parametrize("name", ["2d", "2p5d", "spatial_temporal"])
def test_a_rank_multiplies_what_it_has(docs: Any, name: str) -> None:
    """Whatever is multiplied lay there, or came in a line before; a gradient's rows are those that the table makes."""
    steps = docs("grid_steps")
    blocks = re.findall(r"\w+\[\S+?\]", steps.at_rest(name))
    there = {*blocks, f"d{blocks[2]}"}
    products = 0
    for label, factors, into, comes, _ in table_of(docs, name):
        for factor in factors.split():
            assert factor in there, f"{label}: {factor}"
        products += bool(factors)
        if factors:
            one, other = (re.findall(r"[mkn][\d.]+", factor) for factor in factors.split())
            assert set(re.findall(r"[mkn][\d.]+", into)) == set(one) ^ set(other)
        there |= {block for block, _ in moved(comes, "from") if not block.startswith("+")}
    assert products == 3 * docs("draw_grids").METHODS[name]().steps


# ---- Costs.


def test_formulas_are_read_as_they_are_written(docs: Any) -> None:
    value = docs("grid_counts").value
    letters = {"m": 2, "k": 3, "n": 5, "q": 4, "d": 7}
    assert value("(q-1) mk/(dq^2)", letters) == value("3 * 6 / 112", {})
    assert value("2 (d-1)/d kn/q^2", letters) * 7 * 16 == 2 * 6 * 15
    assert value("q (2m + k) + n", letters) == 33


@pytest.mark.parametrize("name", PICTURES)
def test_costs_of_a_page_are_the_librarys_formulas(docs: Any, name: str) -> None:
    """What is counted by operand adds up to the closed formulas that tests hold against the executor."""
    costs = docs("grid_counts")
    method, sizes = costs.EXAMPLES[name].make(), costs.EXAMPLES[name].sizes
    volume = formula(method, sizes)
    for kind, key in zip(Pass, ("forward", "input_grad", "weight_grad"), strict=True):
        counted = costs.counted(method, sizes)
        assert sum(elements for (of, _), (elements, _) in counted.items() if of is kind) == volume[key]


def test_a_wrong_formula_ends_the_script(docs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = docs("grid_page_costs")
    key = Pass.FORWARD, "X"
    monkeypatch.setitem(costs.FORMULAS["2d"], key, "q mk/q^2")
    with pytest.raises(SystemExit, match="2d, forward, X"):
        costs.received_table("2d")
    monkeypatch.setitem(costs.BUFFERS, "2d", ("2x + w + y", ("5x + w",)))
    with pytest.raises(SystemExit, match="2d: buffers"):
        costs.memory_table("2d")


# ---- What the pages say of their tables.


@pytest.fixture(scope="module")
def gb(docs: Any) -> Any:
    costs = docs("grid_costs")
    return {
        (world, row.name.partition(",")[0], tokens): costs.received(row, tokens)
        for world in costs.WORLDS
        for row in costs.rows(world)
        for tokens in costs.TOKENS
    }


@pytest.fixture(scope="module")
def ms(docs: Any) -> Any:
    costs = docs("grid_costs")
    return {
        (world, docs("grid_page_costs")._kind(name), tokens): costs.predicted_ms(row, tokens, fused)
        for world in costs.WORLDS
        for name, row, fused in costs.ways(world)
        for tokens in costs.TOKENS
    }


FEW, SOME, MANY = 2048, 16384, 131072
LINE, FUSED, RING = "1-D", "1-D, fused", "spatial-temporal"


def least(found: Any, world: int, tokens: int) -> str:
    names = {name for w, name, _ in found if w == world}
    return min(names, key=lambda name: found[world, name, tokens])


def test_what_is_said_of_one_dimension(gb: Any, ms: Any) -> None:
    for world in (4, 8):
        assert {least(ms, world, tokens) for tokens in (FEW, SOME, MANY)} == {FUSED}
        assert {least(gb, world, tokens) for tokens in (FEW, SOME)} == {LINE} != {least(gb, world, MANY)}
    assert least(ms, 64, FEW) == FUSED


def test_what_is_said_of_2d(gb: Any, ms: Any) -> None:
    assert least(ms, 64, MANY) == "2-D"
    assert all(gb[4, LINE, tokens] < gb[4, "2-D", tokens] for tokens in (FEW, SOME, MANY))


def test_what_is_said_of_2p5d(docs: Any, gb: Any, ms: Any) -> None:
    slow = {world: {name for w, name, _ in ms if w == world} for world in (4, 8, 16, 64)}
    for world, names in slow.items():
        assert least(gb, world, MANY) == "2.5-D"
        for tokens in (FEW, SOME):
            slowest = max(names, key=lambda name: ms[world, name, tokens]) == "2.5-D"
            assert slowest == (world != 16)
    for tokens in (FEW, SOME):
        assert ms[16, LINE, tokens] < ms[16, "2.5-D", tokens] < min(ms[16, n, tokens] for n in ("2-D", RING))


def test_what_is_said_of_orders_of_ranks(docs: Any) -> None:
    found = re.findall(
        r"^\| (\d+) \| [\dx ]+ \| ([\d,]+) \| (\S+) \| (\S+) \|", docs("grid_page_costs").orders(), re.M
    )
    behind = {
        (world, tokens) for world, tokens, outermost, fastest in found if float(outermost) > float(fastest)
    }
    assert len(found) == 9 and behind == {("64", "2,048")}
    for q, depth in ((2, 4), (4, 4), (3, 2)):
        said = tuple((n // q % q, n % q, n // q**2) for n in range(q * q * depth))
        assert grid_2p5d(q * q * depth, depth).coordinates == said


def test_what_is_said_of_3d(docs: Any, gb: Any, ms: Any) -> None:
    for tokens in (FEW, SOME, MANY):
        assert gb[64, "3-D", tokens] < gb[64, "2-D", tokens]
    for tokens in (FEW, SOME):
        assert ms[64, LINE, tokens] < ms[64, "3-D", tokens]
        assert ms[64, "3-D", tokens] == min(ms[64, n, tokens] for n in ("2-D", "2.5-D", "3-D", RING))
    assert ms[64, "2-D", MANY] < ms[64, "3-D", MANY]
    two, three = (buffers(docs, "2p5d", name) for name in ("2-D", "3-D"))
    assert all(1.9 < b / a < 2.3 for a, b in zip(two, three, strict=True)), "about twice"


def test_what_is_said_of_spatial_temporal(docs: Any, gb: Any, ms: Any) -> None:
    for tokens in (FEW, SOME, MANY):
        assert ms[4, FUSED, tokens] < ms[4, RING, tokens] and gb[4, LINE, tokens] < gb[4, RING, tokens]
    for world, page in ((16, "spatial_temporal"), (64, "2p5d")):
        assert gb[world, RING, FEW] < gb[world, "2-D", FEW] and gb[world, RING, MANY] > gb[world, "2-D", MANY]
        assert ms[world, RING, FEW] < ms[world, "2-D", FEW] and ms[world, RING, MANY] > ms[world, "2-D", MANY]
        assert all(2 * ms[world, LINE, tokens] < ms[world, RING, tokens] for tokens in (FEW, SOME))
        there, back = buffers(docs, page, RING)
        assert there == buffers(docs, page, "2-D")[0]
        assert back < min(buffers(docs, page, other)[1] for other in ("2-D", "1-D"))


def buffers(docs: Any, page: str, method: str) -> tuple[int, int]:
    """Forward and backward, of a row of the page's table beside the others."""
    (row,) = re.findall(rf"^\| \**{method}.*$", docs("grid_page_costs").beside(page), re.M)
    cells = [int(cell.strip("* ").replace(",", "")) for cell in row.split("|")[-3:-1]]
    return cells[0], cells[1]


def test_the_way_from_forward_to_backward_is_that_of_the_layer(docs: Any) -> None:
    """Spatial-temporal: x is multiplied by dY where forward left it, and has no way there."""
    method = docs("draw_grids").METHODS["spatial_temporal"]()
    there, back = docs("grid_costs").programs(method)
    assert sum(1 for _ in there.exchanges) == sum(1 for _ in forward(method).exchanges)
    assert sum(1 for _ in back.exchanges) == sum(1 for _ in backward(method).exchanges) - 1
