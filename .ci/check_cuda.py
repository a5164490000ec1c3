"""Reads what ptxas reported in a build's log and the machine code of the library.

    python .ci/check_cuda.py build/build.log tpkernels/_C_sm80.abi3.so
    python .ci/check_cuda.py --complete build/build.log csrc/kernels/sm80/*.cu    only: does the log report on all?

Fails on register spills, on ptxas warnings about lost performance (C7504 to C7515) and, where cuobjdump can be
found, on kernels of matrix products without tensor-core instructions (HMMA).
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

LOST_PERFORMANCE = re.compile(r"\(C75(?:0[4-9]|1[0-5])\)")


COMMAND = re.compile(r"^\[\d+/\d+\] .*? -c (?:-c )?(\S+)")  # of ninja; what the compiler said comes after it


class Kernel(NamedTuple):
    """One kernel for one architecture, as ptxas reported it."""

    name: str
    arch: str
    registers: int
    spilled: int  # bytes of spill stores and loads


def parse_report(log: str) -> list[Kernel]:
    """The kernels in the output of `ptxas -v`."""
    kernels = []
    name, arch, spilled = "", "", 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            name, arch, spilled = match[1], match[2], 0
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match[1]) + int(match[2])
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            kernels.append(Kernel(name, arch, int(match[1]), spilled))
            name = ""
    return kernels


def unreported(log: str, sources: list[str]) -> list[str]:
    """The sources without a report of ptxas: a build compiles, and reports on, what has changed since the last."""
    current, reported = "", set()
    for line in log.splitlines():
        if match := COMMAND.match(line):
            current = str(Path(match[1]).resolve())
        elif line.startswith("ptxas info"):
            reported.add(current)
    return [s for s in sources if str(Path(s).resolve()) not in reported]


def problems(log: str) -> list[str]:
    """What is wrong in a build's log, one sentence each."""
    found = [
        f"ptxas warns of lost performance: {x.strip()}"
        for x in log.splitlines()
        if LOST_PERFORMANCE.search(x)
    ]
    kernels = parse_report(log)
    if not kernels:
        found.append("the log has no ptxas report: make clean build")
    found += [f"{k.name} spills {k.spilled} bytes on {k.arch}" for k in kernels if k.spilled]
    return found


def find_cuobjdump() -> str | None:
    """cuobjdump on PATH, in the CUDA toolkit or in the triton package; None if there is none."""
    places = [Path("/usr/local/cuda/bin/cuobjdump")]
    places += [Path(p) / "triton/backends/nvidia/bin/cuobjdump" for p in sys.path]
    return shutil.which("cuobjdump") or next((str(p) for p in places if p.exists()), None)


def tensor_core_counts(cuobjdump: str, library: str) -> dict[str, int]:
    """HMMA and HGMMA instructions in each kernel of a library, by "name (sm_80)"."""
    counts: dict[str, int] = {}
    arch = kernel = ""
    process = subprocess.Popen([cuobjdump, "-sass", library], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"arch = (sm_\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function : (\S+)", line):
            kernel = f"{match[1]} ({arch})"
            counts[kernel] = 0
        elif kernel and re.search(r"\bHG?MMA\b", line):
            counts[kernel] += 1
    if process.wait() != 0:
        raise SystemExit(f"{cuobjdump} -sass {library} ended with status {process.returncode}")
    return counts


def main() -> int:
    """Prints a table of kernels and the problems; returns 1 if there are any."""
    if sys.argv[1] == "--complete":
        missing = unreported(Path(sys.argv[2]).read_text(), sys.argv[3:])
        print(*(f"{sys.argv[2]} has no report on {source}" for source in missing), sep="\n")
        return 1 if missing else 0
    log, library = Path(sys.argv[1]).read_text(), sys.argv[2]
    kernels = parse_report(log)
    for arch in sorted({k.arch for k in kernels}):
        group = [k for k in kernels if k.arch == arch]
        registers = [k.registers for k in group]
        spills = sum(k.spilled > 0 for k in group)
        print(
            f"{arch}: {len(group)} kernels, {min(registers)} to {max(registers)} registers, {spills} with spills"
        )
    found = problems(log)
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("notice: no cuobjdump (it comes with triton), the machine code was not looked at")
    else:
        counts = tensor_core_counts(cuobjdump, library)
        products = {k: n for k, n in counts.items() if "gemm" in k.lower()}
        print(
            f"machine code: {len(counts)} kernels, {len(products)} of them products, "
            f"{sum(counts.values())} tensor-core instructions"
        )
        if not products:
            found.append(f"{library} has no kernel with 'gemm' in its name")
        found += [f"{k} has no tensor-core instruction" for k, n in products.items() if n == 0]
    for sentence in found:
        print("problem:", sentence)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
