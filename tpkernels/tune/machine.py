"""What a tuned plan depends on beside the product: the device, and the versions of all that runs on it."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
from functools import cache
from pathlib import Path

import torch

from tpkernels import _extensions
from tpkernels._version import __version__

Stamp = dict[str, str]  # by name; a file of another stamp is another machine's


@cache
def stamp(device: torch.device) -> Stamp:
    """Of a device with its index; the same in every process of the machine."""
    common = {"tpkernels": __version__, "kernels": _kernels(), "torch": str(torch.__version__)}
    if device.type != "cuda":
        return common | {"device": _processor(), "cores": str(_cores())}
    properties = torch.cuda.get_device_properties(device)
    return common | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        "cublas": _cublas(),
    }


def cache_bytes(device: torch.device) -> int:
    """What operands have to exceed so that they come from memory."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 32 << 20


@cache
def _kernels() -> str:
    """Digest of the libraries that plan and multiply."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("_C", "_C_sm80", "_C_sm90a"):
        path = _extensions.status()[name].path
        if path is not None and _extensions.is_loaded(name):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _cublas() -> str:
    """Version of the library that torch has loaded; empty if it does not tell."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
        numbers = []
        for which in range(3):
            value = ctypes.c_int()
            library.cublasGetProperty(which, ctypes.byref(value))
            numbers.append(str(value.value))
        return ".".join(numbers)
    except (OSError, AttributeError):
        return ""


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _cores() -> int:
    import os

    return os.cpu_count() or 1
