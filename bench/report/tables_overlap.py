"""Tables of the overlap suite: one an operation, world and dtype."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Row
from .analysis import Group, group_cases, noise_floor
from .best_schedule import Links, best_schedule, describe_best, over_best
from .table import DASH, Cell, Column, Table, hidden_text, number
from .tables_gemm import MIXED, describe_never_run, describe_noise, never_run, split, variants_of

__all__ = ["OP_TITLES", "overlap_tables", "ranks"]

OP_TITLES = {
    "all_gather_matmul": "all-gather + GEMM",
    "matmul_reduce_scatter": "GEMM + reduce-scatter",
    "matmul_all_reduce": "GEMM + all-reduce",
}


def ranks(world: int) -> str:
    """ "4 ranks"."""
    return f"{world} rank{'' if world == 1 else 's'}"


def overlap_tables(rows: Sequence[Row], links: Links | None = None) -> list[Table]:
    """One table for each world, dtype and operation; the noise floor is that of the world and dtype.

    ``links``: constants of the card by ranks; without those the best schedule is not told.
    """
    tables = []
    for part in split(group_cases(rows, "overlap"), lambda g: (g.world, g.dtype)).values():
        for of_op in split(part, lambda g: g.first.op).values():
            tables.append(_table(of_op, part, links or {}))
    return tables


def _table(groups: Sequence[Group], same_machine: Sequence[Group], links: Links) -> Table:
    first = groups[0]
    noise = noise_floor(same_machine)
    baseline = next((g.baseline_name for g in groups if g.baseline_name), "baseline")
    absent = never_run(groups, variants_of(groups, "part", "ceiling", "peer", "ours"))
    peers = [v for v in variants_of(groups, "peer") if v != baseline and v not in absent]
    ours = [v for v in variants_of(groups, "ours") if v not in absent]
    parts = [v for v in ("gemm", "comm", "ceiling") if v not in absent]
    columns = [Column("shape", numeric=False), Column("M"), Column("N, K of a rank")]
    columns += [Column(f"{name}, us") for name in (*parts, baseline, *peers)]
    columns += [Column(f"{v}, us", ours=True) for v in ours]
    columns += [Column(f"× {baseline}", ours=True), Column("× best peer", ours=True)]
    columns += [Column("exposed, us", ours=True), Column("hidden", ours=True)]
    columns += [Column("best schedule, us"), Column("ours / best", ours=True)]
    mine = sorted({g.ours.variant for g in groups if g.ours is not None})
    named = "ours (auto)" if mine in ([], ["ours"]) else ", ".join(mine)
    bests = [best_schedule(group, links) for group in groups]
    told = f" {describe_best(links[first.world])}" if any(bests) else ""
    caption = (
        f"×: time of {baseline}, or of the fastest peer, / time of {named}. Exposed: t_fused - t_gemm; "
        f"hidden: 1 - exposed / t_comm. {describe_noise(noise)}{told}{describe_never_run(absent)}"
    )
    title = f"{OP_TITLES.get(first.first.op, first.first.op)}, {ranks(first.world)}, {first.dtype}"
    table = Table(title, columns, caption=caption)
    for group, best in zip(groups, bests, strict=True):
        p, row = group.first.params, group.ours
        cells = [
            Cell(group.case),
            Cell(str(p.get("m", DASH))),
            Cell(f"{p.get('n', DASH)}, {p.get('k', DASH)}"),
        ]
        cells += [table.time(group.rows.get(v)) for v in (*parts, baseline, *peers, *ours)]
        note = table.note(MIXED) if group.across_runs(row) else 0
        cells.append(table.ratio(group.speedup(row), noise, note=note))
        cells.append(table.ratio(group.against(row, group.best_peer), noise, note=note))
        exposed = group.exposed(row)
        cells.append(Cell(number(exposed.exposed), sort=exposed.exposed) if exposed else Cell(DASH, "muted"))
        cells.append(
            Cell(hidden_text(exposed.hidden), sort=exposed.hidden) if exposed else Cell(DASH, "muted")
        )
        over = over_best(group, row, links)
        how = f"{best.schedule}, {best.copies} copies of a shard" if best else ""
        cells.append(Cell(number(best.us), title=how, sort=best.us) if best else Cell(DASH, "muted"))
        cells.append(Cell(f"{over:.2f}", title=f"{over:.3f}", sort=over) if over else Cell(DASH, "muted"))
        table.rows.append(cells)
    return table.trimmed()
