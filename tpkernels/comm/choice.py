"""Whether path "fused" should pay for a call: two predicted times, and which one is less. Pure.

Apart, as path "nccl+cublas" does it: the product, and beside it what was measured of the collective (with the sums
behind it), between measured sizes. Fused::

    max(product, copies) + exposed * min(product, copies) + us + us_per_k * K / 1024

``exposed`` is what does not overlap; the rest is what does not shrink: the kernel that enters, the last piece to
arrive, and the tile that waits for it, which takes as long as K is. A small call takes a kernel of low latency beside
the product instead: ``product + us + bytes / rate``.

The product's time is the same in both, so that its error hardly matters. Constants: :mod:`tpkernels.comm.machines`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from tpkernels.errors import ArgumentError

GATHER, SCATTER, SUM = OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
MARGIN = 0.97  # fused is taken where it should need less than this part of the other's time: a prediction is no promise
MOST_PAIRS = 4  # of factors that a product takes in one go: kMaxPairs of csrc/kernels/gemm_hooks.hpp
_FLAT = 256 << 10

Points = tuple[tuple[float, float], ...]


class Overlap(NamedTuple):
    """A fused operation. Copies arrive at ``gbps`` (10^9 bytes a second); the other constants: see the module."""

    gbps: float
    exposed: float
    us: float
    us_per_k: float


class Quick(NamedTuple):
    """The kernel of low latency, for what :func:`size_of` tells is up to ``most_bytes``; 0: there is none."""

    us: float = 0.0
    gbps: float = 1.0
    most_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """Constants of ``world`` GPUs of one kind on one host. ``print`` shows them; :meth:`to_json` keeps them.

    Attributes:
        card: as ``torch.cuda.get_device_name`` has it.
        world: ranks that were measured.
        tflops: of a large product, sustained, 10^12 operations a second.
        memory_gbps: rate at which a product with few rows reads its weight.
        launch_us: what the smallest product takes.
        apart: by operation, (bytes, microseconds) of what path "nccl+cublas" does beside its product. Bytes: see
            :func:`travelling`.
        fused: by operation.
        quick: of small calls, by operation.
    """

    card: str
    world: int
    tflops: float
    memory_gbps: float
    launch_us: float
    apart: Mapping[str, Points] = field(hash=False)
    fused: Mapping[str, Overlap] = field(hash=False)
    quick: Mapping[str, Quick] = field(default_factory=lambda: dict.fromkeys(OPS, Quick()), hash=False)

    def to_json(self) -> str:
        """One line, for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """What :meth:`to_json` wrote.

        Raises:
            ArgumentError: it is something else.
        """
        try:
            given = json.loads(text)
            for name in ("apart", "fused", "quick"):
                if set(given[name]) != set(OPS):
                    raise ValueError(f"{name} has {', '.join(given[name]) or 'nothing'}")
            given["apart"] = {
                op: tuple((float(size), float(us)) for size, us in points)
                for op, points in given["apart"].items()
            }
            given["fused"] = {op: Overlap(*map(float, values)) for op, values in given["fused"].items()}
            given["quick"] = {
                op: Quick(float(us), float(gbps), int(most))
                for op, (us, gbps, most) in given["quick"].items()
            }
            return cls(**given)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(
                f"text: expected what Machine.to_json() writes, got {text[:60]!r} ({error}); run tpk.calibrate() again."
            ) from None


class Call(NamedTuple):
    """A call as all ranks see it.

    Attributes:
        op: one of ``OPS``.
        rows: rows of every rank's shard, of all leading dimensions; together those of the product.
        n: columns of the result on a rank, of all weights together; of the rank that has most.
        k: length of the product's sums on a rank, of all pairs together; of the rank that has most.
        item, out_item: bytes of an element of the operands, and of the result.
        pairs: products that are summed.
    """

    op: str
    rows: tuple[int, ...]
    n: int
    k: int
    item: int = 2
    out_item: int = 2
    pairs: int = 1


class Prediction(NamedTuple):
    """What both paths should take, in microseconds, and the choice."""

    fused_us: float
    apart_us: float
    fused: bool
    why: str


def choose(call: Call, machine: Machine, apart: str = "nccl+cublas") -> Prediction:
    """``apart`` names the path that is not fused."""
    product = product_us(call, machine)
    fused, other = fused_us(call, machine, product), apart_us(call, machine, product)
    takes = fused < MARGIN * other
    first, second = (("fused", fused), (apart, other))[:: 1 if takes else -1]
    why = f"{first[0]}: {first[1]:.0f} us predicted, {second[0]} {second[1]:.0f}"
    if machine.world != len(call.rows):
        why += f" (constants of {machine.world} ranks)"
    return Prediction(fused, other, takes, why)


def product_us(call: Call, machine: Machine) -> float:
    """The product of one rank, all rows of it: arithmetic or memory, whichever is longer."""
    m, n, k = sum(call.rows), call.n, call.k
    arithmetic = 2.0 * m * n * k / machine.tflops * 1e-6
    moved = call.item * (m * k + k * n) + call.out_item * m * n
    return machine.launch_us + max(arithmetic, moved / machine.memory_gbps * 1e-3)


def apart_us(call: Call, machine: Machine, product: float) -> float:
    """Product and collective, one after the other."""
    return product + between(machine.apart[call.op], travelling(call))


def fused_us(call: Call, machine: Machine, product: float) -> float:
    """The fused operation."""
    if is_quick(call, machine):
        quick = machine.quick[call.op]
        return product + quick.us + travelling(call) / quick.gbps * 1e-3
    o = machine.fused[call.op]
    copies = travelling(call) / o.gbps * 1e-3
    overlapped = max(product, copies) + o.exposed * min(product, copies)
    joined = 0.0  # more pairs become one, by copies; so do those that lie in different ways, which is not told here
    if call.pairs > MOST_PAIRS:
        joined = 2.0 * call.item * call.k * (sum(call.rows) + call.n) / machine.memory_gbps * 1e-3
    return overlapped + o.us + o.us_per_k * call.k / 1024 + joined


def is_quick(call: Call, machine: Machine) -> bool:
    """Whether the kernel of low latency takes the call."""
    return size_of(call) <= machine.quick[call.op].most_bytes


def size_of(call: Call) -> int:
    """Bytes of an all-reduce's result; of what is gathered or scattered, were all shards as long as the longest."""
    rows = sum(call.rows) if call.op == SUM else len(call.rows) * max(call.rows)
    return rows * row_bytes(call)


def travelling(call: Call) -> int:
    """Bytes that a rank receives (and sends) at most; an all-reduce is a scatter and a gather."""
    once = (sum(call.rows) - min(call.rows)) * row_bytes(call)
    return 2 * once if call.op == SUM else once


def row_bytes(call: Call) -> int:
    """Of what travels."""
    return call.k * call.item if call.op == GATHER else call.n * call.out_item


def between(points: Points, size: float) -> float:
    """Straight lines between points, and on behind the last.

    Less than the first is told in proportion, which is rather too little, so that nothing is fused on account of what
    was not measured; but below ``_FLAT`` a collective takes as long as there.
    """
    if size <= points[0][0] or len(points) == 1:
        return points[0][1] * max(size, _FLAT) / max(points[0][0], _FLAT)
    i = next((i for i, point in enumerate(points) if size <= point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
