"""Tables of the sweep: bars, statistics as in the paper, classes of shapes, the worst shapes, the cost model."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Row, geomean
from .analysis import Group, group_cases, noise_floor, percentile, plan_of, waves
from .sweep import (
    AUTO,
    CLASSES,
    COMPUTE_BOUND,
    OURS,
    SAME_TILE,
    Bars,
    Classes,
    Statistics,
    bars_of,
    classes,
    is_compute_bound,
    model_error,
    plan_text,
    predicted_us,
    ratio,
    ratios,
    regrets,
)
from .table import DASH, Cell, Column, Table, number, percent
from .tables_bars import verdict_cell
from .tables_gemm import describe_noise, shape_text, split

__all__ = ["sweep_bars_tables", "sweep_tables", "sweep_text"]

_WORST = 10
_STATISTICS = {
    "geomean": "geomean",
    "p5": "5th percentile",
    "average": "average",
    "min": "min",
    "max": "max",
}


def sweep_tables(rows: Sequence[Row]) -> list[Table]:
    """All tables, dtype by dtype."""
    tables = []
    for dtype, groups in split(group_cases(rows, "sweep"), lambda g: g.dtype).items():
        tables += _bars(groups, dtype)
        tables.append(_statistics(groups, dtype))
        tables += [t for by in CLASSES.values() if (t := _classes(groups, dtype, by))]
        tables += [t for t in (_plans(groups, dtype), _worst(groups, dtype), _model(groups, dtype)) if t]
        if found := _regrets(groups, dtype):
            tables.append(found)
    return tables


def sweep_bars_tables(rows: Sequence[Row]) -> list[Table]:
    """Bars and statistics alone: what a README shows."""
    return [
        table
        for dtype, groups in split(group_cases(rows, "sweep"), lambda g: g.dtype).items()
        for table in [*_bars(groups, dtype), _statistics(groups, dtype)]
    ]


def sweep_text(rows: Sequence[Row]) -> str:
    """Bars and statistics as text, for the end of a run."""
    return "\n\n".join(t.markdown(heading="#", pad=True) for t in sweep_bars_tables(rows))


def _against(groups: Sequence[Group], against: str) -> str:
    baseline = next((g.baseline_name for g in groups if g.baseline_name), "cublas")
    return baseline if against == "cublas" else "data-parallel, same tile"


def _bars(groups: Sequence[Group], dtype: str) -> list[Table]:
    found = bars_of(groups)
    if not any(bar.value for bar in found):
        return []
    held = sum(bar.verdict == "holds" for bar in found)
    columns = [Column("ours", numeric=False), Column("against", numeric=False), Column("shapes")]
    columns += [Column("what", numeric=False), Column("reached", ours=True), Column("bar")]
    columns += [Column("at", numeric=False), Column("", numeric=False)]
    caption = f"{held} of {len(found)} bars hold. Ratios are the other's time over ours."
    table = Table(f"sweep bars, {dtype}", columns, caption=caption)
    for bar in found:
        table.rows.append(
            [
                Cell(bar.bar.ours),
                Cell(_against(groups, bar.bar.against)),
                Cell(_count(bar)),
                Cell(_STATISTICS[bar.bar.statistic]),
                Cell(f"{bar.value:.3f}", sort=bar.value) if bar.value else Cell(DASH, "muted"),
                Cell(f"≥ {bar.bar.least:.2f}"),
                Cell(bar.at.removeprefix("sweep ") or DASH),
                verdict_cell(bar.verdict, near=False),
            ]
        )
    return [table.trimmed()]


def _count(bar: Bars) -> str:
    wrong = f", {bar.wrong} wrong" if bar.wrong else ""
    return (f"{bar.n} of {bar.n + bar.missing}" if bar.missing else str(bar.n)) + wrong


def _statistics(groups: Sequence[Group], dtype: str) -> Table:
    names = ("geomean", "average", "std. dev.", "5th pct.", "median", "95th pct.", "min", "max", "at least 1")
    columns = [Column("ratio", numeric=False), Column("shapes"), *map(Column, names), Column("not timed")]
    limit = COMPUTE_BOUND.get(dtype)
    caption = (
        f"{len(groups)} shapes, log-sampled. Above 1 ours is faster. "
        + (f"Compute-bound: more than {limit:.0f} flop/byte, as in the paper. " if limit else "")
        + _taken(groups)
        + describe_noise(noise_floor(groups))
    )
    table = Table(f"sweep, {dtype}", columns, caption=caption)
    bound = [g for g in groups if is_compute_bound(g)]
    for ours, against in ((OURS, "cublas"), (OURS, "same tile"), (AUTO, "cublas")):
        for some, what in ((groups, ""), (bound, ", compute-bound")):
            stats = Statistics.of([v for _, v in ratios(some, ours, against)])
            if not stats:
                continue
            name = f"{ours} over {_against(groups, against)}{what}"
            figures = (stats.geomean, stats.average, stats.deviation, stats.p5, stats.median, stats.p95)
            cells = [Cell(f"{v:.3f}", sort=v) for v in (*figures, stats.min, stats.max)]
            table.rows.append(
                [Cell(name), Cell(str(stats.n)), *cells, Cell(percent(stats.won)), _lost(table, some, ours)]
            )
    return table


def _taken(groups: Sequence[Group]) -> str:
    """How often auto took our kernel, "" where rows do not say."""
    took = [row.extra["took"] for g in groups if (row := g.timed(AUTO)) and "took" in row.extra]
    return f"auto took our kernel in {percent(took.count('streamk') / len(took))} of them. " if took else ""


def _lost(table: Table, groups: Sequence[Group], variant: str) -> Cell:
    rows = [g.rows[variant] for g in groups if variant in g.rows]
    bad = [row for row in rows if row.status != "ok"]
    wrong = [row for row in bad if row.status == "failed"]
    if wrong:
        note = table.note(f"{len(wrong)} wrong: {', '.join(row.case for row in wrong[:_WORST])}")
        return Cell(f"{len(wrong)} FAILED", "failed", note=note)
    if bad:
        return Cell(
            str(len(bad)), note=table.note("; ".join(dict.fromkeys(row.reason for row in bad[:_WORST])))
        )
    return Cell("0", "muted")


def _figures(part: Sequence[Group]) -> list[Cell]:
    """Of a class of shapes: how many, against the baseline, against data-parallel, rates."""
    base = Statistics.of([v for _, v in ratios(part, OURS, "cublas")])
    plain = Statistics.of([v for _, v in ratios(part, OURS, "same tile")])
    slow = sum(v < 0.85 for _, v in ratios(part, OURS, "cublas"))
    cells = [Cell(str(len(part)))]
    if base:
        cells += [Cell(f"{v:.2f}", sort=v) for v in (base.geomean, base.p5, base.min)]
        cells.append(Cell(str(slow), "" if slow else "muted", sort=slow))
    else:
        cells += [Cell(DASH, "muted")] * 4
    if plain:
        cells += [Cell(f"{v:.2f}", sort=v) for v in (plain.geomean, plain.max)]
    else:
        cells += [Cell(DASH, "muted")] * 2
    for variant in (OURS, part[0].baseline_name):
        rates = [row.tflops for g in part if (row := g.timed(variant)) and row.tflops]
        cells.append(Cell(number(percentile(rates, 50)) if rates else DASH))
    return cells


def _class_columns(groups: Sequence[Group], name: str) -> list[Column]:
    baseline = _against(groups, "cublas")
    names = ["shapes", f"× {baseline}", "5th pct.", "min", "below 0.85", "× data-parallel, same tile", "max"]
    rates = [Column("TFLOP/s", ours=True), Column(f"TFLOP/s of {baseline}")]
    return [Column(name, numeric=False), *map(Column, names), *rates]


def _classes(groups: Sequence[Group], dtype: str, by: Classes) -> Table | None:
    parts = classes(groups, by)
    if not parts:
        return None
    caption = "×: geometric means; rates: medians."
    table = Table(f"sweep, {dtype}, by {by.title}", _class_columns(groups, by.title), caption=caption)
    table.rows = [[Cell(name), *_figures(part)] for name, part in parts]
    return table.trimmed()


def _plans(groups: Sequence[Group], dtype: str) -> Table | None:
    planned = [g for g in groups if plan_of(g.rows.get(OURS))]
    if not planned:
        return None
    table = Table(f"sweep, {dtype}, by our plan", _class_columns(groups, "schedule and tile"))

    def name(group: Group) -> str:
        plan = plan_of(group.rows.get(OURS))
        tile = str(plan.get("tile_name") or "").partition("/")[0].replace("x", "×")
        return f"{plan.get('schedule', '?')} {tile}"

    parts = sorted(split(planned, name).items(), key=lambda part: -len(part[1]))
    table.rows = [[Cell(what), *_figures(part)] for what, part in parts]
    return table.trimmed()


def _worst(groups: Sequence[Group], dtype: str) -> Table | None:
    ranked = sorted(ratios(groups, OURS, "cublas"), key=lambda pair: pair[1])[:_WORST]
    if not ranked:
        return None
    baseline = _against(groups, "cublas")
    columns = [Column("M × N × K"), Column(f"{baseline}, us"), Column("streamk, us", ours=True)]
    columns += [
        Column("predicted, us"),
        Column("data-parallel, same tile, us"),
        Column(f"× {baseline}", ours=True),
    ]
    columns += [Column("waves"), Column("plan of ours", numeric=False)]
    table = Table(f"sweep, {dtype}, the worst {len(ranked)}", columns)
    for group, value in ranked:
        row = group.rows[OURS]
        table.rows.append(
            [
                Cell(shape_text(row)),
                table.time(group.baseline),
                table.time(row),
                Cell(number(predicted_us(row))),
                table.time(group.timed(SAME_TILE)),
                Cell(f"{value:.2f}", sort=value),
                Cell(number(waves(row))),
                Cell(plan_text(row)),
            ]
        )
    return table.trimmed()


def _model(groups: Sequence[Group], dtype: str) -> Table | None:
    """How far predicted times are off, by schedule and by measured time."""
    ours = [row for g in groups if (row := g.timed(OURS)) and predicted_us(row)]
    plain = [row for g in groups if (row := g.timed(SAME_TILE)) and predicted_us(row)]
    if not ours:
        return None
    columns = [
        Column("rows", numeric=False),
        Column("shapes"),
        Column("error, median"),
        Column("error, 90th pct."),
    ]
    columns += [Column("predicted / measured, median")]
    caption = "Of the cost model's times. Error: the larger of predicted / measured and its inverse, less 1."
    table = Table(f"sweep, {dtype}, the cost model", columns, caption=caption)
    parts: dict[str, list[Row]] = {"streamk": ours}
    for row in ours:
        parts.setdefault(f"streamk: {plan_of(row).get('schedule')}", []).append(row)
    parts["data-parallel, same tile"] = plain
    for name, edges in (("below 10 us", (0, 10)), ("10 to 50 us", (10, 50)), ("50 us and more", (50, 1e9))):
        parts[name] = [row for row in ours if row.us and edges[0] <= row.us.p50 < edges[1]]
    for name, some in parts.items():
        if error := model_error(some):
            figures = [f"{100 * v:.1f} %" for v in (error.median, error.p90)]
            table.rows.append(
                [Cell(name), Cell(str(error.n)), *map(Cell, figures), Cell(f"{error.bias:.3f}")]
            )
    return table


def _regrets(groups: Sequence[Group], dtype: str) -> Table | None:
    found = sorted(regrets(groups), key=lambda one: -one[1])
    if not found:
        return None
    values = [value for _, value, _ in found]
    best = [g.baseline.us.p50 / row.us.p50 for g, _, row in found if g.baseline and g.baseline.us and row.us]
    caption = (
        f"{len(found)} shapes, time of the planner's choice over that of the fastest plan measured: geomean "
        f"{geomean(values):.3f}, 90th percentile {percentile(values, 90):.3f}."
    )
    if best:
        caption += (
            f" Against {_against(groups, 'cublas')} the fastest has geomean {geomean(best):.3f}, 5th percentile "
            f"{percentile(best, 5):.3f}."
        )
    columns = [Column("M × N × K"), Column("chosen, us"), Column("fastest, us"), Column("chosen / fastest")]
    columns += [Column(f"fastest × {_against(groups, 'cublas')}"), Column("chosen", numeric=False)]
    table = Table(
        f"sweep, {dtype}, what the planner loses",
        [*columns, Column("fastest", numeric=False)],
        caption=caption,
    )
    for group, value, row in found[:_WORST]:
        chosen, speedup = group.rows[OURS], ratio(group, row.variant, "cublas")
        table.rows.append(
            [
                Cell(shape_text(row)),
                table.time(chosen),
                table.time(row),
                Cell(f"{value:.3f}", sort=value),
                Cell(f"{speedup:.2f}" if speedup else DASH, sort=speedup),
                Cell(plan_text(chosen)),
                Cell(plan_text(row)),
            ]
        )
    return table.trimmed()
