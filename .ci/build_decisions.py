"""What a build decides, and the sentences that it says.

setup.py looks at the machine, asks here, and builds. Nothing here looks at anything but its arguments, so that
tests/cpu/test_build_decisions.py can try each case.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

MIN_TORCH = (2, 11)
CUTLASS = (
    "nvidia-cutlass==4.2.0.0"  # headers only: without its dependencies, which its Python code alone needs
)
MIN_CUTLASS = (4, 2)
MIN_SM90A_CUDA = (12, 5)  # the first with cudaGetDriverEntryPointByVersion
# Never plain sm_90: the headers would compile for it, to kernels that stop at the first wgmma.
# NDEBUG: an assertion of the headers is a function call, and ptxas then serialises every wgmma (C7510).
SM90A_FLAGS = ["-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-DNDEBUG"]
# The device code of NVSHMEM is linked for one GPU alone: that of the Hopper kernels, which it serves.
NVSHMEM_FLAGS = ["-gencode=arch=compute_90,code=sm_90"]
# Its headers compute with halves, which torch forbids everywhere.
NVSHMEM_COMPILE = ["-rdc=true"]
NVSHMEM_COMPILE += [f"-U__CUDA_NO_{of}__" for of in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS")]
NVSHMEM_COMPILE += ["-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]
GIB = 1 << 30
BUILD_COMMAND = "pip install --no-build-isolation ."


class BuildError(SystemExit):
    """One sentence that says what is wrong and which command mends it; ends the build with status 1."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"\ntpkernels: {sentence}\n")
        self.sentence = sentence


class Piece(NamedTuple):
    """One extension: `reason` says why it is skipped, or is empty where it is built."""

    name: str
    sources: list[str]
    reason: str = ""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.14.1+cu130" -> (2, 14, 1); () where there are none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_torch(version: str | None) -> str:
    """A sentence if this torch (None: no torch) cannot build tpkernels, else ""."""
    want = ".".join(map(str, MIN_TORCH))
    if version is None:
        return (
            f"torch was not found by {sys.executable} (an isolated build sees none), and the extensions are compiled "
            f'against it: pip install "torch>={want}" setuptools ninja pybind11 && {BUILD_COMMAND}'
        )
    if release(version)[:2] < MIN_TORCH:
        return f'torch {version} is too old, {want} or newer is needed: pip install --upgrade "torch>={want}"'
    return ""


def check_ninja(path: str | None) -> str:
    """A sentence if ninja is missing, else ""."""
    return "" if path else "ninja was not found on PATH, and the build is driven by it: pip install ninja"


def check_compiler(compiler: str, error: str | None) -> str:
    """A sentence if the trial compilation of C++20 gave `error` ("" means not found), else ""."""
    if error is None:
        return ""
    mend = f"apt-get install g++-12 && CXX=g++-12 {BUILD_COMMAND}"
    if not error:
        return f"the C++ compiler '{compiler}' was not found: {mend}"
    said = error.strip().splitlines()[0][:200]
    return f"'{compiler}' does not compile C++20 (GCC 11 or Clang 14 do; it said '{said}'): {mend}"


def default_jobs(cores: int, available: int) -> int:
    """Compilers at once: one a core, each with 2.5 GiB of the `available` bytes, 2 GiB left for the rest."""
    return max(1, min(cores, int((available - 2 * GIB) / (2.5 * GIB))))


def parse_jobs(requested: str | None) -> int | None:
    """MAX_JOBS as a number; None if it is unset or no positive integer (ninja takes 0 for "without a limit")."""
    return int(requested) if requested and re.fullmatch(r"0*[1-9][0-9]*", requested) else None


def check_jobs(requested: str | None, cores: int, available: int) -> str:
    """A warning if MAX_JOBS is no number, or the memory too small for that many jobs (or for one), else ""."""
    have = f"{available / GIB:.1f} GiB of memory are available"
    if requested is not None and parse_jobs(requested) is None:
        mend = f"export MAX_JOBS={default_jobs(cores, available)}"
        return f"MAX_JOBS={requested} is not a positive number and not used: {mend}"
    jobs = parse_jobs(requested) or 1
    if jobs == 1 and available < 2 * GIB:
        return f"{have}, too little for one compiler (2 GiB): add swap or free some if the build is killed"
    fits = default_jobs(jobs, available)
    if jobs > fits:
        return f"{have}, too little for MAX_JOBS={jobs} (2.5 GiB each): export MAX_JOBS={fits}"
    return ""


def decide_cuda(torch: str, torch_cuda: str | None, nvcc: str | None, nvcc_cuda: str | None) -> str:
    """Why the CUDA kernels cannot be built ("" if they can): versions like "13.0", `nvcc` a path."""
    if torch_cuda is None:
        return f"torch {torch} is a CPU-only build; for CUDA: pip install --force-reinstall 'torch>=2.11'"
    major = torch_cuda.split(".")[0]
    mend = f"install the CUDA {major} toolkit and name it: CUDA_HOME=/usr/local/cuda-{torch_cuda} {BUILD_COMMAND}"
    if nvcc is None:
        return f"nvcc was not found (torch {torch} needs CUDA {major}): {mend}"
    if nvcc_cuda is None:
        return f"{nvcc} did not tell its version: {mend}"
    if nvcc_cuda.split(".")[0] != major:
        return f"{nvcc} is CUDA {nvcc_cuda}, but torch {torch} was built with CUDA {torch_cuda}: {mend}"
    return ""


def decide_sm90a(no_cuda: str, nvcc_cuda: str | None, cutlass: str | None) -> str:
    """Why the Hopper kernels cannot be built ("" if they can): `no_cuda` is the reason against any CUDA kernel,
    `cutlass` the version of CUTLASS's headers (None: not found)."""
    if no_cuda:
        return no_cuda
    if release(nvcc_cuda or "") < MIN_SM90A_CUDA:
        want = ".".join(map(str, MIN_SM90A_CUDA))
        mend = (
            f"install the CUDA {want} toolkit and name it: CUDA_HOME=/usr/local/cuda-{want} {BUILD_COMMAND}"
        )
        return f"nvcc is CUDA {nvcc_cuda}, and the Hopper kernels need {want} or newer: {mend}"
    mend = f"pip install --no-deps {CUTLASS}"
    if cutlass is None:
        return f"the headers of CUTLASS were not found (the Hopper kernels are compiled with them): {mend}"
    if release(cutlass)[:2] < MIN_CUTLASS:
        want = ".".join(map(str, MIN_CUTLASS))
        return f"the headers of CUTLASS are {cutlass}, and the Hopper kernels need {want} or newer: {mend}"
    return ""


def decide_nvshmem(no_sm90a: str, version: str | None, pinned: str | None) -> str:
    """Why the NVSHMEM transport cannot be built ("" if it can): `no_sm90a` is the reason against the Hopper kernels,
    `version` that of the headers (None: not found), `pinned` the one that torch wants (None: it names none)."""
    if no_sm90a:
        return f"it serves the Hopper kernels: {no_sm90a}"
    mend = f"pip install nvidia-nvshmem-cu13=={pinned or '3.4.5'}, or TPK_NVSHMEM_HOME=/path/to/nvshmem {BUILD_COMMAND}"
    if version is None:
        return f"NVSHMEM (headers, libnvshmem_device.a and libnvshmem_host.so.3) was not found: {mend}"
    if pinned is not None and version != pinned:
        return f"NVSHMEM {version} was found, and this torch loads {pinned}: {mend}"
    return ""


def decide_host(has_pybind11: bool, include: Path, version: tuple[int, ...] = sys.version_info[:2]) -> str:
    """Why the planner cannot be built ("" if it can); `include` is where Python.h should be."""
    if not has_pybind11:
        return "pybind11 was not found (tests of the planner need it): pip install pybind11"
    if (include / "Python.h").exists():
        return ""
    package = f"python{version[0]}.{version[1]}-dev"
    return f"Python.h was not found (the planner needs it): apt-get install {package}"


def apply_switch(name: str, value: str, reason: str) -> str:
    """The reason to skip a piece after its switch TPK_WITH_*: 0 skips, 1 turns a reason into an error."""
    if value not in ("auto", "0", "1"):
        raise BuildError(f"{name}={value} is not one of auto, 0 and 1: export {name}=auto")
    if value == "0":
        return f"{name}=0 switches it off"
    if value == "1" and reason:
        raise BuildError(f"{name}=1, but {reason}")
    return reason


def apply_off_switch(name: str, value: str, reason: str) -> str:
    """As apply_switch, of a piece that is only built where it is asked for."""
    if value == "":
        return f"it is built with {name}=1 only"
    return apply_switch(name, value, reason)


def parse_nvshmem_version(text: str) -> str | None:
    """The "3.4.5" in non_abi/nvshmem_version.h."""
    parts = ("MAJOR", "MINOR", "PATCH")
    found = [re.search(rf"#define NVSHMEM_VENDOR_{part}_VERSION (\d+)", text) for part in parts]
    return ".".join(m[1] for m in found if m) if all(found) else None


def pinned_nvshmem(requirements: list[str]) -> str | None:
    """The version of NVSHMEM in the requirements of the package torch."""
    found = [re.match(r"nvidia-nvshmem-cu\d+\s*==\s*([\d.]+)", line) for line in requirements]
    return next((m[1] for m in found if m), None)


def gencode_flags(extra: str = "") -> list[str]:
    """nvcc flags: code for sm_80 and sm_90, PTX of compute_90 for later GPUs, and `extra` ("100;120a")."""
    archs = ["80", "90"]
    for arch in re.split(r"[;,\s]+", extra.strip()) if extra.strip() else []:
        name = arch.replace(".", "").removeprefix("sm_")
        if not re.fullmatch(r"\d{2,3}[af]?", name) or int(name.rstrip("af")) < 80:
            mend = "export TPK_CUDA_ARCHS='100;120'"
            raise BuildError(f"TPK_CUDA_ARCHS has '{arch}', expected numbers from 80 up: {mend}")
        if name not in archs:
            archs.append(name)
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    return [*flags, "-gencode=arch=compute_90,code=compute_90"]


def host_compiler_flags(env: Mapping[str, str]) -> list[str]:
    """nvcc flags that make it use CXX: of its own it takes g++, and torch hands on CC alone."""
    words = [w for w in env.get("CXX", "").split() if Path(w).name not in ("ccache", "sccache", "distcc")]
    return ["-ccbin", words[0]] if words and not env.get("CC") else []


def parse_nvcc_version(text: str) -> str | None:
    """The "13.0" in what `nvcc --version` prints."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def parse_cutlass_version(text: str) -> str | None:
    """The "4.2.0" in cutlass/version.h."""
    found = [re.search(rf"#define CUTLASS_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(m[1] for m in found if m) if all(found) else None


def wheel_options(pieces: list[Piece], no_gil: object) -> dict[str, Any]:
    """Without _host nothing depends on the CPython: one wheel for all (those without a GIL have no abi3)."""
    one_for_all = not no_gil and any(p.name == "_host" and p.reason for p in pieces)
    return {"bdist_wheel": {"py_limited_api": "cp310"}} if one_for_all else {}


def summary(pieces: list[Piece], facts: Mapping[str, str]) -> str:
    """The table that ends a build."""
    lines = ["", "tpkernels build summary", "  " + ", ".join(f"{k} {v}" for k, v in facts.items())]
    for piece in pieces:
        state = "skipped" if piece.reason else "built"
        lines.append(f"  {piece.name:<10} {state:<8} {piece.reason or f'{len(piece.sources)} sources'}")
    return "\n".join([*lines, ""])
