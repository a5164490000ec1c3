"""A small Llama under torchtitan's plan, with torch's styles and with ours, beside the unsharded model in float64."""

from __future__ import annotations

import pytest
import torch
from nn_dense import close
from torch.profiler import ProfilerActivity, profile
from torch_plans import (
    dense_llama,
    fresh,
    full,
    loss_of,
    mesh_of,
    parallelized,
    placements_of,
    tokens,
)

import tpkernels as tpk
from tpkernels.ops import _agreement
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)


def against_dense(ctx: RankContext, seed: int, kinds: list[dict[str, bool]], rows: int) -> None:
    mesh = mesh_of(ctx)
    dense = dense_llama(seed)
    ids, targets = tokens(seed, 2, rows)
    expected = loss_of(dense, ids, targets)
    expected.backward()
    for kind in kinds:
        model = parallelized(fresh(dense), mesh, **kind)
        assert placements_of(model).keys() == dict(dense.named_parameters()).keys()
        logits = model(ids)
        close(full(logits), dense(ids), f"{kind}: logits")
        with tpk.record_paths() as log:
            loss = loss_of(model, ids, targets)
            close(full(loss), expected, f"{kind}: loss")
            loss.backward()
        for name, grad in grads_of_norms_too(model).items():
            close(grad, dense.get_parameter(name).grad, f"{kind}: {name}")
        if kind.get("ours", True):
            ops = {op for op, _ in log.counts}
            wanted = {
                "all_gather_matmul",
                "matmul_reduce_scatter",
                *([] if kind.get("gather_once") else ["matmul"]),
            }
            assert wanted <= ops, f"{kind}: {log}"


def grads_of_norms_too(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", WORLDS)
def test_a_plan_of_torchs_with_our_styles(ranks: RankPool, world: int, seed: int) -> None:
    kinds = [{"ours": ours} for ours in (True, False)] + [{"gather_once": True}]
    ranks.run(against_dense, seed, kinds, 2 * world, world=world)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_sequence_that_does_not_divide(ranks: RankPool, world: int, rows: int, seed: int) -> None:
    kinds = [{"local": False}, {"local": False, "gather_once": True}]
    ranks.run(against_dense, seed, kinds, rows, world=world)


def count(ctx: RankContext, seed: int) -> dict[str, dict[str, int]]:
    """Collectives of one forward and backward pass, by kind of plan, as gloo counts them: CommDebugMode does not see
    those within an operation of ours."""
    mesh = mesh_of(ctx)
    ids, targets = tokens(seed, 2, 2 * ctx.world)
    out = {}
    for name, kind in (("torch", {"ours": False}), ("ours", {}), ("once", {"gather_once": True})):
        model = parallelized(dense_llama(seed), mesh, **kind)
        with _agreement.suspended(), profile(activities=[ProfilerActivity.CPU]) as seen:
            loss_of(model, ids, targets).backward()
        out[name] = {e.key: e.count for e in seen.key_averages() if e.key.startswith("gloo:")}
    return out


def test_no_more_collectives_than_torchs(ranks: RankPool, seed: int) -> None:
    counts = ranks.run(count, seed, world=2)[0]
    totals = {name: sum(by_op.values()) for name, by_op in counts.items()}
    print(counts)
    assert totals["torch"] > 20, counts
    assert totals["ours"] <= totals["torch"], counts
    assert totals["once"] <= totals["torch"], counts
