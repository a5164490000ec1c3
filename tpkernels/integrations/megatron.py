"""Megatron-core: its tensor-parallel layers, on our operations.

    import tpkernels.integrations.megatron as tpk_megatron

    with tpk_megatron.enable():
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size, max_sequence_length)

or, where the layer spec alone shall change, ``tpk_megatron.layer_spec(get_gpt_layer_local_spec())``.

The layers are Megatron's own classes with another forward pass: arguments, starting values, attributes of parameters,
``(output, bias)``, ``sharded_state_dict``, extra state and ``isinstance`` are those of the release that is installed.
Activations are [s, b, h]. The forward pass of the layers:

    ColumnParallelLinear      all_gather_matmul with sequence parallelism, else matmul_replicated
    RowParallelLinear         matmul_reduce_scatter with sequence parallelism, else matmul_all_reduce
    VocabParallelEmbedding    lookup, regions.reduce_scatter or regions.all_reduce

What is due after the backward pass stays due, by the same attributes: under sequence parallelism the bias of a
row-parallel layer (``bias.sequence_parallel``) has the gradient of this rank's rows, and Megatron's
``finalize_model_grads`` adds them up. ``gradient_accumulation_fusion`` adds weight gradients to ``main_grad`` in the
product, without APEX; ``delay_wgrad_compute`` leaves those of layer specs to ``backward_dw()``.

Left to Megatron's own forward pass: experts that communicate by themselves (``explicit_expert_comm``),
``disable_grad_reduce``, ``defer_embedding_wgrad_compute``, CPU offloading and ``deterministic_mode`` of embeddings.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

import tpkernels as tpk
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.integrations._swaps import Swaps
from tpkernels.nn import loss as _loss
from tpkernels.nn._checks import check_indices
from tpkernels.nn.embedding import lookup
from tpkernels.ops._delayed import DelayedGrads
from tpkernels.ops._groups import group_name_of, resolve
from tpkernels.ops._main_grad import Delayed, Sink, operand

try:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models import backends
    from megatron.core.tensor_parallel import layers as _theirs
    from megatron.core.utils import get_pg_size, get_tensor_model_parallel_group_if_none
except ImportError as error:
    raise ImportError(
        "tpkernels.integrations.megatron needs megatron-core 0.16 or newer, whose layers it extends; install it with "
        "pip install 'tpkernels[integrations]'."
    ) from error

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SpecProvider",
    "VocabParallelEmbedding",
    "enable",
    "layer_spec",
    "vocab_parallel_cross_entropy",
]


def _check_divides(argument: str, size: int, tp_group: Any, is_expert: bool = False) -> None:
    world = get_pg_size(get_tensor_model_parallel_group_if_none(tp_group, is_expert=is_expert))
    if size % world:
        raise ArgumentError(
            f"{argument}: Megatron's layers give every rank an equal part, but {argument} is {size} and there are "
            f"{world} ranks; pad it to a multiple of {world}, or take tpkernels.nn's layers, which cut unevenly."
        )


def _check_sequence(x: Tensor, dim: int, group: Any) -> None:
    if x.shape[dim] % group.size():
        raise ShapeError(
            f"input_: sequence parallelism gives every rank equally many rows, but the sequence has {x.shape[dim]} and "
            f"there are {group.size()} ranks; pad the sequence, or switch config.sequence_parallel off."
        )


class _Linear:
    """What both linear layers share."""

    def _start(self, config: Any, tp_comm_buffer_name: str | None) -> None:
        self.config = config
        self.gradient_accumulation_fusion: bool = config.gradient_accumulation_fusion
        # Megatron calls backward_dw() of layers in layer specs, which get that name from it; not of the output layer.
        self._delays = config.delay_wgrad_compute and tp_comm_buffer_name is not None
        self._delayed = DelayedGrads()

    def _left(self: Any) -> bool:
        """Whether this call is one of those that stay Megatron's."""
        offloading = getattr(self.config, "_cpu_offloading_context", None)
        return (
            self.tp_group is None
            or self.explicit_expert_comm
            or (offloading is not None and offloading.inside_context is True)
        )

    def _sink(self, weight: Tensor) -> Sink | None:
        """Where the weight's gradient goes; None: where autograd puts it."""
        if not weight.requires_grad or not torch.is_grad_enabled():
            return None
        if self._delays:
            return Delayed(weight, self.gradient_accumulation_fusion, self._delayed.put)
        return weight if self.gradient_accumulation_fusion else None

    def backward_dw(self) -> None:
        """Makes the weight gradient that the oldest backward pass left under ``config.delay_wgrad_compute``, if any."""
        if self._delayed:
            self._delayed.run()


def _made_with(config: Any, left: bool) -> Any:
    """Megatron's constructor asks for APEX where ``gradient_accumulation_fusion`` is on; ours do not need it.

    ``left``: the forward pass may be Megatron's own, which does.
    """
    if left or config.defer_embedding_wgrad_compute or config.cpu_offloading:
        return config
    config = copy.copy(config)
    config.gradient_accumulation_fusion = False
    return config


class ColumnParallelLinear(_Linear, _theirs.ColumnParallelLinear):
    """``megatron.core.tensor_parallel.ColumnParallelLinear`` on our operations; see the module.

    Shape:
        input_: [s, b, input_size], with ``config.sequence_parallel`` [s / world, b, input_size].
        Returns ``(output, bias)``: output [s, b, output_size / world], with ``gather_output`` [s, b, output_size];
        bias with ``skip_bias_add``, else None.
    Raises:
        ArgumentError: ``output_size`` does not divide by the world; no weight; ``main_grad`` is missing where
        ``config.gradient_accumulation_fusion`` is on. ShapeError: an input or weight that does not fit.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: Any = None,
        **others: Any,
    ) -> None:
        _check_divides("output_size", output_size, tp_group, is_expert)
        super().__init__(
            input_size,
            output_size,
            config=_made_with(config, is_expert or disable_grad_reduce),
            init_method=init_method,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            disable_grad_reduce=disable_grad_reduce,
            tp_group=tp_group,
            **others,
        )
        self._start(config, tp_comm_buffer_name)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See the class; ``weight`` and ``runtime_gather_output`` as in Megatron."""
        if self._left() or self.disable_grad_reduce or self.config.defer_embedding_wgrad_compute:
            out: tuple[Tensor, Tensor | None] = super().forward(input_, weight, runtime_gather_output)
            return out
        weight = self._weight(weight)
        group = group_name_of(self.tp_group)
        bias = None if self.skip_bias_add else self.bias
        into = self._sink(weight)
        weight = operand(weight, into)
        if self.sequence_parallel:
            y = tpk.all_gather_matmul(input_, weight.t(), group, biases=bias, main_grad_of=into)
        else:
            y = tpk.matmul_replicated(input_, weight.t(), group, biases=bias, main_grad_of=into)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            # What follows does the same on every rank, so the gradient is whole already: slice, do not sum.
            y = tpk.regions.all_gather(y, -1, group, replicated_grad=True)
        return y, self.bias if self.skip_bias_add else None

    def _weight(self, given: Tensor | None) -> Tensor:
        weight: Tensor | None = self.weight if given is None else given
        expected = [self.output_size_per_partition, self.input_size]
        if weight is None:
            raise ArgumentError(
                f"weight: a layer made with skip_weight_param_allocation needs the weight {expected} in every call, "
                "but it is None; pass weight=, for example that of the embedding."
            )
        if list(weight.shape) != expected:
            raise ShapeError(f"weight: expected shape {expected}, got {list(weight.shape)}.")
        return weight


class RowParallelLinear(_Linear, _theirs.RowParallelLinear):
    """``megatron.core.tensor_parallel.RowParallelLinear`` on our operations; see the module.

    Shape:
        input_: [s, b, input_size / world], or [s, b, input_size] without ``input_is_parallel``.
        Returns ``(output, bias)``: output [s, b, output_size], with ``config.sequence_parallel``
        [s / world, b, output_size]; bias with ``skip_bias_add``, else None.
    Raises:
        ArgumentError: ``input_size`` does not divide by the world; ``config.sequence_parallel`` without
        ``input_is_parallel``; ``main_grad`` is missing. ShapeError: an input that does not fit.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        **others: Any,
    ) -> None:
        _check_divides("input_size", input_size, tp_group, is_expert)
        if config.sequence_parallel and not input_is_parallel:
            raise ArgumentError(
                "input_is_parallel: it must be True where config.sequence_parallel is (the input then has the whole "
                "sequence and a part of the features), but it is False."
            )
        super().__init__(
            input_size,
            output_size,
            config=_made_with(config, is_expert),
            init_method=init_method,
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            tp_group=tp_group,
            **others,
        )
        self._start(config, tp_comm_buffer_name)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """See the class."""
        if self._left():
            out: tuple[Tensor, Tensor | None] = super().forward(input_)
            return out
        group = group_name_of(self.tp_group)
        if not self.input_is_parallel:
            input_ = tpk.regions.split(input_, -1, group)
        into = self._sink(self.weight)
        weight = operand(self.weight, into).t()
        bias = None if self.skip_bias_add else self.bias
        if self.sequence_parallel:
            _check_sequence(input_, 0, self.tp_group)
            y = tpk.matmul_reduce_scatter(input_, weight, group, main_grad_of=into)
            # Not the operation's bias, whose gradient is complete: Megatron's trainer sums that of this parameter.
            y = y if bias is None else y + bias
        else:
            y = tpk.matmul_all_reduce(input_, weight, group, bias=bias, main_grad_of=into)
        return y, self.bias if self.skip_bias_add else None


class VocabParallelEmbedding(_theirs.VocabParallelEmbedding):
    """``megatron.core.tensor_parallel.VocabParallelEmbedding`` on our collectives; see the module.

    Shape:
        input_: ids [b, s] -> [b, s, embedding_dim], with ``reduce_scatter_embeddings`` [s / world, b, embedding_dim].
    Raises:
        ArgumentError: ``num_embeddings`` does not divide by the world; an id out of range. ShapeError: s does not.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, tp_group: Any = None, **others: Any
    ) -> None:
        _check_divides("num_embeddings", num_embeddings, tp_group)
        super().__init__(num_embeddings, embedding_dim, tp_group=tp_group, **others)

    def forward(self, input_: Tensor) -> Tensor:
        """See the class."""
        if self.deterministic_mode or self.tp_group is None:
            out: Tensor = super().forward(input_)
            return out
        check_indices(input_, self.num_embeddings, "input_")
        x = lookup(input_, self.weight, self.vocab_start_index)
        group = group_name_of(self.tp_group)
        if not self.reduce_scatter_embeddings:
            return tpk.regions.all_reduce(x, group)
        _check_sequence(input_, 1, self.tp_group)
        return tpk.regions.reduce_scatter(x.transpose(0, 1), 0, group)


_IGNORED = -100  # such targets have no loss; Megatron itself knows none, and its loss mask comes later


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Megatron's ``vocab_parallel_cross_entropy``; logits are not written to.

    Args:
        vocab_parallel_logits: [s, b, vocabulary / world], not gathered.
        target: [s, b] ids of the whole vocabulary, or -100, which has no loss.
        label_smoothing: in [0, 1): that much of a target's probability goes to the other K - 1 entries of the whole
            vocabulary. Megatron 0.16.1 takes this rank's part of the vocabulary for the whole there.
        tp_group: None: Megatron's tensor-parallel group.
    Returns:
        [s, b], float32 (float64 for float64 logits), equal on every rank.
    """
    if not 0 <= label_smoothing < 1:
        raise ArgumentError(f"label_smoothing: it must be in [0, 1), but it is {label_smoothing}.")
    if tp_group is None:
        tp_group = parallel_state.get_tensor_model_parallel_group()
    group = resolve(group_name_of(tp_group))
    held = vocab_parallel_logits.shape[-1]
    sizes = [held] * group.world
    loss = _loss.vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, group.name, sizes, reduction="none", ignore_index=_IGNORED
    )
    if label_smoothing == 0:
        return loss
    whole = sum(sizes)
    # With a share a of the target's probability for the others: (1 - c) nll - c mean(log p), c = a whole / (whole - 1).
    # That is nll + c (x_target - mean(x)), since the log-sum-exp cancels; every rank has a term of the bracket.
    wide = vocab_parallel_logits.to(loss.dtype)
    local = target - held * group.rank
    mine = (local >= 0) & (local < held)
    picked = wide.gather(-1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
    bracket = tpk.regions.all_reduce(torch.where(mine, picked, 0.0) - wide.sum(-1) / whole, group.name)
    return loss + label_smoothing * whole / (whole - 1) * torch.where(target == _IGNORED, 0.0, bracket)


_OURS = {
    _theirs.ColumnParallelLinear: ColumnParallelLinear,
    _theirs.RowParallelLinear: RowParallelLinear,
    _theirs.VocabParallelEmbedding: VocabParallelEmbedding,
}


class SpecProvider(backends.LocalSpecProvider):
    """Megatron's local backend for layer specs, with our linear layers; norms and attention stay its own."""

    def column_parallel_linear(self) -> type:
        """Ours."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Ours."""
        return RowParallelLinear


def layer_spec(spec: Any) -> Any:
    """A copy of a ``ModuleSpec`` (or class, or tree of them) of Megatron's own layers, with ours in their places.

    Raises:
        ArgumentError: a linear layer of TransformerEngine, which does more than Megatron's own.
    """
    if isinstance(spec, type):
        if "Linear" in spec.__name__ and spec.__module__.startswith("megatron.core.extensions"):
            raise ArgumentError(
                f"spec: {spec.__name__} is a layer of TransformerEngine; expected a spec of Megatron's own layers, "
                "such as get_gpt_layer_local_spec(), since ours take the place of those."
            )
        return _OURS.get(spec, spec)
    if isinstance(spec, (list, tuple)):
        return type(spec)(layer_spec(part) for part in spec)
    if dataclasses.is_dataclass(spec):
        out = copy.copy(spec)
        for field in dataclasses.fields(spec):
            setattr(out, field.name, layer_spec(getattr(spec, field.name)))
        return out
    return spec


def enable() -> Swaps:
    """What Megatron builds from now on has our layers (of local layer specs, embedding, output layer) and our loss.

    Returns:
        What undoes it: ``.disable()``, or the end of a ``with`` block. Models built meanwhile keep their layers; the
        loss is looked up in every step, so keep it enabled for that.
    """
    names = ("ColumnParallelLinear", "RowParallelLinear")
    ours = globals()
    return Swaps(
        [
            *(
                (vars(tensor_parallel), name, ours[name])
                for name in (*names, "VocabParallelEmbedding", "vocab_parallel_cross_entropy")
            ),
            *((vars(backends), name, ours[name]) for name in names),
        ]
    )
