"""The link suite's kernels without a GPU: compiled by NVRTC and nvcc, emulated, and called with the right arguments."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from bench import kernels
from bench.suite import Skip


def test_piece_sizes():
    k = kernels.constants()
    assert k["kStages"] * k["kPieceBytes"] + 8 * k["kStages"] <= 227 * 1024
    assert 0 < k["kStoring"] < k["kStages"]
    for total in (1, 4096, 256 << 10, 1 << 20, 1 << 30):
        for sms in (1, 16, 132):
            piece = kernels.piece_bytes(total, sms)
            assert 2048 <= piece <= k["kPieceBytes"] and piece % 16 == 0
    assert kernels.piece_bytes(1 << 30, 16) == k["kPieceBytes"]
    assert kernels.piece_bytes(256 << 10, 16) == 4096, "four pieces an SM"


def test_headers_are_found():
    for name in ("bulk.cuh", "comm/flags.cuh", "comm/copy.cuh"):
        assert sum((folder / name).is_file() for folder in kernels.include_folders()) == 1


def compile_ptx(arch: str) -> str:
    """link.cu by NVRTC, as CuPy compiles it."""
    spec = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")
    if spec is None:
        pytest.skip("needs cuda-bindings for NVRTC")
    from cuda.bindings import nvrtc

    def ok(result):
        assert result[0] == 0, result[0]
        return result[1] if len(result) > 1 else None

    try:
        program = ok(nvrtc.nvrtcCreateProgram(kernels.SOURCE.read_bytes(), b"link.cu", 0, [], []))
    except RuntimeError as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-I{f}" for f in kernels.include_folders())]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    # Written in place: two bytes at least, as Python shares all objects of one byte.
    log = b" " * max(2, ok(nvrtc.nvrtcGetProgramLogSize(program)))
    ok(nvrtc.nvrtcGetProgramLog(program, log))
    assert status == 0, log.decode()
    ptx = b" " * ok(nvrtc.nvrtcGetPTXSize(program))
    ok(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx.decode()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_compile_with_nvrtc(arch):
    ptx = compile_ptx(arch.replace("sm", "compute"))
    entries = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    assert sorted(entries) == sorted(
        ["bulk_copy", "bulk_spread", "lsu_copy", "lsu_spread", "flag_round_trips", "wait_flags"]
    )
    assert ("cp.async.bulk" in ptx) == (arch == "sm_90")


def test_machine_code_is_what_was_meant(tmp_path):
    """Bulk copies where they belong, 16-byte accesses, nothing in local memory."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        pytest.skip("needs nvcc")
    cubin = tmp_path / "link.cubin"
    folders = [f"-I{folder}" for folder in kernels.include_folders()]
    command = [
        nvcc,
        "-arch=sm_90",
        "-std=c++17",
        "-cubin",
        "-Xptxas=-v",
        *folders,
        "-o",
        cubin,
        kernels.SOURCE,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = done.stdout + done.stderr
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert len(stacks) == 6 and set(stacks) == {("0", "0")}, report
    registers = dict(re.findall(r"Compiling entry function '(\w+)'[\s\S]*?Used (\d+) registers", report))
    assert max(int(registers[name]) for name in ("lsu_copy", "lsu_spread")) <= 64, "1024 threads"
    places = [Path("/usr/local/cuda/bin"), *(Path(p) / "triton/backends/nvidia/bin" for p in sys.path)]
    tools = [p / "cuobjdump" for p in places if (p / "cuobjdump").exists()]
    if not tools:
        pytest.skip("needs cuobjdump to read the machine code")
    sass = subprocess.run(
        [str(tools[0]), "--dump-sass", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    code = dict(re.findall(r"Function : (\w+)\n([\s\S]*?)(?=Function :|\Z)", sass))
    for name in ("bulk_copy", "bulk_spread"):
        assert len(re.findall(r"UBLKCP\.S\.G", code[name])) >= 2, "loads: at the start, and in the loop"
        assert re.search(r"UBLKCP\.G\.S", code[name]), "stores"
    for name in ("lsu_copy", "lsu_spread"):
        assert "UBLKCP" not in code[name]
        assert len(re.findall(r"\bLDG?\.E\.128", code[name])) >= 4, "four loads in flight"
        assert re.search(r"\bSTG?\.E\.128", code[name])
    assert not re.search(r"\b(LDL|STL)\b", sass), "local memory"


WRONG = {
    "": "",
    "a stage is loaded while it is stored": "bulk_wait_read<kStoring>();",
    "a CTA ends before its stores": "  bulk_wait_all();",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w or "right")
def test_kernels_emulated(tmp_path, seed, wrong):
    """Every size, alignment, number of CTAs and jobs on the CPU; and the emulation sees what is wrong."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = kernels.SOURCE.read_text()
    assert WRONG[wrong] in source
    (tmp_path / "link.cu").write_text(source.replace(WRONG[wrong], "") if wrong else source)
    (tmp_path / "comm").mkdir()
    for replaced in ("bulk.cuh", "comm/flags.cuh"):
        (tmp_path / replaced).write_text("#pragma once\n")
    shutil.copy(Path(__file__).with_name("link_kernels_emulated.cpp"), tmp_path)
    program = tmp_path / "emulated"
    flags = ["-std=c++20", "-O1", "-w", f"-I{tmp_path}", f"-I{kernels.include_folders()[1]}"]
    subprocess.run([compiler, *flags, "-o", program, "link_kernels_emulated.cpp"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [program, str(seed % 10**6)], capture_output=True, text=True, timeout=120, check=False
    )
    if wrong:
        assert done.returncode != 0, "the emulation did not notice"
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert int(done.stdout.split()[0]) > 500


def test_kernels_without_cupy_are_skipped_with_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Skip, match="pip install cupy"):
        kernels.LinkKernels(0)


class FakeCupy:
    """Records what would be compiled and launched."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.functions: dict[str, SimpleNamespace] = {}
        device = SimpleNamespace(
            use=lambda: None, attributes={"MultiProcessorCount": 132}, compute_capability="90"
        )
        stream = SimpleNamespace(from_external=lambda s: contextlib.nullcontext())
        self.cuda = SimpleNamespace(Device=lambda index: device, Stream=stream)

    def RawModule(self, *, code, options):
        self.code, self.options = code, options
        return self

    def get_function(self, name):
        function = mock.MagicMock(num_regs=32)
        function.side_effect = lambda grid, block, args, shared_mem: self.launches.append(
            (name, grid, block, args, shared_mem)
        )
        self.functions[name] = function
        return function


def test_arguments_are_what_the_kernels_take(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    k = kernels.LinkKernels(0)
    how = {"sms": 16, "epoch": 3, "finished": 2**40}
    for spread in (False, True):
        k.bulk(2**41, 7, 2**33, spread=spread, **how, late=2**42)
        k.lsu(2**41, 7, 2**33, spread=spread, **how)
    k.round_trips(2**41, 2**42, 500, 1, leads=True, late=2**43)
    k.wait(2**41, 7, 3, late=2**43)
    signatures = dict(
        re.findall(r"(\w+)\(([^()]*)\) \{", kernels.SOURCE.read_text().split('extern "C"', 1)[1])
    )
    limit = kernels.constants()["kStages"] * kernels.constants()["kPieceBytes"]
    assert len(fake.launches) == 6
    for name, grid, block, args, shared in fake.launches:
        parameters = [p.split() for p in signatures[name].split(",")]
        assert len(args) == len(parameters), name
        for value, words in zip(args, parameters, strict=True):
            wide = any("*" in w for w in words) or "u64" in words
            assert isinstance(value, np.uint64 if wide else np.uint32), f"{name}: {' '.join(words)}"
        bulk = name.startswith("bulk")
        assert shared == (limit if bulk else 0)
        assert grid == ((16,) if bulk or name.startswith("lsu") else (1,))
        assert block[0] in (32, 1024, 1)
        if bulk:
            assert fake.functions[name].max_dynamic_shared_size_bytes == limit
    assert {f"-I{folder}" for folder in kernels.include_folders()} <= set(fake.options)
    assert kernels.SOURCE.read_text() in fake.code
