"""What ``auto`` would win or lose by choosing between cuBLAS and our kernel: ``python -m bench fit-auto RESULT.jsonl``.

Rows of the suites ``sweep`` and ``gemm`` count in which both were right. A *rule* sees what the library would see, the
shape, and says whether to take ours; :func:`judge` tells what that gives on the measured times. The library's rule is
``tpkernels.ops._plans.prefers_streamk``, which takes ours where a roofline of cuBLAS is short; other limits are judged
beside its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from .errors import BenchError
from .records import Row, geomean, load
from .report.analysis import group_cases, percentile, plan_of

__all__ = ["LIMITS", "Measured", "Rule", "Verdict", "judge", "library_rule", "measured_of", "run"]

LIMITS = (0.4, 0.7, 1.0, 1.5, 3.0)  # of ``prefers_streamk``, in us
_LIMIT = 0.97  # "auto is never below": issue's bar on every shape
_FEWEST = 10  # shapes


class Measured(NamedTuple):
    """One shape: times of both in us, and what the planner predicted for ours."""

    case: str
    m: int
    n: int
    k: int
    multiprocessors: int
    cublas_us: float
    ours_us: float
    predicted_us: float


Rule = Callable[[Measured], bool]  # True: ours


class Verdict(NamedTuple):
    """What a rule gives over always taking cuBLAS, and beside always taking the faster one."""

    taken: float  # part of the shapes in which ours is
    geomean: float
    p5: float
    min: float
    below: int  # shapes under 0.97
    loss: float  # geometric mean of its time over the faster one's, less 1

    def __str__(self) -> str:
        return (
            f"ours in {self.taken:4.0%}, over cuBLAS {self.geomean:.3f}x (5th percentile {self.p5:.3f}, min "
            f"{self.min:.3f}, {self.below} below {_LIMIT}), {self.loss:.1%} behind the faster one"
        )


def measured_of(rows: Iterable[Row]) -> dict[str, list[Measured]]:
    """By dtype, shapes where cuBLAS and our kernel's own choice were right; of several runs the last."""
    found: dict[str, list[Measured]] = {}
    kept = list(rows)
    for suite in ("sweep", "gemm"):
        for group in group_cases(kept, suite):
            ours, cublas, plan = (
                group.timed("streamk"),
                group.timed("cublas"),
                plan_of(group.rows.get("streamk")),
            )
            if not (ours and cublas and ours.us and cublas.us and plan.get("predicted_us")):
                continue
            if group.first.op != "matmul" or "/" not in str(
                plan.get("tile_name")
            ):  # another kernel, never preferred
                continue
            m, n, k = (int(group.first.params[name]) for name in "mnk")
            sms, predicted = int(plan.get("multiprocessors") or 132), float(plan["predicted_us"])
            shape = Measured(group.case, m, n, k, sms, cublas.us.p50, ours.us.p50, predicted)
            found.setdefault(group.dtype, []).append(shape)
    return found


def judge(shapes: Sequence[Measured], rule: Rule) -> Verdict:
    """At least one shape."""
    times = [s.ours_us if rule(s) else s.cublas_us for s in shapes]
    over = [s.cublas_us / t for s, t in zip(shapes, times, strict=True)]
    behind = [t / min(s.cublas_us, s.ours_us) for s, t in zip(shapes, times, strict=True)]
    taken = sum(rule(s) for s in shapes) / len(shapes)
    below = sum(v < _LIMIT for v in over)
    return Verdict(taken, geomean(over), percentile(over, 5), min(over), below, geomean(behind) - 1)


def library_rule(short_us: float) -> Rule:
    """``prefers_streamk`` with this limit."""
    from tpkernels.ops._plans import Machine, Product, prefers_streamk

    def rule(s: Measured) -> bool:
        return prefers_streamk(Product(1, s.m, s.n, s.k), Machine("sm90", s.multiprocessors), short_us)

    return rule


def run(files: Sequence[Path], *, stdout: TextIO = sys.stdout) -> int:
    """Prints what each rule gives, dtype by dtype; returns 0.

    Raises:
        BenchError: fewer than ten shapes in which both were measured.
    """
    from tpkernels.ops._plans import SHORT_US

    rows = [row for file in files for row in load(file).latest()]
    by_dtype = {dtype: shapes for dtype, shapes in measured_of(rows).items() if len(shapes) >= _FEWEST}
    if not by_dtype:
        raise BenchError(
            f"fit-auto: expected at least {_FEWEST} shapes in which cublas and streamk, the Hopper kernel, were "
            "both right; measure some: python -m bench sweep"
        )
    for dtype, shapes in by_dtype.items():
        print(f"{dtype}, {len(shapes)} shapes", file=stdout)
        rules: dict[str, Rule] = {
            "always cuBLAS": lambda _: False,
            "always ours": lambda _: True,
            "the faster one": lambda s: s.ours_us < s.cublas_us,
            f"the library's, {SHORT_US} us": library_rule(SHORT_US),
        }
        rules |= {f"likewise, {limit} us": library_rule(limit) for limit in LIMITS if limit != SHORT_US}
        for name, rule in rules.items():
            print(f"  {name:24} {judge(shapes, rule)}", file=stdout)
    return 0
