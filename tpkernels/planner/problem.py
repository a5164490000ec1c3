"""A model's operators with their strategies as a problem for the search. Pure.

    node                          states
    embedding, residual sums      outer placements
    core, activation              inner placements
    linear operators              strategies

Node "embedding" is where the stream begins: each residual edge goes from a sum, or from it, to the next sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tpkernels.planner.costs import Cost, Costs
from tpkernels.planner.model import LAYER, ModelShape
from tpkernels.planner.search import Edge, Node, Problem
from tpkernels.planner.strategies import Placement, Strategy, placements

__all__ = ["RESIDUALS", "ROW", "Planned", "input_of", "is_outer", "output_of", "tensors_between"]

ROW = ("embedding", *LAYER, "head")
RESIDUALS = (("embedding", "attention_residual"), ("attention_residual", "mlp_residual"))


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
        outer = is_outer(operator)
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
        nodes = [self._node(operator) for operator in ROW]
        edges = {(k, k + 1): self._edge(ROW[k], ROW[k + 1]) for k in range(len(ROW) - 1)}
        for one, other in RESIDUALS:
            edges[ROW.index(one), ROW.index(other)] = self._edge(one, other)
        last = ROW.index(LAYER[-1])
        return Problem(nodes, edges, (0, last, self.costs.model.layers))

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
                    time[a, b] = costs.between(features, source, target)
                    memory[a, b] = costs.core_output_bytes(source) if one == "core" else 0.0
        return Edge(time, memory)


def tensors_between(model: ModelShape, one: str, other: str) -> tuple[int, ...]:
    """Features of the tensors that go from one operator to the other: q, k and v apart, and gate and up."""
    if one in ("qkv", "up"):
        return model.linears[one].out_features
    if one in ("core", "activation"):
        return (model.linears["out" if one == "core" else "down"].in_features,)
    return (model.hidden,)


def _figures(cost: Cost) -> tuple[float, float, float]:
    return cost.us, cost.parameter_bytes + cost.kept_bytes, cost.passing_bytes
