"""Products with something done to them before they are stored, beside torch doing it afterwards.

==============  ==================================================  ==============================================
operation       out                                                 the peers' way
==============  ==================================================  ==============================================
``bias_gelu``   gelu(a @ b + bias)                                  addmm, gelu; cuBLASLt's epilogue (tanh)
``bias_silu``   silu(a @ b + bias)                                  addmm, silu
``swiglu``      silu(a @ gate) * (a @ b)                            mm with both halves of the weight, silu, mul
``accumulate``  out + a @ b, out in fp32                            baddbmm with beta = 1
``residual``    a @ b + residual                                    mm, add; addmm with beta = 1
==============  ==================================================  ==============================================

Variants: the baseline (``cublas``, ``blas``) is torch's way, ``cublas:fused`` what cuBLAS does in one product,
``streamk`` our kernel with the epilogue. ``NAME:plain`` is the product alone, without the epilogue and with as many
columns of the weight in all, into an output of the operands' dtype; ``streamk:plain-fp32`` into one of fp32.

The weight is scaled by a power of two, so that products are of the size at which activations bend. A sum that is
accumulated into cannot be poisoned with NaN: it starts from 1, and the check finds out how often the product, a whole
number of times and at least once, was added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..suite import Case, Check, Runnable, Workload
from .gemm_planner import Planner, Request
from .gemm_products import COPIES, aligned, judge

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..context import Context

__all__ = ["ROUNDINGS_OF_GATED", "EpilogueWorkload", "fused_by_cublas", "sizes"]

_ACTIVATIONS = {"bias_gelu": "gelu", "bias_silu": "silu", "swiglu": "silu"}
_START = 1.0  # of a sum that is accumulated into
# Gated products are heavy-tailed: the norm of 128 of them is that of a few, whose errors do not average out. Allowed is
# somewhat more than the largest error of one rounding, and than the usual ones of torch's four (one through the silu).
ROUNDINGS_OF_GATED = {"streamk": 2, "torch": 16}


def fused_by_cublas(op: str) -> bool:
    """Whether cuBLAS has an epilogue that the baseline does not use."""
    return op in ("bias_gelu", "residual")


def sizes(op: str, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Sizes of the plain product: the weight of swiglu has two halves."""
    return (m, 2 * n, k) if op == "swiglu" else (m, n, k)


@dataclass
class Tensors:
    """One buffer set.

    Attributes:
        a: [M, K].
        weight: [K, N], K contiguous; of swiglu [K, 2 N], the gate first.
        out: [M, N].
        plain: [M, columns of weight].
        bias, residual: [N] and [M, N], of the operations that have them.
    """

    a: Tensor
    weight: Tensor
    out: Tensor
    plain: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None

    @property
    def gate(self) -> Tensor:
        return self.weight[:, : self.out.shape[1]]

    @property
    def b(self) -> Tensor:
        return self.weight[:, -self.out.shape[1] :]


class EpilogueWorkload(Workload):
    """All variants of one operation at one shape."""

    def __init__(self, case: Case, context: Context) -> None:
        import torch

        self.context, self.op = context, case.op
        self.m, self.n, self.k = (int(case.params[name]) for name in "mnk")
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        wide = self.dtype in (torch.float32, torch.float64)
        self.sum_dtype = self.dtype if wide else torch.float32
        self.copies = context.copies(int(case.bytes), at_least=COPIES)
        self.sets = [self._tensors() for _ in range(self.copies)]

    def prepare(self, variant: str) -> Runnable:
        name, _, what = variant.partition(":")
        if what.startswith("plain"):
            return self._plain(name, what)
        if name == "streamk":
            return self._streamk()
        return self._fused_by_cublas() if what == "fused" else getattr(self, f"_torch_{self.op}")()

    def close(self) -> None:
        self.sets.clear()

    def _tensors(self) -> Tensors:
        import torch

        uniform, device = self.context.uniform, self.context.device
        m, columns, k = sizes(self.op, self.m, self.n, self.k)
        # The sum of K products of uniform numbers in [-1, 1] has a deviation of sqrt(K) / 3.
        weight = uniform(columns, k, dtype=self.dtype) * 2.0 ** -round(math.log2(max(1.0, math.sqrt(k) / 3)))
        out_dtype = self.sum_dtype if self.op == "accumulate" else self.dtype
        return Tensors(
            uniform(m, k, dtype=self.dtype),
            weight.t(),
            torch.empty(m, self.n, dtype=out_dtype, device=device),
            torch.empty(m, columns, dtype=self.dtype, device=device),
            uniform(self.n, dtype=self.dtype) if self.op.startswith("bias") else None,
            uniform(m, self.n, dtype=self.dtype) if self.op == "residual" else None,
        )

    # --- ours ------------------------------------------------------------------------------------------------

    def _planner(self) -> Planner:
        m, n, k = sizes(self.op, self.m, self.n, self.k)
        return Planner.of(m, n, k, self.context.device, aligned=aligned(m, n, k, "forward"))

    def _streamk(self) -> Runnable:
        import torch

        gemm = torch.ops.tpkernels.streamk_gemm
        activation, gated = _ACTIVATIONS.get(self.op, "none"), self.op == "swiglu"
        accumulate = self.op == "accumulate"

        def run(t: Tensors) -> None:
            a, b, out = t.a[None], t.b[None], t.out[None]
            gate = t.gate[None] if gated else None
            residual = None if t.residual is None else t.residual[None]
            gemm(a, b, t.bias, out, None, activation, accumulate, "auto", 0, 1, "", gate, residual)

        # A gate has a plan of its own, which streamk_plan does not know.
        extra = {} if gated else self._planner().extra(Request())
        roundings = ROUNDINGS_OF_GATED["streamk"] if gated else 1
        return self._runnable(run, roundings=roundings, extra=extra)

    def _plain(self, name: str, what: str) -> Runnable:
        import torch

        gemm = torch.ops.tpkernels.streamk_gemm
        wide = what == "plain-fp32"

        def ours(t: Tensors) -> None:
            a, b, out = t.a[None], t.weight[None], (t.out if wide else t.plain)[None]
            gemm(a, b, None, out, None, "none", False)

        def theirs(t: Tensors) -> None:
            torch.mm(t.a, t.weight, out=t.plain)

        extra = self._planner().extra(Request()) if name == "streamk" else {}
        run = ours if name == "streamk" else theirs
        return self._runnable(run, roundings=1, plain=True, wide=wide, extra=extra)

    # --- torch's way -----------------------------------------------------------------------------------------

    def _torch_bias(self, activate: Callable[[Tensor], object], how: str) -> Runnable:
        import torch

        def run(t: Tensors) -> None:
            assert t.bias is not None
            activate(torch.addmm(t.bias, t.a, t.b, out=t.out))

        return self._runnable(run, roundings=2, extra={"how": how})

    def _torch_bias_gelu(self) -> Runnable:
        import torch

        return self._torch_bias(torch.ops.aten.gelu_, "addmm, gelu in place")

    def _torch_bias_silu(self) -> Runnable:
        import torch

        return self._torch_bias(torch.ops.aten.silu_, "addmm, silu in place")

    def _torch_swiglu(self) -> Runnable:
        import torch

        def run(t: Tensors) -> None:
            torch.mm(t.a, t.weight, out=t.plain)
            gate = torch.ops.aten.silu_(t.plain[:, : self.n])
            torch.mul(gate, t.plain[:, self.n :], out=t.out)

        roundings = ROUNDINGS_OF_GATED["torch"]
        return self._runnable(
            run, roundings=roundings, extra={"how": "mm with 2 N columns, silu in place, mul"}
        )

    def _torch_accumulate(self) -> Runnable:
        import torch

        from .. import checks

        def one_product(t: Tensors) -> None:
            out = t.out[None]
            if t.out.dtype == self.dtype:
                torch.baddbmm(out, t.a[None], t.b[None], out=out)
            else:
                torch.ops.aten.baddbmm.dtype_out(out, t.a[None], t.b[None], t.out.dtype, out=out)

        def two_steps(t: Tensors) -> None:
            t.out.add_(torch.mm(t.a, t.b))

        try:
            one_product(self.sets[0])
        except (
            AttributeError,
            NotImplementedError,
            RuntimeError,
        ):  # not for these dtypes in this torch, or on the CPU
            rounded = checks.tolerance(self.dtype)
            return self._runnable(two_steps, roundings=1, tolerance=rounded, extra={"how": "mm, add"})
        return self._runnable(one_product, roundings=1, extra={"how": "baddbmm, beta = 1"})

    def _torch_residual(self) -> Runnable:
        import torch

        def run(t: Tensors) -> None:
            assert t.residual is not None
            torch.mm(t.a, t.b, out=t.out).add_(t.residual)

        return self._runnable(run, roundings=2, extra={"how": "mm, add in place"})

    def _fused_by_cublas(self) -> Runnable:
        """For the operations of :func:`fused_by_cublas`."""
        import torch

        def gelu(t: Tensors) -> None:
            torch.ops.aten._addmm_activation.out(t.bias, t.a, t.b, use_gelu=True, out=t.out)

        def residual(t: Tensors) -> None:
            assert t.residual is not None
            torch.addmm(t.residual, t.a, t.b, out=t.out)

        if self.op == "residual":
            return self._runnable(residual, roundings=2, extra={"how": "addmm, beta = 1"})
        # Its gelu is the tanh approximation, within 5e-4 of the exact one.
        return self._runnable(
            gelu, roundings=2, tolerance=1e-3, extra={"how": "cuBLASLt bias and gelu (tanh)"}
        )

    # --- checks ----------------------------------------------------------------------------------------------

    def _runnable(
        self,
        run: Callable[[Tensors], object],
        *,
        roundings: int,
        tolerance: float = 0.0,
        plain: bool = False,
        wide: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> Runnable:
        """``roundings`` of a result on its way; ``plain``: the product alone, ``wide``: into ``out`` all the same."""
        from .. import checks

        sets, copies = self.sets, self.copies
        summed = self.op == "accumulate" and not plain
        into_plain = plain and not wide

        def launch(i: int) -> None:
            run(sets[i % copies])

        def poison() -> None:
            for t in sets:
                t.plain.fill_(math.nan)
                t.out.fill_(_START if summed else math.nan)

        def error(t: Tensors) -> float:
            rows = checks.sampled_rows(self.m, self.context.generator)
            out = t.plain if into_plain else t.out
            want = t.a[rows].double() @ t.weight.double() if plain else self._reference(t, rows)
            if not summed:
                return checks.rows_error(out, want, rows)
            added = (out[rows].double() - _START).mul(want).sum() / want.square().sum().clamp(min=1e-300)
            times = round(float(added)) if math.isfinite(added) else 0
            return checks.rows_error(out, _START + times * want, rows) if times > 0 else math.inf

        def check() -> Check:
            allowed = checks.tolerance(self.dtype if into_plain else sets[0].out.dtype, roundings)
            if not into_plain and sets[0].out.dtype != self.dtype:
                # Tensor cores add 16 products at a time and cut what is below the last place.
                allowed += self.k / 16 * 2.0**-23
            return judge(sets, error, allowed + tolerance)

        return Runnable(launch, copies, check, poison, extra=extra or {})

    def _reference(self, t: Tensors, rows: Tensor) -> Tensor:
        """float64 rows of what the operation computes, without what is accumulated into."""
        from torch.nn import functional

        a = t.a[rows].double()
        x = a @ t.b.double()
        if t.bias is not None:
            x += t.bias.double()
        if self.op == "bias_gelu":
            return functional.gelu(x)
        if self.op == "bias_silu":
            return functional.silu(x)
        if self.op == "swiglu":
            return functional.silu(a @ t.gate.double()) * x
        return x if t.residual is None else x + t.residual[rows].double()
