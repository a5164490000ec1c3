"""The link suite: what the machine can do, alone and between GPUs. The ceilings of every other suite.

Transports move pieces between ranks over memory that all ranks map (torch's symmetric memory, without multicast), all
ranks at once; the slowest counts. Every byte that arrives is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import BenchError
from ..records import Role, Row
from ..suite import Case, Options, Runnable, Suite, Variant, Workload
from .link_cases import EXCHANGES, Transport, applies, layout, make_cases, transports
from .link_fit import link_constants

if TYPE_CHECKING:
    from ..context import Context
    from .link_exchange import Exchange

__all__ = ["SUITE", "LinkSuite"]


class LinkSuite(Suite):
    """See the module."""

    name = "link"
    distributed = True
    smallest_world = 1
    what = "what the machine can do: device copy, matrix peak, transports between GPUs, flags, a GEMM beside each"

    def variants(self, options: Options) -> Sequence[Variant]:
        roles: dict[str, Role] = {"nccl": "peer"}
        return [Variant(t.name, roles.get(t.kind, "ceiling"), t.what) for t in transports(options)]

    def cases(self, options: Options) -> Sequence[Case]:
        return make_cases(options)

    def applies(self, case: Case, variant: str, options: Options) -> bool:
        return applies(case, _named(options)[variant], options)

    def bytes_needed(self, case: Case, options: Options) -> int:
        p = case.params
        if case.op == "copy":
            return 2 * int(p["bytes"])
        if case.op in EXCHANGES:  # once in symmetric memory, once for NCCL
            return 2 * layout(case.op, int(p["bytes"]), options.world).total
        if case.op in ("matmul", "beside"):
            m, n, k = int(p["m"]), int(p["n"]), int(p["k"])
            return 2 * (m * k + n * k + m * n) + options.world * int(p.get("bytes", 0))
        return 0

    def workload(self, case: Case, context: Context) -> Workload:
        named = _named(context.options)
        if case.op == "flag_round_trip":
            from .link_flags import FlagWorkload

            return FlagWorkload(context)
        if case.op == "beside":
            from .link_beside import BesideWorkload

            return BesideWorkload(case, context, named)
        if case.op in EXCHANGES:
            return _ExchangeWorkload(case, context, named)
        from .link_local import CopyWorkload, ProductWorkload

        return CopyWorkload(case, context, named) if case.op == "copy" else ProductWorkload(case, context)

    def summarise(self, rows: Sequence[Row]) -> Sequence[Row]:
        found = link_constants(rows)
        if not found:
            return []
        world = max(row.world for row in rows)
        return [Row("link", "constants", "constants", "fit", "ceiling", world=world, extra=found)]


def _named(options: Options) -> dict[str, Transport]:
    return {t.name: t for t in transports(options)}


class _ExchangeWorkload(Workload):
    """One transfer by every transport, over the same buffers; NCCL has its own, as it would in a program."""

    def __init__(self, case: Case, context: Context, transports: dict[str, Transport]) -> None:
        self.case, self.context, self.transports = case, context, transports
        self._exchanges: dict[bool, Exchange] = {}

    def prepare(self, variant: str) -> Runnable:
        from .link_transports import SmCopies, by_collectives, by_engine

        transport = self.transports[variant]
        extra = {"kind": transport.kind, "sms": transport.sms, "pull": transport.pull}
        extra |= {"chunks": transport.chunks, "flag": transport.flag}
        exchange = self._exchange(symmetric=transport.kind not in ("nccl", "gloo"))
        if transport.by_sms:
            by_sms = SmCopies.of(exchange, transport)
            extra["sms"] = by_sms.sms
            return Runnable(
                by_sms.launch,
                exchange.copies,
                lambda: by_sms.in_time(exchange.check(flags=transport.flag)),
                exchange.poison,
                extra=extra,
            )
        if transport.kind == "engine":
            launch = by_engine(exchange, transport)
        elif transport.kind in ("nccl", "gloo"):
            launch = by_collectives(exchange, self.context)
        else:
            raise BenchError(f"variant {variant!r}: does not apply to {self.case.op}.")
        return Runnable(
            launch,
            exchange.copies,
            lambda: exchange.check(flags=transport.flag),
            exchange.poison,
            extra=extra,
        )

    def _exchange(self, *, symmetric: bool) -> Exchange:
        from .link_exchange import Exchange

        if symmetric not in self._exchanges:
            self._exchanges[symmetric] = Exchange(
                self.case.op,
                int(self.case.params["bytes"]),
                self.case.name,
                self.context,
                symmetric=symmetric,
            )
        return self._exchanges[symmetric]

    def close(self) -> None:
        # No need to wait for the others: memory stays as long as any rank has it mapped.
        self._exchanges.clear()


SUITE = LinkSuite()
