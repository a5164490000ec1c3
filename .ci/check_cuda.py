"""Reads what ptxas reported in a build's log and the machine code of the libraries.

    python .ci/check_cuda.py build/build.log tpkernels/_C_sm*.so
    python .ci/check_cuda.py --complete build/build.log csrc/kernels/sm80/*.cu    only: does the log report on all?

Fails on register spills, on ptxas warnings about lost performance (C7504 to C7515) and, where cuobjdump can be
found, on kernels of matrix products without tensor-core instructions (HMMA, DMMA of float64; in _C_sm90a HGMMA, which
is wgmma, or QGMMA, which is that of fp8; FFMA of plain float32 multiplies without) and on Hopper kernels that use local
memory in their main loop.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Tiles of 192 columns on Hopper: 192 accumulators leave a thread 40 registers, too few for the bookkeeping of the
# epilogue, and the three consumers of 192x192 leave the loading threads 32. What they spill must lie outside the main
# loop, which the machine code is searched for below. Scaled tiles of fp8 have a second set of accumulators there.
MAY_SPILL = re.compile(
    r"sm90a.*(?:TileConfigILi(?:128|192|256)ELi192E|ScaledTileConfigILi128ELi(?:128|256)E)"
)
LOST_PERFORMANCE = re.compile(r"\(C75(?:0[4-9]|1[0-5])\)")
LOCAL_MEMORY = re.compile(r"\b(?:LDL|STL)\b")
WIDE = re.compile(r"sm80.*TileConfigILNS_7ElementE(\d)E")  # tpk::Element: 2 is plain float32, 4 is float64
BRANCH = re.compile(r"\bBRA\b.* 0x([0-9a-f]+) ;")

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
    found += [
        f"{k.name} spills {k.spilled} bytes on {k.arch}"
        for k in kernels
        if k.spilled and not MAY_SPILL.search(k.name)
    ]
    return found


def find_cuobjdump() -> str | None:
    """cuobjdump on PATH, in the CUDA toolkit or in the triton package; None if there is none."""
    places = [Path("/usr/local/cuda/bin/cuobjdump")]
    places += [Path(p) / "triton/backends/nvidia/bin/cuobjdump" for p in sys.path]
    return shutil.which("cuobjdump") or next((str(p) for p in places if p.exists()), None)


class MachineCode(NamedTuple):
    """What a kernel's machine code for one architecture has of interest."""

    tensor_core: int  # its tensor-core instructions
    local_memory: int  # loads and stores of local memory in its main loop


def needed_instruction(library: str, kernel: str = "") -> str:
    """The instruction that every matrix product in this library must have, but those of a kernel of wide operands."""
    if "sm90a" in Path(library).name:
        return "HGMMA"
    element = WIDE.search(kernel)
    return {"2": "FFMA", "4": "DMMA"}.get(element[1], "HMMA") if element else "HMMA"


def inspect(
    tensor_core: list[int], local_memory: list[int], loops: list[tuple[int, int]], several: list[int]
) -> MachineCode:
    """Judges a kernel by the addresses of its instructions; a loop is (target, address) of a branch backwards.

    The main loop is all from the first to the last tensor-core instruction, and the smallest loop that has one. A
    kernel of fp8 has one for each kind of it: `several` are its instructions, each in the smallest loop around it.
    """
    if several:
        spans = [
            min(((s, e) for s, e in loops if s <= t <= e), key=lambda x: x[1] - x[0], default=(t, t))
            for t in several
        ]
        return MachineCode(len(tensor_core), sum(any(s <= x <= e for s, e in spans) for x in local_memory))
    around = [(s, e) for s, e in loops if any(s <= t <= e for t in tensor_core)]
    spans = [(min(tensor_core), max(tensor_core))] if tensor_core else []
    spans += sorted(around, key=lambda loop: loop[1] - loop[0])[:1]
    return MachineCode(len(tensor_core), sum(any(s <= x <= e for s, e in spans) for x in local_memory))


def read_machine_code(lines: Iterable[str], library: str) -> dict[str, MachineCode]:
    """The kernels in the output of `cuobjdump -sass` of a library, by "name (sm_80)"."""
    tensor_core = re.compile(rf"\b(?:{needed_instruction(library)}|QGMMA)\b")
    found: dict[str, tuple[list[int], list[int], list[tuple[int, int]], list[int]]] = {}
    arch, kernel = "", ([], [], [], [])
    for line in lines:
        if match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(\S.*)", line):
            address, code = int(match[1], 16), match[2]
            if tensor_core.search(code):
                kernel[0].append(address)
                kernel[3].extend([address] if "QGMMA" in code else [])
            elif LOCAL_MEMORY.search(code):
                kernel[1].append(address)
            elif (branch := BRANCH.search(code)) and int(branch[1], 16) < address:
                kernel[2].append((int(branch[1], 16), address))
        elif match := re.search(r"Function : (\S+)", line):
            kernel = found.setdefault(f"{match[1]} ({arch})", ([], [], [], []))
            tensor_core = re.compile(rf"\b(?:{needed_instruction(library, match[1])}|QGMMA)\b")
        elif match := re.match(r"arch = (sm_\w+)", line):
            arch = match[1]
    return {name: inspect(*lists) for name, lists in found.items()}


def machine_code_problems(library: str, kernels: dict[str, MachineCode]) -> list[str]:
    """What is wrong in a library's machine code, one sentence each."""
    products = {name: code for name, code in kernels.items() if "gemm" in name.lower()}
    if not products:
        return [f"{library} has no kernel with 'gemm' in its name"]
    found = [
        f"{n} has no {needed_instruction(library, n)} instruction"
        for n, code in products.items()
        if not code.tensor_core
    ]
    if needed_instruction(library) == "HGMMA":
        found += [
            f"{n} uses local memory {code.local_memory} times in its main loop"
            for n, code in products.items()
            if code.local_memory
        ]
    return found


def read_library(cuobjdump: str, library: str) -> dict[str, MachineCode]:
    """The kernels in a library's machine code."""
    process = subprocess.Popen([cuobjdump, "-sass", library], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    kernels = read_machine_code(process.stdout, library)
    if process.wait() != 0:
        raise SystemExit(f"{cuobjdump} -sass {library} ended with status {process.returncode}")
    return kernels


def main() -> int:
    """Prints a table of kernels and the problems; returns 1 if there are any."""
    if sys.argv[1] == "--complete":
        missing = unreported(Path(sys.argv[2]).read_text(), sys.argv[3:])
        print(*(f"{sys.argv[2]} has no report on {source}" for source in missing), sep="\n")
        return 1 if missing else 0
    log, libraries = Path(sys.argv[1]).read_text(), sys.argv[2:]
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
    for library in libraries if cuobjdump else []:
        code = read_library(cuobjdump, library)
        count = sum(c.tensor_core for c in code.values())
        print(f"{library}: {len(code)} kernels, {count} instructions that multiply")
        found += machine_code_problems(library, code)
    for sentence in found:
        print("problem:", sentence)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
