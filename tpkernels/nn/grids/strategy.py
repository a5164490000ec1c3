"""Which layers a model on a grid is made of: one object that attention, MLP, block and whole models are built from.

    on = grids.GridStrategy("3d", group=group)
    up, down = on.into(1024, 4096), on.back(4096, 1024)      # down's output lies as up's input, as ``on.layout``

Only tensors of one layout may be added: whoever builds a residual asks ``check_residual``, which says in a sentence
what is wrong, since shapes do not: in 3-D the two layouts have blocks of one shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from tpkernels.errors import ArgumentError
from tpkernels.grids import grid_2d, grid_2p5d, grid_3d, grid_spatial_temporal
from tpkernels.grids.layout import Layout
from tpkernels.grids.mesh import GridGroupLike, bind
from tpkernels.nn.grids.linear import (
    GridLinear,
    GridLinearOptions,
    Linear2D,
    Linear2p5D,
    Linear3D,
    LinearSpatialTemporal,
)

__all__ = ["METHODS", "GridStrategy", "Residual", "check_chain", "check_residual"]

METHODS = ("2d", "2.5d", "3d", "spatial_temporal")


class GridStrategy:
    """A method on a grid of ranks.

    Args:
        method: "2d", "2.5d", "3d" or "spatial_temporal".
        group: as in the layer of the method.
        depth: of 2.5-D.
        keep_gathered: of 3-D.
    Raises:
        ArgumentError: an unknown method, an argument that the method has not. GroupError: the group is no such grid.
    """

    def __init__(
        self,
        method: str,
        *,
        group: GridGroupLike = None,
        depth: int | None = None,
        keep_gathered: bool = False,
    ) -> None:
        if method not in METHODS:
            raise ArgumentError(
                f"method: it must be one of {', '.join(map(repr, METHODS))}, but it is {method!r}."
            )
        if (depth is None) == (method == "2.5d"):
            wanted = "needs one" if method == "2.5d" else "has none"
            raise ArgumentError(
                f'depth: method {method!r} {wanted}, but it is {depth}; only "2.5d" takes it.'
            )
        if keep_gathered and method != "3d":
            raise ArgumentError(
                f'keep_gathered: method {method!r} gathers nothing whole; only "3d" takes it.'
            )
        makers: dict[str, Any] = {
            "2d": grid_2d,
            "2.5d": lambda world: grid_2p5d(world, depth or 1),
            "3d": grid_3d,
            "spatial_temporal": grid_spatial_temporal,
        }
        self.method = method
        self.depth = depth
        self.keep_gathered = keep_gathered
        self.grid = bind(makers[method], group)
        probe = self.grid.grid.world**2  # what every grid cuts
        made = self.into(probe, probe, device="meta", bias=False)
        self.layout, self.inner_layout = made.input_layout, made.output_layout
        self.cuts = made.method.cuts

    def into(self, in_features: int, out_features: int, **options: Unpack[GridLinearOptions]) -> GridLinear:
        """A layer from ``layout`` to ``inner_layout``."""
        return self._linear(in_features, out_features, False, options)

    def back(self, in_features: int, out_features: int, **options: Unpack[GridLinearOptions]) -> GridLinear:
        """A layer from ``inner_layout`` to ``layout``."""
        return self._linear(in_features, out_features, True, options)

    def _linear(
        self, in_features: int, out_features: int, back: bool, options: GridLinearOptions
    ) -> GridLinear:
        sizes = in_features, out_features
        if self.method == "2d":
            return Linear2D(*sizes, group=self.grid, **options)
        if self.method == "2.5d":
            return Linear2p5D(*sizes, depth=self.depth or 1, group=self.grid, **options)
        if self.method == "3d":
            kept = self.keep_gathered
            return Linear3D(*sizes, group=self.grid, swapped=back, keep_gathered=kept, **options)
        return LinearSpatialTemporal(*sizes, group=self.grid, **options)

    def __repr__(self) -> str:
        return f"GridStrategy({self.method!r}, {self.grid.grid})"


def check_residual(skipped: Layout, added: Layout, where: str) -> None:
    """ArgumentError unless a tensor of one layout may be added to one of the other."""
    if skipped != added:
        raise ArgumentError(
            f"{where}: a residual adds tensors of one layout, but {_difference(skipped, added)} in what is "
            "added to it; end with a layer that goes back (3-D: swapped=True), or redistribute."
        )


def _difference(one: Layout, other: Layout) -> str:
    """The first rank whose blocks differ: "rank 1 at (0, 0, 1) has rows ... in front, and rows ..."."""
    if one.grid.world != other.grid.world:
        return f"one is for {one.grid.world} ranks, and {other.grid.world} have blocks"
    pairs = enumerate(zip(one.blocks, other.blocks, strict=True))
    rank, (a, b) = next((p, both) for p, both in pairs if both[0] != both[1] or one.grid != other.grid)
    return f"rank {rank} at {one.grid.coordinates[rank]} has {a} in front, and {b}"


def check_chain(modules: nn.Sequential) -> tuple[Layout, Layout]:
    """Layouts in front of and behind modules in a row; those without layouts leave a tensor where it is.

    Raises:
        ArgumentError: a module does not take what the one before gives; none has layouts.
    """
    first: Layout | None = None
    last: Layout | None = None
    for name, module in modules.named_children():
        taken, given = (getattr(module, f"{end}_layout", None) for end in ("input", "output"))
        if taken is None or given is None:
            continue
        if last is not None and taken != last:
            raise ArgumentError(
                f"modules: {name!r} ({type(module).__name__}) must take what the module before it gives, but "
                f"{_difference(last, taken)} in what it takes; take a layer that goes back (3-D: swapped=True), or "
                "redistribute."
            )
        first, last = first or taken, given
    if first is None or last is None:
        raise ArgumentError("modules: expected at least one layer on a grid, got none.")
    return first, last


class Residual(nn.Sequential):
    """x + the modules in a row, which must end in the layout in which they begin: refused at construction otherwise.

    Raises:
        ArgumentError: layouts that do not follow one another, or another one behind than in front.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.input_layout, self.output_layout = check_chain(self)
        check_residual(self.input_layout, self.output_layout, "modules")

    def forward(self, x: Tensor) -> Tensor:
        """[rows, ..., features] -> the same."""
        y: Tensor = super().forward(x)
        return x + y
