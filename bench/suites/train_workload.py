"""Running and judging the training steps of :mod:`.train`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from ..blocks.implementation import Implementation
from ..blocks.judge import allowed_gradient, allowed_loss, allowed_piece, worst, worst_whole
from ..blocks.peaks import data_sheet_tflops
from ..blocks.shapes import misfit, train_flops
from ..blocks.twin import batches, optimizer, train_twin
from ..blocks.variants import COMPILED, FUSING, build
from ..blocks.weights import local
from ..context import Context
from ..records import Stats
from ..suite import Case, Check, Runnable, Skip, Workload
from .train import size_of

__all__ = ["STEPS", "TrainWorkload"]

STEPS = 3  # that are compared with the twin's


class TrainWorkload(Workload):
    """A few batches, and what the twin makes of them; buffer set i is batch i.

    Raises:
        Skip: the sizes do not divide by the number of ranks.
    """

    def __init__(self, case: Case, context: Context) -> None:
        self.size, self.context = size_of(case), context
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.seed = context.options.seed
        self.compiled = False
        reason = misfit(self.size.model, self.size.tokens, context.world)
        if not reason and self.size.vocab % context.world:
            reason = f"{context.world} ranks cannot share {self.size.vocab} tokens of the vocabulary evenly"
        if reason:
            raise Skip(reason)
        self.batches = batches(self.size, STEPS, self.seed, context.device)
        self.twin = train_twin(
            self.size, self.batches, self.seed, self.dtype, context.device, context.rank, context.world
        )
        if context.cuda:
            torch.cuda.empty_cache()  # collectives allocate beside torch's cache
        self.matmul_tflops = min(context.agree(_matmul_tflops(context, self.dtype)))
        name = torch.cuda.get_device_name(context.device) if context.cuda else ""
        self.peak_tflops = data_sheet_tflops(name, case.dtype)

    def prepare(self, variant: str) -> Runnable:
        """Builds model and optimizer and runs one step, which compiles and fills the optimizer's state."""
        self.compiled |= variant in COMPILED
        implementation = build(self.size, variant, self.context, self.dtype)
        run = _Run(self, implementation)
        run.restart()
        self.context.align()
        if variant in FUSING:
            _count_fused(run)
        else:
            run.launch(0)
        return Runnable(
            launch=run.launch,
            copies=STEPS,
            check=run.check,
            poison=run.restart,
            graph=False,
            extra=implementation.extra,
            finish=self.finish,
        )

    def finish(self, us: Stats) -> Mapping[str, float]:
        """Speed of a step that takes ``us``, one of many in a row."""
        tflops = train_flops(self.size, self.context.world) / us.p50 * 1e-6
        peak = self.peak_tflops or self.matmul_tflops
        return {
            "tokens_per_s": self.size.tokens.count / us.p50 * 1e6,
            "mfu": tflops / peak,
            "peak_tflops": peak,
            "mfu_of_matmul": tflops / self.matmul_tflops,
            "matmul_tflops": self.matmul_tflops,
        }

    def close(self) -> None:
        """Forget compiled graphs: torch counts those of all models against one limit."""
        if self.compiled:
            torch.compiler.reset()


class _Run:
    """One variant in training."""

    def __init__(self, workload: TrainWorkload, implementation: Implementation) -> None:
        self.workload, self.implementation = workload, implementation
        self.parameters = list(implementation.module.parameters())
        self.adamw = optimizer(implementation.module, workload.size)
        self.losses = torch.zeros(STEPS, device=workload.context.device)

    def gradients(self, i: int) -> Tensor:
        """Forward and backward of batch ``i``; complete gradients are in the parameters. Returns the loss."""
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.implementation.run(*self.workload.batches[i])
        self.implementation.backward(loss)
        found = [p.grad for p in self.parameters]
        for parameter, gradient in zip(
            self.parameters, self.implementation.complete(_all(found)), strict=True
        ):
            parameter.grad = gradient
        return local(loss.detach())

    def launch(self, i: int) -> None:
        self.losses[i].copy_(self.gradients(i))
        self.adamw.step()

    @torch.no_grad()
    def restart(self) -> None:
        """Back to the start: weights, optimizer; no losses."""
        self.implementation.draw_(self.workload.seed)
        for state in self.adamw.state.values():
            for value in state.values():
                value.zero_()
        self.losses.fill_(float("nan"))

    def check(self) -> Check:
        """Of the losses that the last steps left and of a first gradient: what comes nearest to its limit."""
        w = self.workload
        extra = self.implementation.extra
        loss_error = float(((self.losses - w.twin.losses) / w.twin.losses).abs().max())
        self.restart()
        self.gradients(0)
        pairs = {
            part.name: (part.of(_all([self.parameters[part.index].grad])[0]), values, rows)
            for part in self.implementation.parts
            for rows, values in (w.twin.gradients[part.name],)
        }
        whole_error, extra["largest_error"] = worst_whole(pairs)
        piece_error, extra["largest_piece_error"] = worst(pairs)
        extra |= {"loss_error": loss_error, "gradient_error": whole_error, "piece_error": piece_error}
        sizes = (w.dtype, w.context.world, w.size.model.layers)
        checks = (
            # max() would keep a number and drop a nan.
            Check(math.inf if math.isnan(loss_error) else loss_error, allowed_loss(w.dtype)),
            Check(whole_error, allowed_gradient(*sizes)),
            Check(piece_error, allowed_piece(*sizes)),
        )
        return max(checks, key=lambda check: check.error / check.tolerance)


def _all(gradients: list[Tensor | None]) -> list[Tensor]:
    """The same list, every parameter having a gradient."""
    assert all(g is not None for g in gradients)
    return [g for g in gradients if g is not None]


def _count_fused(run: _Run) -> None:
    """Runs a step, compiling it, and another that counts the fused products.

    Raises:
        Skip: there were none; it would be another variant under this name.
    """
    from ..blocks.torch_tp import count_fused

    run.launch(0)
    with count_fused(run.implementation.extra):
        run.launch(0)
    if not run.implementation.extra["fused_ops"]:
        raise Skip("torch.compile fused no collective with a product here: the same as torch-tp-compiled")


def _matmul_tflops(context: Context, dtype: torch.dtype) -> float:
    """Rate of a large torch.mm on this rank's device."""
    n, calls = (8192, 20) if context.cuda else (256, 5)
    a, b = (context.uniform(n, n, dtype=dtype) for _ in range(2))
    for _ in range(calls // 2):
        a @ b
    context.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        a @ b
    context.synchronize()
    return 2.0 * n**3 * calls / (time.perf_counter() - start) * 1e-12
