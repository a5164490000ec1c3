"""Where each method begins to pay: the best that each does alone, from a few ranks to 10,000. A simulation, no more.

A world is made of copies of a grid of up to ``strategies.MOST_RANKS`` ranks. One copy is simulated message by message;
copies are alike, and what goes between them (sums of gradients) is looked at for one owner of a slice, as every rank
is. That is the full simulation wherever copies lie alike in hosts: tests compare them on small worlds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpkernels.errors import ArgumentError
from tpkernels.planner.costs import Costs, ParameterBytes
from tpkernels.planner.make import bytes_of
from tpkernels.planner.model import ModelShape, model_of
from tpkernels.planner.plan import Single, singles
from tpkernels.planner.topology import Topology, topology_of
from tpkernels.tune.show import table

__all__ = ["Point", "Sweep", "where_it_pays"]

SCALINGS = ("strong", "weak")
_BESIDE = "1-D, sequence parallel"


class Point(NamedTuple):
    """On ``world`` ranks with ``batch`` sequences, the best of every method; those that can cut the model."""

    world: int
    batch: int
    singles: tuple[Single, ...]


@dataclass(frozen=True)
class Sweep:
    """``print`` shows it.

    Attributes:
        scaling: "strong", the same batch on all worlds, or "weak", a batch that grows with them.
        limit: bytes of a rank.
    """

    model: ModelShape
    topology: Topology
    scaling: str
    limit: float
    points: tuple[Point, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """Those of any point, the ones of fewer dimensions first."""
        order = ("copies alone", "1-D", "1-D, sequence parallel", "2-D", "2.5-D", "3-D", "spatial-temporal")
        seen = {single.name for point in self.points for single in point.singles}
        return tuple(name for name in order if name in seen)

    def pays(self, method: str) -> tuple[int, ...]:
        """Worlds on which a method is within the limit, and one dimension with sequence parallelism is not, or takes
        longer."""
        found = []
        for point in self.points:
            within = {single.name: single.us for single in point.singles if single.peak_bytes <= self.limit}
            if method in within and within[method] < within.get(_BESIDE, math.inf):
                found.append(point.world)
        return tuple(found)

    def fits_from(self, method: str) -> int | None:
        """The first world on which it is within the limit."""
        for point in self.points:
            if any(s.name == method and s.peak_bytes <= self.limit for s in point.singles):
                return point.world
        return None

    def __str__(self) -> str:
        batch = (
            "the same batch everywhere" if self.scaling == "strong" else "a batch that grows with the ranks"
        )
        head = f"{self.model.name} on {self.topology.name}, {batch}: ms of a step, forward and backward; predicted."
        rows = [[f"{p.world}", f"{p.batch}", *(self._cell(p, m) for m in self.methods)] for p in self.points]
        rows.append(["fits from", "", *(str(self.fits_from(m) or "-") for m in self.methods)])
        rows.append(["pays", "", *(self._pays(m) for m in self.methods)])
        tail = (
            "*: the least of the row that fits; (): more memory than a rank has. pays: on these worlds it fits, and "
            "1-D, sequence\nparallel, does not, or takes longer."
        )
        return f"{head}\n\n{table(['ranks', 'batch', *self.methods], rows)}\n\n{tail}"

    def _pays(self, method: str) -> str:
        """Worlds in a row as "8..64"."""
        worlds = [point.world for point in self.points]
        parts: list[list[int]] = []
        for world in self.pays(method):
            if parts and worlds.index(world) == worlds.index(parts[-1][-1]) + 1:
                parts[-1].append(world)
            else:
                parts.append([world])
        return ", ".join(f"{p[0]}..{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts) or "-"

    def _cell(self, point: Point, method: str) -> str:
        found = next((s for s in point.singles if s.name == method), None)
        if found is None:
            return "-"
        text = f"{found.us / 1e3:.1f}"
        if found.peak_bytes > self.limit:
            return f"({text})"
        within = [s.us for s in point.singles if s.peak_bytes <= self.limit]
        return f"{text}*" if found.us == min(within) else text


def where_it_pays(
    model: ModelShape | str,
    worlds: Sequence[int],
    topology: Topology | str | Path,
    *,
    scaling: str = "strong",
    memory: float | str | None = None,
    per_parameter: ParameterBytes | None = None,
) -> Sweep:
    """The best that each method does alone on each number of ranks.

    Args:
        model: its batch is that of the first world.
        worlds: numbers of ranks, rising.
        topology: as in ``tpkernels.plan``.
        scaling: "strong" or "weak".
        memory, per_parameter: as in ``tpkernels.plan``.
    Raises:
        ArgumentError: worlds that do not rise or are beyond the topology, an unknown scaling, a batch that would be no
            whole number, a world on which no method can cut the model.
    """
    model, topology = model_of(model), topology_of(topology)
    if scaling not in SCALINGS:
        raise ArgumentError(f"scaling: it must be 'strong' or 'weak', but it is {scaling!r}.")
    if not worlds or any(type(w) is not int or w < 1 for w in worlds) or list(worlds) != sorted(set(worlds)):
        raise ArgumentError(f"worlds: expected rising numbers of ranks, got {list(worlds)}.")
    if worlds[-1] > topology.ranks:
        raise ArgumentError(
            f"worlds: topology {topology.name!r} joins {topology.ranks} ranks, but the last world has {worlds[-1]}."
        )
    limit = topology.memory_bytes if memory is None else bytes_of(memory)
    points = []
    for world in worlds:
        batch = model.batch
        if scaling == "weak":
            batch, rest = divmod(model.batch * world, worlds[0])
            if rest:
                raise ArgumentError(
                    f"worlds: a batch of {model.batch} on {worlds[0]} ranks is no whole number on {world}; take "
                    f"multiples of {worlds[0]}."
                )
        found = singles(
            Costs(model.with_batch(batch), topology, world, per_parameter or ParameterBytes()), limit
        )
        points.append(Point(world, batch, found))
    if not any(point.singles for point in points):
        raise ArgumentError(
            f"model: no method can cut {model.name} over any of {list(worlds)} ranks; plan one of them to see why."
        )
    return Sweep(model, topology, scaling, limit, tuple(points))


def doubling(first: int, last: int) -> Iterable[int]:
    """first, twice that, ... up to last."""
    while first <= last:
        yield first
        first *= 2
