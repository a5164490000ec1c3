"""What the rows of the sweep say: ratios by shape, their statistics, classes of shapes, the cost model. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..bars import SWEEP_BARS, SWEEP_SEED, SWEEP_SHAPES, SweepBar
from ..records import Row, geomean
from ..suites.gemm import ITEM_BYTES
from ..suites.gemm_shapes import sweep
from .analysis import Group, constant, intensity, percentile, plan_of, waves

__all__ = [
    "CLASSES",
    "COMPUTE_BOUND",
    "Bars",
    "ModelError",
    "Statistics",
    "Verdict",
    "bars_of",
    "classes",
    "is_compute_bound",
    "model_error",
    "plan_text",
    "predicted_us",
    "ratios",
    "regrets",
    "roofs",
]

OURS, AUTO, SAME_TILE = "streamk", "auto", "streamk:dp-same-tile"
Verdict = Literal["holds", "missed", "incomplete"]

# Flop/byte beyond which the paper calls a product compute-bound, for 16 and for 64 bits.
COMPUTE_BOUND = {"bfloat16": 400.0, "float16": 400.0, "float64": 150.0, "float32": 150.0}


def is_compute_bound(group: Group) -> bool:
    """By the paper's limits."""
    return (intensity(group.first) or 0.0) > COMPUTE_BOUND.get(group.dtype, math.inf)


# --- ratios --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """Of ratios; ``average`` and ``deviation`` are arithmetic, as the paper has them."""

    n: int
    geomean: float
    average: float
    deviation: float
    p5: float
    median: float
    p95: float
    min: float
    max: float
    won: float  # fraction that is at least 1

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistics | None:
        """None for none."""
        if not values:
            return None
        p5, median, p95 = (percentile(values, q) for q in (5, 50, 95))
        won = sum(v >= 1 for v in values) / len(values)
        average, deviation = statistics.fmean(values), statistics.pstdev(values)
        return cls(
            len(values), geomean(values), average, deviation, p5, median, p95, min(values), max(values), won
        )


def ratio(group: Group, ours: str, against: str) -> float | None:
    """Time of cuBLAS ("cublas"), or of the data-parallel schedule ("same tile"), over that of a variant of ours."""
    row = group.timed(ours)
    if against == "cublas":
        return group.speedup(row)
    other = group.timed(SAME_TILE)
    return other.us.p50 / row.us.p50 if row and other and row.us and other.us and row.us.p50 > 0 else None


def ratios(groups: Sequence[Group], ours: str, against: str) -> list[tuple[Group, float]]:
    """Those there are."""
    return [(g, value) for g in groups if (value := ratio(g, ours, against))]


# --- bars ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bars:
    """One bar: the statistic of the shapes of the sample that were measured right, and how many of them are not."""

    bar: SweepBar
    value: float | None
    n: int
    missing: int
    wrong: int
    at: str = ""  # the shape of a minimum or maximum

    @property
    def verdict(self) -> Verdict:
        """A wrong result, or a shape below a minimum, misses it whatever else is still to be measured."""
        below = self.value is not None and self.value < self.bar.least
        if self.wrong or (below and (self.bar.statistic == "min" or not self.missing)):
            return "missed"
        return "incomplete" if self.missing or self.value is None else "holds"


def bars_of(groups: Sequence[Group]) -> list[Bars]:
    """Of groups of one dtype; [] where none of them is of the sample."""
    sample = {shape.name for shape in sweep(SWEEP_SHAPES, SWEEP_SEED)}
    there = [g for g in groups if g.case in sample]
    if not there:
        return []
    found = []
    for bar in SWEEP_BARS:
        values = ratios(there, bar.ours, bar.against)
        wrong = sum(g.rows[bar.ours].status not in ("ok", "skipped") for g in there if bar.ours in g.rows)
        stats = Statistics.of([v for _, v in values])
        at = ""
        if stats and bar.statistic in ("min", "max"):
            pick = min if bar.statistic == "min" else max
            at = pick(values, key=lambda pair: pair[1])[0].case
        value = getattr(stats, bar.statistic) if stats else None
        found.append(Bars(bar, value, len(values), len(sample) - len(values), wrong, at))
    return found


# --- classes of shapes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classes:
    """A way to sort shapes: by a figure, between ``edges``."""

    title: str
    figure: Callable[[Group], float | None]
    edges: tuple[float, ...]

    def name(self, i: int) -> str:
        """Of the i-th class."""
        if i == 0:
            return f"below {self.edges[0]:g}"
        if i == len(self.edges):
            return f"{self.edges[-1]:g} and more"
        return f"{self.edges[i - 1]:g} to {self.edges[i]:g}"


def _baseline_us(group: Group) -> float | None:
    row = group.baseline
    return row.us.p50 if row and row.us else None


def _row_alignment(group: Group) -> float | None:
    """Up to 128. K is contiguous in both operands; what is not a whole line of the L2 takes more of them."""
    k, item = int(group.first.params.get("k") or 0), ITEM_BYTES.get(group.dtype)
    return float(math.gcd(k * item, 128)) if item else None


CLASSES = {
    "intensity": Classes(
        "arithmetic intensity, flop/byte", lambda g: intensity(g.first), (64, 128, 256, 512, 1024)
    ),
    "waves": Classes("waves of our plan's tiles", lambda g: waves(g.rows.get(OURS)), (0.25, 0.5, 1, 2, 4, 8)),
    "time": Classes("time of the baseline, us", _baseline_us, (6, 8, 12, 20, 50, 200)),
    "rows": Classes("bytes that rows of operands are a multiple of", _row_alignment, (32, 64, 128)),
    "k": Classes("K", lambda g: float(g.first.params.get("k") or 0), (256, 512, 1024, 2048, 4096)),
}


def classes(groups: Sequence[Group], by: Classes) -> list[tuple[str, list[Group]]]:
    """Groups by class, in ascending order, without the empty ones."""
    found: list[list[Group]] = [[] for _ in range(len(by.edges) + 1)]
    for group in groups:
        value = by.figure(group)
        if value is not None:
            found[sum(value >= edge for edge in by.edges)].append(group)
    return [(by.name(i), part) for i, part in enumerate(found) if part]


def plan_text(row: Row | None) -> str:
    """Schedule and tile of a plan, "" without one."""
    plan = plan_of(row)
    if not plan:
        return ""
    tile = str(plan.get("tile_name") or "").replace("x", "×")
    splits = plan.get("splits") or 1
    return f"{plan.get('schedule', '?')} {tile}" + (f", {splits} splits" if splits > 1 else "")


# --- the cost model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelError:
    """Of predicted times: median and 90th percentile of ``max(p / t, t / p) - 1``; ``bias``: median of p / t."""

    n: int
    median: float
    p90: float
    bias: float


def predicted_us(row: Row | None) -> float | None:
    """What the cost model said of the plan of a row that is right and was timed."""
    value = plan_of(row).get("predicted_us")
    return float(value) if value and row and row.status == "ok" and row.us else None


def model_error(rows: Sequence[Row]) -> ModelError | None:
    """None where no row has a prediction."""
    told = [p / row.us.p50 for row in rows if (p := predicted_us(row)) and row.us]
    if not told:
        return None
    off = [max(t, 1 / t) - 1 for t in told]
    return ModelError(len(told), percentile(off, 50), percentile(off, 90), percentile(told, 50))


def regrets(groups: Sequence[Group]) -> list[tuple[Group, float, Row]]:
    """Of shapes measured on several tiles: time of the planner's choice over the fastest's, and that row."""
    found = []
    for group in groups:
        forced = [
            row for row in group.of_role("ours") if "@" in row.variant and row.status == "ok" and row.us
        ]
        chosen = group.timed(OURS)
        if chosen and chosen.us and forced:
            best = min([chosen, *forced], key=lambda row: row.us.p50 if row.us else math.inf)
            assert best.us is not None
            found.append((group, chosen.us.p50 / best.us.p50, best))
    return found


def roofs(groups: Sequence[Group], rows: Sequence[Row]) -> tuple[float, float, bool]:
    """TFLOP/s of the matrix units, TFLOP/s for each flop/byte of memory, and whether the link suite measured them.

    Where it did not, the highest and the steepest of the shapes themselves.
    """
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(groups[0].dtype, groups[0].dtype)
    peak, hbm = constant(rows, f"peak_tflops_{short}"), constant(rows, "hbm_gbps")
    told = [
        (row.tflops, x)
        for g in groups
        for row in g.rows.values()
        if row.status == "ok" and row.tflops and (x := intensity(row))
    ]
    top = peak or max(t for t, _ in told)
    return top, hbm / 1000 if hbm else max(t / x for t, x in told), bool(peak and hbm)
