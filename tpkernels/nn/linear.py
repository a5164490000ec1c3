"""Linear layers whose weight is cut over a process group.

Contract: ``weight`` and ``bias`` are stored as in ``nn.Linear``, [out, in] and [out]:
``ColumnParallelLinear`` has rows of both, ``RowParallelLinear`` columns of the weight and the whole bias.
Features need not divide by the world (``tpk.shard_sizes``: the last ranks get fewer, perhaps none).
Communication is inside the operations:

    layer    sequence_parallel  forward                    backward
    column   no                 matmul_replicated          all-reduce of dX
    column   yes                all_gather_matmul          reduce-scatter of dX
    row      no                 matmul_all_reduce          none
    row      yes                matmul_reduce_scatter      all-gather of dY

A weight with the attribute ``main_grad`` gets its gradient there, added in float32 by the product that makes it, and
none in ``weight.grad``: the convention of Megatron-LM and TransformerEngine, which ``tpkernels.ops._main_grad``
describes with ``grad_added_to_main_grad``, ``zero_out_wgrad`` and what is refused. Gradients of biases, and of weights
of embeddings and norms, are made by no such product and go to ``grad`` as ever. ``torch.compile`` breaks its graph at
such a layer, and raises under ``fullgraph=True``.

The bias of a row-parallel layer is added once, after the sum, and its gradient is complete and equal on every
rank. Nothing has to be reduced after ``backward()``. ``residual`` is added in the same epilogue, before the
one rounding. Where a weight does not require gradients its product is left out.

``column_parallel`` runs several column-parallel layers on one input with one gather. The layers stay separate
modules, so a checkpoint has the names and shapes of the plain model; a packed [gate; up] weight would have to
be cut in two interleaved parts (users of other libraries got that silently wrong).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.nn._checks import check_counts_from_front
from tpkernels.nn.sharding import GroupLike, ParallelModule
from tpkernels.nn.weights import init_parameter_
from tpkernels.ops._checks import check_activation
from tpkernels.ops._main_grad import checked as checked_main_grad

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "column_parallel"]

# What layers must have in common to take part in one gather.
_SHARED = ("in_features", "group_name", "sequence_parallel", "sequence_dim", "activation", "path")


class _ParallelLinear(ParallelModule):
    """What both layers share; ``weight`` and ``bias`` are registered by them."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    gradient_accumulation_fusion: bool | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        sequence_parallel: bool,
        sequence_dim: int,
        seed: int,
        init_std: float | None,
        name: str,
        path: str,
    ) -> None:
        super().__init__(group, path)
        for argument, value in (("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                raise ArgumentError(f"{argument}: a linear layer needs at least 1, but it is {value}.")
        check_counts_from_front(sequence_dim)
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.seed = seed
        self.init_std = init_std
        self.name = name

    def reset_parameters(self) -> None:
        """Draws the weight again from (seed, name), zeroes the bias; see ``tpkernels.nn.weights``."""
        for kind, parameter in self._parameters.items():
            if parameter is not None:
                full_name = f"{self.name}.{kind}" if self.name else kind
                init_parameter_(parameter, seed=self.seed, name=full_name, std=self.init_std)

    def _main_grad_of(self) -> nn.Parameter | None:
        """The weight, if its gradient goes to its ``main_grad``."""
        fuse = self.gradient_accumulation_fusion
        if fuse is None:
            fuse = getattr(self.weight, "main_grad", None) is not None
        return self.weight if fuse and self.weight.requires_grad and torch.is_grad_enabled() else None

    def _check_main_grad(self) -> None:
        weight = self._main_grad_of()
        if weight is not None:
            checked_main_grad(weight)

    def _check_shard_sizes(self, shard_sizes: Sequence[int] | None) -> None:
        if shard_sizes is not None and not self.sequence_parallel:
            raise ArgumentError(
                f"shard_sizes: {type(self).__name__} was made without sequence_parallel, so its tensors are not "
                f"cut along the sequence; leave shard_sizes out (it is {list(shard_sizes)})."
            )

    def _check_input(self, x: Tensor, features: int, what: str, shard_sizes: Sequence[int] | None) -> None:
        """All that is said of x and shard_sizes in the layer's terms, before the operation checks them in its own."""
        self._check_shard_sizes(shard_sizes)
        self._check_main_grad()
        if x.dim() < 2:
            raise ShapeError(
                f"x: {type(self).__name__} takes at least 2 dimensions, [..., rows, features], but its shape is "
                f"{list(x.shape)}; pass x.unsqueeze(0) for a single row."
            )
        self._check_last_dim(x, features, what)
        if self.sequence_parallel:
            self._check_sequence_dim(x, self.sequence_dim)

    def extra_repr(self) -> str:
        local = list(self.weight.shape)
        text = f"in_features={self.in_features}, out_features={self.out_features}, local weight={local}"
        text += f", bias={self.bias is not None}, sequence_parallel={self.sequence_parallel}"
        if self.sequence_parallel:
            text += f", sequence_dim={self.sequence_dim}"
        return f"{text}, {self._group_repr()}"


class ColumnParallelLinear(_ParallelLinear):
    """y = activation(x W^T + b), the output features cut over the group.

    Args:
        in_features, out_features: of the whole layer.
        group: ``ProcessGroup``, one-dimensional ``DeviceMesh``, group name, or None for the default group.
        bias: whether there is one; cut as the output features are.
        sequence_parallel: x is this rank's part of the sequence and is gathered; otherwise x is equal on
            every rank.
        sequence_dim: the dimension that is cut under sequence_parallel: 0 for [S, B, H], 1 for [B, S, H].
        gather_output: return all output features on every rank. What consumes them must then do the same on
            every rank: the gradient of the gathered output is taken as complete, not summed.
        activation: None or "none", "relu", "silu", "gelu" (erf), "gelu_tanh".
        seed, init_std, name: starting values, see ``tpkernels.nn.weights``.
        dtype, device: of the parameters; ``device="meta"`` leaves them unfilled.
        path: path of the operation.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad``, which must be there by the
            first forward pass. None: where it is there. False: never, ``weight.grad`` gets it.
    Shape:
        x: [..., in_features] -> [..., out_sizes[rank]], or [..., out_features] with gather_output. Under
            sequence_parallel dimension ``sequence_dim`` grows from this rank's part to the whole sequence.
    Raises:
        ArgumentError: a size, activation or shape that does not fit, no main_grad. GroupError: no such group.
        ShapeError, DTypeError, DeviceError: ``main_grad`` is not a float32 (for float64: float64) tensor like weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
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
        super().__init__(
            in_features, out_features, group, sequence_parallel, sequence_dim, seed, init_std, name, path
        )
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        check_activation(activation or "none")
        self.gather_output = gather_output
        self.activation = None if activation == "none" else activation
        placement = self._even(out_features, 0)
        self.out_sizes = placement.sizes
        self._add_parameter("weight", (out_features, in_features), placement, dtype, device)
        if bias:
            self._add_parameter("bias", (out_features,), placement, dtype, device)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, x: Tensor, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """See the class; ``shard_sizes``: sequence rows of every rank where they are not equal."""
        return column_parallel((self,), x, shard_sizes)[0]


class RowParallelLinear(_ParallelLinear):
    """y = sum over ranks of x_r W_r^T, + b + residual, the input features cut over the group.

    Args:
        input_is_parallel: x has this rank's input features, as a column-parallel layer makes them; otherwise
            x has all of them, equal on every rank, and the layer takes its part.
        sequence_parallel: return this rank's part of the sequence instead of the whole of it; needs
            ``input_is_parallel``.
        The others: as in ``ColumnParallelLinear``; the bias is [out_features], the same on every rank.
    Shape:
        x: [..., in_sizes[rank]] -> [..., out_features]; residual: the shape of the output. The output has the
            type of x, under autocast that of autocast, or that of a wider residual: the type of residual + y.
    Raises:
        As ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: GroupLike = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        seed: int = 0,
        init_std: float | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        path: str = "auto",
        gradient_accumulation_fusion: bool | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, group, sequence_parallel, sequence_dim, seed, init_std, name, path
        )
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        if sequence_parallel and not input_is_parallel:
            raise ArgumentError(
                "input_is_parallel: it must be True with sequence_parallel (the input of a row-parallel layer "
                "then has the whole sequence and a part of the features), but it is False."
            )
        self.input_is_parallel = input_is_parallel
        placement = self._even(in_features, 1)
        self.in_sizes = placement.sizes
        self._add_parameter("weight", (out_features, in_features), placement, dtype, device)
        if bias:
            self._add_parameter("bias", (out_features,), self._replicated(), dtype, device)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(
        self, x: Tensor, residual: Tensor | None = None, shard_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """See the class; ``shard_sizes``: sequence rows that every rank gets, None: ``tpk.shard_sizes``."""
        if self.input_is_parallel:
            features, what = (
                self.in_sizes[self.rank],
                f"rank {self.rank}'s share of {self.in_features} features",
            )
        else:
            features, what = self.in_features, "all input features, since input_is_parallel is False"
        self._agree(x, lambda: self._check_input(x, features, what, shard_sizes))
        out_dtype = _residual_dtype(x, residual)
        if not self.input_is_parallel:
            x = tpk.regions.split(x, -1, self.group_name, shard_sizes=list(self.in_sizes))
        weight = self.weight.t()
        if not self.sequence_parallel:
            return tpk.matmul_all_reduce(
                x,
                weight,
                self.group_name,
                bias=self.bias,
                residual=residual,
                out_dtype=out_dtype,
                main_grad_of=self._main_grad_of(),
                path=self.path,
            )
        return tpk.matmul_reduce_scatter(
            x,
            weight,
            self.group_name,
            scatter_dim=self.sequence_dim,
            shard_sizes=None if shard_sizes is None else list(shard_sizes),
            bias=self.bias,
            residual=residual,
            out_dtype=out_dtype,
            main_grad_of=self._main_grad_of(),
            path=self.path,
        )


def _residual_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype | None:
    """The type of ``residual + y`` where it is the residual's, as for a float32 stream under autocast."""
    if residual is None or torch.promote_types(x.dtype, residual.dtype) != residual.dtype:
        return None  # the operation says what is wrong with a residual that does not fit
    return residual.dtype


def column_parallel(
    layers: Sequence[ColumnParallelLinear], x: Tensor, shard_sizes: Sequence[int] | None = None
) -> list[Tensor]:
    """Outputs of several column-parallel layers on one input: one gather forward, one reduction backward.

    Args:
        layers: made alike: same in_features, group, sequence_parallel, sequence_dim, activation and path.
        x, shard_sizes: as in ``ColumnParallelLinear``.
    Raises:
        ArgumentError: the layers differ, or x does not fit them.
    """
    if not layers:
        raise ArgumentError("layers: at least one column-parallel layer is needed, but there is none.")
    first = layers[0]

    def check() -> None:
        for layer in layers[1:]:
            for what in _SHARED:
                if getattr(layer, what) != getattr(first, what):
                    raise ArgumentError(
                        f"layers: column-parallel layers that share one input must have one {what}, but it is "
                        f"{getattr(first, what)!r} in one and {getattr(layer, what)!r} in another; "
                        "call them one by one."
                    )
            layer._check_main_grad()
        first._check_input(x, first.in_features, "in_features", shard_sizes)

    first._agree(x, check)
    weights = [layer.weight.t() for layer in layers]
    biases = [layer.bias for layer in layers]
    into = [layer._main_grad_of() for layer in layers]
    if first.sequence_parallel:
        outputs = tpk.all_gather_matmul(
            x,
            weights,
            first.group_name,
            gather_dim=first.sequence_dim,
            shard_sizes=None if shard_sizes is None else list(shard_sizes),
            biases=biases,
            activation=first.activation,
            main_grad_of=into,
            path=first.path,
        )
    else:
        outputs = tpk.matmul_replicated(
            x,
            weights,
            first.group_name,
            biases=biases,
            activation=first.activation,
            main_grad_of=into,
            path=first.path,
        )
    return [
        # Every rank does the same with a gathered output, so its gradient is whole already: slice, do not sum.
        tpk.regions.all_gather(
            y, -1, layer.group_name, shard_sizes=list(layer.out_sizes), replicated_grad=True
        )
        if layer.gather_output
        else y
        for layer, y in zip(layers, outputs, strict=True)
    ]
