"""How a parameter lies on the ranks of a group, and the base class of all layers that have such parameters.

Contract: every parameter of a ``ParallelModule`` carries ``tpk_shard``: a ``Shard``, a ``Replicated`` or, on a grid
of ranks, a ``BlockShard``. A parameter without the attribute is replicated: whatever a user adds beside our layers.
The placements are also kept in ``module.placements``, and the attributes are set again by everything that makes new
parameter objects without them: ``to_empty``, ``copy.deepcopy``, unpickling, ``load_state_dict(assign=True)`` and the
assignment of another ``nn.Parameter`` under a name that has a placement. The shape of what is assigned is not looked
at: it must be that of this rank's shard.

Parameters are plain local tensors under plain names, not DTensors: any optimizer, checkpoint format and
compiler takes them. A module stores its group's name, never the object, so that it can be pickled and traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.errors import ShapeError
from tpkernels.grids.layout import Layout
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.nn._checks import agreed
from tpkernels.ops._groups import GroupLike, group_name_of, resolve

__all__ = ["BlockShard", "GroupLike", "ParallelModule", "Placement", "Replicated", "Shard", "placement_of"]


@dataclass(frozen=True)
class Shard:
    """This rank has ``sizes[part]`` rows of the global tensor's ``dim``; ranks hold them in order, perhaps none.

    A part is a rank's, or that of ``copies`` ranks in a row, which hold it alike, with the same gradient; ``sizes``
    has one entry for each part.
    """

    dim: int
    sizes: tuple[int, ...]
    rank: int
    group_name: str
    copies: int = 1

    @property
    def part(self) -> int:
        """Which of the parts this rank has."""
        return self.rank // self.copies

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for its part: the first of those that hold it."""
        return self.rank % self.copies == 0

    @property
    def start(self) -> int:
        """Global index of this rank's first row."""
        return sum(self.sizes[: self.part])

    @property
    def size(self) -> int:
        """Rows of this rank."""
        return self.sizes[self.part]

    def local_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this rank's shard of a tensor of ``global_shape``."""
        return (*global_shape[: self.dim], self.size, *global_shape[self.dim + 1 :])

    def global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor whose shard has ``local_shape``."""
        return (*local_shape[: self.dim], sum(self.sizes), *local_shape[self.dim + 1 :])

    def offset(self, ndim: int) -> tuple[int, ...]:
        """Index of the shard's first element in the global tensor."""
        return tuple(self.start if dim == self.dim else 0 for dim in range(ndim))

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the global tensor, a view."""
        return full.narrow(self.dim, self.start, self.size)


@dataclass(frozen=True)
class Replicated:
    """Every rank of the group has the whole tensor and the same gradient."""

    group_name: str

    def local_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The same shape."""
        return tuple(global_shape)

    def global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The same shape."""
        return tuple(local_shape)

    def offset(self, ndim: int) -> tuple[int, ...]:
        """Zeros."""
        return (0,) * ndim

    def take(self, full: Tensor) -> Tensor:
        """The tensor itself."""
        return full


@dataclass(frozen=True)
class BlockShard:
    """This rank has the block of ``layout`` of a matrix of ``shape``; a vector is one row of a matrix."""

    layout: Layout
    shape: tuple[int, ...]
    grid: ProcessGrid

    @property
    def group_name(self) -> str:
        """Name of the group whose ranks the grid has."""
        return self.grid.group_name

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for its block: the first of those that hold it."""
        block = self.layout.block(self.grid.position)
        return self.layout.holders[block.rows, block.columns][0] == self.grid.position

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First index, and the one behind the last, in each dimension."""
        block = self.layout.block(self.grid.position)
        spans = (block.rows, block.columns)[-len(self.shape) :]
        return tuple(span.elements(size) for span, size in zip(spans, self.shape, strict=True))

    def local_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this rank's block; ``global_shape`` is ``shape``."""
        return tuple(end - begin for begin, end in self.ranges)

    def global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """``shape``."""
        return self.shape

    def offset(self, ndim: int) -> tuple[int, ...]:
        """Index of the block's first element in the global tensor."""
        return tuple(begin for begin, _ in self.ranges)

    def take(self, full: Tensor) -> Tensor:
        """This rank's block of the global tensor, a view."""
        for dim, (begin, end) in enumerate(self.ranges):
            full = full.narrow(dim, begin, end - begin)
        return full


Placement: TypeAlias = Shard | Replicated | BlockShard


def placement_of(tensor: Tensor) -> Placement | None:
    """The placement that a parameter carries, None for one that does not belong to a ``ParallelModule``."""
    placement = getattr(tensor, "tpk_shard", None)
    return placement if isinstance(placement, (Shard, Replicated, BlockShard)) else None


class ParallelModule(nn.Module):
    """A module with sharded parameters: knows its group by name, and where each of its own parameters lies.

    Args:
        group: ``ProcessGroup``, one-dimensional ``DeviceMesh``, name of a group, or None for the default
            group.
        path: path of the operations, see ``tpk.matmul``.
    Raises:
        GroupError: there is no such group, or this rank is not in it.
    """

    def __init__(self, group: GroupLike = None, path: str = "auto") -> None:
        super().__init__()
        info = resolve(group_name_of(group))
        self.group_name = info.name
        self.rank = info.rank
        self.world = info.world
        self.path = path
        self.placements: dict[str, Placement] = {}

    def _even(self, total: int, dim: int) -> Shard:
        """``total`` rows cut as evenly as ``tpk.shard_sizes`` does it."""
        return Shard(dim, tuple(tpk.shard_sizes(total, self.world)), self.rank, self.group_name)

    def _replicated(self) -> Replicated:
        return Replicated(self.group_name)

    def _add_parameter(
        self,
        name: str,
        global_shape: Sequence[int],
        placement: Placement,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        shape = placement.local_shape(global_shape)
        self.placements[name] = placement
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in ``nn.Module``, which also comes here for ``layer.weight = nn.Parameter(...)``; keeps the placement."""
        super().register_parameter(name, param)
        if name in self.placements:
            self._tag_parameters()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._tag_parameters()  # assign=True sets, and torch may swap, the parameter objects

    def _tag_parameters(self) -> None:
        for name, placement in self.placements.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter.tpk_shard = placement  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ParallelModule:
        super()._apply(fn, recurse)
        self._tag_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tag_parameters()

    def _agree(self, x: Tensor, check: Callable[[], None]) -> None:
        """Runs the layer's own checks of its arguments, see ``agreed``."""
        agreed(type(self).__name__, self.group_name, x, check)

    def _check_last_dim(self, x: Tensor, expected: int, what: str) -> None:
        if x.dim() < 1 or x.shape[-1] != expected:
            raise ShapeError(
                f"x: the last dimension of the input of {type(self).__name__} must be {expected} ({what}), "
                f"but x has shape {list(x.shape)}."
            )

    def _check_sequence_dim(self, x: Tensor, sequence_dim: int) -> None:
        if not 0 <= sequence_dim < x.dim() - 1:
            raise ShapeError(
                f"x: {type(self).__name__} runs sequence-parallel along dimension {sequence_dim}, so x must have more "
                f"than {sequence_dim + 1} dimensions (the last one holds the features), but its shape is "
                f"{list(x.shape)}; give the layer another sequence_dim, or x its batch dimension."
            )

    def _group_repr(self) -> str:
        return f"group={self.group_name!r}, rank={self.rank}/{self.world}"
