"""A suite for tests: variants that are fine, wrong, leave NaN, raise, hang or crash. Found by TPK_BENCH_SUITES."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from bench.checks import rows_error
from bench.context import Context
from bench.errors import BenchError, check_known
from bench.records import Row, Stats
from bench.suite import Case, Check, Options, Runnable, Skip, Suite, Variant, Workload

SIZES = {"small": 8, "middle": 16, "large": 24}
_TROUBLE = os.environ.get("FAKE_TROUBLE_RANK")  # which rank hangs, crashes or raises; all of them without it


class FakeWorkload(Workload):
    def __init__(self, case: Case, context: Context) -> None:
        import torch

        if os.environ.get("FAKE_BROKEN_INPUTS") == case.name:
            raise ValueError("these inputs cannot be made")
        size = SIZES[case.name.split()[0]]
        self.context, self.case = context, case
        self.x = context.uniform(size, size, dtype=torch.float64)
        self.want = self.x * 2

    def _mine(self) -> bool:
        return _TROUBLE is None or int(_TROUBLE) == self.context.rank

    def prepare(self, variant: str) -> Runnable:
        import torch
        import torch.distributed as dist

        out = torch.empty_like(self.x)
        behaviour = os.environ.get(f"FAKE_{variant.upper()}_IS", variant.split()[0])
        if behaviour == "absent":
            raise Skip("this library is not installed")
        if behaviour == "needy":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
        if behaviour == "raises" and self._mine():
            raise ValueError("no kernel for this shape\nand a second line")
        if behaviour == "uneven" and self._mine():
            raise ValueError("only here")
        if behaviour == "uneven":
            self.context.agree("the others ask something meanwhile")
        if behaviour == "waits":  # for a rank that has raised, in a collective
            if self._mine():
                raise ValueError("gone before the collective")
            dist.all_reduce(torch.zeros(1))

        def launch(i: int) -> None:
            if behaviour == "hangs" and self._mine():
                time.sleep(1000)
            if behaviour == "crashes" and self._mine():
                os.kill(os.getpid(), signal.SIGSEGV)
            if behaviour == "exits" and self._mine():
                os._exit(9)
            if behaviour == "slow":
                time.sleep(float(os.environ.get("FAKE_SLOW", "0.2")))
            if behaviour != "nan":
                torch.mul(self.x, 2.1 if behaviour == "wrong" else 2.0, out=out)
            if behaviour == "nan":
                out[0].fill_(1.0)

        return Runnable(
            launch=launch,
            copies=2,
            check=lambda: Check(rows_error(out, self.want), 1e-12),
            poison=lambda: out.fill_(float("nan")),
            extra={"behaviour": behaviour},
            finish=lambda stats: {"per_second": 1e6 / stats.p50},
            parts={"half": launch} if behaviour == "parts" else {},
            sample=(lambda: [1.0, 2.0, 3.0, float(launch(0) or 4.0)]) if behaviour == "sampled" else None,
        )


class FakeSuite(Suite):
    name = "fake"
    what = "variants that behave badly, for tests"
    distributed = True
    smallest_world = 1
    variant_names: Sequence[str] = tuple(os.environ.get("FAKE_VARIANTS", "base,fine").split(","))

    def baseline(self, options: Options) -> str | None:
        return "base" if "base" in self.variant_names else None

    def variants(self, options: Options) -> Sequence[Variant]:
        return [
            Variant(
                name, "ours" if name == "fine" else "peer", f"is {name}", isolated=name.endswith("isolated")
            )
            for name in self.variant_names
        ]

    def cases(self, options: Options) -> Sequence[Case]:
        for name in options.sets:
            check_known("set", name, SIZES)
        for dtype in options.dtypes:
            if dtype != "float64":
                raise BenchError(f"dtype: expected float64, got {dtype}.")
        return [
            Case(name, "double", "float64", {"n": size}, "all", flops=size * size)
            for name, size in SIZES.items()
            if not options.sets or name in options.sets
        ]

    def workload(self, case: Case, context: Context) -> Workload:
        return FakeWorkload(case, context)

    def summarise(self, rows: Sequence[Row]) -> Sequence[Row]:
        times = [r.us.p50 for r in rows if r.us and r.variant == "base"]
        if not times:
            return []
        params = {"cases": len(times)}
        return [
            Row("fake", "all", "fit", "fit", "part", world=rows[0].world, params=params, us=Stats.of(times))
        ]


SUITE = FakeSuite()
