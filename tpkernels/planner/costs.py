"""What an operator costs with a strategy, or in a placement: microseconds and bytes of one rank, the slowest. Pure.

    linear      forward and backward as ``grids.predict`` has them for one copy (a step: the longer of product and
                messages, then the sums over ranks), and the sum of the weight's gradient over copies; of heads of keys
                and values that several ranks hold, the sum over these
    norm        statistics of rows among ranks that share them, weights and their gradients; reads, writes
    core        its products, 3.5 times those of forward in all, and what slows them down; nothing is sent
    others      reads and writes of memory
    embedding   the exchanges of ``nn.grids.Embedding`` on one copy, one part of the rows after another; the sum of the
                table's gradient over copies
    loss        three numbers a row among ranks that share it; reads and writes

    between     the tensor's way from one placement to the next, and its gradient's way back; 0 where they are alike

Copies are alike, so the first is looked at (where copies lie differently in hosts, as six ranks in hosts of eight do,
that is an approximation). Where the numbers of copies of two placements have a common divisor, their
exchange repeats as often, and is looked at once. Sums over copies take a reduce-scatter and an all-gather, whose bytes
cross to another host once (``grids.timing``), and latency as a tree has it: log2 of the ranks.

Memory: of parameters, their gradients and optimizer states, at rest; of what layers keep for backward; and what a
program has in buffers while it runs (``grids.peak``), of which the largest counts once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from tpkernels.errors import ArgumentError
from tpkernels.grids import Cluster, Layout, Program, Sizes, backward, exchange_us, forward, peak, predict
from tpkernels.grids.features import (
    features_home,
    features_needed,
    features_partial,
    lookup,
    over_features,
)
from tpkernels.grids.layout import Message, messages, sent_elements
from tpkernels.grids.method import Method
from tpkernels.grids.spans import WHOLE
from tpkernels.grids.timing import legs
from tpkernels.planner.model import Linear, ModelShape
from tpkernels.planner.strategies import Placement, Strategy, kv_copies, moved_bytes, moved_us
from tpkernels.planner.topology import Topology

__all__ = ["Cost", "Costs", "ParameterBytes"]

_HALF, _SINGLE = 2, 4  # bytes of bf16 and of float32

# Bytes that are read and written of memory for one element, forward and backward together, in bf16.
_NORM, _RESIDUAL, _GATED, _PLAIN, _LOSS = 10, 12, 26, 10, 22
_CORE = 3.5  # products forward and backward over those of forward: a flash kernel computes the scores twice
# Attention's products, with rotary positions and copies, over such products at the rate of large ones: the mean of
# three models' attention at 8192 tokens on two H200, torch's kernel (2.2 to 3.3; docs/planner.md).
_CORE_SLOWER = 2.6


@dataclass(frozen=True)
class ParameterBytes:
    """Of a parameter. The default is mixed precision: bf16 weights, fp32 gradients (``main_grad``), and a fp32 copy
    with two moments of Adam's.

    optimizer_over_copies: each of the data-parallel copies has a part of the optimizer's states (ZeRO-1, Megatron-LM's
        distributed optimizer), not all of them.
    """

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    optimizer_over_copies: bool = False

    def __post_init__(self) -> None:
        for name in ("weight", "gradient", "optimizer"):
            size = getattr(self, name)
            if type(size) not in (int, float) or not 0 <= size < math.inf:
                raise ArgumentError(f"per_parameter: {name} must be a number of bytes, but it is {size!r}.")

    def at_rest(self, copies: int) -> float:
        """Of a parameter that so many copies have."""
        return self.weight + self.gradient + self.optimizer / (copies if self.optimizer_over_copies else 1)


class Cost(NamedTuple):
    """Forward and backward of one operator; ``us`` is what it takes, the other times would be alone.

    us: products and messages as they overlap, and all sums behind them.
    products_us, messages_us: of products, reads and writes; of messages within a copy.
    copies_us: of the sum of gradients over copies (in ``us``).
    parameter_bytes, kept_bytes: at rest; for backward.
    passing_bytes: in buffers while it runs.
    """

    us: float = 0.0
    products_us: float = 0.0
    messages_us: float = 0.0
    copies_us: float = 0.0
    parameter_bytes: float = 0.0
    kept_bytes: float = 0.0
    passing_bytes: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """One after another."""
        added = [a + b for a, b in zip(self, other, strict=True)]
        return Cost(*added)._replace(passing_bytes=max(self.passing_bytes, other.passing_bytes))


@dataclass(frozen=True, eq=False)
class Costs:
    """Of a model on so many ranks of a topology."""

    model: ModelShape
    topology: Topology
    world: int
    per_parameter: ParameterBytes = field(default_factory=ParameterBytes)

    @property
    def cluster(self) -> Cluster:
        """Of the topology."""
        return self.topology.cluster

    def operator(self, name: str, strategy: Strategy) -> Cost:
        """Of "embedding", "head", or an operator of a layer."""
        if name == "embedding":
            return self._embedding(strategy.outer)
        if name == "core":
            return self._core(strategy.inner)
        if name == "activation":
            each = _GATED if self.model.gated else _PLAIN
            elements = self.model.tokens * self.model.ffn * strategy.inner.share
            kept = elements * _HALF * (3 if self.model.gated else 1)
            us = self._touched_us(elements * each)
            return Cost(us=us, products_us=us, kept_bytes=kept)
        if name.endswith("residual"):
            us = self._touched_us(self.model.tokens * self.model.hidden * strategy.outer.share * _RESIDUAL)
            return Cost(us=us, products_us=us)
        linear = self.model.linears[name]
        cost = self._linear(name, linear, strategy)
        if linear.norm:
            cost = self._norm(strategy.outer).plus(cost)
        return cost.plus(self._loss(strategy.inner)) if name == "head" else cost

    def between(self, features: tuple[int, ...], one: Placement, other: Placement) -> float:
        """Microseconds of tensors [tokens, features] on their way, and of their gradients back."""
        rows, cluster = self.model.tokens, self.cluster
        return sum(
            moved_us(one, other, rows, columns, cluster, _HALF)
            + moved_us(other, one, rows, columns, cluster, _HALF)
            for columns in features
        )

    def bytes_between(self, features: tuple[int, ...], one: Placement, other: Placement) -> float:
        """That a rank sends for it."""
        return sum(
            moved_bytes(*way, self.model.tokens, columns, _HALF)
            for columns in features
            for way in ((one, other), (other, one))
        )

    def sent_bytes(self, name: str, strategy: Strategy) -> float:
        """That a rank sends in an operator, in the mean."""
        if name == "embedding":
            return self._embedding_sent(strategy.outer)
        linear = self.model.linears.get(name)
        if linear is None:
            return 0.0
        method, sizes = strategy.one(linear.back), self._sizes(name, strategy)
        sent = _HALF * sum(p.sent_elements(sizes) for p in _programs(method)) / strategy.ranks
        sent += _summed_bytes(_HALF * _weight_share(method) * sizes.k * sizes.n, strategy.copies)
        sent += _summed_bytes(self._shared_bytes(name, strategy), strategy.ranks)
        if linear.norm:
            sent += self._norm_sent(strategy.outer)
        return sent + self._loss_sent(strategy.inner) if name == "head" else sent

    def _norm_sent(self, at: Placement) -> float:
        model = self.model
        kinds = 1 if model.style == "llama" else 2
        weight = kinds * model.hidden * _HALF
        if at.column_parts == 1:
            return _summed_bytes(weight, at.row_parts // at.copies) + _summed_bytes(weight, at.copies)
        own, everyone, parts = over_features(at.layout)
        home, needed = features_home(at.layout.grid, at.layout), features_needed(at.layout)
        return (
            2 * _sent(own, everyone, model.tokens // at.copies, parts * kinds, _SINGLE)
            + _sent(home, needed, kinds, model.hidden, _HALF)
            + _sent(features_partial(at.layout), home, kinds, model.hidden, _HALF)
            + _summed_bytes(weight / at.layout.grid.world, at.copies)
        )

    def _embedding_sent(self, at: Placement) -> float:
        sizes = self.model.tokens // at.copies, self.model.hidden
        sent = 0.0
        for rows in dict.fromkeys(rows for rows, _ in at.layout.holders):
            ways = lookup(at.layout, rows)
            sent += _sent(ways.partial, ways.owners, *sizes, _HALF) + _sent(
                ways.owners, ways.everyone, *sizes, _HALF
            )
        table = self.model.vocab * self.model.hidden / at.layout.grid.world
        return sent + _summed_bytes(table * _HALF, at.copies)

    def _loss_sent(self, at: Placement) -> float:
        own, everyone, parts = over_features(at.layout)
        return _sent(own, everyone, self.model.tokens // at.copies, parts * 3, _SINGLE)

    def _sizes(self, name: str, strategy: Strategy) -> Sizes:
        """Of a copy's products, with heads of keys and values as often as they are held."""
        model, sizes = self.model, self.model.sizes(name)
        again = kv_copies(strategy.inner, model) - 1 if name == "qkv" else 0
        more = again * 2 * model.kv_heads * model.head_dim
        return sizes._replace(m=sizes.m // strategy.copies, n=sizes.n + more)

    def _shared_bytes(self, name: str, strategy: Strategy) -> float:
        """Of gradients that ranks sum since they hold the same heads of keys and values: all-reduces of all of them."""
        model = self.model
        if name != "qkv" or kv_copies(strategy.inner, model) == 1:
            return 0.0
        return 2.0 * model.kv_heads * model.head_dim * model.hidden * _HALF

    def _linear(self, name: str, linear: Linear, strategy: Strategy) -> Cost:
        method, sizes = strategy.one(linear.back), self._sizes(name, strategy)
        one_host = strategy.ranks <= self.cluster.levels[0].ranks
        fused = self.topology.fused and one_host and strategy.method.startswith("1d")
        timings = [predict(method, p, sizes, self.cluster, fused=fused) for p in _programs(method)]
        weight = _weight_share(method) * sizes.k * sizes.n
        copies_us = self._sum_us(weight * _HALF, strategy.ranks, strategy.copies)
        shared = self._shared_bytes(name, strategy)
        shared_us = self._sum_us(shared, 1, strategy.ranks) if shared else 0.0
        x = sizes.m * sizes.k * float(_share(method.home("X")))
        biases = 0.0
        if (
            self.model.style == "gpt" and name != "head"
        ):  # that of a row-parallel layer is whole on every rank
            whole = linear.back and strategy.method.startswith("1d")
            biases = sizes.n / (1 if whole else strategy.ranks)
        return Cost(
            us=sum(t.us for t in timings) + shared_us + copies_us,
            products_us=sum(t.products_us for t in timings),
            messages_us=sum(t.messages_us for t in timings) + shared_us,
            copies_us=copies_us,
            parameter_bytes=(weight + biases) * self.per_parameter.at_rest(strategy.copies),
            kept_bytes=x * _HALF,
            passing_bytes=_passing(method, sizes),
        )

    def _norm(self, at: Placement) -> Cost:
        """Whole rows on a rank: the weight is whole everywhere, and its gradient summed over ranks with other rows."""
        model = self.model
        kinds = 1 if model.style == "llama" else 2
        elements = model.tokens * model.hidden * at.share
        local = self._touched_us(elements * _NORM)
        ranks = at.layout.grid.world
        if at.column_parts == 1:
            weight = kinds * model.hidden * _HALF
            within = self._sum_us(weight, 1, at.row_parts // at.copies)
            copies = self._sum_us(weight, ranks, at.copies)
            return Cost(
                us=local + within + copies,
                products_us=local,
                messages_us=within,
                copies_us=copies,
                parameter_bytes=kinds * model.hidden * self.per_parameter.at_rest(at.copies),
                kept_bytes=elements * _HALF,
            )
        own, everyone, parts = over_features(at.layout)
        rows = model.tokens // at.copies
        statistics = 2 * exchange_us(
            own, everyone, rows, parts * kinds, self.cluster, element_bytes=_SINGLE
        )  # forward and backward
        home, needed = features_home(at.layout.grid, at.layout), features_needed(at.layout)
        weights = exchange_us(home, needed, kinds, model.hidden, self.cluster)
        weights += exchange_us(features_partial(at.layout), home, kinds, model.hidden, self.cluster)
        copies = self._sum_us(kinds * model.hidden / ranks * _HALF, ranks, at.copies)
        return Cost(
            us=local + statistics + weights + copies,
            products_us=local,
            messages_us=statistics + weights,
            copies_us=copies,
            parameter_bytes=kinds * model.hidden / ranks * self.per_parameter.at_rest(at.copies),
            kept_bytes=elements * _HALF,
        )

    def _core(self, at: Placement) -> Cost:
        """Causal attention: half of the scores. q, k and v are kept; the output is what ``out`` keeps."""
        model = self.model
        whole = 2 * model.batch * model.sequence**2 * model.width
        us = _CORE * _CORE_SLOWER * whole * at.share / self.cluster.flops_per_us
        features = model.width + 2 * model.kv_heads * model.head_dim * kv_copies(at, model)
        return Cost(us=us, products_us=us, kept_bytes=features * model.tokens * at.share * _HALF)

    def core_output_bytes(self, at: Placement) -> float:
        """Of the output: the core keeps it, and ``out`` as what it multiplies, where these are two tensors."""
        return self.model.tokens * self.model.width * at.share * _HALF

    def _embedding(self, at: Placement) -> Cost:
        """All parts of the rows take as long as the first."""
        model, ranks = self.model, at.layout.grid.world
        ways = lookup(at.layout, at.layout.block(0).rows)
        sizes = model.tokens // at.copies, model.hidden
        there = exchange_us(ways.partial, ways.owners, *sizes, self.cluster)
        back = exchange_us(ways.owners, ways.everyone, *sizes, self.cluster)
        sent = (there + back) * at.row_parts / at.copies
        table = model.vocab * model.hidden / ranks
        copies = self._sum_us(table * _HALF, ranks, at.copies)
        return Cost(
            us=sent + copies,
            messages_us=sent,
            copies_us=copies,
            parameter_bytes=table * self.per_parameter.at_rest(at.copies),
        )

    def _loss(self, at: Placement) -> Cost:
        model = self.model
        elements = model.tokens * model.vocab * at.share
        local = self._touched_us(elements * _LOSS)
        own, everyone, parts = over_features(at.layout)
        rows = model.tokens // at.copies
        sent = exchange_us(own, everyone, rows, parts * 3, self.cluster, element_bytes=_SINGLE)
        return Cost(
            us=local + sent,
            products_us=local,
            messages_us=sent,
            kept_bytes=elements * _HALF,
            passing_bytes=elements * (_SINGLE + _HALF),
        )

    def _touched_us(self, touched: float) -> float:
        return touched / self.cluster.memory_bytes_per_us

    def _sum_us(self, of_bytes: float, stride: int, copies: int) -> float:
        """All-reduce of so many bytes over copies that stand ``stride`` ranks apart."""
        us = 0.0
        for level, count in _hops(stride, copies, self.cluster):
            link = self.cluster.levels[level]
            latency = math.ceil(math.log2(count + 1)) * link.message_us
            us = max(us, latency + count * of_bytes / copies / link.bytes_per_us)
        return 2 * us


@lru_cache(maxsize=1024)
def _programs(method: Method) -> tuple[Program, Program]:
    ahead = forward(method)
    held = {o: h.layout for o, h in ahead.outputs.items() if o in ("X", "W")}
    return ahead, backward(method, held=held)


@lru_cache(maxsize=4096)
def _passing(method: Method, sizes: Sizes) -> float:
    """Bytes in buffers, results in float32; of a few ranks, which have alike."""
    most = 0.0
    for program in _programs(method):
        for position in {0, 1 % method.grid.world, method.grid.world - 1}:
            held = peak(program, sizes, position).buffers
            results = sum(n for name, n in held.items() if re.match(r"(Y|dX|dW)\b", name))
            most = max(most, _SINGLE * results + _HALF * (sum(held.values()) - results))
    return most


def _sent(source: Layout, target: Layout, rows: int, columns: int, element_bytes: int) -> float:
    """Bytes that a rank sends, in the mean."""
    return sent_elements(messages(source, target), rows, columns) * element_bytes / source.grid.world


def _summed_bytes(of_bytes: float, ranks: int) -> float:
    """That a rank sends in an all-reduce."""
    return 2 * (ranks - 1) / ranks * of_bytes


def _share(layout: Layout) -> float:
    block = layout.block(0)
    return float(block.rows.share * block.columns.share)


def _weight_share(method: Method) -> float:
    return _share(method.home("W"))


@lru_cache(maxsize=1024)
def _hops(stride: int, copies: int, cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """By level, messages that a rank receives in one half of an all-reduce: those of one owner to all, since every
    rank is one of as many owners."""
    given = tuple(Message(0, copy * stride, WHOLE, WHOLE) for copy in range(1, copies))
    counted = Counter(cluster.level_of(a, b) for a, b, _ in legs(given, cluster))
    return tuple(counted.items())
