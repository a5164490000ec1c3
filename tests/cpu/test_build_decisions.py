"""The decisions of the build and the sentences that go with them."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
from build_scripts import ROOT, load_script

GIB = 1 << 30

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the sources of the build are not beside the tests"
)


@pytest.fixture(scope="module")
def decide() -> ModuleType:
    return load_script(".ci/build_decisions.py")


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.14.1+cu130", (2, 14, 1)), ("2.12.0a0+git12ab", (2, 12, 0)), ("2.11", (2, 11)), ("", ())],
)
def test_release_reads_the_leading_numbers(decide, version, numbers):
    assert decide.release(version) == numbers


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.15.0.dev20261101", "3.0.0"])
def test_new_enough_torch_is_accepted(decide, version):
    assert decide.check_torch(version) == ""


def test_missing_torch_names_the_interpreter_and_the_command(decide):
    sentence = decide.check_torch(None)
    assert sys.executable in sentence
    assert 'pip install "torch>=2.11"' in sentence
    assert "--no-build-isolation" in sentence


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117", "0.4"])
def test_old_torch_names_both_versions(decide, version):
    sentence = decide.check_torch(version)
    assert version in sentence
    assert "2.11" in sentence
    assert "pip install --upgrade" in sentence


def test_missing_ninja_names_the_command(decide):
    assert decide.check_ninja("/usr/bin/ninja") == ""
    assert "pip install ninja" in decide.check_ninja(None)


def test_compiler_sentences(decide):
    assert decide.check_compiler("c++", None) == ""
    missing = decide.check_compiler("no-such-c++", "")
    assert "'no-such-c++' was not found" in missing
    assert "apt-get install" in missing
    old = decide.check_compiler("g++-7", "error: unrecognized option '-std=c++20'\nmore")
    assert "'g++-7' does not compile C++20" in old
    assert "unrecognized option" in old
    assert "CXX=g++-12" in old


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"),
    [(2, 24, 2), (64, 24, 8), (64, 4.5, 1), (64, 7, 2), (8, 1, 1), (1, 500, 1), (128, 400, 128)],
)
def test_default_jobs_leave_memory(decide, cores, gib, jobs):
    assert decide.default_jobs(cores, int(gib * GIB)) == jobs


@pytest.mark.parametrize(("requested", "gib"), [(None, 24), ("8", 24), ("1", 2.5), (None, 3)])
def test_no_warning_where_memory_suffices(decide, requested, gib):
    assert decide.check_jobs(requested, 8, int(gib * GIB)) == ""


def test_too_many_jobs_for_the_memory(decide):
    sentence = decide.check_jobs("64", 64, 12 * GIB)
    assert "12.0 GiB" in sentence
    assert "MAX_JOBS=64" in sentence
    assert "export MAX_JOBS=4" in sentence


def test_too_little_memory_for_one_job(decide):
    assert "1.0 GiB" in decide.check_jobs(None, 8, GIB)


@pytest.mark.parametrize("requested", ["0", "many", "-3", "2.5", ""])
def test_max_jobs_must_be_a_number(decide, requested):
    assert "export MAX_JOBS=2" in decide.check_jobs(requested, 2, 24 * GIB)


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
def test_only_a_positive_max_jobs_is_used(decide, requested, jobs):
    assert decide.parse_jobs(requested) == jobs


def test_cuda_is_built_where_the_major_versions_agree(decide):
    assert decide.decide_cuda("2.14.1+cu130", "13.0", "/usr/local/cuda/bin/nvcc", "13.0") == ""
    assert decide.decide_cuda("2.14.1+cu130", "13.0", "/usr/local/cuda/bin/nvcc", "13.2") == ""


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
def test_reasons_to_skip_cuda(decide, args, parts):
    reason = decide.decide_cuda(*args)
    for part in parts:
        assert part in reason


def test_planner_needs_pybind11_and_python_headers(decide, tmp_path):
    assert "pip install pybind11" in decide.decide_host(False, tmp_path)
    reason = decide.decide_host(True, tmp_path, (3, 12))
    assert reason.startswith("Python.h was not found")
    assert "apt-get install python3.12-dev" in reason
    (tmp_path / "Python.h").touch()
    assert decide.decide_host(True, tmp_path) == ""


def test_hopper_kernels_need_cuda_a_new_nvcc_and_the_headers(decide):
    assert decide.decide_sm90a("", "12.5", "4.2.0") == ""
    assert decide.decide_sm90a("", "13.0", "4.10.1") == ""
    assert decide.decide_sm90a("nvcc was not found", None, "4.2.0") == "nvcc was not found"
    old = decide.decide_sm90a("", "12.4", "4.2.0")
    assert "nvcc is CUDA 12.4" in old
    assert "12.5 or newer" in old
    command = f"pip install --no-deps {decide.CUTLASS}"
    missing = decide.decide_sm90a("", "13.0", None)
    assert "not found" in missing
    assert missing.endswith(command)
    old = decide.decide_sm90a("", "13.0", "3.9.2")
    assert "are 3.9.2" in old
    assert old.endswith(command)
    newest = decide.CUTLASS.partition("==")[2]
    assert decide.decide_sm90a("", "13.0", newest) == ""  # what the command installs will do


def test_hopper_kernels_are_compiled_for_nothing_else(decide):
    targets = [f for f in decide.SM90A_FLAGS if "arch" in f or "code" in f]
    assert targets == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert "-DNDEBUG" in decide.SM90A_FLAGS  # assertions of CUTLASS would serialise wgmma


def test_cutlass_version_is_read(decide):
    text = "#pragma once\n\n#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 10 \n"
    assert decide.parse_cutlass_version(text) == "4.2.10"
    assert decide.parse_cutlass_version(text.replace("CUTLASS_PATCH", "CUTLASS_BUILD")) is None


def test_wheel_serves_every_python_only_without_planner_and_with_abi3(decide):
    one_for_all = {"bdist_wheel": {"py_limited_api": "cp310"}}
    without = [decide.Piece("_host", ["a.cpp"], "no pybind11"), decide.Piece("_C", ["b.cpp"])]  # in any order
    complete = [decide.Piece("_host", ["a.cpp"]), decide.Piece("_C_sm80", [], "no nvcc")]
    assert decide.wheel_options(without, 0) == decide.wheel_options(without, None) == one_for_all
    assert decide.wheel_options(without, 1) == {}  # CPython without a GIL
    assert decide.wheel_options(complete, 0) == {}


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
def test_nvcc_uses_the_compiler_named(decide, variables, flags):
    assert decide.host_compiler_flags(variables) == flags


def test_switches(decide):
    assert decide.apply_switch("TPK_WITH_CUDA", "auto", "") == ""
    assert decide.apply_switch("TPK_WITH_CUDA", "auto", "no nvcc") == "no nvcc"
    assert decide.apply_switch("TPK_WITH_CUDA", "1", "") == ""
    off = decide.apply_switch("TPK_WITH_CUDA", "0", "")
    assert off == "TPK_WITH_CUDA=0 switches it off"
    with pytest.raises(decide.BuildError, match="TPK_WITH_SM90A=1, but TPK_WITH_CUDA=0 switches it off"):
        decide.apply_switch("TPK_WITH_SM90A", "1", decide.decide_sm90a(off, "13.0", "4.2.0"))
    with pytest.raises(decide.BuildError, match="TPK_WITH_CUDA=1, but no nvcc"):
        decide.apply_switch("TPK_WITH_CUDA", "1", "no nvcc")
    with pytest.raises(decide.BuildError, match="TPK_WITH_CUDA=yes is not one of auto, 0 and 1"):
        decide.apply_switch("TPK_WITH_CUDA", "yes", "")


def test_gencode_flags(decide):
    default = decide.gencode_flags()
    assert default == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    more = decide.gencode_flags("8.9; sm_100a,120 90")
    assert [f.partition(",code=")[2] for f in more] == [
        "sm_80", "sm_90", "sm_89", "sm_100a", "sm_120", "compute_90",
    ]  # fmt: skip
    for wrong in ("hopper", "70", "9"):
        with pytest.raises(decide.BuildError, match=f"TPK_CUDA_ARCHS has '{wrong}'"):
            decide.gencode_flags(wrong)


def test_nvcc_version_is_read(decide):
    text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n"
    assert decide.parse_nvcc_version(text) == "13.0"
    assert decide.parse_nvcc_version("sh: nvcc: not found") is None


def test_summary_has_a_line_for_each_piece(decide):
    pieces = [decide.Piece("_C", ["a.cpp", "b.cpp"]), decide.Piece("_C_sm80", [], "nvcc was not found")]
    text = decide.summary(pieces, {"torch": "2.14.1"})
    assert re.search(r"_C +built +2 sources", text)
    assert re.search(r"_C_sm80 +skipped +nvcc was not found", text)
    assert "torch 2.14.1" in text
