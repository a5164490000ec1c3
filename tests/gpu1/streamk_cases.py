"""Helpers of the Stream-K kernel's tests: operands in any layout, poisoned outputs, comparison with float64.

Inputs lie inside buffers full of NaN, so a read beside a matrix shows; outputs start as NaN inside canaries, so an
element that is left out, or a write beside the output, shows.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import tpkernels  # noqa: F401  (loads the ops)
from tpkernels.testing import Canary, assert_close_tiles, canary_view

DTYPES = [torch.bfloat16, torch.float16]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ACTIVATIONS = ["none", "relu", "silu", "gelu", "gelu_tanh"]
SCHEDULES = [
    "auto",
    "data_parallel",
    "stream_k",
    "split_k",
    "hybrid_first",
    "hybrid_last",
    "own_first",
    "every_shard",
]
TILES = ["128x128x32", "64x64x32"]
HOPPER_TILES = ["128x256x64", "256x128x64", "256x192x64", "128x192x64", "128x128x64"]
# How a matrix lies in memory: which dim is contiguous, whether 16-byte loads are possible.
FAST = ["rows", "cols"]
SLOW = ["rows_odd", "cols_odd", "strided"]

Tensor = torch.Tensor


def embed(values: Tensor, layout: str) -> Tensor:
    """The same values [batch, rows, cols] in another layout, surrounded by NaN."""
    batch, rows, cols = values.shape
    fast, slow = (cols, rows) if layout.startswith(("rows", "strided")) else (rows, cols)
    step = 3 if layout == "strided" else 1
    if layout in FAST:
        pitch, offset = (fast + 7) // 8 * 8 + 8, 16
    else:
        pitch, offset = step * fast + 1 - fast % 2 + 2, 1
    buffer = torch.full(
        (offset + batch * slow * pitch + 64,), math.nan, dtype=values.dtype, device=values.device
    )
    strides = (
        (slow * pitch, pitch, step)
        if fast == cols and slow == rows and not layout.startswith("cols")
        else None
    )
    if strides is None:
        strides = (slow * pitch, step, pitch)
    view = buffer.as_strided((batch, rows, cols), strides, offset)
    view.copy_(values)
    return view


def output(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "rows") -> Canary:
    """A NaN-filled output inside a canary."""
    options: dict[str, Any] = {
        "rows": {"pad": 8 - shape[-1] % 8, "offset": 16},
        "rows_odd": {"pad": 7, "offset": 1},
        "cols": {"order": [0, 2, 1], "pad": 8, "offset": 16},
        "strided": {"pad": 5, "offset": 3, "step": 2},
    }[layout]
    return canary_view(shape, dtype, "cuda", **options)


def activate(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return x.clamp(min=0)
    if name == "silu":
        return torch.nn.functional.silu(x)
    if name == "gelu":
        return torch.nn.functional.gelu(x)
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    return x


def randn(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    preact: Tensor | None = None,
    activation: str = "none",
    accumulate: bool = False,
    schedule: str = "auto",
    workers: int = 0,
    splits: int = 1,
    tile: str = "",
) -> None:
    torch.ops.tpkernels.streamk_gemm(
        a, b, bias, out, preact, activation, accumulate, schedule, workers, splits, tile
    )


def check(a: Tensor, b: Tensor, out: Canary, *, preact: Canary | None = None, **options: Any) -> None:
    """Runs the kernel and compares everything it may and may not write with float64."""
    bias, accumulate = options.get("bias"), options.get("accumulate", False)
    a64, b64 = a.double(), b.double()
    want, size = a64 @ b64, a64.abs() @ b64.abs()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    want_preact = want
    want = activate(want, options.get("activation", "none"))
    if accumulate:
        want, size = want + out.tensor.double(), size + out.tensor.double().abs()
    gemm(a, b, out.tensor, preact=None if preact is None else preact.tensor, **options)
    torch.cuda.synchronize()
    k = max(1, a.shape[-1])
    assert_close_tiles(out.tensor, want, out.tensor.dtype, k=k, magnitude=size, slack=1.25, name="out")
    out.check("out")
    if preact is not None:
        assert_close_tiles(
            preact.tensor, want_preact, preact.tensor.dtype, k=k, magnitude=size, name="preact"
        )
        preact.check("preact")
