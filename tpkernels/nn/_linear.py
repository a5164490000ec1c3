"""What column- and row-parallel linear layers share: options, checks and where the weight's gradient goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.fp8.recipe import RecipeLike
from tpkernels.nn import _fp8
from tpkernels.nn._checks import check_counts_from_front
from tpkernels.nn._options import LayerOptions
from tpkernels.nn.sharding import GroupLike, ParallelModule, Placement, placement_of
from tpkernels.nn.weights import init_parameter_
from tpkernels.ops._delayed import DelayedGrads
from tpkernels.ops._main_grad import Delayed, Sink, operand
from tpkernels.ops._main_grad import checked as checked_main_grad

if TYPE_CHECKING:
    from tpkernels.nn.lora import LoRA

__all__ = ["LinearOptions", "ParallelLinear"]


class LinearOptions(LayerOptions, total=False):
    """Keyword arguments of both layers; ``ParallelLinear`` has what they are when left out."""

    bias: bool
    skip_bias_add: bool


class ParallelLinear(ParallelModule):
    """A linear layer whose weight is cut over the group, without the product. Use one of its subclasses.

    Args:
        in_features, out_features: of the whole layer.
        group: ``ProcessGroup``, one-dimensional ``DeviceMesh``, group name, or None for the default group.
        bias: whether there is one.
        skip_bias_add: do not add it; ``forward`` returns ``(y, bias)``, the bias (None without one) made to be added to
            this y or to what the same rank makes of it row by row, so that its gradient is complete. Every rank must
            use it, or none.
        sequence_parallel, sequence_dim: the tensor in front of a column-parallel layer and behind a row-parallel one
            is cut along this dimension: 0 for [S, B, H], 1 for [B, S, H].
        seed, init_std, name: starting values, see ``tpkernels.nn.weights``.
        dtype, device: of the parameters; ``device="meta"`` leaves them unfilled.
        path: path of the operation.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad``, which must be there by the
            first forward pass. None: where it is there. False: never, ``weight.grad`` gets it.
        delay_wgrad: leave the weight's gradient to ``backward_dw()``. The attribute may be changed at any time; it
            holds for the forward passes that follow.
        recipe: make the products in FP8: "tensorwise", "rowwise", "blockwise" or a ``tpkernels.Fp8Recipe``. The
            parameters stay what they are, and so does the state dict. None: in the parameters' dtype.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora: LoRA | None = None
    lora_A: nn.Parameter  # there where ``lora`` is
    lora_B: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: GroupLike = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        seed: int = 0,
        init_std: float | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        path: str = "auto",
        gradient_accumulation_fusion: bool | None = None,
        delay_wgrad: bool = False,
        recipe: RecipeLike | None = None,
    ) -> None:
        super().__init__(group, path)
        self.recipe = _fp8.checked_recipe(recipe, dtype, delay_wgrad)
        for argument, value in (("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                raise ArgumentError(f"{argument}: a linear layer needs at least 1, but it is {value}.")
        check_counts_from_front(sequence_dim)
        self.in_features = in_features
        self.out_features = out_features
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.seed = seed
        self.init_std = init_std
        self.name = name
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.delay_wgrad = delay_wgrad
        self._delayed = DelayedGrads()
        weight_lies, bias_lies = self._placed()
        self._add_parameter("weight", (out_features, in_features), weight_lies, dtype, device)
        if bias:
            self._add_parameter("bias", (out_features,), bias_lies, dtype, device)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _placed(self) -> tuple[Placement, Placement]:
        """Where weight and bias lie."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws the weight (and LoRA's factors) again from (seed, name), zeroes the bias: ``tpkernels.nn.weights``."""
        for kind, parameter in self._parameters.items():
            if parameter is not None:
                own = self.lora if self.lora is not None and kind.startswith("lora_") else self
                full_name = f"{own.name}.{kind}" if own.name else kind
                init_parameter_(parameter, seed=own.seed, name=full_name, std=self.init_std)

    @property
    def pending_dw(self) -> int:
        """Backward passes whose weight gradient is still missing: must be 0 when the optimizer steps."""
        return len(self._delayed)

    def backward_dw(self) -> None:
        """Makes the weight gradient of the oldest backward pass that left it (``delay_wgrad``), and adds it to
        ``weight.grad`` or ``weight.main_grad``.

        Once for each backward pass, in any place behind it, on the same stream; no communication. Until then the
        operands are held: the input (all of the sequence) and the gradient of the output. The bias has its gradient
        from ``backward()`` already.

        Raises:
            ArgumentError: nothing is pending, or an operand was written to since.
        """
        if not self._delayed:
            raise ArgumentError(
                f"backward_dw: {self._label()} has no weight gradient pending; {self._why_none()}."
            )
        self._run_delayed()

    def _run_delayed(self) -> None:
        self._delayed.run()

    def _label(self) -> str:
        return f"{type(self).__name__} {self.name!r}" if self.name else type(self).__name__

    def _why_none(self) -> str:
        if not self.delay_wgrad:
            return "it has delay_wgrad=False, and backward() has made it"
        if not self.weight.requires_grad:
            return "its weight is frozen"
        return "call backward_dw() once after each backward(), and look at pending_dw"

    def _operand(self, parameter: Any) -> Any:
        """The parameter as products use it: with what its gradient needs besides."""
        return operand(parameter, self._sink()) if parameter is self.weight else parameter

    def _sink(self) -> Sink | None:
        """Where the weight's gradient goes; None: where autograd puts it."""
        fuse = self.gradient_accumulation_fusion
        if fuse is None:
            fuse = getattr(self.weight, "main_grad", None) is not None
        if not self.weight.requires_grad or not torch.is_grad_enabled():
            return None
        if self.delay_wgrad:
            return Delayed(self.weight, fuse, self._delayed.put)
        return self.weight if fuse else None

    def _check_delay(self) -> None:
        if not self.delay_wgrad or not torch.is_grad_enabled():
            return
        # What torch's compiler asks, too.
        self._delayed.alone = DistributedDataParallel._get_active_ddp_module() is not None
        self._delayed.check_alone()
        if placement_of(self.weight) is None:
            raise ArgumentError(
                f"delay_wgrad: the weight of {self._label()} is a tensor that something else has put in the place of "
                "the layer's parameter, as fully_shard does, which reduces gradients at the end of backward(), before "
                "backward_dw() makes this one; set delay_wgrad = False, or use DistributedDataParallel."
            )

    def _check_main_grad(self) -> None:
        sink = self._sink()
        if isinstance(sink, Tensor) or (sink is not None and sink.fused):
            checked_main_grad(self.weight)

    def _check_shard_sizes(self, shard_sizes: Sequence[int] | None) -> None:
        if shard_sizes is not None and not self.sequence_parallel:
            raise ArgumentError(
                f"shard_sizes: {type(self).__name__} was made without sequence_parallel, so its tensors are not "
                f"cut along the sequence; leave shard_sizes out (it is {list(shard_sizes)})."
            )

    def _check_input(self, x: Tensor, features: int, what: str, shard_sizes: Sequence[int] | None) -> None:
        """All that is said of x and shard_sizes in the layer's terms, before the operation checks them in its own."""
        self._check_shard_sizes(shard_sizes)
        self._check_delay()
        self._check_main_grad()
        _fp8.check_call(self)
        if self.lora is not None:
            self.lora.check(self)
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
        if self.recipe is not None:
            text += f", FP8: {self.recipe}"
        if self.lora is not None:
            text += f", {self.lora}"
        return f"{text}, {self._group_repr()}"
