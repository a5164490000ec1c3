"""What all ranks of a group have to know of each other before they write into each other's memory."""

from __future__ import annotations

import os
import weakref
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels import _extensions
from tpkernels.comm import conditions, departures, nvshmem, runtime
from tpkernels.errors import BackendError, GroupError
from tpkernels.ops import _groups
from tpkernels.ops._groups import Group
from tpkernels.tune import mode

T = TypeVar("T")

_missing: dict[tuple[str, torch.device], tuple[weakref.ref[ProcessGroup], str | None]] = {}


def exchange(group: Group, value: T) -> list[T]:
    """Every rank's value, on the host: a barrier too. Collective."""
    values: list[T] = [value] * group.world
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def known(group: Group, device: torch.device) -> tuple[bool, str | None]:
    """Whether the ranks compared themselves already, and the reason that they found, if any."""
    entry = _missing.get((group.name, device))
    if entry is None or entry[0]() is not group.process_group:  # names are given again
        return False, None
    return True, entry[1]


def compare(group: Group, device: torch.device) -> str | None:
    """Why not all ranks can take part, if so; every rank comes to the same. Collective, and kept."""
    reason = conditions.ranks_missing(exchange(group, _facts(group, device)))
    _forget_destroyed()
    _missing[group.name, device] = weakref.ref(group.process_group), reason
    return reason


def _facts(group: Group, device: torch.device) -> conditions.RankFacts:
    facts = runtime.active.facts(device)
    without = nvshmem.missing(os.environ, _extensions.why_not("_C_nvshmem"), runtime.active.alone(group))
    missing = facts.missing or without or departures.missing(os.environ) or ""
    carrier = (
        f"{nvshmem.TRANSPORT}={nvshmem.transport(os.environ)} in memory of {nvshmem.backend(os.environ)}, "
        f"{departures.DEPARTURE}={departures.asked(os.environ)}"
    )
    return facts._replace(missing=missing, carrier=carrier, tunes=mode.active())


def require(group: Group, device: torch.device) -> None:
    """Raise on every rank alike unless all of them can take part. Collective at the first use of a group."""
    compared, reason = known(group, device)
    if not compared:
        if runtime.active.capturing():
            raise BackendError(
                f"path 'fused' of group {group.name!r}: its first use cannot be captured into a CUDA graph, as ranks "
                "exchange memory; make one call before the capture, or call tpk.reserve(...)."
            )
        reason = compare(group, device)
    if reason is not None:
        raise BackendError(
            f"path 'fused' was asked for, but in group {group.name!r} {reason}; use path='auto'."
        )


def exists(name: str, reference: weakref.ref[ProcessGroup]) -> bool:
    """Whether the group is still the one of that name, and not destroyed."""
    group = reference()
    if group is None:
        return False
    try:
        return _groups.resolve(name).process_group is group
    except GroupError:
        return False


def _forget_destroyed() -> None:
    for key, (reference, _) in list(_missing.items()):
        if not exists(key[0], reference):
            del _missing[key]
