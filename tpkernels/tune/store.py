"""The cache on disk: one JSON file for each machine, in ``$TPK_CACHE_DIR`` or ``~/.cache/tpkernels``.

Any number of processes may read and write it. A file is replaced whole, by renaming, under a lock of its folder; who
times a product holds a lock of that product, so that others wait for it instead of timing it too. Locks belong to
processes: those of one that died are free. What cannot be read, or is another machine's, is ignored with one warning;
where nothing can be written, plans are kept for the process alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tpkernels.tune.machine import Stamp

try:
    import fcntl
except ImportError:  # no POSIX: no locks, so that some products are timed by several processes
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
MOST_ENTRIES = 4096  # of a file; the oldest go
MOST_FILES = 8  # of a folder: versions come and go
_LOCKS = 1 << 20
_POLL_S = 0.02


@dataclass(frozen=True)
class Entry:
    """A product that was timed.

    Attributes:
        gemm: what is taken: "streamk", or the library ("cublas", "blas").
        schedule, splits, tile: what the Stream-K kernel is told.
        what: what is taken, in words.
        us: time of what is taken.
        library_us: of the library; 0 where it was not timed (path "fused").
        model_us, predicted_us: of the plan that the cost model chooses (0: it could not run), and what that predicts.
        model: that plan in words.
        when: seconds since 1970.
    """

    gemm: str
    schedule: str = "auto"
    splits: int = 1
    tile: str = ""
    what: str = ""
    us: float = 0.0
    library_us: float = 0.0
    model_us: float = 0.0
    predicted_us: float = 0.0
    model: str = ""
    when: float = 0.0

    @classmethod
    def of(cls, given: Any) -> Entry | None:
        """From what JSON holds; None where that is no entry."""
        if not isinstance(given, dict) or set(given) != {f.name for f in fields(cls)}:
            return None
        numbers = ("us", "library_us", "model_us", "predicted_us", "when")
        if not all(type(given[name]) in (int, float) and 0 <= given[name] < 1e15 for name in numbers):
            return None
        if type(given["splits"]) is not int or given["splits"] < 1:
            return None
        if given["gemm"] not in ("streamk", "cublas", "blas"):
            return None
        words = (given[name] for name in ("schedule", "tile", "what", "model"))
        return cls(**given) if all(type(word) is str and len(word) < 200 for word in words) else None


def folder() -> Path | None:
    """Where files are kept; None where there is no such place."""
    given = os.environ.get("TPK_CACHE_DIR")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache" / "tpkernels"
    except RuntimeError:
        return None


class Store:
    """What is known of one machine. Not for several threads at once.

    Attributes:
        path: the file, or None where there is no folder for it.
    """

    def __init__(self, stamp: Stamp, where: Path | None = None) -> None:
        self.stamp = dict(stamp)
        place = where or folder()
        digest = hashlib.blake2b(json.dumps(self.stamp, sort_keys=True).encode(), digest_size=4).hexdigest()
        name = re.sub(r"[^A-Za-z0-9]+", "-", stamp["device"]).strip("-")[:60]
        self.path = None if place is None else place / f"tuned-{name}-{digest}.json"
        self._entries: dict[str, Entry] = {}
        self._constants: dict[str, dict[str, Any]] = {}
        self._seen: tuple[int, int, int] | None = None  # which file was read last
        self._locks: int | None = None
        self._warned: set[str] = set()

    def get(self, key: str) -> Entry | None:
        """What was tuned, by any process up to now."""
        if key not in self._entries:
            self._refresh()
        return self._entries.get(key)

    def all(self) -> dict[str, Entry]:
        """Every entry, the oldest first."""
        self._refresh()
        return dict(self._entries)

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry, on disk where that can be."""
        self._write({key: entry}, {})

    def constants(self, device: str) -> dict[str, Any] | None:
        """What ``tpk calibrate`` has found for this kind of kernel: {"text": ..., and how well it predicts}."""
        self._refresh()
        return self._constants.get(device)

    def put_constants(self, device: str, found: Mapping[str, Any]) -> None:
        """Keep constants, on disk where that can be."""
        self._write({}, {device: dict(found)})

    @contextmanager
    def claim(self, key: str, timeout_s: float) -> Iterator[bool]:
        """Hold the lock of a key inside the ``with`` block; False if another process kept it so long."""
        with self._locked(1 + int.from_bytes(_digest(key), "big") % _LOCKS, timeout_s) as held:
            yield held

    def _refresh(self) -> None:
        """Read the file, if it is not the one that was read last."""
        if self.path is None:
            return
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                which = status.st_ino, status.st_size, status.st_mtime_ns
                if which == self._seen:
                    return
                text = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn("read", f"{self.path} cannot be read ({error.strerror}); what it knows is not used")
            return
        self._seen = which
        entries, constants, wrong = parse(text, self.stamp)
        if wrong:
            self._warn("parse", f"{self.path} is ignored: {wrong}; it is replaced when a product is tuned")
        # What this process has chosen stays.
        self._entries = entries | self._entries
        self._constants = constants | self._constants

    def _write(self, entries: dict[str, Entry], constants: dict[str, dict[str, Any]]) -> None:
        self._entries |= entries
        self._constants |= constants
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(0, 10.0):
                self._refresh()
                self._entries |= entries
                self._constants |= constants
                newest = sorted(self._entries.items(), key=lambda item: item[1].when)[-MOST_ENTRIES:]
                text = render(self.stamp, dict(newest), self._constants)
                is_new = not self.path.exists()
                _replace(self.path, text)
                if is_new:
                    _drop_old(self.path)
        except OSError as error:
            self._warn(
                "write",
                f"{self.path.parent} cannot be written to ({error.strerror}); tuned plans last as long as this process",
            )

    @contextmanager
    def _locked(self, byte: int, timeout_s: float) -> Iterator[bool]:
        descriptor = self._lock_file()
        if descriptor is None:
            yield True
            return
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > end:
                    yield False
                    return
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                yield True
                return
        try:
            yield True
        finally:
            with suppress(OSError):
                fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)

    def _lock_file(self) -> int | None:
        """Open as long as the process: closing any descriptor of a file frees all locks that the process has on it."""
        if self._locks is None and self.path is not None and fcntl is not None:
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._locks = os.open(
                    self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
                )
        return self._locks

    def _warn(self, what: str, sentence: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"tpkernels' tuning cache: {sentence}.", RuntimeWarning, stacklevel=2)


def parse(text: bytes, stamp: Stamp | None) -> tuple[dict[str, Entry], dict[str, dict[str, Any]], str]:
    """Entries and constants of a file, and what is wrong with it; of any machine where ``stamp`` is None. Pure."""
    try:
        given = json.loads(text)
        if given["format"] != FORMAT:
            return {}, {}, f"its format is {given['format']!r}, not {FORMAT}"
        if stamp is not None and given["machine"] != stamp:
            names = sorted(set(given["machine"]) | set(stamp))
            other = [name for name in names if given["machine"].get(name) != stamp.get(name)]
            return {}, {}, f"it was made with another {' and '.join(other)}"
        entries = {str(key): Entry.of(value) for key, value in given["entries"].items()}
        constants = {
            str(device): found
            for device, found in given["constants"].items()
            if isinstance(found, dict) and isinstance(found.get("text"), str)
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}, {}, "it holds no tuned plans, or only a part of them"
    right = {key: entry for key, entry in entries.items() if entry is not None}
    bad = len(entries) - len(right) + len(given["constants"]) - len(constants)
    return right, constants, f"{bad} of its entries make no sense" if bad else ""


def render(stamp: Stamp, entries: Mapping[str, Entry], constants: Mapping[str, Mapping[str, Any]]) -> bytes:
    """What :func:`parse` reads. Pure."""
    whole = {
        "format": FORMAT,
        "machine": stamp,
        "constants": constants,
        "entries": {k: asdict(e) for k, e in entries.items()},
    }
    return (json.dumps(whole, indent=1) + "\n").encode()


def files(where: Path | None = None) -> list[Path]:
    """Files of all machines, the latest last."""
    place = where or folder()
    try:
        found = [(path.stat().st_mtime_ns, path) for path in (place.glob("tuned-*.json") if place else ())]
    except OSError:
        return []
    return [path for _, path in sorted(found)]


def clear(where: Path | None = None) -> list[Path]:
    """Delete what tuning has written; returns the files. Other files of the folder stay.

    Raises:
        OSError: one cannot be deleted.
    """
    gone = files(where)
    for path in gone:
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
    return gone


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()


def _replace(path: Path, text: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
        os.chmod(name, 0o644)  # as any other file: users may share a folder
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _drop_old(path: Path) -> None:
    for old in files(path.parent)[:-MOST_FILES]:
        with suppress(OSError):
            old.unlink()
            old.with_suffix(".lock").unlink(missing_ok=True)
