"""LoRA (Hu et al., arXiv 2106.09685) on column- and row-parallel linear layers: y + alpha / rank * (x A^T) B^T.

``add_lora_`` gives layers two parameters more, ``lora_A`` [rank, in] and ``lora_B`` [out, rank]. The layers stay what
they are: the names of their weights in a checkpoint, the gather that q, k and v share and everything around them go on
as before. A starts uniform within 1 / sqrt(in), B at zero, whatever the world (``tpkernels.nn.init``).

One factor is cut as the weight is, the other is whole on every rank, with a gradient that is complete and equal there.
What travels beside what the layer moves anyway, M rows in all, for however many layers share an input:

    layer    A, B             sequence_parallel  forward               backward
    column   whole, [out/w]   no                 none                  all-reduce of [M, rank]
    column   whole, [out/w]   yes                all-gather [M, rank]  reduce-scatter of it, all-reduce of dA
    row      [in/w], whole    both               none                  all-reduce of dB

A row-parallel layer sums ``x_r A_r^T B^T`` over the ranks in one reduction with its own product. Weight gradients of A
and B are in ``grad``; they are neither delayed nor added to ``main_grad``.

With dropout a column-parallel layer without sequence parallelism needs torch's random generators in one state on all
ranks, as its input is the same there; anywhere else every rank draws for values of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels.errors import ArgumentError
from tpkernels.nn import _fp8
from tpkernels.nn._linear import ParallelLinear
from tpkernels.nn.sharding import Shard
from tpkernels.nn.state import full_tensors, load_full_state_dict
from tpkernels.nn.weights import init_parameter_

__all__ = [
    "LoRA",
    "add_lora_",
    "load_lora_state_dict",
    "lora_state_dict",
    "merge_lora_",
    "remove_lora_",
    "unmerge_lora_",
]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class LoRA:
    """What ``layer.lora`` says of a layer's factors: ``merged`` if they are in its weight, which then stands alone."""

    rank: int
    alpha: float
    dropout: float
    seed: int
    name: str
    merged: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def check(self, layer: ParallelLinear) -> None:
        """ArgumentError where a merged layer is trained."""
        factors = (layer.lora_A, layer.lora_B)
        if (
            self.merged
            and layer.training
            and torch.is_grad_enabled()
            and any(f.requires_grad for f in factors)
        ):
            raise ArgumentError(
                f"lora: the factors of {self.name or type(layer).__name__} are merged into its weight and would get no "
                "gradient; call unmerge_lora_() before training, or eval() where no training is meant."
            )


def add_lora_(
    module: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] | None = None,
    freeze: bool = True,
    seed: int | None = None,
) -> nn.Module:
    """Adds factors to linear layers of this package below ``module``, in place, and returns ``module``.

        model = load(...)
        tnn.add_lora_(model, rank=16, alpha=32, targets=["q_proj", "v_proj"])

    Args:
        module: a model or a single layer.
        rank: 1 or more; need not divide by anything.
        alpha: the product of the factors is multiplied by alpha / rank; None: by 1.
        dropout: probability for the input of A, in training.
        targets: names of layers, or ends of them behind a dot; None: every column- and row-parallel linear layer.
        freeze: no parameter that is there now gets a gradient from now on, in all of ``module``.
        seed: of A, whose stream is named by the layer's name in ``module`` (that of a single layer by the ``name`` it
            was made with); None: that of each layer.
    Raises:
        ArgumentError: a number out of range, a target that fits no layer, a layer that has factors already; nothing
            has been changed then.
    """
    scale_by = float(rank) if alpha is None else float(alpha)
    _check_numbers(rank, scale_by, dropout)
    layers = _targeted(module, targets)
    for name, layer in layers.items():
        if layer.lora is not None:
            raise ArgumentError(
                f"module: {name or type(layer).__name__} has LoRA factors already; remove_lora_() takes them away."
            )
        if layer.recipe is not None:
            raise ArgumentError(_fp8.refused(name or layer.name or type(layer).__name__))
    if freeze:
        module.requires_grad_(False)
    for name, layer in layers.items():
        own_seed = layer.seed if seed is None else seed
        _add(layer, LoRA(rank, scale_by, float(dropout), own_seed, name or layer.name))
    return module


def _check_numbers(rank: int, alpha: float, dropout: float) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ArgumentError(f"rank: it must be an integer of 1 or more, but it is {rank!r}.")
    if not math.isfinite(alpha):
        raise ArgumentError(f"alpha: it must be a finite number, but it is {alpha}.")
    if not 0.0 <= dropout < 1.0:
        raise ArgumentError(f"dropout: it must be a probability from 0 to below 1, but it is {dropout}.")


def _linears(module: nn.Module) -> dict[str, ParallelLinear]:
    return {name: m for name, m in module.named_modules() if isinstance(m, ParallelLinear)}


def _targeted(module: nn.Module, targets: Sequence[str] | None) -> dict[str, ParallelLinear]:
    linears = _linears(module)
    if not linears:
        raise ArgumentError(
            f"module: LoRA takes ColumnParallelLinear and RowParallelLinear, and {type(module).__name__} has none."
        )
    if targets is None:
        return linears
    names = [targets] if isinstance(targets, str) else list(targets)
    for target in names:
        if not any(_fits(name, target) for name in linears):
            raise ArgumentError(
                f"targets: {target!r} is the name of no linear layer of {type(module).__name__}, which has "
                f"{', '.join(repr(name) for name in linears)}."
            )
    return {name: layer for name, layer in linears.items() if any(_fits(name, target) for target in names)}


def _fits(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _add(layer: ParallelLinear, lora: LoRA) -> None:
    cut, whole = layer.placements["weight"], layer._replicated()
    by_rows = isinstance(cut, Shard) and cut.dim == 0
    like = layer.weight
    shapes = {"lora_A": (lora.rank, layer.in_features), "lora_B": (layer.out_features, lora.rank)}
    places = {"lora_A": whole, "lora_B": cut} if by_rows else {"lora_A": cut, "lora_B": whole}
    for kind, shape in shapes.items():
        layer._add_parameter(kind, shape, places[kind], like.dtype, like.device)
        name = f"{lora.name}.{kind}" if lora.name else kind
        init_parameter_(layer.get_parameter(kind), seed=lora.seed, name=name)
    layer.lora = lora


def active(layer: ParallelLinear) -> bool:
    """Whether the factors take part in the layer's forward pass."""
    return layer.lora is not None and not layer.lora.merged


def _inner(layer: ParallelLinear, lora: LoRA, x: Tensor, a: Tensor) -> Tensor:
    """scale * x A^T."""
    if lora.dropout and layer.training:
        x = F.dropout(x, lora.dropout)
    return tpk.matmul(x, a.t(), alpha=lora.scale, path=layer.path)


def row_factors(layer: ParallelLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two more operands of a row-parallel layer's product, whose sum over the ranks is that of the factors."""
    assert layer.lora is not None
    outer = tpk.regions.copy_to_group(layer.lora_B, layer.group_name)  # its gradient has a part on each rank
    return _inner(layer, layer.lora, x, layer.lora_A), outer.t()


def with_columns(
    layers: Sequence[ParallelLinear],
    x: Tensor,
    outputs: Sequence[Tensor],
    shard_sizes: Sequence[int] | None,
    activation: str | None,
) -> list[Tensor]:
    """The outputs of column-parallel layers that share x, with the parts of those that have factors."""
    adapted = [(layer, layer.lora) for layer in layers if layer.lora is not None and not layer.lora.merged]
    ranks = [lora.rank for _, lora in adapted]
    first = layers[0]
    stacked = torch.cat([layer.lora_A for layer, _ in adapted])
    if first.sequence_parallel:  # each rank's rows give a part of its gradient
        stacked = tpk.regions.copy_to_group(stacked, first.group_name)
    factors = stacked.split(ranks)
    inner = torch.cat([_inner(*pair, x, a) for pair, a in zip(adapted, factors, strict=True)], dim=-1)
    if first.sequence_parallel:
        sizes = None if shard_sizes is None else list(shard_sizes)
        inner = tpk.regions.all_gather(inner, first.sequence_dim, first.group_name, shard_sizes=sizes)
    else:
        inner = tpk.regions.copy_to_group(inner, first.group_name)
    parts = {id(layer): h for (layer, _), h in zip(adapted, inner.split(ranks, dim=-1), strict=True)}
    made = []
    for layer, y in zip(layers, outputs, strict=True):
        if id(layer) in parts:
            outer = layer._operand(layer.lora_B).t()
            y = tpk.matmul(parts[id(layer)], outer, residual=y, out_dtype=y.dtype, path=layer.path)
        made.append(y if activation is None else _ACTIVATIONS[activation](y))
    return made


def _with_lora(module: nn.Module) -> dict[str, tuple[ParallelLinear, LoRA]]:
    found = {name: (m, m.lora) for name, m in _linears(module).items() if m.lora is not None}
    if not found:
        raise ArgumentError(
            f"module: no layer of {type(module).__name__} has LoRA factors; call add_lora_() first."
        )
    return found


def merge_lora_(module: nn.Module) -> nn.Module:
    """Adds the product of the factors to the weight of every layer that has some, rounded once; no communication.

    The layers then cost what they cost without LoRA, and their state has both: the merged weight and the factors.
    ``remove_lora_`` leaves the plain layers.

    Raises:
        ArgumentError: no layer has factors, or they are merged already.
    """
    return _merge(module, True)


def unmerge_lora_(module: nn.Module) -> nn.Module:
    """Takes it out again. The weight is what it was up to the rounding of its type, not bit for bit.

    Raises:
        ArgumentError: no layer has factors, or they are not merged.
    """
    return _merge(module, False)


@torch.no_grad()
def _merge(module: nn.Module, into: bool) -> nn.Module:
    found = _with_lora(module)
    for name, (_, lora) in found.items():
        if lora.merged is into:
            what = "merged already" if into else "not merged"
            raise ArgumentError(f"module: the LoRA factors of {name or lora.name or 'the layer'} are {what}.")
    for layer, lora in found.values():
        scale, weight = lora.scale if into else -lora.scale, layer.weight
        with torch.autocast(weight.device.type, enabled=False):
            weight.copy_(
                tpk.matmul(layer.lora_B, layer.lora_A, alpha=scale, residual=weight, path=layer.path)
            )
        layer.lora = replace(lora, merged=into)
    return module


def remove_lora_(module: nn.Module) -> nn.Module:
    """Takes the factors off every layer that has some. What they have learnt stays where ``merge_lora_`` ran before.

    What ``add_lora_`` froze stays frozen.
    """
    for layer, _ in _with_lora(module).values():
        layer.lora = None
        for kind in ("lora_A", "lora_B"):
            del layer._parameters[kind], layer.placements[kind]
    return module


def _factors(module: nn.Module) -> dict[str, Tensor]:
    before = [f"{name}." if name else "" for name in _with_lora(module)]
    own = module.state_dict(keep_vars=True)
    return {start + kind: own[start + kind] for start in before for kind in ("lora_A", "lora_B")}


def lora_state_dict(
    module: nn.Module, *, device: torch.device | str | None = None, keep: bool = True
) -> dict[str, Tensor]:
    """The factors alone, unsharded, under their names in ``module``; arguments as in ``full_state_dict``.

    Call it on all ranks of the group. Names end in ``.lora_A`` and ``.lora_B``; PEFT has
    ``base_model.model.<name>.weight`` for the same tensors.
    """
    factors = _factors(module)
    return full_tensors(factors, factors, device=device, keep=keep)


def load_lora_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies this rank's part of what ``lora_state_dict`` returned, of any world; no communication.

    Raises:
        ArgumentError: other names or shapes, among them another rank; nothing has been written then. Merged factors:
            unmerge them first.
    """
    for name, (_, lora) in _with_lora(module).items():
        if lora.merged:
            raise ArgumentError(
                f"module: the LoRA factors of {name or lora.name or 'the layer'} are merged into its weight; call "
                "unmerge_lora_() before others are loaded."
            )
    expected = _factors(module).keys()
    if expected != state.keys():
        raise ArgumentError(
            f"state: it must have the LoRA factors of the module, but {sorted(expected - state.keys()) or 'none'} are "
            f"missing and {sorted(state.keys() - expected) or 'none'} are unknown; add_lora_() with the same targets."
        )
    load_full_state_dict(module, state, strict=False)
