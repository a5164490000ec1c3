"""A column-parallel layer with fewer parts than ranks: the kv heads of a group that has more ranks than kv heads.

Ranks in a row share a part: with 2 kv heads on 4 ranks, ranks 0 and 1 have the first, whose queries are theirs. Each
makes the part's outputs for itself, from a weight of its own that starts equal and stays equal: the weight's gradient
is the sum over the ranks that share it, since each of them sees what its own queries made of the outputs. That sum
is one all-reduce of the whole gradient in the backward pass, zero outside of the own part, so that no group has to
be made for every part: every process of the job would have to take part in that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from tpkernels.errors import ArgumentError
from tpkernels.nn._linear import LinearOptions
from tpkernels.nn.linear import ColumnParallelLinear
from tpkernels.nn.sharding import Placement, Shard
from tpkernels.ops._main_grad import Sink, Target, checked, target_of

__all__ = ["SharedColumnParallelLinear"]


def _sum_over_copies(grad: Tensor, placement: Shard) -> Tensor:
    """The sum of the gradients of all ranks that hold this part."""
    whole = grad.new_zeros(placement.global_shape(grad.shape))
    placement.take(whole).copy_(grad)
    return placement.take(torch.ops.tpkernels.all_reduce(whole, "sum", placement.group_name))


class _SumOverCopies(torch.autograd.Function):
    """The parameter as it is; its gradient is that of all ranks which hold this part, in ``target`` if there is one."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, placement: Shard, target: Target | None) -> Tensor:
        ctx.placement, ctx.target = placement, target
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        total = _sum_over_copies(grad, ctx.placement)
        if ctx.target is None:
            return total.contiguous(), None, None
        ctx.target.into().mT.add_(total)
        made = ctx.target.added(total)
        return None if made is None else made.mT, None, None


class SharedColumnParallelLinear(ColumnParallelLinear):
    """``ColumnParallelLinear`` whose output features are cut in ``parts``, each held by world / parts ranks in a row.

    Args:
        in_features, out_features: of the whole layer.
        parts: divides out_features and the world.
        options: as in ``ColumnParallelLinear``. With ``delay_wgrad`` it is ``backward_dw()`` that sums the gradient
            over the ranks: all of the group call it together, in the same order among their layers.
    Shape:
        x: [..., in_features] -> [..., out_features / parts], equal on the ranks that share a part.
    Raises:
        ArgumentError: numbers that do not divide. The others: as in ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parts: int,
        *,
        keep_gathered: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        self.parts = parts
        super().__init__(in_features, out_features, keep_gathered=keep_gathered, **options)

    def _placed(self) -> tuple[Placement, Placement]:
        for what, count in (("out_features", self.out_features), ("the ranks of the group", self.world)):
            if self.parts < 1 or count % self.parts:
                raise ArgumentError(f"parts: it must divide {what}, {count}, but it is {self.parts}.")
        sizes = (self.out_features // self.parts,) * self.parts
        cut = Shard(0, sizes, self.rank, self.group_name, copies=self.world // self.parts)
        self.out_sizes = tuple(sizes[0] for _ in range(self.world))
        return cut, cut

    @property
    def _shared(self) -> Shard | None:
        """Where the parameters lie, if other ranks hold them too."""
        cut = self.placements["weight"]
        return cut if isinstance(cut, Shard) and cut.copies > 1 else None

    def _operand(self, parameter: Any) -> Any:
        cut = self._shared
        if parameter is None or cut is None or (parameter is self.weight and self.delay_wgrad):
            return super()._operand(parameter)  # a delayed one is summed when it is made
        fused = parameter is self.weight and self._fuses()
        return _SumOverCopies.apply(parameter, cut, target_of(parameter) if fused else None)

    def _run_delayed(self) -> None:
        cut = self._shared
        self._delayed.run(None if cut is None else lambda grad: _sum_over_copies(grad, cut))

    def _fuses(self) -> bool:
        """Whether the weight's gradient goes to ``main_grad``."""
        fuse = self.gradient_accumulation_fusion
        wanted = self.weight.requires_grad and torch.is_grad_enabled()
        return wanted and (getattr(self.weight, "main_grad", None) is not None if fuse is None else fuse)

    def _sink(self) -> Sink | None:
        """No product makes the gradient of a part that others hold too: it has to be summed first."""
        return super()._sink() if self.delay_wgrad or self._shared is None else None

    def _check_main_grad(self) -> None:
        if self._fuses():
            checked(self.weight)
