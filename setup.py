"""Builds the extensions of tpkernels with torch's BuildExtension and ninja.

    tpkernels._C          schemas, CPU executor: libtorch stable ABI, no Python symbols, every torch >= 2.11 and CPython
    tpkernels._C_sm80     CUDA kernels for sm_80 and sm_90: stable ABI; built without a GPU, needs nvcc and a CUDA torch
    tpkernels._C_sm90a    Hopper kernels: the same, and the headers of CUTLASS (pip install --no-deps nvidia-cutlass)
    tpkernels._C_nvshmem  rows by NVSHMEM (docs/nvshmem.md): the same, and NVSHMEM; only with TPK_WITH_NVSHMEM=1
    tpkernels._host       planner for tests and explain(): pybind11, no torch, built for one CPython

`_C` is required; the others are left out, with the reason in the build summary, where something is missing.
Environment: TPK_WITH_CUDA=auto|0|1, TPK_WITH_SM90A=auto|0|1, TPK_WITH_HOST=auto|0|1, TPK_WITH_NVSHMEM=0|1,
TPK_NVSHMEM_HOME, TPK_CUDA_ARCHS="100;120" (added to the 80 and 90 of _C_sm80), MAX_JOBS, CUDA_HOME, CXX (nvcc's host
compiler too, unless CC is set).
What is decided, and the sentences, are in .ci/build_decisions.py; this file looks at the machine and builds.
"""

from __future__ import annotations

import importlib.metadata
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

sys.path.append(str(Path(__file__).resolve().parent / ".ci"))

import build_decisions as decide
from build_decisions import GIB, BuildError, Piece

ROOT = Path(__file__).resolve().parent
TORCH_TARGET_VERSION = "0x020b000000000000"  # the oldest torch that may load what is built here
NEEDS_TORCH = {"bdist_wheel", "build", "build_ext", "develop", "dist_info", "editable_wheel", "install"}


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


def find_cutlass(name: str = "cutlass_library") -> Path | None:
    """The headers of CUTLASS in the package nvidia-cutlass of PyPI.

    It is not imported: its Python code needs packages that are not installed with it.
    """
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        include = Path(folder) / "source/include"
        if (include / "cutlass/version.h").exists():
            return include
    return None


class Nvshmem(NamedTuple):
    """An installation of NVSHMEM: folders, and the name of the host library's file."""

    include: Path
    lib: Path
    host: str

    @property
    def version(self) -> str | None:
        """Of the headers."""
        return decide.parse_nvshmem_version((self.include / "non_abi/nvshmem_version.h").read_text())


def find_nvshmem(env: Mapping[str, str], name: str = "nvidia.nvshmem") -> Nvshmem | None:
    """NVSHMEM in $TPK_NVSHMEM_HOME, else in the package that torch depends on, else in the usual places.

    The package is a namespace, whose folder only a search for it tells, and has no libnvshmem_host.so: the file is
    found under the name by which it is loaded.
    """
    named = env.get("TPK_NVSHMEM_HOME")
    try:
        spec = None if named else importlib.util.find_spec(name)
    except ModuleNotFoundError:  # not even "nvidia"
        spec = None
    wheel = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    usual = [Path("/usr/local/nvshmem"), Path("/opt/nvidia/nvshmem"), Path("/opt/nvshmem")]
    for home in [Path(named)] if named else [*wheel, *usual]:
        for lib in (home / "lib", home / "lib64"):
            hosts = [p.name for p in lib.glob("libnvshmem_host.so.*") if re.fullmatch(r".*\.so\.\d+", p.name)]
            header = home / "include/non_abi/nvshmem_version.h"
            if hosts and header.exists() and (lib / "libnvshmem_device.a").exists():
                return Nvshmem(home / "include", lib, hosts[0])
    return None


def find_sources(root: Path) -> dict[str, list[str]]:
    """The sources of each extension, relative to `root`, by folder and name."""

    def sources(folder: str) -> list[Path]:
        return [p for p in (root / "csrc" / folder).glob("*") if p.suffix in (".cpp", ".cu")]

    cuda_ops = [p for p in sources("ops") if p.stem.endswith("_cuda")]
    sm90a_ops = [p for p in sources("ops") if p.stem.startswith("sm90a_")]
    found = {
        "_C": [p for p in sources("ops") if p not in cuda_ops + sm90a_ops] + sources("kernels/cpu"),
        "_C_sm80": cuda_ops + sources("kernels/sm80"),
        "_C_sm90a": sm90a_ops + sources("kernels/sm90a") + sources("comm"),
        "_C_nvshmem": sources("nvshmem"),
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


def extensions(
    pieces: list[Piece],
    cpp_extension: Any,
    defines: list[str],
    cutlass: Path | None = None,
    nvshmem: Nvshmem | None = None,
) -> list[Any]:
    """The setuptools extensions of the pieces that are built; `cutlass` is the folder of its headers."""
    cxx = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", *defines]
    stable = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"
    nvcc = ["-std=c++20", "-O3", "-lineinfo", "--compress-mode=size", "-DUSE_CUDA", stable, *defines]
    nvcc += ["-Xptxas=-v", *decide.host_compiler_flags(os.environ)]
    targets = {"_C_sm80": decide.gencode_flags(os.environ.get("TPK_CUDA_ARCHS", ""))}
    targets |= {"_C_sm90a": decide.SM90A_FLAGS, "_C_nvshmem": decide.NVSHMEM_FLAGS + decide.NVSHMEM_COMPILE}
    # A standard library that the compiler links statically (some wrappers do) must stay private to its extension.
    private = ["-Wl,--exclude-libs,ALL"] if sys.platform == "linux" else []
    # torch is imported first and has mapped these libraries; the paths serve tools that open the file alone.
    rpath = ["-Wl,-rpath,$ORIGIN/../torch/lib", "-Wl,-rpath,$ORIGIN/../nvidia/cu13/lib"]
    made = []
    for name, sources in [(p.name, p.sources) for p in pieces if not p.reason]:
        keywords: dict[str, Any] = {"include_dirs": [str(ROOT / "csrc")], "py_limited_api": name != "_host"}
        if name == "_C":
            kind, flags, link = cpp_extension.CppExtension, {"cxx": [*cxx, stable]}, ["-pthread", rpath[0]]
        elif name in targets:
            kind, link = cpp_extension.CUDAExtension, rpath
            flags = {"cxx": [*cxx, stable, "-DUSE_CUDA"], "nvcc": [*nvcc, *targets[name]]}
            keywords["include_dirs"] += [str(cutlass)] if name == "_C_sm90a" else []
            if name == "_C_nvshmem" and nvshmem:
                # Not torch's dlink=True, which asks for link-time optimisation: NVSHMEM's archive has none.
                flags["nvcc_dlink"] = [
                    "-dlink",
                    *decide.NVSHMEM_FLAGS,
                    f"-L{nvshmem.lib}",
                    "-lnvshmem_device",
                ]
                keywords["include_dirs"] += [str(nvshmem.include)]
                keywords |= {"library_dirs": [str(nvshmem.lib)], "libraries": ["nvshmem_device"]}
                # torch's library has the same archive and exports how nvcc registers its parts: ours are to find ours.
                link = [
                    *rpath,
                    "-Wl,-rpath,$ORIGIN/../nvidia/nvshmem/lib",
                    f"-l:{nvshmem.host}",
                    "-Wl,-Bsymbolic",
                ]
        else:
            import pybind11
            from setuptools import Extension as kind

            flags, link = cxx, []
            keywords["include_dirs"].append(pybind11.get_include())
            keywords["language"] = "c++"
        keywords |= {"extra_compile_args": flags, "extra_link_args": [*link, *private]}
        made.append(kind(f"tpkernels.{name}", sources, **keywords))
    return made


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
            print(decide.summary(pieces, facts), flush=True)

    return BuildExt


def switched(name: str, reason: str) -> str:
    """The reason to skip a piece, after its switch in the environment."""
    return decide.apply_switch(name, os.environ.get(name, "auto"), reason)


def plan_build() -> dict[str, Any]:
    """Looks at the machine (and into a venv that is not activated), decides, returns the keywords of setup()."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        import torch
    except ImportError:
        raise BuildError(decide.check_torch(None)) from None
    compiler = os.environ.get("CXX") or "c++"
    problems = [decide.check_torch(torch.__version__), decide.check_ninja(shutil.which("ninja"))]
    problems.append(decide.check_compiler(compiler, try_compiler(compiler)))
    for problem in filter(None, problems):
        raise BuildError(problem)

    cores, memory = len(os.sched_getaffinity(0)), available_memory()
    if warning := decide.check_jobs(os.environ.get("MAX_JOBS"), cores, memory):
        print(f"tpkernels: warning: {warning}", file=sys.stderr)
    os.environ["MAX_JOBS"] = str(
        decide.parse_jobs(os.environ.get("MAX_JOBS")) or decide.default_jobs(cores, memory)
    )

    home = find_cuda_home(os.environ, output_of, Path(torch.__file__).parents[1])
    nvcc = str(home / "bin/nvcc") if home else None
    nvcc_version = decide.parse_nvcc_version(output_of([nvcc, "--version"])) if nvcc else None
    no_cuda = decide.decide_cuda(str(torch.__version__), torch.version.cuda, nvcc, nvcc_version)
    no_cuda = switched("TPK_WITH_CUDA", no_cuda)
    if home and not no_cuda:
        os.environ["CUDA_HOME"] = str(home)
    cutlass = find_cutlass()
    cutlass_version = (
        decide.parse_cutlass_version((cutlass / "cutlass/version.h").read_text()) if cutlass else None
    )
    no_sm90a = switched("TPK_WITH_SM90A", decide.decide_sm90a(no_cuda, nvcc_version, cutlass_version))
    has_pybind11 = importlib.util.find_spec("pybind11") is not None
    no_host = decide.decide_host(has_pybind11, Path(sysconfig.get_path("include")))
    no_host = switched("TPK_WITH_HOST", no_host)

    import torch.utils.cpp_extension as cpp_extension

    if home and not no_cuda:
        cpp_extension.CUDA_HOME = str(home)  # read when the module was imported, which may be long ago
    nvshmem = find_nvshmem(os.environ)
    pinned = decide.pinned_nvshmem(importlib.metadata.requires("torch") or [])
    no_nvshmem = decide.decide_nvshmem(no_sm90a, nvshmem.version if nvshmem else None, pinned)
    switch = "TPK_WITH_NVSHMEM"
    no_nvshmem = decide.apply_off_switch(switch, os.environ.get(switch, ""), no_nvshmem)
    reasons = {"_C": "", "_C_sm80": no_cuda, "_C_sm90a": no_sm90a, "_C_nvshmem": no_nvshmem, "_host": no_host}
    empty = "there are no sources for it yet"
    pieces = [Piece(n, s, reasons[n] or ("" if s else empty)) for n, s in find_sources(ROOT).items()]
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "tpkernels/_version.py").read_text())[0]
    facts = {"version": version, "torch": str(torch.__version__), "python": sys.version.split()[0]}
    facts |= {"compiler": compiler, "cuda": nvcc_version or "none"}
    facts |= {"cutlass": cutlass_version or "none", "nvshmem": (nvshmem and nvshmem.version) or "none"}
    facts["jobs"] = os.environ["MAX_JOBS"]
    defines = [f'-DTPK_VERSION="{version}"', f'-DTPK_BUILD_TORCH="{torch.__version__}"']
    keywords: dict[str, Any] = {"ext_modules": extensions(pieces, cpp_extension, defines, cutlass, nvshmem)}
    keywords["cmdclass"] = {"build_ext": build_command(pieces, facts, cpp_extension)}
    keywords["options"] = decide.wheel_options(pieces, sysconfig.get_config_var("Py_GIL_DISABLED"))
    return keywords


if __name__ == "__main__":
    from setuptools import setup

    packages, package_dir = find_packages(ROOT)
    keywords = plan_build() if NEEDS_TORCH & set(sys.argv[1:]) else {}
    setup(packages=packages, package_dir=package_dir, **keywords)
