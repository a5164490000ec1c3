"""Two result files beside each other: what became faster, what slower, and what of that means anything.

For every measurement that is in both files (same suite, case, dtype, world and variant) the ratio is its time in B over
that in A: above 1, B is slower.

A ratio is *significant* if it is further from 1 than the noise of this measurement, the larger of

- the noise floor of its suite, dtype and world: the 95th percentile of what a variant differs from itself measured
  again (rows of role "noise"), in the file in which that is larger; 2 % if neither file has such rows;
- half the width (p80 - p20) / p50 of its samples in A plus half of that in B: below it the two ranges overlap.

What is lost counts too. For variants of ours: any time that B lacks though it has the case, whatever the reason. For
other variants: a result that became wrong, a crash, a hang, an error.

Both describe one run on one machine. Between hosts, or days, clocks differ by more; ``relative_to`` then compares the
ratio to a baseline of the same run instead of the time, and the baseline's width counts as noise too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .errors import BenchError
from .records import Results, Row, Stats, geomean, load
from .report.analysis import SUITES, Group, group_cases, noise_floor
from .report.provenance import card
from .report.table import DASH, Cell, Column, Table, number

__all__ = ["BASELINE", "DEFAULT_FLOOR", "Change", "Comparison", "Loss", "compare", "run"]

BASELINE = "baseline"  # as relative_to: the suite's own
DEFAULT_FLOOR = 0.02
_BROKEN = ("failed", "crashed", "timeout", "error")
_NO_BASELINE = "no baseline beside it in {}"

Key = tuple[str, str, str, int, str]


@dataclass(frozen=True)
class Change:
    """One measurement in both files.

    ``ratio``: B / A of times, or of times over the baseline's; ``noise``: see the module.
    """

    before: Row
    after: Row
    ratio: float
    noise: float

    @property
    def significant(self) -> bool:
        """Whether the ratio is further from 1 than noise."""
        return max(self.ratio, 1 / self.ratio) - 1 > self.noise

    def slower(self, threshold: float) -> bool:
        """Significant, and slower by more than the threshold."""
        return self.significant and self.ratio > 1 + threshold


@dataclass(frozen=True)
class Loss:
    """Was right and was timed in A, and is not in B. ``after``: None where B has no row of it."""

    before: Row
    after: Row | None
    reason: str


@dataclass
class Comparison:
    """Result of :func:`compare`; lists are in file order.

    Attributes:
        changes: measured in both.
        statuses: (before, after) with different statuses.
        missing, new: in A only, in B only.
        incomparable: right in both, but timed by graph in one and from the host in the other, or in one not at all, or
            without the baseline.
        broken: of these what counts as if it were slower, see the module.
        noise: floor by (suite, dtype, world); ``assumed``: those of them for which nothing was measured twice.
    """

    changes: list[Change]
    statuses: list[tuple[Row, Row]]
    missing: list[Row]
    new: list[Row]
    incomparable: list[Row]
    broken: list[Loss]
    noise: dict[tuple[str, str, int], float]
    assumed: set[tuple[str, str, int]]


def compare(a: Results, b: Results, relative_to: str | None = None) -> Comparison:
    """See the module. ``relative_to``: a variant, or :data:`BASELINE` for that of each suite."""
    groups_a, groups_b = _groups(a), _groups(b)
    rows_a, rows_b = _rows(a), _rows(b)
    measured = [_floors(groups_a), _floors(groups_b)]
    kinds = {(r.suite, r.dtype, r.world) for r in [*rows_a.values(), *rows_b.values()]}
    noise = {k: max((f[k] for f in measured if k in f), default=DEFAULT_FLOOR) for k in kinds}
    assumed = {k for k in kinds if not any(k in f for f in measured)}
    cases_b = {_group_key(row) for row in rows_b.values()}
    result = Comparison([], [], [], [], [], [], noise, assumed)
    for key, before in rows_a.items():
        after = rows_b.get(key)
        ours = before.status == "ok" and before.role == "ours"
        if after is None:
            result.missing.append(before)
            if ours and before.best and _group_key(before) in cases_b:
                result.broken.append(Loss(before, None, "no row in B, which has this case"))
        elif before.status != after.status:
            result.statuses.append((before, after))
            if ours or (before.status == "ok" and after.status in _BROKEN):
                reason = " ".join(after.reason.split())
                shown = f"{before.status} -> {after.status}" + (f" ({reason})" if reason else "")
                result.broken.append(Loss(before, after, shown))
        elif before.status == "ok" and before.best:
            group = (groups_a[_group_key(before)], groups_b[_group_key(after)])
            if relative_to is not None and before.variant == _base_name(group[0], relative_to):
                continue
            floor = noise[before.suite, before.dtype, before.world]
            change = _change(before, after, group, floor, relative_to)
            if isinstance(change, Change):
                result.changes.append(change)
                continue
            result.incomparable.append(after)
            if ours and change != _NO_BASELINE.format("A"):  # which B cannot be blamed for
                result.broken.append(Loss(before, after, f"not comparable any more: {change}"))
    result.new = [row for key, row in rows_b.items() if key not in rows_a]
    return result


def _change(
    before: Row, after: Row, groups: tuple[Group, Group], floor: float, relative_to: str | None
) -> Change | str:
    """The change, or why there is none."""
    clock = "us" if before.us and after.us else "host_us"
    times: tuple[Stats | None, Stats | None] = (getattr(before, clock), getattr(after, clock))
    if times[0] is None or times[1] is None:
        return f"{_clocks(before)} in A, {_clocks(after)} in B"
    if min(times[0].p50, times[1].p50) <= 0:
        return "a time of 0"
    ratio = times[1].p50 / times[0].p50
    widths = [times[0].spread, times[1].spread]
    if relative_to is not None:
        for i, (row, group) in enumerate(zip((before, after), groups, strict=True)):
            base = _base(row, group, clock, relative_to)
            if base is None:
                return _NO_BASELINE.format("B" if i else "A")
            time, width = base
            ratio = ratio / time if i else ratio * time
            widths.append(width)
    return Change(before, after, ratio, max(floor, sum(widths) / 2))


def _clocks(row: Row) -> str:
    return "graph time" if row.us else "host-launched time" if row.host_us else "no time"


def _base_name(group: Group, relative_to: str) -> str:
    return group.baseline_name if relative_to == BASELINE else relative_to


def _base(row: Row, group: Group, clock: str, relative_to: str) -> tuple[float, float] | None:
    """Median and relative width of the baseline's time for one row, that of the same processes where the row has it."""
    name = _base_name(group, relative_to)
    if row.variant == name:
        return None
    beside = row.extra.get(f"baseline_{clock}")
    if name == group.baseline_name and isinstance(beside, (int, float)) and beside > 0:
        return float(beside), 0.0
    base = group.timed(name)
    stats: Stats | None = getattr(base, clock) if base else None
    return (stats.p50, stats.spread) if stats and stats.p50 > 0 else None


def run(
    a: Path,
    b: Path,
    *,
    threshold: float = 0.05,
    relative_to: str | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Print how B compares with A.

    Args:
        a, b: result files, before and after.
        threshold: a significant slow-down by more than this fraction counts.
        relative_to: compare ratios to this variant of the same case and run in place of times ("baseline": each suite's
            own); for results of different hosts.
        stdout: where to print.

    Returns:
        1 if anything is slower past the threshold, or was right and now is wrong, crashes or ends in a timeout, or is
        of ours and has no time any more; else 0.

    Raises:
        BenchError: a file that cannot be read or holds several cards, a negative threshold, nothing in common, an
            unknown ``relative_to``.
    """
    if not threshold >= 0:
        raise BenchError(f"--threshold: expected a fraction of 0 or more (0.05 is 5 %), got {threshold}.")
    before, after = load(a), load(b)
    for path, results in ((a, before), (b, after)):
        cards = sorted({results.card_of(run) for run in {row.run for row in results.rows}} - {""})
        if len(cards) > 1:
            raise BenchError(
                f"{path}: holds results of {' and of '.join(cards)}; compare files of one card each."
            )
    if relative_to not in (None, BASELINE) and not any(
        row.variant == relative_to for row in [*before.rows, *after.rows]
    ):
        names = ", ".join(dict.fromkeys(row.variant for row in before.rows))
        raise BenchError(
            f"--relative-to: no row of variant {relative_to!r}; expected baseline or one of {names}."
        )
    result = compare(before, after, relative_to)
    if not (result.changes or result.statuses or result.incomparable or result.broken):
        raise BenchError(
            f"{a} and {b} have no measurement in common (same suite, case, dtype, world and variant): "
            f"{len(result.missing)} rows and {len(result.new)} rows."
        )
    stream = stdout if stdout is not None else sys.stdout
    for line in _report(before, after, result, threshold, relative_to):
        print(line, file=stream)
    return int(bool(result.broken) or any(c.slower(threshold) for c in result.changes))


def _report(
    a: Results, b: Results, result: Comparison, threshold: float, relative_to: str | None
) -> list[str]:
    lines = _warnings(a, b, relative_to)
    changes = sorted(result.changes, key=lambda c: -c.ratio)
    slower = [c for c in changes if c.slower(threshold)]
    significant = [c for c in changes if c.significant]
    what = f"time / time of {relative_to}" if relative_to else "time"
    if changes:
        lines += [
            f"{len(changes)} measurements in both; {what} in B / in A: geometric mean "
            f"{geomean(c.ratio for c in changes):.3f}; {len(significant)} differ by more than noise, "
            f"{len(slower)} are slower by more than {100 * threshold:g} %."
        ]
        floors = [
            " ".join([*filter(None, key[:2]), f"x{key[2]}", f"{100 * floor:.1f} %"])
            + (" (assumed)" if key in result.assumed else "")
            for key, floor in sorted(result.noise.items())
        ]
        lines += [f"Noise floors: {', '.join(floors)}.", ""]
    if significant:
        lines += [_table(significant, threshold, relative_to).markdown(heading="", pad=True), ""]
    lost = {loss.before.key for loss in result.broken}
    lines += _status_lines([(a, b) for a, b in result.statuses if a.key not in lost])
    lines += _listed("only in A", [row for row in result.missing if row.key not in lost]) + _listed(
        "only in B", result.new
    )
    lines += _listed(
        "not comparable (no baseline beside, or graph time against host-launched time)",
        [row for row in result.incomparable if row.key not in lost],
    )
    lines += [f"BROKEN {_name(loss.before)}: {loss.reason}" for loss in result.broken]
    lines += [""] if result.broken else []
    verdict = [f"{len(slower)} slower"] if slower else []
    verdict += [f"{len(result.broken)} broken"] if result.broken else []
    lines.append(f"Result: {', '.join(verdict)}." if verdict else "Result: no slow-down.")
    return lines


def _table(changes: Sequence[Change], threshold: float, relative_to: str | None) -> Table:
    columns = [Column(name, numeric=False) for name in ("suite", "case", "dtype", "world", "variant")]
    columns += [Column("A, us"), Column("B, us"), Column("B / A"), Column("noise"), Column("", numeric=False)]
    table = Table("changes", columns)
    for c in changes:
        mark = "SLOWER" if c.slower(threshold) else "slower" if c.ratio > 1 else "faster"
        row = c.after
        cells = [row.suite, row.case, row.dtype or DASH, str(row.world), row.variant]
        both = c.before.us and row.us
        pair = (c.before.us, row.us) if both else (c.before.host_us, row.host_us)
        cells += [number(s.p50 if s else None) for s in pair]
        cells += [f"{c.ratio:.3f}", f"{100 * c.noise:.1f} %", mark]
        table.rows.append([Cell(text) for text in cells])
    return table


def _status_lines(statuses: Sequence[tuple[Row, Row]]) -> list[str]:
    if not statuses:
        return []
    lines = ["Changed status:"]
    for before, after in statuses:
        reason = " ".join(after.reason.split())
        lines.append(
            f"  {_name(after)}: {before.status} -> {after.status}" + (f" ({reason})" if reason else "")
        )
    return [*lines, ""]


def _listed(title: str, rows: Sequence[Row], limit: int = 12) -> list[str]:
    if not rows:
        return []
    lines = [f"{len(rows)} {title}:", *(f"  {_name(row)}" for row in rows[:limit])]
    if len(rows) > limit:
        lines.append(f"  ... and {len(rows) - limit} more")
    return [*lines, ""]


def _name(row: Row) -> str:
    return f"{row.suite}, {row.case}, {row.dtype + ', ' if row.dtype else ''}x{row.world}, {row.variant}"


def _warnings(a: Results, b: Results, relative_to: str | None) -> list[str]:
    """What makes times of the two files differ for other reasons than the code."""
    lines = []
    kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {"cards": card, "torch versions": _torch}
    for what, of in kinds.items():
        values = [sorted({of(h.env) for h in r.headers}) for r in (a, b)]
        if values[0] != values[1]:
            hint = "" if relative_to else "; --relative-to baseline compares ratios instead of times"
            lines.append(
                f"Warning: the {what} differ: {', '.join(values[0])} in A, {', '.join(values[1])} in B{hint}."
            )
    return [*lines, ""] if lines else []


def _torch(env: Mapping[str, Any]) -> str:
    return str(env.get("torch") or "none")


def _rows(results: Results) -> dict[Key, Row]:
    """By key, without second measurements and the constants of the link suite."""
    return {row.key: row for row in results.latest() if row.role != "noise" and row.op != "constants"}


def _group_key(row: Row) -> Key:
    return (row.suite, row.case, row.dtype, row.world, "")


def _groups(results: Results) -> dict[Key, Group]:
    rows = results.latest()
    suites = [*SUITES, *{row.suite for row in rows if row.suite not in SUITES}]
    found = [g for suite in suites for g in group_cases(rows, suite)]
    return {_group_key(g.first): g for g in found}


def _floors(groups: Mapping[Key, Group]) -> dict[tuple[str, str, int], float]:
    """Noise floor of each suite, dtype and world that has repeated measurements."""
    parts: dict[tuple[str, str, int], list[Group]] = {}
    for group in groups.values():
        parts.setdefault((group.suite, group.dtype, group.world), []).append(group)
    return {key: noise.floor for key, part in parts.items() if (noise := noise_floor(part)) is not None}
