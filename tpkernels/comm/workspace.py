"""Memory that the ranks of a group write into each other's: one allocation per (group, device, kind).

It is made and grown by all ranks together: sizes follow from arguments that are the same on all of them. It is freed
once its group is destroyed, at the next use of any group.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm import ranks, runtime, watchdog
from tpkernels.comm.symmetric import Mapping
from tpkernels.errors import BackendError
from tpkernels.ops._groups import Group

PAGE_BYTES = 4096  # of words, before the buffer: csrc/host/protocol.hpp
_GRANULE = 2 << 20  # what the driver maps at least

T = TypeVar("T")


@dataclass
class Workspace:
    """One rank's part of the memory, and where that of the others is mapped.

    Attributes:
        captured: whether a CUDA graph has these addresses.
        kept: memory that was outgrown, but graphs still replay into.
    """

    group: weakref.ref[ProcessGroup]
    memory: Tensor
    mapping: Mapping
    captured: bool = False
    kept: list[tuple[Tensor, Mapping]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.memory.numel()

    @property
    def addresses(self) -> tuple[int, ...]:
        return self.mapping.addresses


_spaces: dict[tuple[str, torch.device, str], Workspace] = {}
_lock = threading.RLock()


def gather_bytes(rows: int, k: int, itemsize: int) -> int:
    """Size of an allocation into which ``rows`` rows of ``k`` elements are gathered."""
    return PAGE_BYTES + rows * _up(k, 8) * itemsize


def scatter_bytes(shard_rows: Sequence[int], n: int, itemsize: int) -> int:
    """Size of an allocation with a slot for every rank, each for as many rows as the longest shard has."""
    return PAGE_BYTES + len(shard_rows) * max(shard_rows) * pitch(n, itemsize) * itemsize


def sum_bytes(shard_rows: Sequence[int], n: int, itemsize: int) -> int:
    """Size of an allocation for sums that every rank gets: slots, and all rows behind them."""
    return scatter_bytes(shard_rows, n, itemsize) + sum(shard_rows) * pitch(n, itemsize) * itemsize


def grown(size: int) -> int:
    """What is allocated where a call needs ``size``: a buffer of a power of two, so that growth is rare."""
    return _up(PAGE_BYTES + (1 << max(0, size - PAGE_BYTES - 1).bit_length()), _GRANULE)


def pitch(n: int, itemsize: int) -> int:
    """Elements from one row of a slot to the next: whole units of 16 bytes."""
    return _up(n, 16 // itemsize)


def gathered_rows(space: Workspace, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """[rows, k], what lies in an allocation of :func:`gather_bytes`: no copy."""
    width = _up(k, 8)
    buffer = space.memory[PAGE_BYTES : PAGE_BYTES + rows * width * dtype.itemsize]
    return buffer.view(dtype).view(rows, width)[:, :k]


def ensure(group: Group, device: torch.device, kind: str, size: int) -> Workspace:
    """The workspace of a kind ("gather", "scatter", "sum", "blocks", "small"), of at least ``size`` bytes. Collective
    where it grows."""
    with _lock:
        capturing = runtime.active.capturing()
        if not capturing:
            free_destroyed()
        space = _spaces.get((group.name, device, kind))
        if space is not None and space.group() is not group.process_group:
            space = None  # of a destroyed group of the same name, seen in a capture
        present = space.size if space is not None else 0
        if space is None or present < size:
            if capturing:
                raise BackendError(
                    f"path 'fused' needs {size:,} bytes for a {kind} in group {group.name!r}, which has "
                    f"{present:,}: memory cannot grow while a CUDA graph is captured; make the "
                    "call once before the capture, or call tpk.reserve(...)."
                )
            space = None  # nor may we hold what _grow frees
            space = _grow(group, device, kind, _up(size, _GRANULE) if kind == "small" else grown(size))
        if capturing:
            space.captured = True
        return space


def present(group: Group, device: torch.device, kind: str) -> int:
    """Bytes of the workspace that a group has of that kind; 0: none."""
    space = _spaces.get((group.name, device, kind))
    return space.size if space is not None and space.group() is group.process_group else 0


def reserve(group: Group, device: torch.device, sizes: dict[str, int]) -> None:
    """Make every kind as large as asked for. Collective; all ranks must ask for the same."""
    with _lock:
        if runtime.active.capturing():
            raise BackendError("reserve: memory cannot grow while a CUDA graph is captured; call it before.")
        free_destroyed()
        _agree(group, "reserve", sizes)
        for kind, size in sizes.items():
            key = group.name, device, kind
            if key not in _spaces or _spaces[key].size < size:
                _grow(group, device, kind, _up(size, _GRANULE))


def free_destroyed() -> None:
    """Free the memory of groups that exist no longer. What peers still write goes to memory that they keep alive."""
    for key, space in list(_spaces.items()):
        if not ranks.exists(key[0], space.group):
            runtime.active.synchronize(key[1])  # our kernels may still use it
            del _spaces[key]


def _grow(group: Group, device: torch.device, kind: str, size: int) -> Workspace:
    """Nobody may write before every rank has zeroed and mapped, nor free what another one still writes to."""
    key, active = (group.name, device, kind), runtime.active
    active.synchronize(device)
    _agree(group, f"a {kind} workspace", size)
    names, counts = zip(*ranks.exchange(group, (uuid.uuid4().hex, active.times_mapped())), strict=True)
    name = f"tpkernels {names[0]}"
    reference, kept = weakref.ref(group.process_group), []
    old = _spaces.pop(key, None)
    if old is not None:
        kept = [*old.kept, (old.memory, old.mapping)] if old.captured else old.kept
        del old  # now, so that both need not fit

    def allocate() -> Tensor:
        memory = active.allocate(size, device)
        memory[: size if kind == "small" else PAGE_BYTES].zero_()  # small: epochs lie among the data
        active.synchronize(device)
        return memory

    try:
        memory = _together(group, kind, size, allocate)
        mapping = _together(group, kind, size, lambda: active.map_ranks(memory, group, name, max(counts)))
        _together(group, kind, size, lambda: active.warm_up(device, group.rank, mapping.addresses))
    except Exception:
        if kept:  # graphs go on
            _spaces[key] = Workspace(reference, *kept[-1], captured=True, kept=kept[:-1])
        raise
    watchdog.start()
    _spaces[key] = Workspace(reference, memory, mapping, kept=kept)
    return _spaces[key]


def _together(group: Group, kind: str, size: int, step: Callable[[], T]) -> T:
    """Run a step on every rank and wait for all; if it fails on one of them it fails on all."""
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(step())
    except Exception as error:
        failure = error
    _agree(group, f"a {kind} workspace of {size:,} bytes", size, failure)
    return result[0]


def _agree(group: Group, what: str, asked: object, failure: Exception | None = None) -> None:
    text = "" if failure is None else f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    everyone = ranks.exchange(group, (asked, text))
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyone) if text]
    if failed:
        raise BackendError(
            f"path 'fused' in group {group.name!r}: {what} could not be had ({'; '.join(failed)}); use path='auto'."
        ) from failure
    if any(other != asked for other, _ in everyone):
        listed = ", ".join(f"{other} on rank {rank}" for rank, (other, _) in enumerate(everyone))
        raise BackendError(
            f"path 'fused' in group {group.name!r}: expected the same size of {what} on every rank, got {listed}; "
            "TPK_CHECK=1 tells which arguments differ."
        )


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit
