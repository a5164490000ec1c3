"""Plans of CUDA products of float64 and float32, without a GPU, and whose decision TF32 is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tpkernels  # noqa: F401  (loads the ops)
from tpkernels.ops import _plans

PLAN = torch.ops.tpkernels.streamk_plan


@pytest.mark.parametrize("device", ["sm80", "sm90-portable", "cuda"])
@pytest.mark.parametrize("dtype", _plans.WIDE_TILES)
def test_tiles_of_a_dtype(device: str, dtype: str) -> None:
    for size in ((1, 128, 128, 128), (1, 8192, 300, 1024), (3, 1000, 1000, 77), (1, 256, 384, 6000)):
        free = PLAN(*size, device, dtype=dtype)
        plans = {tile: PLAN(*size, device, tile=tile, dtype=dtype) for tile in _plans.WIDE_TILES[dtype]}
        assert free in plans.values() and free[2] == min(plan[2] for plan in plans.values())
        for tile, (_, numbers, _) in plans.items():
            bm, bn, bk, tiles, k_iters, *_ = numbers
            assert tile == f"{bm}x{bn}x{bk}" and k_iters == -(-size[3] // bk)
            assert tiles == size[0] * -(-size[1] // bm) * -(-size[2] // bn)


def test_half_precision_is_the_default() -> None:
    for device in ("sm80", "sm90-portable", "sm90", "cpu"):
        plan = PLAN(1, 1000, 2000, 3000, device)
        assert plan == PLAN(1, 1000, 2000, 3000, device, dtype="bfloat16")
        assert device == "cpu" or plan == PLAN(1, 1000, 2000, 3000, device, dtype="float16")
    assert PLAN(1, 64, 64, 64, "cpu") == PLAN(1, 64, 64, 64, "cpu", dtype="float64")


def test_what_there_is_not() -> None:
    with pytest.raises(RuntimeError, match=r"streamk_plan: dtype must be 'bfloat16', .*, but it is 'int8'"):
        PLAN(1, 8, 8, 8, "sm80", dtype="int8")
    with pytest.raises(RuntimeError, match="the Hopper kernel, device 'sm90', takes bfloat16 and float16"):
        PLAN(1, 8, 8, 8, "sm90", dtype="float64")
    with pytest.raises(
        RuntimeError, match=r"tile must be 128x128x16, .* or 32x32x16, or empty for the cheapest"
    ):
        PLAN(1, 8, 8, 8, "sm80", tile="64x64x32", dtype="float64")


def test_long_k_is_cut_and_square_is_not() -> None:
    """Four tiles of 6000 products would leave 128 multiprocessors idle."""
    kind, numbers, _ = PLAN(1, 128, 128, 6000, "sm90-portable", dtype="float64")
    assert numbers[7] > 0 and numbers[5] > 16 and kind != "data_parallel"
    assert PLAN(1, 192, 192, 32, "sm90-portable", dtype="float64")[1][7] == 0


def test_small_float64_products_fill_the_multiprocessors() -> None:
    """128x128 tiles would give work to 1 to 26 of 132 multiprocessors."""
    for m, n, k in ((512, 512, 512), (1080, 240, 376), (144, 1600, 504), (128, 128, 4096)):
        _, numbers, _ = PLAN(1, m, n, k, "sm90-portable", dtype="float64")
        assert numbers[5] > 100, (m, n, k)
    assert PLAN(1, 4096, 4096, 4096, "sm90-portable", dtype="float64")[1][:2] in (
        [128, 128],
        [128, 64],
        [64, 128],
    )


@pytest.fixture
def matmul_settings() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_tf32_by_every_switch_of_torch(matmul_settings: None) -> None:
    def names() -> list[str]:
        return [_plans.dtype_name(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]

    off, on = ["float32", "float64", "bfloat16"], ["tf32", "float64", "bfloat16"]
    torch.backends.cuda.matmul.allow_tf32 = False
    assert names() == off and not _plans.may_use_tf32(torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = True
    assert names() == on and _plans.may_use_tf32(torch.float32)
    torch.set_float32_matmul_precision("highest")
    assert names() == off
    torch.set_float32_matmul_precision("high")
    assert names() == on
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert names() == on and not _plans.may_use_tf32(torch.float64)


def test_the_kernel_of_a_dtype() -> None:
    assert _plans.machine_of("cuda").architecture == "sm90"
    assert _plans.machine_of("cuda", dtype="float16").architecture == "sm90"
    for dtype in _plans.WIDE_TILES:
        machine = _plans.machine_of("cuda", dtype=dtype)
        assert machine.architecture == "sm90-portable"
        product = _plans.Product(1, 1000, 2000, 3000, dtype=dtype)
        found = _plans.candidates(product, machine)
        assert found[0] == _plans.plan(product, machine) and _plans.why(product, machine, found[0])
        assert {_plans.tile_name(one, machine) for one in found} == set(_plans.WIDE_TILES[dtype])
        assert not _plans.prefers_streamk(product, machine, 1e9)  # there is no estimate of cuBLAS's time
