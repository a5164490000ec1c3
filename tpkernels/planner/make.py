"""``tpkernels.plan``: from a model, ranks and a machine to a plan, or to a sentence that says why there is none."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpkernels.errors import ArgumentError, GroupError
from tpkernels.planner.costs import Costs, ParameterBytes
from tpkernels.planner.model import ModelShape, model_of
from tpkernels.planner.plan import Plan, check_world
from tpkernels.planner.problem import Planned, input_of, is_outer, names_of, output_of
from tpkernels.planner.search import evaluate, least_memory, search
from tpkernels.planner.strategies import METHODS, NAMES, Strategy, misfits, strategies
from tpkernels.planner.topology import Topology, topology_of

if TYPE_CHECKING:
    from tpkernels.comm.choice import Machine

__all__ = ["bytes_of", "fitting_strategies", "make_plan", "plan_of"]

_GB = 1e9


def make_plan(
    model: ModelShape | str,
    world: int,
    topology: Topology | Machine | str | Path,
    *,
    memory: float | str | None = None,
    methods: Iterable[str] | None = None,
    per_parameter: ParameterBytes | None = None,
) -> Plan:
    """See ``tpkernels.plan``."""
    model, topology = model_of(model), topology_of(topology)
    check_world(world, topology)
    limit = topology.memory_bytes if memory is None else bytes_of(memory)
    fitting = fitting_strategies(model, world, METHODS if methods is None else tuple(methods))
    planned = Planned(Costs(model, topology, world, per_parameter or ParameterBytes()), fitting)
    found = search(planned.problem, limit)
    if found is None:
        raise ArgumentError(_nothing_fits(planned, limit))
    plan = plan_of(planned, found.states, limit, found.bound)
    # Where the limit matters the search is near the best: one strategy throughout may be nearer.
    alone = (s for s in plan.singles if s.strategy in fitting and s.peak_bytes <= limit)
    best = min(alone, key=lambda s: s.us, default=None)
    if best is not None and best.us < plan.us:
        plan = replace(plan, choices=(best.strategy,) * len(plan.choices))
    return plan


def fitting_strategies(model: ModelShape, world: int, methods: Sequence[str]) -> tuple[Strategy, ...]:
    """Those of some methods that can cut the model.

    Raises:
        ArgumentError: an unknown method, a world that is no grid of any, sizes that none can cut.
    """
    for method in methods:
        if method not in METHODS:
            raise ArgumentError(f"methods: expected some of {', '.join(map(repr, METHODS))}, got {method!r}.")
    if not methods:
        raise ArgumentError("methods: at least one is needed, but there is none.")
    every = strategies(world, methods)
    if world > 1 and all(s.ranks == 1 for s in every):
        try:
            Strategy(methods[0], world, 1).one(False)
            raise ArgumentError(
                f"methods: {NAMES[methods[0]]} has q x q ranks at two depths or more, and {world} ranks have no such "
                "grid; 8, 12, 16 or 18 do."
            )
        except GroupError as error:
            raise ArgumentError(f"methods: {methods[0]!r} on {world} ranks: {error}") from None
    misfitting = {s: misfits(s, model) for s in every}
    fitting = tuple(s for s, sentences in misfitting.items() if not sentences)
    if not fitting:
        nearest = sorted(misfitting.values(), key=len)[:3]
        raise ArgumentError(
            f"model: none of {len(every)} ways to cut {model.name} over {world} ranks fits; the nearest: "
            + " Or: ".join(" ".join(sentences) for sentences in nearest)
        )
    return fitting


def plan_of(planned: Planned, states: Sequence[int], limit: float = math.inf, bound: float = 0.0) -> Plan:
    """The plan of an assignment of states."""
    costs = planned.costs
    names = names_of(costs.model.layers)
    choices = [planned.states(name)[state] for name, state in zip(names, states, strict=True)]
    # A placement is told by the strategy of a linear layer beside it, where that has it.
    for place, name in enumerate(names):
        if is_outer(name) is None or name == "embedding":
            continue
        own = output_of(name, choices[place])
        for beside in (place - 1, place + 1):
            if 0 <= beside < len(names) and is_outer(names[beside]) is None:
                given = output_of if beside < place else input_of
                if own.same(given(names[beside], choices[beside])):
                    choices[place] = choices[beside]
                    break
    return Plan(costs.model, costs.topology, costs.world, tuple(choices), limit, costs.per_parameter, bound)


_UNITS: Mapping[str, float] = {"MB": 1e6, "GB": 1e9, "MIB": 2.0**20, "GIB": 2.0**30}


def bytes_of(memory: float | str) -> float:
    """Of a number, or a text such as "80GB".

    Raises:
        ArgumentError: neither.
    """
    try:
        if isinstance(memory, str):
            found = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]+)\s*", memory)
            size = math.nan if found is None else float(found[1]) * _UNITS[found[2].upper()]
        else:
            size = float(memory)
    except (KeyError, ValueError, TypeError):
        size = math.nan
    if not size > 0:
        raise ArgumentError(
            f"memory: expected bytes above 0, or a text such as '80GB' ({', '.join(_UNITS)}), got {memory!r}."
        )
    return size


def _nothing_fits(planned: Planned, limit: float) -> str:
    problem, costs = planned.problem, planned.costs
    states = least_memory(problem)
    assert states is not None
    needed = evaluate(problem, states).peak
    nearest = plan_of(planned, states, limit)
    middle = (line for line in nearest.lines[nearest.layer(0)] if is_outer(line.operator) is None)
    used = ", ".join(f"{line.operator} {line.strategy.text}" for line in middle)
    rest = sum(line.cost.parameter_bytes for line in nearest.lines)
    kept = sum(line.cost.kept_bytes for line in nearest.lines)
    return (
        f"memory: nothing fits {limit / _GB:.1f} GB a rank; the plan that needs least takes {needed / _GB:.1f} GB, "
        f"{(needed - limit) / _GB:.1f} GB too many: {rest / _GB:.1f} GB of parameters with gradients and optimizer "
        f"states, {kept / _GB:.1f} GB kept for backward, {(needed - rest - kept) / _GB:.1f} GB of buffers "
        f"({used}); take more ranks than {costs.world}, or a smaller batch than {costs.model.batch}."
    )
