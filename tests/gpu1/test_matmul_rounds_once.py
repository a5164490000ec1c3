"""tpk.matmul on CUDA rounds once, behind the bias, whatever computes the product."""

from __future__ import annotations

import random

import pytest
import torch
from gemm_checks import Failures, integers, output

import tpkernels as tpk

pytestmark = [pytest.mark.gpu1, pytest.mark.usefixtures("cublas_sums_in_fp32")]


@pytest.mark.parametrize("path", ["cublas", "streamk", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [1.0, 0.75])
def test_rounds_once(path: str, dtype: torch.dtype, alpha: float, generator: torch.Generator) -> None:
    """Sizes at which torch.addmm splits K, and at which there are too many tiles for that."""
    pick = random.Random(generator.initial_seed())
    unit = torch.finfo(dtype).eps / 2
    with Failures() as failures:
        for case in range(120):
            most = (900, 400, 500) if case % 3 else (4000, 2500, 1500)
            m, n, k = (pick.randint(1, size) for size in most)
            with failures.case(f"{m}x{n}x{k}"):
                x, w = (
                    torch.randn(*shape, device="cuda", generator=generator).to(dtype)
                    for shape in ((m, k), (k, n))
                )
                bias = (4 * torch.randn(n, device="cuda", generator=generator)).to(dtype)
                got = tpk.matmul(x, w, bias=bias, alpha=alpha, path=path).double()
                product = alpha * (x.double() @ w.double())
                want = product + bias.double()
                # Sums in float32 of terms that are exact in it; 2 % for what they move across where rounding turns.
                allowed = 1.02 * unit * want.abs() + 2e-5 * product.abs().max()
                wrong = int(((got - want).abs() > allowed).sum())
                assert wrong == 0, f"{wrong} of {m * n} elements are not the exact sum rounded once"


def test_auto_takes_what_was_measured_to_be_faster(generator: torch.Generator) -> None:
    """On Hopper short products and epilogues are our kernel's; explain() says so, and calls agree with it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernel runs on Hopper")
    x = torch.randn(256, 512, device="cuda", generator=generator).to(torch.bfloat16)
    w = torch.randn(768, 512, device="cuda", generator=generator).to(torch.bfloat16).t()
    odd = torch.randn(768, 513, device="cuda", generator=generator).to(torch.bfloat16)[:, 1:].t()
    r = torch.randn(256, 768, device="cuda", generator=generator).to(torch.bfloat16)
    for b, options, path in (
        (w, {}, "streamk"),
        (w, {"bias": r[0]}, "streamk"),
        (w, {"bias": r[0], "activation": "gelu"}, "streamk"),
        (w, {"residual": r}, "streamk"),
        (w, {"gate": w, "activation": "silu", "save_preact": False}, "streamk"),
        (w, {"out_dtype": torch.float32}, "cublas"),
        (odd, {}, "cublas"),  # TMA cannot read it
        (w.contiguous(), {}, "cublas"),
    ):
        explained = tpk.explain("matmul", x, b, **options)
        got = tpk.matmul(x, b, **options)
        record = tpk.last_path()
        assert record is not None and record.path == explained.path == path, (options, record, explained)
        assert record.why == explained.why
        assert torch.equal(got, tpk.matmul(x, b, **options, path=path)), options


@pytest.mark.parametrize(
    "tile", ["64x128x64w/1x1", "128x64x64s/1x1", "128x128x64w/2x1", "96x192x64s/1x2", ""]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_on_the_way(tile: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Whole tiles add alpha and a bias as they round: sizes, batches, and biases that they cannot read in pairs."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernel runs on Hopper")
    with Failures() as failures:
        for batch, m, n, k in ((1, 200, 136, 72), (3, 333, 264, 520), (1, 5000, 2056, 136), (1, 1, 8, 64)):
            a = integers(batch, m, k, dtype=dtype, generator=generator, most=1)
            b = integers(batch, n, k, dtype=dtype, generator=generator, most=1).mT
            wide = integers(3 * n + 1, dtype=dtype, generator=generator, most=64)
            biases = {
                "row": wide[:n],
                "one": wide[:1].expand(n),
                "strided": wide[: 2 * n : 2],
                "odd": wide[1 : n + 1],
                "float32": wide[:n].float(),
            }
            for name, bias in biases.items():
                for alpha in (1.0, 0.5):
                    with failures.case(f"{batch}x{m}x{n}x{k}, bias {name}, alpha {alpha}"):
                        out = output((batch, m, n), dtype)
                        torch.ops.tpkernels.streamk_gemm(
                            a, b, bias, out.tensor, None, "none", False, alpha=alpha, tile=tile
                        )
                        out.check()
                        want = (alpha * (a.double() @ b.double()) + bias.double()).to(dtype)
                        assert torch.equal(out.tensor, want)
