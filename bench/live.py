"""What a run shows: a table that grows, a line on what is going on, a bar. Plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from .records import Row

__all__ = ["Display", "LiveDisplay", "cell", "make_display", "ratio"]

Key = tuple[str, str, int]  # case, dtype, world
_TABLE_ROWS = 12  # of the live table; the whole one is printed at the end


def ratio(row: Row, baseline: Row | None) -> float | None:
    """How many times faster the row is than the baseline; graph times are compared, else times from the host.

    A row that was measured in other processes than the baseline's row refers to the baseline there.
    """
    if "baseline_us" in row.extra or "baseline_host_us" in row.extra:
        pairs = [(row.extra.get("baseline_us"), row.us), (row.extra.get("baseline_host_us"), row.host_us)]
    else:
        us, host_us = (baseline.us, baseline.host_us) if baseline else (None, None)
        pairs = [(us and us.p50, row.us), (host_us and host_us.p50, row.host_us)]
    return next((base / own.p50 for base, own in pairs if base and own and own.p50 > 0), None)


def cell(row: Row, baseline: Row | None) -> tuple[str, str]:
    """Text and colour of a row in the table: time in us, speed against the baseline, or what went wrong."""
    time_text = f"{row.best.p50:,.1f}" if row.best else ""
    if row.status == "failed":
        return f"FAILED {time_text}".strip(), "bold red"
    if row.status == "skipped":
        return "-", "dim"
    if row.status != "ok":
        return row.status, "bold red"
    mark = f" {row.extra['timed']}" if "timed" in row.extra else ""
    against = ratio(row, baseline) if row.role in ("ours", "peer", "noise") else None
    if against is None or (baseline and row.variant == baseline.variant):
        return time_text + mark, ""
    return f"{time_text} {against:.2f}x{mark}", "green" if against > 1.02 else "red" if against < 0.98 else ""


class Display:
    """Plain lines: one for each case, one for each row."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self.out = out
        self.baseline: str | None = None
        self.rows: dict[Key, dict[str, Row]] = {}  # by case, then variant
        self.done, self.total, self.title = 0, 0, ""
        self.brief, self._since = False, 0.0

    def begin(self, title: str, baseline: str | None, total: int, *, brief: bool = False) -> None:
        """A suite begins with ``total`` cases to go (a case counts once for each set of processes).

        ``brief``: there are so many that one line for each is enough, and no table at the end.
        """
        self.title, self.baseline, self.total, self.brief = title, baseline, total, brief
        self.rows, self.done, self._since = {}, 0, time.monotonic()
        self.say(f"{self._heading()}; {total} cases")

    def at(self, case: str, variant: str, phase: str) -> None:
        """What is going on."""

    def case(self, rows: Sequence[Row], *, finished: bool = True) -> None:
        """Rows of one case."""
        self.done += finished
        if not rows:
            return
        key = (rows[0].case, rows[0].dtype, rows[0].world)
        self.rows.setdefault(key, {}).update({row.variant: row for row in rows})
        self.show(key, rows)

    def show(self, key: Key, rows: Sequence[Row]) -> None:
        """Print the new rows."""
        if self.brief:
            self._print(self._line(key, rows))
            return
        self._print(f"[{self.done}/{self.total}] {key[0]} {key[1]} x{key[2]}")
        for row in rows:
            text, _ = cell(row, self.rows[key].get(self.baseline or ""))
            self._print(f"  {row.variant:<26} {text:>22}   {row.reason or _rate(row)}".rstrip())

    def _line(self, key: Key, rows: Sequence[Row]) -> str:
        """All of a case, and when the last one will be there."""
        baseline = self.rows[key].get(self.baseline or "")
        shown = [f"{row.variant} {cell(row, baseline)[0]}" for row in rows if row.role != "noise"]
        left = (time.monotonic() - self._since) / max(1, self.done) * (self.total - self.done)
        return f"[{self.done}/{self.total}, {left:.0f} s left] {key[0]} {key[1]}: {', '.join(shown)}"

    def say(self, sentence: str) -> None:
        """A message."""
        self._print(sentence)

    def end(self) -> None:
        """The suite is over, or was interrupted."""

    def _heading(self) -> str:
        against = f", speed against {self.baseline}" if self.baseline else ""
        return f"{self.title}: us of a call{against}"

    def _print(self, text: str) -> None:
        print(text, file=self.out, flush=True)


class LiveDisplay(Display):
    """A table and a progress bar on a terminal, by rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        super().__init__()
        self.console = Console()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            Remaining(),
            console=self.console,
        )
        self.now = ""
        self._shown = 0.0
        # Gone at the end, when the whole table is printed instead.
        self._live = Live(
            console=self.console, get_renderable=self._render, refresh_per_second=6, transient=True
        )
        self._task: Any = None

    def begin(self, title: str, baseline: str | None, total: int, *, brief: bool = False) -> None:
        super().begin(title, baseline, total, brief=brief)
        self._task = self.progress.add_task(title, total=total)
        self._live.start()

    def at(self, case: str, variant: str, phase: str) -> None:
        if time.monotonic() - self._shown > 0.15:  # timing goes from one variant to the next much faster
            self._shown = time.monotonic()
            self.now = f"{case}  {variant}  {phase}"

    def show(self, key: Key, rows: Sequence[Row]) -> None:
        self.progress.update(self._task, completed=self.done)
        for row in rows:
            if row.status in ("failed", "timeout", "crashed", "error"):
                self.say(f"{row.case}, {row.variant}: {row.status.upper()}: {row.reason}")

    def say(self, sentence: str) -> None:
        self.console.print(sentence, markup=False, highlight=False)

    def end(self) -> None:
        if self._task is None:
            return
        self._live.stop()
        self.progress.remove_task(self._task)
        self._task = None
        if self.rows and not self.brief:
            self.console.print(self._table(list(self.rows)))

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [self.progress, Text(self.now or "starting ranks", style="dim")]
        if self.rows:
            parts.append(self._table(list(self.rows)[-_TABLE_ROWS:]))
        return Group(*parts)

    def _table(self, keys: Sequence[Key]) -> Any:
        """A line for each case; with the speeds alone, or a line for each row, where the terminal is too narrow."""
        unbounded = self.console.options.update(max_width=10_000)
        for table in (self._build(keys, lambda text: text), self._build(keys, _short)):
            if self.console.measure(table, options=unbounded).minimum <= self.console.width:
                return table
        return self._build_long(keys)

    def _build(self, keys: Sequence[Key], shown: Callable[[Any], Any]) -> Any:
        from rich import box
        from rich.table import Table

        cells = {key: {name: shown(text) for name, text in self._cells(key).items()} for key in keys}
        columns = list(dict.fromkeys(name for found in cells.values() for name in found))
        table = Table(title=self._heading(), box=box.SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("case", no_wrap=True)
        for name in columns:
            width = max(len(found[name].plain) for found in cells.values() if name in found)
            table.add_column(name.replace(":", ":\n"), justify="right", overflow="fold", min_width=width)
        for key, found in cells.items():
            table.add_row(self._name(key), *[found.get(name, "") for name in columns])
        return table

    def _build_long(self, keys: Sequence[Key]) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(title=self._heading(), box=box.SIMPLE, padding=(0, 1, 0, 0))
        for heading, justify in (("case", "left"), ("variant", "left"), ("us", "right"), ("rate", "right")):
            table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for key in keys:
            for i, (name, text) in enumerate(self._cells(key).items()):
                table.add_row("" if i else self._name(key), name, text, _rate(self.rows[key][name]))
        return table

    def _cells(self, key: Key) -> dict[str, Any]:
        from rich.text import Text

        found = self.rows[key]
        baseline = found.get(self.baseline or "")
        return {name: Text(*cell(row, baseline)) for name, row in found.items() if row.role != "noise"}

    def _name(self, key: Key) -> str:
        dtypes, worlds = {k[1] for k in self.rows}, {k[2] for k in self.rows}
        name = f"{key[0]} {key[1]}" if len(dtypes) > 1 else key[0]
        return f"{name} x{key[2]}" if len(worlds) > 1 else name


def _rate(row: Row) -> str:
    return f"{row.tflops:,.4g} TFLOP/s" if row.tflops else f"{row.gbps:,.4g} GB/s" if row.gbps else ""


def _short(text: Any) -> Any:
    """The last word of a cell: the speed where there is one."""
    from rich.text import Text

    return Text(text.plain.removesuffix(" queued").removesuffix(" steady").split(" ")[-1], text.style)


def make_display(*, live: bool) -> Display:
    """The live one if it is wanted, there is a terminal, and rich is installed."""
    if live and sys.stdout.isatty():
        try:
            return LiveDisplay()
        except ImportError:
            print('rich is not installed (pip install "tpkernels[bench]"): plain lines.')
    return Display()
