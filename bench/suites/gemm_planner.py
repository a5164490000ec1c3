"""Plans of one product on one device, and what to ask of the kernel for each variant of ours.

Names of variants: ``streamk`` is what users get, the cost model's tile and schedule. ``streamk:SCHEDULE`` forces a
schedule with the tile of that choice, ``streamk:data_parallel`` with the tile that is best for it, and
``streamk:dp-same-tile`` is data-parallel with the tile of ``streamk``. ``streamk:SCHEDULE@TILE`` forces both,
``streamk@TILE`` is the cost model's schedule on that tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..suite import Skip

if TYPE_CHECKING:
    import torch

__all__ = [
    "SAME_TILE",
    "SCHEDULES",
    "STREAMED",
    "TILES",
    "Planner",
    "Request",
    "tile_variants",
    "waves_of_whole_tiles",
]

SAME_TILE = "streamk:dp-same-tile"
STREAMED = ("stream_k", "split_k", "hybrid_first", "hybrid_last", "hybrid_aligned")
SCHEDULES = ("data_parallel", *STREAMED)
# What the cost model chooses from where a schedule takes a number of splits; 1 of hybrid_aligned: the kernel's choice.
_SPLITS = {"split_k": (2, 3, 4, 6, 8, 12, 16, 32), "hybrid_aligned": (1, 2, 3, 4, 5, 6, 7, 8)}

_CLUSTERS = ("2x1", "1x2", "1x1")
_HOPPER = tuple(
    f"{tile}/{cluster}"
    for tile in ("128x256x64", "256x128x64", "256x192x64", "128x192x64", "128x128x64", "192x192x64")
    for cluster in _CLUSTERS
)

# Tiles by kernel, for --tiles; those of the Hopper kernel with their clusters. Not those whose CTAs take whole ones, of
# which there are over a thousand.
TILES = {
    "hopper": _HOPPER,
    "portable": ("128x256x32", "128x128x32", "64x64x32"),
    "cpu": ("256x256x128", "128x128x128", "64x64x128", "32x256x128", "16x64x128"),
}


def tile_variants(tiles: Sequence[str]) -> list[str]:
    """Names of the variants that force every schedule on each of the tiles."""
    return [f"streamk:{schedule}@{tile}" for tile in tiles for schedule in SCHEDULES]


def waves_of_whole_tiles(plan: Mapping[str, Any]) -> float:
    """CTAs of such a plan, which has a worker for every tile, over multiprocessors (0: those of an H100)."""
    return float(plan["tiles"] * math.prod(plan["cluster"])) / float(plan["multiprocessors"] or 132)


@dataclass(frozen=True)
class Request:
    """What streamk_gemm is told: schedule, splits of every tile, tile ("" for any)."""

    schedule: str = "auto"
    splits: int = 1
    tile: str = ""


class Planner:
    """Plans of one product on one device.

    Args:
        m, n, k: of the product.
        device: "cpu", "sm80", "sm90" (the Hopper kernel) or "sm90-portable", as torch.ops.tpkernels.streamk_plan
            takes it.
        multiprocessors: of the GPU; 0 on the CPU, where a plan has a worker for each thread.
        dtype: of the operands, where plans of the portable kernel depend on it ("float64"); "" for 16 bits.
    """

    def __init__(
        self, m: int, n: int, k: int, device: str, multiprocessors: int = 0, dtype: str = ""
    ) -> None:
        self.size, self.device, self.multiprocessors = (m, n, k), device, multiprocessors
        self._more = {"dtype": dtype} if dtype else {}
        self.batch = 1
        self.group_sizes: tuple[int, ...] = ()  # of a grouped product; m is their sum
        self.gated = False  # in one call; n is that of the output
        self._plans: dict[tuple[Request, tuple[int, int, int]], dict[str, Any]] = {}

    @classmethod
    def of(
        cls, m: int, n: int, k: int, device: torch.device, *, aligned: bool = True, dtype: str = ""
    ) -> Planner:
        """For a device that is here. ``aligned``: TMA can load the operands, which the Hopper kernel needs.

        ``dtype``: of operands that are not of 16 bits, which the portable kernel takes.
        """
        import torch

        from tpkernels import _extensions

        if device.type != "cuda":
            return cls(m, n, k, "cpu")
        properties = torch.cuda.get_device_properties(device)
        hopper = properties.major == 9 and aligned and not dtype and _extensions.is_loaded("_C_sm90a")
        architecture = "sm80" if properties.major == 8 else "sm90" if hopper else "sm90-portable"
        return cls(m, n, k, architecture, properties.multi_processor_count, dtype)

    def plan(self, request: Request, size: tuple[int, int, int] | None = None) -> dict[str, Any]:
        """What the kernel makes of a request; ``size`` in place of the product's.

        Raises:
            Skip: it does not take the schedule or the tile; the reason is its sentence.
        """
        key = (request, size or self.size)
        if key not in self._plans:
            self._plans[key] = self._ask(*key)
        return self._plans[key]

    def _ask(self, request: Request, size: tuple[int, int, int]) -> dict[str, Any]:
        import torch

        import tpkernels  # noqa: F401  (loads the ops)

        own = size == self.size
        try:
            kind, numbers, predicted_us = torch.ops.tpkernels.streamk_plan(
                self.batch if own else 1,
                *size,
                self.device,
                request.schedule,
                0,
                request.splits,
                self.multiprocessors,
                request.tile,
                **self._more,
                **({"group_sizes": self.group_sizes} if own and self.group_sizes else {}),
                **({"gated": True} if self.gated else {}),
            )
        except RuntimeError as error:
            raise Skip(str(error).strip().partition("\n")[0]) from None
        bm, bn, bk, tiles, k_iters, workers, splits, partial_tiles, *cluster, whole = numbers
        return {
            "schedule": kind,
            "tile": [bm, bn, bk],
            "suffix": ("", "s", "w")[whole],  # of the tile's name: whole tiles, swapped or not
            "cluster": cluster if cluster[2] > 1 else cluster[:2],
            "tiles": tiles,
            "k_iters": k_iters,
            "workers": workers,
            "splits": splits,
            "partial_tiles": partial_tiles,
            "predicted_us": predicted_us,
            "multiprocessors": self.multiprocessors,
        }

    def tile_name(self, request: Request) -> str:
        """Name of the tile that a request gets, as the kernel takes it: "128x256x64/2x1" where there are clusters."""
        plan = self.plan(request)
        tile, cluster = ("x".join(map(str, plan[name])) for name in ("tile", "cluster"))
        return f"{tile}{plan['suffix']}/{cluster}" if self.device == "sm90" else tile

    def request(self, variant: str) -> Request:
        """What a variant of ours asks for.

        Raises:
            Skip: the kernel does not take it, or makes a streamed schedule data-parallel: there is nothing to stream,
                or K is too short.
        """
        if variant == "streamk":
            return Request()
        schedule, _, tile = variant.removeprefix("streamk:").partition("@")
        if schedule == "streamk":
            return Request("auto", 1, tile)
        if schedule == "data_parallel":
            return Request(schedule, 1, tile or self.tile_name(Request(schedule)))
        tile = tile or self.tile_name(Request())
        if variant == SAME_TILE:
            return Request("data_parallel", 1, tile)
        requests = [Request(schedule, splits, tile) for splits in _SPLITS.get(schedule, (1,))]
        plans = {request: self.plan(request) for request in requests}
        streamed = [request for request in requests if plans[request]["partial_tiles"] > 0]
        if not streamed:
            plan = plans[requests[0]]
            why = f"{plan['tiles']} tiles of {plan['k_iters']} iterations of K"
            raise Skip(f"{schedule} is data-parallel here: nothing to stream among {why}")
        return min(streamed, key=lambda request: float(plans[request]["predicted_us"]))

    def waves(self, request: Request) -> float:
        """Tiles of a plan over those that the device computes at once; the fraction is how full the last wave is.

        Of whole tiles: :func:`waves_of_whole_tiles`.
        """
        plan = self.plan(request)
        if plan["suffix"]:
            return waves_of_whole_tiles(plan)
        (bm, bn, bk), (cluster_m, cluster_n, *_) = plan["tile"], plan["cluster"]
        # Other plans may have fewer workers than run at once, or more; a data-parallel one of very many tiles has not.
        whole = Request("data_parallel", 1, self.tile_name(request))
        large = self.plan(whole, (cluster_m * bm << 10, cluster_n * bn << 10, bk))
        return float(plan["tiles"]) / float(large["workers"])

    def extra(self, request: Request) -> dict[str, Any]:
        """For the row: the plan with its tile's name, and waves."""
        return {
            "plan": {**self.plan(request), "tile_name": self.tile_name(request)},
            "waves": self.waves(request),
        }
