"""Tables of plain products of the gemm suite: one a shape set and dtype; a sweep is summed up instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..records import Row
from ..suites.gemm_stacked import STACKED
from .analysis import (
    Group,
    Noise,
    group_cases,
    is_foreign,
    noise_floor,
    plan_of,
    spread,
    stream_k_gain,
    waves,
)
from .table import DASH, Cell, Column, Table, number, percent

__all__ = [
    "describe_never_run",
    "describe_noise",
    "forces_tile",
    "gemm_tables",
    "is_product",
    "never_run",
    "shape_text",
    "split",
    "variants_of",
]

SAME_TILE = "streamk:dp-same-tile"
_EXTREMES = 8


def gemm_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each shape set and dtype."""
    groups = group_cases(rows, "gemm")
    tables = []
    for dtype, of_dtype in split(groups, lambda g: g.dtype).items():
        noise = noise_floor(of_dtype)
        products = [group for group in of_dtype if is_product(group)]
        stacks = [group for group in of_dtype if group.first.op in STACKED]
        for name, part in split(products + stacks, lambda g: g.first.shape_set).items():
            if name == "sweep":
                tables += _sweep_tables(part, dtype, noise)
            else:
                tables.append(_shape_table(part, f"{name or 'gemm'}, {dtype}", noise))
    return tables


def is_product(group: Group) -> bool:
    """Whether a case is one product and nothing else."""
    return group.first.op == "matmul"


def forces_tile(variant: str) -> bool:
    """Whether a variant of ours is one of ``--tiles``."""
    return "@" in variant


def split(groups: Sequence[Group], key: Callable[[Group], object]) -> dict[str, list[Group]]:
    """Groups by a key, in order of first appearance."""
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(str(key(group)), []).append(group)
    return parts


def variants_of(groups: Sequence[Group], *roles: str) -> list[str]:
    """Names of the variants with one of these roles: by role, then in order of first appearance."""
    found = {role: dict.fromkeys(r.variant for g in groups for r in g.of_role(role)) for role in roles}
    return [variant for role in roles for variant in found[role]]


def never_run(groups: Sequence[Group], variants: Sequence[str]) -> dict[str, str]:
    """Variants that were skipped at every shape, with the first reason; tables leave them out and say so."""
    found = {}
    for variant in variants:
        rows = [g.rows[variant] for g in groups if variant in g.rows]
        if rows and all(row.status == "skipped" for row in rows):
            found[variant] = " ".join(rows[0].reason.split()).rstrip(".") or "no reason given"
    return found


def describe_never_run(skipped: Mapping[str, str]) -> str:
    """A sentence on :func:`never_run`, "" if there is nothing to say."""
    if not skipped:
        return ""
    return " Not run: " + "; ".join(f"{variant} ({reason})" for variant, reason in skipped.items()) + "."


def describe_noise(noise: Noise | None) -> str:
    """One sentence on what a difference means."""
    if noise is None:
        return "Nothing was measured twice, so the noise floor is unknown."
    times = "time" if noise.n == 1 else "times"
    how = f"a variant against itself, {noise.n} {times}"
    return f"Noise floor {100 * noise.floor:.1f} % ({how}); ratios within it read ≈1.00."


def shape_text(row: Row) -> str:
    """M × N × K, with the batch in front if there is one."""
    m, n, k = (row.params.get(name, "?") for name in "mnk")
    batch = row.params.get("batch") or 1
    text = f"{m} × {n} × {k}"
    groups = row.params.get("groups")
    if groups:
        return f"{text} in {groups} groups"
    return text if batch == 1 else f"{batch} × ({text})"


def _shape_table(groups: Sequence[Group], title: str, noise: Noise | None) -> Table:
    baseline = next((g.baseline_name for g in groups if g.baseline_name), "")
    ours = variants_of(groups, "ours")
    main = "streamk" if "streamk" in ours else (ours[0] if ours else "")
    forced = [v for v in ours if v not in (main, SAME_TILE) and not forces_tile(v)]
    absent = never_run(groups, variants_of(groups, "peer"))
    peers = [v for v in variants_of(groups, "peer") if v != baseline and v not in absent]
    layouts = {str(g.first.params.get("layout", "")) for g in groups}
    columns = [Column("shape", numeric=False), Column("M × N × K")]
    if len(layouts) > 1:
        columns.append(Column("layout", numeric=False))
    columns += [Column(f"{baseline or 'baseline'}, us"), *(Column(f"{p}, us") for p in peers)]
    columns += [Column(f"{main or 'ours'}, us", ours=True), Column("TFLOP/s", ours=True)]
    columns += [
        Column(f"× {baseline or 'baseline'}", ours=True),
        Column("× data-parallel, same tile", ours=True),
    ]
    columns += [Column(f"{_short(v)} ×") for v in forced] + [Column("plan of ours", numeric=False)]
    table = Table(title, columns, caption=_caption(baseline, noise, forced) + describe_never_run(absent))
    for group in groups:
        row = group.rows.get(main)
        cells = [Cell(group.case), Cell(shape_text(group.first))]
        if len(layouts) > 1:
            cells.append(Cell(str(group.first.params.get("layout", "")) or DASH))
        cells += [table.time(group.rows.get(baseline)), *(table.time(group.rows.get(p)) for p in peers)]
        cells += [table.time(row), _tflops(group.timed(main)), _ratio(table, group, row, noise)]
        cells.append(table.ratio(stream_k_gain(group), noise))
        cells += [_forced(table, group, group.rows.get(v), noise) for v in forced]
        cells.append(Cell(_plan_text(row, waves(row))))
        table.rows.append(cells)
    return table.trimmed()


def _caption(baseline: str, noise: Noise | None, forced: Sequence[str]) -> str:
    text = f"×: time of {baseline or 'the baseline'} / time of the variant, above 1 the variant is faster."
    if forced:
        text += " Columns with a schedule's name force it."
    return f"{text} {describe_noise(noise)}"


def _short(variant: str) -> str:
    return variant.removeprefix("streamk:")


def _tflops(row: Row | None) -> Cell:
    value = row.tflops if row else None
    return Cell(number(value), "" if value else "muted", sort=value)


def _ratio(table: Table, group: Group, row: Row | None, noise: Noise | None) -> Cell:
    """A ratio, or the status of a row that has none because it went wrong."""
    if row is not None and row.status != "ok":
        return table.time(row)
    mixed = group.across_runs(row)
    return table.ratio(group.speedup(row), noise, note=table.note(MIXED) if mixed else 0)


def _forced(table: Table, group: Group, row: Row | None, noise: Noise | None) -> Cell:
    """As above; a schedule that cannot be had at a shape is nothing to tell in a footnote."""
    if row is not None and row.status == "skipped":
        return Cell(DASH, "muted", row.reason)
    return _ratio(table, group, row, noise)


MIXED = "the two times are of different runs, between which clocks may have changed"


def _plan_text(row: Row | None, count: float | None) -> str:
    plan = plan_of(row)
    if not plan:
        return DASH
    tile = str(plan.get("tile_name") or "").replace("x", "×") or "×".join(map(str, plan.get("tile", ())))
    splits = plan.get("splits") or 1
    text = f"{plan.get('schedule', '?')} {tile}" + (f", {splits} splits" if splits > 1 else "")
    return text + (f", {number(count)} waves" if count else "")


def _sweep_tables(groups: Sequence[Group], dtype: str, noise: Noise | None) -> list[Table]:
    baseline = next((g.baseline_name for g in groups if g.baseline_name), "baseline")
    columns = [
        Column("variant", numeric=False),
        Column("shapes"),
        Column("geomean"),
        Column("5th percentile"),
    ]
    columns += [
        Column("median"),
        Column("95th percentile"),
        Column("min"),
        Column("max"),
        Column("at least 1"),
    ]
    columns.append(Column("not timed"))
    summary = Table(
        f"sweep, {dtype}, speed-up over {baseline}",
        columns,
        caption=f"{len(groups)} shapes, log-sampled. {describe_noise(noise)}",
    )
    for variant in variants_of(groups, "ours", "peer"):
        rows = [g.rows[variant] for g in groups if variant in g.rows]
        if variant == baseline or any(is_foreign(row) for row in rows):
            continue
        stats = spread(v for v in (g.speedup(g.rows.get(variant)) for g in groups) if v)
        bad = [row for row in rows if row.status != "ok"]
        failed = sum(row.status == "failed" for row in bad)
        lost = Cell(str(len(bad)), "" if bad else "muted")
        if failed:
            note = summary.note(
                f"{failed} wrong: {', '.join(row.case for row in bad if row.status == 'failed')}"
            )
            lost = Cell(f"{failed} FAILED", "failed", note=note)
        if stats is None:
            cells = [Cell("0"), *[Cell(DASH, "muted")] * 7]
        else:
            figures = (stats.geomean, stats.p5, stats.p50, stats.p95, stats.min, stats.max)
            cells = [
                Cell(str(stats.n)),
                *(Cell(f"{v:.2f}", sort=v) for v in figures),
                Cell(percent(stats.share_won)),
            ]
        summary.rows.append([Cell(variant), *cells, lost])
    ranked = sorted((s, i) for i, g in enumerate(groups) if (s := g.speedup(g.ours)))
    if len(ranked) <= 2 * _EXTREMES:
        chosen = [i for _, i in ranked]
    else:
        chosen = [i for _, i in ranked[:_EXTREMES] + ranked[-_EXTREMES:]]
    if not chosen:
        return [summary]
    extremes = _shape_table([groups[i] for i in chosen], f"sweep, {dtype}, slowest and fastest", noise)
    return [summary, extremes]
