"""The checks of CI: what they let pass and what they find."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from build_scripts import ROOT, load_script

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the sources of the build are not beside the tests"
)

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
    check = load_script(".ci/check_cuda.py")
    assert [(k.arch, k.registers, k.spilled) for k in check.parse_report(PTXAS)] == [
        ("sm_80", 128, 0),
        ("sm_90", 255, 20),
    ]
    assert check.problems(PTXAS) == ["_Z4gemm spills 20 bytes on sm_90"]
    warning = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert any("C7510" in p for p in check.problems(PTXAS + warning))
    assert check.problems("ptxas info : (C7516) something else\n" + PTXAS) == check.problems(PTXAS)
    assert "no ptxas report" in check.problems("")[0]


def test_spills_are_allowed_where_accumulators_leave_no_room():
    check = load_script(".ci/check_cuda.py")
    wide = "_ZN3tpk5sm90a19streamk_gemm_kernelINS0_10TileConfigILi256ELi192ELi3ELb0EEE"
    scaled = wide.replace("10TileConfigILi256ELi192ELi3ELb0E", "16ScaledTileConfigILi128ELi256ELi4E")
    for name in (wide, wide.replace("Li256E", "Li128E"), wide.replace("Li256E", "Li192E"), scaled):
        assert check.problems(PTXAS.replace("_Z4gemm", name)) == []
    for other in (
        ("Li192E", "Li128E"),
        ("Li256ELi192E", "Li128ELi256E"),
        ("Li256E", "Li64E"),
        ("sm90a", "sm80"),
    ):
        name = wide.replace(*other)
        assert check.problems(PTXAS.replace("_Z4gemm", name)) == [f"{name} spills 20 bytes on sm_90"]


SASS = """\
Fatbin elf code:
arch = sm_90a
\t\tFunction : _Z11gemm_kernel
\t.headerflags\t@"EF_CUDA_SM90"
        /*0100*/                   STL [R1], R0 ;                                   /* 0x000 */
                                                                                    /* 0x010 */
        /*0200*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2 ;    /* 0x000 */
        /*0300*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ;  /* 0x000 */
        /*0400*/                   NOP ;                                            /* 0x000 */
        /*0500*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ;  /* 0x000 */
        /*0600*/                   NOP ;                                            /* 0x000 */
        /*0700*/              @!P1 BRA 0x200 ;                                      /* 0x000 */
        /*0800*/                   LDL.64 R2, [R1] ;                                /* 0x000 */
        /*0900*/              @!P1 BRA 0x0 ;                                        /* 0x000 */
\t\tFunction : _Z4copy
        /*0000*/                   LDL R2, [R1] ;                                   /* 0x000 */
"""


def test_local_memory_is_allowed_before_and_after_the_main_loop_only():
    check = load_script(".ci/check_cuda.py")

    def judge(text: str) -> list[str]:
        code = check.read_machine_code(text.splitlines(), "x/_C_sm90a.abi3.so")
        assert set(code) == {"_Z11gemm_kernel (sm_90a)", "_Z4copy (sm_90a)"}
        return check.machine_code_problems("x/_C_sm90a.abi3.so", code)

    assert judge(SASS) == []
    complaint = "_Z11gemm_kernel (sm_90a) uses local memory {} times in its main loop"
    between = SASS.replace("/*0400*/                   NOP ", "/*0400*/                   STL.64 [R1], R2 ")
    assert judge(between) == [complaint.format(1)]
    both = between.replace("/*0600*/                   NOP ", "/*0600*/                   LDL.LU R2, [R1] ")
    assert judge(both) == [complaint.format(2)]  # the loop's end, after its last product
    straight = between.replace("BRA 0x200", "BRA 0x800").replace("BRA 0x0 ", "BRA 0xa00 ")
    assert judge(straight) == [complaint.format(1)]  # unrolled: no loop at all


def test_a_kernel_of_fp8_has_several_main_loops():
    check = load_script(".ci/check_cuda.py")
    loop = SASS.replace("HGMMA.64x256x16.F32.BF16", "QGMMA.64x128x32.F32.E4M3.E4M3").partition("_Z4copy")[0]
    again = loop.partition('EF_CUDA_SM90"')[2].replace("/*0", "/*1").replace("BRA 0x200", "BRA 0x1200")

    def judge(text: str) -> list[str]:
        code = check.read_machine_code(text.splitlines(), "HGMMA")
        return check.machine_code_problems("x/_C_sm90a.abi3.so", code)

    assert judge(loop + again) == []  # what is spilled between the two is in neither
    inside = again.replace("/*1400*/                   NOP ", "/*1400*/                   STL.64 [R1], R2 ")
    assert judge(loop + inside) == ["_Z11gemm_kernel (sm_90a) uses local memory 1 times in its main loop"]


def test_products_must_use_the_tensor_cores_of_their_library():
    check = load_script(".ci/check_cuda.py")

    def judge(library: str, text: str) -> list[str]:
        code = check.read_machine_code(text.splitlines(), library)
        return check.machine_code_problems(library, code)

    ampere = SASS.replace("HGMMA.64x256x16", "HMMA.16816")
    assert judge("_C_sm80.so", ampere) == []  # local memory is for the report on spills to judge there
    assert judge("_C_sm90a.so", ampere) == ["_Z11gemm_kernel (sm_90a) has no HGMMA instruction"]
    assert judge("_C_sm80.so", SASS) == ["_Z11gemm_kernel (sm_90a) has no HMMA instruction"]
    assert judge("_C_sm90a.so", SASS.replace("gemm", "gem")) == [
        "_C_sm90a.so has no kernel with 'gemm' in its name"
    ]


def test_wide_operands_have_instructions_of_their_own():
    check = load_script(".ci/check_cuda.py")
    name = "_ZN3tpk4sm8019streamk_gemm_kernelINS0_10TileConfigILNS_7ElementE{}ELi64ELi64EEEvv"
    needed = {0: "HMMA.16816", 1: "HMMA.16816", 2: "FFMA", 3: "HMMA.1688", 4: "DMMA.16x8x4"}
    for element, right in needed.items():
        for instruction in set(needed.values()):
            text = SASS.replace("_Z11gemm_kernel", name.format(element)).replace(
                "HGMMA.64x256x16", instruction
            )
            code = check.read_machine_code(text.splitlines(), "_C_sm80.so")
            found = check.machine_code_problems("_C_sm80.so", code)
            short = right.partition(".")[0]
            wrong = [f"{name.format(element)} (sm_90a) has no {short} instruction"]
            assert found == ([] if instruction.startswith(short) else wrong)


def test_kernels_missing_from_an_incremental_log_are_found(tmp_path):
    check = load_script(".ci/check_cuda.py")
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


def test_wheel_contents_are_judged():
    check = load_script(".ci/check_wheel.py")
    good = ["tpkernels/_C.abi3.so", "tpkernels-0.1.0.dist-info/licenses/LICENSE"]
    source = ["tpkernels/_C.abi3.so"]
    assert check.problems(1000, good, source, source) == []
    assert "60.0 MB" in check.problems(60_000_000, good, [], source)[0]
    assert "tests/cpu/x.py" in check.problems(1, [*good, "tests/cpu/x.py"], [], source)[0]
    assert "lacks tpkernels/_host.so" in check.problems(1, good, ["tpkernels/_host.so"], source)[0]
    kernel = "tpkernels/bench/kernels/x.cu"
    assert check.problems(1, [*good, kernel], [kernel], [*source, kernel]) == []
    assert check.problems(1, [*good, kernel], [], [*source, kernel]) == [
        f"{kernel} does not belong into the wheel"
    ]
    hopper = "tpkernels/_C_sm90a.abi3.so"
    assert check.problems(1, [*good, hopper], [], [*source, hopper]) == [
        "the wheel lacks the license of CUTLASS"
    ]
    cutlass = "tpkernels-0.1.0.dist-info/licenses/csrc/kernels/sm90a/LICENSE-CUTLASS.txt"
    assert check.problems(1, [*good, hopper, cutlass], [], [*source, hopper]) == []
    stale = check.problems(1, [*good, "tpkernels/gone.py"], source, source)
    assert stale == ["tpkernels/gone.py is not in the source: rm -rf build/lib*"]


def test_library_dependencies_are_judged():
    check = load_script(".ci/check_libraries.py")
    dynamic = " 0x1 (NEEDED)  Shared library: [libc10.so]\n 0x1d (RUNPATH)  Library runpath: [$ORIGIN/../torch/lib]\n"
    assert check.link_problems("x.so", dynamic) == []
    assert check.link_problems("x.so", dynamic + " 0x1 (NEEDED)  Shared library: [libcuda.so.1]\n")
    assert check.link_problems("x.so", dynamic.replace("$ORIGIN/../torch", "/home/me/torch"))
    report = "  Torch ABI:   STABLE\n  Min torch:   2.{}.0\n"
    assert check.abi_problems("x.so", report.format(11)) == []
    assert "torch 2.12" in check.abi_problems("x.so", report.format(12))[0]
    assert check.abi_problems("x.so", report.format(9).replace("STABLE", "UNSTABLE"))


def test_the_smoke_test_misses_an_extension_that_does_not_load(tmp_path):
    smoke = load_script(".ci/smoke.py")
    for name in (
        "_C.abi3.so",
        "_C_sm80.abi3.so",
        "_C_sm90a.abi3.so",
        "_host.cpython-311-x86_64-linux-gnu.so",
    ):
        (tmp_path / name).touch()

    def statuses(**loaded: bool) -> dict[str, SimpleNamespace]:
        return {name: SimpleNamespace(loaded=value) for name, value in loaded.items()}

    most = statuses(_C=True, _C_sm80=True, _host=True)
    assert smoke.unloaded(tmp_path, most, cuda=True) == ["_C_sm90a"]  # nobody loads it
    assert smoke.unloaded(tmp_path, most | statuses(_C_sm90a=False), cuda=True) == ["_C_sm90a"]
    assert smoke.unloaded(tmp_path, most | statuses(_C_sm90a=True), cuda=True) == []
    assert smoke.unloaded(tmp_path, statuses(_C=True, _C_sm80=False), cuda=False) == ["_host"]


def test_the_time_of_each_extension_is_told():
    build = load_script(".ci/build.py")
    assert build.EXTENSION.match("building 'tpkernels._C_sm90a' extension\n")[1] == "_C_sm90a"
    assert build.shares([("_C", 3.0), ("_C_sm80", 63.2), ("_host", 163.0)], 170.4) == (
        "_C 60 s, _C_sm80 100 s, _host 7 s"
    )


def test_build_output_is_shortened():
    build = load_script(".ci/build.py")
    line = f"[3/12] c++ -MMD -MF x.o.d -I{ROOT} -c -c {ROOT}/csrc/ops/schemas.cpp -o x.o -O3\n"
    assert build.shorten(line) == "  [3/12] csrc/ops/schemas.cpp"
    assert build.shorten("ptxas info    : Used 128 registers\n") is None
    assert (
        build.shorten("csrc/ops/x.cpp:3:1: error: expected ';'\n")
        == "csrc/ops/x.cpp:3:1: error: expected ';'"
    )
