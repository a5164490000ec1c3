"""The decisions and sentences of setup.py, of the environment of make, and of the checks of CI."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the sources of the build are not beside the tests"
)


def _module(relative: str) -> ModuleType:
    name = "tpk_" + Path(relative).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / relative)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return _module("setup.py")


@pytest.fixture(scope="module")
def env() -> ModuleType:
    return _module(".ci/setup_env.py")


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
    setup.remove_stale(built, source)
    assert {p.relative_to(built).as_posix() for p in built.rglob("*.*")} == set(names[:4])
    setup.remove_stale(source, source)  # what --inplace does
    assert len(list(source.rglob("*.py*"))) == 3


def test_source_distribution_is_complete(monkeypatch):
    egg_info = pytest.importorskip("setuptools.command.egg_info")
    monkeypatch.chdir(ROOT)
    files = egg_info.FileList()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        files.process_template_line(line)
    names = [".clang-format", ".pre-commit-config.yaml", "Makefile", ".ci/run", "bench/quick_gemm.py"]
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


# --- the environment of make ---------------------------------------------------------------------------------


def test_environment_sentences(env):
    assert env.check_python((3, 10, 0), "python3") == ""
    assert "python3 is Python 3.8" in env.check_python((3, 8, 1), "python3")
    assert env.check_venv(True, True, (3, 12)) == ""
    assert "apt-get install python3.12-venv" in env.check_venv(True, False, (3, 12))
    assert "no venv module" in env.check_venv(False, False, (3, 12))
    assert env.check_torch("2.11.0+cu130", "python3") == ""
    assert "torch 2.9.1" in env.check_torch("2.9.1", "python3")
    assert "has no torch" in env.check_torch(None, "python3")


def test_requirements_come_from_pyproject(env):
    text = (ROOT / "pyproject.toml").read_text()
    names = [env.name_of(r) for r in env.requirements(text, ["test", "demo"])]
    assert {"pytest", "hypothesis", "matplotlib", "numpy", "ninja", "setuptools"} <= set(names)
    assert "torch" not in names
    with pytest.raises(SystemExit, match="no extra 'nonsense'"):
        env.requirements(text, ["nonsense"])


def test_requirements_are_read_as_toml_reads_them(env):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert env.string_lists(text, "project.optional-dependencies") == project["optional-dependencies"]
    assert env.string_lists(text, "project")["dependencies"] == project["dependencies"]
    harder = '[x]\na = ["b[c]>=1", # d "e"\n  "f",\n]\ng = []\n\n[y]\na = ["h"]\n'
    assert env.string_lists(harder, "x") == tomllib.loads(harder)["x"] == {"a": ["b[c]>=1", "f"], "g": []}
    assert env.string_lists(harder, "z") == {}


def test_an_environment_that_is_ready_needs_neither_pip_nor_a_toml_parser(tmp_path):
    """The Python of `make` may be 3.10 without site-packages: the stamp decides without looking for pip."""
    (tmp_path / ".ci").mkdir()
    for name in ("pyproject.toml", ".ci/setup_env.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    code = """if True:
        import sys
        sys.modules.update(tomllib=None, tomli=None, pip=None)
        sys.path.insert(0, ".ci")
        import setup_env
        setup_env.pip_install = lambda *args, **kwargs: print("installs")
        setup_env.torch_version = lambda python: "2.11.0"
        setup_env.is_installed = lambda requirement: True
        sys.argv[1:] = ["none", "torch", "test,demo"]
        setup_env.main()
        assert (setup_env.ROOT / "build/env/.tpk-test-demo").exists()
        print("again")
        setup_env.main()
    """
    older = shutil.which("python3.10")
    for python in filter(None, [sys.executable, older]):
        result = subprocess.run([python, "-S", "-c", code], cwd=tmp_path, stdout=-1, stderr=-2, text=True)
        if python == older and result.returncode == 127:  # a shim of pyenv for a version that is not chosen
            continue
        assert result.returncode == 0, result.stdout
        assert "installs" not in result.stdout
        assert result.stdout.endswith("again\n")
        shutil.rmtree(tmp_path / "build")


def test_installed_requirements_are_recognised(env):
    assert env.is_installed("pytest>=8")
    assert env.is_installed("pytest")
    assert not env.is_installed("pytest>=999.1")
    assert not env.is_installed("no-such-distribution>=1")


# --- make ----------------------------------------------------------------------------------------------------

MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")

# Stands for the Python of make: notes builds, makes the files that the real one would.
FAKE_PYTHON = """#!/bin/sh
case "$1" in
*setup_env.py) mkdir -p build/env; [ -e build/env/.tpk-test-demo ] || touch build/env/.tpk-test-demo ;;
*build.py) echo build >>builds; touch tpkernels/_build_info.json ;;
esac
"""


@MAKE
def test_make_follows_the_version_and_deleted_sources(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("csrc/ops/a.cpp", "csrc/ops/b.cpp", "tpkernels/_version.py", "setup.py", "python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1e9, 1e9))

    def builds() -> int:
        command = ["make", "build", "VENV=none", f"PYTHON={tmp_path}/python"]
        clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
        subprocess.run(command, cwd=tmp_path, env=clean, check=True, stdout=-1)
        later = (tmp_path / "tpkernels/_build_info.json").stat().st_mtime + 2
        os.utime(
            tmp_path / "tpkernels/_build_info.json", (later - 4, later - 4)
        )  # whatever the clock's grain
        os.utime(tmp_path / "build/env/.tpk-test-demo", (1e9, 1e9))
        return len((tmp_path / "builds").read_text().split())

    assert builds() == 1
    assert builds() == 1
    (tmp_path / "tpkernels/_version.py").touch()
    assert builds() == 2
    os.utime(tmp_path / "tpkernels/_version.py", (1e9, 1e9))
    assert builds() == 2
    (tmp_path / "csrc/ops/b.cpp").unlink()
    assert builds() == 3


# --- the checks of CI ----------------------------------------------------------------------------------------

PTXAS = """\
ptxas info    : Compiling entry function '_Z4gemm' for 'sm_80'
ptxas info    : Function properties for _Z4gemm
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z4gemm' for 'sm_90'
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers
"""


def test_spills_and_lost_performance_are_found():
    check = _module(".ci/check_cuda.py")
    assert [(k.arch, k.registers, k.spilled) for k in check.parse_report(PTXAS)] == [
        ("sm_80", 128, 0),
        ("sm_90", 255, 20),
    ]
    assert check.problems(PTXAS) == ["_Z4gemm spills 20 bytes on sm_90"]
    warning = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert any("C7510" in p for p in check.problems(PTXAS + warning))
    assert check.problems("ptxas info : (C7516) something else\n" + PTXAS) == check.problems(PTXAS)
    assert "no ptxas report" in check.problems("")[0]


def test_kernels_missing_from_an_incremental_log_are_found(tmp_path):
    check = _module(".ci/check_cuda.py")
    a, b, c = (str(tmp_path / name) for name in ("a.cu", "b.cu", "c.cpp"))
    log = f"[1/3] /x/nvcc -MD -c -c {a} -o a.o -O3\n{PTXAS}[2/3] /x/c++ -c -c {c} -o c.o\nbuilding\n"
    assert check.unreported(log, [a]) == []
    assert check.unreported(log, [a, b]) == [b]
    again = f"[3/3] /x/nvcc -c {b} -o b.o\nptxas info    : 0 bytes gmem\n"
    assert check.unreported(log + again, [a, b]) == []
    (tmp_path / "log").write_text(log)
    command = [sys.executable, str(ROOT / ".ci/check_cuda.py"), "--complete", str(tmp_path / "log")]
    assert subprocess.run([*command, a], check=False).returncode == 0
    result = subprocess.run([*command, a, b], check=False, stdout=-1, text=True)
    assert result.returncode == 1
    assert f"no report on {b}" in result.stdout


def test_skipped_checks_are_counted_apart_and_the_environment_stays_out(tmp_path):
    """.ci/run with a make and a Python that do nothing: the last check finds no second torch, CUDA is not expected."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text((ROOT / ".ci/run").read_text())
    fakes = {
        "bin/make": '#!/bin/sh\necho "make $1: <$ARGS$PYTHON$TORCH> $VENV"\n',
        ".venv/bin/python": '#!/bin/sh\ncase "$*" in *torch==*) exit 1 ;; esac\n',
        "tpkernels/_build_info.json": "{}",
    }
    for name, text in fakes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"ARGS": "-k nothing", "PYTHON": "python2", "TORCH": "torch==1", "VENV": "none"}
    variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TPK_CI_EXPECT_CUDA": "0"}
    result = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env={**os.environ, **variables}, stdout=-1, stderr=-2, text=True
    )
    assert "make test: <> .venv\n" in result.stdout
    assert "--- cuda compile: skipped" in result.stdout
    assert "--- other torch: skipped" in result.stdout
    assert "--- cpp tests: FAILED" in result.stdout  # there is no cmake/CMakeLists.txt
    assert "--- lint: ok" in result.stdout
    counts = re.fullmatch(r"checks: (\d+) passed, (\d+) failed, 2 skipped", result.stdout.splitlines()[-1])
    assert counts is not None
    assert int(counts[1]) + int(counts[2]) == 5
    assert result.returncode == 1


@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("make")), reason="there is no cmake or no make"
)
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no c++")
def test_thread_sanitizer_that_does_not_run_is_left_out(tmp_path):
    """It links everywhere, but on some kernels its programs end at once: so do those of this compiler."""
    (tmp_path / "ends.hpp").write_text("#include <cstdlib>\nstatic int x = (std::_Exit(66), 1);\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"""#!/bin/bash
        case "$*" in *-fsanitize=thread*.cxx*) set -- -include {tmp_path}/ends.hpp "$@" ;; esac
        args=()
        for arg in "$@"; do [ "$arg" = -fsanitize=thread ] || args+=("$arg"); done
        exec {shutil.which("c++")} "${{args[@]}}"
        """
    )
    compiler.chmod(0o755)
    command = ["cmake", "-G", "Unix Makefiles", "-S", str(ROOT / "cmake"), "-B", str(tmp_path / "build")]
    command.append(f"-DCMAKE_CXX_COMPILER={compiler}")
    result = subprocess.run(command, stdout=-1, stderr=-2, text=True)
    assert result.returncode == 0, result.stdout
    assert "No program runs under ThreadSanitizer" in result.stdout
    tests = (tmp_path / "build/CTestTestfile.cmake").read_text()
    assert "executor_tsan" not in tests
    assert "sm80_kernel" in tests


def test_wheel_contents_are_judged():
    check = _module(".ci/check_wheel.py")
    good = ["tpkernels/_C.abi3.so", "tpkernels-0.1.0.dist-info/licenses/LICENSE"]
    source = ["tpkernels/_C.abi3.so"]
    assert check.problems(1000, good, source, source) == []
    assert "60.0 MB" in check.problems(60_000_000, good, [], source)[0]
    assert "tests/cpu/x.py" in check.problems(1, [*good, "tests/cpu/x.py"], [], source)[0]
    assert "lacks tpkernels/_host.so" in check.problems(1, good, ["tpkernels/_host.so"], source)[0]
    stale = check.problems(1, [*good, "tpkernels/gone.py"], source, source)
    assert stale == ["tpkernels/gone.py is not in the source: rm -rf build/lib*"]


def test_library_dependencies_are_judged():
    check = _module(".ci/check_libraries.py")
    dynamic = " 0x1 (NEEDED)  Shared library: [libc10.so]\n 0x1d (RUNPATH)  Library runpath: [$ORIGIN/../torch/lib]\n"
    assert check.link_problems("x.so", dynamic) == []
    assert check.link_problems("x.so", dynamic + " 0x1 (NEEDED)  Shared library: [libcuda.so.1]\n")
    assert check.link_problems("x.so", dynamic.replace("$ORIGIN/../torch", "/home/me/torch"))
    report = "  Torch ABI:   STABLE\n  Min torch:   2.{}.0\n"
    assert check.abi_problems("x.so", report.format(11)) == []
    assert "torch 2.12" in check.abi_problems("x.so", report.format(12))[0]
    assert check.abi_problems("x.so", report.format(9).replace("STABLE", "UNSTABLE"))


def test_build_output_is_shortened():
    build = _module(".ci/build.py")
    line = f"[3/12] c++ -MMD -MF x.o.d -I{ROOT} -c -c {ROOT}/csrc/ops/schemas.cpp -o x.o -O3\n"
    assert build.shorten(line) == "  [3/12] csrc/ops/schemas.cpp"
    assert build.shorten("ptxas info    : Used 128 registers\n") is None
    assert (
        build.shorten("csrc/ops/x.cpp:3:1: error: expected ';'\n")
        == "csrc/ops/x.cpp:3:1: error: expected ';'"
    )
