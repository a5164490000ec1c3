"""Linear layers on process grids: 2-D, 2.5-D, 3-D and spatial-temporal tensor parallelism.

Contract: y = x W^T + b, with ``weight`` stored as in ``nn.Linear``, [out, in], of which each rank has a block, and
``bias`` cut over all ranks. A tensor [rows, ..., features] is cut along its first and last dimension, into equal
blocks; which rank has which is ``input_layout`` and ``output_layout``. Which block is multiplied when, and what is
sent for it, is in ``tpkernels.grids``, one module a method; the layers add parameters, checks and gradients.

    layer                   ranks         x and y at rest     weight at rest        input and output layout
    Linear2D                q x q         1/P                 1/P                   equal
    Linear2p5D              q x q x d     1/P                 1/q^2, d replicas     equal
    Linear3D                q x q x q     1/P                 1/P                   exchanged; two layers restore
    them
    LinearSpatialTemporal   2^k x 2^k     1/P                 1/P                   equal, as Linear2D's

All gradients are complete behind ``backward()``, nothing is left to reduce; replicas of a weight get the same bits.
Starting values are those of the unsharded layer of the same seed and name, and ``full_state_dict``,
``load_full_state_dict`` and ``clip_grad_norm_`` take the layers as they take all others. ``weight.main_grad`` is as
in ``ColumnParallelLinear``. Gradients cannot be differentiated again, and ``torch.compile`` breaks its graph at a
layer.

Every rank must call the layers in one order, with blocks of one shape and the same ``requires_grad``;
``TPK_CHECK=1`` compares that before anything is sent. A wait for a rank that does not come ends after the group's
timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from tpkernels.comm import conditions, runtime
from tpkernels.errors import ArgumentError, BackendError, DeviceError, DTypeError, ShapeError
from tpkernels.grids import (
    Method,
    grid_2d,
    grid_2p5d,
    grid_3d,
    grid_spatial_temporal,
    spatial_temporal,
    summa,
    three_d,
)
from tpkernels.grids.layout import Layout
from tpkernels.grids.mesh import GridGroupLike, ProcessGrid, bind
from tpkernels.grids.method import Sizes
from tpkernels.grids.one_launch import one_launch_missing
from tpkernels.grids.redistribute import take_block, would_fit
from tpkernels.nn._checks import agreed
from tpkernels.nn.grids._function import Call, grid_linears
from tpkernels.nn.sharding import BlockShard, ParallelModule
from tpkernels.nn.weights import init_parameter_
from tpkernels.ops import _paths
from tpkernels.ops._groups import transport_of
from tpkernels.ops._main_grad import Sink
from tpkernels.ops._main_grad import checked as checked_main_grad
from tpkernels.ops.api import _autocast

__all__ = [
    "GridLinear",
    "GridLinearOptions",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "LinearSpatialTemporal",
    "shared_input",
]


class GridLinearOptions(TypedDict, total=False):
    """Keyword arguments of all four layers; ``GridLinear`` has what they are."""

    bias: bool
    seed: int
    init_std: float | None
    name: str
    dtype: torch.dtype | None
    device: torch.device | str | None
    path: str
    gradient_accumulation_fusion: bool | None


class GridLinear(ParallelModule):
    """A linear layer on a process grid; use one of its subclasses.

    Args:
        in_features, out_features: of the whole layer. The grid must cut them in equal parts.
        method: what the ranks do.
        grid: the method's grid, bound to a group.
        bias: whether there is one; each rank has a part of its features' at rest.
        seed, init_std, name: starting values, see ``tpkernels.nn.weights``.
        dtype, device: of the parameters; ``device="meta"`` leaves them unfilled.
        path: of the products, as in ``tpkernels.matmul``. "fused": each pass is one launch of the Hopper kernel, blocks
            travel by the copy engine while it multiplies (``tpkernels.grids.one_launch``; not 3-D). "auto" takes
            message after message, product after product.
        gradient_accumulation_fusion: add the weight's gradient, in float32, to ``weight.main_grad``. None: where it
            is there. False: never.
    Shape:
        x: [rows, ..., in_features] cut by ``input_layout`` -> [rows, ..., out_features] cut by ``output_layout``.
    Raises:
        GroupError: the group is no such grid. ArgumentError: features that the grid does not cut; no main_grad.
        ShapeError: x has not this rank's features. MismatchError: ranks differ (``TPK_CHECK=1``).
        CommTimeoutError: a rank did not come.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        method: Method,
        grid: ProcessGrid,
        *,
        bias: bool = True,
        seed: int = 0,
        init_std: float | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        path: str = "auto",
        gradient_accumulation_fusion: bool | None = None,
        keep_gathered: bool = False,
    ) -> None:
        _check_features(type(self).__name__, method, in_features, out_features)
        super().__init__(grid.group_name, path)
        self.in_features, self.out_features = in_features, out_features
        self.method, self.process_grid = method, grid
        self.keep_gathered = keep_gathered
        self.seed, self.init_std, self.name = seed, init_std, name
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        shape = out_features, in_features
        self._add_parameter("weight", shape, BlockShard(method.home("W"), shape, grid), dtype, device)
        if bias:
            placement = BlockShard(method.home("B"), (out_features,), grid)
            self._add_parameter("bias", (out_features,), placement, dtype, device)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight again from (seed, name), zeroes the bias: ``tpkernels.nn.weights``."""
        for kind, parameter in self._parameters.items():
            if parameter is not None:
                full_name = f"{self.name}.{kind}" if self.name else kind
                init_parameter_(parameter, seed=self.seed, name=full_name, std=self.init_std)

    @property
    def input_layout(self) -> Layout:
        """Where the blocks of x, and of its gradient, lie."""
        return self.method.home("X")

    @property
    def output_layout(self) -> Layout:
        """Where the blocks of y, and of its gradient, lie."""
        return self.method.home("Y")

    def local_input(self, x: Tensor) -> Tensor:
        """This rank's block of a whole input [rows, ..., in_features], a view; no communication.

        Raises:
            ShapeError: rows (the batch) that the grid does not cut in equal parts; the sentence says what would
            fit.
        """
        self._check_last_dim(x, self.in_features, "in_features")
        return take_block(x, self.input_layout, self.process_grid.position)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return shared_input((self,), x)[0]

    def _check_input(self, x: Tensor) -> None:
        features = self.input_layout.block(self.process_grid.position).columns.length(self.in_features)
        if x.dim() < 2:
            raise ShapeError(
                f"x: {type(self).__name__} takes at least 2 dimensions, [rows, ..., features], but its shape is "
                f"{list(x.shape)}; pass x.unsqueeze(0) for a single row."
            )
        self._check_last_dim(x, features, f"this rank's part of in_features, {self.in_features}")
        if x.device != self.weight.device:
            raise DeviceError(
                f"x: expected device {self.weight.device}, as the weight's, got {x.device}; move one to the other."
            )
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise DTypeError(
                f"x: expected {self.weight.dtype}, as the weight's, got {x.dtype}; convert one, or use torch.autocast."
            )
        if self._sink() is not None:
            checked_main_grad(self.weight)
        if not torch.compiler.is_compiling():  # which cannot look into groups
            transport_of(self.process_grid.group, x.device, "x")
        # What is refused is refused before anything is sent.
        if not self._is_fused(x):
            request = _paths.parse(self.path, x.device.type, distributed=False)
            _paths.choose_gemm(request, x.device.type, x.dtype)

    def _is_fused(self, x: Tensor) -> bool:
        """Whether each pass is one launch.

        Raises:
            BackendError: it was asked for, and cannot be.
        """
        request = _paths.parse(self.path, x.device.type, distributed=True)
        grid = self.process_grid
        if request.transport != _paths.FUSED or grid.grid.world == 1 or x.device.type == "meta":
            return False
        device, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device) and dtype == torch.float32:
            dtype = torch.get_autocast_dtype(device)
        missing = one_launch_missing(self.method) or conditions.call_missing(
            device, dtype, dtype, grid.grid.world, runtime.active.device_types
        )
        if missing is not None:
            raise BackendError(f"{request.source}: 'fused' was asked for, but {missing}; use 'auto'.")
        return True

    def _facts(self, x: Tensor) -> dict[str, object]:
        """What must be the same on all ranks."""
        return {
            "shape of x": list(x.shape),
            "dtype of x": x.dtype,
            "requires_grad of x": x.requires_grad,
            "requires_grad of weight and bias": [p.requires_grad for p in self.parameters()],
            "main_grad": self._sink() is not None,
            "path is fused": self._is_fused(x),  # else it is of the local products alone
            "layer": (self.method.name, self.in_features, self.out_features, self.keep_gathered),
        }

    def _sink(self) -> Sink | None:
        fuse = self.gradient_accumulation_fusion
        if fuse is None:
            fuse = getattr(self.weight, "main_grad", None) is not None
        return self.weight if fuse and self.weight.requires_grad and torch.is_grad_enabled() else None

    def extra_repr(self) -> str:
        """Sizes, and the grid."""
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
        at = self.process_grid.coordinates
        return f"{text}, {self.method}, local weight={list(self.weight.shape)}, coordinates={at}, {self._group_repr()}"


class Linear2D(GridLinear):
    """2-D: SUMMA on q x q ranks (Optimus, arXiv 2104.05343); ``tpkernels.grids.summa`` has blocks and messages.

    Args:
        in_features, out_features: multiples of q.
        group: a group of q x q ranks, taken row by row, a ``DeviceMesh`` of q x q, or a ``ProcessGrid``.
        options: as in ``GridLinear``.
    Shape:
        x [rows / q, ..., in_features / q] -> [rows / q, ..., out_features / q]; weight [out / q, in / q].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: GridGroupLike = None,
        **options: Unpack[GridLinearOptions],
    ) -> None:
        grid = bind(grid_2d, group)
        super().__init__(in_features, out_features, summa(grid.grid), grid, **options)


class Linear2p5D(GridLinear):
    """2.5-D: SUMMA at each of ``depth`` depths, with rows of their own (Tesseract, arXiv 2105.14500).

    The weight is the same at every depth, and its gradient the sum over all of them.

    Args:
        in_features, out_features: multiples of q.
        depth: the group has q x q x depth ranks.
        group: such a group, taken depth by depth, each row by row; a ``DeviceMesh`` of q x q x depth, in whatever
            order of ranks; or a ``ProcessGrid``.
        options: as in ``GridLinear``.
    Shape:
        x [rows / (q depth), ..., in_features / q] -> [rows / (q depth), ..., out_features / q]; weight [out / q, in
        / q].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        depth: int,
        group: GridGroupLike = None,
        **options: Unpack[GridLinearOptions],
    ) -> None:
        grid = bind(lambda world: grid_2p5d(world, depth), group)
        super().__init__(in_features, out_features, summa(grid.grid), grid, **options)


class Linear3D(GridLinear):
    """3-D on q x q x q ranks (arXiv 2105.14450): all at rest cut over all ranks; ``tpkernels.grids.three_d``.

    Args:
        in_features: a multiple of q^2. out_features: of q.
        group: a group of q^3 ranks, a ``DeviceMesh`` of q x q x q, or a ``ProcessGrid``.
        swapped: take x as a layer without it gives y, and give y as that one takes x. Layers in a row alternate.
        keep_gathered: keep the gathered x and weight for the backward pass, q times their blocks, instead of
            gathering them again.
        options: as in ``GridLinear``.
    Shape:
        x [rows / q^2, ..., in_features / q] -> [rows / q^2, ..., out_features / q]; weight [out / q, in / q^2].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: GridGroupLike = None,
        swapped: bool = False,
        keep_gathered: bool = False,
        **options: Unpack[GridLinearOptions],
    ) -> None:
        grid = bind(grid_3d, group)
        method = three_d(grid.grid, swapped)
        super().__init__(in_features, out_features, method, grid, keep_gathered=keep_gathered, **options)


class LinearSpatialTemporal(GridLinear):
    """PrimePar's primitive on 2^k x 2^k ranks (ASPLOS 2024): rings in space and time, no all-reduce, no replica.

    x, y and their gradients lie as ``Linear2D``'s; ``tpkernels.grids.spatial_temporal`` says what that costs.

    Args:
        in_features, out_features: multiples of 2^k.
        group: a group of 4^k ranks, a ``DeviceMesh`` of 2^k x 2^k, or a ``ProcessGrid``.
        options: as in ``GridLinear``.
    Shape:
        As ``Linear2D``, q = 2^k.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: GridGroupLike = None,
        **options: Unpack[GridLinearOptions],
    ) -> None:
        grid = bind(grid_spatial_temporal, group)
        super().__init__(in_features, out_features, spatial_temporal(grid.grid), grid, **options)


def shared_input(layers: Sequence[GridLinear], x: Tensor) -> list[Tensor]:
    """The layers' outputs for one input, which moves once for all of them; its gradient is summed once, too.

    Args:
        layers: of one kind on one grid, with the same in_features, path and keep_gathered.
        x: as in ``GridLinear``.
    Raises:
        ArgumentError: no layers, or layers that differ. Else as ``GridLinear``.
    """
    if not layers:
        raise ArgumentError("layers: at least one layer is needed, but there is none.")
    first = layers[0]

    def check() -> None:
        _check_together(layers)
        for layer in layers:
            layer._check_input(x)

    def facts() -> dict[str, object]:
        return {
            f"{what} of layer {i}": v for i, layer in enumerate(layers) for what, v in layer._facts(x).items()
        }

    agreed(type(first).__name__, first.group_name, x, check, facts)
    rows = x.shape[:-1].numel()
    features = tuple(layer.out_features for layer in layers)
    call = Call(
        first.method,
        first.process_grid,
        Sizes(rows * first.method.cuts.m, first.in_features, sum(features)),
        features,
        first.keep_gathered,
        first.path,
        first._is_fused(x),
        f"{type(first).__name__} {first.name!r}" if first.name else type(first).__name__,
        tuple(layer._sink() for layer in layers),
    )
    x, *parameters = _autocast(x, *(layer.weight.t() for layer in layers), *(layer.bias for layer in layers))
    outputs: list[Tensor] = grid_linears(x, parameters[: len(layers)], parameters[len(layers) :], call)
    return outputs


def _check_together(layers: Sequence[GridLinear]) -> None:
    first = layers[0]
    for layer in layers[1:]:
        for what in ("method", "process_grid", "in_features", "path", "keep_gathered"):
            one, other = getattr(first, what), getattr(layer, what)
            if one != other:
                raise ArgumentError(
                    f"layers: those that share an input must have one {what}, but it is {one} in one and {other} in "
                    "another; call them one by one."
                )


def _check_features(layer: str, method: Method, in_features: int, out_features: int) -> None:
    for argument, size, parts in (
        ("in_features", in_features, method.cuts.k),
        ("out_features", out_features, method.cuts.n),
    ):
        if size < 1:
            raise ArgumentError(f"{argument}: a linear layer needs at least 1, but it is {size}.")
        if size % parts:
            raise ArgumentError(
                f"{argument}: {layer} on {method.grid} ranks cuts it in {parts} equal parts, but it is {size}; "
                f"{would_fit(size, parts)} would fit."
            )
