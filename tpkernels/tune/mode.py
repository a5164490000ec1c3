"""Whether products are tuned: the environment variable TPK_AUTOTUNE, or :func:`autotune`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tpkernels.errors import ArgumentError

OFF, READ, ON = "off", "read", "on"
_NAMES = {"": OFF, "0": OFF, "off": OFF, "1": ON, "on": ON, "read": READ}
_mode: str | None = (
    None  # None: the environment was not read yet. One for all threads: backward passes run on others
)


def active() -> bool:
    """Whether path "auto" looks for a tuned plan."""
    return (_mode or _from_environment()) is not OFF


def times() -> bool:
    """Whether a product that nobody has timed yet is timed now."""
    return (_mode or _from_environment()) is ON


@contextmanager
def autotune(mode: bool | str = True) -> Iterator[None]:
    """Tune products on path "auto" inside the ``with`` block, in every thread of this process.

    Takes the place of ``TPK_AUTOTUNE``, which is read once, at the first product. Ranks that call a fused operation
    together have to be told the same.

    Args:
        mode: True (or "on"): take what the cache knows and time what it does not. "read": only the first of these.
            False (or "off"): neither.

    Raises:
        ArgumentError: another mode.
    """
    global _mode
    chosen = {True: ON, False: OFF}.get(mode) if isinstance(mode, bool) else _NAMES.get(mode)
    if chosen is None:
        raise ArgumentError(f"mode: expected True, False, 'on', 'off' or 'read', got {mode!r}.")
    before, _mode = _mode, chosen
    try:
        yield
    finally:
        _mode = before


def _from_environment() -> str:
    global _mode
    text = os.environ.get("TPK_AUTOTUNE", "")
    if text not in _NAMES:
        raise ArgumentError(
            f"TPK_AUTOTUNE: expected 1 (tune), read (take what was tuned) or 0, got {text!r}; unset it to tune nothing."
        )
    _mode = _NAMES[text]
    return _mode
