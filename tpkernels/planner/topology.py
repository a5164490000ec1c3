"""Described machines: how fast a GPU multiplies, its memory, and links level by level. No torch.

A topology is data: presets, a JSON file, or what ``tpkernels.calibrate`` measured on one host (``Machine``).

    {"name": "ours", "tflops": 650, "memory_gb": 141, "memory_gbps": 4130, "fused": true,
     "levels": [{"name": "NVLink", "ranks": 8, "gbps": 380, "message_us": 4.9},
                {"name": "InfiniBand", "ranks": 16384, "gbps": 50, "message_us": 10}]}

``ranks`` of a level: how many consecutive ranks it joins, those of the levels inside it among them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.errors import ArgumentError
from tpkernels.grids import Cluster, Level

if TYPE_CHECKING:
    from tpkernels.comm.choice import Machine

__all__ = ["TOPOLOGIES", "Topology", "topology_of"]

GB = 1e9
_ANY = 1 << 14  # ranks that the outermost level of a preset joins


@dataclass(frozen=True)
class Topology:
    """``cluster``: rates and links, as ``tpkernels.grids.predict`` takes them.

    Attributes:
        memory_bytes: of a GPU.
        fused: products of one dimension run over their exchanges (path "fused"), as they do within a host of GPUs that
            can: within the innermost level.
    """

    name: str
    cluster: Cluster
    memory_bytes: float = math.inf
    fused: bool = False

    @property
    def ranks(self) -> int:
        """The most that it has."""
        return self.cluster.levels[-1].ranks

    def to_dict(self) -> dict[str, Any]:
        """What ``from_dict`` takes."""
        cluster = self.cluster
        found: dict[str, Any] = {"name": self.name, "tflops": cluster.flops_per_us / 1e6, "fused": self.fused}
        if math.isfinite(self.memory_bytes):
            found["memory_gb"] = self.memory_bytes / GB
        if math.isfinite(cluster.memory_bytes_per_us):
            found["memory_gbps"] = cluster.memory_bytes_per_us / 1e3
        found["levels"] = [
            {"name": e.name, "ranks": e.ranks, "gbps": e.bytes_per_us / 1e3, "message_us": e.message_us}
            for e in cluster.levels
        ]
        return found

    @classmethod
    def from_dict(cls, given: Any) -> Topology:
        """See the module.

        Raises:
            ArgumentError: a key that is missing, unknown or of another type, rates that are none.
        """
        _check_keys(given, "topology", {"tflops", "levels"}, {"name", "memory_gb", "memory_gbps", "fused"})
        if not isinstance(given["levels"], list):
            raise ArgumentError(f"levels: expected a list of levels, got {given['levels']!r}.")
        levels = []
        for number, level in enumerate(given["levels"]):
            where = f"levels[{number}]"
            _check_keys(level, where, {"ranks", "gbps", "message_us"}, {"name"})
            if type(level["ranks"]) is not int:
                raise ArgumentError(f"{where}.ranks: expected an integer, got {level['ranks']!r}.")
            rates = [_number(level[key], f"{where}.{key}") for key in ("gbps", "message_us")]
            levels.append(Level(str(level.get("name", where)), level["ranks"], rates[0] * 1e3, rates[1]))
        fused = given.get("fused", False)
        if type(fused) is not bool:
            raise ArgumentError(f"fused: expected true or false, got {fused!r}.")
        memory = _number(given["memory_gb"], "memory_gb") * GB if "memory_gb" in given else math.inf
        if not memory > 0:
            raise ArgumentError(f"memory_gb: it must be above 0, but it is {given['memory_gb']}.")
        rate = _number(given["memory_gbps"], "memory_gbps") * 1e3 if "memory_gbps" in given else math.inf
        cluster = Cluster(_number(given["tflops"], "tflops") * 1e6, tuple(levels), rate)
        return cls(str(given.get("name", "topology")), cluster, memory, fused)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """From a JSON file: of the module's form, or what ``tpkernels.calibrate(...).to_json()`` gave.

        Raises:
            ArgumentError: no such file, no JSON, or nonsense in it.
        """
        try:
            text = Path(path).read_text()
            given = json.loads(text)
        except OSError as error:
            raise ArgumentError(f"topology: cannot read {str(path)!r} ({error.strerror}).") from None
        except ValueError as error:
            raise ArgumentError(f"topology: expected JSON in {str(path)!r}, but {error}.") from None
        try:
            if isinstance(given, dict) and {"card", "apart"} <= set(given):
                from tpkernels.comm.choice import Machine

                return cls.of_machine(Machine.from_json(text))
            return cls.from_dict(given)
        except ArgumentError as error:
            raise ArgumentError(f"topology {str(path)!r}: {error}") from None

    @classmethod
    def of_machine(cls, machine: Machine, memory_bytes: float = math.inf) -> Topology:
        """One host, with the constants that ``tpkernels.calibrate`` measured or knows: the rate of large products, that
        of memory, and of the copies of a gather. A message takes what the shortest gather does."""
        gather = "all_gather_matmul"
        fused, quick = machine.fused[gather], machine.quick[gather]
        level = Level("NVLink", machine.world, fused.gbps * 1e3, quick.us or fused.us)
        cluster = Cluster(machine.tflops * 1e6, (level,), machine.memory_gbps * 1e3)
        return cls(f"{machine.world} x {machine.card}", cluster, memory_bytes, fused=True)


def _check_keys(given: Any, what: str, needed: set[str], other: set[str]) -> None:
    if not isinstance(given, dict):
        raise ArgumentError(f"{what}: expected an object with {', '.join(sorted(needed))}, got {given!r}.")
    missing, unknown = needed - set(given), set(given) - needed - other
    if missing:
        raise ArgumentError(
            f"{what}: {', '.join(sorted(missing))} must be there, but it has {sorted(given)}."
        )
    if unknown:
        raise ArgumentError(
            f"{what}: there is no {', '.join(sorted(unknown))}; what may be there is "
            f"{', '.join(sorted(needed | other))}."
        )


def _number(given: Any, name: str) -> float:
    if type(given) not in (int, float) or not math.isfinite(given):
        raise ArgumentError(f"{name}: expected a number, got {given!r}.")
    return float(given)


# NVLink and messages as `bench link` measured them between two H200, memory as path "auto" has it of four (`Machine`);
# 650 TFLOP/s whatever the sizes; and a network card of 400 Gbit/s for each GPU, described and not measured.
_NVLINK = Level("NVLink", 8, 3.8e5, 4.9)
_NETWORK = Level("network", _ANY, 5.0e4, 10.0)
TOPOLOGIES: Mapping[str, Topology] = {
    "h200x8": Topology("h200x8", Cluster(6.5e8, (_NVLINK,), 4.13e6), 141 * GB, fused=True),
    "h200": Topology("h200", Cluster(6.5e8, (_NVLINK, _NETWORK), 4.13e6), 141 * GB, fused=True),
    "h100": Topology("h100", Cluster(6.5e8, (_NVLINK, _NETWORK), 2.85e6), 80 * GB, fused=True),
}


def topology_of(given: Topology | Machine | str | Path) -> Topology:
    """A topology, a preset's, that of a JSON file, or of a calibrated machine.

    Raises:
        ArgumentError: neither.
    """
    if isinstance(given, Topology):
        return given
    from tpkernels.comm.choice import Machine

    if isinstance(given, Machine):
        return Topology.of_machine(given)
    if isinstance(given, str) and given in TOPOLOGIES:
        return TOPOLOGIES[given]
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".json")):
        return Topology.load(given)
    known = ", ".join(TOPOLOGIES)
    raise ArgumentError(
        f"topology: expected a Topology, a Machine, one of {known}, or a file that ends in .json, got {given!r}."
    )
