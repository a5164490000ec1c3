"""Models with our styles under torch.compile(fullgraph=True): one graph, the eager numbers, forward and backward."""

from __future__ import annotations

import pytest
import torch
from nn_dense import close
from torch._dynamo.testing import CompileCounterWithBackend
from torch_plans import dense_llama, full, loss_of, mesh_of, parallelized, tokens

import tpkernels as tpk
from tpkernels.testing import RankContext, RankPool


def compiled(ctx: RankContext, seed: int, kind: dict[str, bool], rows: int) -> None:
    mesh = mesh_of(ctx)
    dense = dense_llama(seed, layers=1)
    ids, targets = tokens(seed, 2, rows)
    expected = loss_of(dense, ids, targets)
    expected.backward()
    model = parallelized(dense_llama(seed, layers=1), mesh, **kind)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with tpk.record_paths() as log:
            loss = loss_of(run, ids, targets)
            loss.backward()
        close(full(loss), expected, f"{kind}: loss")
        for name, p in model.named_parameters():
            close(full(p.grad), dense.get_parameter(name).grad, f"{kind}: {name}")
        assert {"all_gather_matmul", "matmul_reduce_scatter"} <= {op for op, _ in log.counts}, log
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plan", "once"])
def test_one_graph(ranks: RankPool, kind: str, seed: int) -> None:
    arguments = {"plan": {}, "once": {"gather_once": True}}[kind]
    ranks.run(compiled, seed, arguments, 4, world=2, timeout=150)
