"""Plans: which strategy every operator of a model has, with what it should take; in JSON, too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpkernels.errors import ArgumentError, GroupError
from tpkernels.planner.costs import Cost, Costs, ParameterBytes
from tpkernels.planner.model import LAYER, ModelShape
from tpkernels.planner.problem import input_of, may_move, names_of, output_of, tensors_between
from tpkernels.planner.strategies import METHODS, NAMES, Placement, Strategy, misfits, strategies
from tpkernels.planner.topology import Topology, topology_of

if TYPE_CHECKING:
    from tpkernels.comm.choice import Machine

__all__ = ["Line", "Plan", "Run", "Single", "check_world", "singles"]

FORMAT = 1


class Line(NamedTuple):
    """An operator of a plan: what it costs itself, and the way of its inputs, and of their gradients.

    before: operators that these come from, with their strategies.
    """

    operator: str
    strategy: Strategy
    cost: Cost
    moved_us: float
    before: tuple[tuple[str, Strategy], ...]

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
        model, topology, world, per_parameter: what was planned for.
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
    per_parameter: ParameterBytes = field(default_factory=ParameterBytes)
    bound_us: float = 0.0

    @cached_property
    def costs(self) -> Costs:
        """Of its operators."""
        return Costs(self.model, self.topology, self.world, self.per_parameter)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Of every operator, in order."""
        names = names_of(self.model.layers)
        found: list[Line] = []
        stream = 0  # where the residual stream was added to, or began, last
        known: dict[tuple[str, Strategy, tuple[tuple[str, Strategy], ...]], Line] = {}
        for place, (name, strategy) in enumerate(zip(names, self.choices, strict=True)):
            before = [(place - 1, names[place - 1])] if place else []
            if name.endswith("residual"):
                before.append((stream, names[stream]))
                stream = place
            key = name, strategy, tuple((one, self.choices[at]) for at, one in before)
            if key not in known:
                known[key] = self._line(*key)
            found.append(known[key])
        return tuple(found)

    def _line(self, name: str, strategy: Strategy, before: tuple[tuple[str, Strategy], ...]) -> Line:
        us = kept = 0.0
        for one, features, source, target in self._ways(name, strategy, before):
            us += self.costs.between(features, source, target)
            kept += self.costs.core_output_bytes(source) if one == "core" else 0.0
        cost = self.costs.operator(name, strategy)
        return Line(name, strategy, cost._replace(kept_bytes=cost.kept_bytes + kept), us, before)

    def _ways(
        self, name: str, strategy: Strategy, before: tuple[tuple[str, Strategy], ...]
    ) -> Iterator[tuple[str, tuple[int, ...], Placement, Placement]]:
        """Of inputs that lie otherwise than the operator takes them: where from, their features, both placements."""
        target = input_of(name, strategy)
        for one, other in before:
            source = output_of(one, other)
            if not source.same(target):
                yield one, tensors_between(self.model, one, name), source, target

    @cached_property
    def sent_bytes(self) -> tuple[float, ...]:
        """By line, what a rank sends in the mean, in the operator and for its inputs and their gradients."""
        known: dict[tuple[object, ...], float] = {}
        for line in self.lines:
            key = (line.operator, line.strategy, line.before)
            if key not in known:
                ways = self._ways(line.operator, line.strategy, line.before)
                moved = sum(self.costs.bytes_between(*way[1:]) for way in ways)
                known[key] = moved + self.costs.sent_bytes(line.operator, line.strategy)
        return tuple(known[line.operator, line.strategy, line.before] for line in self.lines)

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
            here = self.choices[self.layer(layer)]
            if found and found[-1].strategies == here:
                found[-1] = found[-1]._replace(last=layer)
            else:
                found.append(Run(layer, layer, here))
        return tuple(found)

    def on(self, topology: Topology | Machine | str | Path) -> Plan:
        """The same choices on another machine: what they would take there."""
        moved = topology_of(topology)
        check_world(self.world, moved)
        return replace(self, topology=moved, bound_us=0.0)

    def layer(self, number: int) -> slice:
        """Of lines and choices, those of a layer."""
        begin = 1 + number * len(LAYER)
        return slice(begin, begin + len(LAYER))

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
            "per_parameter": asdict(self.per_parameter),
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
                ParameterBytes(**given["per_parameter"]),
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
        for run in self.runs:
            at = dict(zip(LAYER, run.strategies, strict=True))
            made, taken = output_of("qkv", at["qkv"]), input_of("core", at["core"])
            if not made.same(taken) and not may_move(self.model, "qkv", made, taken):
                raise ArgumentError(
                    f"plan: attention of layers {run.first} to {run.last} must be where its keys and values are made, "
                    f"since several ranks hold the same of {self.model.kv_heads} heads; plan again."
                )

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
        per_parameter=costs.per_parameter,
    )
    return Single(name, strategy, whole.us, whole.peak_bytes)


def check_world(world: int, topology: Topology) -> None:
    """ArgumentError unless it is a number of ranks that the topology joins."""
    if type(world) is not int or world < 1:
        raise ArgumentError(f"world: expected a number of ranks, 1 or more, got {world!r}.")
    if world > topology.ranks:
        raise ArgumentError(
            f"world: topology {topology.name!r} joins {topology.ranks} ranks, but it is {world}; describe the links "
            "between more, or take fewer."
        )
