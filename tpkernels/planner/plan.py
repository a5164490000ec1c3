"""Plans: which strategy every operator of a model has, found by the search, with what it should take; in JSON, too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpkernels.errors import ArgumentError, GroupError
from tpkernels.planner.costs import Bytes, Cost, Costs
from tpkernels.planner.model import LAYER, ModelShape, model_of
from tpkernels.planner.problem import Planned, input_of, is_outer, names_of, output_of, tensors_between
from tpkernels.planner.search import evaluate, least_memory, search
from tpkernels.planner.strategies import METHODS, NAMES, Strategy, misfits, strategies
from tpkernels.planner.topology import Topology, topology_of

if TYPE_CHECKING:
    from tpkernels.comm.choice import Machine

__all__ = ["Line", "Plan", "Run", "Single", "bytes_of", "make_plan", "singles"]

FORMAT = 1
_GB = 1e9


class Line(NamedTuple):
    """An operator of a plan: what it costs itself; the way of its inputs, and of their gradients; bytes that a rank
    sends for both, in the mean."""

    operator: str
    strategy: Strategy
    cost: Cost
    moved_us: float
    sent_bytes: float

    @property
    def us(self) -> float:
        """Of both."""
        return self.cost.us + self.moved_us


class Run(NamedTuple):
    """Layers ``first`` to ``last`` that are cut alike."""

    first: int
    last: int
    strategies: tuple[Strategy, ...]  # in the order of ``LAYER``


class Single(NamedTuple):
    """The best that one strategy for all operators does."""

    name: str
    strategy: Strategy
    us: float
    peak_bytes: float


@dataclass(frozen=True, eq=False)
class Plan:
    """``print`` shows it; ``save`` and ``load`` keep it; ``tpkernels.build`` makes the model.

    Attributes:
        model, topology, world, bytes: what was planned for.
        limit: bytes of a rank.
        choices: strategies of the embedding, of each layer's operators in order, and of the head. An operator that is
            no linear layer is placed as that strategy's x (embedding, residual sums) or y (core, activation) lies.
        bound_us: no plan within the limit takes less, as costs are described.
    """

    model: ModelShape
    topology: Topology
    world: int
    choices: tuple[Strategy, ...]
    limit: float = math.inf
    bytes: Bytes = field(default_factory=Bytes)
    bound_us: float = 0.0

    @cached_property
    def costs(self) -> Costs:
        """Of its operators."""
        return Costs(self.model, self.topology, self.world, self.bytes)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Of every operator, in order."""
        names = names_of(self.model.layers)
        found: list[Line] = []
        stream = 0  # where the residual stream was added to, or began, last
        known: dict[tuple[object, ...], Line] = {}
        for place, (name, strategy) in enumerate(zip(names, self.choices, strict=True)):
            before = [(place - 1, names[place - 1])] if place else []
            if name.endswith("residual"):
                before.append((stream, names[stream]))
                stream = place
            key = (name, strategy, *((one, self.choices[at]) for at, one in before))
            if key not in known:
                known[key] = self._line(name, strategy, [(one, self.choices[at]) for at, one in before])
            found.append(known[key])
        return tuple(found)

    def _line(self, name: str, strategy: Strategy, before: Sequence[tuple[str, Strategy]]) -> Line:
        costs, target = self.costs, input_of(name, strategy)
        us = sent = 0.0
        kept = 0.0
        for one, other in before:
            source, features = output_of(one, other), tensors_between(self.model, one, name)
            if not source.same(target):
                us += costs.between(features, source, target)
                sent += costs.bytes_between(features, source, target)
                kept += costs.core_output_bytes(source) if one == "core" else 0.0
        cost = costs.operator(name, strategy)
        cost = cost._replace(kept_bytes=cost.kept_bytes + kept)
        return Line(name, strategy, cost, us, sent + costs.sent_bytes(name, strategy))

    @property
    def us(self) -> float:
        """Forward and backward of a batch, predicted."""
        return sum(line.us for line in self.lines)

    @property
    def peak_bytes(self) -> float:
        """Of a rank: parameters with gradients and optimizer states, what is kept for backward, the largest buffers."""
        rest = sum(line.cost.parameter_bytes + line.cost.kept_bytes for line in self.lines)
        return rest + max(line.cost.passing_bytes for line in self.lines)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Layers by what they have in common."""
        found: list[Run] = []
        for layer in range(self.model.layers):
            begin = 1 + layer * len(LAYER)
            here = self.choices[begin : begin + len(LAYER)]
            if found and found[-1].strategies == here:
                found[-1] = found[-1]._replace(last=layer)
            else:
                found.append(Run(layer, layer, here))
        return tuple(found)

    def on(self, topology: Topology | Machine | str | Path) -> Plan:
        """The same choices on another machine: what they would take there."""
        moved = topology_of(topology)
        _check_world(self.world, moved)
        return replace(self, topology=moved, bound_us=0.0)

    def layer(self, number: int) -> tuple[Line, ...]:
        """Lines of a layer."""
        begin = 1 + number * len(LAYER)
        return self.lines[begin : begin + len(LAYER)]

    @cached_property
    def singles(self) -> tuple[Single, ...]:
        """By method, the best that it does alone, within the limit if anything of it is; the fastest first."""
        return singles(self.costs, self.limit)

    def __str__(self) -> str:
        from tpkernels.planner.report import text

        return text(self)

    def to_dict(self) -> dict[str, Any]:
        """What ``from_dict`` takes; the predictions in it are for readers."""
        runs = [
            {
                "layers": [run.first, run.last],
                "operators": {o: s.to_dict() for o, s in zip(LAYER, run.strategies, strict=True)},
            }
            for run in self.runs
        ]
        return {
            "format": FORMAT,
            "model": self.model.to_dict(),
            "topology": self.topology.to_dict(),
            "world": self.world,
            "limit_bytes": self.limit if math.isfinite(self.limit) else None,
            "bytes": asdict(self.bytes),
            "embedding": self.choices[0].to_dict(),
            "layers": runs,
            "head": self.choices[-1].to_dict(),
            "predicted": {"us": self.us, "peak_bytes": self.peak_bytes, "bound_us": self.bound_us},
        }

    @classmethod
    def from_dict(cls, given: Any) -> Plan:
        """What ``to_dict`` made.

        Raises:
            ArgumentError: it is something else, or does not fit together.
        """
        try:
            if given["format"] != FORMAT:
                raise ValueError(f"format {given['format']!r}; this version reads {FORMAT}")
            model, world = ModelShape.from_dict(given["model"]), given["world"]
            choices = [Strategy.from_dict(given["embedding"])]
            for run in given["layers"]:
                first, last = run["layers"]
                if first != (len(choices) - 1) // len(LAYER):
                    raise ValueError(f"layers from {first}, where {(len(choices) - 1) // len(LAYER)} is next")
                if set(run["operators"]) != set(LAYER):
                    raise ValueError(f"operators {', '.join(run['operators'])}")
                choices += [Strategy.from_dict(run["operators"][o]) for o in LAYER] * (last - first + 1)
            choices.append(Strategy.from_dict(given["head"]))
            if len(choices) != 2 + model.layers * len(LAYER):
                raise ValueError(f"{(len(choices) - 2) // len(LAYER)} layers of {model.layers}")
            limit = math.inf if given["limit_bytes"] is None else float(given["limit_bytes"])
            made = cls(
                model,
                Topology.from_dict(given["topology"]),
                world,
                tuple(choices),
                limit,
                Bytes(**given["bytes"]),
                float(given["predicted"]["bound_us"]),
            )
        except (KeyError, TypeError, ValueError, GroupError) as error:
            raise ArgumentError(
                f"plan: expected what Plan.save() writes, but {error!r}; plan again."
            ) from None
        made.check()
        return made

    def check(self) -> None:
        """ArgumentError unless every strategy is of the world, and fits the model."""
        for strategy in dict.fromkeys(self.choices):
            if strategy.world != self.world:
                raise ArgumentError(
                    f"plan: it is for {self.world} ranks, but {strategy.text} has {strategy.world}; plan again."
                )
            for sentence in misfits(strategy, self.model):
                raise ArgumentError(f"plan: {sentence}")

    def save(self, path: str | Path) -> None:
        """Writes JSON, for ``load``."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """What ``save`` wrote.

        Raises:
            ArgumentError: no such file, or something else in it.
        """
        try:
            given = json.loads(Path(path).read_text())
        except OSError as error:
            raise ArgumentError(f"plan: cannot read {str(path)!r} ({error.strerror}).") from None
        except ValueError as error:
            raise ArgumentError(f"plan: expected JSON in {str(path)!r}, but {error}.") from None
        return cls.from_dict(given)

    def picture(self, path: str | Path) -> None:
        """Draws time and memory by layer; the format is that of the file's name.

        Raises:
            BackendError: matplotlib is not there.
        """
        from tpkernels.planner.picture import draw

        draw(self, path)


def make_plan(
    model: ModelShape | str,
    world: int,
    topology: Topology | Machine | str | Path,
    *,
    memory: float | str | None = None,
    methods: Iterable[str] | None = None,
    bytes: Bytes | None = None,
) -> Plan:
    """See ``tpkernels.plan``."""
    model, topology = model_of(model), topology_of(topology)
    _check_world(world, topology)
    limit = topology.memory_bytes if memory is None else bytes_of(memory)
    fitting = fitting_strategies(model, world, METHODS if methods is None else tuple(methods))
    planned = Planned(Costs(model, topology, world, bytes or Bytes()), fitting)
    found = search(planned.problem, limit)
    if found is None:
        raise ArgumentError(_nothing_fits(planned, limit))
    plan = _plan_of(planned, found.states, limit, found.bound)
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


def singles(costs: Costs, limit: float) -> tuple[Single, ...]:
    """See ``Plan.singles``."""
    found = []
    for method in METHODS:
        ones = [
            _single(NAMES[s.method] if s.ranks > 1 else "copies alone", s, costs)
            for s in strategies(costs.world, [method])
            if not misfits(s, costs.model) and (s.ranks > 1 or method == METHODS[1])
        ]
        for name in dict.fromkeys(single.name for single in ones):
            of_it = [single for single in ones if single.name == name]
            found.append(min(of_it, key=lambda s: (s.peak_bytes > limit, s.us)))
    return tuple(sorted(found, key=lambda s: s.us))


def _single(name: str, strategy: Strategy, costs: Costs) -> Single:
    whole = Plan(
        costs.model,
        costs.topology,
        costs.world,
        (strategy,) * (2 + costs.model.layers * len(LAYER)),
        bytes=costs.bytes,
    )
    return Single(name, strategy, whole.us, whole.peak_bytes)


def _plan_of(planned: Planned, states: Sequence[int], limit: float, bound: float) -> Plan:
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
    return Plan(costs.model, costs.topology, costs.world, tuple(choices), limit, costs.bytes, bound)


def _check_world(world: int, topology: Topology) -> None:
    if type(world) is not int or world < 1:
        raise ArgumentError(f"world: expected a number of ranks, 1 or more, got {world!r}.")
    if world > topology.ranks:
        raise ArgumentError(
            f"world: topology {topology.name!r} joins {topology.ranks} ranks, but it is {world}; describe the links "
            "between more, or take fewer."
        )


_UNITS: Mapping[str, float] = {"MB": 1e6, "GB": 1e9, "MIB": 2.0**20, "GIB": 2.0**30}


def bytes_of(memory: float | str) -> float:
    """Of a number, or a text such as "80GB".

    Raises:
        ArgumentError: neither.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]+)\s*", memory) if isinstance(memory, str) else None
    try:
        size = float(memory) if found is None else float(found[1]) * _UNITS[found[2].upper()]
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
    nearest = _plan_of(planned, states, limit, 0.0)
    middle = nearest.layer(0)
    used = ", ".join(
        f"{line.operator} {line.strategy.text}" for line in middle if is_outer(line.operator) is None
    )
    rest = sum(line.cost.parameter_bytes for line in nearest.lines)
    kept = sum(line.cost.kept_bytes for line in nearest.lines)
    return (
        f"memory: nothing fits {limit / _GB:.1f} GB a rank; the plan that needs least takes {needed / _GB:.1f} GB, "
        f"{(needed - limit) / _GB:.1f} GB too many: {rest / _GB:.1f} GB of parameters with gradients and optimizer "
        f"states, {kept / _GB:.1f} GB kept for backward, {(needed - rest - kept) / _GB:.1f} GB of buffers "
        f"({used}); take more ranks than {costs.world}, or a smaller batch than {costs.model.batch}."
    )
