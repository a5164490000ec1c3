"""The overlap suite without ranks: its shapes and names, what it refuses, the ceiling's pushes, cuBLASMp's layouts."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.errors import BenchError
from bench.peers import cublasmp, cublasmp_api
from bench.suite import Options, Skip
from bench.suites.overlap import SUITE
from bench.suites.overlap_ceiling import Exchange, phases
from bench.suites.overlap_shapes import AG, AR, RS, Shape, misfit
from tpkernels.comm import departures

# name: m, n, k of one rank, as measured before (notes of 2026-11-27)
MEASURED = {
    "AG gpt3 M8192": (8192, 6144, 12288),
    "AG gpt3 M2048": (2048, 6144, 12288),
    "AG gpt3 M1024": (1024, 6144, 12288),
    "AG llama70b M8192": (8192, 3584, 8192),
    "AG llama70b M2048": (2048, 3584, 8192),
    "AG llama8b M8192": (8192, 1792, 4096),
    "AG llama70b qkv M8192": (8192, 1280, 8192),
    "RS gpt3 M8192": (8192, 12288, 6144),
    "RS gpt3 M2048": (2048, 12288, 6144),
    "RS gpt3 M1024": (1024, 12288, 6144),
    "RS llama70b M8192": (8192, 8192, 3584),
    "RS llama70b M2048": (2048, 8192, 3584),
    "RS llama8b M8192": (8192, 4096, 1792),
    "RS llama70b qkv M8192": (8192, 8192, 1280),
}


def sizes(case):
    return tuple(case.params[name] for name in ("m", "n", "k"))


def cases(**options):
    options.setdefault("world", 8)
    return {case.name: case for case in SUITE.cases(Options(**options))}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_measured_shapes(world):
    found = cases(world=world)
    others = {name: case for name, case in found.items() if case.op != AR}
    assert {name: sizes(case) for name, case in others.items()} == MEASURED
    assert all(case.op == (AG if name.startswith("AG") else RS) for name, case in others.items())
    assert {case.shape_set for case in found.values()} == {"measured"}
    # All-reduce: as reduce-scatter, and with the few rows of decoding.
    reduced = {name[3:]: sizes(case) for name, case in found.items() if case.op == AR}
    assert {
        name[3:]: size for name, size in MEASURED.items() if name.startswith("RS")
    }.items() <= reduced.items()
    assert reduced["gpt3 M16"] == (16, 12288, 6144)
    assert reduced["llama70b qkv M256"] == (256, 8192, 1280)
    assert len(reduced) == 7 + 4 * 3


def test_flops():
    assert cases()["RS llama8b M8192"].flops == 2 * 8192 * 4096 * 1792


def test_model_shapes_at_world_8():
    found = cases(sets=("models",))
    by_hand = {
        "AG llama70b up M2048": (2048, 7168, 8192),  # 2 * 28672 / 8
        "RS llama70b down M2048": (2048, 8192, 3584),  # 28672 / 8
        "AR llama70b down M64": (64, 8192, 3584),
        "AG llama70b attn qkv M32768": (32768, 1280, 8192),  # (64 + 2 * 8) * 128 / 8
        "RS llama70b attn out M16": (16, 8192, 1024),  # 64 * 128 / 8
        "AG gpt3 up M4096": (4096, 6144, 12288),  # 49152 / 8, not gated
        "AG gpt3 attn qkv M4096": (4096, 4608, 12288),  # 3 * 96 * 128 / 8
        "RS llama405b down M16384": (16384, 16384, 6656),  # 53248 / 8
        "AG llama8b up M1024": (1024, 3584, 4096),  # 2 * 14336 / 8
        "AG qwen32b up M256": (256, 6400, 5120),  # 2 * 25600 / 8
        "RS qwen32b attn out M256": (256, 5120, 1024),  # 64 * 128 / 8
    }
    assert {name: sizes(found[name]) for name in by_hand} == by_hand
    assert len(found) == 5 * 6 * 9


def test_model_shapes_follow_the_world():
    assert sizes(cases(world=2, models=("llama8b",))["AG llama8b up M16"]) == (16, 14336, 4096)
    assert cases(world=3, sets=("models",), ops=("AR",), rows=(48,), models=("qwen32b", "gpt3")).keys() == {
        "AR gpt3 attn out M48",
        "AR gpt3 down M48",
    }  # 64 heads do not divide by 3


@pytest.mark.parametrize("world", [2, 4, 8])
def test_names_are_unique(world):
    found = SUITE.cases(
        Options(world=world, sets=("measured", "models", "measured"), dtypes=("bfloat16", "float16"))
    )
    keys = [(case.name, case.dtype) for case in found]
    assert len(set(keys)) == len(keys) == 2 * (33 + 270)


def test_filters():
    assert set(cases(ops=("RS",))) == {name for name in MEASURED if name.startswith("RS")}
    assert set(cases(ops=("matmul_reduce_scatter",))) == set(cases(ops=("RS",)))
    # A model or a number of rows selects from the models, unless a set is named.
    assert {case.shape_set for case in cases(models=("llama8b",)).values()} == {"models"}
    assert list(cases(rows=(16, 16), models=("gpt3",), ops=("AG",))) == [
        "AG gpt3 attn qkv M16",
        "AG gpt3 up M16",
    ]
    assert list(cases(sets=("measured",), models=("llama70b",), rows=(2048,))) == [
        "AG llama70b M2048",
        "RS llama70b M2048",
        "AR llama70b M2048",
    ]


def test_rows_that_do_not_divide_are_left_out():
    assert misfit(Shape("AG", "x", 6, 1, 1, ""), 4) == "AG x M6: 6 rows do not divide among 4 ranks"
    assert misfit(Shape("RS", "x", 4, 1, 1, ""), 8)
    assert not misfit(Shape("AR", "x", 4, 1, 1, ""), 8)
    assert all(case.op == AR for case in cases(world=3).values())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"models": ("lama8b",)}, ["--model: 'lama8b' is not known", "llama405b", "Did you mean 'llama8b'?"]),
        ({"ops": ("all_reduce",)}, ["--op: 'all_reduce' is not known", "AG, RS, AR", "matmul_all_reduce"]),
        ({"sets": ("square",)}, ["--set: 'square' is not known", "measured, models"]),
        ({"dtypes": ("int8",)}, ["--dtype: 'int8' is not known", "bfloat16"]),
        ({"rows": (0,)}, ["--rows: expected numbers from 1 up, got 0."]),
        ({"sets": ("measured",), "rows": (77,)}, ["no shape is left"]),
        (
            {"world": 3, "ops": ("AG",)},
            ["no shape is left", "AG gpt3 M8192: 8192 rows do not divide among 3 ranks"],
        ),
    ],
)
def test_sentences(options, words):
    with pytest.raises(BenchError) as error:
        cases(**options)
    assert all(word in str(error.value) for word in words), error.value


def test_small():
    found = cases(world=3, small=True, device="cpu")
    assert {name: sizes(case) for name, case in found.items()} == {
        "AG small M48": (48, 72, 40),
        "RS small M48": (48, 72, 40),
        "AR small M48": (48, 72, 40),
        "AR small M5": (5, 72, 40),
    }


def test_variants():
    gpu, cpu = Options(world=2), Options(world=2, device="cpu")
    names = [variant.name for variant in SUITE.variants(gpu)]
    assert names[0] == SUITE.baseline(gpu) == "nccl+cublas"
    assert {
        "ours:nccl+cublas",
        "ours:nccl+streamk",
        "ours:fused",
        "symm_mem",
        "cublasmp",
        "comm",
        "gemm",
        "ceiling",
    } <= set(names)
    assert [v.name for v in SUITE.variants(cpu)][:4] == [
        "gloo+blas",
        "ours",
        "ours:gloo+blas",
        "ours:gloo+streamk",
    ]
    assert [v.name for v in SUITE.variants(gpu) if v.isolated] == ["cublasmp"]
    by_op = {
        op: {n for n in names if n.startswith(("symm_mem", "ours:fused")) and SUITE.applies(case, n, gpu)}
        for op, case in ((case.op, case) for case in SUITE.cases(gpu))
    }
    departing = {f"ours:fused:{way}" for way in departures.WAYS}
    assert by_op[AG] == {"symm_mem", "ours:fused"}
    assert by_op[RS] == {"symm_mem", "ours:fused"} | departing
    assert by_op[AR] == {"symm_mem:one_shot", "symm_mem:two_shot", "ours:fused"} | departing


def test_bytes_needed():
    """Enough for the inputs and one gathered operand and result; 405b at two ranks is the largest."""
    options = Options(world=2, sets=("models",))
    largest = max(SUITE.bytes_needed(case, options) for case in SUITE.cases(options))
    assert 20e9 < largest < 70e9
    case = cases()["AG llama8b M8192"]
    assert SUITE.bytes_needed(case, Options(world=8)) > 2 * (8192 * 4096 + 1792 * 4096 + 8192 * 1792)


def test_cases_without_torch():
    code = (
        "import sys; from bench.suite import Options; from bench.suites.overlap import SUITE;"
        "SUITE.cases(Options(world=8)); SUITE.variants(Options(world=8)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# The ceiling's pushes, with the ranks' buffers in one process.


@pytest.mark.parametrize("op", [AG, RS, AR])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_pushes_reach_their_slots(op, world):
    m, n, k = 12, 5, 7
    shapes = [(world, rows, columns) for _, rows, columns in phases(op, m, n, k, world)]
    slots = [[torch.full(shape, float("nan")) for _ in range(world)] for shape in shapes]
    sent = [[torch.randn(shape) for shape in shapes] for _ in range(world)]
    exchanges = [Exchange(rank, sent[rank], slots) for rank in range(world)]
    wanted = [
        [torch.stack([of_rank[phase][rank] for of_rank in sent]) for phase in range(len(shapes))]
        for rank in range(world)
    ]
    for exchange in exchanges[:-1]:
        exchange.push()
    assert not exchanges[0].received(wanted[0])  # the last rank has not pushed
    exchanges[-1].push()
    assert all(exchanges[rank].received(wanted[rank]) for rank in range(world))
    slots[0][1][0, 0, 0] += 1
    assert not exchanges[1].received(wanted[1])
    assert exchanges[0].received(wanted[0])


def test_phases():
    assert phases(AG, 8192, 6144, 12288, 8) == [("same", 1024, 12288)]
    assert phases(RS, 8192, 12288, 6144, 8) == [("each", 1024, 12288)]
    assert phases(AR, 5, 16, 24, 3) == [("each", 2, 16), ("same", 2, 16)]


# cuBLASMp


def local(matrix, layout, rank, world):
    """The rank's part of a global matrix, as memory: column-major, flat."""
    part = matrix.chunk(world, dim=0 if layout.by_rows else 1)[rank]
    assert part.shape == layout.local
    return part.t().flatten()


@pytest.mark.parametrize("op", [AG, RS, AR])
@pytest.mark.parametrize("world", [2, 3])
def test_cublasmp_layouts_describe_the_rows_of_torch(op, world):
    """Lay the global operands of cuBLASMp out from every rank's torch tensors; the blocks of the result are torch's."""
    m, n, k = 4 * world, 5, 3
    x = [torch.randn(m // world if op == AG else m, k, dtype=torch.float64) for _ in range(world)]
    w = [torch.randn(n, k, dtype=torch.float64) for _ in range(world)]
    (gm, gn, gk), (a, b, d) = cublasmp.layouts(op, m, n, k, world)

    def assemble(layout, blocks):
        # A row-major torch tensor [r, c] is a column-major block [c, r].
        assert all(block.t().shape == layout.local for block in blocks)
        whole = torch.cat([block.t() for block in blocks], dim=0 if layout.by_rows else 1)
        assert whole.shape == (layout.rows, layout.columns)
        return whole

    result = assemble(a, w).t() @ assemble(b, x)
    assert result.shape == (gm, gn)
    assert gk == a.rows == b.rows
    if op == AG:
        full = torch.cat(x)
        want = [full @ w[r].t() for r in range(world)]
    else:
        total = sum(x[r] @ w[r].t() for r in range(world))
        want = list(total.chunk(world)) if op == RS else [total] * world
    if op == AR:
        result = result.repeat(1, world)  # every rank has the whole
    for rank in range(world):
        assert torch.allclose(local(result, d, rank, world), want[rank].flatten())


def test_cublasmp_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("TPK_CUBLASMP", raising=False)
    monkeypatch.setattr(cublasmp_api, "_installed", lambda relative: iter(()))
    with pytest.raises(Skip, match=r"cuBLASMp is not installed: pip install 'nvidia-cublasmp-cu13==0.7.\*'"):
        cublasmp_api.load()
    monkeypatch.setenv("TPK_CUBLASMP", str(tmp_path / "nowhere.so"))
    with pytest.raises(Skip, match=r"TPK_CUBLASMP: expected the path of libcublasmp\.so\.0, found no file"):
        cublasmp_api.load()


def test_cublasmp_refuses_what_is_no_library(monkeypatch, tmp_path):
    (tmp_path / "libcublasmp.so.0").write_text("not a library")
    monkeypatch.setenv("TPK_CUBLASMP", str(tmp_path / "libcublasmp.so.0"))
    monkeypatch.setattr(cublasmp_api, "_open", lambda relative: ctypes.CDLL(None))
    with pytest.raises(Skip, match="cannot be loaded from"):
        cublasmp_api.load()


def test_cublasmp_algorithms(monkeypatch):
    monkeypatch.setenv("TPK_CUBLASMP_ALGORITHMS", "split_p2p,atomic_p2p")
    assert cublasmp._algorithms() == ["split_p2p", "atomic_p2p"]
    monkeypatch.setenv("TPK_CUBLASMP_ALGORITHMS", "split_multicast")
    with pytest.raises(Skip, match="expected some of default"):
        cublasmp._algorithms()
