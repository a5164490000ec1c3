"""Parts of a dimension as exact fractions, so that blocks of different cuts can be compared without any size.

A ``Span`` is [start/parts, stop/parts) of a dimension. Of ``size`` elements it has those from floor(start * size /
parts) to floor(stop * size / parts), so two spans that meet, or lie within one another, do so for every size, also
for one that the parts do not divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple, TypeAlias

__all__ = ["ALL", "WHOLE", "Span", "Terms", "common", "part", "united", "within"]


class Span(NamedTuple):
    """The part [start/parts, stop/parts) of a dimension, in lowest terms; make it with ``part`` or ``span``."""

    start: int
    stop: int
    parts: int

    def elements(self, size: int) -> tuple[int, int]:
        """First index, and the one behind the last, of the part of ``size`` elements."""
        return self.start * size // self.parts, self.stop * size // self.parts

    def length(self, size: int) -> int:
        """How many of ``size`` elements it has."""
        begin, end = self.elements(size)
        return end - begin

    @property
    def share(self) -> Fraction:
        """How much of the dimension it is."""
        return Fraction(self.stop - self.start, self.parts)

    def cut(self, index: int, count: int) -> Span:
        """Part ``index`` of ``count`` equal ones of this span."""
        width = self.stop - self.start
        first = self.start * count + index * width
        return span(first, first + width, self.parts * count)

    def __str__(self) -> str:
        if self == WHOLE:
            return "all"
        if self.stop == self.start + 1:
            return f"{self.start} of {self.parts}"
        return f"{self.start} to {self.stop} of {self.parts}"


def span(start: int, stop: int, parts: int) -> Span:
    """[start/parts, stop/parts) in lowest terms, so that equal parts compare equal."""
    divisor = math.gcd(start, stop, parts)
    return Span(start // divisor, stop // divisor, parts // divisor)


def part(index: int, parts: int) -> Span:
    """Part ``index`` (modulo ``parts``) of ``parts`` equal ones.

    Not in lowest terms where it needs none: index and index + 1 have no common divisor.
    """
    return Span(index % parts, index % parts + 1, parts)


WHOLE = Span(0, 1, 1)


def common(a: Span, b: Span) -> Span | None:
    """What two spans have in common; None if nothing."""
    unit = math.lcm(a.parts, b.parts)
    one, other = unit // a.parts, unit // b.parts
    start, stop = max(a.start * one, b.start * other), min(a.stop * one, b.stop * other)
    return span(start, stop, unit) if start < stop else None


# The part of a sum that a partial result has: disjoint spans of the summed dimension, in order.
Terms: TypeAlias = tuple[Span, ...]
ALL: Terms = (WHOLE,)


def united(several: Iterable[Span]) -> Terms:
    """The spans as terms, neighbours joined.

    Raises:
        ValueError: two of them overlap: an addend would count twice.
    """
    spans = list(several)
    unit = math.lcm(*(s.parts for s in spans)) if spans else 1
    scaled = sorted((s.start * unit // s.parts, s.stop * unit // s.parts) for s in spans)
    joined: list[tuple[int, int]] = []
    for start, stop in scaled:
        if joined and start < joined[-1][1]:
            raise ValueError(f"spans {[str(s) for s in spans]} overlap, so an addend would count twice")
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(span(start, stop, unit) for start, stop in joined)


def within(some: Terms, more: Terms) -> bool:
    """Whether all of ``some`` is in ``more``."""
    return all(any(common(s, m) == s for m in more) for s in some)
