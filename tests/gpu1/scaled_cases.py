"""What the tests of scaled_gemm share: operands of fp8 amid NaN, scales of every granularity, a float64 reference.

Small integers are exact in both kinds of fp8, and so are scales that are powers of two: results must be right to the
bit, in every order of sums, where no sum needs more than the 24 bits of fp32 (or, fast, the 14 of a tensor core).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from gemm_checks import differences, output

Tensor = torch.Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
TILES = ["128x256x128", "128x128x128"]
CLUSTERS = ["/2x1", "/1x2", "/1x1"]
ANY_TILE = [*TILES, ""]
# Of a, of b: how many elements share a scale.
ALONG_ALL_OF_K = ["tensor x tensor", "row x column", "tensor x column", "row x tensor"]
BLOCKS = [
    "1x128 x 128x128",
    "1x128 x 1x128",
    "row x 128x128",
    "1x128 x column",
    "tensor x 1x128",
    "1x128 x tensor",
]
GRANULARITIES = [*ALONG_ALL_OF_K, *BLOCKS]
PLANS: list[dict[str, Any]] = [
    {"schedule": "auto"},
    {"schedule": "data_parallel"},
    {"schedule": "stream_k"},
    {"schedule": "split_k", "splits": 3},
    {"schedule": "hybrid_aligned", "splits": 4},
    {"schedule": "stream_k", "workers": 5},
    {"schedule": "hybrid_first"},
]


def variants(tile: str) -> list[str]:
    return [tile + cluster for cluster in CLUSTERS] if tile else [""]


def blocks(extent: int) -> int:
    return -(-extent // 128)


def amid_nan(values: Tensor, behind: int = 16) -> Tensor:
    """The same rows, K contiguous, in a buffer of NaN; as far apart as TMA needs, and `behind` more."""
    rows, k = values.shape
    buffer = torch.full((rows + 2, blocks(k) * 128 + behind), math.nan, device=values.device).to(values.dtype)
    view = buffer[1:-1, 16 : 16 + k]
    view.view(torch.uint8).copy_(values.view(torch.uint8))
    return view


def integers(rows: int, k: int, dtype: torch.dtype, generator: torch.Generator, most: int = 4) -> Tensor:
    values = torch.randint(-most, most + 1, (rows, k), device=generator.device, generator=generator)
    return amid_nan(values.float().to(dtype))


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """float64 [rows, columns]: a scale for every element."""
    if scale.numel() == 1:
        return scale.double().reshape(1, 1).expand(rows, columns)
    for dim, extent in ((0, rows), (1, columns)):
        if scale.shape[dim] == 1:
            scale = scale.expand(*(extent if d == dim else -1 for d in (0, 1)))
        elif scale.shape[dim] != extent:
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, extent)
    return scale.double()


def shapes_of(granularity: str, m: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    of_a, of_b = granularity.split(" x ")
    return (
        {"tensor": (), "row": (m, 1), "1x128": (m, blocks(k))}[of_a],
        {"tensor": (1,), "column": (1, n), "1x128": (blocks(k), n), "128x128": (blocks(k), blocks(n))}[of_b],
    )


def powers(shape: tuple[int, ...], most: int, generator: torch.Generator) -> Tensor:
    """2 to powers from -most to most."""
    return torch.exp2(
        torch.randint(-most, most + 1, shape, device=generator.device, generator=generator).float()
    )


def scales(
    granularity: str, m: int, n: int, k: int, generator: torch.Generator, most: int = 0
) -> tuple[Tensor, Tensor]:
    """Powers of two. Unless told otherwise, of few magnitudes where sums over different ones must be exact."""
    most = most or (2 if granularity in BLOCKS else 30)
    of_a, of_b = shapes_of(granularity, m, n, k)
    return powers(of_a, most, generator), powers(of_b, most, generator)


def scaled_gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, **options: Any) -> None:
    defaults = {"bias": None, "fast_accumulation": False}
    torch.ops.tpkernels.scaled_gemm(
        a=a, b=b, scale_a=scale_a, scale_b=scale_b, out=out, **(defaults | options)
    )


@dataclass
class Scaled:
    """Operands [M, K] and [N, K], their scales, and what must come out."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None = None
    value: Tensor = field(init=False)  # float64

    def __post_init__(self) -> None:
        (m, k), n = self.a.shape, self.b.shape[0]
        left = self.a.double() * spread(self.scale_a, m, k)
        right = self.b.double().t() * spread(self.scale_b, k, n)
        self.value = left @ right
        if self.bias is not None:
            self.value += self.bias.double()

    def run(self, out_dtype: torch.dtype, layout: str = "rows", **options: Any) -> Tensor:
        """Checks canaries, not values."""
        canary = output((1, self.a.shape[0], self.b.shape[0]), out_dtype, layout)
        out: Tensor = canary.tensor[0]
        scaled_gemm(self.a, self.b.t(), self.scale_a, self.scale_b, out, bias=self.bias, **options)
        canary.check()
        return out

    def check(self, out_dtype: torch.dtype, layout: str = "rows", **options: Any) -> None:
        """Right to the bit."""
        wrong = differences(self.run(out_dtype, layout, **options), self.value.float().to(out_dtype))
        assert not wrong, wrong
