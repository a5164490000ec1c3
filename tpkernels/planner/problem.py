"""A model's operators with their strategies as a problem for the search. Pure.

    node                          states
    embedding, linear operators   strategies
    residual sums                 outer placements
    core, activation              inner placements

The residual stream begins at the embedding: residual edges go from it, or from a sum, to the next sum. So the first
layer has nodes of its own; the others are one layer, repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tpkernels.planner.costs import Cost, Costs
from tpkernels.planner.model import LAYER, ModelShape
from tpkernels.planner.search import Edge, Node, Problem
from tpkernels.planner.strategies import Placement, Strategy, kv_copies, placements

__all__ = ["Planned", "input_of", "is_outer", "may_move", "names_of", "output_of", "tensors_between"]

_MIDDLE, _LAST = LAYER.index("attention_residual"), len(LAYER) - 1


def names_of(layers: int) -> tuple[str, ...]:
    """Operators of a model, in order."""
    return ("embedding", *LAYER * layers, "head")


def is_outer(operator: str) -> bool | None:
    """Whether an operator's state is an outer placement; None: it is a strategy."""
    if operator in ("core", "activation"):
        return False
    return True if operator == "embedding" or operator.endswith("residual") else None


def input_of(operator: str, strategy: Strategy) -> Placement:
    """Where its input lies."""
    if operator in ("out", "down"):
        return strategy.inner
    return strategy.inner if is_outer(operator) is False else strategy.outer


def output_of(operator: str, strategy: Strategy) -> Placement:
    """Where its output lies."""
    if operator in ("qkv", "up", "head"):
        return strategy.inner
    return strategy.inner if is_outer(operator) is False else strategy.outer


@dataclass(frozen=True, eq=False)
class Planned:
    """A model, and the strategies that its operators may have."""

    costs: Costs
    strategies: Sequence[Strategy]

    def states(self, operator: str) -> Sequence[Strategy]:
        """By state of an operator, the strategy, or the first one that has the placement."""
        outer = None if operator == "embedding" else is_outer(operator)
        return self.strategies if outer is None else self._outer if outer else self._inner

    @cached_property
    def _outer(self) -> tuple[Strategy, ...]:
        return tuple(strategy for _, strategy in placements(self.strategies, outer=True))

    @cached_property
    def _inner(self) -> tuple[Strategy, ...]:
        return tuple(strategy for _, strategy in placements(self.strategies, outer=False))

    @cached_property
    def problem(self) -> Problem:
        """Times in microseconds, memory in bytes."""
        layers = self.costs.model.layers
        row = names_of(min(layers, 2))
        pairs = [(k, k + 1) for k in range(len(row) - 1)]
        for begin in range(0, len(row) - len(LAYER), len(LAYER)):  # where the stream comes into a layer
            middle, last = begin + 1 + _MIDDLE, begin + 1 + _LAST
            pairs += [(begin, middle), (middle, last)]
        nodes = {operator: self._node(operator) for operator in dict.fromkeys(row)}
        edges = {names: self._edge(*names) for names in {(row[a], row[b]) for a, b in pairs}}
        repeat = (len(LAYER), 2 * len(LAYER), layers - 1) if layers > 1 else None
        return Problem(
            [nodes[operator] for operator in row], {(a, b): edges[row[a], row[b]] for a, b in pairs}, repeat
        )

    def _node(self, operator: str) -> Node:
        found = [self.costs.operator(operator, strategy) for strategy in self.states(operator)]
        return Node(*(np.array(column) for column in zip(*map(_figures, found), strict=True)))

    def _edge(self, one: str, other: str) -> Edge:
        costs = self.costs
        features = tensors_between(costs.model, one, other)
        time = np.zeros((len(self.states(one)), len(self.states(other))))
        memory = np.zeros_like(time)
        for a, first in enumerate(self.states(one)):
            source = output_of(one, first)
            for b, second in enumerate(self.states(other)):
                target = input_of(other, second)
                if not source.same(target):
                    if not may_move(costs.model, one, source, target):
                        time[a, b] = np.inf
                        continue
                    time[a, b] = costs.between(features, source, target)
                    memory[a, b] = costs.core_output_bytes(source) if one == "core" else 0.0
        return Edge(time, memory)


def may_move(model: ModelShape, one: str, source: Placement, target: Placement) -> bool:
    """Whether an operator's output may go elsewhere: not keys and values that several ranks hold, or would have to."""
    return one != "qkv" or kv_copies(source, model) == kv_copies(target, model) == 1


def tensors_between(model: ModelShape, one: str, other: str) -> tuple[int, ...]:
    """Features of the tensors that go from one operator to the other: q, k and v apart, and gate and up."""
    if one in ("qkv", "up"):
        return model.linears[one].out_features
    if one in ("core", "activation"):
        return (model.linears["out" if one == "core" else "down"].in_features,)
    return (model.hidden,)


def _figures(cost: Cost) -> tuple[float, float, float]:
    return cost.us, cost.parameter_bytes + cost.kept_bytes, cost.passing_bytes
