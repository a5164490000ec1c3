"""Plans of the Stream-K kernels, asked for without running them, and whether one should be preferred to cuBLAS.

Nothing here needs a GPU. ``architecture`` is what torch.ops.tpkernels.streamk_plan calls a device: "cpu", "sm80",
"sm90" (the Hopper kernel) or "sm90-portable" (the portable kernel on Hopper and later).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from tpkernels import _extensions

_CLUSTERS = ("2x1", "1x2", "1x1")  # CTAs along M and N

# Tiles of each kernel by name, as the tile argument takes them; those of Hopper with their clusters, and without those
# whose CTAs take whole ones, of which there are over a thousand: streamk_whole_tiles tells the best. The portable
# kernel's are those of half precision.
_PORTABLE = ("128x256x32", "128x128x32", "64x64x32")
TILES = {
    "cpu": ("256x256x128", "128x128x128", "64x64x128", "32x256x128", "16x64x128"),
    "sm80": _PORTABLE,
    "sm90-portable": _PORTABLE,
    "sm90": tuple(
        f"{tile}/{cluster}"
        for tile in ("128x256x64", "256x128x64", "256x192x64", "128x192x64", "128x128x64", "192x192x64")
        for cluster in _CLUSTERS
    ),
}


# Tiles of the portable kernel for other operands: "tf32" is float32 that may be rounded to TF32.
WIDE_TILES = {
    "float32": ("128x128x16", "64x64x16"),
    "tf32": ("128x256x16", "64x64x16"),
    "float64": (
        "128x128x16",
        "128x64x16",
        "64x128x16",
        "128x64x8",
        "64x64x16",
        "64x32x16",
        "32x64x16",
        "32x32x16",
    ),
}

_WHOLE = ("", "s", "w")  # behind the name of a tile that a CTA takes whole, swapped or not

# Of the Hopper kernel for 8-bit operands, architectures "sm90-fp8", "sm90-fp8-fast" (sums are not promoted) and
# "sm90-fp8-blocks" (scales change along K).
SCALED_TILES = tuple(
    f"{tile}/{cluster}" for tile in ("128x256x128", "128x128x128") for cluster in ("2x1", "1x2", "1x1")
)
_SCALED = "sm90-fp8"


class Product(NamedTuple):
    """``batch`` products of [m, k] and [k, n].

    gated: a gate [k, n] beside the right factor, in one call of Stream-K. finishes: bias, residual, activation, a
    stored pre-activation, or sums into the output follow (so they do where it is gated). outer_major: K is contiguous
    in neither factor. group_sizes: of a grouped product, as many factors [k, n] for m rows in all. dtype: of the
    factors, as torch.ops.tpkernels.streamk_plan names it. collective, shard_rows and rank: of a rank's part of that
    fused operation, whose rows, of every rank, come or go; the Hopper kernel alone has such plans. out_bytes: of an
    element of the result. biased: a bias is all that finishes. stored: rows leave by the product's own stores.
    """

    batch: int
    m: int
    n: int
    k: int
    gated: bool = False
    finishes: bool = False
    outer_major: bool = False
    group_sizes: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    collective: str = ""
    shard_rows: tuple[int, ...] = ()
    rank: int = 0
    out_bytes: int = 2
    biased: bool = False
    stored: bool = False


class Machine(NamedTuple):
    """What plans depend on; 0 multiprocessors: those of an H100 or A100, or the threads of the CPU."""

    architecture: str
    multiprocessors: int = 0


class CublasEstimate(NamedTuple):
    """What torch.mm takes on an H100, in the units of ``estimate_us``.

    A roofline, not a model of cuBLAS: 760 TFLOP/s and 2.7 TB/s less 9 %. Against torch.mm on an H100, bfloat16, 27
    shapes, it errs by a standard deviation of 6 % (5 to 7 % in three other runs of some of these shapes).
    """

    launch_us: float = 4.4
    flops_per_us: float = 6.97e8  # of 132 multiprocessors
    bytes_per_us: float = 2.48e6


CUBLAS_H100 = CublasEstimate()
# Beside its launch. Shorter products take the Hopper kernel less time than cuBLAS: 134 of the sweep's 1,000, where it
# is at 1.21x its speed in the mean and 0.97x at worst (``python -m bench fit-auto``).
SHORT_US = 0.7


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_few_tiles(rows: int, columns: int, device: torch.device) -> bool:
    """Whether a product has fewer tiles of 128 x 128 than the CUDA device has multiprocessors: cuBLAS may split K."""
    return math.ceil(rows / 128) * math.ceil(columns / 128) < _multiprocessors(device)


def may_use_tf32(dtype: torch.dtype) -> bool:
    """Whether torch lets CUDA's products of this dtype round their factors to TF32, by any of its switches for it.

    That is ``torch.backends.cuda.matmul.fp32_precision``, which ``allow_tf32`` and
    ``torch.set_float32_matmul_precision`` set as well.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def dtype_name(dtype: torch.dtype) -> str:
    """What :class:`Product` calls the dtype of factors on CUDA."""
    return "tf32" if may_use_tf32(dtype) else str(dtype).removeprefix("torch.")


def machine_of(device: str, index: torch.device | None = None, dtype: str = "bfloat16") -> Machine:
    """The kernel that a device gets; ``device`` is its type. Without an index, of CUDA: a whole H100."""
    if device != "cuda":
        return Machine("cpu")
    wide = dtype in WIDE_TILES
    if index is None or index.type != "cuda":
        return Machine("sm90-portable" if wide else "sm90")
    properties = torch.cuda.get_device_properties(index)
    if properties.major == 8:
        architecture = "sm80"
    else:
        hopper = properties.major == 9 and not wide and _extensions.is_loaded("_C_sm90a")
        architecture = "sm90" if hopper else "sm90-portable"
    return Machine(architecture, properties.multi_processor_count)


def plan(
    product: Product, machine: Machine, schedule: str = "auto", tile: str = "", splits: int = 1
) -> dict[str, Any]:
    """The cheapest plan with that schedule, tile and number of splits; "auto" and "" leave them open."""
    size, demands = product[:4], product[4:]
    kind, numbers, predicted = torch.ops.tpkernels.streamk_plan(
        *size, machine.architecture, schedule, 0, splits, machine.multiprocessors, tile, *demands
    )
    bm, bn, bk, tiles, k_iters, workers, splits, partial_tiles, *cluster, whole = numbers
    return {
        "schedule": kind,
        "tile": (bm, bn, bk),
        "suffix": _WHOLE[whole],  # of the tile's name
        "cluster": tuple(
            cluster if cluster[2] > 1 else cluster[:2]
        ),  # CTAs along M, N, and K if more than one
        "tiles": tiles,
        "k_iters": k_iters,
        "workers": workers,
        "splits": splits,
        "partial_tiles": partial_tiles,
        "predicted_us": predicted,
    }


def tile_name(one: dict[str, Any], machine: Machine) -> str:
    """Name of a plan's tile as the kernel takes it: "128x256x64/2x1" where there are clusters."""
    tile, cluster = ("x".join(map(str, one[key])) for key in ("tile", "cluster"))
    return f"{tile}{one['suffix']}/{cluster}" if is_hopper(machine) else tile


def is_hopper(machine: Machine) -> bool:
    """Whether plans are those of the Hopper kernel, whose tiles have clusters."""
    return machine.architecture == "sm90" or machine.architecture.startswith(_SCALED)


def is_whole(name: str) -> bool:
    """Whether a tile's name says that CTAs take whole ones, one each."""
    return name.partition("/")[0].endswith(_WHOLE[1:])


def tiles_of(product: Product, machine: Machine) -> list[str]:
    """Tiles that a product may get. The Hopper kernel halves the columns of a gated one, in multiples of 64; its whole
    tiles, of which these are the best, are for one product, whose rows no other rank waits for or sends. Adding what
    others send has no room beside 192 columns.
    """
    if machine.architecture.startswith(_SCALED):
        return list(SCALED_TILES)
    names = TILES[machine.architecture]
    if machine.architecture != "cpu":
        names = WIDE_TILES.get(product.dtype, names)
    if machine.architecture != "sm90":
        return list(names)
    if product.collective not in ("", "all_gather_matmul"):
        names = tuple(name for name in names if name.split("x")[1] != "192")
    if product.gated:
        names = tuple(name for name in names if int(name.split("x")[1]) % 128 == 0)
    if product.group_sizes or product.collective:
        return list(names)
    whole = torch.ops.tpkernels.streamk_whole_tiles(
        *product[:4], machine.multiprocessors, product.gated, product.out_bytes
    )
    return [*names, *whole]


def candidates(product: Product, machine: Machine) -> list[dict[str, Any]]:
    """The best plan of every tile, of whole ones the cheapest, cheapest first: the first is what the kernel takes."""
    chosen = plan(product, machine)
    found = [plan(product, machine, tile=name) for name in tiles_of(product, machine)]
    return [chosen] + sorted((p for p in found if p != chosen), key=lambda p: float(p["predicted_us"]))


def why(product: Product, machine: Machine, chosen: dict[str, Any]) -> str:
    """Why a plan cuts tiles, or does not."""
    whole = plan(product, machine, "data_parallel", tile_name(chosen, machine))
    count, workers = whole["tiles"], max(1, whole["workers"])
    waves = f"{count} tiles are {count / workers:.2f} waves of {workers} workers"
    if count <= workers:
        waves = f"{count} whole tiles would keep {workers} workers busy"
    if chosen["schedule"] == "data_parallel" or chosen["partial_tiles"] == 0:
        return f"{waves}; cutting them was not predicted to be faster"
    return (
        f"{waves}: whole tiles were predicted to take {whole['predicted_us']:.0f} us, {chosen['schedule']} "
        f"{chosen['predicted_us']:.0f} us"
    )


def estimate_us(product: Product, multiprocessors: int = 0, rates: CublasEstimate = CUBLAS_H100) -> float:
    """Rough time of torch.mm in bfloat16 on an H100: arithmetic or memory, whichever is longer; twice for a gate."""
    if product.group_sizes:  # one after another
        each = (product._replace(m=size, group_sizes=()) for size in product.group_sizes if size > 0)
        return sum(estimate_us(one, multiprocessors, rates) for one in each)
    batch, m, n, k = product[:4]
    share = (multiprocessors or 132) / 132
    flops, moved = 2.0 * batch * m * n * k, 2.0 * batch * (m * k + k * n + m * n)
    once = rates.launch_us + max(flops / (rates.flops_per_us * share), moved / rates.bytes_per_us)
    return 2 * once if product.gated else once


def prefers_streamk(product: Product, machine: Machine, short_us: float = SHORT_US) -> bool:
    """Whether our kernel should be faster than cuBLAS in a plain product. Pure.

    Only the Hopper kernel is ever preferred, in products that would take cuBLAS less than ``short_us`` beside its
    launch.
    """
    if machine.architecture != "sm90":
        return False
    return estimate_us(product, machine.multiprocessors) - CUBLAS_H100.launch_us < short_us
