"""The decisions and sentences of setup.py, of the environment of make, and of the checks of CI."""

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


# --- torch, ninja, the compiler ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.14.1+cu130", (2, 14, 1)), ("2.12.0a0+git12ab", (2, 12, 0)), ("2.11", (2, 11)), ("", ())],
)
def test_release_reads_the_leading_numbers(setup, version, numbers):
    assert setup.release(version) == numbers


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.15.0.dev20261101", "3.0.0"])
def test_new_enough_torch_is_accepted(setup, version):
    assert setup.check_torch(version) == ""


def test_missing_torch_names_the_interpreter_and_the_command(setup):
    sentence = setup.check_torch(None)
    assert sys.executable in sentence
    assert 'pip install "torch>=2.11"' in sentence
    assert "--no-build-isolation" in sentence


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117", "0.4"])
def test_old_torch_names_both_versions(setup, version):
    sentence = setup.check_torch(version)
    assert version in sentence
    assert "2.11" in sentence
    assert "pip install --upgrade" in sentence


def test_missing_ninja_names_the_command(setup):
    assert setup.check_ninja("/usr/bin/ninja") == ""
    assert "pip install ninja" in setup.check_ninja(None)


def test_compiler_sentences(setup):
    assert setup.check_compiler("c++", None) == ""
    missing = setup.check_compiler("no-such-c++", "")
    assert "'no-such-c++' was not found" in missing
    assert "apt-get install" in missing
    old = setup.check_compiler("g++-7", "error: unrecognized option '-std=c++20'\nmore")
    assert "'g++-7' does not compile C++20" in old
    assert "unrecognized option" in old
    assert "CXX=g++-12" in old


def test_the_compiler_of_this_machine_is_tried(setup):
    assert setup.try_compiler("no-such-compiler") == ""
    assert setup.try_compiler("false") == "exit status 1"
    assert setup.try_compiler(os.environ.get("CXX", "c++")) is None


# --- memory and jobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"),
    [(2, 24, 2), (64, 24, 8), (64, 4.5, 1), (64, 7, 2), (8, 1, 1), (1, 500, 1), (128, 400, 128)],
)
def test_default_jobs_leave_memory(setup, cores, gib, jobs):
    assert setup.default_jobs(cores, int(gib * GIB)) == jobs


@pytest.mark.parametrize(("requested", "gib"), [(None, 24), ("8", 24), ("1", 2.5), (None, 3)])
def test_no_warning_where_memory_suffices(setup, requested, gib):
    assert setup.check_jobs(requested, 8, int(gib * GIB)) == ""


def test_too_many_jobs_for_the_memory(setup):
    sentence = setup.check_jobs("64", 64, 12 * GIB)
    assert "12.0 GiB" in sentence
    assert "MAX_JOBS=64" in sentence
    assert "export MAX_JOBS=4" in sentence


def test_too_little_memory_for_one_job(setup):
    assert "1.0 GiB" in setup.check_jobs(None, 8, GIB)


@pytest.mark.parametrize("requested", ["0", "many", "-3", "2.5", ""])
def test_max_jobs_must_be_a_number(setup, requested):
    assert "export MAX_JOBS=2" in setup.check_jobs(requested, 2, 24 * GIB)


@pytest.mark.parametrize(
    ("requested", "jobs"),
    [
        (None, None),
        ("", None),
        ("0", None),
        ("00", None),
        ("-1", None),
        ("2.5", None),
        ("²", None),
        ("08", 8),
    ],
)
def test_only_a_positive_max_jobs_is_used(setup, requested, jobs):
    assert setup.parse_jobs(requested) == jobs


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


def test_cuda_is_built_where_the_major_versions_agree(setup):
    assert setup.decide_cuda("2.14.1+cu130", "13.0", "/usr/local/cuda/bin/nvcc", "13.0") == ""
    assert setup.decide_cuda("2.14.1+cu130", "13.0", "/usr/local/cuda/bin/nvcc", "13.2") == ""


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("2.13.0+cpu", None, "/x/nvcc", "13.0"), ["CPU-only", "2.13.0+cpu", "pip install"]),
        (("2.14.1", "13.0", None, None), ["nvcc was not found", "CUDA 13", "CUDA_HOME="]),
        (("2.14.1", "13.0", "/x/nvcc", None), ["/x/nvcc", "version"]),
        (
            ("2.14.1", "13.0", "/x/nvcc", "12.8"),
            ["/x/nvcc is CUDA 12.8", "built with CUDA 13.0", "CUDA_HOME="],
        ),
    ],
)
def test_reasons_to_skip_cuda(setup, args, parts):
    reason = setup.decide_cuda(*args)
    for part in parts:
        assert part in reason


def test_planner_needs_pybind11_and_python_headers(setup, tmp_path):
    assert "pip install pybind11" in setup.decide_host(False, tmp_path)
    reason = setup.decide_host(True, tmp_path, (3, 12))
    assert reason.startswith("Python.h was not found")
    assert "apt-get install python3.12-dev" in reason
    (tmp_path / "Python.h").touch()
    assert setup.decide_host(True, tmp_path) == ""


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


def test_wheel_serves_every_python_only_without_planner_and_with_abi3(setup):
    one_for_all = {"bdist_wheel": {"py_limited_api": "cp310"}}
    without = [setup.Piece("_host", ["a.cpp"], "no pybind11"), setup.Piece("_C", ["b.cpp"])]  # in any order
    complete = [setup.Piece("_host", ["a.cpp"]), setup.Piece("_C_sm80", [], "no nvcc")]
    assert setup.wheel_options(without, 0) == setup.wheel_options(without, None) == one_for_all
    assert setup.wheel_options(without, 1) == {}  # CPython without a GIL
    assert setup.wheel_options(complete, 0) == {}


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, []),
        ({"CXX": "g++-12"}, ["-ccbin", "g++-12"]),
        ({"CXX": "ccache g++-12 -m64"}, ["-ccbin", "g++-12"]),
        ({"CXX": "g++-12", "CC": "gcc-12"}, []),  # torch hands it on
        ({"CXX": ""}, []),
    ],
)
def test_nvcc_uses_the_compiler_named(setup, variables, flags):
    assert setup.host_compiler_flags(variables) == flags


def test_the_compiler_named_is_in_the_flags_of_the_cuda_extension(setup, monkeypatch):
    monkeypatch.setenv("CXX", "g++-12")
    monkeypatch.delenv("CC", raising=False)
    pieces = [setup.Piece("_C_sm80", ["a.cu"]), setup.Piece("_C", ["a.cpp"])]

    class Torch:
        @staticmethod
        def CUDAExtension(name: str, sources: list[str], **keywords: object) -> dict[str, object]:
            return {"name": name, "sources": sources, **keywords}

        CppExtension = CUDAExtension

    cuda, cpu = setup.extensions(pieces, Torch, [])
    assert cuda["name"] == "tpkernels._C_sm80"
    nvcc = cuda["extra_compile_args"]["nvcc"]
    assert nvcc[nvcc.index("-ccbin") + 1] == "g++-12"
    assert cpu["sources"] == ["a.cpp"]
    assert "-pthread" in cpu["extra_link_args"]


def test_switches(setup):
    assert setup.apply_switch("TPK_WITH_CUDA", "auto", "") == ""
    assert setup.apply_switch("TPK_WITH_CUDA", "auto", "no nvcc") == "no nvcc"
    assert setup.apply_switch("TPK_WITH_CUDA", "1", "") == ""
    assert "TPK_WITH_CUDA=0" in setup.apply_switch("TPK_WITH_CUDA", "0", "")
    with pytest.raises(setup.BuildError, match="TPK_WITH_CUDA=1, but no nvcc"):
        setup.apply_switch("TPK_WITH_CUDA", "1", "no nvcc")
    with pytest.raises(setup.BuildError, match="TPK_WITH_CUDA=yes is not one of auto, 0 and 1"):
        setup.apply_switch("TPK_WITH_CUDA", "yes", "")


def test_gencode_flags(setup):
    default = setup.gencode_flags()
    assert default == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    more = setup.gencode_flags("8.9; sm_100a,120 90")
    assert [f.partition(",code=")[2] for f in more] == [
        "sm_80", "sm_90", "sm_89", "sm_100a", "sm_120", "compute_90",
    ]  # fmt: skip
    for wrong in ("hopper", "70", "9"):
        with pytest.raises(setup.BuildError, match=f"TPK_CUDA_ARCHS has '{wrong}'"):
            setup.gencode_flags(wrong)


def test_nvcc_version_is_read(setup):
    text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n"
    assert setup.parse_nvcc_version(text) == "13.0"
    assert setup.parse_nvcc_version("sh: nvcc: not found") is None


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
    ]
    found = setup.find_sources(_tree(tmp_path, names))
    assert found == {
        "_C": ["csrc/kernels/cpu/run.cpp", "csrc/ops/schemas.cpp"],
        "_C_sm80": ["csrc/kernels/sm80/gemm.cu", "csrc/ops/streamk_cuda.cu"],
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


def test_summary_has_a_line_for_each_piece(setup):
    pieces = [setup.Piece("_C", ["a.cpp", "b.cpp"]), setup.Piece("_C_sm80", [], "nvcc was not found")]
    text = setup.summary(pieces, {"torch": "2.14.1"})
    assert re.search(r"_C +built +2 sources", text)
    assert re.search(r"_C_sm80 +skipped +nvcc was not found", text)
    assert "torch 2.14.1" in text


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
