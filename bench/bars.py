"""Bars: the speeds that our kernels are to reach on H100 and H200. The only place where they stand.

Of the gemm suite, :data:`BARS`. A ratio is the other's time over ours, so above 1 ours is faster. What ours is compared
with:

``cublas``
    cuBLAS on the same product; with an epilogue, torch's operations one after another.
``data-parallel``
    our own kernel with whole tiles only, with the tile that is best for that.
``TN``
    ours with the same product where K is contiguous in both operands (for the other three layouts).
``plain``
    ours without the epilogue, with as many columns of the weight in all.

Of the sweep, :data:`SWEEP_BARS`: statistics of the ratios of all shapes.

Of the overlap suite, :data:`OVERLAP_BARS`: the time of ours over what the best schedule could take
(:mod:`bench.schedules`); and :data:`PEER_BARS`: beside other implementations, and beside the product alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BARS",
    "COMPUTE_BOUND",
    "OVERLAP_BARS",
    "PEER_BARS",
    "SWEEP_BARS",
    "SWEEP_SEED",
    "SWEEP_SHAPES",
    "Against",
    "Bar",
    "OverlapBar",
    "PeerBar",
    "SweepBar",
]

Against = Literal["cublas", "data-parallel", "TN", "plain"]


@dataclass(frozen=True)
class Bar:
    """``each``: what every shape of the set is to reach; ``mean``: what their geometric mean is to reach; 0 for none.

    ``op``: of the set's cases those with this operation.
    """

    shape_set: str
    op: str
    against: Against
    each: float = 0.0
    mean: float = 0.0


_AT_MOST_3_PERCENT = 1 / 1.03  # more time than the plain product
_WITHIN_5_PERCENT = 1 / 1.05

BARS = (
    Bar("large", "matmul", "cublas", each=0.95, mean=1.00),
    Bar("waves", "matmul", "cublas", mean=1.05),
    Bar("waves", "matmul", "data-parallel", mean=1.15),
    Bar("long-k", "matmul", "cublas", mean=0.97),
    Bar("measured", "matmul", "cublas", mean=1.00),
    Bar("transposes", "layouts", "TN", each=_WITHIN_5_PERCENT),
    Bar("epilogues", "bias_gelu", "plain", each=_AT_MOST_3_PERCENT),
    Bar("epilogues", "bias_silu", "plain", each=_AT_MOST_3_PERCENT),
    Bar("epilogues", "swiglu", "plain", each=_AT_MOST_3_PERCENT),
    Bar("epilogues", "swiglu", "cublas", each=1.1),
    Bar("epilogues", "accumulate", "plain", each=_AT_MOST_3_PERCENT),
)


@dataclass(frozen=True)
class OverlapBar:
    """``most``: times the best schedule, what every shape of the set with this operation (AG, RS) may take at most.

    But those that are bound by arithmetic (:data:`COMPUTE_BOUND`): they are compared with the product alone.
    """

    shape_set: str
    op: str
    most: float


# Label and rows over all ranks.
COMPUTE_BOUND = frozenset({("gpt3", 8192), ("llama70b", 8192)})

OVERLAP_BARS = (
    OverlapBar("measured", "AG", 1.10),
    OverlapBar("measured", "RS", 1.10),
)


@dataclass(frozen=True)
class PeerBar:
    """What the shapes of the set ``measured`` with this operation (AG, RS, AR) are to reach.

    ``against``: "baseline" is NCCL + cuBLAS, "best peer" the fastest of the run; a ratio is the other's time over ours.
    "product" is torch.mm of the same case alone, and the ratio is our time over its. "hidden" is the part of the
    baseline's effective communication time (its time without the product's) that ours does not take.

    ``each`` is for every shape: at least, but at most for "product". ``mean``: what the geometric mean is to reach, and
    with two ranks ``mean_of_two``; 0 for none.

    Of these shapes only ``rows`` (least, most), ``label`` ("" for all; "x" is also "x y"), and, if ``compute_bound``,
    :data:`COMPUTE_BOUND`.
    """

    op: Literal["AG", "RS", "AR"]
    against: Literal["baseline", "best peer", "product", "hidden"]
    each: float
    mean: float = 0.0
    mean_of_two: float = 0.0
    rows: tuple[int, int] = (1, 1 << 31)
    label: str = ""
    compute_bound: bool = False

    def least_mean(self, world: int) -> float:
        """The bar of the geometric mean, 0 for none."""
        return self.mean_of_two or self.mean if world == 2 else self.mean


PEER_BARS = (
    PeerBar("AG", "product", 1.07, compute_bound=True),
    PeerBar("RS", "product", 1.07, compute_bound=True),
    PeerBar("AG", "hidden", 0.90, compute_bound=True),
    PeerBar("RS", "hidden", 0.90, compute_bound=True),
    PeerBar("AG", "baseline", 1.15, mean=1.45, mean_of_two=1.35, rows=(2048, 1 << 31)),
    PeerBar("RS", "baseline", 1.15, mean=1.45, mean_of_two=1.35, rows=(2048, 1 << 31)),
    PeerBar("AR", "baseline", 1.15, mean=1.45, mean_of_two=1.35, rows=(2048, 1 << 31)),
    PeerBar("AG", "best peer", 0.98, mean=1.10, mean_of_two=1.03),
    PeerBar("RS", "best peer", 0.98, mean=1.40),
    PeerBar("AG", "baseline", 1.00, rows=(128, 1024)),
    PeerBar("RS", "baseline", 1.00, rows=(128, 1024)),
    PeerBar("AR", "baseline", 1.00, rows=(128, 1024)),
    PeerBar("AR", "baseline", 1.20, rows=(1, 256), label="llama70b"),
)


@dataclass(frozen=True)
class SweepBar:
    """``least``: what a statistic of the ratios of all sampled shapes is to reach.

    ``ours``: the variant; ``against``: cuBLAS, or our data-parallel schedule with the same tile.
    """

    ours: Literal["streamk", "auto"]
    against: Literal["cublas", "same tile"]
    statistic: Literal["geomean", "p5", "average", "min", "max"]
    least: float


# The sample: gemm_shapes.sweep(SWEEP_SHAPES, SWEEP_SEED).
SWEEP_SHAPES = 1000
SWEEP_SEED = 0

SWEEP_BARS = (
    SweepBar("streamk", "cublas", "geomean", 1.00),
    SweepBar("streamk", "cublas", "p5", 0.85),
    SweepBar("auto", "cublas", "min", 0.97),
    SweepBar("streamk", "same tile", "average", 1.20),
    SweepBar("streamk", "same tile", "max", 4.00),
)
