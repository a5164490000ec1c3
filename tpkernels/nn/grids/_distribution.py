"""How a tensor [rows, ..., features] lies on a grid, and exchanges among ranks that share its features or its rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.grids.execute import move
from tpkernels.grids.features import (
    features_home,
    features_needed,
    features_partial,
    over_features,
    over_rows,
)
from tpkernels.grids.layout import Layout
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.grids.redistribute import would_fit
from tpkernels.grids.spans import Span

__all__ = ["Distribution"]


@dataclass(frozen=True)
class Distribution:
    """``layout`` cuts rows and ``features`` features over the ranks of ``grid``.

    Raises:
        ArgumentError: layout and grid are of different numbers of ranks, or the layout does not cut the features in
            equal parts.
    """

    layout: Layout
    grid: ProcessGrid
    features: int
    argument: str = "features"

    def __post_init__(self) -> None:
        if self.layout.grid.world != self.grid.grid.world:
            raise ArgumentError(
                f"layout: expected one of {self.grid.grid.world} ranks, as the grid has, got one of "
                f"{self.layout.grid.world}."
            )
        parts = self.layout.block(self.grid.position).columns.parts
        if self.features < 1 or self.features % parts:
            raise ArgumentError(
                f"{self.argument}: the layout on {self.layout.grid} ranks cuts them in {parts} equal parts, but "
                f"they are {self.features}; {would_fit(self.features, parts)} would fit."
            )

    @property
    def local(self) -> int:
        """Features that this rank has."""
        return self.layout.block(self.grid.position).columns.length(self.features)

    @property
    def home(self) -> Layout:
        """Of one value a feature, at rest."""
        return features_home(self.layout.grid, self.layout)

    def check(self, x: Tensor, layer: str) -> None:
        """ShapeError unless ``x`` is a block."""
        if x.dim() < 2 or x.shape[-1] != self.local:
            raise ShapeError(
                f"x: expected [rows, ..., {self.local}], this rank's part of {self.features} {self.argument} "
                f"of {layer}, but the shape is {list(x.shape)}."
            )

    def bring(self, values: Tensor) -> Tensor:
        """[n, values at rest] -> [n, local]: those of this rank's features."""
        found = move(
            values,
            self.home,
            features_needed(self.layout),
            (values.shape[0], self.features),
            self.grid,
            values,
            "weights",
        )
        assert found is not None
        return found

    def send_home(self, partial: Tensor, like: Tensor) -> Tensor:
        """[n, local], sums over this rank's rows -> [n, values at rest], over all rows; they travel in like's type."""
        wide = partial.to(like.dtype)
        shape = partial.shape[0], self.features
        found = move(
            partial, features_partial(self.layout), self.home, shape, self.grid, wide, "gradients of weights"
        )
        assert found is not None
        return found.to(like.dtype)

    def over_features(self, values: Tensor) -> Tensor:
        """[rows, n], of this rank's features -> [rows, n, parts], those of all parts of the rows, in order."""
        own, everyone, parts = over_features(self.layout)
        share = self.layout.block(self.grid.position).rows.share
        rows = int(values.shape[0] / share)
        found = move(
            values.unsqueeze(-1), own, everyone, (rows, parts), self.grid, values.unsqueeze(-1), "statistics"
        )
        assert found is not None
        return found

    def over_rows(self, value: Tensor) -> Tensor:
        """[n], of this rank's rows, the same on all ranks that have them -> [parts, n], those of all rows, in order."""
        own, everyone, parts = over_rows(self.layout)
        values = value.view(1, -1, 1)
        found = move(values, own, everyone, (parts, 1), self.grid, values, "sums over rows")
        assert found is not None
        return found.squeeze(-1)

    @property
    def row_spans(self) -> list[Span]:
        """The different parts of the rows, in order."""
        return sorted({rows for rows, _ in self.layout.holders}, key=lambda s: s.start / s.parts)

    def take_rows(self, full: Tensor, name: str) -> Tensor:
        """This rank's rows of ``full`` [rows, ...], which has all of them.

        Raises:
            ShapeError: rows that the layout does not cut evenly.
        """
        span = self.layout.block(self.grid.position).rows
        if full.dim() < 1 or full.shape[0] % span.parts:
            rows = full.shape[0] if full.dim() else 0
            raise ShapeError(
                f"{name}: the grid of {self.layout.grid} ranks cuts the first dimension in {span.parts} equal parts, "
                f"but the shape is {list(full.shape)}; {would_fit(rows, span.parts)} would fit."
            )
        begin, end = span.elements(full.shape[0])
        return full[begin:end]
