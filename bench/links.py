"""Constants of the model of schedules: what ``bench link`` measured of a card, and what ``bench gemm`` did. Pure.

Results that have rows of ``bench link`` for the number of ranks bring their own; others take those of :data:`MEASURED`.
Nothing here comes from a fused operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .records import Results
from .schedules import TILE, WORKERS, Costs, Link

__all__ = ["COSTS", "MEASURED", "Constants", "links_of"]

# One tile of 128 x 256 x 64: the Hopper kernel's cost model (csrc/kernels/sm90a/cost.hpp), which `bench fit` fitted to
# `bench gemm --tiles`.
COSTS = Costs(iteration=0.72, epilogue=1.62, write=0.198, add=1.26)


@dataclass(frozen=True)
class Constants:
    """Of ``bench link``'s row of constants, under its names; ``source`` says where they were measured."""

    copy_engine_gbps: float
    copy_engine_overhead_us: float
    flag_cost_us: float
    flag_round_trip_us: float
    hbm_gbps: float
    source: str

    @property
    def link(self) -> Link:
        """A flag is one way; a tile of a peer is read at a multiprocessor's share of the memory."""
        one_way = self.flag_round_trip_us / 2
        return Link(
            rate=self.copy_engine_gbps * 1e3,
            copy=self.copy_engine_overhead_us + self.flag_cost_us,
            start=one_way,
            seen=one_way,
            add=TILE[0] * TILE[1] * 2 / (self.hbm_gbps * 1e3 / WORKERS),
        )


_H200_X2 = Constants(379.8404, 2.6347, 2.2687, 3.0491, 4010.33, "two NVIDIA H200")
_H100_X4 = Constants(381.4289, 2.6705, 1.9465, 4.8346, 2888.0487, "four NVIDIA H100")

# By card and ranks: bench/results/2026-11-28_h200x2.jsonl and 2026-11-28_h100x4.jsonl. `bench link` has not run on four
# H200: their links are of the same generation as the H100's, whose constants stand for them, their memory is their own.
MEASURED = {
    ("NVIDIA H200", 2): _H200_X2,
    ("NVIDIA H100 80GB HBM3", 4): _H100_X4,
    ("NVIDIA H200", 4): Constants(
        _H100_X4.copy_engine_gbps,
        _H100_X4.copy_engine_overhead_us,
        _H100_X4.flag_cost_us,
        _H100_X4.flag_round_trip_us,
        _H200_X2.hbm_gbps,
        "four NVIDIA H100, whose links are alike",
    ),
}
_NAMES = ("copy_engine_gbps", "copy_engine_overhead_us", "flag_cost_us", "flag_round_trip_us", "hbm_gbps")


def links_of(results: Results) -> Mapping[int, Constants]:
    """By ranks, for results of one card; none for cards whose product and link nobody measured."""
    cards = {str(header.env.get("gpu")) for header in results.headers}
    known = {card for card, _ in MEASURED}
    if not cards or not cards <= known:
        return {}
    found = {world: c for (card, world), c in MEASURED.items() if card in cards}
    for row in results.latest():
        if row.suite == "link" and row.op == "constants" and row.status == "ok":
            gbps, overhead, flag, round_trip, hbm = (float(row.extra.get(name) or 0) for name in _NAMES)
            if min(gbps, round_trip, hbm) > 0:
                found[row.world] = Constants(gbps, overhead, flag, round_trip, hbm, "these GPUs")
    return found
