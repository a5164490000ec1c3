"""Calls of one device, one after the other, whatever their streams: two kernels that wait for other ranks could
each hold multiprocessors that the other's ranks need."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

_last: dict[torch.device, tuple[int, Any]] = {}  # device: stream of the last call, event behind it
_lock = threading.RLock()  # backward passes run on other threads


class Chained(AbstractContextManager[None]):
    """Around the launch of a call. Not in a capture: what a graph replays is ordered by who replays it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def __enter__(self) -> None:
        _lock.acquire()
        if torch.cuda.is_current_stream_capturing():
            return
        self._stream = torch.cuda.current_stream(self._device)
        last = _last.get(self._device)
        if last is not None and last[0] != self._stream.cuda_stream:
            self._stream.wait_event(last[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._stream is not None and kind is None:
                _, event = _last.get(self._device) or (0, torch.cuda.Event())
                event.record(self._stream)
                _last[self._device] = self._stream.cuda_stream, event
        finally:
            _lock.release()
