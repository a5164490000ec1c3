"""What no overlap can beat: the product beside copies of the same bytes, neither waiting for the other.

The copies are pushes by the copy engine, W-1 in a row on one stream of high priority: they cost the product less than
any other transport does, and a fused operation has its dependencies on top.

- all-gather: the shard into every peer's gather buffer, beside the product of another matrix.
- reduce-scatter: one piece [m / W, n] into every peer's slot, beside the product. Adding up what arrived comes on top.
- all-reduce: the same pieces, then the sum of one's own piece into every peer's result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..suite import Check, Runnable
from .overlap_problem import Problem, fill_nan
from .overlap_shapes import AG, AR, RS

__all__ = ["Exchange", "phases", "prepare"]


@dataclass(frozen=True)
class Exchange:
    """Pushes of one buffer set.

    Attributes:
        rank: of this process.
        sent: per phase, [W, rows, columns]: row block p goes to rank p.
        slots: per phase and rank, that rank's buffer [W, rows, columns], mapped here; block r is for rank r's data.
    """

    rank: int
    sent: Sequence[Tensor]
    slots: Sequence[Sequence[Tensor]]

    def push(self) -> None:
        """Enqueue the copies on the current stream; every peer's neighbour below is served first."""
        world = len(self.slots[0])
        for sent, slots in zip(self.sent, self.slots, strict=True):
            for step in range(1, world):
                peer = (self.rank - step) % world
                slots[peer][self.rank].copy_(sent[peer], non_blocking=True)

    def received(self, wanted: Sequence[Tensor]) -> bool:
        """Whether the buffers hold what the peers sent here: ``wanted[phase][r]`` from rank r."""
        return all(
            torch.equal(slots[self.rank][r], want[r])
            for slots, want in zip(self.slots, wanted, strict=True)
            for r in range(len(slots))
            if r != self.rank
        )


def phases(op: str, m: int, n: int, k: int, world: int) -> list[tuple[str, int, int]]:
    """What travels one after the other: (kind, rows, columns) of the piece for one peer. Pure.

    "same": every peer gets the same piece; "each": every peer gets its own.
    """
    rows = math.ceil(m / world)
    return {
        AG: [("same", rows, k)],
        RS: [("each", rows, n)],
        AR: [("each", rows, n), ("same", rows, n)],
    }[op]


def prepare(p: Problem) -> Runnable:
    """Collective: allocates symmetric memory and maps the peers'."""
    from ..peers.symm_mem import symmetric

    wanted = phases(p.op, p.m, p.n, p.k, p.world)
    sizes = [p.world * rows * columns for _, rows, columns in wanted]
    memory, exchanges = [], []
    for _ in range(p.copies):
        memory.append(symmetric(p.group, sum(sizes), p.dtype, p.context.device))
        slots, sent, offset = [], [], 0
        for (kind, rows, columns), size in zip(wanted, sizes, strict=True):
            shape = (p.world, rows, columns)
            slots.append([each[offset : offset + size].view(shape) for each in memory[-1].of_rank])
            sent.append(p.uniform(1 if kind == "same" else p.world, rows, columns).expand(shape))
            offset += size
        exchanges.append(Exchange(p.rank, sent, slots))

    side = torch.cuda.Stream(p.context.device, priority=-1)
    a, out = p.full, p.empty(p.m, p.n)

    def call(i: int, *, multiply: bool = True) -> None:
        i %= p.copies
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            exchanges[i].push()
        if multiply:
            torch.mm(a[i], p.w[i].t(), out=out[i])
        current.wait_stream(side)

    def meet() -> None:
        """All pushes of all ranks have landed."""
        p.context.synchronize()
        p.context.agree(None)

    fill = fill_nan(out, [slots[p.rank] for exchange in exchanges for slots in exchange.slots])

    def poison() -> None:
        meet()
        fill()
        meet()

    def check() -> Check:
        meet()
        intact = True
        for exchange in exchanges:
            arrived = []
            for sent in exchange.sent:
                want = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
                dist.all_to_all_single(want, sent.contiguous(), group=p.group)
                arrived.append(want)
            intact = exchange.received(arrived) and intact
        product = p.check_product(out)
        return product if intact else Check(math.inf, product.tolerance)

    def close() -> None:
        exchanges.clear()
        memory.clear()

    return Runnable(
        call,
        p.copies,
        check=check,
        poison=poison,
        parts={"push": lambda i: call(i, multiply=False)},
        extra={"push_bytes": p.link_bytes},
        close=close,
    )
