"""Which tables there are for each suite, and the selection that a README block names: "gemm square bfloat16".

Beside the suites such a name may begin with ``gemm-bars``: the bars of the gemm suite, which of them hold.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence

from ..errors import BenchError, check_known
from ..records import Row
from .analysis import SUITES
from .table import Table
from .tables_bars import bars_tables
from .tables_epilogues import epilogue_tables
from .tables_gemm import gemm_tables
from .tables_link import link_tables
from .tables_model import layer_tables, train_tables
from .tables_overlap import overlap_tables

__all__ = ["TABLES", "select", "suite_of", "suite_tables", "suites_of"]


def _gemm(rows: Sequence[Row]) -> list[Table]:
    return gemm_tables(rows) + epilogue_tables(rows)


TABLES: dict[str, Callable[[Sequence[Row]], list[Table]]] = {
    "link": link_tables,
    "gemm": _gemm,
    "overlap": overlap_tables,
    "layer": layer_tables,
    "train": train_tables,
}
BARS = "gemm-bars"
_SHORT = {"AG": "all_gather_matmul", "RS": "matmul_reduce_scatter", "AR": "matmul_all_reduce"}


def suites_of(rows: Iterable[Row]) -> list[str]:
    """The suites that have rows, in the order of the report."""
    there = {row.suite for row in rows}
    return [s for s in SUITES if s in there]


def suite_tables(rows: Sequence[Row], suite: str) -> list[Table]:
    """All tables of one suite, first the bars that were measured; rows of other suites are ignored."""
    own = [row for row in rows if row.suite == suite]
    return [*(bars_tables(own, only_bars=True) if suite == "gemm" else ()), *TABLES[suite](own)]


def suite_of(name: str) -> str:
    """The suite whose rows a table is made of that a name picks."""
    first = name.split()[0] if name.split() else ""
    return "gemm" if first == BARS else first


def select(rows: Sequence[Row], name: str, options: Sequence[str] = ()) -> list[Table]:
    """The tables that a name picks.

    Args:
        rows: of any suites.
        name: a suite or "gemm-bars", then any of: a shape set, an operation (AG, RS, AR for short), a dtype, "w4" for
            a world of 4.
        options: "variants=A,B" keeps these, "cases=PATTERN" those cases whose name matches.

    Raises:
        BenchError: a word that fits no row; the sentence lists those that do.
    """
    kind, *words = name.split() or [""]
    check_known("table", kind, [*SUITES, BARS])
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
    return bars_tables(kept) if kind == BARS else TABLES[suite](kept)


def _words(row: Row) -> set[str]:
    words = {row.shape_set, row.dtype, row.op, f"w{row.world}"}
    words |= {short for short, op in _SHORT.items() if op == row.op}
    return words - {""}
