"""Local products, plain, grouped and of FP8: what was tuned, and tuning it.

Each product is timed by one process of the machine; others that come to it wait for that one, and all take the same.
Nobody waits for a GPU while it holds the lock of a product: what was enqueued before is waited for first, since it may
need another process, which may wait for the lock. A process that has waited too long keeps what it would have taken
without tuning, so that a plan never changes once it was chosen.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tpkernels.comm import runtime
from tpkernels.ops import _plans
from tpkernels.ops._paths import Choice, PlanArguments
from tpkernels.tune import candidates, constants, machine, mode, timer
from tpkernels.tune.calls import AnyCall, AnyCase, Call, Operands, Run
from tpkernels.tune.candidates import Candidate
from tpkernels.tune.store import Entry, Store

__all__ = ["Call", "decide", "entry_of", "foreseen", "forget", "plan_of", "store_of", "time_all", "tuned"]

WAIT_S = 60.0  # for another process that times the same product
MOST = 4096  # products that a process tunes: sequences of any length would go on for ever
GAIN = (
    0.98  # another product is taken instead of the library's where it needs less than this part of its time
)

Finished = Callable[[Candidate, float], None]  # told of what was timed


@dataclass
class Counts:
    """What this process did: products that it timed, and that it found to be timed already."""

    timed: int = 0
    found: int = 0


counts = Counts()
_stores: dict[torch.device, Store] = {}
_chosen: dict[tuple[object, ...], Choice] = {}
_unread: dict[tuple[object, ...], Choice] = {}  # mode "read": not in the cache, and so it stays
_lock = threading.RLock()  # backward passes run on other threads


def tuned(choice: Choice, call: AnyCall, library: str = "") -> Choice:
    """What to take for a product on path "auto".

    choice: what is taken without tuning. library: what is timed beside our plans, if that is ours already.
    """
    name = call.name()
    found = _chosen.get(name)
    if found is None:
        with _lock:
            found = _chosen.get(name) or _settle(choice, call, name, library or choice.gemm)
    return choice._replace(gemm=found.gemm, plan=found.plan, why=found.why)


def foreseen(choice: Choice, call: AnyCall, device: torch.device) -> Choice:
    """What :func:`tuned` would say, as far as it is known. Nothing is timed; tensors may be on the meta device."""
    case = call.case(device.type)
    if case.is_empty:
        return choice
    with _lock:
        entry = _entry(store_of(device), case, case.machine(device))
    if entry is None:
        when = "the first call times it" if mode.times() else "not in the cache"
        return choice._replace(why=f"{choice.why}; not tuned yet: {when}")
    return choice._replace(gemm=entry.gemm, plan=plan_of(entry), why=_told(entry))


def store_of(device: torch.device) -> Store:
    """The cache of a device, with its index. Constants that ``tpk calibrate`` has left there are used from now on."""
    store = _stores.get(device)
    if store is None:
        store = _stores[device] = Store(machine.stamp(device))
        constants.take(store, device)
    return store


def forget() -> None:
    """Choose anew, from the file. For tests, and for programs that change TPK_CACHE_DIR."""
    with _lock:
        for some in (_stores, _chosen, _unread):
            some.clear()
        counts.timed = counts.found = 0


def plan_of(entry: Entry) -> PlanArguments:
    return PlanArguments(entry.schedule, entry.splits, entry.tile)


def _settle(choice: Choice, call: AnyCall, name: tuple[object, ...], library: str) -> Choice:
    if not mode.times() and name in _unread:
        return _unread[name]
    case, device = call.case(), call.device
    if case.is_empty:
        return choice  # nothing to time
    store, on = store_of(device), case.machine(device)
    entry = _entry(store, case, on)
    if entry is not None:
        counts.found += 1
        return _keep(name, choice, entry)
    if not mode.times():
        _unread[name] = choice._replace(why=f"{choice.why}; not in the cache of tuned plans")
        return _unread[name]
    if device.type in runtime.active.device_types and runtime.active.capturing():
        return choice._replace(why=f"{choice.why}; not tuned while a CUDA graph is captured")
    if len(_chosen) >= MOST:
        return choice._replace(why=f"{choice.why}; {MOST} products are tuned, and no more")
    try:
        entry = entry_of(call, library)
    except torch.OutOfMemoryError:
        warnings.warn(
            f"tpkernels: no memory to time {case.key}; it is not tuned.", RuntimeWarning, stacklevel=2
        )
        _chosen[name] = choice._replace(why=f"{choice.why}; no memory to time others")
        return _chosen[name]
    if entry is None:
        _chosen[name] = choice._replace(
            why=f"{choice.why}; another process has been timing it for {WAIT_S:g} s"
        )
        return _chosen[name]
    return _keep(name, choice, entry)


def entry_of(
    call: AnyCall, library: str, *, again: bool = False, finished: Finished | None = None
) -> Entry | None:
    """What the cache has of a product, timed now if nobody has; None where another process kept it for too long.

    ``again``: time it whatever the cache has. ``finished`` is told of each candidate and its time.

    Raises:
        torch.OutOfMemoryError: there is no room for copies of the operands.
    """
    case, device = call.case(), call.device
    store, on = store_of(device), case.machine(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with store.claim(case.key, WAIT_S) as held:
        entry = None if again else _entry(store, case, on)  # another process may have put it there
        if entry is not None:
            counts.found += 1
            return entry
        if not held:
            return None
        entry = decide(time_all(call, library, finished))
        store.put(case.key, entry)
    counts.timed += 1
    return entry


def time_all(call: AnyCall, library: str, finished: Finished | None = None) -> list[tuple[Candidate, float]]:
    """Every candidate and its time in microseconds: the library, what the cost model takes, then others."""
    case, device = call.case(), call.device
    tried = candidates.candidates(case.product, case.machine(device), library)
    with torch.no_grad():
        sets, run = timer.copies_of(call.operands(), device), call.runner()
        measures = [timer.measure(_step(run, c, sets), len(sets), device) for c in tried]
        times = timer.race(measures, keep=(0, 1))
    for candidate, us in zip(tried, times, strict=True):
        if finished is not None:
            finished(candidate, us)
    return list(zip(tried, times, strict=True))


def decide(timed: list[tuple[Candidate, float]]) -> Entry:
    """The fastest, or the library where nothing is clearly faster. Pure, apart from the time of day."""
    (library, library_us), (model, model_us) = timed[:2]
    best, us = min(timed[1:], key=lambda one: one[1])
    if us >= GAIN * library_us:
        best, us = library, library_us
    return Entry(
        best.gemm,
        *best.plan,
        what=best.what,
        us=us,
        library_us=library_us if math.isfinite(library_us) else 0.0,
        model_us=model_us if math.isfinite(model_us) else 0.0,
        predicted_us=model.predicted_us,
        model=model.what,
        when=time.time(),
    )


def _step(run: Run, candidate: Candidate, sets: Sequence[Operands]) -> Callable[[int], object]:
    choice = Choice(candidate.gemm, "", plan=candidate.plan)
    return lambda i: run(choice, sets[i])


def _entry(store: Store, case: AnyCase, on: _plans.Machine) -> Entry | None:
    """What the cache has, if the kernel knows such a plan."""
    entry = store.get(case.key)
    if entry is None or entry.gemm != "streamk" or candidates.exists(plan_of(entry), case.product, on):
        return entry
    return None


def _keep(name: tuple[object, ...], choice: Choice, entry: Entry) -> Choice:
    _chosen[name] = choice._replace(gemm=entry.gemm, plan=plan_of(entry), why=_told(entry))
    return _chosen[name]


def _told(entry: Entry) -> str:
    """The reason of a choice."""
    if entry.gemm != "streamk":
        return f"tuned: {entry.gemm} {entry.us:.1f} us, the cost model's plan {entry.model_us:.1f}"
    also = ", the cost model's plan too" if entry.what == entry.model else ""
    return f"tuned: {entry.what} {entry.us:.1f} us{also}, the library {entry.library_us:.1f}"
