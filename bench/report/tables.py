"""Which tables there are for each suite, and the selection that a README block names: "gemm square bfloat16".

Beside the suites such a name may begin with ``gemm-bars``, ``sweep-bars``, ``overlap-bars`` or ``overlap-peers``: bars
of the suite, which of them hold; or with ``layer-peers``: means over the layers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence

from ..errors import BenchError, check_known
from ..records import Row
from .analysis import SUITES
from .best_schedule import Links
from .table import Table
from .tables_bars import bars_tables
from .tables_epilogues import epilogue_tables
from .tables_gemm import gemm_tables
from .tables_link import link_tables
from .tables_model import layer_tables, train_tables
from .tables_overlap import overlap_tables
from .tables_overlap_bars import overlap_bars_tables
from .tables_peers import layer_peers_tables, overlap_peers_tables
from .tables_quantize import quantize_tables
from .tables_sweep import sweep_bars_tables, sweep_tables

__all__ = ["TABLES", "select", "suite_of", "suite_tables", "suites_of"]


def _gemm(rows: Sequence[Row]) -> list[Table]:
    return gemm_tables(rows) + epilogue_tables(rows)


# Of rows and the constants of links, which the models of some need.
TABLES: dict[str, Callable[[Sequence[Row], Links], list[Table]]] = {
    "link": lambda rows, _: link_tables(rows),
    "gemm": lambda rows, _: _gemm(rows),
    "sweep": lambda rows, _: sweep_tables(rows),
    "quantize": lambda rows, _: quantize_tables(rows),
    "overlap": overlap_tables,
    "layer": lambda rows, _: layer_tables(rows),
    "train": lambda rows, _: train_tables(rows),
    "gemm-bars": lambda rows, _: bars_tables(rows),
    "sweep-bars": lambda rows, _: sweep_bars_tables(rows),
    "overlap-bars": overlap_bars_tables,
    "overlap-peers": lambda rows, _: overlap_peers_tables(rows),
    "layer-peers": lambda rows, _: layer_peers_tables(rows),
}
_SUMMARIES = {  # of which suite
    "gemm-bars": "gemm",
    "sweep-bars": "sweep",
    "overlap-bars": "overlap",
    "overlap-peers": "overlap",
    "layer-peers": "layer",
}
_SHORT = {"AG": "all_gather_matmul", "RS": "matmul_reduce_scatter", "AR": "matmul_all_reduce"}


def suites_of(rows: Iterable[Row]) -> list[str]:
    """The suites that have rows, in the order of the report."""
    there = {row.suite for row in rows}
    return [s for s in SUITES if s in there]


def suite_tables(rows: Sequence[Row], suite: str, links: Links | None = None) -> list[Table]:
    """All tables of one suite, first its bars and means; rows of other suites are ignored.

    ``links``: of the card that the rows are of (:func:`bench.links.links_of`).
    """
    own, known = [row for row in rows if row.suite == suite], links or {}
    summaries = {
        "gemm": lambda: bars_tables(own, only_bars=True),
        "overlap": lambda: [*overlap_bars_tables(own, known), *overlap_peers_tables(own)],
        "layer": lambda: layer_peers_tables(own),
    }
    return [*(summaries[suite]() if suite in summaries else ()), *TABLES[suite](own, known)]


def suite_of(name: str) -> str:
    """The suite whose rows a table is made of that a name picks."""
    first = name.split()[0] if name.split() else ""
    return _SUMMARIES.get(first, first)


def select(
    rows: Sequence[Row], name: str, options: Sequence[str] = (), links: Links | None = None
) -> list[Table]:
    """The tables that a name picks.

    Args:
        rows: of any suites.
        name: a suite, or "gemm-bars", "sweep-bars", "overlap-bars", "overlap-peers" or "layer-peers", then any of: a
            shape set, an operation (AG, RS, AR for short), a dtype, "w4" for a world of 4.
        options: "variants=A,B" keeps these, "cases=PATTERN" those cases whose name matches.
        links: of the card that the rows are of.

    Raises:
        BenchError: a word that fits no row; the sentence lists those that do.
    """
    kind, *words = name.split() or [""]
    check_known("table", kind, [*SUITES, *_SUMMARIES])
    suite = suite_of(name)
    kept = [row for row in rows if row.suite == suite]
    if not kept:
        raise BenchError(f"table {name!r}: there are no rows of suite {suite} in the file.")
    for word in words:
        check_known(f"table {name!r}", word, sorted({w for row in kept for w in _words(row)}))
        kept = [row for row in kept if word in _words(row)]
    for option in options:
        key, _, value = option.partition("=")
        check_known(f"option of table {name!r}", key, ("variants", "cases"))
        if key == "variants":
            wanted = value.split(",")
            for variant in wanted:
                check_known(f"table {name!r}, variants", variant, dict.fromkeys(row.variant for row in kept))
            kept = [
                row
                for row in kept
                if row.variant in wanted or (row.role == "noise" and row.partner in wanted)
            ]
        else:
            kept = [row for row in kept if fnmatch.fnmatchcase(row.case, value)]
            if not kept:
                raise BenchError(f"table {name!r}, cases: no case matches {value!r}.")
    return TABLES[kind](kept, links or {})


def _words(row: Row) -> set[str]:
    words = {row.shape_set, row.dtype, row.op, f"w{row.world}"}
    words |= {short for short, op in _SHORT.items() if op == row.op}
    return words - {""}
