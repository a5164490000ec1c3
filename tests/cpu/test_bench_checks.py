"""What the check of a product must see, and what it must not mistake for an error."""

from __future__ import annotations

import math

import pytest
import torch

from bench.checks import product_error, sampled_rows, tolerance

GENERATOR = torch.Generator()
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    GENERATOR.manual_seed(seed)


def product(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = ((torch.rand(shape, generator=GENERATOR) * 2 - 1).to(BF16) for shape in ((m, k), (k, n)))
    return a, b, (a.float() @ b.float()).to(BF16)


def error(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    return product_error(out, a, b, generator=GENERATOR)


@pytest.mark.parametrize("m,n,k", [(1, 100, 5), (8, 4096, 256), (300, 130, 64), (64, 64, 4096), (5, 129, 0)])
def test_right_products_pass(m, n, k):
    assert error(*product(m, n, k)) < tolerance(BF16)


@pytest.mark.parametrize("m", [2, 8, 100, 256])
def test_every_row_of_a_few_counts(m):
    a, b, out = product(m, 256, 64)
    out[int(torch.randint(m, (1,), generator=GENERATOR))] = 0
    assert error(a, b, out) > 0.5


def test_a_tile_without_its_last_slab_of_k_is_seen():
    """One tile of 64 x 128 in a result of 256 columns more; a slab of 64 in 3584, on eight ranks."""
    a, b, out = product(512, 1024, 3584)
    tile = (slice(192, 256), slice(512, 640))
    out[tile] = (a[192:256, :-64].float() @ b[:-64, 512:640].float()).to(BF16)
    assert error(a, b, out) > tolerance(BF16, 9)


def test_unwritten_and_nonzero_where_zero_is_due():
    a, b, out = product(300, 200, 16)
    out[299, 199] = math.nan
    assert error(a, b, out) == math.inf
    a, b, out = product(4, 130, 0)
    out[3, 129] = 1e-3
    assert error(a, b, out) == math.inf


def test_rows_are_one_of_every_64():
    rows = sampled_rows(1000, GENERATOR)
    assert len(rows) == 16 and all(64 * i <= r < 64 * (i + 1) for i, r in enumerate(rows.tolist()))
    assert sampled_rows(256, GENERATOR).tolist() == list(range(256))
