"""FP8 products, as tuning sees them. The Hopper kernel alone has plans to choose from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.fp8 import _product
from tpkernels.fp8._product import Layout
from tpkernels.ops import _plans
from tpkernels.ops._paths import Choice
from tpkernels.tune.calls import Operands, Run


class ScaledCase(NamedTuple):
    """``copied``: which operands have to be copied so that TMA and cuBLAS load them, such as "a" or "ab"."""

    layout: Layout
    copied: str
    bias: bool

    @property
    def key(self) -> str:
        at = self.layout
        a, b, out = (str(x).removeprefix("torch.float8_").removeprefix("torch.") for x in self._dtypes)
        rest = [name for name, there in (("fast", at.fast_accumulation), ("bias", self.bias)) if there]
        rest += [f"copied {self.copied}"] if self.copied else []
        scales = f"{at.a_scaling}x{at.b_scaling}"
        return f"scaled {at.m}x{at.n}x{at.k} {a}x{b}>{out} {scales} {' '.join(rest) or 'plain'}"

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        return self.layout.a_dtype, self.layout.b_dtype, self.layout.out_dtype

    @property
    def is_empty(self) -> bool:
        return 0 in (self.layout.m, self.layout.n, self.layout.k)

    def machine(self, device: torch.device) -> _plans.Machine:
        found = _plans.machine_of(device.type, device)
        if found.architecture != "sm90":
            return found
        blocks = "128" in self.layout.a_scaling + self.layout.b_scaling
        kind = "-blocks" if blocks else "-fast" if self.layout.fast_accumulation else ""
        return found._replace(architecture=f"sm90-fp8{kind}")

    @property
    def product(self) -> _plans.Product:
        k = -(-self.layout.k // _product.ALIGNMENT) * _product.ALIGNMENT  # operands are padded
        return _plans.Product(1, self.layout.m, self.layout.n, k, finishes=self.bias)


class ScaledCall(NamedTuple):
    """a [M, K] by b [K, N] with their scales."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accumulation: bool

    @property
    def device(self) -> torch.device:
        return self.a.device

    def case(self, device: str = "") -> ScaledCase:
        layout = _product.layout_of(
            self.a, self.b, self.scale_a, self.scale_b, self.out_dtype, self.fast_accumulation
        )
        rows = self.a.reshape(layout.m, layout.k)
        copied = "a" * (not _product.is_loadable(rows)) + "b" * (not _product.is_loadable(self.b.t()))
        return ScaledCase(layout, copied, self.bias is not None)

    def name(self) -> tuple[object, ...]:
        # No short cut: the case is made from a few comparisons.
        return ("scaled", self.a.device, self.case())

    def operands(self) -> Operands:
        return [self.a, self.b, self.scale_a, self.scale_b, self.bias]

    def runner(self) -> Run:
        def run(choice: Choice, operands: Operands) -> object:
            a, b, scale_a, scale_b, bias = operands
            assert a is not None and b is not None and scale_a is not None and scale_b is not None
            return _product.run(choice, a, b, scale_a, scale_b, bias, self.out_dtype, self.fast_accumulation)

        return run
