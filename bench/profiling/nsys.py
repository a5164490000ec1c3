"""Profiles by Nsight Systems: NVTX ranges and GPU activities of every rank, with little disturbance.

Each rank runs under its own nsys, which records between cudaProfilerStart and cudaProfilerStop
(:func:`.bracket`) and leaves OUT/rank{r}.nsys-rep, to be opened in the Nsight Systems GUI; it is exported to
OUT/rank{r}.sqlite for the summary.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from ..errors import BenchError
from . import nsys_sqlite, summary, tools

__all__ = ["FOLDERS", "finish", "program", "rank_prefix"]

# Nsight Compute brings an nsys too.
FOLDERS = (
    "/opt/nvidia/nsight-systems*/*/bin",
    "/opt/nvidia/nsight-systems*/*/target-linux-x64",
    "/opt/nvidia/nsight-systems*/bin",
    "/usr/local/cuda*/bin",
    "/usr/local/cuda*/nsight-systems*/bin",
    "/usr/local/cuda*/nsight-systems*/target-linux-x64",
    "/usr/lib/nsight-systems/bin",
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64",
)

# Debian packages of the libraries that nsys' importer links and slim images lack.
_PACKAGES = {"libdw.so.1": "libdw1", "libelf.so.1": "libelf1"}


def program() -> str:
    """Path of nsys: ``TPK_NSYS``, else on PATH, else the newest in the usual folders; else BenchError."""
    return tools.find("nsys", "TPK_NSYS", FOLDERS, package="Nsight Systems")


def rank_prefix(out: Path) -> list[str]:
    """What to put before the command of every rank, with RANK in its environment.

    Removes what an earlier profile left in ``out``.
    """
    nsys = program()
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("rank*"):
        if re.fullmatch(r"rank\d+\.(nsys-rep|qdrep|qdstrm|sqlite)", path.name):
            path.unlink()
    return [
        nsys,
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={str(out.resolve()).replace('%', '%%')}/rank%q{{RANK}}",
    ]


def finish(out: Path, *, title: str = "") -> Path:
    """Export the report of every rank to SQLite, summarise them, return OUT/trace_summary.json."""
    nsys = program()
    reports = _reports(out, nsys)
    profiles = []
    for rank, report in reports.items():
        database = out / f"rank{rank}.sqlite"
        database.unlink(missing_ok=True)
        tools.output_of(
            [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]
        )
        profiles.append(nsys_sqlite.read(database, rank))
    return summary.write(profiles, out, title, tool="nsys")


def _reports(out: Path, nsys: str) -> dict[int, Path]:
    """Report by rank; BenchError in a sentence where a rank left none."""
    found: dict[str, dict[int, Path]] = {"nsys-rep": {}, "qdstrm": {}}
    for path in sorted(out.glob("rank*")):
        match = re.fullmatch(r"rank(\d+)\.(nsys-rep|qdstrm)", path.name)
        if match:
            found[match[2]][int(match[1])] = path
    unconverted = [found["qdstrm"][rank] for rank in found["qdstrm"] if rank not in found["nsys-rep"]]
    if unconverted:
        raise BenchError(
            f"{unconverted[0]}: nsys recorded it but could not convert it to a report; "
            f"{_why_not_converted(nsys)}"
        )
    if not found["nsys-rep"]:
        raise BenchError(
            f"{out}: expected rank0.nsys-rep and so on in it, found none; the ranks ended before "
            "cudaProfilerStart, or nsys could not start (its messages are in the ranks' output)."
        )
    return dict(sorted(found["nsys-rep"].items()))


def _why_not_converted(nsys: str) -> str:
    importer = _importer(nsys)
    if importer is None:
        return (
            f"the QdstrmImporter that belongs to {nsys} was not found beside it; install the whole of "
            "Nsight Systems, or copy the .qdstrm to a machine that has it."
        )
    missing = _missing_libraries(importer)
    if not missing:
        return f"run {importer} on it to see why."
    packages = [_PACKAGES.get(name, name) for name in missing]
    return (
        f"{importer} lacks {', '.join(missing)}; install {' '.join(packages)} (apt-get install "
        f"{' '.join(packages)}) and profile again."
    )


def _importer(nsys: str) -> Path | None:
    """QdstrmImporter lies in a folder host-* beside the folder of nsys, or above it."""
    here = Path(os.path.realpath(shutil.which(nsys) or nsys)).parent
    for folder in (here, here.parent, here.parent.parent):
        for path in [folder / "QdstrmImporter", *sorted(folder.glob("host-linux*/QdstrmImporter"))]:
            if path.is_file():
                return path
    return None


def _missing_libraries(program: Path) -> list[str]:
    """Shared libraries that a program links and the loader does not find."""
    try:
        done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(re.findall(r"^\s*(\S+) => not found", done.stdout, flags=re.M)))
