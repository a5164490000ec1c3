"""The first things that a person wants to know: a few large numbers, each with a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..records import Row, geomean
from .analysis import Group, group_cases, noise_floor, percentile, spread
from .table import hidden_text, percent
from .tables_gemm import is_product, split
from .tables_overlap import ranks

__all__ = ["Headline", "headlines", "text_summary"]


@dataclass(frozen=True)
class Headline:
    """``value`` is printed large, ``label`` says what it is, ``detail`` qualifies it."""

    value: str
    label: str
    detail: str
    suite: str


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """In the order gemm, sweep, overlap, layer, train; rows of one card."""
    found = []
    for groups in split(group_cases(rows, "gemm"), lambda g: g.dtype).values():
        found += _gemm(groups)
    for groups in split(group_cases(rows, "sweep"), lambda g: g.dtype).values():
        found += _sweep(groups, "sweep")
    for groups in split(group_cases(rows, "overlap"), lambda g: (g.world, g.dtype)).values():
        found += _overlap(groups)
    for suite, what in (("layer", "layers"), ("train", "training step")):
        for groups in split(group_cases(rows, suite), lambda g: (g.world, g.dtype)).values():
            found += _against_baseline(groups, suite, f"{what}, {ranks(groups[0].world)}")
    return found


def text_summary(rows: Sequence[Row]) -> str:
    """The same as a Markdown list."""
    return "\n".join(f"- {h.label}: {h.value}; {h.detail}" for h in headlines(rows))


def _gemm(groups: Sequence[Group]) -> list[Headline]:
    groups = [g for g in groups if is_product(g)]
    named = [g for g in groups if g.first.shape_set != "sweep"]
    swept = [g for g in groups if g.first.shape_set == "sweep"]
    found = _against_baseline(named, "gemm", f"{groups[0].dtype} products") if named else []
    return found + _sweep(swept, "gemm")


def _sweep(groups: Sequence[Group], suite: str) -> list[Headline]:
    s = spread(v for g in groups if (v := g.speedup(g.ours)))
    if s is None:
        return []
    detail = f"{s.n} shapes: 5th to 95th percentile {s.p5:.2f} to {s.p95:.2f}, at least 1 in {percent(s.share_won)}"
    label = f"sweep, {groups[0].dtype}, against {groups[0].baseline_name} (geometric mean)"
    return [Headline(f"{s.geomean:.2f}×", label, detail, suite)]


def _overlap(groups: Sequence[Group]) -> list[Headline]:
    found = _against_baseline(groups, "overlap", f"fused operations, {ranks(groups[0].world)}")
    if not found:
        return []
    details = [found[0].detail]
    peers = [v for g in groups if (v := g.against(g.ours, g.best_peer))]
    if peers:
        details.append(
            f"{geomean(peers):.2f}× the fastest peer of each shape, behind it in {sum(v < 1 for v in peers)}"
        )
    hidden = [e.hidden for g in groups if (e := g.exposed(g.ours)) and e.hidden == e.hidden]
    if hidden:
        details.append(f"{hidden_text(percentile(hidden, 50))} of the communication hidden (median)")
    return [replace(found[0], detail="; ".join(details))]


def _against_baseline(groups: Sequence[Group], suite: str, what: str) -> list[Headline]:
    values = [(v, g.case) for g in groups if (v := g.speedup(g.ours))]
    if not values:
        return []
    (low, worst), (high, best) = min(values), max(values)
    detail = (
        f"{len(values)} cases, from {low:.2f} ({worst}) to {high:.2f} ({best})" if len(values) > 1 else best
    )
    noise = noise_floor(groups)
    if noise:
        detail += f"; noise floor {100 * noise.floor:.1f} %"
    mean = geomean(v for v, _ in values)
    label = f"{what}, against {groups[0].baseline_name}" + (" (geometric mean)" if len(values) > 1 else "")
    return [Headline(f"{mean:.2f}×", label, detail, suite)]
