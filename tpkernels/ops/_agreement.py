"""Agreement across ranks, under ``TPK_CHECK=1``: an error on one rank becomes an error on every rank.

Without it, ranks that call different operations, or the same one with shapes that do not fit, hang or
exchange garbage, as with any collective library. The check costs one small collective per call (and a
device synchronisation on CUDA), so it is off by default; tests and the demo turn it on. It is skipped while
a CUDA graph is captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.errors import MismatchError
from tpkernels.ops import _collectives, _nvtx
from tpkernels.ops._groups import Group, resolve, transport_of

_suspended = False

T = TypeVar("T")
Facts = Mapping[str, object]


def enabled() -> bool:
    """Whether ranks compare their arguments."""
    return not _suspended and os.environ.get("TPK_CHECK", "0") not in ("", "0")


@contextmanager
def suspended() -> Iterator[None]:
    """No comparison inside the ``with`` block, on any rank: it would be timed too."""
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before


def validated(
    op: str, group: Group, sample: Tensor, validate: Callable[[], T], facts: Callable[[T], Facts]
) -> T:
    """Run ``validate`` and, if checking is on, compare ``facts`` of its result over the group.

    Args:
        op: operation's name; ranks must be in the same one.
        group: the group whose ranks take part.
        sample: a tensor of the call; its device carries the comparison.
        validate: raises for bad arguments, else returns what the operation needs.
        facts: what must be equal on all ranks, by name of argument.

    Raises:
        Exception: whatever ``validate`` raised on this rank.
        MismatchError: another rank failed, or the facts differ.
    """
    if not enabled() or group.world == 1 or _capturing(sample):
        return validate()
    error: Exception | None = None
    result: T | None = None
    described: Facts = {}
    try:
        transport_of(group, sample.device, "tensor")
        result = validate()
        described = {"operation": op, **facts(result)}
    except Exception as caught:
        error = caught
    digest = _FAILED if error is not None else crc32(repr(sorted(described.items())).encode())
    with _nvtx.phase("agree"):
        digests = _exchange(group, sample, digest)
    if error is None and all(d == digest for d in digests):
        assert result is not None
        return result
    _explain_mismatch(op, group, described, error)
    raise AssertionError("unreachable: digests differed")


def announce(op: str, group_name: str, error: Exception) -> None:
    """Tell the other ranks, which are in or on their way to ``validated``, of an error found before it."""
    if not enabled() or torch.compiler.is_compiling():
        return
    group = resolve(group_name)
    if group.world > 1:
        _exchange(group, torch.empty(0), _FAILED)
        with suppress(type(error)):
            _explain_mismatch(op, group, {}, error)


_FAILED = -1


def _exchange(group: Group, sample: Tensor, digest: int) -> list[int]:
    mine = torch.tensor([digest], dtype=torch.int64, device=_device_of(group, sample))
    digests: list[int] = _collectives.all_gather(mine, 0, [1] * group.world, group).tolist()
    return digests


def _explain_mismatch(op: str, group: Group, described: Facts, error: Exception | None) -> None:
    mine = (dict(described), None if error is None else f"{type(error).__name__}: {error}")
    everyone: list[tuple[dict[str, object], str | None]] = [({}, None)] * group.world
    dist.all_gather_object(everyone, mine, group=group.process_group)
    if error is not None:
        raise error
    failed = [f"rank {r} raised {text}" for r, (_, text) in enumerate(everyone) if text is not None]
    if failed:
        raise MismatchError(
            f"{op}: the arguments are valid on rank {group.rank}, but {'; '.join(failed)} "
            "No rank of the group runs the operation."
        )
    names = sorted({name for facts, _ in everyone for name in facts})
    differing = [
        f"{name} is " + ", ".join(f"{facts.get(name)!r} on rank {r}" for r, (facts, _) in enumerate(everyone))
        for name in names
        if len({repr(facts.get(name)) for facts, _ in everyone}) > 1
    ]
    raise MismatchError(
        f"{op}: expected the same on all {group.world} ranks of group {group.name!r}, but {'; '.join(differing)}. "
        "No rank of the group runs the operation."
    )


def _device_of(group: Group, sample: Tensor) -> torch.device:
    """Where the comparison can travel, even if ``sample`` lies on a device that the group cannot reach."""
    types = [d.type for d in group.process_group._device_types]
    if sample.device.type in types:
        return sample.device
    kind = types[0]
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _capturing(sample: Tensor) -> bool:
    return sample.is_cuda and torch.cuda.is_current_stream_capturing()
