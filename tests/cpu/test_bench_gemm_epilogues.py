"""The gemm suite beyond plain products: layouts, epilogues and forced tiles, every variant's result on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from bench.context import Context
from bench.errors import BenchError
from bench.suite import Case, Options, Runnable, Skip, Workload
from bench.suites import gemm
from bench.suites.gemm import SUITE
from bench.suites.gemm_epilogues import EpilogueWorkload, Tensors
from bench.suites.gemm_planner import SCHEDULES, TILES, Planner, Request
from bench.suites.gemm_products import LayoutsWorkload, aligned
from bench.suites.gemm_shapes import BLAS_LAYOUTS, EPILOGUES, LAYOUTS, Shape, select

CPU = Options(device="cpu", small=True)
DTYPES = ["float32", "float64", "bfloat16"]


def case(op: str, m: int = 70, n: int = 96, k: int = 600, dtype: str = "float32") -> Case:
    return gemm._case(Shape("set", op, m, n, k, op=op), dtype)


def variants(one: Case, options: Options = CPU) -> list[str]:
    return [v.name for v in SUITE.variants(options) if SUITE.applies(one, v.name, options)]


def run(runnable: Runnable, times: int = 1) -> float:
    """The error, over what is allowed."""
    assert runnable.poison and runnable.check
    runnable.poison()
    for i in range(times * runnable.copies):
        runnable.launch(i)
    check = runnable.check()
    return check.error / check.tolerance


# --- what there is -------------------------------------------------------------------------------------------


def test_sets_of_the_bars():
    sizes = {
        name: {(s.m, s.n, s.k) for s in select([name])} for name in ("large", "waves", "long-k", "measured")
    }
    assert {name: len(found) for name, found in sizes.items()} == {
        "large": 11,
        "waves": 9,
        "long-k": 5,
        "measured": 18,
    }
    assert {(8192, 8192, 8192), (4096, 4096, 4096), (16384, 8192, 8192)} <= sizes["large"]
    per_rank = sizes["large"] - {(8192, 8192, 8192), (4096, 4096, 4096), (16384, 8192, 8192)}
    assert {m for m, _, _ in per_rank} == {8192} and per_rank <= sizes["measured"]
    assert sum(m == 2048 for m, _, _ in sizes["waves"]) == 5
    assert all(s.k >= 4096 for s in select(["epilogues"])) and {s.op for s in select(["epilogues"])} == set(
        EPILOGUES
    )


def test_variants_of_each_kind_of_case():
    cuda = Options()
    others = [f"{name}:{layout}" for layout in ("NN", "NT", "TT") for name in ("cublas", "streamk")]
    assert variants(case(LAYOUTS), cuda) == ["cublas", "streamk", *others]
    assert variants(case("swiglu"), cuda) == ["cublas", "streamk", "cublas:plain", "streamk:plain"]
    assert "cublas:fused" in variants(case("bias_gelu"), cuda) and "cublas:fused" in variants(
        case("residual"), cuda
    )
    assert variants(case("accumulate"))[-1] == "streamk:plain-fp32"
    for op in (*EPILOGUES, LAYOUTS):  # every row has its baseline
        assert variants(case(op))[0] == SUITE.baseline(CPU)


def test_flops_and_bytes():
    plain = case("bias_gelu", dtype="bfloat16")
    assert case("swiglu").flops == 2 * plain.flops == 4 * 70 * 96 * 600
    assert plain.bytes == 2 * (70 * 600 + 600 * 96 + 70 * 96)
    assert case("accumulate", dtype="bfloat16").bytes == plain.bytes + (8 - 2) * 70 * 96
    assert case("residual", dtype="bfloat16").bytes == plain.bytes + 2 * 70 * 96


@pytest.mark.parametrize("op", [*EPILOGUES, LAYOUTS])
def test_memory_estimate(op):
    one = case(op, 300, 200, 500)
    work = SUITE.workload(one, Context(CPU))
    assert isinstance(work, EpilogueWorkload | LayoutsWorkload)
    if isinstance(work, EpilogueWorkload):
        tensors = [t for s in work.sets[:2] for t in vars(s).values() if t is not None]
    else:
        for variant in variants(one):
            work.prepare(variant)
        tensors = [t for sets in work.by_layout.values() for p in sets[:2] for t in vars(p).values()]
    assert sum(t.untyped_storage().nbytes() for t in tensors) <= SUITE.bytes_needed(one, CPU)
    work.close()


# --- results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [*EPILOGUES, LAYOUTS])
def test_every_variant_is_right_on_the_cpu(op, dtype, monkeypatch):
    monkeypatch.setenv("TPK_NUM_THREADS", "3")
    one = case(op, dtype=dtype)
    work: Workload = SUITE.workload(one, Context(CPU))
    for variant in variants(one):
        runnable = work.prepare(variant)
        assert run(runnable) <= 1, variant
        assert run(runnable, times=3) <= 1, variant  # a graph makes many calls
        assert run(runnable, times=0) == math.inf, variant  # what an earlier variant left does not count


def test_what_cublas_fuses_gives_the_same_on_the_cpu():
    for op in ("bias_gelu", "residual"):
        assert run(SUITE.workload(case(op, dtype="bfloat16"), Context(CPU)).prepare("cublas:fused")) <= 1


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("bias_gelu", lambda t: torch.relu(t.a @ t.b + t.bias)),
        ("bias_gelu", lambda t: torch.nn.functional.gelu(t.a @ t.b)),
        ("bias_silu", lambda t: torch.nn.functional.gelu(t.a @ t.b + t.bias)),
        ("swiglu", lambda t: torch.nn.functional.silu(t.a @ t.b) * (t.a @ t.gate)),
        ("residual", lambda t: t.a @ t.b),
        ("accumulate", lambda t: (t.a @ t.b).float()),  # overwrites
        ("accumulate", lambda t: t.out + 1.01 * (t.a @ t.b).float()),
        ("accumulate", lambda t: t.out),
    ],
)
def test_a_wrong_epilogue_is_caught(op, wrong):
    work = SUITE.workload(case(op, dtype="float32"), Context(CPU))
    assert isinstance(work, EpilogueWorkload)
    assert run(work._runnable(lambda t: t.out.copy_(wrong(t)), roundings=1)) > 1


def test_products_of_epilogues_are_of_the_size_at_which_activations_bend():
    t: Tensors = EpilogueWorkload(case("swiglu", 128, 64, 4096), Context(CPU)).sets[0]
    assert 0.5 < float((t.a @ t.weight).std()) < 2
    assert t.weight.stride() == (1, 4096) and t.weight.shape == (4096, 128)
    assert torch.equal(torch.cat([t.gate, t.b], 1), t.weight)


def test_layouts_are_those_of_blas():
    work = LayoutsWorkload(case(LAYOUTS, 32, 48, 64), Context(CPU))
    for variant in variants(case(LAYOUTS)):
        work.prepare(variant)
    assert set(work.by_layout) == set(BLAS_LAYOUTS.values())
    for name, layout in BLAS_LAYOUTS.items():
        p = work.by_layout[layout][0]
        # Stored by columns, N is a matrix whose columns are contiguous.
        assert [p.a.stride(0) == 1, p.b.stride(0) == 1] == [letter == "N" for letter in name], name


def test_what_tma_takes():
    assert aligned(3000, 1536, 9000, "forward") and not aligned(64, 64, 65, "forward")
    assert (
        aligned(63, 65, 64, "forward")
        and not aligned(63, 64, 64, "wgrad")
        and not aligned(64, 63, 64, "dgrad")
    )
    assert not aligned(64, 64, 64, "padded") and not aligned(63, 64, 64, "columns")


# --- tiles ---------------------------------------------------------------------------------------------------


def test_tiles_have_a_variant_for_every_schedule():
    options = Options(tiles=("hopper", "128x128x32"))
    names = [v.name for v in SUITE.variants(options)]
    assert names[:2] == ["cublas", "streamk"] and len(names) == 2 + (18 + 1) * len(SCHEDULES)
    assert "streamk:hybrid_aligned@256x192x64/1x2" in names
    assert {c.op for c in SUITE.cases(options)} == {"matmul"}
    product = SUITE.cases(options)[0]
    assert all(SUITE.applies(product, name, options) for name in names)
    assert len(SUITE.variants(Options(device="cpu", tiles=("all",)))) == 2 + len(TILES["cpu"]) * len(
        SCHEDULES
    )
    with pytest.raises(
        BenchError, match=r"--tiles: expected hopper, portable, cpu, or names of tiles .*'1x2'"
    ):
        SUITE.variants(Options(tiles=("1x2",)))


def test_forced_tiles_are_those_of_the_plan():
    for device, group in (("sm90", "hopper"), ("sm90-portable", "portable")):
        planner = Planner(2240, 5120, 8192, device, 132)
        for tile in TILES[group]:
            for schedule in SCHEDULES:
                request = planner.request(f"streamk:{schedule}@{tile}")
                assert request.tile == planner.tile_name(request) == tile and request.schedule == schedule
                plan = planner.extra(request)["plan"]
                size = tile.split("/")[0].removesuffix("s")
                assert plan["tile_name"] == tile and "x".join(map(str, plan["tile"])) == size
    for tile in TILES["cpu"]:
        assert Planner(512, 512, 4096, "cpu").request(f"streamk:stream_k@{tile}").tile == tile


def test_a_tile_of_another_kernel_is_skipped_with_its_sentence():
    with pytest.raises(Skip, match="streamk_plan: tile must be"):
        Planner(512, 512, 4096, "sm90-portable", 132).request("streamk:stream_k@128x256x64/2x1")
    with pytest.raises(Skip, match="streamk_plan: schedule must be"):
        Planner(512, 512, 4096, "cpu").plan(Request("own_seventh"))
