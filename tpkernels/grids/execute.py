"""Carries programs out over a process group: one interpreter for all methods, on any backend with point-to-point
sends.

Contract: ``run`` does what a ``Program`` says for this rank, step by step: posts the step's sends and receives,
multiplies, waits. All ranks of the grid must run the same program with the same sizes and types. Products are
``tpkernels.matmul``.

Numbers: sums are formed in float32 (float64 for float64), over steps in their order and over ranks in the order of
positions, or in that in which they come, one a step; so every run has the same bits. What travels of a result is
rounded to the result's type, each partial sum and each sum under way once; what stays is not. Replicas of a result are
equal bit for bit.

Waits end after the group's timeout, with ``CommTimeoutError``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.errors import CommTimeoutError
from tpkernels.grids.layout import Block, Layout, messages
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.grids.method import Pass, Sizes
from tpkernels.grids.program import ColumnSum, Product, Program, Work
from tpkernels.grids.spans import Span
from tpkernels.ops import _nvtx
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._groups import transport_of

__all__ = ["Traffic", "move", "record_traffic", "run"]


@dataclass
class Traffic:
    """What this rank has sent and received of tensors, and the most elements in a program's own buffers."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    peak_elements: int = 0


# Of the process: backward passes on a GPU run in threads of their own.
_recording: list[Traffic] = []


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Counts what programs and redistributions move in this process; an outer count does not have an inner one's."""
    _recording.append(Traffic())
    try:
        yield _recording[-1]
    finally:
        _recording.pop()


def note_sent(sides: Sequence[tuple[Sequence[Sequence[int]], Tensor]], grid: ProcessGrid) -> None:
    """Counts blocks that all positions take, [position][step], of whom they name; this rank's is the tensor."""
    if not _recording:
        return
    traffic = _recording[-1]
    held = 0
    for table, block in sides:
        sent = sum(
            owner == grid.position for p, owners in enumerate(table) if p != grid.position for owner in owners
        )
        received = sum(owner != grid.position for owner in table[grid.position])
        traffic.sent_messages += sent
        traffic.sent_bytes += sent * block.nbytes
        traffic.received_bytes += received * block.nbytes
        held += received * block.numel()
    traffic.peak_elements = max(traffic.peak_elements, held)


class _Piece(NamedTuple):
    """A rectangle that goes to, or comes from, the rank at ``peer``: rows and columns within this rank's block."""

    peer: int
    rows: slice
    columns: slice

    def of(self, block: Tensor) -> Tensor:
        """The rectangle: of the first and of the last dimension."""
        return block[self.rows, ..., self.columns]


class _Part(NamedTuple):
    """This rank's part of an exchange. ``shape``: of its block of the target, None if it has none."""

    sends: tuple[_Piece, ...]
    receives: tuple[_Piece, ...]
    shape: tuple[int, int] | None
    own: tuple[_Piece, ...]  # of the source, in the order of the receives from itself


@lru_cache(maxsize=8192)
def _part(source: Layout, target: Layout, position: int, rows: int, columns: int) -> _Part:
    sends: list[_Piece] = []
    receives: list[_Piece] = []
    own: list[_Piece] = []
    for m in messages(source, target):
        if position not in (m.source, m.target) or m.elements(rows, columns) == 0:
            continue
        given = _piece(m.target, source.blocks[position], m.rows, m.columns, rows, columns)
        taken = _piece(m.source, target.blocks[position], m.rows, m.columns, rows, columns)
        if m.target == position:
            receives.append(taken)
        if m.source == position:
            (own if m.target == position else sends).append(given)
    block = target.blocks[position]
    return _Part(tuple(sends), tuple(receives), block and block.shape(rows, columns), tuple(own))


def _piece(peer: int, block: Block | None, rows: Span, columns: Span, m: int, n: int) -> _Piece:
    def inside(outer: Span, inner: Span, size: int) -> slice:
        first, (begin, end) = outer.elements(size)[0], inner.elements(size)
        return slice(begin - first, end - first)

    if block is None:
        return _Piece(peer, slice(0), slice(0))
    return _Piece(peer, inside(block.rows, rows, m), inside(block.columns, columns, n))


class _Transfer:
    """An exchange under way: posted when it is made, ``finish`` waits and returns this rank's new block."""

    def __init__(
        self, part: _Part, block: Tensor | None, wire: torch.dtype, grid: ProcessGrid, what: str, like: Tensor
    ) -> None:
        self.part, self.block, self.wire, self.what, self.grid = part, block, wire, what, grid
        self.middle = like.shape[1:-1]
        self.like = like
        carrier = _open(grid, like.device)
        self.outgoing: list[Tensor] = []
        self.arriving: list[Tensor | None] = []
        operations: list[dist.P2POp] = []
        group = grid.group.process_group
        for piece in part.sends:
            assert block is not None
            sent = piece.of(block).to(carrier, wire).contiguous()
            self.outgoing.append(sent)  # must live until it is sent
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=grid.members[piece.peer]))
        for piece in part.receives:
            if piece.peer == grid.position:
                self.arriving.append(None)
                continue
            shape = (
                piece.rows.stop - piece.rows.start,
                *self.middle,
                piece.columns.stop - piece.columns.start,
            )
            into = torch.empty(shape, dtype=wire, device=carrier)
            self.arriving.append(into)
            operations.append(dist.P2POp(dist.irecv, into, group=group, group_peer=grid.members[piece.peer]))
        self.works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        self._count()

    def _count(self) -> None:
        if _recording:
            traffic = _recording[-1]
            traffic.sent_messages += len(self.outgoing)
            traffic.sent_bytes += sum(t.nbytes for t in self.outgoing)
            traffic.received_bytes += sum(t.nbytes for t in self.arriving if t is not None)

    def finish(self, result: bool, exact: bool = False) -> tuple[Tensor | None, bool]:
        """The block (None: this rank has none), and whether it is a view of what was there. ``exact``: what did not
        travel keeps its type."""
        self._wait()
        self.arriving = [None if t is None else t.to(self.like.device) for t in self.arriving]
        part = self.part
        if part.shape is None:
            return None, False
        own = iter(part.own)
        pieces = [next(own).of(self._source()) if t is None else t for t in self.arriving]
        summed = len({(p.rows.start, p.columns.start) for p in part.receives}) < len(pieces)
        shape = torch.Size((part.shape[0], *self.middle, part.shape[1]))
        if len(pieces) == 1 and pieces[0].shape == shape:
            return (pieces[0] if exact else pieces[0].to(self.wire)), self.arriving[0] is None
        dtype = accumulate_dtype(self.wire) if summed and result else self.wire
        block = torch.zeros(shape, dtype=dtype, device=self.like.device)
        seen: set[tuple[int, int]] = set()
        for piece, values in zip(part.receives, pieces, strict=True):
            place = piece.rows.start, piece.columns.start
            if place in seen:
                piece.of(block).add_(values)
            else:
                seen.add(place)
                piece.of(block).copy_(values)
        return block, False

    def _source(self) -> Tensor:
        assert self.block is not None
        return self.block

    def _wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
                raise
            givers = sorted({self.grid.members[p.peer] for p in self.part.receives} - {self.grid.group.rank})
            takers = sorted({self.grid.members[p.peer] for p in self.part.sends})
            raise CommTimeoutError(
                f"{self.what}: rank {self.grid.group.rank} of group {self.grid.group_name!r} waited longer than the "
                f"group's timeout to receive from ranks {givers} and to send to ranks {takers}; one of them did not "
                "come: every rank must make the same calls in the same order. Use no result of this call, and end "
                "the process."
            ) from error


# By group and type of device, of which a group has a backend each: whether tensors go by the host.
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, bool]] = weakref.WeakKeyDictionary()


def _open(grid: ProcessGrid, device: torch.device) -> torch.device:
    """Where tensors have to be to be sent: gloo sends no GPU's memory from rank to rank, so it goes by the host's.

    NCCL makes a group's connections in its first call, in which all ranks must take part: that of an exchange need not
    be one. Every rank of the grid comes here before its first.
    """
    group = grid.group
    by_host = _opened.setdefault(group.process_group, {})
    if device.type not in by_host:
        transport = transport_of(group, device, "x")
        if transport == "nccl":
            dist.all_reduce(torch.zeros(1, device=device), group=group.process_group)
        by_host[device.type] = transport == "gloo"
    return torch.device("cpu") if by_host[device.type] else device


def move(
    x: Tensor | None,
    source: Layout,
    target: Layout,
    shape: tuple[int, int],
    grid: ProcessGrid,
    like: Tensor,
    what: str,
) -> Tensor | None:
    """This rank's block in ``target`` of the matrix of ``shape`` whose block in ``source`` is ``x``; None: it has none.

    ``x`` may have more dimensions; the layouts cut the first and the last one. It travels in the type of ``like``,
    which also has the dimensions between and the device. Partial sums are added in float32 (float64), in which the
    result then is. May be ``x`` itself, or a view of it.
    """
    part = _part(source, target, grid.position, *shape)
    block, _ = _Transfer(part, x, like.dtype, grid, what, like).finish(True)
    return block


def run(
    program: Program,
    given: Mapping[str, Tensor],
    sizes: Sizes,
    grid: ProcessGrid,
    dtypes: Mapping[str, torch.dtype],
    *,
    path: str = "auto",
    what: str = "program",
) -> dict[str, Tensor]:
    """This rank's blocks of the program's outputs.

    Args:
        given: blocks of "X", "W", "B", "dY", each [rows, columns], as the program's first layouts have them.
        sizes: of the whole layer.
        dtypes: of results, by name ("Y", "dX", "dW", "dB"): as what they travel. They are returned in this type, or
            in that of the accumulators where nothing travelled.
        path: of the products, see ``tpkernels.matmul``.
        what: who calls, for messages.
    Raises:
        CommTimeoutError: another rank did not come within the group's timeout.
    """
    buffers: dict[str, Tensor] = dict(given)
    views = set(given)
    like = next(iter(given.values()))
    _open(grid, like.device)  # also where this rank has nothing to exchange
    for number, step in enumerate(program.steps):
        transfers = []
        for exchange in step.exchanges:
            source, target = exchange.source, exchange.target
            part = _part(source.layout, target.layout, grid.position, *sizes.of(exchange.operand))
            block = buffers.get(source.buffer)
            wire = dtypes[exchange.operand] if exchange.result or block is None else block.dtype
            with _nvtx.phase(f"{exchange.operand} moves", "p2p"):
                transfers.append(_Transfer(part, block, wire, grid, f"{what}, {exchange.operand}", like))
        arriving = {exchange.target.buffer for exchange in step.exchanges}
        fresh = [(work.into, _done(work, buffers, arriving, path)) for work in step.work]  # while it travels
        addends: list[tuple[str, Tensor]] = []
        arrived = 0  # elements of addends that travelled
        for exchange, transfer in zip(step.exchanges, transfers, strict=True):
            name = exchange.target.buffer
            made, view = transfer.finish(exchange.result, exact=exchange.adds)
            if made is None:
                continue
            if exchange.adds and name in buffers:
                addends.append((name, made))
                arrived += 0 if view else made.numel()
            elif exchange.adds:
                buffers[name] = made.to(accumulate_dtype(made.dtype), copy=view)
            else:
                buffers[name] = made
                if view:
                    views.add(name)
        made_here = {name: value for name, value in fresh if value is not None}
        _note_peak(buffers, views, made_here, arrived)
        for name, value in addends:
            buffers[name].add_(value)
        for name, value in made_here.items():
            buffers[name] = value.add_(buffers[name]) if name in buffers else value
        for name in [name for name in buffers if program.last_use.get(name, -1) <= number]:
            del buffers[name]
    return {operand: buffers[held.buffer] for operand, held in program.outputs.items()}


def _note_peak(
    buffers: Mapping[str, Tensor], views: set[str], fresh: Mapping[str, Tensor], arrived: int
) -> None:
    if _recording:
        traffic = _recording[-1]
        held = arrived + sum(t.numel() for name, t in buffers.items() if name not in views)
        held += sum(t.numel() for t in fresh.values())
        traffic.peak_elements = max(traffic.peak_elements, held)


def _done(work: Work, buffers: Mapping[str, Tensor], arriving: set[str], path: str) -> Tensor | None:
    """What the work makes; None where it was added to what is there."""
    if isinstance(work, ColumnSum):
        of = buffers[work.of]
        return of.sum(0, keepdim=True, dtype=accumulate_dtype(of.dtype))
    left, right = _factors(work, buffers)
    if work.into in buffers and work.into not in arriving:
        torch.ops.tpkernels.matmul_accumulate(left, right, buffers[work.into], path)
        return None
    made: Sequence[Tensor] = torch.ops.tpkernels.matmul(
        left, right, None, None, None, 1.0, "none", accumulate_dtype(left.dtype), False, path
    )
    return made[0]


def _factors(work: Product, buffers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    left, right = buffers[work.left], buffers[work.right]
    if work.kind is Pass.FORWARD:
        return left, right.t()
    return (left.t() if work.kind is Pass.WEIGHT_GRAD else left), right
