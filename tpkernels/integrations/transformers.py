"""transformers: the styles of its tensor-parallel plans (``tp_plan``), on our operations.

    import tpkernels.integrations.transformers as tpk_transformers

    tpk_transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=2))

Parameters stay what transformers makes of them, DTensors cut by its own styles, so loading, saving, FSDP and optimizers
see no difference. What changes is the forward pass of ``nn.Linear`` and ``nn.Embedding``: the local shards go to

    column, packed column                    matmul_replicated     backward: one GEMM + all-reduce
    column, output gathered                  the same, then regions.all_gather
    row, row with an input that is not cut   matmul_all_reduce
    embedding, cut along the vocabulary      lookup, regions.all_reduce

Styles without a matrix product that we could run (``LEFT``), and modules that are neither of the two classes exactly
(quantized layers, experts, scaled embeddings), remain transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.integrations._swaps import Swap, Swaps
from tpkernels.nn._checks import check_indices
from tpkernels.nn.embedding import lookup
from tpkernels.ops._groups import Group, group_name_of, resolve

_NEEDS = (
    "tpkernels.integrations.transformers needs transformers 5.22 or newer, whose plans it knows, but there is {}; "
    "pip install 'tpkernels[integrations]'."
)

try:
    import transformers
    from transformers.distributed import mixin as _mixin
    from transformers.distributed import tensor_parallel as _theirs
except ImportError as error:
    raise ImportError(_NEEDS.format("none, or a much older one")) from error
if tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 22):
    raise ImportError(_NEEDS.format(transformers.__version__))

__all__ = ["LEFT", "STYLES", "enable"]

# Every name that plans of transformers have used for a style of ours -> the name under which we know it. The names on
# the right, and those of LEFT, are of releases 5.22 to 5.24.
STYLES: dict[str, str] = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "colwise_allgather": "colwise_gather_output",
    "rowwise": "rowwise",
    "rowwise_allreduce": "rowwise",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "packed_colwise": "packed_colwise",
    "embedding_rowwise": "embedding_rowwise",
}

# Styles that we leave to transformers -> why.
LEFT: dict[str, str] = {
    "sequence_parallel": "it is for norms, which have no matrix product; 5.24 has no plan that uses it",
    "replicate": "it computes nothing",
    "replicated_with_grad_allreduce": "it is for norms, which have no matrix product",
    "embedding_colwise": "it has no matrix product, and its gather is of features",
    "packed_rowwise": "it only cuts parameters, for a module that multiplies by itself",
    "mla_kv_a_proj": "the module is replicated",
    "all_reduce": "it has no matrix product",
    "local_params": "the module multiplies by itself",
    "moe_tp_experts": "experts multiply by themselves",
    "moe_identity_expert": "it has no matrix product",
    "grouped_gemm": "experts multiply by themselves",
    "ep_dispatch_experts": "experts multiply by themselves",
    "ep_router": "routers have no part in tensor parallelism",  # not in 5.24, as the next two
    "megamoe_experts": "experts multiply by themselves",
    "megamoe_router": "routers have no part in tensor parallelism",
}


def enable(styles: Iterable[str] | None = None) -> Swaps:
    """Models that transformers makes parallel from now on run on our operations.

    Args:
        styles: names to take over, None: all of ``STYLES``. Names that the installed release does not have are added
            to it, so that plans written for another release work too.
    Returns:
        What undoes it: ``.disable()``, or the end of a ``with`` block. Models made meanwhile keep our operations.
    Raises:
        ArgumentError: a name that we do not know, or that we leave to transformers.
    """
    names = list(STYLES) if styles is None else [styles] if isinstance(styles, str) else list(styles)
    for name in names:
        if name not in STYLES:
            why = f" ({LEFT[name]})" if name in LEFT else ""
            left = "left to transformers" if name in LEFT else "unknown"
            raise ArgumentError(
                f"styles: {name!r} is {left}{why}; expected some of {', '.join(sorted(STYLES))}."
            )
    return Swaps([*map(_style_swap, names), (vars(_mixin), "apply_tensor_parallelism", _apply_checked)])


def _style_swap(name: str) -> Swap:
    registry = _theirs.ALL_PARALLEL_STYLES
    theirs = registry[name] if name in registry else registry[STYLES[name]]
    ours = theirs if isinstance(theirs, _Style) else _Style(theirs, STYLES[name])
    return registry, name, ours


class _Style:
    """A style of transformers whose modules run on our operations where they can; all else is the style's own."""

    def __init__(self, theirs: Any, name: str) -> None:
        self.theirs = theirs
        self.name = name
        self.module_class, self.forward = _FORWARDS[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["theirs"], name)

    def shard_param(self, module: nn.Module, name: str, mesh: Any) -> None:
        """Cuts one parameter as transformers does, but the bias of a packed layer as its weight."""
        if self.name == "packed_colwise" and type(module) is nn.Linear:
            _shard_packed(module, name, mesh, self.theirs.split_factor)
        else:
            self.theirs.shard_param(module, name, mesh)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Replaces ``module.forward`` as transformers does."""
        self.theirs.install_forward(module, mesh)
        if type(module) is self.module_class:
            group = resolve(group_name_of(mesh if mesh.ndim == 1 else mesh["tp"]))
            module.forward = partial(_run, module, self.forward, group, module.forward)
        return module


Forward: TypeAlias = Callable[[Any, Tensor, Group], Tensor]


def _run(
    module: nn.Module, ours: Forward, group: Group, theirs: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Ours for one plain tensor and parameters that torch can multiply, theirs otherwise."""
    plain = len(args) == 1 and not kwargs and not isinstance(args[0], DTensor)
    if not plain or getattr(module, "_hf_quantized_needs_local_tp", False):
        return theirs(*args, **kwargs)
    return ours(module, args[0], group)


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _column(module: Any, x: Tensor, group: Group) -> Tensor:
    weight: Any = _local(module.weight)
    out: Tensor = tpk.matmul_replicated(x, weight.t(), group.name, biases=_local(module.bias))
    return out


def _column_gathered(module: Any, x: Tensor, group: Group) -> Tensor:
    sizes = tpk.shard_sizes(module.out_features, group.world)
    # Every rank goes on with the same logits, so their gradient is whole already.
    return tpk.regions.all_gather(
        _column(module, x, group), -1, group.name, shard_sizes=sizes, replicated_grad=True
    )


def _row(module: Any, x: Tensor, group: Group) -> Tensor:
    weight: Any = _local(module.weight)
    return tpk.matmul_all_reduce(x, weight.t(), group.name, bias=_local(module.bias))


def _row_split(module: Any, x: Tensor, group: Group) -> Tensor:
    sizes = tpk.shard_sizes(module.in_features, group.world)
    return _row(module, tpk.regions.split(x, -1, group.name, shard_sizes=sizes), group)


def _embedding(module: nn.Embedding, ids: Tensor, group: Group) -> Tensor:
    check_indices(ids, module.num_embeddings, "input_ids")
    weight: Any = _local(module.weight)
    start = sum(tpk.shard_sizes(module.num_embeddings, group.world)[: group.rank])
    return tpk.regions.all_reduce(lookup(ids, weight, start, module.padding_idx), group.name)


_FORWARDS: dict[str, tuple[type[nn.Module], Forward]] = {
    "colwise": (nn.Linear, _column),
    "packed_colwise": (nn.Linear, _column),
    "colwise_gather_output": (nn.Linear, _column_gathered),
    "rowwise": (nn.Linear, _row),
    "rowwise_split_input": (nn.Linear, _row_split),
    "embedding_rowwise": (nn.Embedding, _embedding),
}


def _shard_packed(module: nn.Linear, name: str, mesh: Any, parts: int) -> None:
    """Rank r gets its rows of each of the ``parts`` matrices (gate, up) that lie in the weight above each other."""
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    if module.out_features % (parts * mesh.size()):
        raise ShapeError(
            f"packed_colwise: {parts} matrices packed in one weight are cut into equal parts, so out_features must be "
            f"a multiple of {parts} x {mesh.size()} ranks, but it is {module.out_features}; take another tp_size, or "
            'the style "colwise_gather_output" for it and "rowwise_split_input" for the layer behind it.'
        )
    placement = _theirs._StridedShard(dim=0, split_factor=parts)
    module._parameters[name] = nn.Parameter(
        _theirs.distribute_tensor(parameter, mesh, [placement], src_data_rank=None),
        requires_grad=parameter.requires_grad,
    )


_apply = _theirs.apply_tensor_parallelism


def _apply_checked(model: Any, mesh: Any, plan: dict[str, str]) -> Any:
    """``apply_tensor_parallelism``, which itself does not look whether heads are cut in two."""
    world = mesh.size()
    config = model.config.get_text_config()
    for key, module in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        heads = getattr(config, key, None)
        cut = any(rule.endswith(f".{module}") and STYLES.get(s) == "colwise" for rule, s in plan.items())
        if cut and isinstance(heads, int) and heads % world:
            raise ArgumentError(
                f"tp_size: every rank gets whole heads, but {type(config).__name__}.{key} is {heads} and there are "
                f"{world} ranks; take a tp_size that divides {heads}."
            )
    return _apply(model, mesh, plan)
