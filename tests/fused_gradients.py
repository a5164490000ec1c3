"""Gradients of path "fused", and the compiler; run on the ranks of a pool, as fused_checks."""

from __future__ import annotations

from typing import Any

import torch
from few_rows import few_rows_overlap, overlaps, path_of_few_rows
from fused_checks import FUSED, rows_of_ranks
from gemm_checks import randn
from op_checks import close, own
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk

Tensor = torch.Tensor
BF16 = torch.bfloat16


@overlaps()
def check_gradients(ctx: Any, path: str, dtype: torch.dtype, seed: int) -> None:
    """A gated block of both operations, forward and backward, against float64; then twice, and under checkpoint()."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    make = lambda *shape: randn(*shape, dtype=dtype, generator=generator)  # noqa: E731
    k, n = 136, 200
    for rows in ((64,) * ctx.world, rows_of_ranks(ctx.world)[1], rows_of_ranks(ctx.world)[2]):
        m = sum(rows)
        x, residual, g = make(m, k), make(m, k), make(m, k)
        w1, w2, w3 = (make(ctx.world, n, k), make(ctx.world, n, k), make(ctx.world, k, n))
        # So that no intermediate is large: gradients of sums over n and k terms.
        w1, w2, w3 = w1 / 8, w2 / 8, w3 / 16
        c1, c2 = make(ctx.world, n), make(k)

        dense = [t.double().requires_grad_() for t in (x, w1, w2, w3, c1, c2, residual)]
        y = dense[5] + dense[6]
        for r in range(ctx.world):
            h = [
                torch.nn.functional.gelu(dense[0] @ dense[i][r].t() + (dense[4][r] if i == 1 else 0))
                for i in (1, 2)
            ]
            y = y + (h[0] * h[1]) @ dense[3][r].t()
        y.backward(g.double())

        for keep, save in ((False, True), (True, False)):

            def block(x: Tensor, *rest: Tensor, rows=rows, keep=keep, save=save) -> Tensor:
                w1, w2, w3, c1, c2, residual = rest
                h = tpk.all_gather_matmul(
                    x,
                    [w1.t(), w2.t()],
                    ctx.group,
                    shard_sizes=list(rows),
                    biases=[c1, None],
                    activation="gelu",
                    keep_gathered=keep,
                    save_preact=save,
                    path=path,
                )
                return tpk.matmul_reduce_scatter(
                    h[0] * h[1],
                    w3.t(),
                    ctx.group,
                    shard_sizes=list(rows),
                    bias=c2,
                    residual=residual,
                    path=path,
                )

            mine = [own(x, 0, rows, ctx.rank), *(w[ctx.rank] for w in (w1, w2, w3, c1)), c2]
            mine = [t.detach().clone().requires_grad_() for t in (*mine, own(residual, 0, rows, ctx.rank))]
            dy = own(g, 0, rows, ctx.rank)
            with tpk.record_paths() as log:
                out = block(*mine)
                out.backward(dy, retain_graph=True)
            if path == FUSED:
                used = {run for op, run in log.counts if op in ("all_gather_matmul", "matmul_reduce_scatter")}
                assert used == {path_of_few_rows(ctx)}, log
                # The operand is gathered again, beneath its gradient, unless it was kept or an activation needs it.
                hidden = any(op == "all_gather" and run == FUSED for op, run in log.counts)
                assert hidden == (save and few_rows_overlap()), log
            close(out, own(y.detach(), 0, rows, ctx.rank), dtype, "value")
            grads = [t.grad.clone() for t in mine]
            for i, name in enumerate(("x", "w1", "w2", "w3", "c1", "c2", "residual")):
                want = dense[i].grad
                if name in ("x", "residual"):
                    want = own(want, 0, rows, ctx.rank)
                elif name != "c2":
                    want = want[ctx.rank]
                close(grads[i], want, dtype, f"gradient of {name}, rows {rows}")
            out.backward(dy)
            for t, grad in zip(mine, grads, strict=True):
                assert torch.equal(t.grad, 2 * grad), "a second backward pass gave other gradients"
            for reentrant in (True, False):
                for t in mine:
                    t.grad = None
                checkpoint(block, *mine, use_reentrant=reentrant).backward(dy)
                for t, grad in zip(mine, grads, strict=True):
                    assert torch.equal(t.grad, grad), (
                        f"checkpoint(use_reentrant={reentrant}): other gradients"
                    )


@overlaps()
def check_compile(ctx: Any, path: str, backend: str) -> None:
    """One graph under torch.compile(fullgraph=True, dynamic=True), equal to eager, forward and backward."""
    group = ctx.group

    def block(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
        h = tpk.all_gather_matmul(
            x, [w1.t(), w1.t()], group, activation="silu", biases=[bias, None], path=path
        )
        return tpk.matmul_reduce_scatter(h[0] * h[1], w2.t(), group, residual=x, path=path)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    shapes = ((72, 64), (64, 72), (72,))
    w1, w2, bias = (torch.randn(s).div(4).to(BF16).requires_grad_() for s in shapes)
    for rows in (5, 8, 131):
        x = torch.randn(rows, 64).to(BF16).requires_grad_()
        results = []
        for run in (compiled, block):
            with tpk.record_paths() as log:
                out = run(x, w1, w2, bias)
                out.square().sum().backward()
            if path == FUSED:
                assert ("all_gather_matmul", path_of_few_rows(ctx)) in log.counts, log
                assert ("matmul_reduce_scatter", path_of_few_rows(ctx)) in log.counts, log
            results.append((out.detach(), *(t.grad for t in (x, w1, w2, bias))))
            for t in (x, w1, w2, bias):
                t.grad = None
        for got, expected in zip(*results, strict=True):
            close(got, expected.double(), BF16, f"{backend}, {rows} rows")
