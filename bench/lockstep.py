"""Steps that all ranks take together: what fails on one of them fails on all, and all go on in the same place."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch

from .context import Context, OutOfStep, RanksLost
from .records import Row
from .suite import Skip

__all__ = ["OK", "DeviceLost", "Outcome", "Report", "describe", "together"]

Outcome = tuple[Literal["ok", "skipped", "error"], str]  # status and reason of a row
OK: Outcome = ("ok", "")


class DeviceLost(Exception):
    """This process cannot go on: its GPU is unusable, or it has fallen out of step. The message says why."""


class Report(Protocol):
    """Receives what happens on this rank."""

    def at(self, case: str, dtype: str, variant: str, phase: str, limit: float) -> None:
        """A step begins, which may take ``limit`` seconds if that is more than usual: the sign of life."""

    def trouble(self, variant: str, reason: str) -> None:
        """A variant failed on this rank; the others may be waiting for it in vain."""

    def rows(self, case: str, dtype: str, rows: list[Row]) -> None:
        """A case is finished; the rows are the same on all ranks."""


def together(context: Context, report: Report, variant: str, action: Callable[[], object]) -> Outcome:
    """Run ``action`` on all ranks; returns the worst outcome of any rank, on all of them.

    Raises:
        RanksLost: a rank is gone.
        DeviceLost: the GPU is unusable after an error.
    """
    try:
        mine = OK
        try:
            action()
        except (RanksLost, OutOfStep):
            raise
        except Skip as reason:
            mine = ("skipped", str(reason))
        except Exception as error:
            mine = _outcome(error)
            report.trouble(variant, mine[1])
            _require_device(context, mine[1])
        outcomes = dict(enumerate(context.agree(mine, end_of_step=True)))
    except OutOfStep as out:
        outcomes = out.ended
    return _worst(outcomes, context.world)


def describe(error: Exception) -> str:
    """Type and first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return ("skipped", f"not enough memory: {str(error).strip().partition(chr(10))[0][:200]}")
    traceback.print_exception(error, file=sys.stderr)
    return ("error", describe(error))


def _require_device(context: Context, reason: str) -> None:
    try:
        context.synchronize()
    except Exception as error:
        raise DeviceLost(reason) from error


def _worst(outcomes: Mapping[int, Outcome], world: int) -> Outcome:
    """The gravest; it names the rank unless it is the same on all of them."""
    rank, worst = max(outcomes.items(), key=lambda o: ("ok", "skipped", "error").index(o[1][0]))
    if len(outcomes) < world and worst == OK:
        return ("error", f"ranks {list(outcomes)} ended this step while others were in it")
    if list(outcomes.values()) == [worst] * world:
        return worst
    return (worst[0], f"rank {rank}: {worst[1]}")
