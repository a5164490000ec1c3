"""The feed-forward part of a transformer: one gather, one reduction, whatever the activation.

    "swiglu":               y = down(silu(gate(x)) * up(x))          gate and up share one gather
    "gelu", "gelu_tanh", "relu", "silu":  y = down(act(up(x)))       the activation is in up's epilogue

gate and up are two parameters, not one packed weight: a checkpoint keeps the names of the plain model, and
cutting by rows is right for both. The intermediate size need not divide by the world.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from tpkernels.errors import ArgumentError
from tpkernels.nn import _options
from tpkernels.nn._options import ModelOptions
from tpkernels.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel

__all__ = ["ParallelMLP"]

_PLAIN = ("gelu", "gelu_tanh", "relu", "silu")


class ParallelMLP(nn.Module):
    """Column-parallel up (and gate), activation, row-parallel down.

    Args:
        hidden, intermediate: features of x and between the two products.
        activation: "swiglu", "gelu" (erf), "gelu_tanh", "relu" or "silu".
        bias: of every layer.
        options: as in ``ColumnParallelLinear`` and ``RowParallelLinear``; keep_gathered is for up (and gate).
    Parameters:
        up_proj, down_proj and, for "swiglu", gate_proj; each with weight and perhaps bias.
    Shape:
        x: [..., hidden] -> the same; under sequence_parallel this rank's part of the sequence, in and out.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        **options: Unpack[ModelOptions],
    ) -> None:
        super().__init__()
        if activation != "swiglu" and activation not in _PLAIN:
            known = ", ".join(repr(a) for a in ("swiglu", *_PLAIN))
            raise ArgumentError(f"activation: it must be one of {known}, but it is {activation!r}.")
        self.activation = activation

        def column(key: str, epilogue: str | None) -> ColumnParallelLinear:
            own = _options.column(options, key)
            return ColumnParallelLinear(hidden, intermediate, bias=bias, activation=epilogue, **own)

        if activation == "swiglu":
            self.gate_proj = column("gate_proj", None)
            self.up_proj = column("up_proj", None)
        else:
            self.up_proj = column("up_proj", activation)
        self.down_proj = RowParallelLinear(
            intermediate, hidden, bias=bias, **_options.row(options, "down_proj")
        )

    def forward(
        self, x: Tensor, residual: Tensor | None = None, shard_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """y (+ residual, of y's shape); ``shard_sizes``: sequence rows of every rank where they differ."""
        if self.activation == "swiglu":
            gate, up = column_parallel((self.gate_proj, self.up_proj), x, shard_sizes)
            inner = F.silu(gate) * up
        else:
            (inner,) = column_parallel((self.up_proj,), x, shard_sizes)
        out: Tensor = self.down_proj(inner, residual=residual, shard_sizes=shard_sizes)
        return out
