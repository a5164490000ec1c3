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

``delay_wgrad=True`` leaves the weight's gradient out of ``backward()``, which then has less to do before it passes the
input's on; ``backward_dw()`` of the layer, or of a whole model, makes it later, one backward pass a call, the oldest
first: what zero-bubble pipeline schedules do in their gaps. ``pending_dw`` counts those that are still missing.

    PipelineStage(stage, ..., dw_builder=lambda: functools.partial(tnn.backward_dw, stage))

A sequence-parallel column layer gathers its input again in the backward pass, for its weight's gradient. With
``keep_gathered=True`` it is kept instead: world times the memory, one gather less. Where the weight is frozen nothing
of the input is kept, and nothing gathered again.

The bias of a row-parallel layer is added once, after the sum, and its gradient is complete and equal on every
rank. Nothing has to be reduced after ``backward()``. ``residual`` is added in the same epilogue, before the
one rounding. Where a weight does not require gradients its product is left out.

``column_parallel`` runs several column-parallel layers on one input with one gather. The layers stay separate
modules, so a checkpoint has the names and shapes of the plain model; a packed [gate; up] weight would have to
be cut in two interleaved parts (users of other libraries got that silently wrong).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

import tpkernels as tpk
from tpkernels.errors import ArgumentError
from tpkernels.nn import _fp8, lora
from tpkernels.nn._linear import LinearOptions, ParallelLinear
from tpkernels.nn.sharding import Placement
from tpkernels.ops._checks import check_activation
from tpkernels.ops._main_grad import Sink

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "backward_dw", "column_parallel"]

# What layers must have in common to take part in one gather.
_SHARED = (
    "in_features",
    "group_name",
    "sequence_parallel",
    "sequence_dim",
    "activation",
    "keep_gathered",
    "path",
    "recipe",
)


class ColumnParallelLinear(ParallelLinear):
    """y = activation(x W^T + b), the output features cut over the group.

    Args:
        in_features, out_features: of the whole layer.
        gather_output: return all output features on every rank. What consumes them must then do the same on
            every rank: the gradient of the gathered output is taken as complete, not summed.
        activation: None or "none", "relu", "silu", "gelu" (erf), "gelu_tanh".
        keep_gathered: keep the gathered input for the weight's gradient instead of gathering it again in the backward
            pass; needs ``sequence_parallel``.
        options: as in ``ParallelLinear``. The bias is cut as the output features are. Without sequence_parallel x is
            equal on every rank.
    Shape:
        x: [..., in_features] -> [..., out_sizes[rank]], or [..., out_features] with gather_output. Under
            sequence_parallel dimension ``sequence_dim`` grows from this rank's part to the whole sequence.
            With ``skip_bias_add`` (that, bias): [out_sizes[rank]], with gather_output gathered too.
    Raises:
        ArgumentError: a size, activation or shape that does not fit, no main_grad. GroupError: no such group.
        ShapeError, DTypeError, DeviceError: ``main_grad`` is not a float32 (for float64: float64) tensor like weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        gather_output: bool = False,
        activation: str | None = None,
        keep_gathered: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        check_activation(activation or "none")
        super().__init__(in_features, out_features, **options)
        self.gather_output = gather_output
        self.activation = None if activation == "none" else activation
        self.keep_gathered = keep_gathered
        if keep_gathered and not self.sequence_parallel:
            raise ArgumentError(
                "keep_gathered: only a layer with sequence_parallel=True gathers its input, but it is False; leave "
                "keep_gathered out."
            )
        if self.skip_bias_add and self.activation is not None:
            raise ArgumentError(
                f"skip_bias_add: the activation {activation!r} comes behind the bias, which the layer is not to add; "
                "leave activation out and apply it behind the bias."
            )

    def _placed(self) -> tuple[Placement, Placement]:
        cut = self._even(self.out_features, 0)
        self.out_sizes = cut.sizes
        return cut, cut

    def forward(self, x: Tensor, shard_sizes: Sequence[int] | None = None) -> Any:
        """See the class; ``shard_sizes``: sequence rows of every rank where they are not equal."""
        return column_parallel((self,), x, shard_sizes)[0]

    def _finished(self, y: Tensor) -> Any:
        """What ``forward`` returns for this rank's output features."""
        bias: Tensor | None = self.bias if self.skip_bias_add else None
        if self.gather_output:
            y, bias = self._whole(y), None if bias is None else self._whole(bias)
        return (y, bias) if self.skip_bias_add else y

    def _whole(self, y: Tensor) -> Tensor:
        # Every rank does the same with a gathered output, so its gradient is whole already: slice, do not sum.
        return tpk.regions.all_gather(
            y, -1, self.group_name, shard_sizes=list(self.out_sizes), replicated_grad=True
        )


class RowParallelLinear(ParallelLinear):
    """y = sum over ranks of x_r W_r^T, + b + residual, the input features cut over the group.

    Args:
        input_is_parallel: x has this rank's input features, as a column-parallel layer makes them; otherwise
            x has all of them, equal on every rank, and the layer takes its part.
        options: as in ``ParallelLinear``. sequence_parallel returns this rank's part of the sequence instead of the
            whole of it, and needs ``input_is_parallel``. The bias is [out_features], the same on every rank.
    Shape:
        x: [..., in_sizes[rank]] -> [..., out_features]; residual: the shape of the output. The output has the
            type of x, under autocast that of autocast, or that of a wider residual: the type of residual + y.
            With ``skip_bias_add`` (that, bias); under sequence_parallel the bias's gradient is summed over the ranks,
            one all-reduce of [out_features] more than where the layer adds it.
    Raises:
        As ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        input_is_parallel: bool = True,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, out_features, **options)
        if self.sequence_parallel and not input_is_parallel:
            raise ArgumentError(
                "input_is_parallel: it must be True with sequence_parallel (the input of a row-parallel layer "
                "then has the whole sequence and a part of the features), but it is False."
            )
        self.input_is_parallel = input_is_parallel

    def _placed(self) -> tuple[Placement, Placement]:
        cut = self._even(self.in_features, 1)
        self.in_sizes = cut.sizes
        return cut, self._replicated()

    def forward(
        self, x: Tensor, residual: Tensor | None = None, shard_sizes: Sequence[int] | None = None
    ) -> Any:
        """See the class; ``shard_sizes``: sequence rows that every rank gets, None: ``tpk.shard_sizes``."""
        self._agree(x, lambda: self._check_x(x, shard_sizes))
        out_dtype = _residual_dtype(x, residual)
        if not self.input_is_parallel:
            x = tpk.regions.split(x, -1, self.group_name, shard_sizes=list(self.in_sizes))
        bias = None if self.skip_bias_add else self.bias
        if self.recipe is not None:
            y = _fp8.row(self, x, bias, residual, out_dtype, shard_sizes)
            return (y, self._bias_to_add()) if self.skip_bias_add else y
        inputs, weights = [x], [self._operand(self.weight).t()]
        into: list[Sink | None] = [self._sink()]
        if lora.active(self):
            inner, outer = lora.row_factors(self, x)
            inputs.append(inner)
            weights.append(outer)
            into.append(None)
        if self.sequence_parallel:
            y = tpk.matmul_reduce_scatter(
                inputs,
                weights,
                self.group_name,
                scatter_dim=self.sequence_dim,
                shard_sizes=None if shard_sizes is None else list(shard_sizes),
                bias=bias,
                residual=residual,
                out_dtype=out_dtype,
                main_grad_of=into,
                path=self.path,
            )
        else:
            y = tpk.matmul_all_reduce(
                inputs,
                weights,
                self.group_name,
                bias=bias,
                residual=residual,
                out_dtype=out_dtype,
                main_grad_of=into,
                path=self.path,
            )
        return (y, self._bias_to_add()) if self.skip_bias_add else y

    def _check_x(self, x: Tensor, shard_sizes: Sequence[int] | None) -> None:
        features, what = self.in_features, "all input features, since input_is_parallel is False"
        if self.input_is_parallel:
            features = self.in_sizes[self.rank]
            what = f"rank {self.rank}'s share of {self.in_features} features"
        self._check_input(x, features, what, shard_sizes)

    def _bias_to_add(self) -> Tensor | None:
        """The bias as a tensor that every rank adds to its own rows: their gradients are summed."""
        if self.bias is None or not self.sequence_parallel:
            return self.bias
        return tpk.regions.copy_to_group(self.bias, self.group_name)


def _residual_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype | None:
    """The type of ``residual + y`` where it is the residual's, as for a float32 stream under autocast."""
    if residual is None or torch.promote_types(x.dtype, residual.dtype) != residual.dtype:
        return None  # the operation says what is wrong with a residual that does not fit
    return residual.dtype


def column_parallel(
    layers: Sequence[ColumnParallelLinear], x: Tensor, shard_sizes: Sequence[int] | None = None
) -> list[Any]:
    """What several column-parallel layers return for one input: one gather forward, one reduction backward.

    Args:
        layers: made alike: same in_features, group, sequence_parallel, sequence_dim, activation, keep_gathered,
            path and recipe.
        x, shard_sizes: as in ``ColumnParallelLinear``.
    Raises:
        ArgumentError: the layers differ, or x does not fit them.
    """
    if not layers:
        raise ArgumentError("layers: at least one column-parallel layer is needed, but there is none.")
    first = layers[0]
    first._agree(x, lambda: _check_together(layers, x, shard_sizes))
    if first.recipe is not None:
        outputs = _fp8.columns(layers, x, shard_sizes)
        return [layer._finished(y) for layer, y in zip(layers, outputs, strict=True)]
    adapted = any(lora.active(layer) for layer in layers)
    common: dict[str, Any] = {
        "biases": [None if layer.skip_bias_add else layer._operand(layer.bias) for layer in layers],
        "activation": None if adapted else first.activation,  # it comes behind the sum
        "main_grad_of": [layer._sink() for layer in layers],
        "path": first.path,
    }
    weights = [layer._operand(layer.weight).t() for layer in layers]
    if first.sequence_parallel:
        outputs = tpk.all_gather_matmul(
            x,
            weights,
            first.group_name,
            gather_dim=first.sequence_dim,
            shard_sizes=None if shard_sizes is None else list(shard_sizes),
            keep_gathered=first.keep_gathered,
            **common,
        )
    else:
        outputs = tpk.matmul_replicated(x, weights, first.group_name, **common)
    if adapted:
        outputs = lora.with_columns(layers, x, outputs, shard_sizes, first.activation)
    return [layer._finished(y) for layer, y in zip(layers, outputs, strict=True)]


def _check_together(
    layers: Sequence[ColumnParallelLinear], x: Tensor, shard_sizes: Sequence[int] | None
) -> None:
    first = layers[0]
    for layer in layers[1:]:
        for what in _SHARED:
            if getattr(layer, what) != getattr(first, what):
                raise ArgumentError(
                    f"layers: column-parallel layers that share one input must have one {what}, but it is "
                    f"{getattr(first, what)!r} in one and {getattr(layer, what)!r} in another; "
                    "call them one by one."
                )
    for layer in layers:
        layer._check_input(x, first.in_features, "in_features", shard_sizes)


def backward_dw(module: nn.Module) -> None:
    """``backward_dw()`` of every layer below ``module`` that has a weight gradient pending: those of one backward pass.

    The order of the layers is that of ``module.modules()``. Right where every layer has as many backward passes behind
    it, once in each, or none.

    Raises:
        ArgumentError: no layer has one pending.
    """
    layers = [m for m in module.modules() if isinstance(m, ParallelLinear) and m.pending_dw]
    if not layers:
        raise ArgumentError(
            f"backward_dw: no layer below {type(module).__name__} has a weight gradient pending; make the layers with "
            "delay_wgrad=True, and call it once after each backward()."
        )
    for layer in layers:
        layer.backward_dw()
