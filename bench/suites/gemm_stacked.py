"""Workloads of the gemm suite with several products: batches, and rows in groups (the experts of a mixture).

==================  ==============================================  ============================================
operation           what is computed                                the peers' way
==================  ==============================================  ============================================
``batched``         out[i] = a[i] @ b[i], all of one size           torch.bmm
``grouped``         rows of group g of a, of uneven sizes, @ b[g]   torch.mm for each group; torch._grouped_mm
``grouped_swiglu``  silu(rows @ gate[g]) * (rows @ b[g])            the same with both halves of the weights, then
                                                                    silu in place and mul over all rows
==================  ==============================================  ============================================

Weights are stored [N, K], as in the layout ``forward``, gate and b of a group as one. Variants beside the baseline and
``streamk``: ``streamk:data_parallel`` (whole tiles only, with the tile that is best for it), and of groups
``torch:grouped_mm`` and ``streamk:each``, our kernel for each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..suite import Case, Check, Runnable, Skip, Workload
from .gemm_epilogues import ROUNDINGS_OF_GATED
from .gemm_planner import Planner, Request
from .gemm_products import COPIES, judge
from .gemm_shapes import group_sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..context import Context

__all__ = ["BATCHED", "GATED", "GROUPED", "STACKED", "VARIANTS", "StackedWorkload", "elements", "halves"]

BATCHED, GROUPED, GATED = STACKED = ("batched", "grouped", "grouped_swiglu")
# Of grouped products, gated or not.
GROUPED_MM = "torch:grouped_mm"
EACH = "streamk:each"
VARIANTS = {
    GROUPED_MM: "torch._grouped_mm, ends of the groups in a tensor on the device",
    EACH: "ours, a product for each group",
}


def halves(op: str) -> int:
    """Products that a result is made of."""
    return 2 if op == GATED else 1


def elements(op: str, params: Mapping[str, Any]) -> tuple[int, int, int]:
    """Elements of a, of all weights, and of the output."""
    m, n, k = (int(params[name]) for name in "mnk")
    batch = int(params.get("batch", 1))
    matrices = batch if op == BATCHED else int(params["groups"])
    return batch * m * k, matrices * k * halves(op) * n, batch * m * n


@dataclass
class Stack:
    """One buffer set: a [batch, M, K], weight [batch, K, N], out [batch, M, N]; grouped: a [M, K], out [M, N].

    Of a gated product weight is [groups, K, 2 N], the gate first, and plain [M, 2 N] what torch makes of it first.
    """

    a: Tensor
    weight: Tensor
    out: Tensor
    plain: Tensor | None = None

    @property
    def b(self) -> Tensor:
        return self.weight[..., -self.out.shape[-1] :]

    @property
    def gate(self) -> Tensor | None:
        return None if self.plain is None else self.weight[..., : self.out.shape[-1]]


class StackedWorkload(Workload):
    """All variants of one shape."""

    def __init__(self, case: Case, context: Context) -> None:
        import torch

        self.context, self.op = context, case.op
        self.m, self.n, self.k = (int(case.params[name]) for name in "mnk")
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.batch = int(case.params.get("batch", 1))
        self.sizes = [] if case.op == BATCHED else group_sizes(int(case.params["groups"]), self.m)
        self.copies = context.copies(int(case.bytes), at_least=COPIES)
        self.sets = [self._stack() for _ in range(self.copies)]

    def prepare(self, variant: str) -> Runnable:
        if variant in ("cublas", "blas"):
            return self._runnable(self._torch_bmm if self.op == BATCHED else self._torch_each)
        if variant == GROUPED_MM:
            return self._grouped_mm()
        if variant == EACH:
            return self._runnable(self._ours_each, ours=True)
        return self._streamk(variant)

    def close(self) -> None:
        self.sets.clear()

    def _stack(self) -> Stack:
        import torch

        uniform, device = self.context.uniform, self.context.device
        lead = (self.batch,) if self.op == BATCHED else ()
        a = uniform(*lead, self.m, self.k, dtype=self.dtype)
        columns = halves(self.op) * self.n
        weight = uniform(self.batch if lead else len(self.sizes), columns, self.k, dtype=self.dtype)
        out = torch.empty(*lead, self.m, self.n, dtype=self.dtype, device=device)
        if self.op != GATED:
            return Stack(a, weight.mT, out)
        # Products are then of the size at which silu bends: see gemm_epilogues.
        weight *= 2.0 ** -round(math.log2(max(1.0, math.sqrt(self.k) / 3)))
        plain = torch.empty(self.m, columns, dtype=self.dtype, device=device)
        return Stack(a, weight.mT, out, plain)

    # --- variants --------------------------------------------------------------------------------------------

    def _torch_bmm(self, s: Stack) -> None:
        import torch

        torch.bmm(s.a, s.b, out=s.out)

    def _torch_each(self, s: Stack) -> None:
        import torch

        made = s.out if s.plain is None else s.plain
        for g, (rows, out) in enumerate(zip(s.a.split(self.sizes), made.split(self.sizes), strict=True)):
            if len(rows) > 0:
                torch.mm(rows, s.weight[g], out=out)
        self._finish(s)

    def _finish(self, s: Stack) -> None:
        """silu and mul over all rows, where there is a gate."""
        import torch

        if s.plain is not None:
            torch.mul(torch.ops.aten.silu_(s.plain[:, : self.n]), s.plain[:, self.n :], out=s.out)

    def _ours_each(self, s: Stack) -> None:
        import torch

        gemm, gate = torch.ops.tpkernels.streamk_gemm, s.gate
        activation = "none" if gate is None else "silu"
        for g, (rows, out) in enumerate(zip(s.a.split(self.sizes), s.out.split(self.sizes), strict=True)):
            if len(rows) > 0:
                of_group = None if gate is None else gate[g : g + 1]
                gemm(rows[None], s.b[g : g + 1], None, out[None], None, activation, False, gate=of_group)

    def _grouped_mm(self) -> Runnable:
        import torch

        ends = torch.tensor(self.sizes, device=self.context.device).cumsum(0).to(torch.int32)

        def run(s: Stack) -> None:  # it has no out=
            made = torch._grouped_mm(s.a, s.weight, offs=ends)
            if s.plain is None:
                s.out = made
            else:
                s.plain = made
                self._finish(s)

        sets = [replace(s) for s in self.sets]
        try:
            run(sets[0])
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            raise Skip(str(error).strip().partition("\n")[0]) from None
        return self._runnable(run, sets=sets)

    def _streamk(self, variant: str) -> Runnable:
        import torch

        planner = Planner.of(self.m, self.n, self.k, self.context.device, aligned=self._aligned())
        planner.batch, planner.group_sizes = self.batch, tuple(self.sizes)
        planner.gated = self.op == GATED
        request = Request() if variant == "streamk" else planner.request(variant)
        ops, plan = torch.ops.tpkernels, (request.schedule, 0, request.splits, request.tile)

        def batched(s: Stack) -> None:
            ops.streamk_gemm(s.a, s.b, None, s.out, None, "none", False, *plan)

        def grouped(s: Stack) -> None:
            gate = s.gate
            activation = "none" if gate is None else "silu"
            ops.streamk_gemm_grouped(s.a, s.b, None, s.out, None, activation, self.sizes, *plan, gate=gate)

        run = batched if self.op == BATCHED else grouped
        return self._runnable(run, extra=planner.extra(request), ours=True)

    def _aligned(self) -> bool:
        return (
            self.k % 8 == 0
        )  # rows of both operands begin at multiples of 16 bytes, for elements of 16 bits

    # --- checks ----------------------------------------------------------------------------------------------

    def _runnable(
        self,
        run: Callable[[Stack], object],
        *,
        sets: Sequence[Stack] | None = None,
        extra: dict[str, Any] | None = None,
        ours: bool = False,
    ) -> Runnable:
        """``run`` on every buffer set (``sets``: with other outputs)."""
        from .. import checks

        roundings = ROUNDINGS_OF_GATED["streamk" if ours else "torch"] if self.op == GATED else 1
        sets = self.sets if sets is None else sets
        copies = len(sets)

        def launch(i: int) -> None:
            run(sets[i % copies])

        def poison() -> None:
            for s in sets:
                s.out.fill_(float("nan"))
                if s.plain is not None:
                    s.plain.fill_(float("nan"))

        def check() -> Check:
            return judge(sets, self._error, checks.tolerance(self.dtype, roundings))

        return Runnable(launch, copies, check, poison, extra=extra or {})

    def _error(self, s: Stack) -> float:
        """The largest of a few matrices of a batch, or of all groups."""
        from .. import checks

        generator = self.context.generator
        if self.op == BATCHED:
            picked = {0, self.batch - 1, self.batch // 2}
            if bool(s.out.isnan().any()):
                return float("inf")
            return max(checks.product_error(s.out[i], s.a[i], s.b[i], generator=generator) for i in picked)
        parts = zip(s.a.split(self.sizes), s.weight, s.out.split(self.sizes), strict=True)
        return max(self._group_error(*part) for part in parts)

    def _group_error(self, rows: Tensor, weight: Tensor, out: Tensor) -> float:
        from torch.nn import functional

        from .. import checks

        generator = self.context.generator
        if self.op != GATED or len(rows) == 0:
            return checks.product_error(out, rows, weight[:, : self.n], generator=generator)
        picked = checks.sampled_rows(len(rows), generator)
        plain = rows[picked].double() @ weight.double()
        want = functional.silu(plain[:, : self.n]) * plain[:, self.n :]
        return checks.rows_error(out, want, picked)
