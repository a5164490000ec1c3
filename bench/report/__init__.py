"""From result files to what a person reads: Markdown tables, one HTML page, tables in a README.

``analysis`` is the arithmetic, ``tables*`` make tables of rows, ``charts_*`` and ``timeline`` draw, ``page`` puts the
page together, ``readme`` fills blocks between markers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..errors import BenchError
from ..links import links_of
from ..records import Results
from .analysis import by_card
from .inputs import read_inputs
from .provenance import provenance, warnings
from .readme import check_readme, render_readme
from .summary import text_summary
from .tables import suite_tables, suites_of
from .timeline import TraceSummary, trace_table

__all__ = ["check_readme", "markdown_report", "run"]


def run(
    paths: Sequence[Path],
    *,
    out: Path | None = None,
    markdown: Path | None = None,
    readme: Path | None = None,
    figures: Path | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Report on result files and trace summaries.

    Args:
        paths: the files; may be empty if only ``readme`` is wanted, whose blocks name theirs.
        out: where to write the HTML page.
        markdown: where to write the Markdown tables.
        readme: a README whose blocks are filled.
        figures: a folder for the pictures of documents: of the sweep, PNG for light and dark pages.
            With none of the four the tables are printed and the page is written beside the first file.
        stdout: where to print.

    Returns:
        0.

    Raises:
        BenchError: no file, one that is neither, another schema, nothing to show, or matplotlib missing for ``out`` and
            ``figures``.
    """
    stream = stdout if stdout is not None else sys.stdout
    if not paths and (readme is None or out is not None or markdown is not None or figures is not None):
        raise BenchError("report: expected at least one result file (bench/results/*.jsonl), got none.")
    if paths:
        results, traces = read_inputs(paths)
        if not results.rows and not traces:
            raise BenchError(f"{', '.join(map(str, paths))}: nothing was measured in it, only begun.")
        if figures is not None:
            _write_figures(figures, results, stream)
        if markdown is None and out is None and readme is None and figures is None:
            print(markdown_report(results, traces, pad=True), file=stream)
            _page_beside(paths[0], results, traces, stream)
        if out is not None:
            _write_page(out, results, traces, stream)
        if markdown is not None:
            _write(markdown, markdown_report(results, traces))
            print(f"wrote {markdown}", file=stream)
    if readme is not None:
        text, changed = render_readme(readme)
        if changed:
            _write(readme, text)
        names = ", ".join(block.name for block in changed)
        print(f"{readme}: {f'filled {names}' if changed else 'every table is up to date'}", file=stream)
    return 0


def markdown_report(results: Results, traces: Sequence[TraceSummary] = (), *, pad: bool = False) -> str:
    """All tables; each card by itself. ``pad``: align the columns for reading as text."""
    parts = []
    for name, part in by_card(results).items():
        rows = part.latest()
        parts.append(f"# {name}")
        for sentence in warnings(part):
            parts.append(f"> **Note:** {sentence}")
        summary = text_summary(rows)
        parts += [summary] if summary else []
        for suite in suites_of(rows):
            used = {row.run for row in rows if row.suite == suite}
            parts += [f"## {suite}", f"{provenance([h for h in part.headers if h.run in used])}."]
            parts += [table.markdown(pad=pad) for table in suite_tables(rows, suite, links_of(part))]
    if traces:
        parts.append(trace_table(traces).markdown(heading="##", pad=pad))
    return "\n\n".join(parts) + "\n"


def _page_beside(first: Path, results: Results, traces: Sequence[TraceSummary], stream: TextIO) -> None:
    """The page that nobody asked for: no reason to fail where it cannot be drawn."""
    try:
        _write_page(first.with_suffix(".html"), results, traces, stream)
    except BenchError as error:
        print(f"No page: {error}", file=stream)


def _write_page(out: Path, results: Results, traces: Sequence[TraceSummary], stream: TextIO) -> None:
    from .page import html_page

    _write(out, html_page(results, traces))
    print(f"wrote {out}", file=stream)


def _write_figures(folder: Path, results: Results, stream: TextIO) -> None:
    """Of one card: names of pictures do not tell cards apart."""
    from .charts_sweep import figures
    from .draw import painted
    from .page import PALETTE

    if len(by_card(results)) > 1:
        raise BenchError("report: --figures draws one card's results; name the files of one.")
    drawn = figures(results.latest())
    if not drawn:
        raise BenchError("report: --figures draws suite sweep, of which these files have no rows.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in drawn.items():
        for theme, suffix in enumerate(("", "-dark")):
            palette = {color: both[theme] for color, both in PALETTE.items()}
            with painted(palette):
                picture = draw()
                if picture is None:
                    break
                path = folder / f"{name}{suffix}.png"
                picture.png(path, palette["paper"] if suffix else "#ffffff")
            print(f"wrote {path}", file=stream)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written ({error.strerror}).") from None
