"""Tables of the link suite: what the machine can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..records import Row
from .analysis import group_cases, noise_floor
from .table import DASH, Cell, Column, Table, number, percent, size
from .tables_gemm import describe_noise, shape_text, split
from .tables_overlap import ranks

__all__ = ["TRANSFERS", "Transport", "link_tables", "slowdown", "transport_of"]

# Transfers between ranks, in the order of tables.
TRANSFERS = ("push", "pull", "all_gather", "scatter", "reduce_scatter", "all_reduce", "push_flags")


@dataclass(frozen=True)
class Transport:
    """Who moved the bytes of a row: ``kind`` ("engine", "bulk", "lsu", "nccl", ...) and, for SMs, how many (0: all)."""

    kind: str
    sms: int
    plain: bool  # neither in chunks nor with a flag behind each piece


def transport_of(row: Row) -> Transport:
    """From what the suite notes in ``extra``, or in ``params``."""
    both: dict[str, Any] = {**row.params, **row.extra}
    kind = str(both.get("kind") or ("" if both.get("sms") else "engine"))
    return Transport(
        kind, int(both.get("sms") or 0), not both.get("flag") and int(both.get("chunks") or 1) == 1
    )


def slowdown(row: Row) -> float | None:
    """By which fraction a GEMM takes longer beside a transport; launched from the host in turn, if that is known."""
    ratio = row.extra.get("gemm_slowdown")
    if ratio is None:
        alone, beside = row.extra.get("gemm_alone_us"), row.extra.get("gemm_beside_us")
        ratio = beside / alone if alone and beside else None
    return None if ratio is None else float(ratio) - 1


def link_tables(rows: Sequence[Row]) -> list[Table]:
    """For each world: bandwidth of each transfer, a GEMM beside each transport, the rest, and the constants."""
    tables = []
    for groups in split(group_cases(rows, "link"), lambda g: g.world).values():
        own = [row for g in groups for row in g.rows.values() if row.role != "noise"]
        where = ranks(groups[0].world)
        noise = noise_floor(groups)
        note = f" {describe_noise(noise)}" if noise else ""
        for op in TRANSFERS:
            moves = [row for row in own if row.op == op]
            if moves:
                tables.append(_transfer(moves, f"{op.replace('_', '-')}, {where}", note))
        beside = [row for row in own if row.op == "beside"]
        if beside:
            tables.append(_beside(beside, where))
        rest = [row for row in own if row.op not in (*TRANSFERS, "beside", "constants")]
        if rest:
            tables.append(_rest(rest, where))
        constants = [row for row in own if row.op == "constants" and row.status == "ok"]
        if constants:
            tables.append(_constants(constants[-1], where))
    return tables


def _transfer(rows: Sequence[Row], title: str, note: str) -> Table:
    """A line for each transport, a column for each size."""
    sizes = sorted({float(row.params.get("bytes") or row.bytes) for row in rows})
    table = Table(
        title,
        [Column("transport", numeric=False), *(Column(size(s)) for s in sizes)],
        caption=f"GB/s that a rank sends, all ranks at once, by the size of a piece.{note}",
    )
    lines: dict[str, dict[float, Row]] = {}
    for row in rows:
        lines.setdefault(row.variant, {})[float(row.params.get("bytes") or row.bytes)] = row
    for variant, by_size in lines.items():
        table.rows.append([Cell(variant), *(_gbps(table, by_size.get(s)) for s in sizes)])
    return table


def _gbps(table: Table, row: Row | None) -> Cell:
    if row is None or row.status != "ok":
        return table.time(row)
    us = number(row.best.p50) if row.best else DASH
    return Cell(number(row.gbps), title=f"{us} us; {table.time(row).title}", sort=row.gbps)


def _beside(rows: Sequence[Row], where: str) -> Table:
    columns = [Column("case", numeric=False), Column("transport", numeric=False), Column("M × N × K")]
    columns += [Column("GEMM alone, us"), Column("transport alone, us"), Column("both together, us")]
    columns.append(Column("GEMM slower by"))
    caption = (
        "No dependency between the two: what overlap can reach, and what carrying the data costs the product."
    )
    table = Table(f"a GEMM beside each transport, {where}", columns, caption=caption)
    for row in rows:
        names = [Cell(row.case), Cell(_name(row)), Cell(shape_text(row))]
        if row.status != "ok":
            table.rows.append([*names, table.time(row), *[Cell(DASH, "muted")] * 3])
            continue
        times = [row.extra.get(name) for name in ("gemm_alone_us", "transport_alone_us", "together_us")]
        slower = slowdown(row)
        cells = [Cell(number(t), sort=t) for t in times]
        table.rows.append([*names, *cells, Cell(percent(slower), sort=slower)])
    return table


def _name(row: Row) -> str:
    return str(row.extra.get("transport") or row.params.get("transport") or row.variant)


def _rest(rows: Sequence[Row], where: str) -> Table:
    columns = [
        Column("case", numeric=False),
        Column("variant", numeric=False),
        Column("dtype", numeric=False),
    ]
    columns += [Column("us"), Column("GB/s"), Column("TFLOP/s")]
    table = Table(f"device, {where}", columns, caption="A copy counts bytes read and written.")
    for row in rows:
        ok = row.status == "ok"
        rates = [row.gbps if ok else None, row.tflops if ok else None]
        cells = [Cell(number(v), "" if v else "muted", sort=v) for v in rates]
        table.rows.append(
            [Cell(row.case), Cell(row.variant), Cell(row.dtype or DASH), table.time(row), *cells]
        )
    return table.trimmed()


def _constants(row: Row, where: str) -> Table:
    table = Table(
        f"constants of the models, {where}",
        [Column("constant", numeric=False), Column("value")],
        caption="Fitted to the measurements above.",
    )
    for name, value in row.extra.items():
        text = number(value) if isinstance(value, (int, float)) else str(value)
        table.rows.append([Cell(name), Cell(text)])
    return table
