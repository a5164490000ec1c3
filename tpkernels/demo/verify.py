"""Comparisons of the sharded model with its twin."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .config import Tolerance
from .errors import DisagreementError

__all__ = ["Comparison", "check_loss", "largest_difference"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The parameter that differs most, and by how much: |a - b| / |b| in the Frobenius norm."""

    name: str
    difference: float

    def check(self, what: str, limit: float) -> None:
        """Raises DisagreementError above ``limit``; NaN is above every limit."""
        if not self.difference <= limit:
            raise DisagreementError(
                f"the {what} of {self.name} differs by {self.difference:.2e} (relative) between the sharded and the "
                f"unsharded model; the tolerance is {limit:g}."
            )


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Comparison:
    """Compares tensors of equal names and shapes in float64; raises DisagreementError where names or shapes differ."""
    if set(actual) != set(expected):
        odd = ", ".join(sorted(set(actual) ^ set(expected)))
        raise DisagreementError(
            f"the sharded and the unsharded model do not have the same parameters; only one has: {odd}."
        )
    worst = Comparison("none", 0.0)
    for name, reference in expected.items():
        a, b = actual[name].double().cpu(), reference.double().cpu()
        if a.shape != b.shape:
            raise DisagreementError(
                f"{name} has shape {list(a.shape)} when gathered, but {list(b.shape)} unsharded."
            )
        norm = float(torch.linalg.vector_norm(b))
        error = float(torch.linalg.vector_norm(a - b))
        relative = error / norm if norm > 0 else error
        if not relative <= worst.difference:  # takes NaN too
            worst = Comparison(name, relative)
            if relative != relative:
                break
    return worst


def check_loss(step: int, loss: float, dense_loss: float, limit: Tolerance) -> float:
    """The absolute difference; raises DisagreementError where it exceeds ``limit.loss`` or is not a number."""
    if math.isnan(loss) and math.isnan(dense_loss):
        raise DisagreementError(
            f"at step {step + 1} the loss is not a number, sharded and unsharded alike; try a smaller --lr or another "
            "--dtype."
        )
    difference = abs(loss - dense_loss)
    if not difference <= limit.loss:
        raise DisagreementError(
            f"at step {step + 1} the sharded loss is {loss:.10g} and the unsharded {dense_loss:.10g}: they differ by "
            f"{difference:.2e}, the tolerance is {limit.loss:g}."
        )
    return difference
