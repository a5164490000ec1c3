"""Which bars of the gemm suite (:mod:`bench.bars`) hold: one table for each dtype.

A line says how ours compares with one other thing over a set of shapes. A bar holds if every shape of its set was
measured, with right results, and the numbers reach it; while shapes are missing it is incomplete, unless one that is
there misses it already. A shape whose result was wrong, or that crashed, misses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..bars import BARS, Against, Bar
from ..records import Row, geomean
from ..suites.gemm_shapes import BAR_SETS, BLAS_LAYOUTS, EPILOGUES, LAYOUTS, SETS, Wanted
from .analysis import Group, Noise, group_cases, noise_floor, within
from .table import DASH, Cell, Column, Table
from .tables_gemm import describe_noise, split

__all__ = ["Line", "Ratio", "Verdict", "bars_tables", "bars_text", "lines", "verdict_cell"]

OURS = "streamk"
DATA_PARALLEL = "streamk:data_parallel"
PLAIN = "streamk:plain"
Verdict = Literal["holds", "missed", "incomplete", ""]


@dataclass(frozen=True)
class Ratio:
    """Of one shape; ``value``: None where ours or the other has no time or a wrong result."""

    name: str
    value: float | None
    lost: bool = False  # ours went wrong


@dataclass
class Line:
    """One set and operation against one other thing. ``missing``: shapes of the bar's set that were not measured."""

    shape_set: str
    op: str
    against: Against
    ratios: list[Ratio] = field(default_factory=list)
    missing: int = 0
    bar: Bar | None = None

    @property
    def values(self) -> list[float]:
        """Those there are."""
        return [r.value for r in self.ratios if r.value is not None]

    @property
    def worst(self) -> Ratio | None:
        """The shape with the lowest ratio; one that went wrong is worse than any."""
        lost = next((r for r in self.ratios if r.lost), None)
        return lost or min(
            (r for r in self.ratios if r.value is not None), key=lambda r: r.value or 0.0, default=None
        )

    @property
    def verdict(self) -> Verdict:
        """See the module; "" without a bar."""
        if self.bar is None:
            return ""
        values = self.values
        if any(r.lost for r in self.ratios) or any(v < self.bar.each for v in values):
            return "missed"
        if self.missing or len(values) < len(self.ratios) or not values:
            return "incomplete"
        return "holds" if geomean(values) >= self.bar.mean else "missed"


def lines(groups: Sequence[Group]) -> list[Line]:
    """Of groups of one dtype, the sets with bars first, each in the order of :data:`BARS`, then what has none."""
    found: list[Line] = []
    for bar in BARS:
        of_set = [g for g in groups if (g.first.shape_set, g.first.op) == (bar.shape_set, bar.op)]
        wanted = _sizes(bar)
        there = [g for g in of_set if _size(g) in wanted]
        if there:
            line = _line(bar.shape_set, bar.op, bar.against, there, bar)
            line.missing = (len(wanted) - len(there)) * (len(BLAS_LAYOUTS) - 1 if bar.against == "TN" else 1)
            found.append(line)
    known = {(line.shape_set, line.op, line.against) for line in found}
    for (shape_set, op), of_set in _by_set(groups).items():
        for against in _comparisons(op):
            if (shape_set, op, against) not in known:
                line = _line(shape_set, op, against, of_set, None)
                if line.values:
                    found.append(line)
    order = {name: i for i, name in enumerate(BAR_SETS)}
    ops = {name: i for i, name in enumerate(EPILOGUES)}
    return sorted(found, key=lambda x: (order.get(x.shape_set, len(order)), ops.get(x.op, 0)))


def bars_tables(rows: Sequence[Row], *, only_bars: bool = False) -> list[Table]:
    """One table for each dtype that has something of ours to compare; ``only_bars``: only if a bar was measured."""
    tables = []
    for dtype, groups in split(group_cases(rows, "gemm"), lambda g: g.dtype).items():
        found = lines(groups)
        if not found or (only_bars and not any(line.bar for line in found)):
            continue
        noise = noise_floor(groups)
        table = Table(
            f"bars, {dtype}",
            [
                Column("set", numeric=False),
                Column("ours against", numeric=False),
                Column("shapes"),
                Column("geomean", ours=True),
                Column("min", ours=True),
                Column("of", numeric=False),
                Column("bar", numeric=False),
                Column("", numeric=False),
            ],
            caption=f"{_summary(found)}Ratios are the other's time over ours. {describe_noise(noise)}",
        )
        for line in found:
            worst = line.worst
            at_the_bar = bool(
                line.bar and line.verdict == "missed" and worst and not worst.lost and _near(line, noise)
            )
            table.rows.append(
                [
                    Cell(_name(line)),
                    Cell(_against(line, groups)),
                    Cell(_count(line)),
                    Cell(f"{geomean(line.values):.3f}", sort=geomean(line.values))
                    if line.values
                    else Cell(DASH, "muted"),
                    Cell("wrong", "failed") if worst and worst.lost else _number(worst),
                    Cell(_shape(worst, line)),
                    Cell(_bar_text(line.bar)),
                    verdict_cell(line.verdict, near=at_the_bar),
                ]
            )
        tables.append(table)
    return tables


def bars_text(rows: Sequence[Row]) -> str:
    """The tables as text, for the end of a run."""
    return "\n\n".join(t.markdown(heading="#", pad=True) for t in bars_tables(rows))


# --- ratios --------------------------------------------------------------------------------------------------


def _comparisons(op: str) -> tuple[Against, ...]:
    if op == LAYOUTS:
        return ("TN", "cublas")
    return ("plain", "cublas") if op in EPILOGUES else ("cublas", "data-parallel")


def _line(shape_set: str, op: str, against: Against, groups: Iterable[Group], bar: Bar | None) -> Line:
    line = Line(shape_set, op, against, bar=bar)
    for group in groups:
        if op == LAYOUTS:
            line.ratios += [
                _of_layout(group, name, against) for name in BLAS_LAYOUTS if (name, against) != ("TN", "TN")
            ]
        else:
            line.ratios.append(_ratio(group, OURS, against))
    return line


def _ratio(group: Group, ours: str, against: Against) -> Ratio:
    row = group.rows.get(ours)
    lost = row is not None and row.status not in ("ok", "skipped")
    if against == "cublas":
        return Ratio(group.case, group.speedup(row), lost)
    return Ratio(
        group.case, _times(group, DATA_PARALLEL if against == "data-parallel" else PLAIN, ours), lost
    )


def _of_layout(group: Group, layout: str, against: Against) -> Ratio:
    suffix = "" if layout == "TN" else f":{layout}"
    row = group.rows.get(OURS + suffix)
    lost = row is not None and row.status not in ("ok", "skipped")
    other = OURS if against == "TN" else group.baseline_name + suffix
    return Ratio(f"{group.case} {layout}", _times(group, other, OURS + suffix), lost)


def _times(group: Group, other: str, ours: str) -> float | None:
    """Time of one variant over that of another, on the device."""
    a, b = group.timed(other), group.timed(ours)
    return a.us.p50 / b.us.p50 if a and b and a.us and b.us and b.us.p50 > 0 else None


def _sizes(bar: Bar) -> set[tuple[int, int, int]]:
    return {(s.m, s.n, s.k) for s in SETS[bar.shape_set](Wanted()) if s.op == bar.op}


def _size(group: Group) -> tuple[int, int, int]:
    m, n, k = (int(group.first.params.get(name, 0)) for name in "mnk")
    return m, n, k


def _by_set(groups: Sequence[Group]) -> dict[tuple[str, str], list[Group]]:
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault((group.first.shape_set or "gemm", group.first.op), []).append(group)
    return found


# --- cells ---------------------------------------------------------------------------------------------------


def _summary(found: Sequence[Line]) -> str:
    barred = [line for line in found if line.bar]
    if not barred:
        return ""
    counts = {
        verdict: sum(line.verdict == verdict for line in barred)
        for verdict in ("holds", "missed", "incomplete")
    }
    rest = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n and verdict != "holds")
    return f"{counts['holds']} of {len(barred)} bars hold{f' ({rest})' if rest else ''}. "


def _name(line: Line) -> str:
    return f"{line.shape_set} {line.op}" if line.op in EPILOGUES else line.shape_set


def _against(line: Line, groups: Sequence[Group]) -> str:
    baseline = next((g.baseline_name for g in groups if g.baseline_name), "cublas")
    names = {
        "cublas": baseline,
        "plain": "plain product",
        "data-parallel": "own data-parallel",
        "TN": "own TN",
    }
    if line.against == "cublas" and line.op in EPILOGUES:
        return f"torch ({baseline})"
    return names[line.against]


def _count(line: Line) -> str:
    total = len(line.ratios) + line.missing
    return str(total) if len(line.values) == total else f"{len(line.values)} of {total}"


def _number(ratio: Ratio | None) -> Cell:
    if ratio is None or ratio.value is None:
        return Cell(DASH, "muted")
    return Cell(f"{ratio.value:.3f}", sort=ratio.value)


def _shape(ratio: Ratio | None, line: Line) -> str:
    if ratio is None:
        return DASH
    return ratio.name.removeprefix(line.shape_set).strip().removeprefix(line.op).strip() or ratio.name


def _bar_text(bar: Bar | None) -> str:
    if bar is None:
        return DASH
    parts = [f"each ≥ {bar.each:.3g}"] if bar.each else []
    return ", ".join(parts + ([f"geomean ≥ {bar.mean:.2f}"] if bar.mean else []))


def _near(line: Line, noise: Noise | None) -> bool:
    """Whether what misses the bar is within the noise of it."""
    if line.bar is None:
        return False
    low = [v / line.bar.each for v in line.values if v < line.bar.each]
    mean = geomean(line.values) if line.values else 0.0
    if line.bar.mean and 0 < mean < line.bar.mean:
        low.append(mean / line.bar.mean)
    return bool(low) and all(within(v, noise) for v in low)


def verdict_cell(verdict: Verdict, *, near: bool) -> Cell:
    """``near``: what is missed is within the noise of the bar."""
    if verdict == "":
        return Cell("")
    if verdict == "missed" and near:
        return Cell("missed, within the noise", "bad")
    return Cell(verdict, {"holds": "good", "missed": "bad", "incomplete": "muted"}[verdict])  # type: ignore[arg-type]
