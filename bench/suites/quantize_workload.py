"""Workload of suite ``quantize``: matrices that are quantised in turn, and the check of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

import tpkernels
from tpkernels.fp8 import _formula

from ..suite import Case, Check, Runnable, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from ..context import Context

__all__ = ["QuantizeWorkload"]

_FP8 = torch.float8_e4m3fn
_UNEQUAL = 0.01  # of the bytes of a compiled graph, whose reciprocals are not correctly rounded
_CHECKED = 2  # buffer sets


class QuantizeWorkload(Workload):
    """x, or what it was quantised to."""

    def __init__(self, case: Case, context: Context) -> None:
        self.op, self.scaling = case.op, str(case.params["scaling"])
        self.power = self.scaling != "tensorwise"  # as the recipes have it
        m, k = int(case.params["m"]), int(case.params["k"])
        self.copies = context.copies(int(case.bytes))
        xs = [context.uniform(m, k, dtype=getattr(torch, case.dtype)) for _ in range(self.copies)]
        self.inputs: list[tuple[Tensor, ...]] = [(x,) for x in xs]
        if self.op == "requantize":
            self.inputs = [tuple(self._formula(x, True, False)) for x in xs]
        self.bytes, self.device = int(case.bytes), context.device

    def _formula(self, x: Tensor, plain: bool, turned: bool) -> list[Tensor]:
        return _formula.make(x, self.scaling, _FP8, self.power, None, plain, turned)

    def _by_torch(self, *given: Tensor) -> list[Tensor]:
        if self.op == "requantize":
            data, scale = given
            return _formula.turn(data, scale, self.scaling, self.power)
        return self._formula(given[0], self.op != "quantize-transposed", self.op != "quantize")

    def _by_ours(self, *given: Tensor) -> list[Tensor]:
        power = self.power
        if self.op == "requantize":
            data, scale = given
            q = tpkernels.fp8.Quantized(data, scale, self.scaling)
            made = [q.transposed(round_scales_to_power_of_2=power)]
        elif self.op == "quantize-both":
            made = [*tpkernels.fp8.quantize_both(given[0], self.scaling, round_scales_to_power_of_2=power)]
        else:
            turned = self.op == "quantize-transposed"
            options = (self.scaling, _FP8)
            made = [
                tpkernels.quantize(given[0], *options, transpose=turned, round_scales_to_power_of_2=power)
            ]
        return [t for q in made for t in (q.data, q.scale)]

    def prepare(self, variant: str) -> Runnable:
        if variant == "copy":
            return self._copy()
        run: Callable[..., list[Tensor]] = self._by_ours if variant == "ours" else self._by_torch
        if variant == "torch-compile":
            torch._dynamo.reset()  # a graph for each case, as large as it is
            run = torch.compile(self._by_torch, fullgraph=True, dynamic=False)
        outs: dict[int, list[Tensor]] = {}

        def launch(i: int) -> None:
            outs[i % self.copies] = run(*self.inputs[i % self.copies])

        def poison() -> None:
            for made in outs.values():
                for t in made:
                    t.view(torch.uint8).fill_(0xFF)

        def check() -> Check:
            worst = 0.0
            for i in list(outs)[:_CHECKED]:
                for mine, wanted in zip(outs[i], self._by_torch(*self.inputs[i]), strict=False):
                    unequal = mine.view(torch.uint8) != wanted.view(torch.uint8)
                    worst = max(worst, float(unequal.float().mean()))
            return Check(worst, _UNEQUAL if variant == "torch-compile" else 0.0)

        return Runnable(launch, self.copies, check, poison)

    def _copy(self) -> Runnable:
        half = self.bytes // 2
        sources = [
            torch.randint(0, 256, (half,), dtype=torch.uint8, device=self.device) for _ in range(self.copies)
        ]
        targets = [torch.empty_like(source) for source in sources]

        def poison() -> None:
            for target in targets:
                target.fill_(0xFF)

        def check() -> Check:
            right = all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
            return Check(0.0 if right else float("inf"), 0.0)

        return Runnable(
            lambda i: targets[i % self.copies].copy_(sources[i % self.copies]), self.copies, check, poison
        )

    def close(self) -> None:
        self.inputs.clear()
