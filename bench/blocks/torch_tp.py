"""The plain modules of :mod:`.dense` under torch's ``parallelize_module``: eager, compiled, with async TP.

The plan is torchtitan's: norms sequence-parallel, one gather in front of q, k, v (and of gate, up), outputs of
row-parallel layers scattered along the sequence, the residual stream as plain local tensors; a language model's
embedding is row-parallel, its head column-parallel under ``loss_parallel``. Compilation is per block, as in
torchtitan; embedding, head and loss run eagerly. Autograd keeps gathered inputs for backward: more memory, one
gather less than Megatron's way.

``Styles`` says whose classes the plan is made of: torch's, or those of ``tpkernels.integrations.torch``, with
``GatherOnce`` in place of ``PrepareModuleInput`` where several layers share an input.

Async tensor parallelism (TP) is inductor's micro-pipeline pass: ``torch.ops.symm_mem.fused_*`` in the place of a
gather and its products, or of a product and its reduce-scatter. The pass looks only at groups for which
``enable_symm_mem_for_group`` was called, in torch 2.14 still, although calling it is said to be deprecated.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from ..context import Context
from . import dense
from .implementation import Implementation, parts_of
from .shapes import Layer, Size
from .weights import local

__all__ = ["Styles", "count_fused", "language_model", "layer"]

_ASYNC = {"_micro_pipeline_tp": True}


@dataclass(frozen=True)
class Styles:
    """The classes of a plan. ``together``: called with the names of layers that share their parent's input, or None."""

    column: type[ColwiseParallel] = ColwiseParallel
    row: type[RowwiseParallel] = RowwiseParallel
    sequence: type[SequenceParallel] = SequenceParallel
    together: Callable[..., ParallelStyle] | None = None

    @classmethod
    def ours(cls) -> Styles:
        """Those of ``tpkernels.integrations.torch``."""
        from tpkernels.integrations.torch import Colwise, GatherOnce, Rowwise, SequenceParallel

        return cls(Colwise, Rowwise, SequenceParallel, partial(GatherOnce, input_layouts=Shard(0)))

    def input_of(self, part: str, gated: bool) -> ParallelStyle:
        """Of an attention or an MLP."""
        names = ("q_proj", "k_proj", "v_proj") if part == "attention" else ("gate_proj", "up_proj")
        if self.together is None or (part == "mlp" and not gated):
            return _gathered_input(3 if part == "attention" else 1)
        return self.together(*names)


def _gathered_input(tensors: int) -> PrepareModuleInput:
    """Gathers the first of ``tensors`` arguments along the sequence; the others are plain tensors."""
    rest = (None,) * (tensors - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(0), *rest), desired_input_layouts=(Replicate(), *rest)
    )  # rotary tables take no part


def _plan(part: str, styles: Styles, gated: bool, before: str = "") -> dict[str, ParallelStyle]:
    """Styles below a module of ``part``, which is called ``before``."""
    if part == "attention":
        plan: dict[str, ParallelStyle] = {
            f"{before}{name}": styles.column() for name in ("q_proj", "k_proj", "v_proj")
        }
        return {**plan, f"{before}o_proj": styles.row(output_layouts=Shard(0))}
    if part == "mlp":
        plan = {f"{before}{name}": styles.column() for name in ("gate_proj", "up_proj")}
        return {**plan, f"{before}down_proj": styles.row(output_layouts=Shard(0))}
    return {
        f"{before}attention_norm": styles.sequence(sequence_dim=0),
        f"{before}attention": styles.input_of("attention", gated),
        **_plan("attention", styles, gated, f"{before}attention."),
        f"{before}mlp_norm": styles.sequence(sequence_dim=0),
        f"{before}mlp": styles.input_of("mlp", gated),
        **_plan("mlp", styles, gated, f"{before}mlp."),
    }


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle] | ParallelStyle) -> None:
    if isinstance(plan, dict):
        modules = dict(module.named_modules())
        plan = {name: style for name, style in plan.items() if name in modules}  # no gate_proj in a plain MLP
    # Every rank fills its own part afterwards: nothing to send from rank 0.
    parallelize_module(module, mesh, plan, src_data_rank=None)


def _compile(modules: Sequence[nn.Module], mode: str, group: dist.ProcessGroup) -> None:
    """``mode``: "eager" (nothing), "compiled" or "async"."""
    if mode == "eager":
        return
    if mode == "async":
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(group.group_name)
    for module in modules:
        # Options are part of the cache's key, so the two modes never share a graph.
        module.compile(fullgraph=True, dynamic=False, options=dict(_ASYNC) if mode == "async" else None)


def _complete(module: nn.Module, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients placed as their parameters are: DTensors of norms and embedding are still to be summed."""
    return [
        g.redistribute(placements=p.placements) if isinstance(g, DTensor) and isinstance(p, DTensor) else g
        for p, g in zip(module.parameters(), gradients, strict=True)
    ]


class _Wait(torch.autograd.Function):
    """Waits for the collective behind a tensor; where a compiled block waits, torch 2.14 has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return local(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _mesh(context: Context) -> tuple[dist.ProcessGroup, DeviceMesh]:
    assert context.group is not None
    return context.group, DeviceMesh.from_group(context.group, context.device.type)


def layer(
    shape: Layer, context: Context, dtype: torch.dtype, *, mode: str, styles: Styles = Styles()
) -> Implementation:
    """A layer of the layer suite; ``mode``: "eager", "compiled" or "async"."""
    group, mesh = _mesh(context)
    with torch.device("meta"):
        module = dense.build(shape).to(dtype)
    gated = shape.model.gated
    _parallelize(module, mesh, _plan(shape.part, styles, gated))
    if shape.part != "block":
        _parallelize(module, mesh, styles.input_of(shape.part, gated))
    module.to_empty(device=context.device)
    arguments = dense.rotary_of(shape.model, shape.tokens.seq, context.device) if shape.has_attention else ()
    _compile([module], mode, group)
    return Implementation(
        module,
        lambda x: module(x, *arguments),
        parts_of(module, shape.weights, context.rank, context.world),
        lambda gradients: _complete(module, gradients),
    )


def language_model(
    size: Size, context: Context, dtype: torch.dtype, *, mode: str, styles: Styles = Styles()
) -> Implementation:
    """The model of the train suite."""
    group, mesh = _mesh(context)
    with torch.device("meta"):
        module = dense.LanguageModel(size).to(dtype)
    plan: dict[str, ParallelStyle] = {
        "embed": styles.row(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": styles.sequence(sequence_dim=0),
        "head": styles.column(input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(size.model.layers):
        plan.update(_plan("block", styles, size.model.gated, f"layers.{i}."))
    _parallelize(module, mesh, plan)
    module.embed.register_forward_hook(lambda embed, arguments, out: _Wait.apply(out))
    module.to_empty(device=context.device)
    _compile(list(module.layers), mode, group)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = module(tokens)
        with loss_parallel():
            return F.cross_entropy(logits.float().flatten(0, 1), targets.t().flatten())

    def backward(value: Tensor) -> None:
        with loss_parallel():
            value.backward()

    parts = parts_of(module, size.weights, context.rank, context.world)
    return Implementation(module, loss, parts, lambda gradients: _complete(module, gradients), backward)


@contextlib.contextmanager
def count_fused(found: dict[str, Any]) -> Iterator[None]:
    """Count the fused products of async tensor parallelism that are called inside: ``found["fused_ops"]``."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    found["fused_ops"] = sum(
        event.count for event in profile.key_averages() if event.key.startswith("symm_mem::fused")
    )
