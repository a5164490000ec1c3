"""The driver's own view of the GPUs through libnvidia-ml: counts them and reads clocks, power and temperature.

Creates no CUDA context, so a process that only watches may use it. Everything is None or empty without the library.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["Gpu", "Sampler", "driver", "visible"]

_SM, _MEMORY = 1, 2  # nvmlClockType_t
_PERIOD = 0.1  # seconds between samples; power is an average over about this time anyway


@cache
def _library() -> Any:
    """The library, initialised; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _number(function: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
    """Result of a function that writes one number into its last argument."""
    try:
        value = kind()
        status = getattr(_library(), function)(*arguments, ctypes.byref(value))
    except AttributeError:  # an older driver
        return None
    return int(value.value) if status == 0 else None


def _text(function: str, *arguments: Any) -> str | None:
    buffer = ctypes.create_string_buffer(96)
    try:
        status = getattr(_library(), function)(*arguments, buffer, ctypes.c_uint(96))
    except AttributeError:
        return None
    return buffer.value.decode(errors="replace") if status == 0 else None


class Gpu:
    """One GPU."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle

    @property
    def name(self) -> str | None:
        """ "NVIDIA H100 80GB HBM3" """
        return _text("nvmlDeviceGetName", self._handle)

    @property
    def sm_mhz(self) -> int | None:
        """Present clock of the multiprocessors."""
        return _number("nvmlDeviceGetClockInfo", self._handle, _SM)

    @property
    def watts(self) -> float | None:
        """Power drawn now."""
        milliwatts = _number("nvmlDeviceGetPowerUsage", self._handle)
        return None if milliwatts is None else milliwatts / 1000

    def state(self) -> dict[str, float | None]:
        """Clocks, power and temperature now; which limits slow the clocks down, as the driver's bit mask."""
        limit = _number("nvmlDeviceGetEnforcedPowerLimit", self._handle)
        reasons = _number("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle, kind=ctypes.c_ulonglong)
        return {
            "sm_mhz": self.sm_mhz,
            "sm_mhz_max": _number("nvmlDeviceGetMaxClockInfo", self._handle, _SM),
            "memory_mhz": _number("nvmlDeviceGetClockInfo", self._handle, _MEMORY),
            "watts": self.watts,
            "watts_limit": None if limit is None else limit / 1000,
            "celsius": _number("nvmlDeviceGetTemperature", self._handle, 0),
            "throttle_reasons": reasons,
        }


def driver() -> str | None:
    """Version of the driver."""
    return _text("nvmlSystemGetDriverVersion") if _library() else None


def visible() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order (all without it)."""
    if _library() is None:
        return []
    count = _number("nvmlDeviceGetCount_v2") or 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = [str(i) for i in range(count)] if named is None else named.split(",")
    found = []
    for entry in (e.strip() for e in entries):
        handle = ctypes.c_void_p()
        if entry.isdigit():
            status = _library().nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(entry)), ctypes.byref(handle))
        elif entry.startswith(("GPU-", "MIG-")):
            status = _library().nvmlDeviceGetHandleByUUID(entry.encode(), ctypes.byref(handle))
        else:
            status = 1
        if status != 0:
            break  # CUDA ignores what follows an entry that it does not know
        found.append(Gpu(handle))
    return found


class Sampler:
    """Reads the clock and the power of one GPU in a thread while something runs."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu

    def now(self) -> dict[str, float]:
        """ "sm_mhz" and "watts" at this moment, as far as they can be read."""
        read = {} if self._gpu is None else {"sm_mhz": self._gpu.sm_mhz, "watts": self._gpu.watts}
        return {name: float(value) for name, value in read.items() if value is not None}

    @contextmanager
    def sampling(self) -> Iterator[dict[str, float]]:
        """The dictionary holds "sm_mhz" and "watts", medians, after the block; nothing without a GPU."""
        result: dict[str, float] = {}
        samples: list[tuple[float | None, float | None]] = []
        if self._gpu is None:
            yield result
            return
        gpu, stop = self._gpu, threading.Event()

        def sample() -> None:
            while not stop.wait(_PERIOD):
                samples.append((gpu.sm_mhz, gpu.watts))

        thread = threading.Thread(target=sample, name="nvml", daemon=True)
        thread.start()
        try:
            yield result
        finally:
            stop.set()
            thread.join(5)
            for name, values in zip(("sm_mhz", "watts"), zip(*samples, strict=True), strict=False):
                known = [v for v in values if v is not None]
                if known:
                    result[name] = float(statistics.median(known))
