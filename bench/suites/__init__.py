"""The suites by name. Each module ``<name>.py`` here has one instance ``SUITE``.

A suite that lives elsewhere is found through ``TPK_BENCH_SUITES="name=module"`` (several with commas): a module that
can be imported and has a ``SUITE``.
"""

from __future__ import annotations

import importlib
import os

from ..errors import BenchError, check_known
from ..suite import Suite

__all__ = ["SUITES", "load", "names"]

SUITES = ("link", "gemm", "sweep", "quantize", "overlap", "layer", "train")


def names() -> list[str]:
    """Every suite that :func:`load` knows."""
    return [*SUITES, *_external()]


def load(name: str) -> Suite:
    """The suite of that name; BenchError lists those there are."""
    check_known("suite", name, names())
    module = _external().get(name)
    if module is None:
        return _suite_of(importlib.import_module(f".{name}", __package__), name)
    try:
        return _suite_of(importlib.import_module(module), name)
    except ImportError as error:
        raise BenchError(
            f"TPK_BENCH_SUITES: {module!r} of suite {name!r} is not importable ({error})."
        ) from None


def _suite_of(module: object, name: str) -> Suite:
    suite = getattr(module, "SUITE", None)
    if not isinstance(suite, Suite):
        raise BenchError(
            f"suite {name!r}: expected an instance of Suite named SUITE in its module, found none."
        )
    return suite


def _external() -> dict[str, str]:
    """Suites named in the environment, with their modules."""
    entries = [e for e in os.environ.get("TPK_BENCH_SUITES", "").split(",") if e]
    pairs = [entry.partition("=") for entry in entries]
    for name, equals, module in pairs:
        if not (name and equals and module):
            raise BenchError(f"TPK_BENCH_SUITES: expected name=module, got {name + equals + module!r}.")
    return {name: module for name, _, module in pairs}
