"""Weight gradients that backward passes leave for later: what pipeline schedules without bubbles fill their gaps with.

The convention is that of TransformerEngine (``delay_wgrad_compute``, ``backward_dw``): ``backward()`` makes the
gradient of the input alone and keeps the two operands of the weight's; later each call of ``backward_dw()`` makes the
weight gradient of one backward pass, the oldest. Here it is added to what ``weight.grad`` holds, as autograd would add
it, or to ``weight.main_grad``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.ops import _main_grad
from tpkernels.ops._matmul import product, product_like

__all__ = ["DelayedGrads"]


class _Waiting(NamedTuple):
    """``left @ right`` is the gradient of ``parameter.t()``; ``versions``: of the operands when they were left."""

    parameter: Tensor
    fused: bool
    left: Tensor
    right: Tensor
    path: str
    versions: tuple[int, int]


class DelayedGrads:
    """Gradients of one weight that wait, first in, first out. A copy of it, pickled or not, has none.

    ``alone``: no second one may wait, since DistributedDataParallel sums a weight's gradient once in its backward pass.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self.alone = False

    def check_alone(self) -> None:
        """Refuse a second one."""
        if self.alone and self._waiting:
            raise ArgumentError(
                "delay_wgrad: a weight gradient is pending still, and DistributedDataParallel sums that of a weight "
                "once for each of its backward passes; call backward_dw() after every backward(), within the same "
                "no_sync() if there is one, or set delay_wgrad = False."
            )

    def __len__(self) -> int:
        return len(self._waiting)

    def __reduce__(self) -> Any:
        return (DelayedGrads, ())

    def put(self, parameter: Tensor, fused: bool, left: Tensor, right: Tensor, path: str) -> None:
        """Called by the backward pass.

        ``left`` lets go of the input's graph. ``right`` must stay a view of the gradient that came in: autograd reuses
        the memory of one that nobody holds.
        """
        self.check_alone()
        left = left.detach()
        versions = (left._version, right._version)
        self._waiting.append(_Waiting(parameter, fused, left, right, path, versions))

    @torch.no_grad()
    def run(self, finish: Callable[[Tensor], Tensor] | None = None) -> None:
        """Makes the oldest gradient and adds it to ``main_grad`` (``fused``) or ``grad``; hooks of ``grad`` run.

        ``finish`` makes the parameter's gradient of what the product gives, where more than that belongs to it.
        """
        parameter, fused, left, right, path, versions = self._waiting[0]
        if versions != (left._version, right._version):
            raise ArgumentError(
                "backward_dw: the input of the layer, or the gradient of its output, has been written to since "
                "backward(), and the delayed weight gradient needs it as it was; write into a copy, or after "
                "backward_dw()."
            )
        self._waiting.popleft()
        if fused and finish is None:
            grad = _main_grad.accumulate(parameter, left, right, path)
        else:
            made = product_like(parameter.t(), left, right, lambda x, y: product(x, y, path=path)).t()
            whole = made if finish is None else finish(made)
            grad = _main_grad.add(parameter, whole) if fused else whole.to(parameter.dtype)
        if grad is not None:
            torch.autograd.backward((parameter,), (grad,))
