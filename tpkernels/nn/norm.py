"""Normalisations whose parameters are whole on every rank.

Contract: the gradients of ``weight`` and ``bias`` after ``backward()`` are the complete ones, equal on every rank.
Under sequence parallelism every rank normalises its own tokens, so its part of those gradients has to be summed over
the group; ``copy_to_group`` does it in backward. Forgetting it is the classic error of tensor-parallel
training: weights drift apart slowly and nothing fails (it is left to the trainer elsewhere, by an attribute
on the parameter).

Without sequence parallelism every rank normalises all tokens and already has the whole gradient; summing
would multiply it by the world. A norm over heads that are cut over the ranks (q and k norms) sees parts,
hence wants ``sequence_parallel=True``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels.nn.sharding import GroupLike, ParallelModule
from tpkernels.nn.weights import init_parameter_

__all__ = ["LayerNorm", "RMSNorm"]


class _Norm(ParallelModule):
    """What both share: the parameters, and the sum of their gradients."""

    weight: torch.nn.Parameter
    kinds: tuple[str, ...] = ("weight",)

    def __init__(
        self,
        features: int,
        *,
        group: GroupLike = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group)
        self.features = features
        self.eps = eps
        self.sequence_parallel = sequence_parallel
        for kind in self.kinds:
            self._add_parameter(kind, (features,), self._replicated(), dtype, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to one, the bias to zero."""
        for kind in self.kinds:
            init_parameter_(self.get_parameter(kind), seed=0, name=kind)

    def _used(self, x: Tensor) -> list[Tensor]:
        """The parameters for x, which fits."""
        used: list[Tensor] = [self.get_parameter(kind) for kind in self.kinds]
        if not self.sequence_parallel:
            self._check_last_dim(
                x, self.features, "features"
            )  # nothing to agree on: no rank waits for another
            return used
        self._agree(x, lambda: self._check_last_dim(x, self.features, "features"))
        if len(used) == 1:
            return [tpk.regions.copy_to_group(used[0], self.group_name)]
        return list(
            tpk.regions.copy_to_group(torch.stack(used), self.group_name).unbind()
        )  # one sum for both

    def extra_repr(self) -> str:
        text = f"features={self.features}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"
        return f"{text}, {self._group_repr()}"


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside at least.

    Args:
        features: size of the last dimension, which is not cut.
        eps: added to the mean square.
        sequence_parallel: every rank normalises a different part of the tokens (or of the heads).
        group, dtype, device: as in ``ColumnParallelLinear``.
    Shape:
        x: [..., features], any floating-point type; y the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., features] -> [..., features]."""
        (weight,) = self._used(x)
        return F.rms_norm(x, (self.features,), weight, self.eps)


class LayerNorm(_Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in float32 inside at least.

    Arguments and shapes: those of ``RMSNorm``. One all-reduce sums the gradients of weight and bias.
    """

    bias: torch.nn.Parameter
    kinds = ("weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        """[..., features] -> [..., features]."""
        weight, bias = self._used(x)
        return F.layer_norm(x, (self.features,), weight, bias, self.eps)
