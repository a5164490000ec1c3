"""Several column-parallel layers on one input, as one module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tpkernels.errors import ArgumentError
from tpkernels.nn.linear import ColumnParallelLinear, column_parallel
from tpkernels.nn.sharding import GroupLike

__all__ = ["ColumnParallelLinears"]


class ColumnParallelLinears(nn.ModuleDict):
    """Several column-parallel layers on one input, by name: ``ColumnParallelLinears(64, {"q": 64, "k": 16})``.

    ``forward(x, shard_sizes=None)`` returns the outputs in the order of the names, with one gather for all.
    Keyword arguments are those of ``ColumnParallelLinear``. Parameters are called "q.weight", "q.bias", ...
    as in a plain ``nn.ModuleDict`` of ``nn.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: dict[str, int],
        *,
        group: GroupLike = None,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        gather_output: bool = False,
        activation: str | None = None,
        seed: int = 0,
        init_std: float | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        path: str = "auto",
        gradient_accumulation_fusion: bool | None = None,
    ) -> None:
        if not out_features:
            raise ArgumentError(
                "out_features: at least one output must be named, but the dictionary is empty."
            )
        super().__init__(
            {
                key: ColumnParallelLinear(
                    in_features,
                    size,
                    group=group,
                    bias=bias,
                    sequence_parallel=sequence_parallel,
                    sequence_dim=sequence_dim,
                    gather_output=gather_output,
                    activation=activation,
                    seed=seed,
                    init_std=init_std,
                    name=f"{name}.{key}" if name else key,
                    dtype=dtype,
                    device=device,
                    path=path,
                    gradient_accumulation_fusion=gradient_accumulation_fusion,
                )
                for key, size in out_features.items()
            }
        )

    def forward(self, x: Tensor, shard_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Outputs in the order of the names."""
        layers = [layer for layer in self.values() if isinstance(layer, ColumnParallelLinear)]
        return column_parallel(layers, x, shard_sizes)
