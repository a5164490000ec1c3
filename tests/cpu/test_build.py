"""What setup.py finds on a machine and in the repository; what it decides is in test_build_decisions.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from build_scripts import ROOT, load_script

GIB = 1 << 30

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the sources of the build are not beside the tests"
)


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return load_script("setup.py")


# --- the compiler and memory ---------------------------------------------------------------------------------


def test_the_compiler_of_this_machine_is_tried(setup):
    assert setup.try_compiler("no-such-compiler") == ""
    assert setup.try_compiler("false") == "exit status 1"
    assert setup.try_compiler(os.environ.get("CXX", "c++")) is None


def test_cached_files_are_memory_that_is_left(setup, tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{15 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {11 * GIB}\nactive_file 3\n")
    assert setup.available_memory(tmp_path, tmp_path) == 12 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert setup.available_memory(tmp_path, tmp_path) == 64 * GIB


def test_available_memory_is_plausible(setup):
    assert 0 < setup.available_memory() < 1 << 50


# --- CUDA ----------------------------------------------------------------------------------------------------


def test_stable_abi_extensions_need_no_python_headers(setup):
    """A Python without headers loses the planner alone: nothing that these files include includes Python.h."""
    torch = pytest.importorskip("torch")
    sources = setup.find_sources(ROOT)
    include = Path(torch.__file__).parent / "include"
    command = [*os.environ.get("CXX", "c++").split(), "-std=c++20", "-M", f"-I{ROOT}/csrc", f"-I{include}"]
    command.append(f"-DTORCH_TARGET_VERSION={setup.TORCH_TARGET_VERSION}")
    for source in sources["_C"]:
        result = subprocess.run([*command, source], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "Python.h" not in result.stdout
    own = (p.read_text() for p in (ROOT / "csrc").rglob("*.*") if p.parent.name != "python")
    assert not any("Python.h" in text or "pybind11" in text for text in own)


class _Torch:
    """Stands for torch.utils.cpp_extension."""

    @staticmethod
    def CUDAExtension(name: str, sources: list[str], **keywords: object) -> dict[str, object]:
        return {"name": name, "sources": sources, **keywords}

    CppExtension = CUDAExtension


def test_the_compiler_named_is_in_the_flags_of_the_cuda_extension(setup, monkeypatch):
    monkeypatch.setenv("CXX", "g++-12")
    monkeypatch.delenv("CC", raising=False)
    pieces = [setup.Piece("_C_sm80", ["a.cu"]), setup.Piece("_C", ["a.cpp"])]
    cuda, cpu = setup.extensions(pieces, _Torch, [])
    assert cuda["name"] == "tpkernels._C_sm80"
    nvcc = cuda["extra_compile_args"]["nvcc"]
    assert nvcc[nvcc.index("-ccbin") + 1] == "g++-12"
    assert cpu["sources"] == ["a.cpp"]
    assert "-pthread" in cpu["extra_link_args"]


def test_each_cuda_extension_has_its_own_architectures_and_headers(setup, monkeypatch):
    monkeypatch.setenv("TPK_CUDA_ARCHS", "100")
    pieces = [setup.Piece("_C_sm80", ["a.cu"]), setup.Piece("_C_sm90a", ["b.cu"])]
    portable, hopper = setup.extensions(pieces, _Torch, [], Path("/cutlass/include"))
    codes = [
        [f.partition(",code=")[2] for f in e["extra_compile_args"]["nvcc"] if "gencode" in f]
        for e in (portable, hopper)
    ]
    assert codes == [["sm_80", "sm_90", "sm_100", "compute_90"], ["sm_90a"]]
    assert "/cutlass/include" not in portable["include_dirs"]
    assert hopper["include_dirs"] == [f"{ROOT}/csrc", "/cutlass/include"]
    assert hopper["py_limited_api"]
    assert not [f for f in hopper["extra_link_args"] if "-lcuda" in f]


def test_headers_of_cutlass_are_found_without_importing_the_package(setup, tmp_path, monkeypatch):
    package = tmp_path / "tpk_fake_cutlass"
    (package / "source/include/cutlass").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it needs networkx')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert setup.find_cutlass("tpk_fake_cutlass") is None  # a package of that name without the headers
    (package / "source/include/cutlass/version.h").touch()
    assert setup.find_cutlass("tpk_fake_cutlass") == package / "source/include"
    (package / "__init__.py").unlink()  # some versions are a namespace package
    assert setup.find_cutlass("tpk_fake_cutlass") == package / "source/include"
    assert setup.find_cutlass("tpk_no_such_package") is None


def _toolkit(root: Path) -> Path:
    (root / "bin").mkdir(parents=True)
    nvcc = root / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    (root / "targets/x/include").mkdir(parents=True)
    (root / "targets/x/include/cuda_runtime.h").touch()
    return root


def _silent(command: list[str]) -> str:
    return ""


def test_named_cuda_home_is_taken_or_nothing(setup, tmp_path):
    root = _toolkit(tmp_path / "cuda-13.0")
    assert setup.find_cuda_home({"CUDA_HOME": str(root)}, _silent, tmp_path) == root
    assert setup.find_cuda_home({"CUDA_PATH": str(root)}, _silent, tmp_path) == root
    # A wrong name is not replaced by another toolkit without a word.
    assert setup.find_cuda_home({"CUDA_HOME": str(tmp_path / "gone")}, _silent, tmp_path) is None


def test_a_script_that_starts_nvcc_is_seen_through(setup, tmp_path):
    root = _toolkit(tmp_path / "cuda-13.0")
    shim = tmp_path / "local/bin/nvcc"
    shim.parent.mkdir(parents=True)
    shim.write_text("#!/bin/sh\n")
    shim.chmod(0o755)
    asked = []

    def run(command: list[str]) -> str:
        asked.append(command)
        return f"#$ _HERE_={root}/bin\n#$ TOP={root}/bin/..\n"

    assert setup.find_cuda_home({"PATH": str(shim.parent)}, run, tmp_path) == root
    assert asked[0][0] == str(shim)


def test_a_link_to_nvcc_is_followed(setup, tmp_path):
    root = _toolkit(tmp_path / "cuda-13.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(root / "bin/nvcc")
    assert setup.find_cuda_home({"PATH": str(tmp_path / "bin")}, _silent, tmp_path) == root


def test_a_wrapper_above_the_toolkit_is_not_taken_for_it(setup, tmp_path):
    """/usr/local/bin/nvcc, a script that says nothing, beside /usr/local/cuda-13.0."""
    _toolkit(tmp_path / "local/cuda-13.0")
    wrapper = tmp_path / "local/bin/nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text("#!/bin/sh\n")
    wrapper.chmod(0o755)
    wheel = _toolkit(tmp_path / "site/nvidia/cu13")
    found = setup.find_cuda_home({"PATH": str(wrapper.parent)}, _silent, tmp_path / "site")
    assert found in (Path("/usr/local/cuda"), Path("/opt/cuda"), wheel)


# --- sources and summary -------------------------------------------------------------------------------------


def _tree(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "csrc" / name).touch()
    return root


def test_sources_are_sorted_into_extensions(setup, tmp_path):
    names = [
        "ops/schemas.cpp",
        "ops/streamk_cuda.cu",
        "ops/check.hpp",
        "kernels/cpu/run.cpp",
        "kernels/sm80/gemm.cu",
        "ops/sm90a_entry.cpp",
        "kernels/sm90a/gemm.cu",
        "kernels/sm90a/tensor_map.cpp",
        "kernels/sm90a/LICENSE-CUTLASS.txt",
        "comm/copy_engine.cpp",
        "nvshmem/push.cu",
        "nvshmem/heap.hpp",
    ]
    found = setup.find_sources(_tree(tmp_path, names))
    assert found == {
        "_C": ["csrc/kernels/cpu/run.cpp", "csrc/ops/schemas.cpp"],
        "_C_sm80": ["csrc/kernels/sm80/gemm.cu", "csrc/ops/streamk_cuda.cu"],
        "_C_sm90a": [
            "csrc/comm/copy_engine.cpp",
            "csrc/kernels/sm90a/gemm.cu",
            "csrc/kernels/sm90a/tensor_map.cpp",
            "csrc/ops/sm90a_entry.cpp",
        ],
        "_C_nvshmem": ["csrc/nvshmem/push.cu"],
        "_host": [],
    }


def test_two_sources_of_one_name_are_refused(setup, tmp_path):
    _tree(tmp_path, ["ops/streamk.cpp", "kernels/cpu/streamk.cpp"])
    with pytest.raises(setup.BuildError, match="_C has two sources named 'streamk'"):
        setup.find_sources(tmp_path)


def test_every_source_of_the_repository_is_in_an_extension(setup):
    in_extensions = {name for names in setup.find_sources(ROOT).values() for name in names}
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")]
    tests = [p for p in sources if p.stem.endswith("_test")]  # built by cmake/
    assert {p.relative_to(ROOT).as_posix() for p in sources if p not in tests} == in_extensions


def test_modules_that_the_source_lacks_leave_the_build(setup, tmp_path):
    source, built = tmp_path / "source", tmp_path / "built"
    names = ["__init__.py", "ops/a.py", "_host.pyi", "_C.abi3.so", "gone.py", "ops/gone.pyi"]
    for name in names:
        (built / name).parent.mkdir(parents=True, exist_ok=True)
        (built / name).touch()
        if name in names[:3]:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).touch()
    for path in (built / "bench/cli.py", built / "bench/suites/gone.py", tmp_path / "elsewhere/cli.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    moved = {"bench": tmp_path / "elsewhere"}
    setup.remove_stale(built, source, moved)
    assert {p.relative_to(built).as_posix() for p in built.rglob("*.*")} == {*names[:4], "bench/cli.py"}
    setup.remove_stale(source, source, moved)  # what --inplace does
    assert len(list(source.rglob("*.py*"))) == 3


def test_every_package_is_installed_and_bench_below_tpkernels(setup):
    names, folders = setup.find_packages(ROOT)
    assert {"tpkernels", "tpkernels.ops", "tpkernels.bench", "tpkernels.bench.suites"} <= set(names)
    assert not [n for n in names if n.split(".")[0] != "tpkernels"]
    assert folders == {"tpkernels.bench": "bench", "tpkernels.include.comm": "csrc/comm"}
    modules = [p for p in (ROOT / "bench").rglob("*.py") if "results" not in p.parts]
    packages = {".".join(("tpkernels", *p.parent.relative_to(ROOT).parts)) for p in modules}
    assert packages <= set(names)  # no folder of modules lacks its __init__.py


def test_source_distribution_is_complete(monkeypatch):
    egg_info = pytest.importorskip("setuptools.command.egg_info")
    monkeypatch.chdir(ROOT)
    files = egg_info.FileList()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        files.process_template_line(line)
    names = [".clang-format", ".pre-commit-config.yaml", "Makefile", ".ci/run", "bench/cli.py"]
    names += ["docs/demo-loss.png", "cmake/CMakeLists.txt", "tests/cpu/test_build.py"]
    names += [".ci/build_decisions.py", "csrc/kernels/sm90a/LICENSE-CUTLASS.txt"]
    assert set(names) <= set(files.files)
    assert not [n for n in files.files if n.endswith((".so", ".pyc")) or n.startswith("bench/out")]


def test_a_build_without_torch_says_so(tmp_path):
    """What `pip install .` shows in an isolated build: the sentence, before anything is compiled."""
    (tmp_path / "torch.py").write_text("raise ImportError('hidden by the test')\n")
    for command in ("dist_info", "build_ext"):
        result = subprocess.run(
            [sys.executable, "setup.py", command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 1
        assert "tpkernels: torch was not found by" in result.stderr
        assert "Traceback" not in result.stderr


def test_versions_agree():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert "\nversion =" not in pyproject.partition("[tool.setuptools.dynamic]")[0]
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "tpkernels/_version.py").read_text())
    assert f"## {version[0]}" in (ROOT / "CHANGELOG.md").read_text()
