"""The environment of make, make itself, and the run of CI; its checks are in test_ci_checks.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from types import ModuleType

import pytest
from build_scripts import ROOT, load_script

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the sources of the build are not beside the tests"
)


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return load_script("setup.py")


@pytest.fixture(scope="module")
def env() -> ModuleType:
    return load_script(".ci/setup_env.py")


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
        setup_env.torch_cuda = lambda python: ""
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


def test_headers_are_installed_alone_and_only_where_they_are_wanted(env, monkeypatch, capsys):
    calls = []

    def pip(python: str, arguments: list[str], needed: bool = True) -> bool:
        calls.append((arguments, needed))
        return False

    def install(cuda: str, own: bool, present: bool) -> list[tuple[list[str], bool]]:
        calls.clear()
        monkeypatch.setattr(env, "torch_cuda", lambda python: cuda)
        monkeypatch.setattr(env, "is_installed", lambda requirement: present)
        env.add_headers("python3", own)
        return calls

    monkeypatch.setattr(env, "pip_install", pip)
    assert install("", True, False) == []  # a CPU-only torch
    assert install("13.0", False, True) == []  # not ours, and it has them
    for own in (True, False):
        ((arguments, needed),) = install("13.0", own, own)
        assert arguments[-1] == env.CUTLASS
        assert "--no-deps" in arguments
        assert not needed  # without them the build goes on
        assert "the Hopper kernels are not built" in capsys.readouterr().out


def test_the_headers_installed_are_those_that_the_build_asks_for(env):
    assert load_script(".ci/build_decisions.py").CUTLASS == env.CUTLASS
    for name in ("README.md", "CONTRIBUTING.md"):
        assert f"pip install --no-deps {env.CUTLASS}" in (ROOT / name).read_text()


def test_cuda_of_a_torch_is_asked_of_its_python(env, tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    torch = tmp_path / "torch/__init__.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for text, cuda in (("'13.0'", "13.0"), ("None", "")):
        torch.write_text(f"class version:\n    cuda = {text}\n")
        assert env.torch_cuda(sys.executable) == cuda
    torch.write_text("raise ImportError\n")
    assert env.torch_cuda(sys.executable) == ""


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
*setup_env.py) mkdir -p build/env; [ -e build/env/.tpk-test-demo-bench ] || touch build/env/.tpk-test-demo-bench ;;
*build.py) echo build >>builds; touch tpkernels/_build_info.json ;;
esac
"""


@MAKE
def test_make_follows_the_version_and_deleted_sources(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in (
        "csrc/ops/a.cpp",
        "csrc/ops/b.cpp",
        "tpkernels/_version.py",
        "setup.py",
        ".ci/build_decisions.py",
        "python",
    ):
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
        os.utime(tmp_path / "build/env/.tpk-test-demo-bench", (1e9, 1e9))
        return len((tmp_path / "builds").read_text().split())

    assert builds() == 1
    assert builds() == 1
    (tmp_path / "tpkernels/_version.py").touch()
    assert builds() == 2
    os.utime(tmp_path / "tpkernels/_version.py", (1e9, 1e9))
    assert builds() == 2
    (tmp_path / ".ci/build_decisions.py").touch()
    assert builds() == 3
    os.utime(tmp_path / ".ci/build_decisions.py", (1e9, 1e9))
    (tmp_path / "csrc/ops/b.cpp").unlink()
    assert builds() == 4


# --- .ci/run and cmake ----------------------------------------------------------------------------------------


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
    assert "--- nvshmem: skipped" in result.stdout
    assert "--- cpp tests: FAILED" in result.stdout  # there is no cmake/CMakeLists.txt
    assert "--- lint: ok" in result.stdout
    counts = re.fullmatch(r"checks: (\d+) passed, (\d+) failed, 3 skipped", result.stdout.splitlines()[-1])
    assert counts is not None
    assert int(counts[1]) + int(counts[2]) == 6
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
