"""What one GPU can do alone: copies in its memory, and matrix products."""

from __future__ import annotations

import math

import torch

from ..checks import product_error, tolerance
from ..context import Context
from ..suite import Case, Check, Runnable, Workload
from .link_cases import Transport
from .link_transports import SmCopies

__all__ = ["CopyWorkload", "ProductWorkload"]


class CopyWorkload(Workload):
    """Copy a buffer of bf16, read and written once."""

    def __init__(self, case: Case, context: Context, transports: dict[str, Transport]) -> None:
        self.context, self.transports = context, transports
        count = int(case.params["bytes"]) // 2
        copies = context.copies(count * 4)
        self.sources = [context.uniform(count, dtype=torch.bfloat16) for _ in range(copies)]
        self.targets = [torch.empty_like(source) for source in self.sources]

    def prepare(self, variant: str) -> Runnable:
        transport = self.transports[variant]
        extra = {"kind": transport.kind, "sms": transport.sms}
        copies = len(self.sources)
        if not transport.by_sms:
            return Runnable(
                lambda i: self.targets[i % copies].copy_(self.sources[i % copies]),
                copies,
                self._check,
                self._poison,
                extra=extra,
            )
        by_sms = SmCopies(
            [[(dst, src, None)] for dst, src in zip(self.targets, self.sources, strict=True)],
            self.context,
            transport,
        )
        extra["sms"] = by_sms.sms
        return Runnable(
            by_sms.launch, copies, lambda: by_sms.in_time(self._check()), self._poison, extra=extra
        )

    def _poison(self) -> None:
        for target in self.targets:
            target.fill_(math.nan)

    def _check(self) -> Check:
        right = all(torch.equal(a, b) for a, b in zip(self.targets, self.sources, strict=True))
        return Check(0.0 if right else math.inf, 0.0)


class ProductWorkload(Workload):
    """[M, K] x [K, N] by torch.mm, the second operand stored [N, K] as weights are."""

    def __init__(self, case: Case, context: Context) -> None:
        self.context = context
        p, dtype = case.params, getattr(torch, case.dtype)
        m, n, k = int(p["m"]), int(p["n"]), int(p["k"])
        self.dtype = dtype
        self.copies = context.copies((m * k + n * k + m * n) * 2)
        self.a = [context.uniform(m, k, dtype=dtype) for _ in range(self.copies)]
        self.b = [context.uniform(n, k, dtype=dtype).t() for _ in range(self.copies)]
        self.out = [torch.empty(m, n, dtype=dtype, device=context.device) for _ in range(self.copies)]

    def launch(self, i: int) -> None:
        """The product of set i."""
        i %= self.copies
        torch.mm(self.a[i], self.b[i], out=self.out[i])

    def prepare(self, variant: str) -> Runnable:
        return Runnable(self.launch, self.copies, self.check, self.poison)

    def poison(self) -> None:
        """NaN in every output."""
        for out in self.out:
            out.fill_(math.nan)

    def check(self) -> Check:
        """Sampled rows of every set's product against float64."""
        error = max(
            product_error(out, a, b, generator=self.context.generator)
            for out, a, b in zip(self.out, self.a, self.b, strict=True)
        )
        return Check(error, tolerance(self.dtype))
