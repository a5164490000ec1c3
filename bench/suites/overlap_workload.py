"""Variants of the overlap suite that need torch alone, and where the others come from."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tpkernels.comm.departures import DEPARTURE

from ..context import Context
from ..suite import Case, Check, Runnable, Skip, Workload
from .overlap_problem import Problem, all_gather, fill_nan, reduce_scatter
from .overlap_shapes import AG, AR, RS

__all__ = ["OverlapWorkload"]


class OverlapWorkload(Workload):
    """One case; see :class:`.overlap_problem.Problem` for its inputs."""

    def __init__(self, case: Case, context: Context) -> None:
        self.problem = Problem(case, context)

    def prepare(self, variant: str) -> Runnable:
        """Collective: every rank prepares the same variants in the same order."""
        problem = self.problem
        if variant == "ours" or variant.startswith("ours:"):
            path, _, departure = variant.removeprefix("ours").removeprefix(":").partition(":")
            return _ours(problem, path or "auto", departure)
        if variant in ("nccl+cublas", "gloo+blas"):
            return _SEQUENCES[problem.op](problem)
        if variant == "gemm":
            return _gemm(problem)
        if variant == "comm":
            return _COLLECTIVES[problem.op](problem)
        if not problem.context.cuda:
            raise Skip(f"{variant} needs GPUs, this run is on the CPU.")
        if variant == "ceiling":
            from .overlap_ceiling import prepare as ceiling

            return ceiling(problem)
        if variant == "cublasmp":
            from ..peers.cublasmp import prepare as cublasmp

            return cublasmp(problem)
        from ..peers.symm_mem import prepare as symm_mem

        return symm_mem(problem, variant)


# ours


def _ours(problem: Problem, path: str, departure: str) -> Runnable:
    p = problem
    environment = {DEPARTURE: departure} if departure else {}
    # torch's caching allocator provides the results; a captured graph writes to those that were allocated last.
    outputs: list[Tensor | None] = [None] * p.copies

    def launch(i: int) -> None:
        i %= p.copies
        # Patching copies all of it, which a call without one should not be charged for.
        with mock.patch.dict(os.environ, environment) if environment else nullcontext():
            if p.op == AG:
                outputs[i] = tpk.all_gather_matmul(p.x[i], p.w[i].t(), p.group, path=path)
            elif p.op == RS:
                outputs[i] = tpk.matmul_reduce_scatter(p.x[i], p.w[i].t(), p.group, path=path)
            else:
                outputs[i] = tpk.matmul_all_reduce(p.x[i], p.w[i].t(), p.group, path=path)

    try:
        launch(0)
    except tpk.errors.BackendError as error:
        raise Skip(str(error)) from None
    record = tpk.last_path()
    return Runnable(
        launch,
        p.copies,
        check=lambda: p.check(outputs),
        poison=fill_nan(outputs),
        extra={"path": record.path, "why": record.why} if record is not None else {},
    )


# The collective and the product in sequence.


def _all_gather_then_mm(p: Problem) -> Runnable:
    gathered, out = p.empty(p.m, p.k), p.outputs()

    def launch(i: int) -> None:
        i %= p.copies
        all_gather(gathered[i], p.x[i], group=p.group)
        torch.mm(gathered[i], p.w[i].t(), out=out[i])

    return Runnable(launch, p.copies, check=lambda: p.check(out), poison=fill_nan(gathered, out))


def _mm_then_reduce_scatter(p: Problem) -> Runnable:
    partial, out = p.empty(p.m, p.n), p.outputs()

    def launch(i: int) -> None:
        i %= p.copies
        torch.mm(p.x[i], p.w[i].t(), out=partial[i])
        reduce_scatter(out[i], partial[i], group=p.group)

    return Runnable(launch, p.copies, check=lambda: p.check(out), poison=fill_nan(partial, out))


def _mm_then_all_reduce(p: Problem) -> Runnable:
    out = p.outputs()

    def launch(i: int) -> None:
        i %= p.copies
        torch.mm(p.x[i], p.w[i].t(), out=out[i])
        dist.all_reduce(out[i], group=p.group)

    return Runnable(launch, p.copies, check=lambda: p.check(out), poison=fill_nan(out))


_SEQUENCES = {AG: _all_gather_then_mm, RS: _mm_then_reduce_scatter, AR: _mm_then_all_reduce}


# The parts.


def _gemm(p: Problem) -> Runnable:
    a, out = p.full, p.empty(p.m, p.n)

    def launch(i: int) -> None:
        i %= p.copies
        torch.mm(a[i], p.w[i].t(), out=out[i])

    return Runnable(launch, p.copies, check=lambda: p.check_product(out), poison=fill_nan(out))


def _all_gather(p: Problem) -> Runnable:
    gathered = p.empty(p.m, p.k)

    def launch(i: int) -> None:
        all_gather(gathered[i % p.copies], p.x[i % p.copies], group=p.group)

    def check() -> Check:
        wrong = 0
        for x, got in zip(p.x, gathered, strict=True):
            want = [torch.empty_like(x) for _ in range(p.world)]
            dist.all_gather(want, x, group=p.group)
            wrong += not torch.equal(torch.cat(want), got)
        return _exact(wrong)

    return _collective(p, launch, check, fill_nan(gathered))


def _reduce_scatter(p: Problem) -> Runnable:
    partial = [p.uniform(p.m, p.n) for _ in range(p.copies)]
    out = p.outputs()

    def launch(i: int) -> None:
        reduce_scatter(out[i % p.copies], partial[i % p.copies], group=p.group)

    def check() -> Check:
        worst = 0.0
        for one, got in zip(partial, out, strict=True):
            pieces = torch.empty_like(one)
            dist.all_to_all_single(pieces, one, group=p.group)
            want = pieces.view(p.world, p.shard, p.n).double().sum(0)
            error = (got.double() - want).norm() / want.norm()
            worst = max(worst, float(error) if bool(error.isfinite()) else float("inf"))
        return Check(worst, p.tolerance)

    return _collective(p, launch, check, fill_nan(out))


def _all_reduce(p: Problem) -> Runnable:
    """In place, as torch has it; the maximum, which moves as much as the sum and does not grow from call to call."""
    source = [p.uniform(p.m, p.n) for _ in range(p.copies)]
    out = p.empty(p.m, p.n)

    def launch(i: int) -> None:
        dist.all_reduce(out[i % p.copies], op=dist.ReduceOp.MAX, group=p.group)

    def restore() -> (
        None
    ):  # input and output are one: NaN would be passed on, this rank's part alone fails the check
        for each, original in zip(out, source, strict=True):
            each.copy_(original)

    def check() -> Check:
        wrong = 0
        for one, got in zip(source, out, strict=True):
            parts = [torch.empty_like(one) for _ in range(p.world)]
            dist.all_gather(parts, one, group=p.group)
            wrong += not torch.equal(torch.stack(parts).amax(0), got)
        return _exact(wrong)

    restore()
    return _collective(p, launch, check, restore)


def _collective(
    p: Problem, launch: Callable[[int], None], check: Callable[[], Check], poison: Callable[[], None]
) -> Runnable:
    return Runnable(launch, p.copies, check=check, poison=poison, flops=0.0, bytes=float(p.link_bytes))


def _exact(wrong: int) -> Check:
    return Check(float("inf") if wrong else 0.0, 0.0)


_COLLECTIVES = {AG: _all_gather, RS: _reduce_scatter, AR: _all_reduce}
