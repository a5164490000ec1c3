"""Tables of the layer and train suites: a line for each variant of a case."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Row
from .analysis import Group, Noise, forward_backward, group_cases, noise_floor
from .table import DASH, Cell, Column, Table, number
from .tables_gemm import MIXED, describe_never_run, describe_noise, never_run, split, variants_of
from .tables_overlap import ranks

__all__ = ["layer_tables", "train_tables"]

MIB = 1 << 20


def layer_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each world and dtype: forward, backward, both, peak memory, and what grids send."""
    tables = []
    for groups in split(group_cases(rows, "layer"), lambda g: (g.world, g.dtype)).values():
        noise = noise_floor(groups)
        baseline = groups[0].baseline_name
        table = Table(
            f"layers, {ranks(groups[0].world)}, {groups[0].dtype}",
            [
                *_columns(),
                Column("forward, us"),
                Column("backward, us"),
                Column("both, us"),
                Column(f"× {baseline or 'baseline'}"),
                Column("peak memory, MiB"),
                Column("sent by a rank, MiB"),
            ],
            caption=f"×: time of {baseline or 'the baseline'} / time of the variant. {describe_noise(noise)}"
            + describe_never_run(_never_run(groups)),
        )
        for group, row in _lines(groups):
            parts = [Cell(number(t), "" if t else "muted", sort=t) for t in forward_backward(row)]
            peak = row.peak_bytes / MIB if row.peak_bytes and row.status == "ok" else None
            table.rows.append(
                [
                    *_names(group, row),
                    *parts,
                    table.time(row),
                    _ratio(table, group, row, noise),
                    Cell(number(peak), title=_outside(row), sort=peak),
                    _sent(row),
                ]
            )
        tables.append(table.trimmed())
    return tables


def train_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each world and dtype: time of a step, tokens/s, model FLOP utilisation."""
    tables = []
    for groups in split(group_cases(rows, "train"), lambda g: (g.world, g.dtype)).values():
        noise = noise_floor(groups)
        baseline = groups[0].baseline_name
        table = Table(
            f"training, {ranks(groups[0].world)}, {groups[0].dtype}",
            [
                *_columns(),
                Column("step, ms"),
                Column("tokens/s"),
                Column(f"× {baseline or 'baseline'}"),
                Column("MFU, %"),
                Column("peak memory, MiB"),
            ],
            caption=f"×: time of {baseline or 'the baseline'} / time of the variant. MFU: model FLOP utilisation. "
            f"{describe_noise(noise)}{describe_never_run(_never_run(groups))}",
        )
        for group, row in _lines(groups):
            mfu = row.extra.get("mfu") if row.status == "ok" else None
            peak = row.peak_bytes / MIB if row.peak_bytes and row.status == "ok" else None
            table.rows.append(
                [
                    *_names(group, row),
                    table.time(row, milliseconds=True),
                    _extra(row, "tokens_per_s"),
                    _ratio(table, group, row, noise),
                    Cell(number(100 * mfu) if mfu else DASH, sort=mfu),
                    Cell(number(peak), title=_outside(row), sort=peak),
                ]
            )
        tables.append(table.trimmed())
    return tables


def _columns() -> list[Column]:
    return [Column("case", numeric=False), Column("variant", numeric=False)]


def _lines(groups: Sequence[Group]) -> list[tuple[Group, Row]]:
    """Case by case: the baseline, other peers, ours, then whatever else (noise rows have no line)."""
    lines = []
    absent = _never_run(groups)
    for group in groups:
        order = variants_of([group], "peer", "ours", "part", "ceiling")
        order.sort(key=lambda v: v != group.baseline_name)
        lines += [(group, group.rows[v]) for v in order if v not in absent]
    return lines


def _never_run(groups: Sequence[Group]) -> dict[str, str]:
    return never_run(groups, variants_of(groups, "peer", "ours"))


def _names(group: Group, row: Row) -> list[Cell]:
    return [Cell(group.case), Cell(row.variant)]


def _extra(row: Row, name: str) -> Cell:
    value = row.extra.get(name) if row.status == "ok" else None
    return Cell(number(value), sort=value) if isinstance(value, (int, float)) else Cell(DASH, "muted")


def _sent(row: Row) -> Cell:
    """Forward and backward together; layers on grids alone count it."""
    sent = row.extra.get("sent_bytes") if row.status == "ok" else None
    return Cell(number(sent / MIB), sort=sent) if sent else Cell("")


def _ratio(table: Table, group: Group, row: Row, noise: Noise | None) -> Cell:
    if row.variant == group.baseline_name:
        return Cell("1" if group.baseline else DASH, "muted")
    return table.ratio(group.speedup(row), noise, note=table.note(MIXED) if group.across_runs(row) else 0)


def _outside(row: Row) -> str:
    taken = row.extra.get("outside_bytes", 0) / MIB
    return f"and {number(taken)} MiB outside torch's allocator (symmetric memory, libraries)" if taken else ""
