"""Path "fused": one plan for all ranks of a group, timed by all of them together.

Whether a call was tuned already is rank 0's to say, call by call (:mod:`tpkernels.comm.verdicts`): shapes may be new to
one rank and known to another, as columns of weights need not be divided evenly, and caches may differ. It names a plan
by its number in a list that grows on all ranks alike, or asks for a decision. Then all ranks take what rank 0's cache
has; or they time the same candidates in the same order, the slowest rank counts, and the plan is the same for all.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm import choice, ranks, runtime, verdicts
from tpkernels.comm.verdicts import Verdicts
from tpkernels.errors import BackendError
from tpkernels.ops import _plans
from tpkernels.ops._groups import Group
from tpkernels.tune import local, mode
from tpkernels.tune.local import GAIN
from tpkernels.tune.store import Entry

_ASK = verdicts.MOST
_ROUNDS, _CALLS = 3, 4
_MOST = 8  # plans


class Plan(NamedTuple):
    """As the fused ops take it; the first is what they take by themselves."""

    schedule: str = "auto"
    tile: str = ""


class _Offer(NamedTuple):
    """Rank 0's: what its cache has, or what to time."""

    known: Plan | None
    tried: list[Plan]


@dataclass
class _State:
    """Of a group and device. ``ring``: None where its ranks have no memory in common. ``numbers``: rank 0's alone."""

    group: weakref.ref[ProcessGroup]
    ring: Verdicts | None
    plans: list[Plan] = field(default_factory=lambda: [Plan()])
    numbers: dict[str, int] = field(default_factory=dict)


_states: dict[tuple[str, torch.device], _State] = {}


def plan(
    op: str,
    group: Group,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    rows: Sequence[int],
    timeout_s: float,
    launch: Callable[[str, str], None],
) -> Plan:
    """The plan of a call, the same on all ranks. Every rank comes here; ``launch`` runs the call with a plan.

    lefts, rights: factors; of a gather, the own rows and every weight. rows: of all ranks.
    """
    device, active = lefts[0].device, runtime.active
    capturing = active.capturing()
    state = _state(group, device, capturing)
    if state is None or state.ring is None:
        return Plan()
    key, number = "", 0
    if group.rank == 0:
        key = _key(op, group, lefts, rights, rows)
        number = state.numbers.get(key, 0 if capturing or len(state.plans) >= _ASK else _ASK)
    number = state.ring.agree_on(number, choice.OPS.index(op), timeout_s)
    if number == _ASK:
        number = _decide(state, key, op, group, device, lefts, rights, rows, launch)
    return state.plans[number]


def forget() -> None:
    """No group has plans. For tests."""
    _states.clear()


def _state(group: Group, device: torch.device, capturing: bool) -> _State | None:
    """None before the first call outside of a capture: the ring's memory is exchanged."""
    key = group.name, device
    state = _states.get(key)
    if state is not None and state.group() is group.process_group:  # names are given again
        return state
    if capturing:
        return None
    for other, old in list(_states.items()):
        if not ranks.exists(other[0], old.group):
            del _states[other]
    try:
        ring = Verdicts(group, "tuning of path 'fused'")
    except BackendError:  # on all ranks alike
        ring = None
    _states[key] = _State(weakref.ref(group.process_group), ring)
    return _states[key]


def _decide(
    state: _State,
    key: str,
    op: str,
    group: Group,
    device: torch.device,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    rows: Sequence[int],
    launch: Callable[[str, str], None],
) -> int:
    """Come to a plan together; its number. Collective."""
    offer = _Offer(None, [])
    if group.rank == 0:
        known = _known(key, device)
        offer = _Offer(known, [] if known else _tried(op, group, device, lefts, rights, rows))
    offer = ranks.exchange(group, offer)[0]
    if offer.known is not None:
        chosen = offer.known
    elif not offer.tried:  # rank 0 may only read
        chosen = Plan()
    else:
        with runtime.active.chained(device):
            mine = _times(offer.tried, launch)
        times = slowest(ranks.exchange(group, mine))
        best = min(range(len(times)), key=times.__getitem__)
        if times[best] >= GAIN * times[0]:
            best = 0
        chosen = offer.tried[best]
        if group.rank == 0 and math.isfinite(times[best]):
            what = "the model's plan" if best == 0 else " ".join(reversed(chosen))
            model_us = times[0] if math.isfinite(times[0]) else 0.0
            local.store_of(device).put(
                key,
                Entry(
                    "streamk",
                    chosen.schedule,
                    tile=chosen.tile,
                    what=what,
                    us=times[best],
                    model_us=model_us,
                    model="the model's plan",
                    when=time.time(),
                ),
            )
    if chosen not in state.plans:
        state.plans.append(chosen)
    number = state.plans.index(chosen)
    if group.rank == 0:
        state.numbers[key] = number
    return number


def _known(key: str, device: torch.device) -> Plan | None:
    """What rank 0's cache has, if the kernel has such a tile."""
    entry = local.store_of(device).get(key)
    if entry is None:
        return None
    found = Plan(entry.schedule, entry.tile)
    tiles = ("", *_plans.TILES[_plans.machine_of(device.type, device).architecture])
    return found if found.tile in tiles and found.schedule in ("auto", "data_parallel") else None


def _tried(
    op: str,
    group: Group,
    device: torch.device,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    rows: Sequence[int],
) -> list[Plan]:
    """What is timed: the model's choice first. Nothing where tuning only reads.

    With a tile named, the op still chooses a schedule in which ranks do not wait for each other; whole tiles never do.
    """
    if not mode.times():
        return []
    on = _plans.machine_of(device.type, device)
    n = max(b.shape[1] for b in rights)
    # Predicted as if no rank waited: every rank's list has to be the same.
    product = _plans.Product(1, sum(rows), n, sum(a.shape[1] for a in lefts))
    names = _plans.tiles_of(product._replace(collective=op), on)
    names.sort(key=lambda name: float(_plans.plan(product, on, tile=name)["predicted_us"]))
    return [Plan(), *(Plan("auto", name) for name in names), Plan("data_parallel", names[0])][:_MOST]


def _times(tried: Sequence[Plan], launch: Callable[[str, str], None]) -> list[list[float]]:
    """Microseconds of every candidate in every round, on this rank. All ranks launch the same in the same order."""
    times: list[list[float]] = [[] for _ in tried]
    for _ in range(_ROUNDS):
        for of_plan, one in zip(times, tried, strict=True):
            if of_plan == [math.inf]:
                continue
            try:
                of_plan.append(runtime.active.elapsed_us(partial(launch, *one), _CALLS))
            except RuntimeError:  # the plan does not fit the device: on all ranks alike, before anything runs
                of_plan[:] = [math.inf]
    return times


def slowest(of_ranks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Median over the rounds of the slowest rank's time, for each candidate. Pure."""
    return [
        statistics.median(max(us) for us in zip(*of_candidate, strict=False))
        for of_candidate in zip(*of_ranks, strict=True)
    ]


def _key(
    op: str, group: Group, lefts: Sequence[Tensor], rights: Sequence[Tensor], rows: Sequence[int]
) -> str:
    ks, ns = (",".join(str(x.shape[1]) for x in some) for some in (lefts, rights))
    lies = "".join("k" if b.stride(0) == 1 else "o" for b in rights)
    equal = len(set(rows)) == 1
    of_ranks = f"{rows[0]}*{group.world}" if equal else "+".join(map(str, rows))
    dtype = str(lefts[0].dtype).removeprefix("torch.")
    return f"{op} rows={of_ranks} k={ks} n={ns} {dtype} {lies} ranks={group.world}"
