"""What ``tpk`` prints: a bar while it works in a terminal with rich, plain lines elsewhere; tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO


class Progress:
    """So many steps. ``with`` shows them; ``step`` ends one and prints what it found."""

    def __init__(self, what: str, total: int, out: TextIO | None = None, *, bar: bool = True) -> None:
        self.what, self.total, self.done = what, total, 0
        self._out = out or sys.stdout
        self._bar: Any = _rich_bar() if bar and self._out.isatty() else None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, name: str) -> None:
        """What is worked on now."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self.what} {name}")

    def step(self, found: str) -> None:
        """One is done."""
        self.done += 1
        if self._bar is None:
            print(f"[{self.done}/{self.total}] {found}", file=self._out, flush=True)
        else:
            self._bar.update(self._task, completed=self.done)
            self._bar.console.print(found, markup=False, highlight=False)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; all but the first and those of words to the right."""
    every = [list(headings), *map(list, rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(headings))]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headings))]
    lines = []
    for row in every:
        cells = [
            f"{cell:>{width}}" if r else f"{cell:<{width}}"
            for cell, width, r in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return text == "-" or text.rstrip("x%").replace(",", "").replace(".", "").replace("+", "").isdigit()


def us(value: float) -> str:
    """Microseconds with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _rich_bar() -> Any:
    """None where rich is not installed."""
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
