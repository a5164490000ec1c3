"""The local product: what was tuned, and tuning it.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.comm import runtime
from tpkernels.ops import _gemm, _plans
from tpkernels.ops._paths import Choice, PlanArguments
from tpkernels.tune import candidates, constants, machine, mode, timer
from tpkernels.tune import case as cases
from tpkernels.tune.candidates import Candidate
from tpkernels.tune.case import Case
from tpkernels.tune.store import Entry, Store

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


class Call(NamedTuple):
    """A product that can be run. ``into``: the tensor that it is added to, which timing leaves alone."""

    a: Tensor
    b: Tensor
    epilogue: _gemm.Epilogue
    out_dtype: torch.dtype
    want_preact: bool = False
    into: Tensor | None = None

    def case(self, device: str = "") -> Case:
        """``device``: that tensors on "meta" stand for."""
        return cases.of(
            self.a,
            self.b,
            self.epilogue,
            self.out_dtype,
            want_preact=self.want_preact,
            into=self.into is not None,
            device=device,
        )


def tuned(
    choice: Choice,
    a: Tensor,
    b: Tensor,
    epilogue: _gemm.Epilogue,
    *,
    out_dtype: torch.dtype,
    want_preact: bool = False,
    into: Tensor | None = None,
) -> Choice:
    """What to take for a product on path "auto". ``choice`` is what is taken without tuning."""
    call = Call(a, b, epilogue, out_dtype, want_preact, into)
    name = _name(call)
    found = _chosen.get(name)
    if found is None:
        with _lock:
            found = _chosen.get(name) or _settle(choice, call, name)
    return choice._replace(gemm=found.gemm, plan=found.plan, why=found.why)


def foreseen(choice: Choice, call: Call, device: torch.device) -> Choice:
    """What :func:`tuned` would say, as far as it is known. Nothing is timed; tensors may be on the meta device."""
    case = call.case(device.type)
    if 0 in case.size:
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


def _settle(choice: Choice, call: Call, name: tuple[object, ...]) -> Choice:
    if not mode.times() and name in _unread:
        return _unread[name]
    case, device = call.case(), call.a.device
    if 0 in case.size:
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
        entry = entry_of(call, choice.gemm)
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
    call: Call, library: str, *, again: bool = False, finished: Finished | None = None
) -> Entry | None:
    """What the cache has of a product, timed now if nobody has; None where another process kept it for too long.

    ``again``: time it whatever the cache has. ``finished`` is told of each candidate and its time.

    Raises:
        torch.OutOfMemoryError: there is no room for copies of the operands.
    """
    case, device = call.case(), call.a.device
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


def time_all(call: Call, library: str, finished: Finished | None = None) -> list[tuple[Candidate, float]]:
    """Every candidate and its time in microseconds: the library, what the cost model takes, then others."""
    case, device = call.case(), call.a.device
    tried = candidates.candidates(case.product, case.machine(device), library)
    e = call.epilogue
    with torch.no_grad():
        sets = timer.copies_of([call.a, call.b, e.gate, e.bias, e.residual], device)
        into = None if call.into is None else timer.copy_alike(call.into)
        measures = [timer.measure(_runner(call, c, sets, into), len(sets), device) for c in tried]
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


def _runner(
    call: Call, candidate: Candidate, sets: list[list[Tensor | None]], into: Tensor | None
) -> Callable[[int], object]:
    choice = Choice(candidate.gemm, "", plan=candidate.plan)

    def run(i: int) -> object:
        a, b, gate, bias, residual = sets[i]
        assert a is not None and b is not None
        if into is not None:
            return _gemm.accumulate(choice, a, b, into)
        e = call.epilogue._replace(gate=gate, bias=bias, residual=residual)
        return _gemm.run(choice, a, b, e, out_dtype=call.out_dtype, want_preact=call.want_preact)

    return run


def _entry(store: Store, case: Case, on: _plans.Machine) -> Entry | None:
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


def _name(call: Call) -> tuple[object, ...]:
    """All that the case is made from, cheaper than the case."""
    a, b, e, into = call.a, call.b, call.epilogue, call.into
    facts: list[object] = [a.device, a.dtype, call.out_dtype, a.shape, a.stride(), b.shape, b.stride()]
    facts += [e.bias is None, e.residual is None, e.alpha == 1.0, e.activation == "none"]
    facts += [call.want_preact, into is None, None if e.gate is None else e.gate.stride()]
    facts.append(_plans.may_use_tf32(a.dtype))  # a switch of the process: other kernels, with other tiles
    if a.is_cuda:
        facts += [x.data_ptr() % 16 for x in (a, b, e.gate) if x is not None]
    else:
        facts.append(torch.get_num_threads())
    return tuple(facts)
