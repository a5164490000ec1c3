"""Tables of the gemm suite beside those of plain products: layouts of operands, epilogues, and forced tiles."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Row
from ..suites.gemm_shapes import BLAS_LAYOUTS, EPILOGUES, LAYOUTS
from .analysis import Group, Noise, group_cases, noise_floor, plan_of
from .table import DASH, Cell, Column, Table, number
from .tables_gemm import describe_noise, forces_tile, shape_text, split

__all__ = ["epilogue_tables"]

OURS = "streamk"
PLAIN = "streamk:plain"
_NAMES = {
    "bias_gelu": "gelu(a @ b + bias)",
    "bias_silu": "silu(a @ b + bias)",
    "swiglu": "silu(a @ gate) * (a @ b)",
    "accumulate": "out + a @ b, fp32",
    "residual": "a @ b + residual",
}


def epilogue_tables(rows: Sequence[Row]) -> list[Table]:
    """For each dtype what there is of the three."""
    tables = []
    for dtype, groups in split(group_cases(rows, "gemm"), lambda g: g.dtype).items():
        noise = noise_floor(groups)
        layouts = [g for g in groups if g.first.op == LAYOUTS]
        fused = [g for g in groups if g.first.op in EPILOGUES]
        tiled = [g for g in groups if any(forces_tile(v) and g.timed(v) for v in g.rows)]
        tables += [_layouts(layouts, dtype, noise)] if layouts else []
        tables += [_epilogues(fused, dtype, noise)] if fused else []
        tables += [_tiles(tiled, dtype)] if tiled else []
    return tables


def over(group: Group, other: str, ours: str) -> float | None:
    """Time of ``other`` over that of ``ours``, on the device; above 1 ours is faster."""
    a, b = group.timed(other), group.timed(ours)
    return a.us.p50 / b.us.p50 if a and b and a.us and b.us and b.us.p50 > 0 else None


def _tflops(row: Row | None) -> Cell:
    value = row.tflops if row else None
    return Cell(number(value), "" if value else "muted", sort=value)


def _layouts(groups: Sequence[Group], dtype: str, noise: Noise | None) -> Table:
    base = next((g.baseline_name for g in groups if g.baseline_name), "baseline")
    columns = [Column("M × N × K", numeric=False), Column("layout", numeric=False), Column(f"{base}, us")]
    columns += [Column(f"{OURS}, us", ours=True), Column("TFLOP/s", ours=True)]
    columns += [Column(f"× {base}", ours=True), Column("× own TN", ours=True)]
    caption = (
        "Operands as BLAS names them (stored by columns, T is transposed): of TN, K is contiguous in both. "
        f"×: the other's time over ours. {describe_noise(noise)}"
    )
    table = Table(f"layouts, {dtype}", columns, caption=caption)
    for group in groups:
        for layout in BLAS_LAYOUTS:
            suffix = "" if layout == "TN" else f":{layout}"
            theirs, ours = base + suffix, OURS + suffix
            if theirs not in group.rows and ours not in group.rows:
                continue
            cells = [Cell(shape_text(group.first)), Cell(layout)]
            cells += [table.time(group.rows.get(theirs)), table.time(group.rows.get(ours))]
            cells += [_tflops(group.timed(ours)), table.ratio(over(group, theirs, ours), noise)]
            cells.append(table.ratio(over(group, OURS, ours), noise) if suffix else Cell(DASH, "muted"))
            table.rows.append(cells)
    return table


def _epilogues(groups: Sequence[Group], dtype: str, noise: Noise | None) -> Table:
    base = next((g.baseline_name for g in groups if g.baseline_name), "baseline")
    fused = f"{base}:fused"
    columns = [Column("out", numeric=False), Column("M × N × K"), Column(f"torch ({base}), us")]
    columns += [
        Column(f"{base} with epilogue, us"),
        Column(f"{base} plain, us"),
        Column("plain, us", ours=True),
    ]
    columns += [Column(f"{OURS}, us", ours=True), Column("× torch", ours=True)]
    columns += [Column(f"× {base} with epilogue", ours=True), Column("over plain", ours=True)]
    caption = (
        "×: the other's time over ours. Plain: the product alone, without the epilogue and with as many columns of the "
        f"weight in all; over plain: what the epilogue adds to it. {describe_noise(noise)}"
    )
    table = Table(f"epilogues, {dtype}", columns, caption=caption)
    for group in groups:
        ours = group.rows.get(OURS)
        cells = [Cell(_NAMES[group.first.op]), Cell(shape_text(group.first))]
        cells += [table.time(group.rows.get(v)) for v in (base, fused, f"{base}:plain", PLAIN, OURS)]
        cells += [table.ratio(group.speedup(ours), noise), table.ratio(over(group, fused, OURS), noise)]
        cells.append(_more(over(group, PLAIN, OURS)))
        table.rows.append(cells)
    return table.trimmed()


def _more(ratio: float | None) -> Cell:
    """A ratio of times as the time that is added."""
    if not ratio:
        return Cell(DASH, "muted")
    return Cell(f"{100 * (1 / ratio - 1):+.1f} %", sort=1 / ratio)


def _tiles(groups: Sequence[Group], dtype: str) -> Table:
    """The fastest of the forced tiles, and what the cost model's choice loses against it."""
    columns = [
        Column("shape", numeric=False),
        Column("the model's choice", numeric=False),
        Column("us", ours=True),
    ]
    columns += [Column("predicted, us"), Column("the fastest of all", numeric=False), Column("us", ours=True)]
    columns += [Column("predicted, us"), Column("tried"), Column("choice / fastest", ours=True)]
    caption = "Every schedule on every tile that was asked for. The last column is 1 where the model chose the best."
    table = Table(f"tiles, {dtype}", columns, caption=caption)
    for group in groups:
        timed = [row for v in group.rows if forces_tile(v) and (row := group.timed(v)) and row.us]
        best = min(timed, key=lambda row: row.us.p50 if row.us else 0.0)
        own = group.timed(OURS)
        lost = own.us.p50 / best.us.p50 if own and own.us and best.us else None
        cells = [Cell(group.case), Cell(_choice(own)), table.time(group.rows.get(OURS)), _predicted(own)]
        cells += [Cell(_choice(best)), table.time(best), _predicted(best), Cell(str(len(timed)))]
        cells.append(Cell(f"{lost:.3f}" if lost else DASH, sort=lost))
        table.rows.append(cells)
    return table


def _choice(row: Row | None) -> str:
    plan = plan_of(row)
    if not plan:
        return DASH
    tile = plan.get("tile_name") or "x".join(map(str, plan.get("tile", ())))
    splits = plan.get("splits") or 1
    return f"{plan.get('schedule', '?')} {tile}" + (f", {splits} splits" if splits > 1 else "")


def _predicted(row: Row | None) -> Cell:
    value = plan_of(row).get("predicted_us")
    return Cell(number(value), "" if value else "muted", sort=value)
