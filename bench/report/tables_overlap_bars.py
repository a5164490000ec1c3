"""Which bars of the overlap suite (:mod:`bench.bars`) hold: one table for each world and dtype.

A bar holds if every shape of its set was measured, with right results, and none takes longer than it says; see
:mod:`.tables_bars` for the other verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..bars import COMPUTE_BOUND, OVERLAP_BARS, OverlapBar
from ..records import Row, geomean
from ..suite import Options
from ..suites.overlap_shapes import OPS, shapes
from .analysis import Group, group_cases, noise_floor, within
from .best_schedule import Links, best_schedule, describe_best, over_best
from .table import DASH, Cell, Column, Table
from .tables_bars import Verdict, verdict_cell
from .tables_gemm import describe_noise, split
from .tables_overlap import OP_TITLES, ranks

__all__ = ["Line", "lines", "overlap_bars_tables"]


@dataclass
class Line:
    """A bar, and for each case of it that was measured the time of ours over the best schedule's.

    Attributes:
        lost: cases of which ours went wrong.
        wanted: how many cases the bar has.
    """

    bar: OverlapBar
    op: str
    ratios: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    wanted: int = 0

    @property
    def verdict(self) -> Verdict:
        """See the module."""
        if self.lost or any(v > self.bar.most for v in self.ratios.values()):
            return "missed"
        return "holds" if self.ratios and len(self.ratios) == self.wanted else "incomplete"

    @property
    def worst(self) -> str:
        """The case that takes longest, one that went wrong before all; "" if there is none."""
        return self.lost[0] if self.lost else max(self.ratios, key=lambda case: self.ratios[case], default="")


def lines(groups: Sequence[Group], links: Links) -> list[Line]:
    """Of groups of one world and dtype, the bars of which a case could be told."""
    found = []
    for bar in OVERLAP_BARS:
        of_set = [g for g in groups if (g.first.shape_set, g.first.op) == (bar.shape_set, OPS[bar.op])]
        there = [g for g in of_set if best_schedule(g, links)]
        if not there:
            continue
        wanted = _wanted(bar, there[0].world)
        line = Line(bar, OPS[bar.op], wanted=len(wanted))
        for group in (g for g in there if g.case in wanted):
            over = over_best(group, group.ours, links)
            if over:
                line.ratios[group.case] = over
            elif group.ours is not None and group.ours.status not in ("ok", "skipped"):
                line.lost.append(group.case)
        if line.ratios or line.lost:
            found.append(line)
    return found


def _wanted(bar: OverlapBar, world: int) -> set[str]:
    options = Options(world=world, sets=(bar.shape_set,), ops=(bar.op,))
    return {s.name for s in shapes(options) if (s.label, s.m) not in COMPUTE_BOUND}


def overlap_bars_tables(rows: Sequence[Row], links: Links | None = None) -> list[Table]:
    """One table for each world and dtype of which there is something of ours to compare; ``links`` as in tables."""
    tables = []
    for groups in split(group_cases(rows, "overlap"), lambda g: (g.world, g.dtype)).values():
        found = lines(groups, links or {})
        if not found:
            continue
        noise = noise_floor(groups)
        mine = sorted({g.ours.variant for g in groups if g.ours is not None})
        first = groups[0]
        constants = describe_best((links or {})[first.world])
        table = Table(
            f"bars, {ranks(first.world)}, {first.dtype}",
            [
                Column("few waves, or bound by the link", numeric=False),
                Column("shapes"),
                Column("geomean", ours=True),
                Column("max", ours=True),
                Column("of", numeric=False),
                Column("bar", numeric=False),
                Column("", numeric=False),
            ],
            caption=f"Time of {', '.join(mine)} over that of the best schedule. {constants} {describe_noise(noise)}",
        )
        for line in found:
            values, worst = list(line.ratios.values()), line.worst
            near = not line.lost and all(
                within(v / line.bar.most, noise) for v in values if v > line.bar.most
            )
            mean = geomean(values)
            table.rows.append(
                [
                    Cell(OP_TITLES[line.op]),
                    Cell(
                        f"{len(values)} of {line.wanted}" if len(values) < line.wanted else str(line.wanted)
                    ),
                    Cell(f"{mean:.3f}", sort=mean) if values else Cell(DASH, "muted"),
                    Cell("wrong", "failed")
                    if line.lost
                    else Cell(f"{line.ratios[worst]:.3f}", sort=line.ratios[worst]),
                    Cell(worst),
                    Cell(f"each ≤ {line.bar.most:.2f}"),
                    verdict_cell(line.verdict, near=near),
                ]
            )
        tables.append(table)
    return tables
