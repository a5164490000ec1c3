"""Workloads of the gemm suite with several products: batches, and rows in groups (the experts of a mixture).

===========  ================================================  ==================================================
operation    what is computed                                  the peers' way
===========  ================================================  ==================================================
``batched``  out[i] = a[i] @ b[i], all of one size             torch.bmm
``grouped``  rows of group g of a, of uneven sizes, @ b[g]     torch.mm for each group; torch._grouped_mm
===========  ================================================  ==================================================

Weights are stored [N, K], as in the layout ``forward``. Variants beside the baseline and ``streamk``:
``streamk:data_parallel`` (whole tiles only, with the tile that is best for it), and of grouped products
``torch:grouped_mm`` and ``streamk:each``, our kernel for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..suite import Case, Check, Runnable, Skip, Workload
from .gemm_planner import Planner, Request
from .gemm_products import COPIES, judge
from .gemm_shapes import group_sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..context import Context

__all__ = ["BATCHED", "GROUPED", "STACKED", "VARIANTS", "StackedWorkload", "elements"]

BATCHED, GROUPED = STACKED = ("batched", "grouped")
# Of grouped products alone.
GROUPED_MM = "torch:grouped_mm"
EACH = "streamk:each"
VARIANTS = {
    GROUPED_MM: "torch._grouped_mm, ends of the groups in a tensor on the device",
    EACH: "ours, a product for each group",
}


def elements(op: str, params: Mapping[str, Any]) -> tuple[int, int, int]:
    """Elements of a, b and the output."""
    m, n, k = (int(params[name]) for name in "mnk")
    batch = int(params.get("batch", 1))
    matrices = int(params["groups"]) if op == GROUPED else batch
    return batch * m * k, matrices * k * n, batch * m * n


@dataclass
class Stack:
    """One buffer set: a [batch, M, K], b [batch, K, N], out [batch, M, N]; grouped: a [M, K], out [M, N]."""

    a: Tensor
    b: Tensor
    out: Tensor


class StackedWorkload(Workload):
    """All variants of one shape."""

    def __init__(self, case: Case, context: Context) -> None:
        import torch

        self.context, self.op = context, case.op
        self.m, self.n, self.k = (int(case.params[name]) for name in "mnk")
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.batch = int(case.params.get("batch", 1))
        self.sizes = group_sizes(int(case.params["groups"]), self.m) if case.op == GROUPED else []
        self.copies = context.copies(int(case.bytes), at_least=COPIES)
        self.sets = [self._stack() for _ in range(self.copies)]

    def prepare(self, variant: str) -> Runnable:
        if variant in ("cublas", "blas"):
            return self._runnable(self._torch_bmm if self.op == BATCHED else self._torch_each)
        if variant == GROUPED_MM:
            return self._grouped_mm()
        if variant == EACH:
            return self._runnable(self._ours_each)
        return self._streamk(variant)

    def close(self) -> None:
        self.sets.clear()

    def _stack(self) -> Stack:
        import torch

        uniform, device = self.context.uniform, self.context.device
        lead = (self.batch,) if self.op == BATCHED else ()
        a = uniform(*lead, self.m, self.k, dtype=self.dtype)
        b = uniform(self.batch if lead else len(self.sizes), self.n, self.k, dtype=self.dtype).mT
        return Stack(a, b, torch.empty(*lead, self.m, self.n, dtype=self.dtype, device=device))

    # --- variants --------------------------------------------------------------------------------------------

    def _torch_bmm(self, s: Stack) -> None:
        import torch

        torch.bmm(s.a, s.b, out=s.out)

    def _torch_each(self, s: Stack) -> None:
        import torch

        for g, (rows, out) in enumerate(zip(s.a.split(self.sizes), s.out.split(self.sizes), strict=True)):
            if len(rows) > 0:
                torch.mm(rows, s.b[g], out=out)

    def _ours_each(self, s: Stack) -> None:
        import torch

        gemm = torch.ops.tpkernels.streamk_gemm
        for g, (rows, out) in enumerate(zip(s.a.split(self.sizes), s.out.split(self.sizes), strict=True)):
            if len(rows) > 0:
                gemm(rows[None], s.b[g : g + 1], None, out[None], None, "none", False)

    def _grouped_mm(self) -> Runnable:
        import torch

        ends = torch.tensor(self.sizes, device=self.context.device).cumsum(0).to(torch.int32)

        def run(s: Stack) -> None:  # it has no out=
            s.out = torch._grouped_mm(s.a, s.b, offs=ends)

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
        request = Request() if variant == "streamk" else planner.request(variant)
        ops, plan = torch.ops.tpkernels, (request.schedule, 0, request.splits, request.tile)

        def batched(s: Stack) -> None:
            ops.streamk_gemm(s.a, s.b, None, s.out, None, "none", False, *plan)

        def grouped(s: Stack) -> None:
            ops.streamk_gemm_grouped(s.a, s.b, None, s.out, None, "none", self.sizes, *plan)

        return self._runnable(batched if self.op == BATCHED else grouped, extra=planner.extra(request))

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
    ) -> Runnable:
        """``run`` on every buffer set (``sets``: with other outputs)."""
        from .. import checks

        sets = self.sets if sets is None else sets
        copies = len(sets)

        def launch(i: int) -> None:
            run(sets[i % copies])

        def poison() -> None:
            for s in sets:
                s.out.fill_(float("nan"))

        def check() -> Check:
            return judge(sets, self._error, checks.tolerance(self.dtype))

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
        parts = zip(s.a.split(self.sizes), s.b, s.out.split(self.sizes), strict=True)
        return max(checks.product_error(out, rows, b, generator=generator) for rows, b, out in parts)
