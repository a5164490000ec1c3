"""Tables of suite ``quantize``."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Row
from .analysis import Group, group_cases, noise_floor
from .table import DASH, Cell, Column, Table, number, percent
from .tables_gemm import describe_noise, split

__all__ = ["quantize_tables"]


def quantize_tables(rows: Sequence[Row]) -> list[Table]:
    """For each dtype and operation: GB/s of each variant, and what part of a copy's that is."""
    tables = []
    groups = group_cases(rows, "quantize")
    for some in split(groups, lambda g: (g.dtype, g.first.op)).values():
        dtype, op = some[0].dtype, some[0].first.op
        names = list(dict.fromkeys(v for g in some for v, row in g.rows.items() if row.role != "noise"))
        columns = [Column("M × K", numeric=False), Column("scales", numeric=False), Column("MB")]
        for name in names:
            columns.append(Column(f"{name}, GB/s", ours=name == "ours"))
            if name != "copy":
                columns.append(Column("of a copy", ours=name == "ours"))
        noise = noise_floor(some)
        caption = "Bytes that have to move over the time. A copy moves as many."
        table = Table(
            f"{op}, {dtype}", columns, caption=caption + (f" {describe_noise(noise)}" if noise else "")
        )
        table.rows = [_line(table, group, names) for group in some]
        tables.append(table)
    return tables


def _line(table: Table, group: Group, names: Sequence[str]) -> list[Cell]:
    first = group.first
    shape = " × ".join(str(first.params[name]) for name in "mk")
    cells = [Cell(shape), Cell(str(first.params["scaling"])), Cell(number(first.bytes / 1e6))]
    copy = group.rows.get("copy")
    for name in names:
        row = group.rows.get(name)
        if row is None or row.status != "ok" or row.best is None:
            cells += [table.time(row), *([Cell(DASH, "muted")] if name != "copy" else [])]
            continue
        cells.append(Cell(number(row.gbps), title=f"{number(row.best.p50)} us", sort=row.gbps))
        if name != "copy":
            part = copy.best.p50 / row.best.p50 if copy is not None and copy.best else None
            cells.append(Cell(percent(part), sort=part))
    return cells
