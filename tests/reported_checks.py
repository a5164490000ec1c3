"""What users of other libraries for overlapped products reported, tried here; run on the ranks of a pool.

Results are exact in bfloat16 whoever multiplies and sums: a row of an operand has one element that is not zero.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import torch
from fused_behaviour import unchecked
from fused_checks import Case, overlaps, scatter_call
from gemm_checks import differences, integers
from op_checks import own

import tpkernels as tpk
from tpkernels.nn import ColumnParallelLinear, RowParallelLinear
from tpkernels.testing import poison_

Tensor = torch.Tensor
BF16 = torch.bfloat16


class _Sparse:
    """[m, k] with one number from -2 to 2 in each row; ``times(w)`` needs no product."""

    def __init__(self, m: int, k: int, generator: torch.Generator) -> None:
        self.columns = torch.randint(k, (m,), generator=generator, device=generator.device)
        self.values = integers(m, dtype=BF16, generator=generator)
        self.matrix = torch.zeros(m, k, dtype=BF16, device=generator.device)
        self.matrix.scatter_(1, self.columns.unsqueeze(1), self.values.unsqueeze(1))

    def times(self, w: Tensor) -> Tensor:
        return w[self.columns].float() * self.values.float().unsqueeze(1)


def check_lengths(ctx: Any, path: str, rounds: int, seed: int) -> None:
    """Another number of tokens in every call, also none, one, and fewer than ranks; other layers, too; no waiting.

    Memory that is shared grows on the way, and what an earlier call left there must not show.
    """
    generator, together = torch.Generator(ctx.device).manual_seed(seed), random.Random(seed)
    ops = (tpk.all_gather_matmul, tpk.matmul_reduce_scatter, tpk.matmul_all_reduce)
    wrong = torch.zeros(3, dtype=torch.int64, device=ctx.device)
    with unchecked():
        for i in range(rounds):
            few = together.choice([0, 1, 2, ctx.world - 1, ctx.world + 1, together.randrange(100)])
            m = together.choice([few, together.randrange(1000), together.randrange(20 * (i + 2))])
            n, k = (together.choice([1, 8, 97, together.randrange(1, 600)]) for _ in "nk")
            pick, sizes = together.randrange(3), tpk.shard_sizes(m, ctx.world)
            xs = [_Sparse(m, k, generator) for _ in range(ctx.world if pick else 1)]
            ws = [integers(k, n, dtype=BF16, generator=generator, most=8) for _ in range(ctx.world)]
            if pick == 0:
                x, want = own(xs[0].matrix, 0, sizes, ctx.rank), xs[0].times(ws[ctx.rank])
                out = tpk.all_gather_matmul(x, ws[ctx.rank], ctx.group, shard_sizes=sizes, path=path)
            else:
                x, want = xs[ctx.rank].matrix, torch.zeros(m, n, device=ctx.device)
                for each, w in zip(xs, ws, strict=True):
                    want += each.times(w)
                want = own(want, 0, sizes, ctx.rank) if pick == 1 else want
                out = ops[pick](x, ws[ctx.rank], ctx.group, path=path)
            assert out.shape == want.shape, (ops[pick].__name__, m, n, k)
            wrong[pick] += (out != want).any()
            poison_(out)
    counts = dict(zip((op.__name__ for op in ops), wrong.tolist(), strict=True))
    assert not any(counts.values()), f"wrong results of {rounds} calls: {counts}"


@overlaps()
def check_widest_scatter(ctx: Any, path: str, seed: int) -> None:
    """8192 x 16384 from 53248 over all ranks: the other half of the layer on which another library hung."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    case = Case((8192 // ctx.world,) * ctx.world, k=53_248 // ctx.world, ns=(16_384,))
    call = scatter_call(ctx, path, BF16, case, generator, True)
    call.verify(call.run())


def check_huge_sum(ctx: Any, path: str, seed: int, most: int = 2**31) -> None:
    """An all-reduce of more than ``most`` elements, in which 32-bit offsets would not do."""
    n = 16_448 if most > 2**20 else 328
    m = most // n + 101
    generator = torch.Generator(ctx.device).manual_seed(seed)
    xs = [_Sparse(m, 64, generator) for _ in range(ctx.world)]
    ws = [integers(64, n, dtype=BF16, generator=generator, most=8) for _ in range(ctx.world)]
    bias = integers(n, dtype=BF16, generator=generator)
    out = tpk.matmul_all_reduce(xs[ctx.rank].matrix, ws[ctx.rank], ctx.group, bias=bias, path=path)
    assert out.shape == (m, n) and out.numel() > most
    for begin in range(0, m, 4096):
        part = slice(begin, min(begin + 4096, m))
        want = bias.float() + sum(
            w[x.columns[part]].float() * x.values[part].float().unsqueeze(1)
            for x, w in zip(xs, ws, strict=True)
        )
        different = differences(out[part], want.to(BF16))
        assert not different, f"rows from {begin}: {different}"


def check_layers_come_and_go(ctx: Any, path: str, times: int) -> None:
    """Memory of a device stays as it is while layers are made, trained for a step and dropped."""
    x = torch.ones(256, 512, dtype=BF16)

    def once() -> None:
        options: dict[str, Any] = {"bias": True, "sequence_parallel": True, "dtype": BF16, "path": path}
        up = ColumnParallelLinear(512, 768, group=ctx.group, **options)
        down = RowParallelLinear(768, 512, group=ctx.group, **options)
        down(up(x)).sum().backward()

    def used() -> int:
        gc.collect()
        if ctx.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        ctx.barrier()  # others on this GPU have freed what they had
        return torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]

    for _ in range(3):
        once()
    before = used()
    for _ in range(times):
        once()
    assert used() - before < 8 << 20, f"{(used() - before) >> 20} MiB more after {times} times two layers"
