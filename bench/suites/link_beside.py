"""A matrix product beside a gather that it does not depend on: what overlapping can reach."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

import torch
import torch.distributed as dist

from ..context import Context
from ..records import Stats
from ..suite import Case, Check, Runnable, Workload
from .link_cases import Transport
from .link_exchange import Exchange, agreed
from .link_local import ProductWorkload
from .link_transports import Launch, SmCopies, by_engine

__all__ = ["BesideWorkload"]

_ROUNDS = 15
_SLEEP_CYCLES = 500_000  # some 0.3 ms in which the host enqueues what is timed


class BesideWorkload(Workload):
    """torch.mm on the current stream; on one of high priority an all-gather of shards that make up a first operand."""

    def __init__(self, case: Case, context: Context, transports: dict[str, Transport]) -> None:
        self.context, self.transports = context, transports
        self.product = ProductWorkload(case, context)
        self.exchange = Exchange(
            "all_gather",
            int(case.params["bytes"]),
            case.name,
            context,
            symmetric=context.cuda,
            copies=self.product.copies,
        )
        if context.cuda:
            self.stream = torch.cuda.Stream(context.device, priority=-1)

    def prepare(self, variant: str) -> Runnable:
        transport = self.transports[variant]
        in_time = None
        if transport.kind == "gloo":
            gather: Launch = self._gloo
            both: Launch = self._both_on_cpu
        else:
            if transport.kind == "engine":
                gather = by_engine(self.exchange, transport)
            else:
                by_sms = SmCopies.of(self.exchange, transport)
                gather, in_time = by_sms.launch, by_sms.in_time

            def both(i: int) -> None:
                main = torch.cuda.current_stream()
                self.stream.wait_stream(main)
                with torch.cuda.stream(self.stream):
                    gather(i)
                self.product.launch(i)
                main.wait_stream(self.stream)

        def check() -> Check:
            transfer = self.exchange.check()
            transfer = in_time(transfer) if in_time else transfer
            return agreed(self.context, self.product.check()) if transfer.ok else transfer

        def together(stats: Stats) -> Mapping[str, float]:
            return {"together_us": stats.p50}

        return Runnable(
            both,
            self.product.copies,
            check,
            self._poison,
            parts={"gemm_alone": self.product.launch, "transport_alone": gather},
            extra={"transport": transport.name, **self._slowdown(gather)},
            finish=together,
        )

    def _poison(self) -> None:
        self.product.poison()
        self.exchange.poison()

    def _gloo(self, i: int) -> None:
        self._start_gloo(i).wait()

    def _both_on_cpu(self, i: int) -> None:
        work = self._start_gloo(i)
        self.product.launch(i)
        work.wait()

    def _start_gloo(self, i: int) -> dist.Work:
        i %= self.exchange.copies
        target, source = self.exchange.targets()[i], self.exchange.sources()[i]
        work = dist.all_gather_into_tensor(target, source, group=self.context.group, async_op=True)
        assert work is not None
        return work

    def _slowdown(self, gather: Launch) -> dict[str, float]:
        """The product's time alone and beside the gather, launched from the host in turn; events around it only."""
        alone, beside = [], []
        for i in range(_ROUNDS + 1):
            of_alone, of_beside = (self._timed(i % self.product.copies, g) for g in (None, gather))
            if i:
                alone.append(of_alone)
                beside.append(of_beside)
        us_alone, us_beside = (median(self.context.slowest(us)) for us in (alone, beside))
        slowdown = us_beside / us_alone if us_alone > 0 else 1.0
        return {"gemm_beside_us": us_beside, "gemm_alone_host_us": us_alone, "gemm_slowdown": slowdown}

    def _timed(self, i: int, gather: Launch | None) -> float:
        if not self.context.cuda:
            self.context.align()
            work = self._start_gloo(i) if gather else None
            start = time.perf_counter()
            self.product.launch(i)
            us = (time.perf_counter() - start) * 1e6
            if work:
                work.wait()
            return us
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        main = torch.cuda.current_stream()
        torch.cuda._sleep(_SLEEP_CYCLES)
        self.context.align()
        self.stream.wait_stream(main)
        if gather:
            with torch.cuda.stream(self.stream):
                gather(i)
        begin.record()
        self.product.launch(i)
        end.record()
        main.wait_stream(self.stream)
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3
