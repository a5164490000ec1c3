"""The command ``tpk`` in this process, with a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tpkernels.tune import cli, constants, local, timer

DEVICE = ["--device", "cpu"]


def empty_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the cache will be; nothing is left of it, nor of constants."""
    monkeypatch.setenv("TPK_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(timer, "_BUDGET_S", 0.0)  # one round: what is told is not looked at
    local.forget()
    yield folder / "cache"
    local.forget()
    constants.use("cpu", None)


def ran(*arguments: str) -> int:
    """Its exit code."""
    return cli.main([*arguments])
