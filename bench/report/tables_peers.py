"""How ours compares with others: which bars of the overlap suite hold against them, and means over layers.

``overlap-peers``: :data:`bench.bars.PEER_BARS`, one table for each world and dtype; verdicts as in :mod:`.tables_bars`.
``layer-peers``: for each variant of ours in the layer suite, geometric means of its speed-ups over every peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..bars import COMPUTE_BOUND, PEER_BARS, PeerBar
from ..records import Row, geomean
from ..suite import Options
from ..suites.overlap_shapes import OPS, Shape, shapes
from .analysis import Group, Noise, group_cases, noise_floor, within
from .table import DASH, Cell, Column, Table, hidden_text
from .tables_bars import Verdict, verdict_cell
from .tables_gemm import describe_noise, split, variants_of
from .tables_overlap import ranks

__all__ = ["PeerLine", "layer_peers_tables", "overlap_peers_tables", "peer_lines"]

_SET = "measured"


@dataclass
class PeerLine:
    """A bar, and for each of its cases that was measured the ratio that it is about.

    Attributes:
        lost: cases of which ours went wrong.
        wanted: how many cases the bar has.
        least_mean: of the geometric mean, 0 for none.
    """

    bar: PeerBar
    ratios: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    wanted: int = 0
    least_mean: float = 0.0

    @property
    def worst(self) -> str:
        """The case furthest from the bar, one that went wrong before all."""
        if self.lost:
            return self.lost[0]
        sign = -1 if self.bar.against == "product" else 1
        return min(self.ratios, key=lambda case: sign * self.ratios[case])

    @property
    def mean(self) -> float | None:
        """Geometric mean; None for what is no ratio of times, or where nothing was measured."""
        return geomean(self.ratios.values()) if self.ratios and self.bar.against != "hidden" else None

    @property
    def short(self) -> list[float]:
        """What misses the bar, each as a fraction of it: below 1, but above for "product"."""
        over = self.bar.against == "product"
        parts = [v / self.bar.each for v in self.ratios.values()]
        parts = [part for part in parts if (part > 1 if over else part < 1)]
        if self.least_mean and self.mean is not None and self.mean < self.least_mean:
            parts.append(self.mean / self.least_mean)
        return parts

    @property
    def verdict(self) -> Verdict:
        """A mean of some of the shapes decides nothing."""
        whole = len(self.ratios) == self.wanted
        some = self.short if whole else [v for v in self.ratios.values() if self._misses(v)]
        if self.lost or some:
            return "missed"
        return "holds" if whole else "incomplete"

    def _misses(self, value: float) -> bool:
        return value > self.bar.each if self.bar.against == "product" else value < self.bar.each


def peer_lines(groups: Sequence[Group]) -> list[PeerLine]:
    """Of groups of one world and dtype, the bars of which a case was measured."""
    found = []
    for bar in PEER_BARS:
        of_op = [g for g in groups if (g.first.shape_set, g.first.op) == (_SET, OPS[bar.op])]
        if not of_op:
            continue
        world = of_op[0].world
        wanted = {s.name for s in shapes(Options(world=world, sets=(_SET,), ops=(bar.op,))) if _is_of(bar, s)}
        line = PeerLine(bar, wanted=len(wanted), least_mean=bar.least_mean(world))
        for group in (g for g in of_op if g.case in wanted):
            value = _ratio(bar, group)
            if value is not None:
                line.ratios[group.case] = value
            elif group.ours is not None and group.ours.status not in ("ok", "skipped"):
                line.lost.append(group.case)
        if line.ratios or line.lost:
            found.append(line)
    return found


def _is_of(bar: PeerBar, shape: Shape) -> bool:
    least, most = bar.rows
    named = bar.label in ("", shape.label, shape.label.split()[0])
    bound = not bar.compute_bound or (shape.label, shape.m) in COMPUTE_BOUND
    return least <= shape.m <= most and named and bound


def _ratio(bar: PeerBar, group: Group) -> float | None:
    row = group.ours
    if bar.against == "baseline":
        return group.speedup(row)
    if bar.against == "best peer":
        return group.against(row, group.best_peer)
    exposed, product, baseline = group.exposed(row), group.timed("gemm"), group.baseline
    if exposed is None or product is None or product.us is None or row is None or row.us is None:
        return None
    if bar.against == "product":
        return row.us.p50 / product.us.p50
    effective = baseline.us.p50 - product.us.p50 if baseline and baseline.us else 0.0
    return 1 - exposed.exposed / effective if effective > 0 else None


def overlap_peers_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each world and dtype of which a bar can be told."""
    tables = []
    for groups in split(group_cases(rows, "overlap"), lambda g: (g.world, g.dtype)).values():
        found = peer_lines(groups)
        if not found:
            continue
        noise = noise_floor(groups)
        baseline = next((g.baseline_name for g in groups if g.baseline_name), "baseline")
        mine = sorted({g.ours.variant for g in groups if g.ours is not None})
        table = Table(
            f"beside others, {ranks(groups[0].world)}, {groups[0].dtype}",
            [
                Column("what", numeric=False),
                Column("shapes"),
                Column("geomean", ours=True),
                Column("worst", ours=True),
                Column("of", numeric=False),
                Column("bar", numeric=False),
                Column("", numeric=False),
            ],
            caption=f"Of {', '.join(mine)}. × NAME: its time over ours; / product: our time over that of gemm; hidden: "
            f"1 - (t_ours - t_gemm) / (t of {baseline} - t_gemm). {describe_noise(noise)}",
        )
        for line in found:
            near = not line.lost and bool(line.short) and all(within(v, noise) for v in line.short)
            mean = line.mean
            table.rows.append(
                [
                    Cell(_what(line.bar, baseline)),
                    Cell(str(line.wanted) if _is_whole(line) else f"{len(line.ratios)} of {line.wanted}"),
                    Cell(DASH, "muted") if mean is None else Cell(f"{mean:.3f}", sort=mean),
                    _worst(line),
                    Cell(line.worst),
                    Cell(_bar_text(line)),
                    verdict_cell(line.verdict, near=near),
                ]
            )
        tables.append(table)
    return tables


def _is_whole(line: PeerLine) -> bool:
    return len(line.ratios) == line.wanted


def _what(bar: PeerBar, baseline: str) -> str:
    name = {
        "baseline": f"× {baseline}",
        "best peer": "× best peer",
        "product": "/ product",
        "hidden": "hidden",
    }
    least, most = bar.rows
    if most < 1 << 31:
        rows = f", M {least} to {most}"
    else:
        rows = f", M ≥ {least}" if least > 1 else ""
    of = f" {bar.label}" if bar.label else ""
    return f"{bar.op}{of}, {name[bar.against]}{rows}{', bound by arithmetic' if bar.compute_bound else ''}"


def _worst(line: PeerLine) -> Cell:
    if line.lost:
        return Cell("wrong", "failed")
    value = line.ratios[line.worst]
    text = hidden_text(value) if line.bar.against == "hidden" else f"{value:.3f}"
    return Cell(text, title=f"{value:.4f}", sort=value)


def _bar_text(line: PeerLine) -> str:
    each = line.bar.each
    if line.bar.against == "hidden":
        return f"each ≥ {100 * each:.0f} %"
    text = f"each {'≤' if line.bar.against == 'product' else '≥'} {each:.2f}"
    return f"{text}, geomean ≥ {line.least_mean:.2f}" if line.least_mean else text


def layer_peers_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each world and dtype: a line for each variant of ours, a column for each peer."""
    tables = []
    for groups in split(group_cases(rows, "layer"), lambda g: (g.world, g.dtype)).values():
        mine = [v for v in variants_of(groups, "ours") if any(g.timed(v) for g in groups)]
        peers = [v for v in variants_of(groups, "peer") if any(g.timed(v) for g in groups)]
        if not mine or not peers:
            continue
        noise = noise_floor(groups)
        table = Table(
            f"layers beside others, {ranks(groups[0].world)}, {groups[0].dtype}",
            [
                Column("ours", numeric=False),
                Column("cases"),
                *(Column(f"× {peer}") for peer in peers),
                Column("× best peer", ours=True),
                Column("least × best peer", ours=True),
                Column("of", numeric=False),
            ],
            caption="Forward and backward. ×: time of the peer / time of ours, the geometric mean over the cases; best "
            f"peer: the fastest of each case. {describe_noise(noise)}",
        )
        for variant in mine:
            own = [g for g in groups if g.timed(variant)]
            best = {g.case: v for g in own if (v := g.against(g.rows[variant], g.best_peer))}
            worst = min(best, key=lambda case: best[case], default="")
            table.rows.append(
                [
                    Cell(variant),
                    Cell(str(len(own)) if len(own) == len(groups) else f"{len(own)} of {len(groups)}"),
                    *(_mean(table, own, variant, peer, noise) for peer in peers),
                    table.ratio(geomean(best.values()) if best else None, noise),
                    table.ratio(best.get(worst), noise),
                    Cell(worst or DASH),
                ]
            )
        tables.append(table)
    return tables


def _mean(table: Table, groups: Sequence[Group], variant: str, peer: str, noise: Noise | None) -> Cell:
    """Of the cases that both have; a note where those are not all."""
    values = [v for g in groups if (v := g.against(g.rows[variant], g.rows.get(peer)))]
    note = (
        table.note("of fewer cases: the peer has no time in the others") if len(values) < len(groups) else 0
    )
    return table.ratio(geomean(values), noise, note=note) if values else Cell(DASH, "muted")
