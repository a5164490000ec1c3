"""Normalisation of rows whose features lie on several ranks.

Every rank makes statistics of its part of a row, one exchange brings those of the others, and all form the same
totals in the same order: one message each way for a row, of one number (RMSNorm) or of two. Variances are of the
parts' own means, put together (Chan et al. 1979): no difference of large sums. ``weight`` and ``bias`` are cut over
all ranks at rest; they travel with the statistics, and their gradients, sums over all rows, back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.grids.layout import Layout
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.nn._checks import agreed
from tpkernels.nn.grids._distribution import Distribution
from tpkernels.nn.sharding import BlockShard, ParallelModule
from tpkernels.nn.weights import init_parameter_

__all__ = ["LayerNorm", "RMSNorm"]


class _Normalised(torch.autograd.Function):
    """y = (x - mean) r weight + bias; without a bias mean is 0."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, distribution: Distribution, eps: float
    ) -> Tensor:
        wide = x.reshape(-1, x.shape[-1]).to(torch.promote_types(x.dtype, torch.float32))
        values = [weight] if bias is None else [weight, bias]
        used = distribution.bring(torch.stack(values)).to(wide.dtype)
        if bias is None:
            mean = None
            variance = (
                distribution.over_features(wide.square().sum(-1, keepdim=True)).sum(-1)
                / distribution.features
            )
        else:
            own = wide.mean(-1, keepdim=True)
            parts = distribution.over_features(
                torch.cat((own, (wide - own).square().sum(-1, keepdim=True)), -1)
            )
            means, squares = parts.unbind(1)
            mean = means.mean(-1, keepdim=True)
            between = (means - mean).square().sum(-1) * distribution.local
            variance = ((squares.sum(-1) + between) / distribution.features).unsqueeze(-1)
        r = (variance + eps).rsqrt()
        ctx.save_for_backward(x, r, *([] if mean is None else [mean]), used)
        ctx.distribution, ctx.dtype = distribution, weight.dtype
        y = (wide if mean is None else wide - mean) * r * used[0]
        return (y if bias is None else y + used[1]).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ArgumentError(
                "create_graph: gradients of norms on a grid cannot be differentiated again, but create_graph is true."
            )
        x, r, *means, used = ctx.saved_tensors
        distribution: Distribution = ctx.distribution
        wide, wide_dy = (t.reshape(-1, t.shape[-1]).to(r.dtype) for t in (x, dy))
        scaled = (wide - means[0] if means else wide) * r
        dx = None
        if ctx.needs_input_grad[0]:
            g = wide_dy * used[0]
            sums = [(g * scaled).sum(-1, keepdim=True)] + ([g.sum(-1, keepdim=True)] if means else [])
            totals = distribution.over_features(torch.cat(sums, -1)).sum(-1) / distribution.features
            dx = g - scaled * totals[:, :1]
            dx = ((dx - totals[:, 1:]) if means else dx).mul_(r).to(x.dtype).view(x.shape)
        grads: list[Tensor | None] = [None, None]
        if any(ctx.needs_input_grad[1:3]):
            sums = [(wide_dy * scaled).sum(0)] + ([wide_dy.sum(0)] if means else [])
            home = distribution.send_home(torch.stack(sums), used.new_empty(0, dtype=ctx.dtype))
            grads[: len(sums)] = home.unbind()
        return dx, *grads, None, None


class _Norm(ParallelModule):
    """What both share."""

    weight: torch.nn.Parameter
    kinds: tuple[str, ...] = ("weight",)

    def __init__(
        self,
        features: int,
        *,
        layout: Layout,
        grid: ProcessGrid,
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        distribution = Distribution(layout, grid, features)
        super().__init__(grid.group_name)
        self.distribution, self.features, self.eps = distribution, features, eps
        for kind in self.kinds:
            self._add_parameter(
                kind, (features,), BlockShard(distribution.home, (features,), grid), dtype, device
            )
        self.reset_parameters()

    @property
    def input_layout(self) -> Layout:
        """Of x."""
        return self.distribution.layout

    @property
    def output_layout(self) -> Layout:
        """Of y, the same."""
        return self.distribution.layout

    def reset_parameters(self) -> None:
        """Sets the weight to one, the bias to zero."""
        for kind in self.kinds:
            init_parameter_(self.get_parameter(kind), seed=0, name=kind)

    def forward(self, x: Tensor) -> Tensor:
        """A block [rows, ..., features here] -> the same."""
        name = type(self).__name__

        def facts() -> dict[str, object]:
            asks = [x.requires_grad, *(p.requires_grad for p in self.parameters())]
            return {"the shape of x": list(x.shape), "the dtype of x": x.dtype, "requires_grad": asks}

        agreed(name, self.group_name, x, lambda: self.distribution.check(x, name), facts)
        y: Tensor = self._applied(x)
        return y

    @torch.compiler.disable(reason="tpkernels' grids send point to point, which no compiled graph can hold")
    def _applied(self, x: Tensor) -> Tensor:
        bias = self.get_parameter("bias") if "bias" in self.kinds else None
        y: Tensor = _Normalised.apply(x, self.weight, bias, self.distribution, self.eps)
        return y

    def extra_repr(self) -> str:
        """Sizes."""
        return f"features={self.features}, eps={self.eps}, grid={self.distribution.layout.grid}, {self._group_repr()}"


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over all features, in float32 inside at least.

    Args:
        features: of the whole tensor.
        layout, grid: how x distribution: ``input_layout`` and ``process_grid`` of the layer behind.
        eps: added to the mean square. dtype, device: of the weight.
    Shape:
        x: [rows, ..., features here], any floating-point type; y the same.
    Raises:
        ArgumentError: features that the layout does not cut evenly. ShapeError: x is no such block.
    """


class LayerNorm(_Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over all features, in float32 inside at least.

    Arguments and shapes: those of ``RMSNorm``.
    """

    bias: torch.nn.Parameter
    kinds = ("weight", "bias")
