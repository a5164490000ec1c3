"""Tables of the GPU kernels' tests: tiles, clusters, schedules; and helpers that need a GPU.

The rest is in tests/gemm_checks.py, for CPU tests too.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from gemm_checks import activate, embed, gemm, integers, output, randn

from tpkernels import _extensions
from tpkernels.testing import Canary, assert_close_tiles

__all__ = ["activate", "embed", "gemm", "integers", "output", "randn"]  # for those who import them from here

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
    "hybrid_aligned",
]
TILES = ["128x256x32", "128x128x32", "64x64x32"]  # of the portable kernel
HOPPER_TILES = ["128x256x64", "256x128x64", "256x192x64", "128x192x64", "128x128x64", "192x192x64"]
# Of the kernel for products of less than a few waves, each CTA a whole tile, swapped (it computes the transpose) or
# not: the least, the most, and some between them, of each of its kernels; all of them: test_one_tile_kernel.py.
WHOLE_TILES = ["16x64x64s", "48x128x64s", "112x64x64s", "128x128x64s", "256x64x64s", "144x128x64s", "96x192x64s",
               "64x16x64w", "64x176x64w", "128x128x64w", "128x256x64w", "192x192x64w"]  # fmt: skip
GATED_TILES = [  # whose columns can be halved, in multiples of 64
    "128x256x64", "256x128x64", "128x128x64", *(tile for tile in WHOLE_TILES if "x128x64s" in tile),
]  # fmt: skip
CLUSTERS = ["/2x1", "/1x2", "/1x1"]
WHOLE_CLUSTERS = [
    *CLUSTERS, "/2x2", "/4x1", "/1x4", "/4x2", "/2x4",
    "/1x1x2", "/2x1x2", "/1x2x2", "/2x2x2", "/1x1x4", "/2x1x4", "/1x2x4", "/1x1x8",
]  # fmt: skip


def takes(tile: str, cluster: str) -> bool:
    """Whether a whole tile takes the cluster: CTAs load parts of 8 rows, and share tiles of up to 128x128 along K."""
    bm, bn = map(int, tile.split("x")[:2])
    m, n, *k = map(int, cluster[1:].split("x"))
    columns, parts = (bm, n) if tile.endswith("s") else (bn, m)
    return columns // parts % 8 == 0 and (not k or bm * bn <= 128 * 128)


WALKING_NAMES = [
    tile + cluster for tile in HOPPER_TILES for cluster in CLUSTERS
]  # of the kernel that walks schedules
WHOLE_NAMES = [tile + cluster for tile in WHOLE_TILES for cluster in WHOLE_CLUSTERS if takes(tile, cluster)]
HOPPER_NAMES = [*WALKING_NAMES, *WHOLE_NAMES]
# How a matrix lies in memory: which dim is contiguous, whether 16-byte loads are possible.
FAST = ["rows", "cols"]
SLOW = ["rows_odd", "cols_odd", "strided"]
# NN, NT, TN, TT: how a and b lie.
LAYOUTS = [("rows", "rows"), ("rows", "cols"), ("cols", "rows"), ("cols", "cols")]

# Plans that cut tiles, wherever K allows it. splits counts for the last two only.
SPLIT_PLANS: list[dict[str, Any]] = [
    {"schedule": "stream_k"},
    {"schedule": "split_k", "splits": 3},
    {"schedule": "hybrid_aligned", "splits": 4},
]
# Data-parallel and the above in turn, with few and with odd numbers of workers.
PLANS: list[dict[str, Any]] = [
    {"schedule": "data_parallel"},
    *SPLIT_PLANS,
    {"schedule": "stream_k", "workers": 5},
    {"schedule": "hybrid_first"},
    {"schedule": "data_parallel", "workers": 3},
    {"schedule": "auto"},
]

Tensor = torch.Tensor


def _why_no_hopper_kernel() -> str:
    if not torch.cuda.is_available():
        return ""  # the marker gpu1 says so
    if torch.cuda.get_device_capability() != (9, 0):
        return "the Hopper kernel needs compute capability 9.0"
    return "" if _extensions.is_loaded("_C_sm90a") else "_C_sm90a was not built or not loaded"


hopper_only = pytest.mark.skipif(bool(_why_no_hopper_kernel()), reason=_why_no_hopper_kernel() or "-")
_HOPPER = [pytest.param(tile, marks=hopper_only) for tile in HOPPER_TILES]
_WHOLE = [pytest.param(tile, marks=hopper_only) for tile in WHOLE_TILES]
ANY_TILE = [*_HOPPER, *_WHOLE, *TILES, ""]  # for parametrize; "" is what the device takes by itself
HOPPER_AND_CHEAPEST = [*_HOPPER, *_WHOLE, ""]
# Of tests that are about schedules: cut tiles, workspaces, workers, multiprocessors.
ANY_WALKING_TILE = [*_HOPPER, *TILES, ""]
WALKING_AND_CHEAPEST = [*_HOPPER, ""]


def is_hopper(tile: str) -> bool:
    return tile.partition("/")[0] in [*HOPPER_TILES, *WHOLE_TILES]


def variants(tile: str, *, gated: bool = False) -> list[str]:
    """The tile with each cluster, where it is the Hopper kernel's; those that take a gate."""
    if not is_hopper(tile):
        return [tile]
    return [
        name
        for name in HOPPER_NAMES
        if name.startswith(tile + "/") and not (gated and tile not in GATED_TILES)
    ]


def need_memory(gib: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, found {free}")


class PoisonedAllocator:
    """A pool of torch's whose only free memory is full of one byte, so that a workspace taken from it is.

    0xFF: NaN, and flags of -1. 0x7F: 3.4e38, and flags that look as if they had been raised long ago.
    A pool of its own, as elsewhere torch may find room in any segment that it has cached.
    """

    BYTES = 192 << 20

    def __init__(self, byte: int) -> None:
        self.byte = byte
        torch.cuda.empty_cache()  # also of pools that are gone
        self.pool = torch.cuda.MemPool()
        with self.in_use():
            self.address = torch.full((self.BYTES,), byte, dtype=torch.uint8, device="cuda").data_ptr()

    def in_use(self) -> AbstractContextManager[None]:
        """Within, what this thread allocates (more than 1 MiB, on this stream) lies in the poisoned memory."""
        return torch.cuda.use_mem_pool(self.pool)

    def was_used(self) -> bool:
        """Whether something was allocated there since, and written. Not within in_use()."""
        with self.in_use():
            block = torch.empty(self.BYTES, dtype=torch.uint8, device="cuda")
        assert block.data_ptr() == self.address, "the pool did not give the same block again"
        return bool((block != self.byte).any())


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
    # Sums are float32 but of float64 operands, whatever they are rounded to.
    exact = torch.float64 if a.dtype == torch.float64 else torch.float32
    dtype = exact if out.tensor.dtype == torch.float64 else out.tensor.dtype
    assert_close_tiles(out.tensor, want, dtype, k=k, magnitude=size, slack=1.25, name="out")
    out.check("out")
    if preact is not None:
        assert_close_tiles(preact.tensor, want_preact, dtype, k=k, magnitude=size, name="preact")
        preact.check("preact")


def bits(x: Tensor) -> Tensor:
    """As integers, so that NaN equals NaN."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def filled(*shape: int, dtype: torch.dtype, value: float = math.nan) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device="cuda")
