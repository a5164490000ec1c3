"""Writes what a run finds into its result file, and shows it."""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import environment, records
from .live import Display
from .plan import Job
from .records import Footer, Header, Row
from .suite import Suite

__all__ = ["Recorder"]


class Recorder:
    """One run of one suite. ``silent``: neither writes nor shows anything (ranks of torchrun other than 0)."""

    def __init__(
        self, path: Path, display: Display, command: Sequence[str], suite: Suite, *, silent: bool = False
    ) -> None:
        self.path, self.display, self.suite, self.silent = path, display, suite, silent
        self.command = list(command)
        started = _now()
        self.run = f"{started.replace(':', '').replace('-', '')}-{suite.name}-{secrets.token_hex(2)}"
        self._started, self._clock = started, time.monotonic()
        self._begun, self._ended = False, False
        self._cuda = False
        self._how: dict[str, Any] = {}

    def begin(self, env: dict[str, Any]) -> None:
        """Write the header, once; the environment of the first ranks counts."""
        if not self._begun and not self.silent:
            self._begun, self._cuda = True, env.get("device") == "cuda"
            env = {**env, **self._how}
            records.append(self.path, Header(self.run, self.suite.name, self._started, self.command, env))

    def show_plan(self, jobs: Sequence[Job]) -> None:
        """Tell the display what comes."""
        if self.silent:
            return
        self._how = {"quick": jobs[0].settings.quick, "rounds": jobs[0].settings.rounds}
        worlds = sorted({job.options.world for job in jobs})
        on = f"{' and '.join(map(str, worlds))} {'GPU' if jobs[0].options.device == 'cuda' else 'CPU rank'}"
        title = f"{self.suite.name} on {on}{'s' if worlds[-1] > 1 else ''}"
        total = sum(len(job.items) for job in jobs)
        self.display.begin(title, self.suite.baseline(jobs[0].options), total, brief=self.suite.brief)

    def rows(self, rows: Sequence[Row], *, finished: bool = True) -> None:
        """Write and show rows of one case."""
        if self.silent:
            return
        mine = self.mine(rows)
        if mine:
            records.append(self.path, *mine)
        self.display.case(mine, finished=finished)

    def mine(self, rows: Sequence[Row]) -> list[Row]:
        """The rows as those of this run."""
        return [replace(row, run=self.run) for row in rows]

    def say(self, sentence: str) -> None:
        """Show a message."""
        if not self.silent:
            self.display.say(sentence)

    def summarise(self, world: int) -> None:
        """At the end of a world: what the suite concludes from all of its rows of this card in the file."""
        rows = [row for row in self._of_this_card() if row.world == world]
        for row in self.suite.summarise(rows) if rows else []:
            self.rows([row], finished=False)

    def conclusion(self) -> str:
        """What the suite has to say at the end of the run, about all of its rows of this card in the file."""
        rows = self._of_this_card()
        return self.suite.conclude(rows) if rows else ""

    def _of_this_card(self) -> list[Row]:
        """Rows of the suite in the file, none if nothing was written."""
        if self.silent or not self._begun:
            return []
        known = records.load(self.path)
        mine = known.card_of(self.run)
        rows = [row for row in known.latest() if row.suite == self.suite.name]
        return [row for row in rows if known.card_of(row.run) == mine]

    def end(self, *, complete: bool) -> None:
        """Write the footer and close the display, once."""
        if self.silent or self._ended:
            return
        self._ended = True
        self.display.end()
        if self._begun:
            after = {"gpus": environment.gpu_state() if self._cuda else []}
            seconds = round(time.monotonic() - self._clock, 1)
            records.append(self.path, Footer(self.run, _now(), seconds, after, complete))


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
