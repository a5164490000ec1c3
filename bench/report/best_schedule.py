"""A measured fused operation beside what the best schedule could take (:mod:`bench.schedules`)."""

from __future__ import annotations

from collections.abc import Mapping

from ..links import COSTS, Constants
from ..records import Row
from ..schedules import Best, Op, Tiles, best
from ..suites.overlap_shapes import AG, AR, RS
from .analysis import Group

__all__ = ["Links", "best_schedule", "describe_best", "over_best"]

Links = Mapping[int, Constants]  # by ranks

_OPS: dict[str, Op] = {AG: "gather", RS: "scatter", AR: "sums"}
_LEAST_ROWS = 1024  # below, the copy engine is not what carries best, nor are whole tiles what a shard has
_BYTES = {"bfloat16": 2, "float16": 2}


def best_schedule(group: Group, links: Links) -> Best | None:
    """None for other dtypes, fewer than 1024 rows, without the product's time alone, or without constants."""
    part, constants = group.timed("gemm"), links.get(group.world)
    m, n, k = (int(group.first.params.get(name, 0)) for name in "mnk")
    op = _OPS.get(group.first.op)
    if (
        not (op and constants and part and part.us and n and k)
        or m < _LEAST_ROWS
        or group.dtype not in _BYTES
    ):
        return None
    shard = -(-m // group.world) * (k if op == "gather" else n) * _BYTES[group.dtype]
    return best(op, Tiles.of(group.world, m, n, k), shard, part.us.p50, COSTS, constants.link)


def over_best(group: Group, row: Row | None, links: Links) -> float | None:
    """Time of a row over that of the best schedule."""
    found = best_schedule(group, links)
    if found is None or row is None or row.status != "ok" or row.us is None:
        return None
    return row.us.p50 / found.us


def describe_best(constants: Constants) -> str:
    """Whose constants."""
    link = constants.link
    return (
        "Best schedule: the least that a model of schedules gives, with the time of gemm and copies of "
        f"{link.rate / 1e3:.0f} GB/s and {link.copy:.1f} us each (bench link on {constants.source})."
    )
