"""Loads the compiled parts of the package and remembers what could not be loaded, and why.

`_C` (op schemas, CPU executor) is required. `_C_sm80` (CUDA ops, the portable kernel), `_C_sm90a` (Hopper kernels),
`_C_nvshmem` (rows by NVSHMEM) and `_host` (the planner as a Python module) are optional: the package imports without
them, on any machine, and `status()` tells what is missing. Those named `_C` have no Python symbols; they are dynamic
libraries that register ops when torch loads them. The ops of `_C_sm80` call the kernels of `_C_sm90a` once they know
their address.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import json
import re
from pathlib import Path
from types import ModuleType

import torch

MIN_TORCH = (2, 11)
BUILD_COMMAND = "pip install --no-build-isolation . (in a clone: make build)"
_FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class ExtensionStatus:
    """What became of one extension.

    Attributes:
        name: "_C", "_C_sm80", "_C_sm90a", "_C_nvshmem" or "_host".
        loaded: whether its code can be used in this process.
        path: the file, or None where it was not built.
        reason: why it is not loaded; empty where it is.
    """

    name: str
    loaded: bool
    path: Path | None
    reason: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name}: {'loaded from ' + str(self.path) if self.loaded else 'not loaded, ' + self.reason}"
        )


_statuses: dict[str, ExtensionStatus] = {}
_host_module: ModuleType | None = None


def load_all() -> None:
    """Loads every extension once; called when the package is imported.

    Raises:
        ImportError: torch is older than 2.11, or `_C` was not built or does not load; the message has the command
            that mends it. Anything else that is missing raises nothing.
    """
    if "_C" in _statuses:
        return
    _check_torch()
    path = _find("_C")
    if path is None:
        raise ImportError(
            f"tpkernels is not built: there is no _C extension in {_FOLDER}; build it with {BUILD_COMMAND}"
        )
    reason = _load_library(path)
    if reason:
        raise ImportError(
            f"tpkernels cannot load {path} into torch {torch.__version__} ({reason}); "
            f"build it again with {BUILD_COMMAND}"
        )
    _statuses["_C"] = ExtensionStatus("_C", True, path)
    _statuses["_C_sm80"] = _load_cuda("_C_sm80")
    _statuses["_C_sm90a"] = _load_hopper("_C_sm90a")
    _statuses["_C_nvshmem"] = _load_nvshmem("_C_nvshmem")
    _statuses["_host"] = _load_host()


def status() -> dict[str, ExtensionStatus]:
    """What is loaded, by extension name; `print(*status().values(), sep="\\n")` is readable."""
    return dict(_statuses)


def is_loaded(name: str) -> bool:
    """Whether the extension `name` can be used in this process."""
    return name in _statuses and _statuses[name].loaded


def why_not(name: str) -> str:
    """Why the extension `name` is not loaded; empty if it is."""
    return _statuses[name].reason if name in _statuses else "tpkernels has not been imported"


def host() -> ModuleType:
    """The `_host` module (planner and schedules, pybind11).

    Raises:
        ImportError: it was not built, or was built for another Python; the message says which.
    """
    if _host_module is None:
        raise ImportError(f"tpkernels._host is not available: {why_not('_host')}")
    return _host_module


def _check_torch() -> None:
    """Refuses an old torch before its dynamic linker does, whose words would help nobody."""
    match = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if match and (int(match[1]), int(match[2])) < MIN_TORCH:
        want = ".".join(map(str, MIN_TORCH))
        raise ImportError(
            f'tpkernels needs torch {want} or newer, found {torch.__version__}: pip install --upgrade "torch>={want}"'
        )


def _find(name: str) -> Path | None:
    """The file of an extension: `_C.abi3.so`, or with this interpreter's suffix."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = _FOLDER / f"{name}{suffix}"
        if path.exists():
            return path
    return None


def _load_library(path: Path) -> str:
    """Loads a library of ops; returns why it does not load, or ""."""
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:  # missing libraries and symbols; schemas that do not match `_C`
        return str(error).strip().splitlines()[0]
    return ""


def _not_built(name: str) -> str:
    """Why an extension is absent, as the build recorded it."""
    try:
        skipped = json.loads((_FOLDER / "_build_info.json").read_text())["skipped"]
        return f"it was not built: {skipped[name]}"
    except (OSError, ValueError, KeyError):
        return f"it was not built; build it with {BUILD_COMMAND}"


def _load_cuda(name: str) -> ExtensionStatus:
    path = _find(name)
    if path is None:
        return ExtensionStatus(name, False, None, _not_built(name))
    if torch.version.cuda is None:
        return ExtensionStatus(name, False, path, f"torch {torch.__version__} is a CPU-only build")
    reason = _load_library(path)
    return ExtensionStatus(name, not reason, path, reason)


def _load_hopper(name: str) -> ExtensionStatus:
    """Loads the Hopper kernels and tells `_C_sm80`, which calls them, where they are."""
    status = _load_cuda(name)
    if not status.loaded:
        return status
    if not is_loaded("_C_sm80"):
        reason = f"_C_sm80, which calls its kernels, is not loaded ({why_not('_C_sm80')})"
        return ExtensionStatus(name, False, status.path, reason)
    try:
        torch.ops.tpkernels.attach_sm90a(torch.ops.tpkernels.sm90a_entry())
    except (AttributeError, RuntimeError) as error:  # a library of another version, without the op
        return ExtensionStatus(name, False, status.path, str(error).strip().splitlines()[0])
    return status


def _load_nvshmem(name: str) -> ExtensionStatus:
    """Loads what carries rows by NVSHMEM, unless the process has another NVSHMEM than it was compiled with."""
    if not is_loaded("_C_sm90a"):
        path = _find(name)
        reason = (
            f"_C_sm90a, which it serves, is not loaded ({why_not('_C_sm90a')})" if path else _not_built(name)
        )
        return ExtensionStatus(name, False, path, reason)
    status = _load_cuda(name)
    if not status.loaded:
        return status
    versions = [".".join(map(str, v)) for v in _halves(torch.ops.tpkernels.nvshmem_versions())]
    reason = nvshmem_mismatch(*versions)
    return ExtensionStatus(name, not reason, status.path, reason)


def _halves(numbers: list[int]) -> tuple[list[int], list[int]]:
    return numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]


def nvshmem_mismatch(compiled: str, loaded: str) -> str:
    """Why these versions of NVSHMEM do not go together; empty if they do. Its device code is part of `_C_nvshmem`."""
    if compiled == loaded:
        return ""
    return (
        f"it was compiled with NVSHMEM {compiled}, but torch has loaded {loaded}; build it again with "
        f"TPK_WITH_NVSHMEM=1 {BUILD_COMMAND}"
    )


def _load_host() -> ExtensionStatus:
    global _host_module
    path = _find("_host")
    if path is None:
        others = sorted(p.name for p in _FOLDER.glob("_host.*.so"))
        if others:
            reason = f"{others[0]} was built for another Python; build it for this one with {BUILD_COMMAND}"
            return ExtensionStatus("_host", False, _FOLDER / others[0], reason)
        return ExtensionStatus("_host", False, None, _not_built("_host"))
    try:
        _host_module = importlib.import_module(f"{__package__}._host")
    except ImportError as error:
        return ExtensionStatus("_host", False, path, str(error))
    return ExtensionStatus("_host", True, path)
