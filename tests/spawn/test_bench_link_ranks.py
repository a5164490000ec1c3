"""Transfers of the link suite on gloo ranks: every variant of every case is right, and wrong results are found."""

from __future__ import annotations

import ctypes
import math
from unittest import mock

import pytest
import torch

from tpkernels.testing import RankContext


def make_context(ctx: RankContext, **options):
    from bench.context import Context
    from bench.suite import Options

    options = Options(device="cpu", world=ctx.world, small=True, **options)
    return Context(options, ctx.rank, ctx.world, ctx.device, ctx.group, ctx.group)


def run_all(ctx: RankContext) -> list[tuple]:
    """Every variant of every case as the engine runs it: poisoned, launched on all sets, checked."""
    from bench.suites.link import SUITE

    context = make_context(ctx)
    done = []
    for case in SUITE.cases(context.options):
        work = SUITE.workload(case, context)
        for variant in SUITE.variants(context.options):
            if not SUITE.applies(case, variant.name, context.options):
                continue
            runnable = work.prepare(variant.name)
            if runnable.sample is not None:
                samples = list(runnable.sample())
                done.append((case.op, variant.name, runnable.check(), samples, dict(runnable.extra)))
                continue
            if runnable.poison is not None:
                runnable.poison()
            before = runnable.check()
            for launch in (runnable.launch, *runnable.parts.values()):
                for i in range(2 * runnable.copies):  # a second walk changes nothing
                    launch(i)
            check = runnable.check()
            done.append((case.op, variant.name, check, before, dict(runnable.extra)))
            if runnable.close:
                runnable.close()
        work.close()
    return done


def test_every_case_is_right_and_poison_is_seen(ranks):
    of_ranks = ranks.run(run_all, world=3)
    ops = {op for op, *_ in of_ranks[0]}
    moved = {"push", "pull", "all_gather", "scatter", "reduce_scatter", "all_reduce"}
    assert ops == {"copy", "matmul", *moved, "beside", "flag_round_trip"}
    for rank, results in enumerate(of_ranks):
        for op, variant, check, before, extra in results:
            assert check.ok, f"rank {rank}: {op} by {variant}: {check}"
            if op == "flag_round_trip":
                assert all(us > 0 for us in before) == (rank < 2), "ranks beyond the two stand by"
                continue
            assert not before.ok, f"rank {rank}: {op} by {variant} was found right before it ran"
            if op in moved:
                assert check.tolerance == 0 and math.isinf(before.error)
            if op == "beside":
                assert extra["gemm_beside_us"] > 0 and extra["gemm_slowdown"] > 0
    samples = [next(s for op, _, _, s, _ in results if op == "flag_round_trip") for results in of_ranks]
    assert len({len(s) for s in samples}) == 1, "the engine takes the slowest rank sample by sample"


def spoil(ctx: RankContext, op: str, where: str) -> list[bool]:
    """Verdicts on a right transfer, then on one of which rank 1 changes something after it arrived."""
    from bench.suites.link_exchange import Exchange
    from bench.suites.link_transports import by_collectives

    context = make_context(ctx)
    exchange = Exchange(op, 4096, "spoilt", context, symmetric=False, copies=2)
    launch = by_collectives(exchange, context)
    verdicts = []
    for spoilt in (False, True):
        exchange.poison()
        for i in range(exchange.copies):
            launch(i)
        if spoilt and ctx.rank == 1:
            target = exchange.targets()[1]
            if where == "last":
                target[-1 if op != "scatter" or ctx.rank != ctx.world - 1 else 0] += 0.25
            elif where == "swapped":  # two ranks' pieces at each other's place
                a, b = exchange.slot(target, 0), exchange.slot(target, 2)
                a[:], b[:] = b.clone(), a.clone()
            else:  # the right piece of the wrong buffer set
                target.copy_(exchange.targets()[0])
        verdicts.append(exchange.check().ok)
    return verdicts


def test_wrong_bytes_are_found_on_every_rank(ranks):
    for op in ("push", "pull", "all_gather", "scatter", "reduce_scatter", "all_reduce"):
        for where in ("last", "swapped", "other set"):
            if where == "swapped" and op not in ("all_gather", "scatter"):
                continue
            of_ranks = ranks.run(spoil, op, where, world=3)
            assert of_ranks == [[True, False]] * 3, f"{op}, {where}: {of_ranks}"


def raise_flags(ctx: RankContext) -> list[bool]:
    """Verdicts with flags: none raised, all but one, all, one of another epoch."""
    from bench.suites.link_exchange import Exchange
    from bench.suites.link_transports import by_collectives

    context = make_context(ctx)
    exchange = Exchange("all_gather", 4096, "flags", context, symmetric=False, copies=3)
    launch = by_collectives(exchange, context)
    for i in range(exchange.copies):
        launch(i)
    verdicts = [exchange.check(flags=True).ok]
    flags, senders = exchange.flags(), exchange.senders()
    flags[:, senders] = exchange.epochs[:, None]
    flags[2, senders[0]] = 0
    verdicts.append(exchange.check(flags=True).ok)
    flags[2, senders[0]] = 3
    verdicts.append(exchange.check(flags=True).ok)
    if ctx.rank == 2:
        flags[0, senders[-1]] = 2
    verdicts.append(exchange.check(flags=True).ok)
    return verdicts


def test_flags_are_part_of_the_verdict(ranks):
    assert ranks.run(raise_flags, world=3) == [[False, False, True, False]] * 3


class CopiesOnTheHost:
    """In place of the kernels: does what a table of jobs says."""

    def bulk(self, jobs, count, nbytes, *, spread, sms, epoch, finished, late):
        words = (ctypes.c_int64 * (3 * count)).from_address(jobs)
        for j in range(count):
            dst, src, flag = words[3 * j : 3 * j + 3]
            ctypes.memmove(dst, words[1] if spread else src, nbytes)
            if flag:
                ctypes.c_uint32.from_address(flag).value = epoch


def copy_to_others(ctx: RankContext, how: str) -> dict[str, list[tuple]]:
    """What arrives where, with the other ranks' buffers as memory of this process: (rank, bytes right, flags right)."""
    from bench.suites import link_transports
    from bench.suites.link_cases import Transport
    from bench.suites.link_exchange import Exchange

    context = make_context(ctx)
    found = {}
    for op, pull in (
        ("push", False),
        ("pull", True),
        ("all_gather", False),
        ("all_gather", True),
        ("scatter", False),
    ):
        exchange = Exchange(op, 2000, op, context, symmetric=False, copies=2)
        mine = exchange._storages[ctx.rank]
        exchange._storages = {r: mine if r == ctx.rank else torch.zeros_like(mine) for r in range(ctx.world)}
        for r in range(ctx.world):
            if r != ctx.rank:
                exchange.sources(r).copy_(exchange._data(r))
        if how == "engine":
            transport = Transport("", "", "engine", pull, chunks=3, flag=True)
            launch = link_transports.by_engine(exchange, transport)
        else:
            transport = Transport("", "", "bulk", pull, sms=16, flag=True)
            with mock.patch.object(link_transports, "kernels_for", return_value=(CopiesOnTheHost(), 16)):
                copies = link_transports.SmCopies.of(exchange, transport)
            assert copies.spread == (op == "all_gather" and not pull and ctx.world > 2)
            launch = copies.launch
        for i in range(2 * exchange.copies):
            launch(i)
        # What this rank pushed, seen by the receivers; or what it pulled, seen here.
        right = []
        for r in [ctx.rank] if pull else [r for r in range(ctx.world) if r != ctx.rank]:
            for sender in exchange.senders() if pull else [ctx.rank]:
                got, want = exchange.targets(r), exchange._data(sender)
                if op in ("all_gather", "scatter"):
                    got = exchange.slot(got, sender)
                if op == "scatter":
                    want = exchange.slot(want, r)
                flags = torch.equal(exchange.flags(r)[:, sender], exchange.epochs)
                right.append((r, torch.equal(got, want), flags))
        found[f"{op} {'pull' if pull else 'push'}"] = right
    return found


@pytest.mark.parametrize("how", ["engine", "sm"])
def test_copies_go_where_they_belong(ranks, how):
    for rank, found in enumerate(ranks.run(copy_to_others, how, world=3)):
        others = [r for r in range(3) if r != rank]
        following = (rank + 1) % 3
        assert found["push push"] == [(r, r == following, r == following) for r in others]
        assert found["pull pull"] == [(rank, True, True)]
        assert found["all_gather push"] == [(r, True, True) for r in others]
        assert found["all_gather pull"] == [(rank, True, True)] * 2
        assert found["scatter push"] == [(r, True, True) for r in others]
