"""How backward passes call the ops of :mod:`_gradient_ops`, which make all gradients of an operation at once.

Where they do not serve (:func:`at_once`) the pass is made of the operations themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType

import torch
from torch import Tensor

from tpkernels.ops import _groups
from tpkernels.ops._main_grad import Target

Targets = Sequence[Target | None]
Grads = list[Tensor | None]
_NOTHING = nullcontext()

_main_grads: ContextVar[Mapping[int, Tensor]] = ContextVar("_main_grads", default=MappingProxyType({}))


def main_grads() -> Mapping[int, Tensor]:
    """For the ops: by number of the weight, [K, N], to which its gradient is added instead of being returned.

    Not in their schemas: torch.compile takes no op that both writes and returns lists. See :func:`_add_gather_grads`.
    """
    return _main_grads.get()


def at_once(targets: Targets) -> bool:
    """Whether the ops serve: they have no gradients themselves, and leave none for later."""
    return not torch.is_grad_enabled() and not any(t is not None and t.delayed for t in targets)


def any_compiled(targets: Targets) -> bool:
    """Whether gradients are added in a compiled graph."""
    return any(t is not None and t.compiled for t in targets)


def sizes_of(rows: int, sizes: list[int] | None, group_name: str) -> list[int]:
    """Rows of every rank's shard; this rank's has ``rows``. None stands for equal ones."""
    return [rows] * _groups.resolve(group_name).world if sizes is None else sizes


def all_gather_grads(
    dys: Sequence[Tensor | None],
    a_shard: Tensor,
    bs: Sequence[Tensor],
    need_bs: Sequence[bool],
    targets: Targets,
    dim: int,
    sizes: list[int] | None,
    group_name: str,
    path: str,
) -> tuple[Tensor, Grads]:
    """Of ``a_shard`` and of every weight; there is a ``dy``."""
    if any_compiled(targets):
        return _add_gather_grads(dys, a_shard, bs, need_bs, targets, dim, sizes, group_name, path)
    present = [i for i, dy in enumerate(dys) if dy is not None]
    need = _wanted([need_bs[i] for i in present], mine := [targets[i] for i in present])
    place = (dim, sizes_of(a_shard.shape[dim], sizes, group_name), group_name, path)
    with _handed(need, mine):
        grad_a, *made = torch.ops.tpkernels.all_gather_matmul_grads(
            [dy for dy in dys if dy is not None], a_shard, [bs[i] for i in present], need, *place
        )
    grads: Grads = [None] * len(bs)
    for i, grad in zip(present, _of_weights(iter(made), need, mine, a_shard), strict=True):
        grads[i] = grad
    return grad_a, grads


def _add_gather_grads(
    dys: Sequence[Tensor | None],
    a_shard: Tensor,
    bs: Sequence[Tensor],
    need_bs: Sequence[bool],
    targets: Targets,
    dim: int,
    sizes: list[int] | None,
    group_name: str,
    path: str,
) -> tuple[Tensor, Grads]:
    """:func:`all_gather_grads` in a compiled graph, by the op that adds all gradients of weights to tensors."""
    present = [i for i, dy in enumerate(dys) if dy is not None]
    need = _wanted(need_bs, targets)
    added = [i for i in present if need[i]]
    into: list[Tensor] = []
    for i in added:
        target = targets[i]
        into.append(torch.zeros_like(bs[i], dtype=a_shard.dtype) if target is None else target.into())
    grad_a: Tensor = torch.ops.tpkernels.all_gather_matmul_grads_into(
        [dy for dy in dys if dy is not None], a_shard, [bs[i] for i in present], into,
        [present.index(i) for i in added], dim, sizes_of(a_shard.shape[dim], sizes, group_name), group_name, path,
    )  # fmt: skip
    grads: Grads = [None] * len(bs)
    for i, made in zip(added, into, strict=True):
        target = targets[i]
        grads[i] = made if target is None else target.added(a_shard)
    return grad_a, grads


def scatter_grads(
    dy: Tensor,
    as_: Sequence[Tensor],
    bs: Sequence[Tensor],
    needs: tuple[Sequence[bool], Sequence[bool], bool],
    targets: Targets,
    dim: int,
    sizes: list[int] | None,
    group_name: str,
    path: str,
) -> tuple[Grads, Grads, Tensor | None]:
    """Of every operand, of every weight and of the bias, where they are needed; one operand's is."""
    need_as, need_bs, need_bias = needs
    need = _wanted(need_bs, targets)
    with _handed(need, targets):
        made = iter(
            torch.ops.tpkernels.matmul_reduce_scatter_grads(
                dy, as_, bs, list(need_as), need, need_bias, dim, sizes, group_name, path
            )
        )
    grad_as: Grads = [next(made) if wanted else None for wanted in need_as]
    grad_bs = _of_weights(made, need, targets, dy)
    return grad_as, grad_bs, next(made) if need_bias else None


def _wanted(need: Sequence[bool], targets: Targets) -> list[bool]:
    return [
        needed and (target is None or target.wanted()) for needed, target in zip(need, targets, strict=True)
    ]


def _handed(need: Sequence[bool], targets: Targets) -> AbstractContextManager[None]:
    """With what :func:`main_grads` returns meanwhile."""
    return _NOTHING if all(target is None for target in targets) else _handing(need, targets)


@contextmanager
def _handing(need: Sequence[bool], targets: Targets) -> Iterator[None]:
    into = {i: target.into() for i, target in enumerate(targets) if target is not None and need[i]}
    token = _main_grads.set(into)
    try:
        yield
    finally:
        _main_grads.reset(token)


def _of_weights(made: Iterator[Tensor], need: Sequence[bool], targets: Targets, like: Tensor) -> Grads:
    """What each weight gets for a gradient."""
    return [
        None if not needed else next(made) if target is None else target.added(like)
        for needed, target in zip(need, targets, strict=True)
    ]
