"""Path "fused" of small calls: one kernel behind or in front of the product.

Run on the ranks of a pool, as fused_checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import fused_checks
import fused_gradients
import torch
from fused_behaviour import Made, delay, differs, first_results, mixed_calls, repeat, unchecked
from fused_checks import FUSED, laid_out, new_group
from gemm_checks import Failures, differences, integers, randn
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.comm import small
from tpkernels.testing import poison_

Tensor = torch.Tensor
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sum:
    """One problem. ``lead``: leading dimensions; ``terms``: products that are added on each rank."""

    lead: tuple[int, ...]
    n: int
    k: int = 64
    terms: int = 1
    bias: bool = False
    residual: bool = False
    out_dtype: torch.dtype | None = None


SUMS = [
    Sum((16,), 256),
    Sum((1,), 1),
    Sum((1,), 8, bias=True),
    Sum((3,), 333, bias=True, residual=True),
    Sum((5, 7), 129, residual=True),
    Sum((200,), 264, k=100, bias=True, residual=True, out_dtype=torch.float32),
    Sum((7,), 97, terms=3, bias=True),
    Sum((64,), 2048, k=128),
    Sum((4,), 24, k=0, bias=True),
    Sum((300,), 1000, k=72, residual=True),
]


LAYOUTS = ["rows", "cols", "rows_odd", "cols_odd", "strided"]  # of operands: gemm_checks.embed


@contextmanager
def forced(way: str | None) -> Iterator[None]:
    """Every all-reduce goes this way, whatever its size; None: by two steps."""
    usual = small.way_of
    small.way_of = lambda op, rows, row_bytes: way if sum(rows) * row_bytes > 0 else None
    try:
        yield
    finally:
        small.way_of = usual


@dataclass
class Summed:
    """``run`` makes the call with fresh operands; ``want``: its result, to the bit."""

    run: Callable[[], Tensor]
    want: Tensor


def sum_call(
    ctx: Any, path: str, dtype: torch.dtype, case: Sum, generator: torch.Generator, layout: str = ""
) -> Summed:
    """With a layout operands lie among NaN, and are small integers: the result is defined whoever multiplies.

    Else partials are those of tpk.matmul: same operands, same product.
    """
    draw = integers if layout else randn
    make = lambda *shape: draw(*shape, dtype=dtype, generator=generator)  # noqa: E731
    out_dtype, shape = case.out_dtype or dtype, (*case.lead, case.n)
    as_ = [make(ctx.world, *case.lead, case.k) for _ in range(case.terms)]
    bs = [make(ctx.world, case.k, case.n) for _ in range(case.terms)]
    bias = make(case.n) if case.bias else None
    residual = make(*shape).to(out_dtype) if case.residual else None

    def partial(rank: int) -> Tensor:
        # Copies lie as those of run() do: what cuBLAS takes depends on addresses.
        pairs = [(a[rank].clone(), b[rank].clone()) for a, b in zip(as_, bs, strict=True)]
        if case.terms == 1:
            return tpk.matmul(*pairs[0], out_dtype=out_dtype)
        products = [tpk.matmul(a, b, out_dtype=torch.float32) for a, b in pairs]
        total = products[0]
        for product in products[1:]:
            total = total + product
        return total.to(out_dtype)

    want = partial(0).float()
    for rank in range(1, ctx.world):
        want = want + partial(rank)
    for term in (bias, residual):
        want = want if term is None else want + term

    def run() -> Tensor:
        mine = [[x[ctx.rank].clone() for x in some] for some in (as_, bs)]
        if layout and len(case.lead) == 1:
            mine = [[laid_out(x, layout) for x in some] for some in mine]
        left, right = ([x if case.terms > 1 else x[0]][0] for x in mine)
        added = [None if term is None else term.clone() for term in (bias, residual)]
        out = tpk.matmul_all_reduce(
            left,
            right,
            ctx.group,
            bias=added[0],
            residual=added[1],
            out_dtype=case.out_dtype,
            path=path,
        )
        for operand in (*mine[0], *mine[1], *added):
            if operand is not None and operand.numel() > 0:
                poison_(operand)
        return out

    return Summed(run, want.to(out_dtype))


def check_all_reduce(ctx: Any, path: str, dtype: torch.dtype, seed: int) -> None:
    """Every way, on every size: bitwise the rank-ordered sum of partials. By two steps: exact sums, in each layout."""
    generator = torch.Generator(ctx.device).manual_seed(seed)  # the same data on every rank
    with Failures() as failures:
        for case in SUMS:
            for way, layout in (
                *((way, "") for way in (*small.SUM_WAYS, "usual")),
                *((None, x) for x in LAYOUTS),
            ):
                with failures.case(f"{way}, {layout} {case}"):
                    call = sum_call(ctx, path, dtype, case, generator, layout)
                    if way == small.PACKETS and 2 * ctx.world * (call.want.nbytes + 128) > small.PACKET_BYTES:
                        continue  # there is no room for so many
                    if way == "usual":
                        out = call.run()
                    else:
                        with forced(way):
                            out = call.run()
                    _check_path(path, way)
                    assert out.dtype == call.want.dtype and out.is_contiguous()
                    different = differences(out, call.want)
                    assert not different, different
                    poison_(out)


def _check_path(path: str, way: str | None) -> None:
    record = tpk.last_path()
    if path == FUSED:
        assert record.path.startswith("fused+"), record
        assert way in (None, "usual") or record.detail.endswith(f"; {way}"), record


def check_empty(ctx: Any, path: str) -> None:
    """Nothing is launched where there is nothing to sum, and calls go on."""
    ones = lambda *shape: torch.ones(*shape, dtype=BF16)  # noqa: E731
    for m, n in ((0, 8), (4, 0), (0, 0)):
        out = tpk.matmul_all_reduce(ones(m, 8), ones(8, n), ctx.group, path=path)
        assert out.shape == (m, n)
        out = tpk.matmul_all_reduce(ones(2, 8), ones(8, 5), ctx.group, path=path)
        assert torch.equal(out, torch.full((2, 5), 8.0 * ctx.world, dtype=BF16))


def check_gradients(ctx: Any, path: str) -> None:
    """The gradient of an operand that is the same on every rank is a small all-reduce, too."""
    x = torch.ones(3, 8, dtype=BF16).requires_grad_()
    w = torch.full((8, 5), ctx.rank + 1.0, dtype=BF16).requires_grad_()
    with tpk.record_paths() as log:
        (y,) = tpk.matmul_replicated(x, [w], ctx.group, path=path)
        out = tpk.matmul_all_reduce(y, w.t(), ctx.group, path=path)
        out.sum().backward()
    everyone = sum((r + 1) ** 2 for r in range(ctx.world))
    assert torch.equal(out, torch.full_like(out, 40.0 * everyone))
    assert torch.equal(x.grad, torch.full_like(x, 40.0 * everyone))
    if path == FUSED:
        runs = {run for op, run in log.counts if op == "matmul_all_reduce"}
        assert len(runs) == 1 and runs.pop() in ("fused+cublas", "fused+blas"), log


def check_few_rows(ctx: Any, path: str, dtype: torch.dtype, seed: int) -> None:
    """Gathers and reduce-scatters: all that is checked of those which overlap."""
    for check in (fused_checks.check_gather, fused_checks.check_scatter, fused_checks.check_reference):
        check.__wrapped__(ctx, path, dtype, seed)  # without overlaps()
    fused_gradients.check_gradients.__wrapped__(ctx, path, dtype, seed)


def check_sums_are_in_order(ctx: Any, path: str, seed: int) -> None:
    """A small reduce-scatter gives the bits of a small all-reduce: those of the other paths."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    for sizes, n in (([5] * ctx.world, 72), ([0, 13, *[2] * (ctx.world - 2)], 333)):
        make = lambda *shape: randn(*shape, dtype=BF16, generator=generator)  # noqa: E731
        as_, bs = ([make(ctx.world, *s)[ctx.rank] for _ in "ab"] for s in ((sum(sizes), 64), (64, n)))
        bias, residual = make(n), make(sum(sizes), n)
        want = tpk.matmul_all_reduce(as_, bs, ctx.group, bias=bias, residual=residual, path=path)
        mine = residual.split(sizes)[ctx.rank]
        out = tpk.matmul_reduce_scatter(
            as_, bs, ctx.group, shard_sizes=sizes, bias=bias, residual=mine, path=path
        )
        different = differences(out, want.split(sizes)[ctx.rank])
        assert not different, different


def _several(ctx: Any, path: str, seed: int) -> list[Made]:
    """Sums of every way, gathers and reduce-scatters, each with two sets of data."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    some = [Sum((1,), 8), Sum((16,), 333, bias=True), Sum((128,), 2048, residual=True), Sum((512,), 4096)]
    some.append(Sum((64,), 4096, out_dtype=torch.float32))
    sums = [sum_call(ctx, path, BF16, case, generator) for case in some for _ in range(2)]
    others = mixed_calls(ctx, path, seed)
    firsts = [(call.run, first) for call, first in zip(others, first_results(others), strict=True)]
    return [*((lambda call=call: [call.run()], [call.want]) for call in sums), *firsts]


def check_repeats(ctx: Any, path: str, iterations: int, seed: int) -> None:
    """Sizes in random order, late ranks, poisoned results: always the same bits."""
    repeat(ctx, _several(ctx, path, seed), iterations, seed)


def check_repeats_by_two_steps(ctx: Any, path: str, iterations: int, seed: int) -> None:
    """Of all-reduces that overlap, also of fewer rows than ranks: sums that their owners send to all."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    some = [
        Sum((64 * ctx.world + 5,), 333, bias=True),
        Sum((300,), 1000, k=72, residual=True),
        Sum((2, 1), 264),
    ]
    some.append(Sum((ctx.world, 40), 72, out_dtype=torch.float32))
    with forced(None):
        calls = [sum_call(ctx, path, BF16, case, generator, "rows") for case in some for _ in range(2)]
        repeat(ctx, [(lambda call=call: [call.run()], [call.want]) for call in calls], iterations, seed)


def check_graphs(ctx: Any, path: str, replays: int, seed: int) -> None:
    """Graphs of several calls each, replayed with new data, an odd number of times, between eager calls."""
    calls, generator = _several(ctx, path, seed), torch.Generator(ctx.device).manual_seed(seed)
    together, alone = random.Random(seed), random.Random(seed + 1 + ctx.rank)
    data = torch.Generator(ctx.device).manual_seed(seed + 1 + ctx.rank)
    steps, graphs = [], []
    for m, n in ((4, 520), (96, 4096), (512, 4096)):
        x = randn(m, 64, dtype=BF16, generator=generator)
        w = randn(ctx.world, 64, n, dtype=BF16, generator=generator)[ctx.rank]

        def step(x: Tensor = x, w: Tensor = w) -> Tensor:
            y = tpk.matmul_all_reduce(x, w, ctx.group, path=path)
            y = tpk.matmul_all_reduce(y, w.t(), ctx.group, path=path)
            h = tpk.all_gather_matmul(y, w, ctx.group, path=path)
            return tpk.matmul_reduce_scatter(h, w.t(), ctx.group, path=path)

        step()
        steps.append((x, step))
    torch.cuda.synchronize()
    for _, step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = step()
        graphs.append((graph, out))
    wrong = torch.zeros(2, dtype=torch.int64, device=ctx.device)
    with unchecked():
        for _ in range(replays):
            pick, eager = together.randrange(len(steps)), together.random() < 0.5
            (x, step), (graph, out) = steps[pick], graphs[pick]
            x.copy_(randn(*x.shape, dtype=BF16, generator=data))
            if eager:
                run, wants = together.choice(calls)
                for got, want in zip(run(), wants, strict=True):
                    wrong[0] += differs(got, want)
            delay(ctx, alone)
            poison_(out)
            for _ in range(together.randrange(1, 4)):
                graph.replay()
            wrong[1] += differs(step(), out)
        torch.cuda.synchronize()
    assert not wrong.any(), f"of {replays} rounds, wrong: eager calls {wrong[0]}, replays {wrong[1]}"


def check_first_use_in_a_capture(ctx: Any, path: str, capture: Callable[[Any], Any]) -> None:
    """It is refused; with memory reserved it is not, whatever the size. ``capture``: a context of one."""
    group = new_group(ctx, list(range(ctx.world)))
    here = replace(ctx, group=group, group_name=group.group_name)
    x, w = torch.ones(64, 8, dtype=BF16), torch.ones(8, 256, dtype=BF16)
    ops = (tpk.matmul_all_reduce, tpk.all_gather_matmul, tpk.matmul_reduce_scatter)
    with unchecked():
        for op in ops:
            with capture(ctx):
                expect(
                    tpk.errors.BackendError,
                    [FUSED, "captur"],
                    lambda op=op: op(x, w, here.group, path=path),
                )
        tpk.reserve(group, max_m=1, all_reduce_n=1)
        for op in ops:
            with capture(ctx):
                op(x, w, here.group, path=path)
