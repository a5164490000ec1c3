"""Values of path "fused", checked on the ranks of a pool: GPUs of their own (gpun) or one shared (gpu1).

Every check takes the path, so that it can itself be tried on gloo ranks without a GPU. Operands lie among NaN in every
layout; they are poisoned as soon as a call returns, since nothing on the stream may read them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from few_rows import few_rows_overlap, overlaps, path_of_few_rows
from gemm_checks import Failures, activate, differences, embed, integers, randn
from op_checks import own, pieces

import tpkernels as tpk
from tpkernels.testing import UNIT_ROUNDOFF, assert_close_tiles, poison_

Tensor = torch.Tensor
FUSED = "fused"


@dataclass(frozen=True)
class Case:
    """One problem. ``rows``: of every rank, in dimension ``dim``, which is gathered or scattered.

    lead: the other leading dimension of a 3-D operand, 0 for 2-D. ns: columns of each weight (a scatter has one).
    operand, weight: layouts of gemm_checks.embed; a weight in "cols" is what ``w.t()`` of nn.Linear's is.
    """

    rows: tuple[int, ...]
    k: int = 64
    ns: tuple[int, ...] = (96,)
    lead: int = 0
    dim: int = 0
    operand: str = "rows"
    weight: str = "cols"
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    gathered: bool = False

    def shape(self, rows: int, last: int) -> tuple[int, ...]:
        if self.lead == 0:
            return (rows, last)
        return (rows, self.lead, last) if self.axis == 0 else (self.lead, rows, last)

    @property
    def axis(self) -> int:
        return self.dim % (3 if self.lead else 2)

    @property
    def empty(self) -> bool:
        return 0 in (sum(self.rows), self.k, sum(self.ns))


@dataclass
class Call:
    """``run`` makes the call with fresh operands and returns its results; ``verify`` judges them."""

    run: Callable[[], list[Tensor]]
    verify: Callable[[list[Tensor]], None]


def rows_of_ranks(world: int) -> list[tuple[int, ...]]:
    """Equal shards, fewer rows than ranks, none at all, uneven ones that end inside a tile, empty ones."""
    some = [
        [64],
        [200, 131, 70],
        [513, 0, 3, 128],
        [0, 130, 257, 1],
        [1] + [0] * (world - 1),
        [0] * (world - 1) + [1],
        [0],
    ]
    shards = [tuple(each[r % len(each)] for r in range(world)) for each in some]
    return [*shards, tuple(tpk.shard_sizes(64 * world - 1, world)), tuple(pieces(300, world, True))]


# Every list has 13 entries, which has no factor in common with the number of lists of rows.
GATHERS: list[dict[str, Any]] = [
    {},
    {"k": 63, "ns": (97,)},
    {"k": 100, "ns": (33, 130, 8), "bias": True},
    {"k": 72, "ns": (264,), "weight": "rows"},
    {"k": 300, "ns": (1,), "activation": "relu", "bias": True},
    {"k": 129, "lead": 3, "gathered": True},
    {"k": 136, "lead": 3, "dim": 1, "ns": (40, 24), "gathered": True},
    {"lead": 2, "dim": -2, "operand": "cols", "weight": "strided"},
    {"k": 1000, "out_dtype": torch.float32, "bias": True, "gathered": True},
    {"k": 520, "ns": (250,), "activation": "gelu", "bias": True},
    {"k": 65, "activation": "silu", "operand": "rows_odd", "weight": "rows_odd"},
    {"k": 1, "ns": (0, 40)},
    {"k": 0, "bias": True},
]
SCATTERS: list[dict[str, Any]] = [
    {},
    {"k": 63, "ns": (97,), "bias": True},
    {"k": 72, "ns": (264,), "weight": "rows", "residual": True},
    {"k": 300, "ns": (1,)},
    {"k": 136, "lead": 3, "bias": True, "residual": True},
    {"k": 136, "lead": 3, "dim": 1, "residual": True},
    {"k": 100, "lead": 2, "dim": -2, "operand": "cols", "weight": "strided"},
    {"k": 1000, "out_dtype": torch.float32, "bias": True, "residual": True},
    {"k": 65, "ns": (130,), "operand": "rows_odd", "weight": "rows_odd"},
    {"k": 1, "ns": (8,), "bias": True},
    {"k": 520, "ns": (250,), "weight": "rows", "bias": True, "residual": True},
    {"k": 0, "bias": True, "residual": True},
    {"ns": (0,)},
]


def cases(world: int, features: list[dict[str, Any]], rounds: int = 2) -> Iterator[Case]:
    """Another number of rows at every call; every feature ``rounds`` times, each time with other rows."""
    rows = rows_of_ranks(world)
    for i in range(rounds * len(features)):
        yield Case(rows[i % len(rows)], **features[i % len(features)])


def large_cases(world: int) -> list[Case]:
    """Several waves of tiles, shards of several chunks, none a multiple of a tile."""
    rows = tuple(1100 + 130 * r for r in range(world))
    return [
        Case(rows, k=1544, ns=(1800,)),
        Case((1024,) * world, k=4096, ns=(512,), weight="rows"),
        Case((*rows[:-1], 0), k=776, ns=(1030,)),
    ]


def gather_call(
    ctx: Any, path: str, dtype: torch.dtype, case: Case, generator: torch.Generator, exact: bool
) -> Call:
    """``exact``: small integers, whose sums have no rounding, so that the result is defined to the bit."""
    make = _maker(dtype, generator, exact)
    whole = make(*case.shape(sum(case.rows), case.k))
    bs = [make(ctx.world, case.k, n)[ctx.rank] for n in case.ns]
    biases = [make(ctx.world, n)[ctx.rank] if case.bias and i != 1 else None for i, n in enumerate(case.ns)]
    equal = len(set(case.rows)) == 1
    out_dtype = case.out_dtype or dtype

    def run() -> list[Tensor]:
        shard = laid_out(own(whole, case.axis, case.rows, ctx.rank), case.operand)
        weights = [laid_out(b, case.weight) for b in bs]
        out = tpk.all_gather_matmul(
            shard,
            weights,
            ctx.group,
            gather_dim=case.dim,
            shard_sizes=None if equal else list(case.rows),
            biases=biases if case.bias else None,
            activation=None if case.activation == "none" else case.activation,
            out_dtype=case.out_dtype,
            return_gathered=case.gathered,
            path=path,
        )
        _check_path(ctx, path, case)
        for operand in (shard, *weights):
            poison_(operand)
        return [*out[0], out[1]] if case.gathered else list(out)

    def verify(outs: list[Tensor]) -> None:
        for i, (b, bias) in enumerate(zip(bs, biases, strict=True)):
            want, size = whole.double() @ b.double(), whole.double().abs() @ b.double().abs()
            if bias is not None:
                want, size = want + bias.double(), size + bias.double().abs()
            want, name = activate(want, case.activation), f"product {i}"
            if exact and case.activation in ("none", "relu"):
                different = differences(outs[i], want.to(out_dtype))
                assert not different, f"{name}: {different}"
            else:
                _close(outs[i], want, out_dtype, k=case.k, magnitude=size, slack=1.25, name=name)
        if case.gathered:
            different = differences(outs[-1], whole)
            assert not different, f"gathered: {different}"

    return Call(run, verify)


def scatter_call(
    ctx: Any, path: str, dtype: torch.dtype, case: Case, generator: torch.Generator, exact: bool
) -> Call:
    """The sum is that of the peers' partials, rounded for the wire, and this rank's own one, which is not."""
    make = _maker(dtype, generator, exact)
    out_dtype, (n,), mine = case.out_dtype or dtype, case.ns, slice(ctx.rank, ctx.rank + 1)
    m, axis = sum(case.rows), case.axis
    everyone = make(ctx.world, *case.shape(m, case.k))
    bs = make(ctx.world, case.k, n)
    bias = make(n) if case.bias else None
    residual = None
    if case.residual:
        residual = own(_maker(out_dtype, generator, exact)(*case.shape(m, n)), axis, case.rows, ctx.rank)
    usual = list(case.rows) == tpk.shard_sizes(m, ctx.world)

    def run() -> list[Tensor]:
        a, b = laid_out(everyone[mine][0], case.operand), laid_out(bs[mine][0], case.weight)
        out = tpk.matmul_reduce_scatter(
            a,
            b,
            ctx.group,
            scatter_dim=case.dim,
            shard_sizes=None if usual else list(case.rows),
            bias=bias,
            residual=residual,
            out_dtype=case.out_dtype,
            path=path,
        )
        _check_path(ctx, path, case)
        for operand in (a, b):
            poison_(operand)
        return [out]

    def verify(outs: list[Tensor]) -> None:
        partials = [
            own(everyone[r].double() @ bs[r].double(), axis, case.rows, ctx.rank) for r in range(ctx.world)
        ]
        total = torch.zeros_like(partials[0])
        for r, partial in enumerate(partials):
            # The other paths round a rank's own partial as well.
            keep = r == ctx.rank and ((path == FUSED and few_rows_overlap()) or ctx.world == 1)
            total += partial if keep else partial.to(out_dtype).double()
        for term in (bias, residual):
            if term is not None:
                total += term.double()
        wanted = total.to(out_dtype)
        if exact:
            different = differences(outs[0], wanted)
            assert not different, different
            return
        # fp32 sums of another order put a few partials on the other side of a tie, and no more than a few.
        sizes = [everyone[r].double().abs() @ bs[r].double().abs() for r in range(ctx.world)]
        error = 4 * (case.k * ctx.world) ** 0.5 * UNIT_ROUNDOFF[torch.float32]
        bound = error * own(sum(sizes), axis, case.rows, ctx.rank)
        bound += UNIT_ROUNDOFF[out_dtype] * (total.abs() + 2 * sum(p.abs() for p in partials))
        within = (outs[0].double() - total).abs() <= bound  # False for NaN
        different = differences(torch.where(within, wanted, outs[0]), wanted)
        assert outs[0].dtype == out_dtype and not different, f"beyond every rounding: {different}"
        if out_dtype != torch.float32:
            # An fp32 sum stands eight times as close to ties of float16: 2.2 % of a product with K = 4096 on an H200.
            few = 0.05 if out_dtype == torch.float16 else 0.01
            others = int((outs[0] != wanted).sum())
            assert others <= 3 + few * wanted.numel(), (
                f"{others} of {wanted.numel()} elements are not the rounded sum of rounded partials"
            )

    return Call(run, verify)


def _maker(dtype: torch.dtype, generator: torch.Generator, exact: bool) -> Callable[..., Tensor]:
    draw = integers if exact else randn
    return lambda *shape: draw(*shape, dtype=dtype, generator=generator)


def new_group(ctx: Any, ranks: list[int], **options: Any) -> Any:
    """A group of some of the pool's ranks; all of them call."""
    count_groups_alike(ctx)
    return dist.new_group(ranks, **options)


def count_groups_alike(ctx: Any) -> None:
    """In front of what makes groups, device meshes too; all ranks call. torch names groups by a count of calls, which
    tests with fewer ranks than the pool has leave uneven: ranks would look for each other under different names.
    """
    state: Any = vars(dist.distributed_c10d)["_world"]
    counts = [0] * ctx.world
    dist.all_gather_object(counts, state.group_count, group=ctx.group)
    state.group_count = max(counts)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """A copy of 2-D or 3-D values in a layout, among NaN."""
    return embed(values, layout) if values.dim() == 3 else embed(values.unsqueeze(0), layout)[0]


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype, **options: Any) -> None:
    assert actual.shape == expected.shape and actual.dtype == dtype, (actual.shape, actual.dtype)
    options["k"] = max(1, options["k"])
    assert_close_tiles(actual, expected, dtype, **options)


def _check_path(ctx: Any, path: str, case: Case) -> None:
    if path == FUSED and not case.empty:
        record = tpk.last_path()
        way = "" if few_rows_overlap() else {"all_gather_matmul": "; gather"}.get(record.op, "; scatter")
        assert record.path == path_of_few_rows(ctx) and record.detail.endswith(way), record


@overlaps()
def check_gather(ctx: Any, path: str, dtype: torch.dtype, seed: int) -> None:
    _check_cases(ctx, path, dtype, seed, gather_call, cases(ctx.world, GATHERS))


@overlaps()
def check_scatter(ctx: Any, path: str, dtype: torch.dtype, seed: int) -> None:
    _check_cases(ctx, path, dtype, seed, scatter_call, cases(ctx.world, SCATTERS))


@overlaps()
def check_large(ctx: Any, path: str, dtype: torch.dtype, seed: int) -> None:
    for make in (gather_call, scatter_call):
        _check_cases(ctx, path, dtype, seed, make, large_cases(ctx.world))


def _check_cases(
    ctx: Any, path: str, dtype: torch.dtype, seed: int, make: Callable[..., Call], some: Any
) -> None:
    generator = torch.Generator(ctx.device).manual_seed(seed)  # the same data on every rank
    with Failures() as failures:
        for case in some:
            for exact in (True, False):
                with failures.case(f"{make.__name__}, exact={exact}, {case}"):
                    call = make(ctx, path, dtype, case, generator, exact)
                    outs = call.run()
                    call.verify(outs)
                    for out in outs:  # the next result is likely to get this memory
                        poison_(out)


@overlaps()
def check_reference(ctx: Any, path: str, dtype: torch.dtype, seed: int, count: int = 6) -> None:
    """Random cases against tpkernels.reference (NumPy float64, all ranks simulated), per tile."""
    import numpy as np

    from tpkernels import reference as ref

    world, rank = ctx.world, ctx.rank
    draw = np.random.default_rng(seed)  # the same on every rank

    def random(*shape: int) -> tuple[Tensor, Any]:
        """A tensor and the float64 values that it really holds."""
        x = torch.tensor(draw.standard_normal(shape), device=ctx.device).to(dtype)
        return x, x.double().cpu().numpy()

    for _ in range(count):
        k, n, m = (int(draw.integers(40, high)) for high in (500, 400, 900))
        dim, lead = int(draw.integers(0, 2)), int(draw.integers(1, 3))
        sizes = [int(s) for s in draw.multinomial(m, [1 / world] * world)]
        activation = str(draw.choice(["none", "relu", "silu", "gelu", "gelu_tanh"]))
        shape = Case(tuple(sizes), lead=lead, dim=dim).shape
        xs, ws = [random(*shape(s, k)) for s in sizes], [random(k, n) for _ in range(world)]
        cs, residuals = [random(n) for _ in range(world)], [random(*shape(s, n)) for s in sizes]
        arrays = [[v for _, v in some] for some in (xs, ws, cs)]
        options = {"gather_dim": dim, "activation": activation, "biases": arrays[2]}
        out = tpk.all_gather_matmul(
            xs[rank][0],
            ws[rank][0],
            ctx.group,
            shard_sizes=sizes,
            path=path,
            **(options | {"biases": cs[rank][0]}),
        )
        want = ref.all_gather_matmul(*arrays[:2], **options)[rank].reshape(-1, n)
        case = f"m={m} n={n} k={k} sizes={sizes} lead={lead} dim={dim} activation={activation}"
        assert_close_tiles(
            out.flatten(0, 1), want, dtype, k=k, magnitude=k * np.ones(want.shape), name=f"gather {case}"
        )

        whole = [random(*shape(m, k)) for _ in range(world)]
        out = tpk.matmul_reduce_scatter(
            whole[rank][0],
            ws[rank][0],
            ctx.group,
            scatter_dim=dim,
            shard_sizes=sizes,
            bias=cs[0][0],
            residual=residuals[rank][0],
            path=path,
        )
        want = ref.matmul_reduce_scatter(
            [v for _, v in whole],
            arrays[1],
            scatter_dim=dim,
            sizes=sizes,
            bias=arrays[2][0],
            residuals=[v for _, v in residuals],
        )[rank].reshape(-1, n)
        assert_close_tiles(out.flatten(0, 1), want, dtype, k=k * world, world=world, name=f"scatter {case}")


@overlaps()
def check_widest(ctx: Any, path: str, seed: int) -> None:
    """A shape on which another library hung: 8192 x 53248 x 16384 over all ranks."""
    case = Case((8192 // ctx.world,) * ctx.world, k=16_384, ns=(53_248 // ctx.world,))
    _check_cases(ctx, path, torch.bfloat16, seed, gather_call, [case])


@overlaps()
def check_huge(ctx: Any, path: str, seed: int, most: int = 2**31) -> None:
    """More than ``most`` elements are gathered, and scattered. Operands of rank one, so that they are soon made."""
    world, rank, dtype = ctx.world, ctx.rank, torch.bfloat16
    wide, narrow = (16_448, 64) if most > 2**20 else (328, 64)
    rows = -(-(most // wide + 100) // world)
    m, mine = rows * world, slice(rank * rows, (rank + 1) * rows)
    generator = torch.Generator(ctx.device).manual_seed(seed)
    make = _maker(dtype, generator, exact=True)

    column, row, w = (
        integers(m, dtype=dtype, generator=generator, most=8),
        make(wide),
        make(world, wide, narrow)[rank],
    )
    out = tpk.all_gather_matmul(torch.outer(column[mine], row), w, ctx.group, path=path)
    different = differences(out, torch.outer(column.double(), row.double() @ w.double()).to(dtype))
    assert not different, different

    columns, rows_of_a, bs = make(world, m), make(world, narrow), make(world, narrow, wide)
    out = tpk.matmul_reduce_scatter(
        torch.outer(columns[rank], rows_of_a[rank]), bs[rank], ctx.group, path=path
    )
    assert out.shape == (rows, wide)
    sums = [rows_of_a[r].double() @ bs[r].double() for r in range(world)]
    for begin in range(0, rows, 4096):
        part = slice(begin, min(begin + 4096, rows))
        total = torch.zeros(1, dtype=torch.float64)
        for r in range(world):
            one = torch.outer(columns[r][mine][part].double(), sums[r])
            total = total + (one if r == rank and path == FUSED else one.to(dtype).double())
        different = differences(out[part], total.to(dtype))
        assert not different, f"rows from {begin}: {different}"
