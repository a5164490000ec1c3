"""Builds the extensions of tpkernels with torch's BuildExtension and ninja.

    tpkernels._C       schemas, CPU executor: libtorch stable ABI, no Python symbols, every torch >= 2.11 and CPython
    tpkernels._C_sm80  CUDA kernels for sm_80 and sm_90: stable ABI; built without a GPU, needs nvcc and a CUDA torch
    tpkernels._host    planner for tests and explain(): pybind11, no torch, built for one CPython

`_C` is required; the others are left out, with the reason in the build summary, where something is missing.
Environment: TPK_WITH_CUDA=auto|0|1, TPK_WITH_HOST=auto|0|1, TPK_CUDA_ARCHS="100;120" (added to 80 and 90),
MAX_JOBS, CUDA_HOME, CXX (nvcc's host compiler too, unless CC is set).
The functions that decide are pure, so that tests/cpu/test_build.py can try each case.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent
MIN_TORCH = (2, 11)
TORCH_TARGET_VERSION = "0x020b000000000000"  # the oldest torch that may load what is built here
GIB = 1 << 30
NEEDS_TORCH = {"bdist_wheel", "build", "build_ext", "develop", "dist_info", "editable_wheel", "install"}
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
        return f"switched off by {name}=0"
    if value == "1" and reason:
        raise BuildError(f"{name}=1, but {reason}")
    return reason


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


def find_cuda_home(env: Mapping[str, str], run: Callable[[list[str]], str], site: Path) -> Path | None:
    """The folder with bin/nvcc: $CUDA_HOME, else where the nvcc on PATH really lives, else the usual places.

    nvcc on PATH may be a script that starts another one, so nvcc itself is asked (`--dryrun` prints TOP).
    """
    named = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if named:
        return Path(named) if (Path(named) / "bin/nvcc").exists() else None
    candidates: list[Path] = []
    on_path = shutil.which("nvcc", path=env.get("PATH"))
    if on_path:
        top = re.search(r"#\$ TOP=(\S+)", run([on_path, "--dryrun", "-x", "cu", "-c", os.devnull]))
        candidates += [Path(top[1]).resolve()] if top else []
        candidates += [Path(on_path).resolve().parents[1]]
    wheels = sorted(site.glob("nvidia/cu1?"), reverse=True)  # the toolkit as packages of PyPI
    candidates += [Path("/usr/local/cuda"), Path("/opt/cuda"), *wheels]
    for root in candidates:  # not searched deeper: /usr/local may hold a wrapper and, below, the toolkit
        headers = [root / "include", *root.glob("targets/*/include")]
        if (root / "bin/nvcc").exists() and any((h / "cuda_runtime.h").exists() for h in headers):
            return root
    return None


def find_sources(root: Path) -> dict[str, list[str]]:
    """The sources of each extension, relative to `root`, by folder and name."""

    def sources(folder: str) -> list[Path]:
        return [p for p in (root / "csrc" / folder).glob("*") if p.suffix in (".cpp", ".cu")]

    cuda_ops = [p for p in sources("ops") if p.stem.endswith("_cuda")]
    found = {
        "_C": [p for p in sources("ops") if p not in cuda_ops] + sources("kernels/cpu"),
        "_C_sm80": cuda_ops + sources("kernels/sm80"),
        "_host": sources("python"),
    }
    for name, paths in found.items():
        stems = [p.stem for p in paths]
        twice = sorted({s for s in stems if stems.count(s) > 1})
        if twice:  # their object files would overwrite each other
            raise BuildError(f"{name} has two sources named '{twice[0]}': rename one of them with git mv")
    return {name: sorted(p.relative_to(root).as_posix() for p in paths) for name, paths in found.items()}


def find_packages(root: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the packages, and the folders of those that are not where their name says.

    bench/ is installed as tpkernels.bench, and the device headers that its kernels include as data.
    """
    moved = {"tpkernels.bench": "bench"}
    names = []
    for package, folder in {"tpkernels": "tpkernels", **moved}.items():
        for init in (root / folder).rglob("__init__.py"):
            names.append(".".join([package, *init.parent.relative_to(root / folder).parts]))
    headers = {"tpkernels.include.comm": "csrc/comm"}
    return sorted([*names, *headers]), {**moved, **headers}


def summary(pieces: list[Piece], facts: Mapping[str, str]) -> str:
    """The table that ends a build."""
    lines = ["", "tpkernels build summary", "  " + ", ".join(f"{k} {v}" for k, v in facts.items())]
    for piece in pieces:
        state = "skipped" if piece.reason else "built"
        lines.append(f"  {piece.name:<9} {state:<8} {piece.reason or f'{len(piece.sources)} sources'}")
    return "\n".join([*lines, ""])


def output_of(command: list[str]) -> str:
    """What a command prints (both streams), or "" if it cannot be started."""
    try:
        return subprocess.run(command, stdout=-1, stderr=-2, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def remove_stale(built: Path, source: Path, moved: Mapping[str, Path]) -> None:
    """Removes modules of an earlier build that the source no longer has: they would end up in the wheel.

    `moved`: subfolders of `built` that come from elsewhere, and from where.
    """
    for path in list(built.rglob("*.py*")):
        first, *rest = path.relative_to(built).parts
        origin = moved[first].joinpath(*rest) if first in moved else source / path.relative_to(built)
        if path.suffix in (".py", ".pyi") and not origin.exists():
            path.unlink()


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still use: MemAvailable, or what the container's limit leaves."""
    free = 4 * GIB
    try:
        free = int(re.search(r"MemAvailable:\s+(\d+)", (proc / "meminfo").read_text())[1]) * 1024
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        # Cached files count as used but are dropped when memory is asked for.
        used -= int(re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.M)[1])
        free = min(free, int(limit) - used) if limit.isdigit() else free
    except (OSError, TypeError):
        pass
    return free


def try_compiler(compiler: str) -> str | None:
    """None if `compiler` compiles C++20, "" if there is none, else its error."""
    if shutil.which(compiler.split()[0]) is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text("#include <bit>\n#include <span>\nint f(std::span<int> s) { return s.size(); }\n")
        command = [*compiler.split(), "-std=c++20", "-c", str(source), "-o", str(source) + ".o"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr or f"exit status {result.returncode}"


def extensions(pieces: list[Piece], cpp_extension: Any, defines: list[str]) -> list[Any]:
    """The setuptools extensions of the pieces that are built."""
    cxx = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", *defines]
    stable = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"
    nvcc = ["-std=c++20", "-O3", "-lineinfo", "--compress-mode=size", "-DUSE_CUDA", stable, *defines]
    nvcc += ["-Xptxas=-v", *host_compiler_flags(os.environ)]
    nvcc += gencode_flags(os.environ.get("TPK_CUDA_ARCHS", ""))
    # A standard library that the compiler links statically (some wrappers do) must stay private to its extension.
    private = ["-Wl,--exclude-libs,ALL"] if sys.platform == "linux" else []
    # torch is imported first and has mapped these libraries; the paths serve tools that open the file alone.
    rpath = ["-Wl,-rpath,$ORIGIN/../torch/lib", "-Wl,-rpath,$ORIGIN/../nvidia/cu13/lib"]
    made = []
    for name, sources in [(p.name, p.sources) for p in pieces if not p.reason]:
        keywords: dict[str, Any] = {"include_dirs": [str(ROOT / "csrc")], "py_limited_api": name != "_host"}
        if name == "_C":
            kind, flags, link = cpp_extension.CppExtension, {"cxx": [*cxx, stable]}, ["-pthread", rpath[0]]
        elif name == "_C_sm80":
            kind, link = cpp_extension.CUDAExtension, rpath
            flags = {"cxx": [*cxx, stable, "-DUSE_CUDA"], "nvcc": nvcc}
        else:
            import pybind11
            from setuptools import Extension as kind

            flags, link = cxx, []
            keywords["include_dirs"].append(pybind11.get_include())
            keywords["language"] = "c++"
        keywords |= {"extra_compile_args": flags, "extra_link_args": [*link, *private]}
        made.append(kind(f"tpkernels.{name}", sources, **keywords))
    return made


def wheel_options(pieces: list[Piece], no_gil: object) -> dict[str, Any]:
    """Without _host nothing depends on the CPython: one wheel for all (those without a GIL have no abi3)."""
    one_for_all = not no_gil and any(p.name == "_host" and p.reason for p in pieces)
    return {"bdist_wheel": {"py_limited_api": "cp310"}} if one_for_all else {}


def build_command(pieces: list[Piece], facts: Mapping[str, str], cpp_extension: Any) -> type:
    """BuildExtension with a folder of objects for each extension, and the summary at the end."""

    class BuildExt(cpp_extension.BuildExtension):
        def build_extension(self, ext: Any) -> None:
            # One build.ninja a folder: shared by all, each would forget the dependencies of the others. The same
            # folder for every command: `pip install -e .` would compile everything again in a temporary one.
            objects = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
            kept, self.build_temp = self.build_temp, str(ROOT / objects / ext.name.split(".")[-1])
            os.makedirs(self.build_temp, exist_ok=True)
            try:
                super().build_extension(ext)
            finally:
                self.build_temp = kept

        def run(self) -> None:
            super().run()
            skipped = {p.name: p.reason for p in pieces if p.reason}
            target = Path(self.get_ext_fullpath("tpkernels._C")).parent / "_build_info.json"
            target.write_text(json.dumps({**facts, "skipped": skipped}, indent=1) + "\n")
            # With --inplace the first two are one folder.
            remove_stale(target.parent, ROOT / "tpkernels", {"bench": ROOT / "bench"})
            for old in skipped:  # a piece built earlier must not outlive the reason to skip it
                for path in target.parent.glob(f"{old}.*so"):
                    path.unlink()
            print(summary(pieces, facts), flush=True)

    return BuildExt


def plan_build() -> dict[str, Any]:
    """Looks at the machine (and into a venv that is not activated), decides, returns the keywords of setup()."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        import torch
    except ImportError:
        raise BuildError(check_torch(None)) from None
    compiler = os.environ.get("CXX") or "c++"
    problems = [check_torch(torch.__version__), check_ninja(shutil.which("ninja"))]
    problems.append(check_compiler(compiler, try_compiler(compiler)))
    for problem in filter(None, problems):
        raise BuildError(problem)

    cores, memory = len(os.sched_getaffinity(0)), available_memory()
    if warning := check_jobs(os.environ.get("MAX_JOBS"), cores, memory):
        print(f"tpkernels: warning: {warning}", file=sys.stderr)
    os.environ["MAX_JOBS"] = str(parse_jobs(os.environ.get("MAX_JOBS")) or default_jobs(cores, memory))

    home = find_cuda_home(os.environ, output_of, Path(torch.__file__).parents[1])
    nvcc = str(home / "bin/nvcc") if home else None
    nvcc_version = parse_nvcc_version(output_of([nvcc, "--version"])) if nvcc else None
    no_cuda = decide_cuda(str(torch.__version__), torch.version.cuda, nvcc, nvcc_version)
    no_cuda = apply_switch("TPK_WITH_CUDA", os.environ.get("TPK_WITH_CUDA", "auto"), no_cuda)
    if home and not no_cuda:
        os.environ["CUDA_HOME"] = str(home)
    has_pybind11 = importlib.util.find_spec("pybind11") is not None
    no_host = decide_host(has_pybind11, Path(sysconfig.get_path("include")))
    no_host = apply_switch("TPK_WITH_HOST", os.environ.get("TPK_WITH_HOST", "auto"), no_host)

    import torch.utils.cpp_extension as cpp_extension

    if home and not no_cuda:
        cpp_extension.CUDA_HOME = str(home)  # read when the module was imported, which may be long ago
    reasons = {"_C": "", "_C_sm80": no_cuda, "_host": no_host}
    empty = "there are no sources for it yet"
    pieces = [Piece(n, s, reasons[n] or ("" if s else empty)) for n, s in find_sources(ROOT).items()]
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "tpkernels/_version.py").read_text())[0]
    facts = {"version": version, "torch": str(torch.__version__), "python": sys.version.split()[0]}
    facts |= {"compiler": compiler, "cuda": nvcc_version or "none", "jobs": os.environ["MAX_JOBS"]}
    defines = [f'-DTPK_VERSION="{version}"', f'-DTPK_BUILD_TORCH="{torch.__version__}"']
    keywords: dict[str, Any] = {"ext_modules": extensions(pieces, cpp_extension, defines)}
    keywords["cmdclass"] = {"build_ext": build_command(pieces, facts, cpp_extension)}
    keywords["options"] = wheel_options(pieces, sysconfig.get_config_var("Py_GIL_DISABLED"))
    return keywords


if __name__ == "__main__":
    from setuptools import setup

    packages, package_dir = find_packages(ROOT)
    keywords = plan_build() if NEEDS_TORCH & set(sys.argv[1:]) else {}
    setup(packages=packages, package_dir=package_dir, **keywords)
