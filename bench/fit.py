"""Constants of the Hopper cost model from measured rows: ``python -m bench fit RESULT.jsonl``.

Rows of suite ``gemm`` count that are right, plain products and of the Hopper kernel; ``--tiles`` measures them on every
tile. The model is the library's own (csrc/kernels/sm90a/cost.hpp), so what is fitted is what plans with. Coordinate
descent on the logarithms of all constants; by how many rows each is fitted is told, and by none it stays as it is.

Two figures matter. *Error* is how far predicted times lie from measured ones. *Regret* is what the model's pick of
each case costs beside the fastest variant measured: a model may be wrong about all times and still pick right.
Cross-validation tells both on cases that the fit has not seen; a fit is worth taking if they are better than now.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from .errors import BenchError
from .records import Row, geomean, load

__all__ = ["Sample", "Score", "cross_validate", "fit", "run", "samples_of", "score"]

Cost = dict[str, float]
_FOLDS = 4
_OUTLIER = 0.1  # errors beyond it count linearly: no single shape may bend the constants
_STAY = 1.0  # a constant is held where it is as if by so many rows: few rows may not move it far


class Sample(NamedTuple):
    """One measured plan: its shape and dtype, whatever the set, and its time with other constants."""

    case: str
    us: float
    predict: Callable[[Cost], float]


class Score(NamedTuple):
    """Median and rms of |log(predicted / measured)|; mean and worst regret of the cases with several plans."""

    median: float
    rms: float
    regret: float
    worst: float
    cases: int

    def __str__(self) -> str:
        error = f"error {self.median:.1%} median, {self.rms:.1%} rms"
        return f"{error}; regret {self.regret:.3f}x, worst {self.worst:.3f}x, of {self.cases} cases"


def samples_of(rows: Sequence[Row]) -> tuple[list[Sample], int]:
    """Samples, and how many rows of the kernel had another plan than the planner makes now: they tell nothing."""
    from tpkernels import _host

    samples: list[Sample] = []
    changed = 0
    for row in rows:
        made = row.extra.get("plan") or {}
        tile, sms = made.get("tile_name"), made.get("multiprocessors", 0)
        plain = (row.op, row.status, row.role) == ("matmul", "ok", "ours") and row.suite in ("gemm", "sweep")
        if not plain or row.us is None or tile not in _host.HOPPER_TILES or sms < 1:
            continue
        size = (int(row.params["m"]), int(row.params["n"]), int(row.params["k"]))
        ask = dict(schedule=made["schedule"], splits=made["splits"], tile=tile, multiprocessors=sms)
        (plan,) = _host.hopper_plans(*size, **ask)
        s = plan.plan.schedule
        same = (s.workers, s.num_slots) == (made["workers"], made["partial_tiles"])
        changed += not same

        def predict(cost: Cost, size: Any = size, plan: Any = plan, sms: int = sms) -> float:
            return float(_host.hopper_predict_us(*size, plan=plan, multiprocessors=sms, cost=cost))

        if same:
            samples.append(Sample(f"{size} {row.dtype}", row.us.p50, predict))
    return samples, changed


def score(samples: Sequence[Sample], cost: Cost) -> Score:
    """How well constants tell times and rank the variants of each case."""
    return _score([(s.case, s.predict(cost), s.us) for s in samples])


def _score(told: Sequence[tuple[str, float, float]]) -> Score:
    cases = defaultdict(list)
    for case, predicted, us in told:
        cases[case].append((predicted, us))
    errors = [abs(math.log(predicted / us)) for _, predicted, us in told]
    regrets = [min(p)[1] / min(us for _, us in p) for p in cases.values() if len(p) > 1]
    rms = math.sqrt(statistics.fmean(e * e for e in errors))
    mean, worst = geomean(regrets or [1]) or 1, max(regrets, default=1)
    return Score(statistics.median(errors), rms, mean, worst, len(regrets))


def fit(samples: Sequence[Sample], start: Cost) -> Cost:
    """The constants with which the samples are told best, walking from ``start``. Deterministic."""

    def loss(cost: Cost) -> float:
        errors = [abs(math.log(s.predict(cost) / s.us)) for s in samples]
        total = sum(e * e if e < _OUTLIER else _OUTLIER * (2 * e - _OUTLIER) for e in errors)
        return total + _STAY * sum(math.log(cost[n] / start[n]) ** 2 for n in names)

    names = [name for name, value in start.items() if value > 0]
    best, least, step = dict(start), loss(start), 0.15
    while step > 0.004:
        improved = False
        for name in names:
            for factor in (math.exp(step), math.exp(-step)):
                trial = best | {name: best[name] * factor}
                if (now := loss(trial)) < least * (1 - 1e-6):
                    best, least, improved = trial, now, True
                    break
        step = step if improved else step / 2
    return best


def cross_validate(samples: Sequence[Sample], start: Cost) -> Score:
    """The score on cases that were left out, a quarter of them at a time."""
    fold_of = {case: i % _FOLDS for i, case in enumerate(sorted({s.case for s in samples}))}
    told: list[tuple[str, float, float]] = []
    for fold in range(_FOLDS):
        cost = fit([s for s in samples if fold_of[s.case] != fold], start)
        told += [(s.case, s.predict(cost), s.us) for s in samples if fold_of[s.case] == fold]
    return _score(told)


def run(files: Sequence[Path], *, folds: bool = True, stdout: TextIO = sys.stdout) -> int:
    """Prints scores of the present constants and of fitted ones, and the latter beside the former."""
    from tpkernels import _host

    samples, changed = samples_of([row for file in files for row in load(file).rows])
    if len({s.case for s in samples}) < _FOLDS:
        raise BenchError(
            f"fit: expected right rows of the Hopper kernel from at least {_FOLDS} shapes of suite gemm, got "
            f"{len(samples)} rows ({changed} more have another plan now); measure some: python -m bench gemm --tiles"
        )
    now = _host.hopper_cost()
    fitted = fit(samples, now)
    lines = [f"{len(samples)} rows; {changed} left out, which would be planned otherwise now"]
    lines += [f"present:    {score(samples, now)}\nfitted:     {score(samples, fitted)}"]
    lines += [f"left out:   {cross_validate(samples, now)}"] if folds else []
    for name in sorted(now):
        rows = sum(s.predict(now | {name: now[name] * 1.5}) != s.predict(now) for s in samples)
        lines.append(f"  {name:28} {now[name]:12.6g} -> {fitted[name]:12.6g}  by {rows} rows")
    print("\n".join(lines), file=stdout)
    return 0
