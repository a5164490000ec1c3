"""What a run shows: a live bar in a terminal, a plain line every few steps elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["PathRow", "Reporter", "StepLine"]

_LOG_WIDTH = 110  # a pipe has no width
_PLAIN_LINES = 12  # about as many lines as a CI log wants


@dataclasses.dataclass(frozen=True)
class StepLine:
    """What is shown of one step. ``dense_loss`` is None without the twin."""

    step: int
    loss: float
    dense_loss: float | None
    tokens_per_s: float

    @property
    def difference(self) -> float | None:
        """|loss - dense loss|."""
        return None if self.dense_loss is None else abs(self.loss - self.dense_loss)

    def text(self) -> str:
        """One line without markup."""
        parts = [f"loss {self.loss:.4f}"]
        if self.dense_loss is not None:
            parts += [f"unsharded {self.dense_loss:.4f}", f"diff {self.difference:.1e}"]
        return "  ".join([*parts, f"{self.tokens_per_s:,.0f} tokens/s"])


@dataclasses.dataclass(frozen=True)
class PathRow:
    """Calls of one operation by one path in one training step."""

    phase: str
    op: str
    path: str
    calls: int


class Reporter:
    """Prints on the first rank only: every method does nothing where ``active`` is False."""

    def __init__(self, active: bool, steps: int, console: Console | None = None) -> None:
        self.active = active
        self.steps = steps
        self.console = console or Console(highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = _LOG_WIDTH
        self._every = max(1, steps // _PLAIN_LINES)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        """A plain paragraph."""
        if self.active:
            self.console.print(Text(text))

    def start(self) -> None:
        """Opens the bar, in a terminal."""
        if self.active and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("", total=self.steps)
            self._progress.start()

    def step(self, line: StepLine) -> None:
        """Shows a step, ``line.step`` from 0."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, description=line.text())
        elif self.active and (line.step % self._every == 0 or line.step == self.steps - 1):
            self.console.print(
                Text(f"step {line.step + 1:>{len(str(self.steps))}}/{self.steps}  {line.text()}")
            )

    def stop(self) -> None:
        """Closes the bar; may be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def paths(self, rows: Iterable[PathRow], note: str) -> None:
        """The table of paths."""
        if not self.active:
            return
        table = Table(
            title="paths taken in the first step",
            title_justify="left",
            box=None,
            pad_edge=False,
            title_style="bold",
        )
        for name in ("pass", "operation", "path"):
            table.add_column(name, no_wrap=True)
        table.add_column("calls", justify="right")
        for row in rows:
            table.add_row(row.phase, row.op, row.path, str(row.calls))
        self.console.print(table)
        self.console.print(Text(note))

    def checks(self, rows: Sequence[tuple[str, str, str, bool]]) -> None:
        """The comparisons with the twin: (what, measured, tolerance, passed)."""
        if not self.active:
            return
        table = Table(
            title="sharded against unsharded, largest differences",
            title_justify="left",
            box=None,
            pad_edge=False,
            title_style="bold",
        )
        table.add_column("what")
        table.add_column("difference", justify="right")
        table.add_column("tolerance", justify="right")
        table.add_column("")
        for what, measured, limit, passed in rows:
            table.add_row(what, measured, limit, "[green]ok[/]" if passed else "[red bold]TOO LARGE[/]")
        self.console.print(table)

    def samples(self, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Sampled continuations behind their prompts."""
        if not self.active or not any(texts):
            return
        for prompt, text in zip(prompts, texts, strict=True):
            body = Text(prompt, style="bold")
            body.append("".join(c if c.isprintable() or c == "\n" else "?" for c in text), style="not bold")
            if self.console.is_terminal:
                self.console.print(
                    Panel(body, title="sampled", title_align="left", width=min(100, self.console.width))
                )
            else:
                self.console.print(Text("sampled:"), body, sep="\n", end="\n\n")
