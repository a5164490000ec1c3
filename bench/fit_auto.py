"""What ``auto`` would win or lose by choosing between cuBLAS and our kernel: ``python -m bench fit-auto RESULT.jsonl``.

Rows of the suites ``sweep`` and ``gemm`` count in which both were right. A *rule* sees what the library would see, the
shape and the predicted time of the plan, and says whether to take ours; :func:`judge` tells what that gives on the
measured times. The library's rule is ``tpkernels.ops._plans.prefers_streamk``, which compares the prediction with a
roofline of cuBLAS; its three constants are fitted here too, and judged on shapes that the fit did not see.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from .errors import BenchError
from .records import Row, geomean, load
from .report.analysis import group_cases, percentile, plan_of

__all__ = ["MARGINS", "Measured", "Rule", "Verdict", "fit", "judge", "library_rule", "measured_of", "run"]

MARGINS = (
    1.0,
    0.95,
    0.9,
    0.85,
)  # ours is taken if it is predicted to take less than so much of cuBLAS's time
_LIMIT = 0.97  # "auto is never below": issue's bar on every shape
_FOLDS = 5


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


def library_rule(launch_us: float, flops_per_us: float, bytes_per_us: float, margin: float = 1.0) -> Rule:
    """``prefers_streamk`` with these constants of cuBLAS; ``margin``: as if the prediction were so much longer."""
    from tpkernels.ops._plans import CublasEstimate, Machine, Product, prefers_streamk

    rates = CublasEstimate(launch_us, flops_per_us, bytes_per_us)

    def rule(s: Measured) -> bool:
        machine = Machine("sm90", s.multiprocessors)
        return prefers_streamk(Product(1, s.m, s.n, s.k), machine, s.predicted_us / margin, rates)

    return rule


Rates = tuple[float, float, float]  # of CublasEstimate


def fit(shapes: Sequence[Measured], start: Rates, margin: float) -> Rates:
    """Constants of cuBLAS with which the rule loses least, a shape below 0.97 counting double. Deterministic.

    The loss is flat but for steps; so the walk to it begins where the constants tell cuBLAS's times best.
    """
    from tpkernels.ops._plans import CublasEstimate, Product, estimate_us

    def error(rates: Rates) -> float:
        told = (
            estimate_us(Product(1, s.m, s.n, s.k), s.multiprocessors, CublasEstimate(*rates)) for s in shapes
        )
        return sum(abs(math.log(us / s.cublas_us)) for us, s in zip(told, shapes, strict=True))

    def loss(rates: Rates) -> float:
        rule = library_rule(*rates, margin)
        total = 0.0
        for s in shapes:
            time = s.ours_us if rule(s) else s.cublas_us
            total += math.log(time / min(s.cublas_us, s.ours_us)) + max(
                0.0, math.log(_LIMIT * time / s.cublas_us)
            )
        return total

    return min((_descend(loss, first) for first in (_descend(error, start), start)), key=loss)


def _descend(loss: Callable[[Rates], float], start: Rates) -> Rates:
    """Coordinate descent on the logarithms."""
    best, least, step = start, loss(start), 0.2
    while step > 0.01:
        improved = False
        for i in range(3):
            for factor in (math.exp(step), math.exp(-step)):
                rates = [*best]
                rates[i] *= factor
                trial = (rates[0], rates[1], rates[2])
                if (now := loss(trial)) < least - 1e-9:
                    best, least, improved = trial, now, True
        step = step if improved else step / 2
    return best


def _left_out(shapes: Sequence[Measured], start: Rates, margin: float) -> Verdict:
    """Of rules that were fitted to the other four fifths of the shapes."""
    takes: dict[str, bool] = {}
    for fold in range(_FOLDS):
        known = [s for i, s in enumerate(shapes) if i % _FOLDS != fold]
        rule = library_rule(*fit(known, start, margin), margin)
        takes |= {s.case: rule(s) for i, s in enumerate(shapes) if i % _FOLDS == fold}
    return judge(shapes, lambda s: takes[s.case])


def run(files: Sequence[Path], *, stdout: TextIO = sys.stdout) -> int:
    """Prints what each rule gives, dtype by dtype; returns 0.

    Raises:
        BenchError: fewer than ten shapes in which both were measured.
    """
    from tpkernels.ops._plans import CUBLAS_H100

    rows = [row for file in files for row in load(file).latest()]
    by_dtype = {dtype: shapes for dtype, shapes in measured_of(rows).items() if len(shapes) >= 2 * _FOLDS}
    if not by_dtype:
        raise BenchError(
            f"fit-auto: expected at least {2 * _FOLDS} shapes in which cublas and streamk, the Hopper kernel, were "
            "both right; measure some: python -m bench sweep"
        )
    start = (CUBLAS_H100.launch_us, CUBLAS_H100.flops_per_us, CUBLAS_H100.bytes_per_us)
    for dtype, shapes in by_dtype.items():
        print(f"{dtype}, {len(shapes)} shapes", file=stdout)
        rules: dict[str, Rule] = {
            "always cuBLAS": lambda _: False,
            "always ours": lambda _: True,
            "the faster one": lambda s: s.ours_us < s.cublas_us,
        }
        rules |= {f"prefers_streamk, margin {m:.2f}": library_rule(*start, m) for m in MARGINS}
        for name, rule in rules.items():
            print(f"  {name:36} {judge(shapes, rule)}", file=stdout)
        for margin in MARGINS:
            name = f"fitted, margin {margin:.2f}, left out"
            print(f"  {name:36} {_left_out(shapes, start, margin)}", file=stdout)
            found = fit(shapes, start, margin)
            print(
                f"    launch_us {found[0]:.3g} (now {start[0]:.3g}), flops_per_us {found[1]:.3g} ({start[1]:.3g}), "
                f"bytes_per_us {found[2]:.3g} ({start[2]:.3g})",
                file=stdout,
            )
    return 0
