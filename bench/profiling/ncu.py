"""Hardware counters of one kernel by Nsight Compute: how busy the SMs, the tensor cores and the memories are.

ncu runs the chosen kernel many times over, alone on its GPU, so it is for kernels that do not wait for other
ranks: one that does would wait for ever. OUT/rank{r}.ncu-rep opens in the Nsight Compute GUI; the few numbers
that matter are in OUT/summary.txt.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BenchError
from . import tools
from .classify import kernel as category_of

__all__ = ["DEFAULT_KERNELS", "FOLDERS", "check_log", "finish", "parse", "program", "rank_prefix"]

FOLDERS = (
    "/usr/local/cuda*/bin",
    "/opt/nvidia/nsight-compute/*",
    "/usr/local/cuda*/nsight-compute*",
    "/usr/local/NVIDIA-Nsight-Compute*",
)

# Matrix products of cuBLAS, CUTLASS and ours.
DEFAULT_KERNELS = "gemm|nvjet|cutlass|streamk"

# Sections give what a GPU has: names of single counters (of the tensor pipe above all) differ between architectures.
_SECTIONS = ("ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis")

# (key of the summary, unit, patterns of raw names: the first that matches a column with a value counts)
_METRICS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("duration", "us", (r"gpu__time_duration\.(sum|avg|max)",)),
    ("sm", "%", (r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",)),
    (
        "memory",
        "%",
        (
            r"gpu__compute_memory_throughput\.avg\.pct_of_peak_sustained_elapsed",
            r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
            r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
        ),
    ),
    (
        "tensor",
        "%",
        (
            r"sm__pipe_tensor\w*_cycles_active\.avg\.pct_of_peak_sustained_(active|elapsed)",
            r"sm__inst_executed_pipe_tensor\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
        ),
    ),
    ("l2_hit", "%", (r"lts__t_sector_hit_rate\.pct", r"lts__average_t_sector_hit_rate\.pct")),
    ("occupancy", "%", (r"sm__warps_active\.avg\.pct_of_peak_sustained_active",)),
    ("registers", "", (r"launch__registers_per_thread",)),
    ("shared_memory", "B", (r"launch__shared_mem_per_block", r"launch__shared_mem_per_block_allocated")),
)
_SHARED_PARTS = (
    "launch__shared_mem_per_block_static",
    "launch__shared_mem_per_block_dynamic",
    "launch__shared_mem_per_block_driver",
)

# To microseconds and bytes. ncu's bytes are decimal.
_TIME = {
    "s": 1e6,
    "second": 1e6,
    "ms": 1e3,
    "msecond": 1e3,
    "us": 1.0,
    "usecond": 1.0,
    "ns": 1e-3,
    "nsecond": 1e-3,
}
_BYTES = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9}


def program() -> str:
    """Path of ncu: ``TPK_NCU``, else on PATH, else the newest in the usual folders; else BenchError."""
    return tools.find("ncu", "TPK_NCU", FOLDERS, package="Nsight Compute")


def rank_prefix(
    out: Path,
    kernel_regex: str = "",
    *,
    skip: int = 0,
    count: int = 1,
    sections: str = "basic",
    metrics: Sequence[str] = (),
) -> list[str]:
    """What to put before the command of every rank, with RANK in its environment.

    Args:
        out: folder of the profile; reports of an earlier one are removed.
        kernel_regex: which kernels, by a partial match of their function name; "": matrix products.
        skip: how many of them to leave out first.
        count: how many to profile.
        sections: a set of ncu ("basic", "detailed", "full"), on top of what the summary needs.
        metrics: further counters by name.

    Raises:
        BenchError: there is no ncu, the expression is none, or it names kernels that communicate.
    """
    pattern = kernel_regex or DEFAULT_KERNELS
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise BenchError(f"kernel: {pattern!r} is not a regular expression ({error}).") from None
    if category_of(pattern) == "communication" or expression.search("ncclDevKernel_AllGather_RING_LL"):
        raise BenchError(
            f"kernel: {pattern!r} matches kernels that wait for other ranks; ncu would run one again and "
            "again on this rank alone and wait for ever. Name one that computes, or use --profile nsys."
        )
    command = [program()]
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("rank*"):
        if re.fullmatch(r"rank\d+\.(ncu-rep|csv)", path.name):
            path.unlink()
    command += [
        "--profile-from-start=off",
        "--kernel-name",
        f"regex:{pattern}",
        "--launch-skip",
        str(skip),
        "--launch-count",
        str(count),
        "--set",
        sections,
    ]
    for section in _SECTIONS:
        command += ["--section", section]
    if metrics:
        command += ["--metrics", ",".join(metrics)]
    folder = str(out.resolve()).replace("%", "%%")
    # Clocks stay as they are: locking them would also change what runs beside.
    return [
        *command,
        "--clock-control=none",
        "--force-overwrite",
        "--export",
        f"{folder}/rank%q{{RANK}}",
    ]


def finish(out: Path, *, log: str = "") -> Path:
    """Read the report of every rank, write OUT/ncu_summary.json and OUT/summary.txt, return the path of the first.

    Args:
        log: output of the ranks, where the launcher has it; ncu says there why it could not profile.

    Raises:
        BenchError: no rank left a report, or there is no kernel in it.
    """
    check_log(log)
    reports = {}
    for path in out.glob("rank*.ncu-rep"):
        match = re.fullmatch(r"rank(\d+)\.ncu-rep", path.name)
        if match:
            reports[int(match[1])] = path
    if not reports:
        raise BenchError(
            f"{out}: expected rank0.ncu-rep and so on in it, found none. Either no kernel matched, or this "
            "user may not read the GPU's counters; ncu says which in the ranks' output."
        )
    ncu, kernels = program(), []
    for rank, report in sorted(reports.items()):
        text = tools.output_of(
            [ncu, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
        )
        (out / f"rank{rank}.csv").write_text(text, encoding="utf-8")
        kernels += [{"rank": rank, **k} for k in parse(text)]
    path = out / "ncu_summary.json"
    path.write_text(
        json.dumps({"schema": 1, "kind": "ncu_summary", "kernels": kernels}, indent=1), encoding="utf-8"
    )
    (out / "summary.txt").write_text(table(kernels), encoding="utf-8")
    return path


def check_log(text: str) -> None:
    """BenchError in a sentence for what ncu says when it could not profile."""
    if "ERR_NVGPUCTRPERM" in text:
        raise BenchError(
            "ncu: this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM). Run as root (in "
            "a container with --cap-add=SYS_ADMIN), or have the driver loaded with "
            "NVreg_RestrictProfilingToAdminUsers=0."
        )
    if "No kernels were profiled" in text:
        raise BenchError(
            "ncu: no kernel was profiled: none that was launched matches the expression, or too few for the "
            "number to skip. --profile kineto lists the kernels by name."
        )


def parse(text: str) -> list[dict[str, Any]]:
    """Kernels in the output of ``ncu --csv --page raw``.

    Returns:
        for each: "kernel" (name), "grid", "block", and whatever was measured of "duration_us", "sm_pct",
        "memory_pct", "tensor_pct", "l2_hit_pct", "occupancy_pct", "registers" (a thread),
        "shared_memory_bytes" (a block).

    Raises:
        BenchError: there is no table in it; the sentence says why, as far as ncu does.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        check_log(text)
        raise BenchError(
            f'ncu: expected a table of raw counters that begins with "ID", got {text.strip()[:80]!r}.'
        )
    rows = list(csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))))
    head, units = rows[0], dict(zip(rows[0], rows[1], strict=False)) if len(rows) > 1 else {}
    kernels = [_kernel(dict(zip(head, row, strict=False)), units) for row in rows[2:]]
    if not kernels:
        check_log("No kernels were profiled")
    return kernels


_SUFFIX = {"us": "_us", "%": "_pct", "B": "_bytes", "": ""}


def _kernel(row: Mapping[str, str], units: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "kernel": row.get("Kernel Name", ""),
        "grid": row.get("Grid Size", ""),
        "block": row.get("Block Size", ""),
    }
    for name, unit, patterns in _METRICS:
        for pattern in patterns:
            values = [
                value
                for column, cell in row.items()
                if re.fullmatch(pattern, column)
                and (value := _value(cell, units.get(column, ""))) is not None
            ]
            if values:  # several kinds of tensor instructions: the one in use
                out[name + _SUFFIX[unit]] = max(values)
                break
    if "shared_memory_bytes" not in out:
        parts = [_value(row[c], units.get(c, "")) for c in _SHARED_PARTS if c in row]
        if any(p is not None for p in parts):
            out["shared_memory_bytes"] = sum(p or 0.0 for p in parts)
    return out


def _value(cell: str, unit: str) -> float | None:
    """A number in microseconds, in bytes or as it is; None for "n/a" and the like."""
    try:
        number = float(cell.replace(",", ""))  # "1,234.5"
    except ValueError:
        return None
    base = unit.split("/")[0].strip().lower()
    return number * _TIME.get(base, _BYTES.get(base, 1.0))


def table(kernels: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of every kernel, one a block."""
    lines = []
    for k in kernels:
        lines.append(f"rank {k.get('rank', 0)}: {k['kernel']}")
        lines.append(f"  grid {k['grid']}, block {k['block']}")
        for name, unit, _ in _METRICS:
            value = k.get(name + _SUFFIX[unit])
            if value is not None:
                lines.append(
                    f"  {name.replace('_', ' '):14} {value:,.{0 if unit in ('', 'B') else 1}f} {unit}".rstrip()
                )
        lines.append("")
    return "\n".join(lines)
