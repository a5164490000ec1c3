"""The link suite on GPUs: every byte that its kernels and the copy engine move, flags behind data, CUDA graphs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpkernels.testing import RankContext

pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")

CANARY = 0xC5
SIZES = (1, 15, 16, 17, 1000, 4096, 65536 + 5, 300_000, 3 * (1 << 20) + 16)
SKEWS = ((0, 0), (0, 0), (16, 48), (1, 1), (3, 8), (0, 4))
_CONTROL: dict[str, Any] = {}


def make_context(ctx: RankContext, **options):
    """For all ranks of the pool."""
    from bench.context import Context
    from bench.suite import Options

    if "group" not in _CONTROL:
        _CONTROL["group"] = dist.new_group(backend="gloo")
    options = Options(device="cuda", world=ctx.world, small=True, **options)
    return Context(options, ctx.rank, ctx.world, ctx.device, ctx.group, _CONTROL["group"])


def transport_of(kind: str, sms: int, *, pull: bool = False, flag: bool = False):
    from bench.suites.link_cases import Transport

    return Transport("tested", "", kind, pull, sms, flag=flag)


# --- one GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", ["bulk", "lsu"])
def test_copies_within_a_gpu(kind: str, seed: int) -> None:
    """Any size, alignment, number of CTAs and of jobs, one source or many, with flags; nothing beside is touched."""
    from bench.context import Context
    from bench.suite import Options
    from bench.suites.link_transports import SmCopies

    device = torch.device("cuda", torch.cuda.current_device())
    context = Context(Options(), device=device)
    draw = random.Random(seed)
    for size, (src_skew, dst_skew), spread in itertools.product(SIZES, SKEWS, (False, True)):
        count, sms = draw.choice((1, 2, 3, 7)), draw.choice((1, 3, 16, 0))
        room = (size + 64 + 255) // 128 * 128
        source = torch.randint(0, 256, (count, room), dtype=torch.uint8, device=device)
        target = torch.full((count, room), CANARY, dtype=torch.uint8, device=device)
        flags = torch.zeros(count, dtype=torch.int32, device=device)
        jobs = [
            (
                target[j, dst_skew : dst_skew + size],
                source[0 if spread else j, src_skew : src_skew + size],
                flags[j],
            )
            for j in range(count)
        ]
        copies = SmCopies([jobs, jobs, jobs], context, transport_of(kind, sms, flag=True))
        assert copies.spread == (spread and count > 1)
        want = torch.full_like(target, CANARY)
        for j in range(count):
            want[j, dst_skew : dst_skew + size] = source[0 if spread else j, src_skew : src_skew + size]
        what = f"{kind} of {size} bytes, skews {src_skew} and {dst_skew}, {count} jobs, {sms or 'all'} SMs"
        for i in range(3):
            target.fill_(CANARY)
            copies.launch(i)
            wrong = (target != want).nonzero()
            assert wrong.numel() == 0, (
                f"{what}, launch {i}: {wrong.shape[0]} bytes differ, first {wrong[0].tolist()}"
            )
            assert flags.tolist() == [i + 1] * count, what
        assert int(copies.counters[1]) == 0, "a wait expired"


# --- several GPUs ------------------------------------------------------------------------------------------------


def copy_between(ctx: RankContext, kind: str, seed: int) -> list[str]:
    """Pushes and pulls to the next rank, and from one source to all; returns what was wrong."""
    from bench.suites.link_exchange import _symmetric
    from bench.suites.link_transports import SmCopies

    context = make_context(ctx)
    rank, world = ctx.rank, ctx.world
    room = (max(SIZES) + 64 + 255) // 128 * 128
    storages, handle = _symmetric(context, (1 + world) * room)  # a source, and a slot for each sender
    slots = {r: s[room:].view(world, room) for r, s in storages.items()}

    def data(of: int) -> torch.Tensor:
        generator = torch.Generator(ctx.device).manual_seed(seed + of)
        return torch.randint(0, 256, (room,), dtype=torch.uint8, device=ctx.device, generator=generator)

    storages[rank][:room] = data(rank)
    draw, wrong = random.Random(seed), []
    after, before = (rank + 1) % world, (rank - 1) % world
    for size, (src_skew, dst_skew), way in itertools.product(SIZES, SKEWS, ("push", "pull", "spread")):
        sms = draw.choice((1, 4, 16))

        def ends(src: int, at: int, slot: int, size=size, src_skew=src_skew, dst_skew=dst_skew):
            dst = slots[at][slot, dst_skew : dst_skew + size]
            return dst, storages[src][src_skew : src_skew + size], None

        if way == "pull":
            jobs, senders = [ends(after, rank, after)], [after]
        elif way == "push":
            jobs, senders = [ends(rank, after, rank)], [before]
        else:
            senders = [r for r in range(world) if r != rank]
            jobs = [ends(rank, r, rank) for r in senders]
        copies = SmCopies([jobs], context, transport_of(kind, sms, pull=way == "pull"))
        slots[rank].fill_(CANARY)
        context.synchronize()
        context.agree(None)
        copies.launch(0)
        context.synchronize()
        context.agree(None)
        want = torch.full_like(slots[rank], CANARY)
        for r in senders:
            want[r, dst_skew : dst_skew + size] = data(r)[src_skew : src_skew + size]
        if not torch.equal(slots[rank], want) or int(copies.counters[1]):
            wrong.append(
                f"rank {rank}: {kind} {way} of {size} bytes, skews {src_skew}, {dst_skew}, {sms} SMs"
            )
        context.agree(None)  # nobody poisons what another one still looks at
    del handle
    return wrong


@pytest.mark.gpun
@pytest.mark.parametrize("kind", ["bulk", "lsu"])
def test_copies_between_gpus(gpu_ranks: Any, kind: str, seed: int) -> None:
    wrong = [text for of_rank in gpu_ranks.run(copy_between, kind, seed) for text in of_rank]
    assert not wrong, "; ".join(wrong[:5])


def run_all(ctx: RankContext) -> tuple[int, list[str]]:
    """Every variant of every small case: launched, replayed from a graph, checked. How many, and what failed."""
    from bench.suite import Skip
    from bench.suites.link import SUITE

    context = make_context(ctx)
    count, wrong = 0, []
    stream = torch.cuda.Stream()
    for case in SUITE.cases(context.options):
        with torch.cuda.stream(stream):
            work = SUITE.workload(case, context)
            for variant in SUITE.variants(context.options):
                if not SUITE.applies(case, variant.name, context.options):
                    continue
                what = f"rank {ctx.rank}: {case.name} by {variant.name}"
                try:
                    runnable = work.prepare(variant.name)
                except Skip as reason:
                    wrong.append(f"{what} was skipped: {reason}")
                    continue
                count += 1
                if runnable.sample is not None:
                    samples = list(runnable.sample())
                    if not runnable.check().ok or (
                        ctx.rank < 2 and not all(1.0 < us < 100.0 for us in samples)
                    ):
                        wrong.append(f"{what}: {samples}")
                    continue
                calls = [runnable.launch, *runnable.parts.values()]

                def walk(calls=calls, runnable=runnable) -> None:
                    for launch in calls:
                        for i in range(runnable.copies):
                            launch(i)

                runnable.poison()
                if runnable.check().ok:
                    wrong.append(f"{what}: right before it ran")
                walk()
                if not runnable.check().ok:
                    wrong.append(f"{what}: launched")
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    walk()
                runnable.poison()
                for _ in range(3):
                    graph.replay()
                if not runnable.check().ok:
                    wrong.append(f"{what}: replayed")
                del graph
            work.close()
    return count, wrong


@pytest.mark.gpun
def test_every_variant_of_every_small_case(gpu_ranks: Any) -> None:
    results = gpu_ranks.run(run_all, timeout=300.0)
    wrong = [text for _, of_rank in results for text in of_rank]
    assert not wrong, "; ".join(wrong[:5])
    assert all(count > 100 for count, _ in results)


def wait_for_flags(ctx: RankContext, kind: str) -> tuple[int, int]:
    """A consumer on the GPU waits for every flag and compares at once what came with it; returns (wrong, late)."""
    from bench.kernels import link_kernels
    from bench.suites.link_exchange import Exchange
    from bench.suites.link_transports import SmCopies, by_engine

    context = make_context(ctx)
    exchange = Exchange("all_gather", 1 << 20, "ordered", context, symmetric=True, copies=6)
    transport = transport_of(kind, 0 if kind == "engine" else 8, flag=True)
    launch = by_engine(exchange, transport) if kind == "engine" else SmCopies.of(exchange, transport).launch
    kernels = link_kernels(ctx.device.index)
    late = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    senders = exchange.senders()
    wanted = {sender: exchange._data(sender).view(torch.int16) for sender in senders}
    consumer, producer = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)

    def consume() -> None:
        for i in range(exchange.copies):
            for sender in senders:
                kernels.wait(exchange.flags()[i, sender].data_ptr(), 1, i + 1, late=late.data_ptr())
                got = exchange.slot(exchange.targets()[i], sender).view(torch.int16)
                wrong.add_((got != wanted[sender][i]).sum())

    def produce() -> None:
        for i in range(exchange.copies):
            torch.cuda._sleep(20_000 * (i % 3))
            launch(i)

    for round_ in range(50):
        exchange.poison()
        # In the first round nothing waits: whatever is loaded lazily is loaded then.
        for stream, run in (
            ((producer, produce), (consumer, consume))
            if round_ == 0
            else (
                (consumer, consume),
                (producer, produce),
            )
        ):
            with torch.cuda.stream(stream):
                run()
            if round_ == 0:
                exchange.quiet()
        exchange.quiet()
    return int(wrong), int(late)


@pytest.mark.gpun
@pytest.mark.parametrize("kind", ["engine", "bulk", "lsu"])
def test_a_flag_comes_after_its_data(gpu_ranks: Any, kind: str) -> None:
    assert gpu_ranks.run(wait_for_flags, kind) == [(0, 0)] * torch.cuda.device_count()


def wait_in_vain(ctx: RankContext) -> tuple[int, int]:
    """A round trip that rank 1 never joins, and a flag that nobody raises: both end, and are counted."""
    from bench.kernels import link_kernels

    kernels = link_kernels(ctx.device.index)
    word = torch.zeros(2, dtype=torch.int32, device=ctx.device)
    late = torch.zeros(2, dtype=torch.int32, device=ctx.device)
    if ctx.rank == 0:
        mine, other = word.data_ptr(), word.data_ptr() + 4
        kernels.round_trips(mine, other, 3, 1, leads=True, late=late.data_ptr())
        kernels.wait(mine, 1, 1, late=late.data_ptr() + 4)
    torch.cuda.synchronize()
    return int(late[0]), int(late[1])


@pytest.mark.gpun
def test_waits_are_bounded(gpu_ranks: Any) -> None:
    assert gpu_ranks.run(wait_in_vain)[0] == (1, 1)


def profile_copies(ctx: RankContext) -> list[str]:
    """Names of what ran on the GPU for one walk of pushes by the copy engine."""
    from torch.profiler import ProfilerActivity, profile

    from bench.suites.link_exchange import Exchange
    from bench.suites.link_transports import by_engine

    context = make_context(ctx)
    exchange = Exchange("all_gather", 1 << 20, "profiled", context, symmetric=True, copies=2)
    launch = by_engine(exchange, transport_of("engine", 0, flag=True))
    launch(0)
    exchange.quiet()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(exchange.copies):
            launch(i)
        torch.cuda.synchronize()
    context.agree(None)
    events = profiler.events() or []
    return [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpun
def test_engine_copies_are_no_kernels(gpu_ranks: Any) -> None:
    world = torch.cuda.device_count()
    for names in gpu_ranks.run(profile_copies):
        copies = [name for name in names if name.startswith("Memcpy")]
        assert len(copies) == 2 * 2 * (world - 1), f"pieces and flags, of {names}"
        assert not [name for name in names if "kernel" in name.lower()], names
