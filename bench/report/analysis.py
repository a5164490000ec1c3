"""What the numbers mean: ratios, noise floors, exposed communication, percentiles. Pure functions over rows.

One convention everywhere: a *speed-up* is the baseline's time over a variant's time, so above 1 the variant is faster.
Rows with a wrong result, or of another precision, have no speed-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..records import Results, Row, Stats, geomean
from ..suites.gemm_planner import waves_of_whole_tiles

__all__ = [
    "BASELINES",
    "SUITES",
    "Exposed",
    "Group",
    "Noise",
    "Spread",
    "by_card",
    "constant",
    "forward_backward",
    "group_cases",
    "intensity",
    "noise_floor",
    "percentile",
    "spread",
    "stream_k_gain",
    "waves",
    "within",
]

SUITES = ("link", "gemm", "sweep", "quantize", "overlap", "layer", "train")

# The variant that ratios refer to, the first that was measured; otherwise the first peer.
BASELINES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("cublas", "blas"),
    "sweep": ("cublas", "blas"),
    "quantize": ("torch",),
    "overlap": ("nccl+cublas", "gloo+blas"),
    "layer": ("nccl+cublas", "gloo+blas"),
    "train": ("nccl+cublas", "gloo+blas"),
}
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile, 0 <= q <= 100, linear between neighbours; nan for none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Spread:
    """How a set of speed-ups is spread."""

    n: int
    geomean: float
    p5: float
    p50: float
    p95: float
    min: float
    max: float
    wins: int  # how many are at least 1

    @property
    def share_won(self) -> float:
        """Fraction of the set that is at least as fast as the baseline."""
        return self.wins / self.n


def spread(values: Iterable[float]) -> Spread | None:
    """Geometric mean, percentiles and extremes of positive numbers; None for none."""
    v = list(values)
    if not v:
        return None
    return Spread(
        len(v),
        geomean(v),
        percentile(v, 5),
        percentile(v, 50),
        percentile(v, 95),
        min(v),
        max(v),
        sum(x >= 1 for x in v),
    )


@dataclass(frozen=True)
class Exposed:
    """Communication that a fused operation does not hide. Times in us.

    Attributes:
        exposed: t_fused - t_gemm; negative where the fused operation beats the plain GEMM.
        hidden: 1 - exposed / t_comm, nan if the communication alone was not measured.
    """

    exposed: float
    hidden: float


@dataclass(frozen=True)
class Group:
    """All variants of one case, for one dtype and world."""

    suite: str
    case: str
    dtype: str
    world: int
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def first(self) -> Row:
        """Any row, for what they share: op, params, shape_set."""
        return next(iter(self.rows.values()))

    @property
    def baseline_name(self) -> str:
        """Name of the variant that ratios refer to, "" if there is none."""
        for name in BASELINES.get(self.suite, ()):
            if name in self.rows:
                return name
        return next((v for v, row in self.rows.items() if row.role == "peer" and not is_foreign(row)), "")

    @property
    def baseline(self) -> Row | None:
        """The baseline if its result was right and it was timed."""
        return self.timed(self.baseline_name)

    def timed(self, variant: str) -> Row | None:
        """The row of a variant whose result was right and that was timed."""
        row = self.rows.get(variant)
        return row if row is not None and row.status == "ok" and row.best is not None else None

    def of_role(self, role: str) -> list[Row]:
        """Rows of one role, whatever their status."""
        return [row for row in self.rows.values() if row.role == role]

    @property
    def ours(self) -> Row | None:
        """The row that stands for us: what ``auto`` takes if that was tried, whatever its status, else our fastest."""
        for name in ("streamk", "ours"):
            if name in self.rows and self.rows[name].role == "ours":
                return self.rows[name]
        timed = [row for row in self.of_role("ours") if self.timed(row.variant)]
        return min(timed, key=lambda row: self._time(row), default=None)

    @property
    def best_peer(self) -> Row | None:
        """The fastest peer by speed-up over the baseline; may be the baseline."""
        peers = [(self.speedup(row), row) for row in self.of_role("peer")]
        return max(((s, row) for s, row in peers if s), key=lambda pair: pair[0], default=(0.0, None))[1]

    def speedup(self, row: Row | None) -> float | None:
        """Baseline time / this row's time; None if one is missing, wrong, or of another precision.

        The baseline is the one that was measured in the same processes where the row says so (``extra["baseline_us"]``
        and ``["baseline_host_us"]``), else that of this group. Device time is compared with device time; a row that was
        only launched from the host with the host-launched baseline.
        """
        if row is None or row.status != "ok" or row.role == "noise" or is_foreign(row):
            return None
        name = "us" if row.us is not None else "host_us"
        own: Stats | None = getattr(row, name)
        base = _number(row.extra.get(f"baseline_{name}"))
        if base is None and "baseline_error" not in row.extra and self.baseline:
            stats: Stats | None = getattr(self.baseline, name)
            base = stats.p50 if stats else None
        return base / own.p50 if base and own and own.p50 > 0 else None

    def against(self, row: Row | None, other: Row | None) -> float | None:
        """How many times as fast ``row`` is as ``other``, by their speed-ups over the baseline."""
        a, b = self.speedup(row), self.speedup(other)
        return a / b if a and b else None

    def exposed(self, row: Row | None) -> Exposed | None:
        """Effective communication time of a fused row, from the parts "gemm" and "comm" of this case."""
        if row is None or row.status != "ok" or is_foreign(row):
            return None
        clock: Callable[[Row], Stats | None] = (lambda r: r.us) if row.us else (lambda r: r.host_us)
        gemm, comm, own = self.timed("gemm"), self.timed("comm"), clock(row)
        t_gemm = clock(gemm) if gemm else None
        t_comm = clock(comm) if comm else None
        if own is None or t_gemm is None:
            return None
        extra = own.p50 - t_gemm.p50
        return Exposed(extra, 1 - extra / t_comm.p50 if t_comm and t_comm.p50 > 0 else math.nan)

    def across_runs(self, row: Row | None) -> bool:
        """True if a row's ratio mixes two runs, whose clocks may have differed."""
        if row is None or self.baseline is None or row.run == self.baseline.run:
            return False
        return not ({"baseline_us", "baseline_host_us"} & row.extra.keys())

    @staticmethod
    def _time(row: Row) -> float:
        return row.best.p50 if row.best else math.inf


def is_foreign(row: Row) -> bool:
    """True for a row of another precision than its case: shown as a reference, never in a ratio."""
    return row.variant.endswith("-fp8")


def group_cases(rows: Iterable[Row], suite: str) -> list[Group]:
    """The suite's rows by (case, dtype, world), in the order in which they were first measured."""
    groups: dict[tuple[str, str, int], Group] = {}
    for row in rows:
        if row.suite == suite:
            key = (row.case, row.dtype, row.world)
            groups.setdefault(key, Group(suite, *key)).rows[row.variant] = row
    return list(groups.values())


@dataclass(frozen=True)
class Noise:
    """``floor``: relative difference that means nothing; ``n``: repeated measurements that it was found from."""

    floor: float
    n: int


def noise_floor(groups: Iterable[Group]) -> Noise | None:
    """95th percentile of the relative difference, the larger way round, between a variant and itself measured again.

    None if nothing was measured twice.
    """
    off = []
    for group in groups:
        for row in group.of_role("noise"):
            again, first = group.timed(row.variant), group.timed(row.partner)
            if again and first and again.best and first.best and min(again.best.p50, first.best.p50) > 0:
                ratio = again.best.p50 / first.best.p50
                off.append(max(ratio, 1 / ratio) - 1)
    return Noise(percentile(off, 95), len(off)) if off else None


def within(ratio: float, noise: Noise | None) -> bool:
    """True if a ratio cannot be told from 1."""
    return noise is not None and max(ratio, 1 / ratio) - 1 <= noise.floor


# --- gemm ----------------------------------------------------------------------------------------------------


def intensity(row: Row) -> float | None:
    """Arithmetic intensity in flop/byte: from the row, else from m, n, k with every matrix moved once."""
    if row.flops and row.bytes:
        return row.flops / row.bytes
    m, n, k = (row.params.get(name) for name in "mnk")
    if not (m and n and k) or row.dtype not in _ITEM_BYTES:
        return None
    return float(2 * m * n * k / (_ITEM_BYTES[row.dtype] * (m * k + k * n + m * n)))


def plan_of(row: Row | None) -> dict[str, Any]:
    """``extra["plan"]`` of a row, {} if it has none."""
    plan = row.extra.get("plan") if row is not None else None
    return plan if isinstance(plan, dict) else {}


def waves(row: Row | None) -> float | None:
    """Output tiles for each that is computed at once; its fraction is how full the last wave is.

    ``extra["waves"]``, or else tiles over workers, except for split-K, whose workers take turns; of whole tiles what
    their plan tells, since results of before December 2026 have tiles over workers there, too.
    """
    plan = plan_of(row)
    if plan.get("suffix"):
        return waves_of_whole_tiles(plan)
    value = _number(row.extra.get("waves")) if row is not None else None
    if value is None and plan.get("workers") and plan.get("schedule") != "split_k":
        value = plan["tiles"] / plan["workers"]
    return value or None


def stream_k_gain(group: Group) -> float | None:
    """Time of the data-parallel schedule over that of ``auto``, both with the same tile."""
    plain, ours = group.timed("streamk:dp-same-tile"), group.timed("streamk")
    if not plain or not ours or not plain.us or not ours.us or ours.us.p50 <= 0:
        return None
    return plain.us.p50 / ours.us.p50


# --- layer --------------------------------------------------------------------------------------------------


def forward_backward(row: Row) -> tuple[float | None, float | None]:
    """Times of the two passes in us; backward is what is left of both where only forward was timed alone."""
    if row.status != "ok":
        return None, None
    forward, backward = _number(row.extra.get("forward_us")), _number(row.extra.get("backward_us"))
    if backward is None and forward is not None and row.best and row.best.p50 > forward:
        backward = row.best.p50 - forward
    return forward, backward


# --- machines ------------------------------------------------------------------------------------------------


def by_card(results: Results) -> dict[str, Results]:
    """Results of each card by itself: a ratio never mixes two."""
    from .provenance import card

    parts: dict[str, Results] = {}
    card_of_run = {h.run: card(h.env) for h in results.headers}
    for header in results.headers:
        parts.setdefault(card_of_run[header.run], Results()).headers.append(header)
    for row in results.rows:
        parts.setdefault(card_of_run.get(row.run, ""), Results()).rows.append(row)
    for footer in results.footers:
        parts.setdefault(card_of_run.get(footer.run, ""), Results()).footers.append(footer)
    return parts


def constant(rows: Sequence[Row], name: str) -> float | None:
    """A fitted constant from the link suite's row of constants, None if it was not measured."""
    for row in reversed(rows):
        if row.suite == "link" and row.op == "constants" and row.status == "ok":
            value = _number(row.extra.get(name))
            if value:
                return value
    return None


def _number(value: object) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("p50")
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
