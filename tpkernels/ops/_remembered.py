"""What was decided for a call is remembered by its signature: a training step makes the same calls again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["Remembered", "signature", "signatures"]

T = TypeVar("T")


class Remembered(Generic[T]):
    """Decisions by key. Up to ``most`` of them; then all are forgotten. An error is not remembered.

    A key holds all that the decision depends on, and nothing that has to be freed: no tensor and no process group.
    """

    def __init__(self, most: int = 4096) -> None:
        self._decisions: dict[Hashable, T] = {}
        self._most = most

    def get(self, key: Hashable, decide: Callable[[], T]) -> T:
        """What ``decide`` gave for this key."""
        decision = self._decisions.get(key)
        if decision is None:
            decision = decide()
            if len(self._decisions) >= self._most:  # of another thread too, perhaps: then a little early
                self._decisions.clear()
            self._decisions[key] = decision
        return decision


def signature(x: Tensor | None) -> Hashable:
    """What checks look at."""
    return None if x is None else (x.shape, x.dtype, x.device)


def signatures(xs: Sequence[Tensor]) -> Hashable:
    """Of each."""
    if len(xs) == 1:
        x = xs[0]
        return x.shape, x.dtype, x.device
    return tuple([(x.shape, x.dtype, x.device) for x in xs])
