"""The HTML page: one file that needs nothing else, in the reader's choice of light and dark."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import BenchError
from ..records import Results
from .analysis import by_card
from .draw import require_matplotlib
from .provenance import clocks_seen, facts, warnings
from .sections import Pictures, Section, Shown, sections
from .summary import Headline, headlines
from .table import Table
from .timeline import TraceSummary, timeline, trace_table

__all__ = ["PALETTE", "html_page"]

# Light and dark value of every colour. Ours is one accent with shades; peers differ in lightness too.
PALETTE: dict[str, tuple[str, str]] = {
    "paper": ("#f6f6f4", "#131519"),
    "panel": ("#ffffff", "#1b1e24"),
    "ink": ("#1b1e23", "#e7e9ec"),
    "muted": ("#60666f", "#9da5af"),
    "faint": ("#a3a9b1", "#646c77"),
    "line": ("#dcdfe3", "#343a43"),
    "grid": ("#eceef0", "#272b32"),
    "noise": ("#e9ebee", "#2b3038"),
    "tint": ("#f0f4fd", "#1f2736"),
    "ours": ("#2457d6", "#7ea4ff"),
    "ours2": ("#6f97ee", "#5580dc"),
    "ours3": ("#a9c1f5", "#3b5ba3"),
    "ours4": ("#14327f", "#c3d5ff"),
    "baseline": ("#8a9099", "#8a929d"),
    "peer1": ("#d98200", "#f0a43c"),
    "peer2": ("#0f8f72", "#3cc4a0"),
    "peer3": ("#b0559b", "#da8cc9"),
    "peer4": ("#8c6d1f", "#c9a64d"),
    "gemm": ("#8595ab", "#71829b"),
    "comm": ("#d1495b", "#dc6673"),
    "copy": ("#d98200", "#f0a43c"),
    "other": ("#c3c8ce", "#545c67"),
    "good": ("#0b6e55", "#55cfae"),
    "bad": ("#b23446", "#f58e99"),
    "warn": ("#9a6a00", "#e8b75a"),
}


@dataclass
class CardPart:
    """Everything of one card."""

    name: str
    facts: list[tuple[str, str]]
    warnings: list[str]
    headlines: list[Headline]
    sections: list[Section]


def html_page(results: Results, traces: Sequence[TraceSummary] = ()) -> str:
    """The page's source.

    Raises:
        BenchError: matplotlib or jinja2 is missing.
    """
    require_matplotlib()
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise BenchError(
            "the HTML report is made with jinja2, which is not installed: pip install jinja2."
        ) from None

    pictures = Pictures()
    cards = []
    for i, (name, part) in enumerate(by_card(results).items()):
        if part.rows:
            found = sections(part, f"c{i}-" if i else "", pictures)
            known = [fact for fact in facts(part.headers) if fact[0] != "card"]
            if clocks := clocks_seen(part.rows):
                known.append(("clock", clocks))
            cards.append(CardPart(name, known, warnings(part), headlines(part.latest()), found))
    drawn: list[Shown] = []
    tables: list[Table] = []
    if traces:
        drawn = pictures.shown(
            timeline(traces), "Timeline", "All traces on one time scale; hover for names and times."
        )
        tables = [trace_table(traces)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup
    environment.filters["groupby_run"] = lambda shown: [
        (half, list(run)) for half, run in itertools.groupby(shown, key=lambda s: s.half)
    ]
    title = cards[0].name if cards else "traces"
    return environment.get_template("page.html.j2").render(
        title=f"tpkernels on {title}" if cards else "tpkernels: traces",
        palette=PALETTE,
        cards=cards,
        traces=drawn,
        trace_tables=tables,
    )
