"""Errors against float64, no larger than twice cuBLAS's on the same numbers; and matrices of more than 2^31 elements.

cuBLAS may not reduce in 16 bits here, so that it is no easy comparison. Run with -rP to see the ratios.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from gemm_checks import Failures, Product, differences, embed, gemm, integers, randn
from streamk_cases import (
    ANY_TILE,
    DTYPES,
    HOPPER_AND_CHEAPEST,
    LAYOUTS,
    OUT_DTYPES,
    PLANS,
    WALKING_AND_CHEAPEST,
    filled,
    need_memory,
    variants,
)

pytestmark = [pytest.mark.gpu1, pytest.mark.usefixtures("cublas_sums_in_fp32")]
Tensor = torch.Tensor


def cublas(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    if out_dtype == a.dtype:
        return torch.bmm(a, b)
    wide = torch.bmm(a, b, out_dtype=torch.float32)
    return wide.to(out_dtype)


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Root of the mean square, and the largest."""
    error = (got.double() - want).abs()
    return float(error.square().mean().sqrt()), float(error.max())


def draw(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if kind == "normal":
        return randn(*shape, dtype=dtype, generator=generator)
    if kind == "positive":  # sums grow with K
        return torch.rand(*shape, device="cuda", generator=generator).to(dtype)
    return (randn(*shape, dtype=dtype, generator=generator).double() ** 3).to(dtype)  # few large ones


def compare(
    kind: str, a: Tensor, b: Tensor, name: str, plans: list[dict[str, object]], failures: Failures
) -> None:
    want = a.double() @ b.double()
    for out_dtype in OUT_DTYPES:
        theirs = errors(cublas(a, b, out_dtype), want)
        for plan in plans:
            out = filled(*want.shape, dtype=out_dtype)
            gemm(a, b, out, tile=name, **plan)
            ours = errors(out, want)
            ratios = [
                x / y if y > 0 else (0.0 if x == 0 else math.inf) for x, y in zip(ours, theirs, strict=True)
            ]
            what = (
                f"{kind} {name or 'cheapest'} {a.dtype} to {out_dtype} {[*a.shape, b.shape[2]]} {plan}: error / "
                f"cuBLAS's: {ratios[0]:.3f} (rms), {ratios[1]:.3f} (largest), ours {ours[0]:.3e}, {ours[1]:.3e}"
            )
            print(what)
            with failures.case(what):
                assert max(ratios) <= 2.0


@pytest.mark.parametrize("kind", ["normal", "positive", "cubes"])
@pytest.mark.parametrize("tile", ANY_TILE)
def test_errors_are_at_most_twice_those_of_cublas(tile: str, kind: str, generator: torch.Generator) -> None:
    """Where cuBLAS does not cut K either."""
    with Failures() as failures:
        for i, ((layout_a, layout_b), dtype) in enumerate(itertools.product(LAYOUTS, DTYPES)):
            k = [1024, 1000, 2048, 200][i % 4]
            a = embed(draw(kind, (1, 2048, k), dtype, generator), layout_a)
            b = embed(draw(kind, (1, k, 2304), dtype, generator), layout_b)
            names = variants(tile)
            compare(kind, a, b, names[i % len(names)], PLANS[:4], failures)


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 65536), (1000, 128, 20000), (16, 4096, 8192)])
@pytest.mark.parametrize("tile", WALKING_AND_CHEAPEST)
def test_long_sums(tile: str, m: int, n: int, k: int, kind: str, generator: torch.Generator) -> None:
    """Few tiles: both sides cut K as they see fit. A whole tile that is named cannot."""
    with Failures() as failures:
        for dtype in DTYPES:
            a = draw(kind, (1, m, k), dtype, generator)
            b = draw(kind, (1, n, k), dtype, generator).transpose(1, 2)
            compare(kind, a, b, tile, [{"schedule": "auto"}, {"schedule": "hybrid_aligned"}], failures)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_operands_of_more_than_2_to_31_elements(tile: str, generator: torch.Generator) -> None:
    """One buffer of 65,600 x 32,800 as a, as b, and as b transposed."""
    need_memory(16)
    rows, columns = 65_600, 32_800
    big = torch.empty(1, rows, columns, dtype=torch.int8, device="cuda")
    big.random_(-2, 3, generator=generator)
    big = big.to(torch.bfloat16)
    pick_rows = torch.tensor([0, 127, 32_800, 65_471, 65_536, rows - 1], device="cuda")
    pick_columns = torch.tensor([0, 8, 16_384, 32_767, columns - 1], device="cuda")
    make: dict[str, Any] = {"dtype": torch.bfloat16, "generator": generator}
    narrow, tall = integers(1, columns, 72, **make), integers(1, 40, rows, **make)
    flat = integers(1, 40, columns, **make)
    with Failures() as failures:
        for name, plan in itertools.product(variants(tile), [{"schedule": "stream_k"}, {}]):
            with failures.case(f"{name} {plan} as a"):
                out = filled(1, rows, 72, dtype=torch.float32)
                gemm(big, narrow, out, tile=name, **plan)
                want = big[:, pick_rows].double() @ narrow.double()
                assert not differences(out[:, pick_rows], want.float())
                assert not bool(out.isnan().any())
            with failures.case(f"{name} {plan} as b"):
                out = filled(1, 40, columns, dtype=torch.float32)
                gemm(tall, big, out, tile=name, **plan)
                want = tall.double() @ big[:, :, pick_columns].double()
                assert not differences(out[:, :, pick_columns], want.float())
                assert not bool(out.isnan().any())
            with failures.case(f"{name} {plan} as b transposed"):
                out = filled(1, 40, rows, dtype=torch.float32)
                gemm(flat, big.mT, out, tile=name, **plan)
                want = flat.double() @ big[:, pick_rows].double().mT
                assert not differences(out[:, :, pick_rows], want.float())
                assert not bool(out.isnan().any())


@pytest.mark.parametrize("tile", ANY_TILE)
def test_outputs_of_more_than_2_to_31_elements(tile: str, generator: torch.Generator) -> None:
    """Plain, and with a residual and an old output that are as large: all of it the same 4.3 GB."""
    need_memory(16)
    m, n, k = 65_600, 32_800, 16
    a = integers(1, m, k, dtype=torch.bfloat16, generator=generator)
    b = integers(1, k, n, dtype=torch.bfloat16, generator=generator)
    rows = torch.tensor([0, 1, 127, 128, 32_767, 40_000, 65_471, 65_535, 65_536, m - 1], device="cuda")
    want = a[:, rows].double() @ b.double()
    for name in variants(tile):
        out = filled(1, m, n, dtype=torch.bfloat16)
        gemm(a, b, out, tile=name)
        assert not bool(out.isnan().any()), name
        assert not differences(out[:, rows], want.bfloat16()), name
        gemm(a, b, out, residual=out, accumulate=True, tile=name)
        assert not differences(out[:, rows], (3 * want).bfloat16()), name
        del out


@pytest.mark.parametrize("tile", HOPPER_AND_CHEAPEST)
def test_strides_beyond_int32(tile: str, generator: torch.Generator) -> None:
    """Rows 2^30 + 8 elements apart: of a, of b, of the outputs, of the residual."""
    need_memory(12)
    pitch, m, n, k = 2**30 + 8, 4, 96, 520
    values = integers(1, m, k, dtype=torch.bfloat16, generator=generator)
    weight = integers(1, k, n, dtype=torch.bfloat16, generator=generator)
    buffer = torch.empty(3 * pitch + 8192, dtype=torch.bfloat16, device="cuda")

    def far(rows: int, columns: int, first: int) -> Tensor:
        return buffer.as_strided((1, rows, columns), (0, pitch, 1), first)

    with Failures() as failures:
        for name, plan in itertools.product(variants(tile), PLANS[:2]):
            a, out, preact, residual = far(m, k, 0), far(m, n, 2048), far(m, n, 4096), far(m, n, 6144)
            a.copy_(values)
            out.fill_(math.nan)
            preact.fill_(math.nan)
            residual.fill_(5.0)
            what = f"{name} {plan}"
            with failures.case(what):
                gemm(a, weight, out, preact=preact, residual=residual, activation="relu", tile=name, **plan)
                product = Product(values, weight, activation="relu", residual=residual.clone())
                assert not differences(out, product.value.bfloat16())
                assert not differences(preact, product.before.bfloat16())
            with failures.case(what + ", as b"):
                product = Product(values, a.mT)
                small = filled(1, m, m, dtype=torch.float32)
                gemm(values, a.mT, small, tile=name, **plan)
                assert not differences(small, product.value.float())
