"""Where tensors of a grid have to be to be sent: a group has a backend for each type of device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpkernels.grids import execute


class PlainGroup:
    """Something that can be a key of a weak dictionary."""


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_each_type_of_device_has_its_own(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group with gloo for the CPU and NCCL for GPUs, whichever is used first; NCCL is opened once."""
    opened: list[Any] = []
    monkeypatch.setattr(
        execute, "transport_of", lambda group, device, name: {"cpu": "gloo", "cuda": "nccl"}[device.type]
    )
    monkeypatch.setattr(execute.torch, "zeros", lambda *shape, device: device)
    monkeypatch.setattr(execute.dist, "all_reduce", lambda x, group: opened.append(x))
    grid: Any = SimpleNamespace(group=SimpleNamespace(process_group=PlainGroup()))
    for kind in (first, "cpu", "cuda", "cpu"):
        for index in (0, 1) if kind == "cuda" else (None,):
            device = torch.device(kind) if index is None else torch.device(kind, index)
            assert execute._open(grid, device) == device
    assert len(opened) == 1


def test_gloo_sends_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "transport_of", lambda group, device, name: "gloo")
    grid: Any = SimpleNamespace(group=SimpleNamespace(process_group=PlainGroup()))
    for kind in ("cuda", "cpu"):
        assert execute._open(grid, torch.device(kind)) == torch.device("cpu")
