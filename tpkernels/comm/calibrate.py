"""``tpk.calibrate``: the constants of path choice, measured where they are used."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tpkernels.comm import auto, choice, conditions, fitting, machines, ranks, runtime
from tpkernels.comm.choice import Call, Machine
from tpkernels.comm.fitting import Sample
from tpkernels.comm.reserve import device_of
from tpkernels.errors import ArgumentError, BackendError
from tpkernels.ops import _agreement, _groups, api
from tpkernels.ops._groups import Group, GroupLike, shard_sizes

# M, N and K of a rank: products that last longer than their copies, and such that do not, large and small.
SHAPES = {
    choice.GATHER: (
        (8192, 3584, 8192), (8192, 1280, 8192), (8192, 1792, 4096), (2048, 3584, 8192), (1024, 6144, 8192),
        (512, 3584, 8192), (256, 1024, 4096), (64, 3584, 8192),
    ),
    choice.SCATTER: (
        (8192, 8192, 3584), (8192, 8192, 1280), (8192, 4096, 1792), (2048, 8192, 3584), (1024, 8192, 6144),
        (256, 8192, 3584), (256, 4096, 1024), (64, 8192, 3584),
    ),
    choice.SUM: (
        (8192, 8192, 3584), (8192, 4096, 1792), (2048, 8192, 3584), (1024, 8192, 1280), (512, 8192, 1280),
        (256, 8192, 1280), (64, 8192, 1280), (16, 4096, 1792),
    ),
}  # fmt: skip
_CALLS, _ROUNDS = 8, 3


def calibrate(
    group: GroupLike = None,
    *,
    machine: Machine | None = None,
    device: torch.device | str | int | None = None,
) -> Machine:
    """Measure what ``path="auto"`` chooses by, and take it from now on. Collective.

    ``auto`` takes path "fused" where its predicted time is less than that of path "nccl+cublas". For some cards the
    constants come with the package; on others nothing is fused by ``auto`` before this was run. Kept for this process,
    for this group and those to come of as many ranks on such cards. To measure once and for all::

        text = tpk.calibrate(group).to_json()
        tpk.calibrate(group, machine=tpk.Machine.from_json(text))  # later: takes these, and measures nothing

    Args:
        group: as in :func:`tpkernels.all_gather_matmul`; the one whose operations will be called.
        machine: constants to take. Those of rank 0 count.
        device: this rank's GPU; None means the current one.

    Returns:
        The constants, the same on every rank.

    Raises:
        ArgumentError: ``machine`` is of another card or number of ranks, or the group has one rank.
        BackendError: path "fused" cannot run in this group, or a CUDA graph is being captured.
    """
    if machine is not None and not isinstance(machine, Machine):
        raise ArgumentError(f"machine: expected a tpkernels.Machine or None, got {machine!r}.")
    members = _groups.resolve(_groups.group_name_of(group))
    if members.world == 1:
        raise ArgumentError(
            "group: expected at least 2 ranks, got 1: nothing travels, so there is no choice."
        )
    place = device_of("calibrate", device)
    types = runtime.active.device_types
    reason = conditions.call_missing(place.type, torch.bfloat16, torch.bfloat16, members.world, types)
    transport = _groups.transport_of(members, place, "device")
    if reason is None and transport not in runtime.active.compared_with:
        reason = (
            f"it is compared with {' and '.join(runtime.active.compared_with)}, and the group has {transport}"
        )
    if reason is not None:
        raise BackendError(f"calibrate: it is for path 'fused', but {reason}.")
    with runtime.active.on(place):
        if runtime.active.capturing():
            raise BackendError(
                "calibrate: nothing can be measured while a CUDA graph is captured; call it before."
            )
        ranks.require(members, place)
        card = runtime.active.card(place)
        given = ranks.exchange(members, machine)
        if any((one is None) != (given[0] is None) for one in given):
            raise ArgumentError(
                "machine: it is given on some ranks only; give it on all of them, or on none."
            )
        if given[0] is None:
            made = ranks.exchange(members, _measured(card, members, place, transport))[0]
        else:
            made = given[0]
        cards = ranks.exchange(members, card)
        if set(cards) != {made.card} or made.world != members.world:
            raise ArgumentError(
                f"machine: expected constants of {members.world} ranks on {' and '.join(sorted(set(cards)))}, got "
                f"those of {made.world} on {made.card}; run tpk.calibrate() without it."
            )
        auto.use(made)
    return made


def _measured(card: str, group: Group, device: torch.device, transport: str) -> Machine:
    samples = []
    for op, shapes in SHAPES.items():
        for m, n, k in shapes:
            times = _times(op, m, n, k, group, device, transport)
            # Every rank the same: the slowest of each.
            slowest = [max(us) for us in zip(*ranks.exchange(group, times), strict=True)]
            samples.append(Sample(Call(op, tuple(shard_sizes(m, group.world)), n, k), *slowest))
    known = machines.find(card, group.world) or machines.MACHINES[0]
    return fitting.fit(samples, replace(known, card=card, world=group.world))


def _times(
    op: str, m: int, n: int, k: int, group: Group, device: torch.device, transport: str
) -> list[float]:
    """Microseconds of the product, of the paths that are not fused, and of path "fused"."""
    whole, weight = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
    shard = whole
    if op == choice.GATHER:
        sizes = shard_sizes(m, group.world)
        shard = whole.narrow(0, sum(sizes[: group.rank]), sizes[group.rank]).contiguous()
    given = {"shard_sizes": shard_sizes(m, group.world)} if op == choice.GATHER else {}
    library = "cublas" if device.type == "cuda" else "blas"
    out = whole.new_empty(m, n)

    def run(path: str) -> Callable[[], Tensor]:
        return lambda: getattr(api, op)(shard, weight.t(), group.name, path=path, **given)

    calls = (lambda: torch.mm(whole, weight.t(), out=out), run(f"{transport}+{library}"), run("fused"))
    times = []
    with torch.no_grad(), _agreement.suspended():
        for call in calls:
            call()  # what is made at a first use
            runtime.active.synchronize(device)
            rounds = [runtime.active.elapsed_us(call, _CALLS) for _ in range(_ROUNDS)]
            times.append(statistics.median(rounds))
    return times
