"""Errors of the demo that are the user's to mend, and their exit code."""

from __future__ import annotations

__all__ = ["EXIT_ERROR", "DemoError", "DisagreementError"]

EXIT_ERROR = 1


class DemoError(Exception):
    """A wrong option or an unfit machine: printed as one sentence, without a traceback, exit code 1."""


class DisagreementError(DemoError):
    """The sharded and the unsharded model differ by more than the tolerance."""
