"""Names of another library that stand for our objects for a while: put in its registries or modules, and taken back."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from types import TracebackType
from typing import Any

__all__ = ["Swap", "Swaps"]

Swap = tuple[MutableMapping[str, Any], str, Any]  # (registry or vars(module), name, what it shall stand for)


class Swaps:
    """Replacements that are made at once; ``disable()``, or leaving the ``with`` block, takes them back.

    Args:
        swaps: ``(mapping, name, new)``. What stands there already is left, so the first to enable decides when it ends.
    """

    def __init__(self, swaps: Iterable[Swap]) -> None:
        self._undo: list[tuple[MutableMapping[str, Any], str, Any, bool, Any]] = []
        for mapping, name, new in swaps:
            had, old = name in mapping, mapping.get(name)
            if not (had and old is new):
                self._undo.append((mapping, name, new, had, old))
                mapping[name] = new

    def disable(self) -> None:
        """What stood there before stands there again; a second call does nothing."""
        while self._undo:
            mapping, name, new, had, old = self._undo.pop()
            if mapping.get(name) is not new:
                continue  # somebody has put another there since
            del mapping[name]  # a registry with a layer below then shows that
            if had and mapping.get(name) is not old:
                mapping[name] = old

    def __enter__(self) -> Swaps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()
