"""Several column-parallel layers on one input, as one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from tpkernels.errors import ArgumentError
from tpkernels.nn._linear import LinearOptions
from tpkernels.nn.linear import ColumnParallelLinear, column_parallel

__all__ = ["ColumnParallelLinears"]


class ColumnOptions(LinearOptions, total=False):
    """Keyword arguments of ``ColumnParallelLinear``."""

    gather_output: bool
    activation: str | None
    keep_gathered: bool


class ColumnParallelLinears(nn.ModuleDict):
    """Several column-parallel layers on one input, by name: ``ColumnParallelLinears(64, {"q": 64, "k": 16})``.

    ``forward(x, shard_sizes=None)`` returns the outputs in the order of the names, with one gather for all.
    Keyword arguments are those of ``ColumnParallelLinear``. Parameters are called "q.weight", "q.bias", ...
    as in a plain ``nn.ModuleDict`` of ``nn.Linear``.
    """

    def __init__(
        self, in_features: int, out_features: dict[str, int], **options: Unpack[ColumnOptions]
    ) -> None:
        if not out_features:
            raise ArgumentError(
                "out_features: at least one output must be named, but the dictionary is empty."
            )
        name = options.get("name", "")

        def made(key: str, size: int) -> ColumnParallelLinear:
            own = ColumnOptions(**{**options, "name": f"{name}.{key}" if name else key})
            return ColumnParallelLinear(in_features, size, **own)

        super().__init__({key: made(key, size) for key, size in out_features.items()})

    def forward(self, x: Tensor, shard_sizes: Sequence[int] | None = None) -> list[Any]:
        """Outputs in the order of the names."""
        layers = [layer for layer in self.values() if isinstance(layer, ColumnParallelLinear)]
        return column_parallel(layers, x, shard_sizes)
