"""All rows of a gather where they came to, for products with them: nothing else is written there while a call lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Gathered(NamedTuple):
    """What a gather gives to those who use it at once.

    Attributes:
        rows: [M, K], in some order. Not to be kept: the next call writes there.
        ordered: makes of another tensor with the same leading dimensions a matrix whose rows are in that order.
    """

    rows: Tensor
    ordered: Callable[[Tensor], Tensor]


Use = Callable[[Gathered], None]


def plain(whole: Tensor) -> Gathered:
    """A gathered tensor of one's own."""
    return Gathered(_matrix(whole), _matrix)


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.flatten(0, -2)
