"""Real text that every machine has: the source files of the Python standard library, as bytes.

Files are taken in sorted order and every tenth goes to the held-out part, so the same Python gives the same bytes
on every machine. Batches are a function of (seed, step) alone: every rank, and every number of ranks, draws the
same ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from .errors import DemoError

__all__ = ["MAX_BYTES", "Corpus", "batch_at", "heldout_batches", "load_corpus", "source_files"]

MAX_BYTES = 4 << 20  # enough for any run of minutes; keeps start-up at tens of milliseconds
MIN_BYTES = 64 << 10
HELDOUT_EVERY = 10
_PACKAGES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
    "unittest",
    "xml",
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """uint8 tensors [bytes] on the CPU, the number of files, and a hash by which ranks compare what they read."""

    train: Tensor
    heldout: Tensor
    files: int
    digest: str


def source_files(stdlib: Path) -> list[Path]:
    """The .py files used: those of the top folder and of a few packages, sorted by their relative names."""
    files = [p for p in stdlib.glob("*.py") if p.is_file()]
    for package in _PACKAGES:
        files.extend(p for p in (stdlib / package).rglob("*.py") if p.is_file())
    return sorted(files, key=lambda p: p.relative_to(stdlib).as_posix())


def load_corpus(stdlib: Path | None = None, max_bytes: int = MAX_BYTES) -> Corpus:
    """Reads at most ``max_bytes`` of the standard library's sources; raises DemoError where there are none."""
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = files = 0
    for index, path in enumerate(source_files(folder)):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if total + len(text) > max_bytes:
            break
        total, files = total + len(text), files + 1
        parts[index % HELDOUT_EVERY == HELDOUT_EVERY - 1].append(text.replace(b"\r\n", b"\n"))
    train, heldout = (b"\n".join(part) for part in parts)
    if total < MIN_BYTES or len(heldout) < MIN_BYTES // HELDOUT_EVERY // 2:
        raise DemoError(
            f"the demo trains on the .py files of Python's standard library, "
            f"but {folder} holds only {total} bytes of them; "
            "use a Python that was installed with its sources (python.org, a distribution package, conda or uv)."
        )
    digest = hashlib.sha256(train + b"\0" + heldout).hexdigest()
    return Corpus(_tensor(train), _tensor(heldout), files, digest)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch_at(data: Tensor, step: int, *, seed: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets of ``step``, each int64 [batch, seq]; a function of its arguments alone."""
    draws = torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))
    starts = torch.randint(0, data.numel() - seq, (batch,), generator=draws)
    return _windows(data, starts, seq)


def heldout_batches(data: Tensor, *, batch: int, seq: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` batches of evenly spaced windows; the same for every seed."""
    starts = torch.linspace(0, data.numel() - seq - 1, batch * count, dtype=torch.float64).long()
    return [_windows(data, part, seq) for part in starts.split(batch)]


def _windows(data: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    windows = data[starts[:, None] + torch.arange(seq + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
