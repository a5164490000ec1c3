"""A table that is rendered twice: as Markdown here, as HTML by page.html.j2; and how numbers look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..records import Row
from .analysis import Noise, within

__all__ = ["DASH", "Cell", "Column", "Table", "hidden_text", "number", "percent", "size"]

DASH = "–"
Style = Literal["", "muted", "failed", "good", "bad"]


@dataclass(frozen=True)
class Cell:
    """Text of a cell. ``title``: tooltip; ``sort``: what HTML sorts by; ``note``: number of a footnote, 0 for none."""

    text: str
    style: Style = ""
    title: str = ""
    sort: float | None = None
    note: int = 0


@dataclass(frozen=True)
class Column:
    """Head of a column; ``ours`` marks columns of this package."""

    name: str
    numeric: bool = True
    ours: bool = False


@dataclass
class Table:
    """Rows of cells under columns. ``caption`` is one sentence above, ``notes`` are numbered footnotes below."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    caption: str = ""
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> int:
        """Number of a footnote, which is added unless it is there."""
        text = " ".join(text.split()) or "no reason given"
        if text not in self.notes:
            self.notes.append(text)
        return self.notes.index(text) + 1

    def trimmed(self) -> Table:
        """Without columns in which no row has anything."""
        kept = [
            i
            for i in range(len(self.columns))
            if i == 0 or any(row[i].text not in (DASH, "") for row in self.rows)
        ]
        return Table(
            self.title,
            [self.columns[i] for i in kept],
            [[row[i] for i in kept] for row in self.rows],
            self.caption,
            self.notes,
        )

    def time(self, row: Row | None, *, milliseconds: bool = False) -> Cell:
        """The time of a row, or its status with the reason as a footnote."""
        if row is None:
            return Cell(DASH, "muted")
        if row.status == "failed":
            return Cell("FAILED", "failed", note=self.note(row.reason or _wrong(row)))
        if row.status != "ok":
            return Cell(row.status, "muted", note=self.note(row.reason))
        if row.best is None:
            return Cell(DASH, "muted")
        text = number(row.best.p50 / 1000 if milliseconds else row.best.p50)
        note = 0
        if not row.us:
            note = self.note("launched from the host, not from a CUDA graph")
        elif row.extra.get("timed") == "queued":
            note = self.note("calls enqueued one by one ahead of the GPU, not a CUDA graph")
        elif row.extra.get("timed") == "steady":
            note = self.note("calls launched one after the other, the host included, not a CUDA graph")
        return Cell(text, title=_how(row), sort=row.best.p50, note=note)

    def ratio(self, value: float | None, noise: Noise | None, *, note: int = 0) -> Cell:
        """A speed-up; one that cannot be told from 1 is shown as such."""
        if value is None:
            return Cell(DASH, "muted")
        if within(value, noise):
            return Cell("≈1.00", "muted", f"{value:.3f}, within the noise", value, note)
        return Cell(f"{value:.2f}", "good" if value > 1 else "bad", f"{value:.3f}", value, note)

    def markdown(self, *, heading: str = "###", pad: bool = False) -> str:
        """Pipe table with title, caption and footnotes; ``heading``: "" leaves out title and caption."""
        head = [_escape(c.name) for c in self.columns]
        body = [[_markdown(cell) for cell in row] for row in self.rows]
        widths = [max(len(row[i]) for row in [head, *body]) if pad else 0 for i in range(len(head))]
        right = [c.numeric for c in self.columns]

        def line(texts: Sequence[str]) -> str:
            parts = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)]
            return "| " + " | ".join(parts) + " |"

        rule = [
            "-" * max(2 if r else 3, w - r) + (":" if r else "") for w, r in zip(widths, right, strict=True)
        ]
        lines = [line(head), line(rule), *map(line, body)]
        if heading:
            above = [f"{heading} {_escape(self.title)}", ""]
            lines = above + ([_escape(self.caption), ""] if self.caption else []) + lines
        if self.notes:
            lines += ["", *(f"[{i}] {_escape(text)}  " for i, text in enumerate(self.notes, 1))]
            lines[-1] = lines[-1].rstrip()
        return "\n".join(lines)


def number(value: float | None) -> str:
    """Three significant digits, more for large numbers: 0.512, 6.40, 21.3, 617, 12,345."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 4)}f}"


def percent(value: float | None) -> str:
    """A fraction in whole per cent."""
    return DASH if value is None or not math.isfinite(value) else f"{round(100 * value)} %"


def size(count: float) -> str:
    """Bytes in the binary units in which sizes are chosen: 2 MiB, 512 B."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _wrong(row: Row) -> str:
    if row.error is None:
        return "wrong result"
    allowed = f", allowed is {row.tolerance:.1e}" if row.tolerance is not None else ""
    return f"wrong result: relative error {row.error:.1e}{allowed}"


def hidden_text(hidden: float) -> str:
    """A fraction of hidden communication; "none" where more time is exposed than the communication alone takes."""
    return "none" if hidden < 0 else percent(hidden)


def _how(row: Row) -> str:
    best = row.best
    assert best is not None
    parts = [f"p20 {number(best.p20)}, p80 {number(best.p80)} us, {best.n} samples"]
    if row.us and row.host_us:
        parts.append(f"launched from the host {number(row.host_us.p50)} us")
    if row.error is not None:
        parts.append(f"error {row.error:.1e}")
    return "; ".join(parts)


def _markdown(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.style == "failed" else _escape(cell.text)
    return f"{text} [{cell.note}]" if cell.note else text


def _escape(text: str) -> str:
    """Text that neither ends a cell nor begins HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
