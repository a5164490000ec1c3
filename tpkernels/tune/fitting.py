"""Constants of a cost model from measured times. Pure: ``tpk calibrate`` and ``python -m bench fit`` use it.

Coordinate descent on the logarithms of all constants; what no sample tells stays as it is.

Two figures matter. *Error* is how far predicted times lie from measured ones. *Regret* is what the model's pick of
each case costs beside the fastest variant measured: a model may be wrong about all times and still pick right.
Cross-validation tells both on cases that the fit has not seen; a fit is worth taking if they are better than now.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Cost", "Sample", "Score", "cross_validate", "fit", "score"]

Cost = dict[str, float]
FOLDS = 4
_OUTLIER = 0.1  # errors beyond it count linearly: no single shape may bend the constants
_STAY = 1.0  # a constant is held where it is as if by so many rows: few rows may not move it far


class Sample(NamedTuple):
    """One measured plan: its shape and dtype, whatever the set, and its time with other constants.

    names: constants that may matter to it, which makes a fit faster; None for all.
    """

    case: str
    us: float
    predict: Callable[[Cost], float]
    names: frozenset[str] | None = None


class Score(NamedTuple):
    """Median, rms and 90th percentile of |log(predicted / measured)|; mean and worst regret of the cases with several
    plans."""

    median: float
    rms: float
    regret: float
    worst: float
    cases: int
    p90: float = math.nan

    def __str__(self) -> str:
        error = f"error {self.median:.1%} median, {self.rms:.1%} rms"
        return f"{error}; regret {self.regret:.3f}x, worst {self.worst:.3f}x, of {self.cases} cases"


def score(samples: Sequence[Sample], cost: Cost) -> Score:
    """How well constants tell times and rank the variants of each case."""
    return _score([(s.case, s.predict(cost), s.us) for s in samples])


def _score(told: Sequence[tuple[str, float, float]]) -> Score:
    cases = defaultdict(list)
    for case, predicted, us in told:
        cases[case].append((predicted, us))
    errors = sorted(abs(math.log(predicted / us)) for _, predicted, us in told)
    regrets = [min(p)[1] / min(us for _, us in p) for p in cases.values() if len(p) > 1]
    rms = math.sqrt(statistics.fmean(e * e for e in errors))
    mean, worst = statistics.geometric_mean(regrets or [1]), max(regrets, default=1)
    p90 = errors[math.ceil(0.9 * len(errors)) - 1]
    return Score(statistics.median(errors), rms, mean, worst, len(regrets), p90)


def fit(samples: Sequence[Sample], start: Cost, *, stay: float = _STAY) -> Cost:
    """The constants with which the samples are told best, walking from ``start``. Deterministic.

    ``stay``: how hard constants are held there.
    """

    def term(sample: Sample, cost: Cost) -> float:
        e = abs(math.log(sample.predict(cost) / sample.us))
        return e * e if e < _OUTLIER else _OUTLIER * (2 * e - _OUTLIER)

    def loss(cost: Cost, terms: Sequence[float]) -> float:
        return sum(terms) + stay * sum(math.log(cost[n] / start[n]) ** 2 for n in names)

    matters = {
        name: [i for i, s in enumerate(samples) if s.names is None or name in s.names]
        for name, value in start.items()
        if value > 0
    }
    names = [name for name, some in matters.items() if some]
    best, terms, step = dict(start), [term(s, start) for s in samples], 0.15
    least = loss(best, terms)
    while step > 0.004:
        improved = False
        for name in names:
            for factor in (math.exp(step), math.exp(-step)):
                trial = best | {name: best[name] * factor}
                changed = list(terms)
                for i in matters[name]:
                    changed[i] = term(samples[i], trial)
                if (now := loss(trial, changed)) < least * (1 - 1e-6):
                    best, terms, least, improved = trial, changed, now, True
                    break
        step = step if improved else step / 2
    return best


def cross_validate(samples: Sequence[Sample], start: Cost, *, stay: float = _STAY) -> Score:
    """The score on cases that were left out, a quarter of them at a time."""
    fold_of = {case: i % FOLDS for i, case in enumerate(sorted({s.case for s in samples}))}
    told: list[tuple[str, float, float]] = []
    for fold in range(FOLDS):
        cost = fit([s for s in samples if fold_of[s.case] != fold], start, stay=stay)
        told += [(s.case, s.predict(cost), s.us) for s in samples if fold_of[s.case] == fold]
    return _score(told)
