"""What ``path="auto"`` takes for a call: the prediction of :mod:`~tpkernels.comm.choice`, the same on every rank.

Ranks that chose differently would wait for each other for ever. Whether path "fused" can run they ask each other once;
whether it should pay, for this call, rank 0 says (:mod:`~tpkernels.comm.verdicts`). What is not known yet cannot be
asked while a CUDA graph is captured: nothing is fused then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from tpkernels.comm import choice, conditions, faults, machines, ranks, runtime, small, workspace
from tpkernels.comm.choice import Call, Machine
from tpkernels.comm.verdicts import Verdicts
from tpkernels.errors import BackendError
from tpkernels.ops._groups import Group

_CAPTURE = "while a CUDA graph is captured; make the call once before"
_KEPT = 4096  # predictions of a group that are remembered


class Asked(NamedTuple):
    """One rank's view of a call, apart from rows: K of every pair, columns of every weight."""

    op: str
    ks: tuple[int, ...]
    ns: tuple[int, ...]
    dtype: torch.dtype
    out_dtype: torch.dtype

    def way(self, rows: Sequence[int]) -> str | None:
        """By which way of :mod:`comm.small` it goes on path "fused"; None: it overlaps."""
        gathers = self.op == choice.GATHER
        row_bytes = self.ks[0] * self.dtype.itemsize if gathers else self.ns[0] * self.out_dtype.itemsize
        return small.way_of(self.op, rows, row_bytes)


class Decision(NamedTuple):
    """The choice, and a sentence about it."""

    fused: bool
    why: str


@dataclass
class _State:
    """Of a group and device. ``verdicts``: None before the first call, a string why there are none."""

    group: weakref.ref[ProcessGroup]
    verdicts: Verdicts | str | None = None
    predicted: dict[tuple[Asked, tuple[int, ...], str], Decision] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)  # memory that could not be had


_states: dict[tuple[str, torch.device], _State] = {}
_calibrated: dict[tuple[str, int], Machine] = {}
_lock = threading.RLock()  # backward passes run on other threads


def decide(
    asked: Asked, rows: Sequence[int], group: Group, device: torch.device, transport: str, gemm: str
) -> Decision | None:
    """What to take, the same on every rank; None where there is nothing to choose. Every rank has to come here.

    ``rows``: of every shard, of all leading dimensions. ``transport`` and ``gemm`` are what runs if it is not fused.
    """
    if not arises(asked, rows, group, device, transport):
        return None
    apart = f"{transport}+{gemm}"
    reason = _missing(asked, rows, group, device)
    if reason is not None:
        return _not(apart, reason)
    with _lock, runtime.active.on(device):
        capturing = runtime.active.capturing()
        state = _state(group, device)
        reason = _settle(state, group, device, capturing)
        if reason is not None or not isinstance(state.verdicts, Verdicts):
            return _not(apart, reason or "")
        mine = _predict(state, asked, tuple(rows), group, device, apart)
        timeout = faults.timeout_s(group, device)
        fused = state.verdicts.agree(mine.fused, choice.OPS.index(asked.op), timeout)
        if fused != mine.fused:
            mine = Decision(fused, f"rank 0 chose so; here {mine.why}")
        if fused:
            reason = _memory_missing(state, asked, rows, group, device, capturing)
            if reason is not None:
                return Decision(False, f"{apart}, though {mine.why}: {reason}")
        return mine


def foresee(
    asked: Asked, rows: Sequence[int], group: Group, device: torch.device, transport: str, gemm: str
) -> Decision | None:
    """What :func:`decide` would say, as far as this rank knows. Nothing is communicated."""
    if not arises(asked, rows, group, device, transport):
        return None
    apart = f"{transport}+{gemm}"
    reason = _missing(asked, rows, group, device)
    state = _states.get((group.name, device))
    if state is None or state.group() is not group.process_group:
        state = _State(weakref.ref(group.process_group))
    if reason is None:
        compared, reason = ranks.known(group, device)
        if not compared:
            reason = runtime.active.facts(device).missing or None
    if reason is None and isinstance(state.verdicts, str):
        reason = state.verdicts
    if reason is not None:
        return _not(apart, reason)
    return _predict(state, asked, tuple(rows), group, device, apart)


def constants(card: str, world: int) -> Machine | None:
    """Constants that this process has for a card: measured here, or those of the table."""
    return _calibrated.get((card, world)) or machines.find(card, world)


def use(machine: Machine) -> None:
    """Take these constants in groups of as many ranks on such cards."""
    with _lock:
        _calibrated[machine.card, machine.world] = machine
        for state in _states.values():
            state.predicted.clear()


def arises(asked: Asked, rows: Sequence[int], group: Group, device: torch.device, transport: str) -> bool:
    """Whether there is a choice. Pure; from what is the same on all ranks."""
    active = runtime.active
    if group.world == 1 or device.type not in active.device_types or transport not in active.compared_with:
        return False
    # What has no elements does not travel.
    return sum(rows) > 0 and (asked.ks if asked.op == choice.GATHER else asked.ns)[0] > 0


def _missing(asked: Asked, rows: Sequence[int], group: Group, device: torch.device) -> str | None:
    """What needs no asking, as it is the same on all ranks."""
    types = runtime.active.device_types
    return conditions.call_missing(
        device.type, asked.dtype, asked.out_dtype, group.world, types, rows=sum(rows)
    )


def _not(apart: str, reason: str) -> Decision:
    return Decision(False, f"{apart}, as fused cannot run: {reason}")


def _state(group: Group, device: torch.device) -> _State:
    key = group.name, device
    state = _states.get(key)
    if state is None or state.group() is not group.process_group:  # names are given again
        for other, old in list(_states.items()):
            if not ranks.exists(other[0], old.group):
                del _states[other]
        state = _states[key] = _State(weakref.ref(group.process_group))
    return state


def _settle(state: _State, group: Group, device: torch.device, capturing: bool) -> str | None:
    """Why path "fused" cannot run in the group, the same on all ranks. Collective at the first use."""
    compared, reason = ranks.known(group, device)
    if capturing and (not compared or state.verdicts is None):
        return f"ranks cannot compare themselves {_CAPTURE}"
    if not compared:
        reason = ranks.compare(group, device)
    if reason is not None:
        return reason
    if state.verdicts is None:
        cards = sorted(set(ranks.exchange(group, runtime.active.card(device))))
        try:
            alike = len(cards) == 1
            state.verdicts = Verdicts(group) if alike else f"its GPUs are not alike ({', '.join(cards)})"
        except BackendError as error:
            state.verdicts = str(error)
    return state.verdicts if isinstance(state.verdicts, str) else None


def _predict(
    state: _State, asked: Asked, rows: tuple[int, ...], group: Group, device: torch.device, apart: str
) -> Decision:
    key = asked, rows, apart
    decision = state.predicted.get(key)
    if decision is None:
        card = runtime.active.card(device)
        machine = constants(card, group.world)
        if machine is None:
            reason = f"nothing was measured on {card or 'this device'}; tpk.calibrate() does"
            decision = Decision(False, f"{apart}: {reason}")
        else:
            size = sum(asked.ns), sum(asked.ks), asked.dtype.itemsize, asked.out_dtype.itemsize
            told = choice.choose(Call(asked.op, rows, *size, len(asked.ks)), machine, apart)
            decision = Decision(told.fused, told.why)
        if len(state.predicted) >= _KEPT:
            state.predicted.clear()
        state.predicted[key] = decision
    return decision


def _memory_missing(
    state: _State, asked: Asked, rows: Sequence[int], group: Group, device: torch.device, capturing: bool
) -> str | None:
    """Have the shared memory that the call needs; why it cannot be had, if so. The same on all ranks."""
    kind, size = _workspace(asked, rows)
    if workspace.present(group, device, kind) >= size:
        return None
    if capturing:
        return f"memory cannot grow {_CAPTURE}, or call tpk.reserve(...)"
    least, reason = state.refused.get(kind, (size + 1, ""))
    if size >= least:
        return reason
    try:
        workspace.ensure(group, device, kind, size)
    except BackendError as error:  # on all ranks alike
        state.refused[kind] = size, str(error)
        return str(error)
    return None


def _workspace(asked: Asked, rows: Sequence[int]) -> tuple[str, int]:
    """Kind and bytes of the shared memory of a call."""
    if asked.way(rows) is not None:
        return "small", small.WORKSPACE_BYTES
    if asked.op == choice.GATHER:
        return "gather", workspace.gather_bytes(sum(rows), asked.ks[0], asked.dtype.itemsize)
    if asked.op == choice.SCATTER:
        return "scatter", workspace.scatter_bytes(rows, asked.ns[0], asked.out_dtype.itemsize)
    return "sum", workspace.sum_bytes(rows, asked.ns[0], asked.out_dtype.itemsize)
