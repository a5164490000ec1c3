"""What ``--resume`` goes by: whether the file was measured as it would be now, and what a run that ended was doing.

Under torchrun nobody survives a crash to write its row. Rank 0 therefore keeps a side file beside the result file that
says what is in progress; a run that finds one left over turns it into rows. The other ranks leave notes on what went
wrong with them.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import json
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import environment, records
from .errors import BenchError
from .plan import Settings
from .records import Results, Row

__all__ = ["InProgress", "Note", "check", "clear", "left_over", "notes", "present"]

_STEP = "{:4d} {:40.40s}\n"  # number of the row in progress, -1 for all; phase


class InProgress:
    """The side file. ``begin`` writes the rows that a case gets if the run ends in it, ``at`` which of them it is in.

    A step costs one write of 46 bytes to an open file, which survives the process though not the host.
    """

    def __init__(self, path: Path) -> None:
        self.path = _side(path)
        self._file: int | None = None
        self._variants: list[str] = []
        self._step = ""

    def begin(self, rows: Sequence[Row]) -> None:
        """A case begins."""
        self.clear()
        self._variants = [row.variant for row in rows]
        self._step = _STEP.format(-1, "inputs")
        lines = [json.dumps(records.encode(row)) + "\n" for row in rows]
        partial = self.path.with_name(self.path.name + ".new")
        partial.write_text(self._step + "".join(lines))
        os.replace(partial, self.path)
        self._file = os.open(self.path, os.O_WRONLY)

    def at(self, variant: str, phase: str) -> None:
        """A step of the case begins; a variant that is none of its rows counts as all of them."""
        number = self._variants.index(variant) if variant in self._variants else -1
        step = _STEP.format(number, phase)
        if self._file is not None and step != self._step:
            self._step = step
            os.pwrite(self._file, step.encode(), 0)

    def clear(self) -> None:
        """The case is done."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Note:
    """What went wrong with a rank other than 0, where and when (time.time())."""

    rank: int
    case: str
    dtype: str
    variant: str
    reason: str
    since: float = field(default_factory=time.time)

    def write(self, path: Path) -> None:
        """Beside the result file ``path``."""
        with suppress(OSError):
            _note(path, self.rank).write_text(json.dumps(asdict(self)))

    @staticmethod
    def remove(path: Path, rank: int) -> None:
        """The rank went on."""
        with suppress(OSError):
            _note(path, rank).unlink(missing_ok=True)


def notes(path: Path, case: str, dtype: str, variant: str) -> list[Note]:
    """Of this step, by rank."""
    found = []
    for file in path.parent.glob(f"{glob.escape(path.name)}.rank*"):
        with suppress(OSError, ValueError, TypeError):  # removed or written meanwhile
            note = Note(**json.loads(file.read_text()))
            if (note.case, note.dtype, note.variant) == (case, dtype, variant):
                found.append(note)
    return sorted(found, key=lambda note: note.rank)


def left_over(path: Path) -> list[Row]:
    """Rows of what a run was measuring when it ended; [] where no side file is left. Changes nothing.

    To be called before the result file is read: whoever writes these rows does so before the side file goes.
    """
    try:
        first, *lines = _side(path).read_text().splitlines()
        number, phase = int(first[:4]), first[4:].strip()
        rows = [r for line in lines if isinstance(r := records.decode(json.loads(line), str(path)), Row)]
    except (OSError, ValueError, BenchError):
        return []
    found = []
    for row in rows if number < 0 else rows[number : number + 1]:
        said = notes(path, row.case, row.dtype, row.variant if number >= 0 else "")
        reason = "; ".join(
            [
                f"the run ended while this was measured ({phase})",
                *(f"rank {n.rank}: {n.reason}" for n in said),
            ]
        )
        found.append(replace(row, status="crashed", reason=reason))
    return found


def clear(path: Path) -> None:
    """Remove the side file and the notes."""
    _side(path).unlink(missing_ok=True)
    for file in path.parent.glob(f"{glob.escape(path.name)}.rank*"):
        file.unlink(missing_ok=True)


def _side(path: Path) -> Path:
    return path.with_name(path.name + ".in-progress")


def _note(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


def present(device: str, settings: Settings) -> dict[str, Any]:
    """What a run would measure on now: ``cards`` (names), torch, nccl, commit, dirty, quick, rounds.

    Found without importing torch; empty where it cannot be known.
    """
    commit, dirty = (settings.commit, None) if settings.commit else environment.commit()
    return {
        "cards": environment.cards(device),
        "torch": _torch_version(),
        "nccl": _nccl_version() if device == "cuda" else "",
        "commit": commit,
        "dirty": dirty,
        "quick": settings.quick,
        "rounds": settings.rounds,
    }


def check(path: Path, known: Results, suites: Collection[str], now: Mapping[str, Any]) -> list[str]:
    """Whether what the file has of these suites fits to what would be added: warnings, in sentences.

    Raises:
        BenchError: it was measured on another card, or with another torch.
    """
    runs = {row.run for row in known.rows if row.suite in suites}
    envs = [header.env for header in known.headers if header.run in runs]
    for env in envs:
        card = records.card(env)
        if card and now["cards"] and card not in now["cards"]:
            raise BenchError(
                f"resume: {path} was measured on {card}, this is {' and '.join(now['cards'])}; "
                "choose another file with --out."
            )
        if env.get("torch") and now["torch"] and env["torch"] != now["torch"]:
            raise BenchError(
                f"resume: {path} was measured with torch {env['torch']}, this is {now['torch']}; "
                "choose another file with --out."
            )
    last = envs[-1] if envs else {}
    pairs = {
        "NCCL": (last.get("nccl"), now["nccl"]),
        "commit": (_state(last), _state(now)),
        **{f"--{name}": (last[name], now[name]) for name in ("quick", "rounds") if name in last},
    }
    return [
        f"resume: {path} has rows with {what} {before}, new ones are with {after}."
        for what, (before, after) in pairs.items()
        if before not in (None, "") and after not in (None, "") and before != after
    ]


def _state(env: Mapping[str, Any]) -> str:
    name = str(env.get("commit") or "")
    return f"{name} with changes" if name and env.get("dirty") else name


def _torch_version() -> str:
    """As torch.__version__ says it; the package's metadata lack the part after "+"."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        with suppress(OSError):
            text = (Path(folder) / "version.py").read_text()
            if match := re.search(r"^__version__ = ['\"](.+)['\"]", text, re.M):
                return match[1]
    return ""


def _nccl_version() -> str:
    found = set()
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.add(importlib.metadata.version(name))
    return found.pop() if len(found) == 1 else ""
