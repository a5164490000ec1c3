"""Grouped products on CUDA: one list of tiles on the Hopper kernel, a product for each group elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gemm_checks import Failures, differences
from grouped_checks import check
from streamk_cases import (
    ACTIVATIONS,
    CLUSTERS,
    DTYPES,
    HOPPER_TILES,
    LAYOUTS,
    OUT_DTYPES,
    PLANS,
    TILES,
    activate,
    embed,
    filled,
    gemm,
    hopper_only,
    integers,
    output,
    randn,
)

import tpkernels as tpk
from tpkernels.errors import ArgumentError
from tpkernels.testing import assert_close_tiles

Tensor = torch.Tensor
GATED_TILES = ["128x256x64", "256x128x64", "128x128x64"]  # whose columns can be halved
pytestmark = pytest.mark.gpu1
OPS = torch.ops.tpkernels

SIZES = [0, 1, 7, 64, 129, 1000, 0, 320]
# Where M is contiguous in a, TMA loads groups that begin at multiples of 8 rows.
EIGHTHS = [0, 8, 64, 136, 1000, 0, 320, 1]


def grouped(a: Tensor, b: Tensor, out: Tensor, sizes: Sequence[int], **options: Any) -> None:
    defaults = {"bias": None, "preact": None, "activation": "none"}
    OPS.streamk_gemm_grouped(a=a, b=b, out=out, group_sizes=list(sizes), **(defaults | options))


def exact(a: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor:
    parts = [rows.double() @ b[g].double() for g, rows in enumerate(a.split(list(sizes)))]
    return torch.cat(parts)


def exact_gated(a: Tensor, b: Tensor, gate: Tensor, sizes: Sequence[int], activation: str) -> Tensor:
    return activate(exact(a, gate, sizes), activation) * exact(a, b, sizes)


def draw(sizes: Sequence[int], n: int, k: int, layouts: tuple[str, str], **how: Any) -> tuple[Tensor, Tensor]:
    """Small integers: every order of sums is exact."""
    a = embed(integers(1, sum(sizes), k, **how), layouts[0])[0]
    return a, embed(integers(len(sizes), k, n, **how), layouts[1])


@hopper_only
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("tile", HOPPER_TILES)
def test_values(tile: str, cluster: str, generator: torch.Generator) -> None:
    """To the bit, among NaN: every layout, plan, dtype of operands and outputs, odd N and K."""
    kinds = itertools.cycle(itertools.product(DTYPES, OUT_DTYPES))
    with Failures() as failures:
        for i, ((layouts, (n, k)), plan) in enumerate(
            itertools.product(
                zip(LAYOUTS, [(264, 512), (203, 1000), (520, 72), (64, 2048)], strict=True), PLANS
            )
        ):
            dtype, out_dtype = next(kinds)
            sizes = EIGHTHS if layouts[0] == "cols" else SIZES[i % 3 :] + SIZES[: i % 3]
            a, b = draw(sizes, n, k, layouts, dtype=dtype, generator=generator)
            out = output((sum(sizes), n), out_dtype, ["rows", "rows_odd"][i % 5 == 0])
            with failures.case(f"{layouts} N {n} K {k} {dtype} to {out_dtype}, {plan}"):
                grouped(a, b, out.tensor, sizes, tile=tile + cluster, **plan)
                different = differences(out.tensor, exact(a, b, sizes).to(out_dtype))
                assert not different, different
                out.check("out")


@hopper_only
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("tile", GATED_TILES)
def test_gate(tile: str, cluster: str, generator: torch.Generator) -> None:
    """To the bit, among NaN: the gate's matrix is that of the group, too, with every layout and plan."""
    kinds = itertools.cycle(itertools.product(DTYPES, OUT_DTYPES))
    sides = zip(LAYOUTS, [(264, 512), (203, 1000), (520, 72), (64, 2048)], strict=True)
    with Failures() as failures:
        for i, ((layouts, (n, k)), plan) in enumerate(itertools.product(sides, PLANS)):
            dtype, out_dtype = next(kinds)
            sizes = EIGHTHS if layouts[0] == "cols" else SIZES[i % 3 :] + SIZES[: i % 3]
            a, b = draw(sizes, n, k, layouts, dtype=dtype, generator=generator)
            gate = embed(integers(len(sizes), k, n, dtype=dtype, generator=generator), layouts[1])
            out = output((sum(sizes), n), out_dtype, ["rows", "rows_odd"][i % 5 == 0])
            with failures.case(f"{layouts} N {n} K {k} {dtype} to {out_dtype}, {plan}"):
                grouped(a, b, out.tensor, sizes, gate=gate, activation="relu", tile=tile + cluster, **plan)
                want = exact_gated(a, b, gate, sizes, "relu").to(out_dtype)
                different = differences(out.tensor, want)
                assert not different, different
                out.check("out")


@hopper_only
def test_gate_of_more_groups_than_a_launch_takes(
    generator: torch.Generator, rng: np.random.Generator
) -> None:
    sizes = [int(x) for x in rng.integers(0, 90, 150)]
    a, b = draw(sizes, 136, 264, ("rows", "cols"), dtype=torch.bfloat16, generator=generator)
    gate = embed(integers(150, 264, 136, dtype=torch.bfloat16, generator=generator), "cols")
    out = output((sum(sizes), 136), torch.float32)
    grouped(a, b, out.tensor, sizes, gate=gate, activation="relu")
    different = differences(out.tensor, exact_gated(a, b, gate, sizes, "relu").float())
    assert not different, different
    out.check("out")


@pytest.mark.parametrize("tile", [pytest.param("", id="cheapest"), *TILES])
def test_gate_with_activations(tile: str, generator: torch.Generator) -> None:
    """Odd strides, and a gate that lies in another way than b: another kernel takes those, a group at a time."""
    n, k = 200, 264
    cases = itertools.product(ACTIVATIONS, DTYPES, ["rows", "rows_odd", "cols"])
    for i, (activation, dtype, layout) in enumerate(cases):
        a = embed(randn(1, sum(SIZES), k, dtype=dtype, generator=generator) / 4, layout)[0]
        b = embed(randn(len(SIZES), k, n, dtype=dtype, generator=generator) / 4, layout)
        gate = randn(len(SIZES), k, n, dtype=dtype, generator=generator) / 4
        gate = embed(gate, layout if i % 4 else "cols")
        out = output((sum(SIZES), n), OUT_DTYPES[i % 3])
        grouped(a, b, out.tensor, SIZES, gate=gate, activation=activation, tile=tile)
        up, gated = exact(a.abs(), b.abs(), SIZES), exact(a.abs(), gate.abs(), SIZES)
        want = exact_gated(a, b, gate, SIZES, activation)
        assert_close_tiles(out.tensor, want, out.tensor.dtype, k=k, magnitude=up * gated, slack=1.25)
        out.check("out")


@hopper_only
@pytest.mark.parametrize("tile", ["", "128x256x64/2x1", "128x128x64/1x2"])
def test_more_groups_than_a_launch_takes(
    tile: str, generator: torch.Generator, rng: np.random.Generator
) -> None:
    for count, plan in itertools.product([64, 65, 200], PLANS):
        sizes = [int(x) for x in rng.integers(0, 90, count)]
        a, b = draw(sizes, 136, 264, ("rows", "cols"), dtype=torch.bfloat16, generator=generator)
        out = output((sum(sizes), 136), torch.float32)
        grouped(a, b, out.tensor, sizes, tile=tile, **plan)
        different = differences(out.tensor, exact(a, b, sizes).float())
        assert not different, f"{count} groups, {plan}: {different}"
        out.check("out")


@hopper_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", HOPPER_TILES)
def test_a_group_has_the_bits_of_its_own_product(
    tile: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    n, k = 328, 1000
    a = randn(sum(SIZES), k, dtype=dtype, generator=generator)
    b = randn(len(SIZES), n, k, dtype=dtype, generator=generator).mT
    for cluster in CLUSTERS:
        plan = {"tile": tile + cluster, "schedule": "data_parallel"}
        out = filled(sum(SIZES), n, dtype=dtype)
        grouped(a, b, out, SIZES, **plan)
        for g, rows in enumerate(torch.arange(sum(SIZES), device="cuda").split(SIZES)):
            alone = filled(1, len(rows), n, dtype=dtype)
            gemm(a[rows][None], b[g][None], alone, **plan)
            assert torch.equal(out[rows], alone[0]), (cluster, g)


@pytest.mark.parametrize("tile", [pytest.param("", id="cheapest"), *TILES])
def test_epilogues(tile: str, generator: torch.Generator) -> None:
    """A row of bias for each group, stored pre-activations; odd strides, which the Hopper kernel leaves to another."""
    n, k = 200, 264
    for i, (activation, dtype, layout) in enumerate(
        itertools.product(ACTIVATIONS, DTYPES, ["rows", "rows_odd", "cols"])
    ):
        a = embed(randn(1, sum(SIZES), k, dtype=dtype, generator=generator) / 4, layout)[0]
        b = embed(randn(len(SIZES), k, n, dtype=dtype, generator=generator) / 4, layout)
        bias = randn(len(SIZES), n, dtype=OUT_DTYPES[i % 3], generator=generator)
        out = output((sum(SIZES), n), OUT_DTYPES[i // 3 % 3])
        preact = output((sum(SIZES), n), OUT_DTYPES[i // 3 % 3]) if i % 2 else None
        grouped(
            a, b, out.tensor, SIZES, bias=bias, activation=activation, tile=tile,
            preact=None if preact is None else preact.tensor, schedule=["auto", "stream_k"][i % 2],
        )  # fmt: skip
        of_rows = bias.double().repeat_interleave(torch.tensor(SIZES, device="cuda"), 0)
        before = exact(a, b, SIZES) + of_rows
        size = exact(a.abs(), b.abs(), SIZES) + of_rows.abs()
        options: dict[str, Any] = {"k": k, "magnitude": size, "slack": 1.25}
        assert_close_tiles(out.tensor, activate(before, activation), out.tensor.dtype, **options)
        out.check("out")
        if preact is not None:
            assert_close_tiles(preact.tensor, before, preact.tensor.dtype, **options)
            preact.check("preact")


def test_empty(generator: torch.Generator) -> None:
    bias = randn(3, 5, dtype=torch.float32, generator=generator)
    for sizes, k, n in [([0, 0, 0], 4, 5), ([2, 0, 3], 0, 5), ([2, 0, 3], 4, 0)]:
        a, b = (
            randn(*shape, dtype=torch.bfloat16, generator=generator) for shape in ((sum(sizes), k), (3, k, n))
        )
        out = filled(sum(sizes), n, dtype=torch.float32)
        grouped(a, b, out, sizes, bias=bias[:, :n])
        if k == 0:
            assert torch.equal(out, bias[torch.tensor([0, 0, 2, 2, 2])])


@pytest.mark.parametrize("path", ["streamk", "cublas"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(
    path: str, dtype: torch.dtype, rng: np.random.Generator, cublas_sums_in_fp32: None
) -> None:
    options = itertools.cycle(itertools.product(ACTIVATIONS, [True, False], [True, False]))
    for i, sizes in enumerate([[300, 0, 129, 7], [1, 64, 1000], [0, 0], [40] * 70]):
        activation, save_preact, bias = next(options)
        check(
            sizes, 136, 200, dtype, rng, path, bias=bias, activation=activation, save_preact=save_preact,
            transposed=i % 2 == 0, laid_out=i == 1, device="cuda",
        )  # fmt: skip


@pytest.mark.parametrize("path", ["streamk", "cublas"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_gates(
    path: str, dtype: torch.dtype, rng: np.random.Generator, cublas_sums_in_fp32: None
) -> None:
    options = itertools.cycle(itertools.product(ACTIVATIONS, [True, False]))
    for i, sizes in enumerate([[300, 0, 129, 7], [1, 64, 1000], [0, 0], [40] * 70]):
        activation, save_preact = next(options)
        check(
            sizes, 136, 200, dtype, rng, path, gated=True, activation=activation, save_preact=save_preact,
            transposed=i % 2 == 0, laid_out=i == 1, device="cuda",
        )  # fmt: skip


@pytest.mark.parametrize("gated", [False, True])
def test_tf32_is_torchs_decision(gated: bool, generator: torch.Generator, tf32_switch: None) -> None:
    """Of every product of groups: float32 exactly where torch forbids TF32, and with its errors where it does not."""
    sizes, n, k = [130, 0, 64, 7], 136, 512
    a = randn(sum(sizes), k, dtype=torch.float32, generator=generator)
    w, g = (randn(len(sizes), n, k, dtype=torch.float32, generator=generator) / 8 for _ in range(2))
    w.requires_grad_()
    dy = randn(sum(sizes), n, dtype=torch.float32, generator=generator)

    def errors() -> tuple[float, float]:
        w.grad = None
        gate = g.mT if gated else None
        with torch.no_grad():
            out = tpk.grouped_matmul(a, w.mT, sizes, gate=gate, path="streamk")
        tpk.grouped_matmul(a, w.mT, sizes, path="streamk").backward(dy)
        up = exact(a, w.detach().mT, sizes)
        want = up * exact(a, g.mT, sizes) if gated else up
        parts = zip(dy.split(sizes), a.split(sizes), strict=True)
        grad = torch.stack([d.double().t() @ x.double() for d, x in parts])
        assert w.grad is not None
        return tuple(float((x - y).norm() / y.norm()) for x, y in ((out, want), (w.grad, grad)))  # type: ignore[return-value]

    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert max(errors()) < 2e-6
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert all(5e-5 < e < 2e-3 for e in errors())


def test_gradients_of_torch(generator: torch.Generator) -> None:
    """Those of one product of torch's for each group."""
    sizes, n, k = [256, 0, 512, 130], 256, 512
    a = randn(sum(sizes), k, dtype=torch.bfloat16, generator=generator).requires_grad_()
    w = (randn(len(sizes), n, k, dtype=torch.bfloat16, generator=generator) / math.sqrt(k)).requires_grad_()
    dy = randn(sum(sizes), n, dtype=torch.bfloat16, generator=generator)
    got = torch.autograd.grad(tpk.grouped_matmul(a, w.mT, sizes, path="streamk"), (a, w), dy)
    wide = [x.detach().float().requires_grad_() for x in (a, w)]
    parts = [rows @ wide[1][g].t() for g, rows in enumerate(wide[0].split(sizes))]
    want = torch.autograd.grad(torch.cat(parts), wide, dy.float())
    for x, y in zip(got, want, strict=True):
        assert float((x.float() - y).norm() / y.norm()) < 4e-3
    w.main_grad = torch.zeros(w.shape, device="cuda")  # type: ignore[attr-defined]
    tpk.grouped_matmul(a, w.mT, sizes, main_grad_of=w, path="streamk").backward(dy)
    assert float((w.main_grad - want[1]).norm() / want[1].norm()) < 1e-5  # type: ignore[attr-defined]


@pytest.fixture
def tf32_switch() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_sizes_on_the_device_and_in_graphs(generator: torch.Generator) -> None:
    sizes = [40, 0, 90]
    a = randn(130, 64, dtype=torch.bfloat16, generator=generator)
    b = randn(3, 64, 72, dtype=torch.bfloat16, generator=generator)
    want = tpk.grouped_matmul(a, b, sizes, path="streamk")
    on_device = torch.tensor(sizes, device="cuda")
    assert torch.equal(tpk.grouped_matmul(a, b, on_device, path="streamk"), want)
    assert torch.equal(tpk.grouped_matmul(a, b, offs=on_device.cumsum(0).int(), path="streamk"), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tpk.grouped_matmul(a, b, sizes, path="streamk")
        with pytest.raises(ArgumentError, match="a CUDA tensor is read by the host"):
            tpk.grouped_matmul(a, b, on_device)
    for _ in range(2):
        a.copy_(randn(130, 64, dtype=torch.bfloat16, generator=generator))
        graph.replay()
        assert torch.equal(got, tpk.grouped_matmul(a, b, sizes, path="streamk"))


@hopper_only
def test_it_is_one_launch(generator: torch.Generator) -> None:
    sizes = [100, 0, 300, 28]
    a = randn(428, 256, dtype=torch.bfloat16, generator=generator)
    b = randn(4, 256, 512, dtype=torch.bfloat16, generator=generator)
    tpk.grouped_matmul(a, b, sizes, path="streamk")
    record = tpk.last_path()
    assert record is not None and "in 3 of 4 groups, all in one list of tiles" in record.detail
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        grouped(a, b, filled(428, 512, dtype=torch.bfloat16), sizes, schedule="data_parallel")
        torch.cuda.synchronize()
    assert [e.count for e in profile.key_averages() if "streamk_gemm_kernel" in e.key] == [1]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        tpk.grouped_matmul(a, b, sizes, gate=b, activation="silu")
        torch.cuda.synchronize()
    assert [e.count for e in profile.key_averages() if "streamk_gemm_kernel" in e.key] == [1]


@hopper_only
def test_path_auto(generator: torch.Generator) -> None:
    """Ours where the kernel loads the operands, else the library, with the same results."""
    sizes, n, k = [64, 8, 129], 136, 264
    a = integers(201, k, dtype=torch.bfloat16, generator=generator)
    b = integers(3, k, n, dtype=torch.bfloat16, generator=generator)
    want = exact(a, b, sizes)
    odd = embed(a[None], "rows_odd")[0]
    for left, right, which, path in [
        (a, b, sizes, "streamk"),
        (a, b.mT.contiguous().mT, sizes, "streamk"),
        (a.t().contiguous().t(), b, sizes, "cublas"),
        (odd, b, sizes, "cublas"),
        (a, embed(b, "strided"), sizes, "cublas"),
        (a, b, [201, 0, 0], "cublas"),
    ]:
        got = tpk.grouped_matmul(left, right, which, out_dtype=torch.float32)
        record = tpk.last_path()
        assert record is not None and record.path == path
        assert torch.equal(got.double(), want if which == sizes else a.double() @ b[0].double())
        assert tpk.explain("grouped_matmul", left, right, which).path == path


@hopper_only
def test_groups_that_begin_anywhere_where_m_is_contiguous(generator: torch.Generator) -> None:
    """Another kernel makes them, unless a tile of the Hopper kernel was asked for."""
    a, b = draw(SIZES, 264, 512, ("cols", "rows"), dtype=torch.bfloat16, generator=generator)
    out = output((sum(SIZES), 264), torch.float32)
    grouped(a, b, out.tensor, SIZES)
    different = differences(out.tensor, exact(a, b, SIZES).float())
    assert not different, different
    out.check("out")
    with pytest.raises(RuntimeError, match="cannot be loaded by TMA"):
        grouped(a, b, out.tensor, SIZES, tile="128x256x64")
