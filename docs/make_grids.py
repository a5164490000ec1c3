"""Writes docs/grids.md and docs/grids/: which blocks each rank multiplies at each step, and costs. Needs a built
tpkernels.

PYTHONPATH=. python docs/make_grids.py     writes the pictures and the tables of the pages

Everything is read off ``tpkernels.grids``: the layouts and programs that the layers run, and the formulas that tests
hold against them. ``draw_grids`` draws, ``grid_steps`` follows one rank, ``grid_counts`` counts what the tables of
``grid_costs`` and ``grid_page_costs`` show, ``grid_calls`` has what snippets print.
"""

from __future__ import annotations

import re
from pathlib import Path

from draw_grids import METHODS, captions, picture
from grid_calls import CALLS, errors, printed
from grid_costs import launched, table, times
from grid_page_costs import beside, memory_table, orders, predicted, received_table
from grid_steps import at_rest
from grid_steps import table as steps

FOLDER = Path(__file__).resolve().parent
PICTURES = FOLDER / "grids"

# By page, under docs/: the pictures, and what the method is called among the others.
PAGES = {
    "grids/1d.md": (("1d_column", "1d_row"), "1-D"),
    "grids/2d.md": (("2d",), "2-D"),
    "grids/2p5d.md": (("2p5d",), "2.5-D"),
    "grids/3d.md": (("3d",), "3-D"),
    "grids/spatial_temporal.md": (("spatial_temporal",), "spatial-temporal"),
}


def made(page: str) -> dict[str, str]:
    """What the script writes into a page, by the name behind ``<!-- made:``."""
    if page == "grids.md":
        return {"table": table(), "times": times(), "launched": launched()}
    names, kind = PAGES[page]
    found = {"predicted": predicted(kind), "beside": beside(names[0])}
    for name in names:
        text = captions()[name]
        found[f"figure {name}"] = f"![{text}]({name}.svg)\n\n*{text}*"
        found[f"steps {name}"] = f"{at_rest(name)}\n\n{steps(name)}"
        found[f"received {name}"] = received_table(name)
        found[f"memory {name}"] = memory_table(name)
        if name in CALLS:
            found["printed"] = f"```\n{printed(name)}\n```"
            found["errors"] = f"```\n{errors(name)}\n```"
    if kind == "2.5-D":
        found["orders"] = orders()
    return found


def page_text(page: str, text: str) -> str:
    """The page with all that is made in its place."""
    for name, content in made(page).items():
        pattern = rf"(<!-- made: {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{page}: expected one place for {name!r}, found {count}")
    return text


def main() -> None:
    """Writes everything."""
    for name in METHODS:
        (PICTURES / f"{name}.svg").write_text(picture(name))
    for page in ("grids.md", *PAGES):
        path = FOLDER / page
        path.write_text(page_text(page, path.read_text()))


if __name__ == "__main__":
    main()
