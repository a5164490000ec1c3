"""Waits for other ranks end: after how long, and how it is told."""

from __future__ import annotations

import datetime
import math
import os
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.distributed.constants import default_pg_timeout

from tpkernels.comm import runtime
from tpkernels.errors import ArgumentError, CommTimeoutError, TpkError
from tpkernels.ops._groups import Group

_Call = tuple[str, tuple[str, int, int]]  # operation; group, rank, ranks
_last_call: _Call | None = None


def timeout_s(group: Group, device: torch.device) -> float:
    """How long a call may wait for another rank: TPK_COMM_TIMEOUT_S, or as long as the group's collectives."""
    given = os.environ.get("TPK_COMM_TIMEOUT_S")
    if given:
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= 1e6:
            raise ArgumentError(
                f"TPK_COMM_TIMEOUT_S: expected seconds, above 0 and up to 1e6, got {given!r}."
            )
        return seconds
    options: Any = getattr(group.process_group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None) or default_pg_timeout
    assert isinstance(timeout, datetime.timedelta)
    return min(timeout.total_seconds(), 1e6)


class Reported(AbstractContextManager[None]):
    """Around a call: what fails because a launch was stopped is raised as that. CUDA of this process is lost then,
    so a later call may be the first to know."""

    def __init__(self, op: str, group: Group) -> None:
        global _last_call
        self._call = _last_call = op, (group.name, group.rank, group.world)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, TpkError):
            raise_fault(_told(self._call), error)


def raise_fault(what: str, error: Exception) -> None:
    """Raise CommTimeoutError if there is a fault to tell of."""
    sentence = runtime.active.fault()
    if sentence:
        raise CommTimeoutError(f"{what}: {sentence}") from error


def last_call() -> str:
    """The last call on path "fused" of this process, with rank and group."""
    return "no call on path 'fused'" if _last_call is None else _told(_last_call)


def _told(call: _Call) -> str:
    op, (group, rank, world) = call
    return f"{op} on rank {rank} of {world} (group {group!r})"


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Wait for all work of a CUDA device, as ``torch.cuda.synchronize`` does.

    Where that fails because a call on path "fused" waited too long for another rank, it says which rank did not come.

    Args:
        device: None means the current one. Without CUDA nothing happens.

    Raises:
        CommTimeoutError: a wait for another rank took too long; what ran has no result.
    """
    try:
        runtime.active.synchronize(None if device is None else torch.device(device))
    except Exception as error:
        raise_fault(f"synchronize after {last_call()}", error)
        raise
