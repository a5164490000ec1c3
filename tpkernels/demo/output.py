"""What a run leaves behind: ``metrics.jsonl``, ``summary.json``, ``loss.png``, ``config.json`` + ``model.pt``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .dense import ModelConfig

__all__ = ["MetricsFile", "save_checkpoint", "write_summary"]


class MetricsFile:
    """One JSON object a step, flushed at once, so that a stopped run keeps what it had. A context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, record: Mapping[str, float | int | None]) -> None:
        """Appends a line."""
        self._file.write(json.dumps(dict(record)) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes indented JSON; paths become strings."""
    path.write_text(json.dumps(dict(summary), indent=2, default=str) + "\n", encoding="utf-8")


def save_checkpoint(folder: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Writes what ``dense.load_checkpoint`` reads: the model's shape and the full tensors on the CPU."""
    fields = json.dumps(dataclasses.asdict(config), indent=2)
    (folder / "config.json").write_text(fields + "\n", encoding="utf-8")
    torch.save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / "model.pt"
    )
