"""Running and judging the layers of :mod:`.layer`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..blocks.implementation import Implementation
from ..blocks.judge import allowed, worst
from ..blocks.on_grids import count_traffic
from ..blocks.reference import inputs, layer_reference
from ..blocks.shapes import INPUTS, misfit
from ..blocks.variants import COMPILED, FUSING, build
from ..blocks.weights import local
from ..context import Context
from ..records import Stats
from ..suite import Case, Check, Runnable, Skip, Workload
from .layer import layer_of

__all__ = ["LayerWorkload"]


class LayerWorkload(Workload):
    """One layer on ``INPUTS`` different batches in turn, each with its own right results.

    A call that takes what an earlier one left in a buffer therefore gives wrong results, in the first check at
    least: until then only the first batch has been seen.

    Raises:
        Skip: the sizes do not divide by the number of ranks.
    """

    def __init__(self, case: Case, context: Context) -> None:
        self.layer, self.context = layer_of(case), context
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.seed = context.options.seed
        self.compiled = False
        reason = misfit(self.layer.model, self.layer.tokens, context.world)
        if reason:
            raise Skip(reason)
        rank, world = context.rank, context.world
        shape, seed, dtype, device = self.layer, self.seed, self.dtype, context.device
        self.references = [
            layer_reference(shape, seed, dtype, device, rank, world, which) for which in range(INPUTS)
        ]
        if context.cuda:
            torch.cuda.empty_cache()  # collectives allocate beside torch's cache
        matrices = sum(a * b for a, b in (s for s in self.layer.weights.values() if len(s) == 2))
        tokens = shape.tokens.count * shape.model.hidden // world
        # Weights are shared by all sets, as they are by the calls of a training run.
        self.copies = context.copies(
            self.dtype.itemsize * (2 * matrices // world + 4 * tokens), at_least=INPUTS
        )

    def sets(self, implementation: Implementation) -> list[tuple[Tensor, Tensor]]:
        """x and the gradient of y, as this rank is given them, of every buffer set."""
        rank, world = self.context.rank, self.context.world
        batches = [
            [
                implementation.given(t, rank, world)
                for t in inputs(self.layer, self.seed, self.dtype, self.context.device, which)
            ]
            for which in range(INPUTS)
        ]
        if self.context.cuda:
            torch.cuda.empty_cache()
        return [
            (x.clone().requires_grad_(), dy.clone())
            for x, dy in (batches[i % INPUTS] for i in range(self.copies))
        ]

    def prepare(self, variant: str) -> Runnable:
        """Builds the layer and runs it once in every mode that will be timed, so that compilation is over."""
        self.compiled |= variant in COMPILED
        implementation = build(self.layer, variant, self.context, self.dtype)
        implementation.draw_(self.seed)
        calls = _Calls(self, implementation)
        self.context.align()
        calls.launch(0)
        calls.forward(0)
        if variant in FUSING:
            _count_fused(calls)
        count_traffic(implementation, lambda: calls.launch(0))
        return Runnable(
            launch=calls.launch,
            copies=self.copies,
            check=calls.check,
            poison=calls.poison,
            parts={"forward": calls.forward},
            extra=calls.implementation.extra,
            finish=calls.finish,
        )

    def close(self) -> None:
        """Forget compiled graphs: torch counts those of all layers against one limit."""
        if self.compiled:
            torch.compiler.reset()


class _Calls:
    """The functions of a runnable."""

    def __init__(self, workload: LayerWorkload, implementation: Implementation) -> None:
        self.workload = workload
        self.implementation = implementation
        self.parameters = list(implementation.module.parameters())
        self.sets = workload.sets(implementation)
        self.results: list[list[Tensor] | None] = [
            None
        ] * workload.copies  # y, dx, gradients of the parameters

    def launch(self, i: int) -> None:
        x, dy = self.sets[i]
        y = self.implementation.run(x)
        dx, *gradients = torch.autograd.grad(y, (x, *self.parameters), dy)
        # Kept until the next call on this set has its own: the memory of a call includes its results.
        self.results[i] = [local(t) for t in (y.detach(), dx, *self.implementation.complete(gradients))]

    @torch.no_grad()
    def forward(self, i: int) -> None:
        local(self.implementation.run(self.sets[i][0]))

    def poison(self) -> None:
        for tensors in self.results:
            for tensor in tensors or ():
                tensor.fill_(float("nan"))

    def check(self) -> Check:
        found: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        for i, tensors in enumerate(self.results):
            if tensors is None:
                continue
            y, dx, gradients = self.implementation.judged(tensors[0], tensors[1], tensors[2:])
            reference = self.workload.references[i % INPUTS]
            found[f"{i} y"] = (y, reference.y, None)
            found[f"{i} dx"] = (dx, reference.dx, None)
            for part in self.implementation.parts:
                rows, want = reference.weights[part.name]
                found[f"{i} gradient of {part.name}"] = (gradients[part.name], want, rows)
        error, name = worst(found)
        self.implementation.extra["largest_error"] = name.partition(" ")[2]
        return Check(error, allowed(self.workload.dtype, self.workload.context.world))

    def finish(self, us: Stats) -> Mapping[str, float]:
        forward = self.implementation.extra.get("forward_us")
        return {} if forward is None else {"backward_us": us.p50 - forward}


def _count_fused(calls: _Calls) -> None:
    """Says in the row how many fused products ran; none would be another variant under this name.

    Raises:
        Skip: there were none.
    """
    from ..blocks.torch_tp import count_fused

    extra = calls.implementation.extra
    with count_fused(extra):
        calls.launch(0)
    if not extra["fused_ops"]:
        raise Skip("torch.compile fused no collective with a product here: the same as torch-tp-compiled")
