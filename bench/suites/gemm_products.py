"""Workloads of the gemm suite that are one product: with each schedule and tile, and with each layout of operands."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..suite import Case, Check, Runnable, Skip, Workload
from .gemm_planner import Planner
from .gemm_shapes import BLAS_LAYOUTS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..context import Context

__all__ = ["COPIES", "FP8", "GemmWorkload", "LayoutsWorkload", "Product", "aligned", "judge", "operands"]

FP8 = "cublaslt-fp8"
COPIES = 2  # buffer sets at least
_CHECKED = 6  # of the buffer sets, each time
_ALIGNMENT = 8  # elements of 16 bits in the 16 bytes that TMA wants rows to begin at


@dataclass
class Product:
    """One buffer set: out [M, N] = a [M, K] @ b [K, N]."""

    a: Tensor
    b: Tensor
    out: Tensor


def operands(
    context: Context, m: int, n: int, k: int, dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor]:
    """a [M, K] and b [K, N] with the strides of a layout (see :mod:`.gemm_shapes`)."""
    uniform, pad = context.uniform, int(layout == "padded")
    a = uniform(k, m, dtype=dtype).t() if layout in ("wgrad", "columns") else uniform(m, k + pad, dtype=dtype)
    if layout in ("forward", "padded", "columns"):
        b = uniform(n, k + pad, dtype=dtype)[:, :k].t()
    else:
        b = uniform(k, n, dtype=dtype)
    return a[:, :k], b


def aligned(m: int, n: int, k: int, layout: str) -> bool:
    """Whether rows of both operands begin at multiples of 16 bytes, for elements of 16 bits."""
    rows_of_a = m if layout in ("wgrad", "columns") else k
    rows_of_b = n if layout in ("wgrad", "dgrad") else k
    return layout != "padded" and rows_of_a % _ALIGNMENT == 0 and rows_of_b % _ALIGNMENT == 0


def judge(sets: Sequence[Any], error: Callable[[Any], float], tolerance: float) -> Check:
    """The worst of some of the buffer sets, others each time."""
    return Check(max(error(p) for p in random.sample(list(sets), min(_CHECKED, len(sets)))), tolerance)


class GemmWorkload(Workload):
    """Operands and outputs of one case. The variants share the outputs: each is poisoned, run and checked by itself."""

    def __init__(self, case: Case, context: Context) -> None:
        import torch

        self.context = context
        self.m, self.n, self.k = (int(case.params[name]) for name in "mnk")
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.layout = str(case.params["layout"])
        self.planner = self._planner(self.layout)
        self.copies = context.copies(int(case.bytes), at_least=COPIES)
        self.products = [self._product(self.layout) for _ in range(self.copies)]

    def prepare(self, variant: str) -> Runnable:
        import torch

        if variant in ("cublas", "blas"):
            return self._runnable(lambda p: torch.mm(p.a, p.b, out=p.out))
        return self._fp8() if variant == FP8 else self._streamk(variant)

    def close(self) -> None:
        self.products.clear()

    def _planner(self, layout: str) -> Planner:
        device, size = self.context.device, (self.m, self.n, self.k)
        return Planner.of(*size, device, aligned=aligned(*size, layout))

    def _product(self, layout: str) -> Product:
        import torch

        a, b = operands(self.context, self.m, self.n, self.k, self.dtype, layout)
        return Product(a, b, torch.empty(self.m, self.n, dtype=self.dtype, device=self.context.device))

    def _runnable(
        self,
        run: Callable[[Product], object],
        *,
        products: Sequence[Product] | None = None,
        tolerance: float = 0.0,
        extra: dict[str, Any] | None = None,
    ) -> Runnable:
        """``run`` on every buffer set (``products``: with other operands). ``tolerance``: beside the output dtype's."""
        from .. import checks

        sets = self.products if products is None else products
        copies = len(sets)

        def launch(i: int) -> None:
            run(sets[i % copies])

        def poison() -> None:
            for p in sets:
                p.out.fill_(float("nan"))

        def error(p: Product) -> float:
            # fp8 converts exactly, but cannot be indexed.
            a, b = (x.to(self.dtype) for x in (p.a, p.b))
            return checks.product_error(p.out, a, b, generator=self.context.generator)

        def check() -> Check:
            return judge(sets, error, checks.tolerance(self.dtype) + tolerance)

        return Runnable(launch, copies, check, poison, extra=extra or {})

    def _streamk(
        self, variant: str, *, products: Sequence[Product] | None = None, planner: Planner | None = None
    ) -> Runnable:
        import torch

        planner = planner or self.planner
        request = planner.request(variant)
        gemm = torch.ops.tpkernels.streamk_gemm

        def run(p: Product) -> None:
            a, b, out = p.a[None], p.b[None], p.out[None]
            gemm(a, b, None, out, None, "none", False, request.schedule, 0, request.splits, request.tile)

        return self._runnable(run, products=products, extra=planner.extra(request))

    def _fp8(self) -> Runnable:
        import torch

        capability = torch.cuda.get_device_capability(self.context.device)
        if capability < (8, 9):
            raise Skip(
                f"fp8 needs compute capability 8.9 or newer, this device has {capability[0]}.{capability[1]}"
            )
        fp8 = torch.float8_e4m3fn
        products = [Product(p.a.to(fp8), p.b.to(fp8), p.out) for p in self.products]
        one = torch.ones((), device=self.context.device)

        def run(p: Product) -> None:
            torch._scaled_mm(
                p.a, p.b, scale_a=one, scale_b=one, out_dtype=self.dtype, use_fast_accum=True, out=p.out
            )

        # Fast accumulation keeps about 13 bits of the sum after each 32 products.
        return self._runnable(run, products=products, tolerance=self.k / 32 * 2.0**-13)


class LayoutsWorkload(GemmWorkload):
    """One product whose operands lie in memory in four ways, one variant each: NAME:NN, :NT, :TT; NAME alone is TN."""

    def __init__(self, case: Case, context: Context) -> None:
        super().__init__(case, context)
        self.by_layout = {self.layout: self.products}

    def prepare(self, variant: str) -> Runnable:
        import torch

        name, _, blas = variant.partition(":")
        layout = BLAS_LAYOUTS[blas or "TN"]
        if layout not in self.by_layout:
            self.by_layout[layout] = [self._product(layout) for _ in range(self.copies)]
        products = self.by_layout[layout]
        if name == "streamk":
            return self._streamk(name, products=products, planner=self._planner(layout))
        return self._runnable(lambda p: torch.mm(p.a, p.b, out=p.out), products=products)

    def close(self) -> None:
        self.by_layout.clear()
        super().close()
