"""The helpers of the GPU tests of streamk_gemm, on the CPU's kernel: references are right, and mistakes are seen.

Also that the GPU tests' shapes are cut where they are meant to be: plans need no GPU.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import gemm_checks
import pytest
import torch
from gemm_checks import OUT_LAYOUTS, Failures, Product, differences, embed, integers, output

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu1"))

import sanitize
import streamk_cases

Tensor = torch.Tensor
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("layout", [*streamk_cases.FAST, *streamk_cases.SLOW])
def test_embedded_matrices_lie_as_they_say(layout: str, generator: torch.Generator) -> None:
    for shape in [(1, 1, 1), (2, 5, 7), (3, 64, 40), (1, 9, 9), (0, 3, 4), (2, 3, 0)]:
        values = integers(*shape, dtype=torch.bfloat16, generator=generator)
        view = embed(values, layout)
        assert torch.equal(view, values)
        whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
        assert int(whole.isnan().sum()) == whole.numel() - values.numel(), "NaN everywhere else"
        if values.numel() == 0:
            continue
        fast = {"rows": 2, "cols": 1}.get(layout.partition("_")[0])
        if fast is not None:
            assert view.stride(fast) == 1
        aligned = [view.storage_offset() % 8 == 0, *(view.stride(d) % 8 == 0 for d in (0, 3 - (fast or 2)))]
        assert all(aligned) == (layout in streamk_cases.FAST), (view.stride(), view.storage_offset())


@pytest.mark.parametrize("out_layout", OUT_LAYOUTS)
@pytest.mark.parametrize("gated", [False, True])
def test_references_are_what_the_op_computes(
    out_layout: str, gated: bool, generator: torch.Generator
) -> None:
    """To the bit for integers, with everything at once and one at a time."""
    layouts = itertools.cycle([*streamk_cases.FAST, *streamk_cases.SLOW])
    for dtype, out_dtype, activation in itertools.product(HALVES, streamk_cases.OUT_DTYPES, ["none", "relu"]):
        batch, m, n, k = 2, 33, 70, 300
        make: dict[str, Any] = {"dtype": dtype, "generator": generator, "most": 1}
        a, b = (
            embed(integers(batch, m, k, **make), next(layouts)),
            embed(integers(batch, k, n, **make), "cols"),
        )
        residual = integers(batch, m, n, dtype=torch.float32, generator=generator)
        old = integers(batch, m, n, dtype=out_dtype, generator=generator)
        gate = embed(integers(batch, k, n, **make), next(layouts)) if gated else None
        bias = None if gated else integers(n, dtype=torch.bfloat16, generator=generator)
        preact = "" if gated else "strided"
        Product(a, b, gate=gate, activation=activation).run(out_dtype, out_layout)
        everything = Product(a, b, bias=bias, gate=gate, residual=residual, activation=activation, alpha=-0.5)
        everything.run(out_dtype, out_layout, old=old, preact_layout=preact, schedule="stream_k", workers=3)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_references_that_are_not_exact(activation: str, generator: torch.Generator) -> None:
    make: dict[str, Any] = {"dtype": torch.bfloat16, "generator": generator}
    a, b, gate = (gemm_checks.randn(*s, **make) / 8 for s in ((1, 40, 500), (1, 500, 60), (1, 500, 60)))
    for product in (Product(a, b, activation=activation), Product(a, b, gate=gate, activation=activation)):
        product.run(torch.bfloat16, exact=False)
        product.run(torch.float32, exact=False, old=torch.ones(1, 40, 60))


def test_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    a = integers(1, 40, 200, dtype=torch.bfloat16, generator=generator)
    b = integers(1, 200, 50, dtype=torch.bfloat16, generator=generator)
    product = Product(a, b)
    right = gemm_checks.gemm

    def with_mistake(make: Any) -> Any:
        def run(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
            right(a, b, out, **options)
            make(out, options["preact"])

        return run

    def beside(out: Tensor, preact: Tensor) -> None:
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0.0)

    mistakes: dict[str, Any] = {
        "out: 1 of 2000 elements differ (1 are NaN), rows 3 to 3, columns 49 to 49": lambda out, p: out[
            0, 3, 49
        ].fill_(float("nan")),
        "out: 1 of 2000 elements differ (0 are NaN)": lambda out, p: out[0, 0, 0].add_(1),
        "preact: 50 of 2000": lambda out, p: p[0, 7].fill_(0.25),
        "bytes beside its elements were overwritten": beside,
    }
    for sentence, make in mistakes.items():
        monkeypatch.setattr(gemm_checks, "gemm", with_mistake(make))
        with pytest.raises(AssertionError) as caught:
            product.run(torch.float32, "rows_odd", preact_layout="rows")
        assert sentence in str(caught.value)
    one_less = Product(a[:, :, :-1], b[:, :-1])  # a product that is lost
    monkeypatch.setattr(gemm_checks, "gemm", lambda a, b, out, **o: right(one_less.a, one_less.b, out, **o))
    with pytest.raises(AssertionError, match="elements differ"):
        product.run(torch.float32)


def test_differences_say_where() -> None:
    want = torch.zeros(1, 300, 400)
    got = want.clone()
    assert differences(got, want) == ""
    got[0, 130:140, 256:300] = 2.0
    text = differences(got, want)
    assert "440 of 120000 elements differ (0 are NaN), rows 130 to 139, columns 256 to 299, 1 blocks" in text
    assert "[(1, 2)]" in text and "(0, 130, 256): got 2.0, expected 0.0" in text
    assert "shape" in differences(got[:, 1:], want)


def run_cases(count: int, error: Exception) -> None:
    """The odd ones fail."""
    with Failures() as failures:
        for i in range(count):
            with failures.case(f"case {i}"):
                if i % 2:
                    raise error


def test_failures_are_collected() -> None:
    with pytest.raises(AssertionError) as caught:
        run_cases(5, AssertionError("odd"))
    assert str(caught.value) == "2 of 5 cases failed:\ncase 1: odd\ncase 3: odd"
    with pytest.raises(AssertionError, match=r"25 of 50 cases failed \(stopped here\)"):
        run_cases(1000, RuntimeError("no"))
    with pytest.raises(AssertionError, match=r"^case 1: CUDA error: x"):
        run_cases(9, RuntimeError("CUDA error: x"))
    with pytest.raises(ValueError, match="not a result"):
        run_cases(9, ValueError("not a result"))
    run_cases(1, ValueError("never raised"))


# (m, n, k) of the tests that are about cut tiles: repeats, poisoned workspaces, graphs, reports.
CUT = [
    (300, 296, 2048),
    (400, 520, 2048),
    (300, 392, 2048),
    (300, 1000, 4096),
    (300, 264, 4096),
    (300, 296, 576),
]


@pytest.mark.parametrize("plan", streamk_cases.SPLIT_PLANS, ids=lambda plan: plan["schedule"])
@pytest.mark.parametrize("tile", [*streamk_cases.HOPPER_TILES, *streamk_cases.TILES])
def test_plans_that_are_to_cut_tiles_do(tile: str, plan: dict[str, Any]) -> None:
    for (m, n, k), name in itertools.product(CUT, streamk_cases.variants(tile)):
        if k < 1000 and plan["schedule"] == "split_k":
            continue  # shares would be too short
        device = "sm90" if streamk_cases.is_hopper(tile) else "sm90-portable"
        _, numbers, _ = torch.ops.tpkernels.streamk_plan(1, m, n, k, device, tile=name, **plan)
        assert numbers[7] > 0, f"no partial tiles: {name} {(m, n, k)} {plan}"


def test_tables_are_complete() -> None:
    """Every tile that the kernel has is tested."""
    with pytest.raises(RuntimeError) as caught:
        torch.ops.tpkernels.streamk_plan(1, 64, 64, 64, "sm90", tile="1x1x1")
    for tile in streamk_cases.HOPPER_TILES:
        assert tile in str(caught.value)
    walking, _, whole = str(caught.value).partition(", of whole tiles ")
    assert whole.startswith("16x64x64s to 128x64x64s, 144x64x64s to 256x64x64s, 16x128x64s to 128x128x64s, ")
    assert walking.count("x64") == len(streamk_cases.HOPPER_TILES)
    for name in streamk_cases.HOPPER_NAMES:
        _, numbers, _ = torch.ops.tpkernels.streamk_plan(1, 64, 64, 64, "sm90", tile=name)
        bm, bn, bk, *_, cluster_m, cluster_n, cluster_k, whole = numbers
        depth = f"x{cluster_k}" * (cluster_k > 1)
        assert f"{bm}x{bn}x{bk}{('', 's', 'w')[whole]}/{cluster_m}x{cluster_n}{depth}" == name


@pytest.mark.parametrize("tile", ["128x256x64/2x1", "128x192x64/1x1", "64x64x32"])
def test_sanitizer_cases_on_the_cpu(tile: str, generator: torch.Generator) -> None:
    """The script's references and views; its tiles are another kernel's."""
    found = list(sanitize.cases(tile, generator))
    assert len(found) == 9 + (tile != "128x192x64/1x1")
    for what, product, dtype, options in found:
        assert sanitize.run("", product, dtype, options, "cpu") == "", what


def test_outputs_start_as_nan() -> None:
    for layout in OUT_LAYOUTS:
        assert bool(output((2, 5, 7), torch.float16, layout, "cpu").tensor.isnan().all())
