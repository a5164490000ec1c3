"""What is tried for a product: the library, and plans that the cost model thinks may be fast. Pure.

The cost model ranks well but not perfectly: of the plans within half again the cheapest one's time, the best few of
each tile are timed. The first of ours is what the kernel takes by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tpkernels.ops import _plans
from tpkernels.ops._paths import PlanArguments

_HOPEFUL = 1.5  # times the cheapest prediction
_MOST = 12  # plans
_MOST_OF_TILE = 3
_TILES = 5  # whose schedules are looked at, beside their best
_SPLITS = (2, 3, 4, 6, 8, 12, 16)
_SCHEDULES = {
    "sm90": (("data_parallel", (1,)), ("hybrid_aligned", (1, 2, 3, 4, 6, 8)), ("split_k", _SPLITS)),
    "": (("data_parallel", (1,)), ("hybrid_first", (1,)), ("stream_k", (1,)), ("split_k", _SPLITS)),
}


class Candidate(NamedTuple):
    """``predicted_us`` is 0, and ``what`` the name, for the library."""

    gemm: str
    plan: PlanArguments
    predicted_us: float
    what: str


def candidates(product: _plans.Product, machine: _plans.Machine, library: str) -> list[Candidate]:
    """The library, what the cost model chooses, then others, the cheapest by prediction first."""
    chosen = _plans.plan(product, machine)
    named = _named(chosen, product, machine) or PlanArguments()
    first = Candidate("streamk", named, float(chosen["predicted_us"]), words(chosen, machine))
    return [Candidate(library, PlanArguments(), 0.0, library), first, *_others(product, machine, chosen)]


def words(plan: dict[str, Any], machine: _plans.Machine) -> str:
    """A plan in a few words: "128x256x64/2x1 hybrid_aligned x2"."""
    splits = f" x{plan['splits']}" if plan["splits"] > 1 else ""
    return f"{_plans.tile_name(plan, machine)} {plan['schedule']}{splits}"


def exists(plan: PlanArguments, product: _plans.Product, machine: _plans.Machine) -> bool:
    """Whether the kernel knows such a plan: what was read from a file may be anything."""
    try:
        _plans.plan(product, machine, plan.schedule, plan.tile, plan.splits)
    except RuntimeError:
        return False
    return True


def schedules_of(machine: _plans.Machine) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Schedules of a kernel, and how often each may cut a tile."""
    return _SCHEDULES["sm90" if _plans.is_hopper(machine) else ""]


def _others(product: _plans.Product, machine: _plans.Machine, chosen: dict[str, Any]) -> list[Candidate]:
    schedules = schedules_of(machine)
    best_of_tiles = _plans.candidates(product, machine)
    seen, found = {_identity(chosen)}, []
    for rank, best in enumerate(best_of_tiles):
        tile = _plans.tile_name(best, machine)
        asked = [_named(best, product, machine) or PlanArguments("auto", 1, tile)]
        if rank < _TILES and not best["suffix"]:  # whose CTAs take a whole tile each
            asked += [PlanArguments(kind, n, tile) for kind, splits in schedules for n in splits]
        for arguments in asked:
            plan = _plans.plan(product, machine, arguments.schedule, tile, arguments.splits)
            if _identity(plan) not in seen:
                seen.add(_identity(plan))
                predicted = float(plan["predicted_us"])
                found.append(Candidate("streamk", arguments, predicted, words(plan, machine)))
    found.sort(key=lambda c: c.predicted_us)
    most = _HOPEFUL * min([float(chosen["predicted_us"]), *(c.predicted_us for c in found)])
    kept: list[Candidate] = []
    for c in found:
        if c.predicted_us <= most and sum(k.plan.tile == c.plan.tile for k in kept) < _MOST_OF_TILE:
            kept.append(c)
    return kept[: _MOST - 1]


def _named(plan: dict[str, Any], product: _plans.Product, machine: _plans.Machine) -> PlanArguments | None:
    """Arguments that make this very plan, whatever the cost model's constants; None where names do not tell it."""
    asked = PlanArguments(plan["schedule"], plan["splits"], _plans.tile_name(plan, machine))
    again = _plans.plan(product, machine, asked.schedule, asked.tile, asked.splits)
    return asked if _identity(again) == _identity(plan) else None


def _identity(plan: dict[str, Any]) -> tuple[Any, ...]:
    """What the kernel does: a schedule that finds nothing to cut is data-parallel, whatever its name."""
    kind = plan["schedule"] if plan["partial_tiles"] else "data_parallel"
    return (
        plan["tile"],
        plan["suffix"],
        plan["cluster"],
        kind,
        plan["workers"],
        plan["splits"],
        plan["partial_tiles"],
    )
