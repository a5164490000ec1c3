"""What plans of operations with a collective have in common: how path "auto" ends, and the record of what ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tpkernels.comm.auto import Asked
from tpkernels.ops import _paths
from tpkernels.ops._groups import Group


class _Plan(Protocol):
    @property
    def group(self) -> Group: ...
    @property
    def transport(self) -> str: ...
    @property
    def choice(self) -> _paths.Choice: ...
    @property
    def open(self) -> bool: ...
    @property
    def small(self) -> _paths.Choice | None: ...
    @property
    def way(self) -> str | None: ...
    @property
    def asked(self) -> Asked | None: ...
    @property
    def rows(self) -> Sequence[int]: ...
    @property
    def chooses(self) -> bool: ...
    @property
    def detail(self) -> str: ...


def settled(plan: _Plan, device: torch.device) -> dict[str, Any]:
    """What the plan becomes where path "auto" chooses, or an exchange is small: for ``plan._replace``."""
    changes: dict[str, Any] = {}
    transport, choice = plan.transport, plan.choice
    if plan.chooses and plan.asked is not None:
        transport, choice = _paths.choose_fused(plan.asked, plan.rows, plan.group, device, transport, choice)
        changes = {"transport": transport, "choice": choice}
    if transport != _paths.FUSED or plan.asked is None:
        return changes
    way = plan.asked.way(plan.rows)
    if way is None:
        return changes
    return {**changes, "choice": _paths.beside(choice, plan.small, plan.open), "way": way}


def note(op: str, plan: _Plan) -> None:
    """Record what ran."""
    detail = plan.detail if plan.way is None else f"{plan.detail}; {plan.way}"
    transport = plan.transport if plan.group.world > 1 else "none"
    _paths.record(op, transport, plan.choice.gemm, detail, plan.choice.why)
