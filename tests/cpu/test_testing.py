"""Comparison by tiles and poison: they must see one wrong tile, a NaN, a biased rounding, and a stray write."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tpkernels.reference import round_to
from tpkernels.testing import (
    _messages,
    assert_close_tiles,
    canary_copy,
    canary_view,
    nan_like,
    poison_,
    tile_errors,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def product(
    rng: np.random.Generator, m: int, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = torch.from_numpy(rng.standard_normal((m, k))), torch.from_numpy(rng.standard_normal((k, n)))
    return a, b, a @ b


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_products_pass(rng: np.random.Generator, dtype: torch.dtype) -> None:
    a, b, _ = product(rng, 300, 270, 200)
    a, b = a.to(dtype), b.to(dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    exact = a.double() @ b.double()
    actual = (a.to(acc) @ b.to(acc)).to(dtype)
    assert_close_tiles(actual, exact, dtype, k=200)
    assert_close_tiles(actual, exact.numpy(), dtype, k=200, magnitude=a.double().abs() @ b.double().abs())
    assert_close_tiles(actual.reshape(3, 100, 270), exact.reshape(3, 100, 270), dtype, k=200)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile_at", [(0, 0), (3, 2), (7, 7)])
def test_one_wrong_tile_is_caught_and_named(
    rng: np.random.Generator, dtype: torch.dtype, tile_at: tuple[int, int]
) -> None:
    exact = torch.from_numpy(rng.standard_normal((1000, 1000)))
    actual = exact.to(dtype, copy=True)
    row, col = tile_at[0] * 128 + 5, tile_at[1] * 128 + 7
    # One element off by a few roundings: far too little to be seen in the norm.
    actual[row, col] = (
        exact[row, col] + 16 * torch.finfo(dtype).eps * max(1.0, abs(float(exact[row, col])))
    ).to(dtype)
    assert float((actual.double() - exact).norm() / exact.norm()) < torch.finfo(dtype).eps
    with pytest.raises(
        AssertionError, match=rf"1 of 64 tiles(.|\n)*tile \({tile_at[0]}, {tile_at[1]}\)"
    ) as caught:
        assert_close_tiles(actual, exact, dtype, name="dw")
    assert f"worst at ({row}, {col})" in str(caught.value)
    assert "dw of shape (1000, 1000)" in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_never_passes(rng: np.random.Generator, value: float) -> None:
    exact = torch.from_numpy(rng.standard_normal((200, 30)))
    actual = exact.float()
    actual[199, 29] = value
    with pytest.raises(AssertionError, match="1 of 6000 elements are NaN or infinite"):
        assert_close_tiles(actual, exact, torch.float32, slack=1e30)
    assert tile_errors(actual, exact) == math.inf
    with pytest.raises(ValueError, match="expected holds NaN"):
        assert_close_tiles(exact, actual, torch.float32)


def test_truncation_is_no_rounding(rng: np.random.Generator) -> None:
    exact = torch.from_numpy(rng.standard_normal((256, 256)))
    bits = exact.float().view(torch.int32) & -65536
    truncated = bits.view(torch.float32).to(torch.bfloat16)
    with pytest.raises(AssertionError, match="not close"):
        assert_close_tiles(truncated, exact, torch.bfloat16)


def test_sums_of_rounded_partials(rng: np.random.Generator) -> None:
    """Eight bf16 partials need world=8; without it the bound is that of one rounding."""
    partials = rng.standard_normal((8, 256, 256))
    exact = partials.sum(axis=0)
    actual = round_to(sum(round_to(p, "bfloat16") for p in partials), "bfloat16")
    assert_close_tiles(actual, exact, torch.bfloat16, world=8)
    with pytest.raises(AssertionError, match="not close"):
        assert_close_tiles(actual, exact, torch.bfloat16)


def test_shapes() -> None:
    assert_close_tiles(torch.empty(0, 5), torch.empty(0, 5), torch.float32)
    assert_close_tiles(torch.empty(5, 0), np.empty((5, 0)), torch.float32)
    assert_close_tiles(torch.zeros(4, 4), np.zeros((4, 4)), torch.bfloat16, k=0)
    assert_close_tiles(torch.tensor(1.0), torch.tensor(1.0), torch.float32)
    assert_close_tiles(np.ones(7, np.float32), np.ones(7), torch.float32)
    with pytest.raises(AssertionError, match=r"actual has shape \(2, 3\), expected has shape \(3, 2\)"):
        assert_close_tiles(torch.ones(2, 3), torch.ones(3, 2), torch.float32)
    with pytest.raises(AssertionError, match="not close"):
        assert_close_tiles(torch.full((4, 4), 1e-30), torch.zeros(4, 4), torch.float32)
    with pytest.raises(ValueError, match="dtype must be one of"):
        assert_close_tiles(torch.ones(2), torch.ones(2), torch.int32)


def test_tile_errors_value() -> None:
    expected = np.ones((256, 256))
    actual = expected.copy()
    expected[128:, 128:] = actual[128:, 128:] = 100.0
    actual[200, 200] += 1.0
    actual[0, 0] += 0.001
    assert tile_errors(actual, expected) == pytest.approx(0.01)
    assert tile_errors(expected, expected) == 0.0
    assert tile_errors(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("order", [None, (1, 0)])
@pytest.mark.parametrize("step", [1, 2])
def test_canary(dtype: torch.dtype, order: tuple[int, int] | None, step: int) -> None:
    canary = canary_view((5, 6), dtype, order=order, step=step)
    view = canary.tensor
    assert view.shape == (5, 6)
    assert view.storage_offset() == 3
    assert view.stride(0 if order else 1) == step
    view.copy_(torch.ones(5, 6, dtype=dtype))
    canary.check()
    wide = view.as_strided((1,), (1,), view.storage_offset() - 1)
    wide.fill_(3)
    with pytest.raises(AssertionError, match="from element offset -1 to -1"):
        canary.check("out")


def test_canary_sees_writes_past_rows_and_end() -> None:
    for offset in (6, 12, 4 * 13 + 6):  # Rows are 13 elements apart: beside the first row, and past the end.
        canary = canary_view((5, 6))
        base = canary.tensor.storage_offset()
        canary.tensor.as_strided((1,), (1,), base + offset).fill_(0.0)
        with pytest.raises(AssertionError, match=f"offset {offset} to {offset}"):
            canary.check()


def test_poison(rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.standard_normal((3, 4))).t()
    assert nan_like(x).isnan().all()
    assert nan_like(x).stride() == x.stride()
    assert int(poison_(torch.zeros(2, dtype=torch.int32))[0]) == 2**31 - 1
    copy = canary_copy(x, order=(1, 0), pad=1)
    assert torch.equal(copy.tensor, x)
    assert canary_view((0, 3)).tensor.numel() == 0
    with pytest.raises(ValueError, match="order must list each"):
        canary_view((2, 2), order=(0, 0))


def test_ranks_find_functions_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test files share base names and have no package: a module of the same name must not be taken for another."""
    modules = []
    for folder in ("one", "two"):
        file = tmp_path / folder / "test_of_one_name.py"
        file.parent.mkdir()
        file.write_text(f"def where(ctx):\n    return {folder!r}\n")
        spec = importlib.util.spec_from_file_location("test_of_one_name", file)
        assert spec is not None
        assert spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    tasks = []
    for module in modules:
        monkeypatch.setitem(sys.modules, "test_of_one_name", module)
        tasks.append(_messages.make_task(module.where, (), 1, 0, 0.0))
    monkeypatch.delitem(sys.modules, "test_of_one_name")
    assert [_messages.load_function(task)(None) for task in tasks] == ["one", "two"]
    sys.modules.pop("test_of_one_name")


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(rng: np.random.Generator, dtype: torch.dtype) -> None:
    _, _, exact = product(rng, 700, 500, 64)
    actual = exact.to("cuda").to(dtype)
    assert_close_tiles(actual, exact, dtype, k=64)
    assert_close_tiles(actual, exact.numpy(), dtype, k=64)
    actual[699, 499] = math.nan
    with pytest.raises(AssertionError, match=r"1 of 24 tiles(.|\n)*tile \(5, 3\)"):
        assert_close_tiles(actual, exact, dtype, k=64)
    canary = canary_copy(exact.to("cuda").to(dtype), order=(1, 0))
    canary.check()
    canary.tensor.as_strided((1,), (1,), 0).fill_(0.0)
    with pytest.raises(AssertionError, match="offset -3 to -3"):
        canary.check()
