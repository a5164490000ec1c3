"""What a run was measured on: hardware, versions, commit, clocks. Goes into the header and the footer of a run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import nvml

__all__ = ["NO_MULTICAST", "cards", "collect", "commit", "gpu_count", "gpu_short_name", "gpu_state"]

# Set for every rank. Multicast through the switch changes what NCCL and symmetric memory do, and hosts differ in it.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def collect(device: str, world: int, commit_given: str = "") -> dict[str, Any]:
    """The environment of this process; called in a rank (imports torch).

    Returns:
        A dictionary with the keys
        date: "2026-11-28"; python, torch, cuda, nccl, tpkernels, driver: versions ("" where there is none);
        device: "cuda" or "cpu"; world: ranks; gpu: name, "" on CPU; gpus: how many are visible; sms, l2_bytes,
        gpu_bytes: of one GPU; cpu, cpus: processor and number of cores;
        commit: short; dirty: whether tracked files had been changed since (None: unknown);
        multicast: the variables of :data:`NO_MULTICAST` as they are here;
        before: :func:`gpu_state`.
    """
    import torch

    name, dirty = (commit_given, None) if commit_given else commit()
    env: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "world": world,
        "gpu": "",
        "gpus": 0,
        "driver": nvml.driver() or "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": "",
        "tpkernels": _version(),
        "python": platform.python_version(),
        "commit": name,
        "dirty": dirty,
        "cpu": _cpu_name(),
        "cpus": os.cpu_count() or 0,
        "multicast": {key: os.environ.get(key, "") for key in NO_MULTICAST},
        "before": gpu_state() if device == "cuda" else [],
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        env |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "gpu_bytes": properties.total_memory,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return env


def gpu_state() -> list[dict[str, float | None]]:
    """For each visible GPU: sm_mhz, sm_mhz_max, memory_mhz, watts, watts_limit, celsius, throttle_reasons."""
    return [gpu.state() for gpu in nvml.visible()]


def gpu_count() -> int:
    """Visible GPUs, found without CUDA in this process."""
    found = len(nvml.visible())
    if found or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not Path("/dev/nvidiactl").exists():
        return found
    code = "import torch; print(torch.cuda.device_count())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(result.stdout) if result.returncode == 0 else 0


def cards(device: str) -> list[str]:
    """Names of the visible GPUs, of the processor for "cpu"; found without CUDA, [] where that is impossible."""
    names = [gpu.name for gpu in nvml.visible()] if device == "cuda" else [_cpu_name()]
    return list(dict.fromkeys(name for name in names if name))


def gpu_short_name(device: str) -> str:
    """ "h100" of "NVIDIA H100 80GB HBM3", for file names; "cpu" without a GPU."""
    gpus = nvml.visible() if device == "cuda" else []
    return short_name(gpus[0].name or "gpu") if gpus else device.replace("cuda", "gpu")


def short_name(gpu: str) -> str:
    """The model in the name of a GPU."""
    match = re.search(r"\b([A-Z]{1,3}\d{2,4}[A-Z]?|RTX \w+)\b", gpu)
    return (match[1] if match else gpu).lower().replace(" ", "-")


def commit() -> tuple[str, bool | None]:
    """Short commit of this checkout ("" where git cannot tell), and whether tracked files were changed since."""
    folder = Path(__file__).resolve().parent
    if not (
        folder.parent / "pyproject.toml"
    ).exists():  # installed, perhaps below a repository that is not ours
        return "", None
    try:
        git = ["git", "-C", str(folder)]
        name, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "", None
    return name, bool(changed)


def _version() -> str:
    try:
        import tpkernels

        return str(tpkernels.__version__)
    except ImportError:
        return ""


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return match[1] if match else platform.machine()
