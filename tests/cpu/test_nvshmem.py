"""NVSHMEM without GPUs: how it is found, built and chosen, what is refused; the extension as far as it goes."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from build_scripts import ROOT, load_script

from tpkernels import _extensions
from tpkernels.comm import nvshmem, symmetric
from tpkernels.comm.conditions import RankFacts, ranks_missing
from tpkernels.errors import BackendError
from tpkernels.ops import _groups

needs_sources = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the sources of the build are not beside the tests"
)
needs_extension = pytest.mark.skipif(
    not _extensions.is_loaded("_C_nvshmem"),
    reason=f"_C_nvshmem is not loaded: {_extensions.why_not('_C_nvshmem')}",
)

# --- how it is chosen, and what is refused -------------------------------------------------------------------

NVSHMEM = {"TPK_TRANSPORT": "nvshmem"}


@pytest.mark.parametrize(
    "environment, transport, backend",
    [
        ({}, "copy", "CUDA"),
        ({"TPK_TRANSPORT": "", "TPK_SYMMETRIC_BACKEND": ""}, "copy", "CUDA"),
        ({"TPK_SYMMETRIC_BACKEND": "NVSHMEM"}, "copy", "NVSHMEM"),
        (NVSHMEM, "nvshmem", "NVSHMEM"),
        ({**NVSHMEM, "TPK_SYMMETRIC_BACKEND": "CUDA"}, "nvshmem", "CUDA"),
    ],
)
def test_transport_and_memory_follow_the_environment(environment, transport, backend):
    assert (nvshmem.transport(environment), nvshmem.backend(environment)) == (transport, backend)


@pytest.mark.parametrize(
    "environment, not_loaded, alone, reason",
    [
        ({}, "it was not built", False, None),
        (NVSHMEM, "", True, None),
        ({"TPK_SYMMETRIC_BACKEND": "NVSHMEM"}, "it was not built", True, None),
        ({"TPK_TRANSPORT": "rdma"}, "", True, "TPK_TRANSPORT: expected one of copy, nvshmem, got 'rdma'"),
        (NVSHMEM, "it was not built", True, "needs _C_nvshmem, which is not loaded: it was not built"),
        (
            {**NVSHMEM, "TPK_SYMMETRIC_BACKEND": "CUDA"},
            "",
            True,
            "TPK_SYMMETRIC_BACKEND is 'CUDA'; set it to",
        ),
        (NVSHMEM, "", False, "the group has only some of them"),
        ({"TPK_SYMMETRIC_BACKEND": "NVSHMEM"}, "", False, "the group has only some of them"),
    ],
)
def test_reasons_against_nvshmem(environment, not_loaded, alone, reason):
    found = nvshmem.missing(environment, not_loaded, alone)
    assert found is None if reason is None else reason in found


def test_ranks_that_were_told_differently_are_refused_on_all_of_them():
    one = RankFacts("node", "GPU-0", {}, carrier="TPK_TRANSPORT=copy in memory of CUDA")
    other = one._replace(device="GPU-1", carrier="TPK_TRANSPORT=nvshmem in memory of NVSHMEM")
    assert ranks_missing([one, one._replace(device="GPU-1")]) is None
    assert "TPK_TRANSPORT=copy in memory of CUDA on rank 0, TPK_TRANSPORT=nvshmem" in ranks_missing(
        [one, other]
    )


def test_nvshmem_starts_without_multicast_and_for_one_host():
    environment = {"NVSHMEM_DISABLE_NVLS": "0"}
    nvshmem.prepare(environment)
    assert environment == {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_REMOTE_TRANSPORT": "none"}
    environment["NVSHMEM_REMOTE_TRANSPORT"] = "ibrc"  # of someone who knows
    nvshmem.prepare(environment)
    assert environment["NVSHMEM_REMOTE_TRANSPORT"] == "ibrc"


def test_memory_is_mapped_under_the_name_of_the_job(monkeypatch):
    """No name of its own, which would cost a team; addresses in the order of the group, PEs by number in the job."""
    memory = torch.zeros(100, dtype=torch.uint8)
    log: list[object] = []

    def rendezvous(tensor, name):
        log.append((tensor is memory, name))
        return SimpleNamespace(buffer_ptrs=[1 << 40, memory.data_ptr(), 3 << 40])

    implementation = SimpleNamespace(rendezvous=rendezvous)
    monkeypatch.setattr(symmetric, "_module", lambda device: SimpleNamespace(_SymmetricMemory=implementation))
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", {"itself": [2, 1, 0]}.get)
    monkeypatch.setattr(nvshmem, "connect", lambda *args: log.append(args))
    monkeypatch.setenv("TPK_SYMMETRIC_BACKEND", "NVSHMEM")
    monkeypatch.delenv("TPK_TRANSPORT", raising=False)
    group = _groups.Group("tp", 1, 3, "itself")
    mapping = symmetric.map_ranks(memory, group, "of one use", 7)
    assert mapping.addresses == (3 << 40, memory.data_ptr(), 1 << 40)
    assert log == [(True, "0")]
    log.clear()
    monkeypatch.setenv("TPK_TRANSPORT", "nvshmem")
    symmetric.map_ranks(memory, group, "of one use", 7)
    assert log == [(True, "0"), ([3 << 40, memory.data_ptr(), 1 << 40], [2, 1, 0], 1, 100)]


# --- how it is found and built -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return load_script("setup.py")


@pytest.fixture(scope="module")
def decide() -> ModuleType:
    return load_script(".ci/build_decisions.py")


VERSION = "".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {{}}\n" for part in ("MAJOR", "MINOR", "PATCH"))


def _install(home: Path, minor: int, *files: str) -> Path:
    for name in ("include/non_abi/nvshmem_version.h", *files):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(VERSION.format(3, minor, 5))
    return home


COMPLETE = ("lib/libnvshmem_device.a", "lib/libnvshmem_host.so.3", "lib/libnvshmem_host.so.3.4.5")


@needs_sources
def test_nvshmem_is_found_where_it_is_named_or_in_the_package(setup, tmp_path, monkeypatch):
    package = _install(tmp_path / "site/tpk_fake/nvshmem", 4, *COMPLETE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = setup.find_nvshmem({}, "tpk_fake.nvshmem")
    assert found == (package / "include", package / "lib", "libnvshmem_host.so.3"), (
        "not the file of a version"
    )
    assert found.version == "3.4.5"
    named = _install(tmp_path / "own", 6, "lib64/libnvshmem_device.a", "lib64/libnvshmem_host.so.3")
    found = setup.find_nvshmem({"TPK_NVSHMEM_HOME": str(named)}, "tpk_fake.nvshmem")
    assert (found.lib, found.version) == (named / "lib64", "3.6.5")
    # A wrong name is not replaced by another installation without a word.
    assert setup.find_nvshmem({"TPK_NVSHMEM_HOME": str(tmp_path)}, "tpk_fake.nvshmem") is None
    for name in COMPLETE[:2]:
        (package / name).rename(tmp_path / "away")
        assert setup.find_nvshmem({"TPK_NVSHMEM_HOME": str(package)}) is None, f"without {name}"
        (tmp_path / "away").rename(package / name)


@needs_sources
def test_reasons_to_leave_nvshmem_out(decide):
    assert decide.decide_nvshmem("", "3.4.5", "3.4.5") == decide.decide_nvshmem("", "3.6.0", None) == ""
    assert decide.decide_nvshmem("no nvcc", "3.4.5", "3.4.5") == "it serves the Hopper kernels: no nvcc"
    missing = decide.decide_nvshmem("", None, "3.4.5")
    assert "was not found" in missing and "pip install nvidia-nvshmem-cu13==3.4.5" in missing
    assert "NVSHMEM 3.6.0 was found, and this torch loads 3.4.5" in decide.decide_nvshmem(
        "", "3.6.0", "3.4.5"
    )
    assert decide.apply_off_switch("TPK_WITH_NVSHMEM", "", "") == "it is built with TPK_WITH_NVSHMEM=1 only"
    assert decide.apply_off_switch("TPK_WITH_NVSHMEM", "0", "") == "TPK_WITH_NVSHMEM=0 switches it off"
    assert decide.apply_off_switch("TPK_WITH_NVSHMEM", "1", "") == ""
    with pytest.raises(decide.BuildError, match="TPK_WITH_NVSHMEM=1, but it serves"):
        decide.apply_off_switch("TPK_WITH_NVSHMEM", "1", decide.decide_nvshmem("no nvcc", "3.4.5", None))


@needs_sources
def test_the_version_that_torch_pins_is_read(decide):
    pins = [
        "filelock",
        'nvidia-nccl-cu13==2.30.7; x == "y"',
        'nvidia-nvshmem-cu13==3.4.5; platform_system == "Linux"',
    ]
    assert decide.pinned_nvshmem(pins) == "3.4.5"
    assert decide.pinned_nvshmem(pins[:2]) is None
    assert decide.parse_nvshmem_version("#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n") is None


@needs_sources
def test_the_extension_is_linked_for_the_device_and_finds_its_library(setup):
    class Torch:
        @staticmethod
        def CUDAExtension(name, sources, **keywords):
            return keywords

        CppExtension = CUDAExtension

    installed = setup.Nvshmem(Path("/n/include"), Path("/n/lib"), "libnvshmem_host.so.3")
    pieces = [setup.Piece("_C_nvshmem", ["a.cu"]), setup.Piece("_C_sm90a", ["b.cu"])]
    made, hopper = setup.extensions(pieces, Torch, [], Path("/cutlass"), installed)
    flags = made["extra_compile_args"]
    assert "-rdc=true" in flags["nvcc"] and "-U__CUDA_NO_HALF_OPERATORS__" in flags["nvcc"]
    assert flags["nvcc_dlink"][0] == "-dlink" and {"-L/n/lib", "-lnvshmem_device"} <= set(flags["nvcc_dlink"])
    assert "-l:libnvshmem_host.so.3" in made["extra_link_args"]
    assert "-Wl,-rpath,$ORIGIN/../nvidia/nvshmem/lib" in made["extra_link_args"]
    # Else torch's copy of the device code could be registered, or initialised, in place of ours.
    assert {"-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic"} <= set(made["extra_link_args"])
    assert not any("nvshmem" in str(value) for value in hopper.values())


@needs_sources
def test_cmake_finds_nvshmem_by_the_same_files():
    text = (ROOT / "cmake/FindNVSHMEM.cmake").read_text()
    for name in ("TPK_NVSHMEM_HOME", "nvidia.nvshmem", "libnvshmem_device.a", "libnvshmem_host.so.3"):
        assert name in text


@needs_sources
def test_only_the_extension_for_nvshmem_may_need_it():
    check = load_script(".ci/check_libraries.py")
    needs = " 0x1 (NEEDED)  Shared library: [libnvshmem_host.so.3]\n"
    assert check.link_problems("x/_C_nvshmem.abi3.so", needs) == []
    assert check.link_problems("x/_C_sm90a.abi3.so", needs)
    assert check.link_problems("x/_C_nvshmem.abi3.so", needs.replace("nvshmem_host", "nccl"))


def test_another_version_than_the_one_compiled_with_is_refused():
    assert _extensions.nvshmem_mismatch("3.4.5", "3.4.5") == ""
    reason = _extensions.nvshmem_mismatch("3.4.5", "3.6.0")
    assert (
        "compiled with NVSHMEM 3.4.5, but torch has loaded 3.6.0" in reason and "TPK_WITH_NVSHMEM=1" in reason
    )


# --- the compiled extension, as far as it goes without a GPU ---------------------------------------------------


@needs_extension
def test_the_extension_says_that_nvshmem_was_not_started():
    ops = torch.ops.tpkernels
    versions = ops.nvshmem_versions()
    assert versions[:3] == versions[3:]
    with pytest.raises(RuntimeError, match="NVSHMEM is not initialised, which torch does"):
        ops.nvshmem_map([1 << 40, 2 << 40], [0, 1], 0, 4096)
    with pytest.raises(RuntimeError, match="pes must name as many ranks as addresses, 2, but it names 1"):
        ops.nvshmem_map([1 << 40, 2 << 40], [0], 0, 4096)
    with pytest.raises(BackendError, match="TPK_TRANSPORT=nvshmem: NVSHMEM is not initialised"):
        nvshmem.connect([1 << 40, 2 << 40], [0, 1], 0, 4096)


@needs_extension
def test_the_transport_is_attached_by_its_address():
    """The struct of csrc/comm/transport.hpp: its size, multiprocessors, two functions."""
    ops = torch.ops.tpkernels
    address = ops.nvshmem_transport()
    size, multiprocessors = (ctypes.c_int32 * 2).from_address(address)
    assert (size, multiprocessors) == (24, 8)
    ops.attach_transport(address)
    ops.attach_transport(0)
    other = (ctypes.c_int32 * 6)(size + 8)
    with pytest.raises(RuntimeError, match="of different builds"):
        ops.attach_transport(ctypes.addressof(other))


@needs_sources
def test_the_page_names_what_selects_it():
    page = (ROOT / "docs/nvshmem.md").read_text()
    for name in ("TPK_WITH_NVSHMEM", "TPK_NVSHMEM_HOME", nvshmem.TRANSPORT, nvshmem.BACKEND):
        assert name in page
    source = (ROOT / "csrc/nvshmem/push.cu").read_text()
    ctas, threads, multiprocessors = (
        re.search(rf"constexpr int {name} = (\d+);", source)[1]
        for name in ("kCtas", "kThreads", "kMultiprocessors")
    )
    assert f"{ctas} CTAs of {threads} threads" in page and f"leave {multiprocessors} multiprocessors" in page
