"""Sets of times on one axis, as sorted lists of disjoint intervals (begin, end)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Interval", "difference", "intersection", "length", "union"]

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times covered by any interval: sorted and disjoint; empty intervals are left out."""
    out: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def length(disjoint: Sequence[Interval]) -> float:
    """Total time of disjoint intervals."""
    return sum(end - begin for begin, end in disjoint)


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The times in both of two results of :func:`union`."""
    out: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            out.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The times in ``a`` and not in ``b``, both results of :func:`union`."""
    out: list[Interval] = []
    j = 0
    for begin, end in a:
        while j < len(b) and b[j][1] <= begin:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > begin:
                out.append((begin, b[k][0]))
            begin = max(begin, b[k][1])
            k += 1
        if begin < end:
            out.append((begin, end))
    return out
