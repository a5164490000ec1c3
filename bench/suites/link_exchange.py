"""Buffers of a transfer between ranks: what lies where, what has to arrive, and whether it did.

Data is random, of values n/16 in [-1, 1], so that sums over up to 16 ranks are exact in bfloat16. Any rank can make
any other's data, hence every byte that was received is checked, exactly.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..suite import Check, Skip
from .link_cases import layout

__all__ = ["Exchange", "Move", "agreed"]

_DTYPE = torch.bfloat16
_ALIGN = 256


@dataclass(frozen=True)
class Move:
    """One copy of a piece; ``flag`` is one word (int32) at the receiver."""

    dst: Tensor
    src: Tensor
    flag: Tensor


class Exchange:
    """Buffer sets of one transfer, on this rank and, where they are symmetric, mapped from the others.

    Args:
        op: see :data:`.link_cases.EXCHANGES`.
        piece: bytes, a multiple of 2.
        name: of the case; the data depends on it.
        symmetric: in memory that all ranks map (CUDA). All ranks make it together.
        copies: buffer sets; default: more than three L2 caches.

    Raises:
        Skip: symmetric memory cannot be had here.
        torch.OutOfMemoryError: on all ranks, where one of them has too little memory.
    """

    def __init__(
        self, op: str, piece: int, name: str, context: Context, *, symmetric: bool, copies: int | None = None
    ) -> None:
        self.op, self.piece, self.name, self.context = op, piece, name, context
        self.layout = layout(op, piece, context.world)
        self.copies = copies or context.copies(self.layout.total)
        self._target_at = _aligned(self.layout.source)
        self._set_bytes = self._target_at + _aligned(self.layout.target)
        total = self.copies * self._set_bytes + _aligned(self.copies * context.world * 4)
        self._handle: Any = None  # keeps the others' memory mapped
        if symmetric:
            self._storages, self._handle = _symmetric(context, total)
        else:
            self._storages = {context.rank: torch.empty(total, dtype=torch.uint8, device=context.device)}
        # The flag behind the pieces of set i carries epoch i + 1.
        self.epochs = torch.arange(1, self.copies + 1, dtype=torch.int32, device=context.device)
        self.sources().copy_(self._data(context.rank))
        self.poison()

    def sources(self, rank: int | None = None) -> Tensor:
        """What a rank (this one) sends, [copies, n]; where the layout has no source, its own slots of the targets."""
        own = self.context.rank if rank is None else rank
        if self.layout.source:
            return self._view(own, 0, self.layout.source)
        return self.targets(own) if self.op == "all_reduce" else self.slot(self.targets(own), own)

    def targets(self, rank: int | None = None) -> Tensor:
        """Where a rank (this one) receives, [copies, n]."""
        return self._view(self.context.rank if rank is None else rank, self._target_at, self.layout.target)

    def flags(self, rank: int | None = None) -> Tensor:
        """The flags at a rank (this one), int32 [copies, world]: one for each set and sender."""
        storage = self._storages[self.context.rank if rank is None else rank]
        words = storage[self.copies * self._set_bytes :].view(torch.int32)
        return words[: self.copies * self.context.world].view(self.copies, self.context.world)

    def slot(self, buffers: Tensor, rank: int) -> Tensor:
        """The piece of a rank in buffers [..., world * n] of a piece a rank."""
        n = self.piece // _DTYPE.itemsize
        return buffers[..., rank * n : (rank + 1) * n]

    def peers(self) -> list[int]:
        """The other ranks, the next one first."""
        rank, world = self.context.rank, self.context.world
        return [(rank + step) % world for step in range(1, world)]

    def senders(self) -> list[int]:
        """Ranks whose pieces this one receives as they are; none for reductions."""
        if self.op in ("push", "pull"):
            return self.peers()[-1:] if self.op == "push" else self.peers()[:1]
        return self.peers() if self.op in ("all_gather", "scatter") else []

    def moves(self, i: int, *, pull: bool) -> list[Move]:
        """The copies that this rank does in set i, pulling or pushing. Needs symmetric buffers."""
        return [
            self._move(i, p, pull)
            for p in (self.peers()[:1] if self.op in ("push", "pull") else self.peers())
        ]

    def _move(self, i: int, peer: int, pull: bool) -> Move:
        me, op = self.context.rank, self.op
        dst, src = (self.targets(), self.sources(peer)) if pull else (self.targets(peer), self.sources())
        flag = self.flags()[i, peer] if pull else self.flags(peer)[i, me]
        if op in ("all_gather", "scatter"):
            dst = self.slot(dst, peer if pull else me)
        if op == "scatter":
            src = self.slot(src, me if pull else peer)
        return Move(dst[i], src[i], flag.view(1))

    def poison(self) -> None:
        """NaN wherever something has to arrive, flags down; all ranks idle before and after."""
        self.quiet()
        self.targets().fill_(math.nan)
        if not self.layout.source:  # the own piece, or what is reduced in place
            self.sources().copy_(self._data(self.context.rank))
        self.flags().zero_()
        self.quiet()

    def quiet(self) -> None:
        """Wait until every rank's device is idle."""
        self.context.synchronize()
        self.context.agree(None)

    def check(self, *, flags: bool = False) -> Check:
        """Error 0 if every byte and, if asked for, every flag has arrived in every set, else infinite; of all ranks."""
        self.quiet()
        right = self._right()
        if flags:
            right = right and all(
                torch.equal(self.flags()[:, sender], self.epochs) for sender in self.senders()
            )
        # The same on all ranks: the engine judges again only what was right.
        return agreed(self.context, Check(0.0 if right else math.inf, 0.0))

    def _right(self) -> bool:
        me, world, targets = self.context.rank, self.context.world, self.targets()
        if self.op == "all_reduce":
            return _same(targets, torch.stack([self._data(j) for j in range(world)]).amax(dim=0))
        if self.op == "reduce_scatter":
            pieces = [self.slot(self._data(j), me).float() for j in range(world)]
            return _same(targets, torch.stack(pieces).sum(dim=0).to(_DTYPE))
        if self.op in ("push", "pull"):
            return _same(targets, self._data(self.senders()[0]))
        if self.op == "scatter":
            return all(_same(self.slot(targets, j), self.slot(self._data(j), me)) for j in self.senders())
        return all(_same(self.slot(targets, j), self._data(j)) for j in range(world))

    def _data(self, rank: int) -> Tensor:
        """What a rank sends, [copies, n]."""
        shape = (self.copies, (self.layout.source or self.piece) // _DTYPE.itemsize)
        device = self.context.device
        seed = zlib.crc32(f"{self.context.options.seed} {self.name} {rank}".encode())
        generator = torch.Generator(device).manual_seed(seed)
        sixteenths = torch.randint(-16, 17, shape, generator=generator, dtype=torch.int8, device=device)
        return sixteenths.to(_DTYPE).div_(16)

    def _view(self, rank: int, at: int, count: int) -> Tensor:
        sets = self._storages[rank][: self.copies * self._set_bytes].view(self.copies, self._set_bytes)
        return sets[:, at : at + count].view(_DTYPE)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def agreed(context: Context, check: Check) -> Check:
    """The worst of all ranks' checks, on all of them."""
    checks: list[Check] = context.agree(check)
    return max(checks, key=lambda c: (not c.ok, c.error))


def _same(a: Tensor, b: Tensor) -> bool:
    """Bitwise: NaN equals itself, -0 is not 0."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def _symmetric(context: Context, count: int) -> tuple[dict[int, Tensor], object]:
    """Every rank's buffer of ``count`` bytes by rank, this one's own among them; and what keeps them mapped."""
    import torch.distributed._symmetric_memory as symm_mem

    assert context.group is not None
    local, problem = None, ""
    try:
        local = symm_mem.empty(count, dtype=torch.uint8, device=context.device)
    except RuntimeError as error:  # out of memory, or no such memory on this machine
        problem = str(error).splitlines()[0]
    problems = [text for text in context.agree(problem) if text]
    if local is None or problems:
        # The rendezvous is collective: nobody enters it alone.
        if any("out of memory" in text.lower() for text in problems):
            raise torch.OutOfMemoryError(problems[0])
        raise Skip(f"symmetric memory: {problems[0]}")
    handle = symm_mem.rendezvous(local, context.group.group_name)
    storages = {
        rank: local if rank == context.rank else handle.get_buffer(rank, (count,), torch.uint8)
        for rank in range(context.world)
    }
    return storages, handle
