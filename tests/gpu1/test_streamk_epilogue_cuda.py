"""Gate, residual, alpha and multiprocessors of streamk_gemm on CUDA, in the portable kernel and in the cheapest."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from streamk_cases import ACTIVATIONS, OUT_DTYPES, activate, embed, output, randn

from tpkernels import _extensions
from tpkernels.testing import assert_close_tiles

pytestmark = pytest.mark.gpu1
Tensor = torch.Tensor
# "" takes the device's own kernel: on Hopper the Hopper kernel, if it is there and the operands are for it.
TILES = ["128x256x32", "128x128x32", "64x64x32", ""]


def gemm(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
    defaults = {"bias": None, "preact": None, "activation": "none", "accumulate": False}
    torch.ops.tpkernels.streamk_gemm(a=a, b=b, out=out, **(defaults | options))


def expected(a: Tensor, b: Tensor, out: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    """The result in float64, and the size of what it is made of."""
    alpha = o.get("alpha", 1.0)
    want, size = alpha * (a.double() @ b.double()), a.double().abs() @ b.double().abs()
    if o.get("gate") is None:
        want = activate(want, o["activation"])
    else:
        gate = alpha * (a.double() @ o["gate"].double())
        want = activate(gate, o["activation"]) * want
        size = (size + 1) * (a.double().abs() @ o["gate"].double().abs() + 1)
    for added in (o.get("residual"), out if o.get("accumulate") else None):
        if added is not None:
            want, size = want + added.double(), size + added.double().abs()
    return want, size


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layout", ["rows", "cols", "strided"])
def test_epilogues(layout: str, gated: bool, tile: str, generator: torch.Generator) -> None:
    cases = itertools.product([torch.bfloat16, torch.float16], OUT_DTYPES, ["stream_k", "auto"])
    for i, (dtype, out_dtype, schedule) in enumerate(cases):
        batch, m, n, k = [(1, 200, 264, 520), (2, 129, 131, 96), (1, 64, 40, 1000)][i % 3]
        a = embed(randn(batch, m, k, dtype=dtype, generator=generator) / math.sqrt(k), layout)
        b = embed(randn(batch, k, n, dtype=dtype, generator=generator), layout)
        gate = embed(randn(batch, k, n, dtype=dtype, generator=generator), layout) if gated else None
        kind = OUT_DTYPES[i % 3]
        residual = embed(randn(batch, m, n, dtype=kind, generator=generator), "rows_odd" if i % 2 else "rows")
        out = output((batch, m, n), out_dtype, "strided" if i % 4 == 3 else "rows")
        options: dict[str, Any] = {
            "activation": ACTIVATIONS[i % len(ACTIVATIONS)],
            "gate": gate,
            "residual": residual if i % 3 else None,
            "alpha": 0.75 if i % 2 else 1.0,
            "accumulate": i % 5 == 0,
        }
        if options["accumulate"]:
            out.tensor.copy_(randn(batch, m, n, dtype=out_dtype, generator=generator))
        want, size = expected(a, b, out.tensor, **options)
        gemm(a, b, out.tensor, schedule=schedule, tile=tile, **options)
        torch.cuda.synchronize()
        # Two sums are multiplied: their errors are those of K terms each.
        assert_close_tiles(out.tensor, want, out_dtype, k=2 * k, magnitude=size, slack=1.25, name="out")
        out.check("out")


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("schedule", ["data_parallel", "stream_k", "split_k"])
def test_residual_may_be_the_output_itself(schedule: str, tile: str, generator: torch.Generator) -> None:
    a = randn(1, 300, 2048, dtype=torch.bfloat16, generator=generator) / 45
    b = randn(1, 2048, 520, dtype=torch.bfloat16, generator=generator)
    x = randn(1, 300, 520, dtype=torch.bfloat16, generator=generator)
    apart = torch.empty_like(x)
    gemm(a, b, apart, residual=x, activation="gelu", schedule=schedule, splits=3, tile=tile)
    gemm(a, b, x, residual=x, activation="gelu", schedule=schedule, splits=3, tile=tile)
    assert torch.equal(x, apart)


@pytest.mark.parametrize("tile", TILES)
def test_any_number_of_multiprocessors(tile: str, generator: torch.Generator) -> None:
    all_of_them = torch.cuda.get_device_properties("cuda").multi_processor_count
    a = randn(1, 700, 1024, dtype=torch.float16, generator=generator) / 32
    b = randn(1, 1024, 900, dtype=torch.float16, generator=generator)
    out = torch.empty(1, 700, 900, device="cuda")
    for count in (0, 1, 2, 7, all_of_them - 16, all_of_them):
        for schedule in ("auto", "stream_k"):
            out.fill_(math.nan)
            gemm(a, b, out, multiprocessors=count, schedule=schedule, tile=tile)
            assert_close_tiles(out, a.double() @ b.double(), torch.float32, k=1024)
    with pytest.raises(
        RuntimeError, match=rf"multiprocessors must be 0 \(all\) to {all_of_them}, what cuda:0"
    ):
        gemm(a, b, out, multiprocessors=all_of_them + 1)


def test_tiles_of_the_hopper_kernel_elsewhere() -> None:
    """A tile is named: another kernel's would be a silent surprise."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    a = torch.zeros(1, 64, 64, dtype=torch.bfloat16, device="cuda")
    torch.ops.tpkernels.attach_sm90a(0)  # as where _C_sm90a was not built
    try:
        words = "was not built or not loaded" if hopper else "runs on compute capability 9.0 only"
        with pytest.raises(
            RuntimeError, match=f"tile '128x256x64/2x1' is one of the Hopper kernel, which {words}"
        ):
            gemm(a, a.clone(), torch.empty_like(a), tile="128x256x64/2x1")
        gemm(a, a.clone(), torch.empty_like(a))
    finally:
        if _extensions.is_loaded("_C_sm90a"):
            torch.ops.tpkernels.attach_sm90a(torch.ops.tpkernels.sm90a_entry())
