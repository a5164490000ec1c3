"""Constants of a cost model from measured times. Pure: ``tpk calibrate`` and ``python -m bench fit`` use it.

Damped Gauss-Newton steps (Levenberg, Marquardt) in the logarithms of all constants, with slopes from differences: a
step asks the model once for each sample and constant that matters to it. What no sample tells stays as it is.

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

import torch
from torch import Tensor

__all__ = ["Cost", "Sample", "Score", "cross_validate", "fit", "score"]

Cost = dict[str, float]
FOLDS = 4
_OUTLIER = 0.1  # errors beyond it count linearly: no single shape may bend the constants
_STAY = 1.0  # a constant is held where it is as if by so many rows: few rows may not move it far
# Of logarithms: slopes are differences over so much, and no constant moves further in a step.
_NUDGE, _FURTHEST = 0.01, 0.5
_STEPS, _ENOUGH = 40, 1e-4  # at most so many; the last gains less than this part of the loss
_SOFT, _STIFF = 1e-3, 1e4  # damping of the first step, and where no shorter step is tried


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

    ``stay``: how hard constants are held there, more than 0.
    """
    matters = {
        name: [i for i, s in enumerate(samples) if s.names is None or name in s.names]
        for name, value in start.items()
        if value > 0
    }
    names = [name for name, some in matters.items() if some]

    def cost(x: Tensor) -> Cost:
        return start | {name: start[name] * math.exp(by) for name, by in zip(names, x.tolist(), strict=True)}

    def errors(x: Tensor, some: Sequence[int]) -> Tensor:
        at = cost(x)
        told = [math.log(samples[i].predict(at) / samples[i].us) for i in some]
        return torch.tensor(told, dtype=torch.float64)

    def slopes(x: Tensor, error: Tensor) -> Tensor:
        found = torch.zeros(len(samples), len(names), dtype=torch.float64)
        for j, nudge in enumerate(_NUDGE * torch.eye(len(names), dtype=torch.float64)):
            some = matters[names[j]]
            found[some, j] = (errors(x + nudge, some) - error[some]) / _NUDGE
        return found

    every = range(len(samples))
    x = torch.zeros(len(names), dtype=torch.float64)
    error, damping = errors(x, every), _SOFT
    least = _loss(error, x, stay)
    for _ in range(_STEPS if names else 0):
        before, slope = least, slopes(x, error)
        while least == before and damping < _STIFF:
            trial = x + _step(slope, error, x, stay, damping)
            then = errors(trial, every)
            if (now := _loss(then, trial, stay)) < least:
                x, error, least, damping = trial, then, now, damping / 4
            else:
                damping *= 4
        if before - least < _ENOUGH * before:
            break
    return cost(x)


def _loss(error: Tensor, x: Tensor, stay: float) -> float:
    e = error.abs()
    return float(torch.where(e < _OUTLIER, e * e, _OUTLIER * (2 * e - _OUTLIER)).sum() + stay * (x @ x))


def _step(slope: Tensor, error: Tensor, x: Tensor, stay: float, damping: float) -> Tensor:
    """To where the loss would be least if errors were straight lines, shorter with more damping."""
    weight = (_OUTLIER / error.abs()).clamp(max=1)
    bend = slope.T @ (weight[:, None] * slope) + stay * torch.eye(len(x), dtype=x.dtype)
    pull = slope.T @ (weight * error) + stay * x
    step: Tensor = torch.linalg.solve(bend + damping * bend.diag().diag(), -pull)
    return step.clamp(-_FURTHEST, _FURTHEST)


def cross_validate(
    samples: Sequence[Sample],
    start: Cost,
    *,
    stay: float = _STAY,
    fitted: Callable[[int], None] = lambda fold: None,
) -> Score:
    """The score on cases that were left out, a quarter of them at a time. ``fitted`` is told of every quarter."""
    fold_of = {case: i % FOLDS for i, case in enumerate(sorted({s.case for s in samples}))}
    told: list[tuple[str, float, float]] = []
    for fold in range(FOLDS):
        cost = fit([s for s in samples if fold_of[s.case] != fold], start, stay=stay)
        told += [(s.case, s.predict(cost), s.us) for s in samples if fold_of[s.case] == fold]
        fitted(fold)
    return _score(told)
