"""Which products path "auto" gives to the Hopper kernel; pure, hardware that is not here."""

from __future__ import annotations

import pytest
import torch

from tpkernels.ops import _gemm, _plans, _preferred
from tpkernels.ops._paths import Choice

HOPPER = _plans.Machine("sm90", 132)
SHORT, LONG, WIDE = (
    _plans.Product(1, *size) for size in ((512, 512, 512), (512, 512, 16384), (4096, 4096, 64))
)
x = torch.empty(2, 2)


@pytest.mark.parametrize(
    ("product", "epilogue", "expected"),
    [
        (SHORT, _gemm.PLAIN, "short"),
        (LONG, _gemm.PLAIN, None),
        (WIDE, _gemm.PLAIN, None),
        (LONG, _gemm.Epilogue(bias=x), "bias"),  # few tiles, for which the library takes two launches
        (WIDE, _gemm.Epilogue(bias=x), None),
        (WIDE, _gemm.Epilogue(bias=x, activation="gelu"), "one launch"),
        (WIDE, _gemm.Epilogue(gate=x, activation="silu"), "one launch"),
        (WIDE, _gemm.Epilogue(residual=x), "one launch"),
        (WIDE, _gemm.Epilogue(alpha=0.5), None),
    ],
)
def test_what_is_preferred(product: _plans.Product, epilogue: _gemm.Epilogue, expected: str | None) -> None:
    few = product is not WIDE
    reason = _preferred.why_ours(product, HOPPER, epilogue, few_tiles=few)
    assert reason is None if expected is None else reason is not None and expected in reason


def test_a_smaller_part_of_the_device_takes_longer() -> None:
    assert _plans.prefers_streamk(SHORT, HOPPER)
    assert not _plans.prefers_streamk(SHORT, _plans.Machine("sm90", 66))


def test_how_factors_have_to_lie() -> None:
    rows = torch.empty(8, 64, dtype=torch.bfloat16)
    assert _preferred._lies_along_k(rows)
    assert _preferred._lies_along_k(torch.empty(2, 8, 64, dtype=torch.bfloat16))
    for other in (rows.mT, rows[:, 1:], torch.empty(8, 60, dtype=torch.bfloat16), rows[:, ::2], rows[:0]):
        assert not _preferred._lies_along_k(other)
    assert not _preferred.suits(rows, rows.mT, None), "on the CPU nothing is preferred"


def test_a_choice_stays_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, of another device, of another dtype of the result: cuBLAS, as before."""
    a, b = torch.empty(512, 512, dtype=torch.bfloat16), torch.empty(512, 512, dtype=torch.bfloat16)
    opened = Choice("cublas", "the default", open=True)

    def gemm(choice: Choice, out_dtype: torch.dtype = torch.bfloat16) -> str:
        return _preferred.choose(choice, a, b, _gemm.PLAIN, out_dtype).gemm

    monkeypatch.setattr(_plans, "_multiprocessors", lambda _: 132)
    assert _plans.has_few_tiles(512, 512, a.device) and _plans.has_few_tiles(131 * 128, 128, a.device)
    assert not _plans.has_few_tiles(131 * 128 + 1, 128, a.device)
    monkeypatch.setattr(_plans, "machine_of", lambda *_: HOPPER)
    assert gemm(opened) == "streamk" and _preferred.choose(opened, a, b, _gemm.PLAIN, a.dtype).open
    assert gemm(Choice("cublas", "asked for")) == "cublas"
    assert gemm(opened, torch.float32) == "cublas"
    monkeypatch.setattr(_plans, "machine_of", lambda *_: _plans.Machine("sm90-portable", 132))
    assert gemm(opened) == "cublas"
