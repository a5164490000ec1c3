"""Models of parallel layers against the unsharded one in float64: losses, all gradients, checkpoints, recomputation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from nn_dense import VOCAB, DenseLM, ParallelLM, assert_grads, perturb, shard_of
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
BATCH = 2


def tokens(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(0, VOCAB, (BATCH, length), generator=draw)
    targets = torch.randint(0, VOCAB, (BATCH, length), generator=draw)
    targets[:, 1] = -100
    return ids, targets


def train_once(
    model: ParallelLM, ids: torch.Tensor, targets: torch.Tensor, sizes: list[int] | None, group: str
) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    logits = model(ids, sizes)
    if model.sequence_dim == 0:
        targets = targets.t()
    loss = tnn.vocab_parallel_cross_entropy(logits, targets, group, VOCAB)
    loss.backward()
    return loss.detach()


def compare_models(ctx: RankContext, cases: list[dict[str, object]]) -> list[list[torch.Tensor]]:
    """Runs every case; returns the loss and the replicated gradients, to be compared between ranks."""
    results = []
    for case in cases:
        case = dict(case)
        length, sizes, note = case.pop("length"), case.pop("sizes", None), str(case)
        shape = {k: v for k, v in case.items() if k in ("heads", "kv_heads", "activation", "bias")}
        dense = tnn.init_weights_(DenseLM(**shape), seed=3)  # on the CPU, whatever the device of the model
        model = tnn.init_weights_(ParallelLM(ctx.group_name, **case).to(ctx.device), seed=3)
        full = dict(dense.named_parameters())
        for name, p in model.named_parameters():
            assert torch.equal(p.cpu(), shard_of(p, full[name])), f"{note}: start of {name}"
        perturb(dense, 5)
        perturb(model, 5)
        dense.to(ctx.device)
        ids, targets = (t.to(ctx.device) for t in tokens(length))
        expected = F.cross_entropy(dense(ids).flatten(0, 1), targets.flatten())
        expected.backward()
        loss = train_once(model, ids, targets, sizes, ctx.group_name)
        torch.testing.assert_close(
            loss, expected.detach(), rtol=1e-10, atol=1e-12, msg=lambda m, n=note: f"{n}: loss: {m}"
        )
        assert_grads(model, dense, note)
        replicated = [p.grad for p in model.parameters() if isinstance(tnn.placement_of(p), tnn.Replicated)]
        results.append([loss, *replicated])

        norm = torch.nn.utils.get_total_norm([p.grad for p in dense.parameters()])
        for kind in (1.0, 2.0, float("inf")):
            other = torch.nn.utils.get_total_norm([p.grad for p in dense.parameters()], kind)
            torch.testing.assert_close(tnn.grad_norm(model.parameters(), ctx.group, norm_type=kind), other)

        model.recompute = True
        kept = [p.grad.clone() for p in model.parameters()]
        assert torch.equal(train_once(model, ids, targets, sizes, ctx.group_name), loss)
        for p, g in zip(model.parameters(), kept, strict=True):
            assert torch.equal(p.grad, g), f"{note}: recomputation changed a gradient"

        torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        torch.testing.assert_close(tnn.clip_grad_norm_(model.parameters(), 0.1, ctx.group), norm)
        assert_grads(model, dense, f"{note}, clipped")
    return results


def cases_for(world: int) -> list[dict[str, object]]:
    uneven = [5, 0, 3, 1][:world]
    gqa = {"heads": 12, "kv_heads": {1: 3, 2: 4, 3: 6, 4: 4}[world]}
    return [
        {"length": 7, "sequence_dim": 1},
        {"length": 7, "sequence_dim": 0, "bias": True, "activation": "gelu", **gqa},
        {"length": 12, "sequence_parallel": True, "sequence_dim": 0},
        {"length": 12, "sequence_parallel": True, "sequence_dim": 1, "bias": True, **gqa},
        {
            "length": 7,
            "sizes": tpk.shard_sizes(7, world),
            "sequence_parallel": True,
            "sequence_dim": 0,
            **gqa,
        },
        {
            "length": sum(uneven),
            "sizes": uneven,
            "sequence_parallel": True,
            "sequence_dim": 1,
            "bias": True,
            "activation": "gelu_tanh",
        },
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_model_equals_the_unsharded_one(ranks: RankPool, world: int) -> None:
    assert_ranks_agree(ranks.run(compare_models, cases_for(world), world=world))


@pytest.mark.gpun
def test_model_equals_the_unsharded_one_on_gpus(gpu_ranks: RankPool) -> None:
    for world in (w for w in WORLDS if w <= gpu_ranks.size):
        assert_ranks_agree(gpu_ranks.run(compare_models, cases_for(world), world=world))


def assert_ranks_agree(results: list[list[list[torch.Tensor]]]) -> None:
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            for a, b in zip(mine, first, strict=True):
                assert torch.equal(a, b), "a replicated value differs between ranks"


def round_trip(ctx: RankContext, saved: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    kinds = {"bias": True, "activation": "gelu", "sequence_parallel": True, "sequence_dim": 1}
    model = tnn.init_weights_(ParallelLM(ctx.group_name, **kinds), seed=8 + ctx.world)
    if saved is None:
        perturb(model, 2)
    else:
        tnn.load_full_state_dict(model, saved)
    state = tnn.full_state_dict(model)
    assert tnn.full_state_dict(model, keep=ctx.rank == 0).keys() == (state.keys() if ctx.rank == 0 else set())
    dense = DenseLM(bias=True, activation="gelu")
    dense.load_state_dict(state)
    for name, p in model.named_parameters():
        assert torch.equal(p, shard_of(p, state[name]))

    # The placements survive whatever makes new parameter objects.
    placements = [tnn.placement_of(p) for p in model.parameters()]
    meta = ParallelLM(ctx.group_name, **kinds).to("meta").to_empty(device="cpu")
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        meta,
        copy.deepcopy(model).float(),
    ):
        assert [tnn.placement_of(p) for p in other.parameters()] == placements
    assigned = ParallelLM(ctx.group_name, **kinds).to("meta")
    assigned.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert [tnn.placement_of(p) for p in assigned.parameters()] == placements
    assigned.head.weight = torch.nn.Parameter(assigned.head.weight.detach().clone())
    assert tnn.placement_of(assigned.head.weight) == tnn.placement_of(model.head.weight)
    for name, full in tnn.full_state_dict(assigned).items():
        assert torch.equal(full, state[name])
    tnn.load_full_state_dict(meta, state)
    assert all(torch.equal(a, b) for a, b in zip(meta.parameters(), model.parameters(), strict=True))

    before = {k: v.clone() for k, v in model.state_dict().items()}
    bad = dict(state)
    bad["head.weight"] = bad["head.weight"][:-1]
    with pytest.raises(
        tpk.errors.ArgumentError, match=r"'head.weight' must have the unsharded shape \[29, 24\]"
    ):
        tnn.load_full_state_dict(model, bad)
    missing = {k: v for k, v in state.items() if k != "norm.weight"}
    with pytest.raises(tpk.errors.ArgumentError, match=r"\['norm.weight'\] are missing"):
        tnn.load_full_state_dict(model, missing)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    tnn.load_full_state_dict(model, missing, strict=False)
    return state


def test_state_dict_survives_any_change_of_world(ranks: RankPool) -> None:
    first = ranks.run(round_trip, None, world=3)[0]
    state = first
    for world in (1, 2, 4, 3):
        states = ranks.run(round_trip, state, world=world)
        state = states[-1]
        for other in states:
            assert other.keys() == first.keys()
            assert all(torch.equal(other[k], first[k]) for k in first)


def norm_over_two_groups(ctx: RankContext) -> None:
    """Two data-parallel replicas of two ranks each: the norm is over the replica's group, named or not."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    layer = tnn.ColumnParallelLinear(4, 6, group=group, dtype=torch.float64)
    norm = tnn.RMSNorm(6, group=group, dtype=torch.float64)
    both = [*layer.parameters(), *norm.parameters()]
    for p in both:
        p.grad = torch.ones_like(p)
    expected = (4 * 6 + 6 + 6) ** 0.5
    for given in ((), (group,)):
        assert tnn.grad_norm(both, *given).item() == pytest.approx(expected, rel=1e-12)
    assert tnn.grad_norm(norm.weight).item() == pytest.approx(6**0.5, rel=1e-12)
    with pytest.raises(
        tpk.errors.GroupError, match=r"group: it must be the group that the parameters are cut over"
    ):
        tnn.clip_grad_norm_(both, 1.0, ctx.group)
    other = tnn.ColumnParallelLinear(4, 6, group=ctx.group)
    with pytest.raises(tpk.errors.GroupError, match=r"parameters: they must be laid out over one group"):
        tnn.grad_norm([*both, *other.parameters()])
    assert tnn.clip_grad_norm_(both, 1.0).item() == pytest.approx(expected, rel=1e-12)
    assert tnn.grad_norm(both).item() == pytest.approx(1.0, rel=1e-5)
    dist.destroy_process_group(group)


def test_norm_is_over_the_group_of_the_parameters(ranks: RankPool) -> None:
    ranks.run(norm_over_two_groups, world=4)


def compiled(ctx: RankContext, backend: str, cases: list[dict[str, object]], dynamic: bool | None) -> None:
    for case in cases:
        torch.compiler.reset()
        model = tnn.init_weights_(ParallelLM(ctx.group_name, dtype=torch.float32, **case), seed=3)
        block = model.blocks[0]
        perturb(block, 5)
        fast = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
        for length in (4, 8) if dynamic else (4,):
            shape = (length, 2, 24) if case["sequence_dim"] == 0 else (2, length, 24)
            draw = torch.Generator().manual_seed(ctx.rank if case.get("sequence_parallel") else 0)
            x = torch.randn(shape, generator=draw)
            outs = []
            for f in (block, fast):
                block.zero_grad(set_to_none=True)
                xi = x.clone().requires_grad_()
                y = f(xi)
                y.square().sum().backward()
                outs.append([y.detach(), xi.grad, *(p.grad for p in block.parameters())])
            for eager, graph in zip(*outs, strict=True):
                torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_block_compiles_to_one_graph(ranks: RankPool, world: int) -> None:
    cases = [
        {"sequence_parallel": sp, "sequence_dim": d, "kv_heads": 4}
        for sp, d in ((False, 1), (True, 0), (True, 1))
    ]
    ranks.run(compiled, "aot_eager", cases, None, world=world, timeout=120)


def test_block_compiles_with_dynamic_lengths(ranks: RankPool) -> None:
    ranks.run(
        compiled, "aot_eager", [{"sequence_parallel": True, "sequence_dim": 1}], True, world=2, timeout=120
    )


@pytest.mark.slow
def test_block_compiles_with_inductor(ranks: RankPool) -> None:
    ranks.run(
        compiled, "inductor", [{"sequence_parallel": True, "sequence_dim": 0}], None, world=2, timeout=240
    )


def loss_compiled(ctx: RankContext) -> None:
    sizes = tpk.shard_sizes(VOCAB, ctx.world)
    logits = torch.randn(3, 5, VOCAB, dtype=torch.float64)[..., sum(sizes[: ctx.rank]) :][
        ..., : sizes[ctx.rank]
    ]
    targets = torch.randint(0, VOCAB, (3, 5))

    def run(z: torch.Tensor) -> torch.Tensor:
        return tnn.vocab_parallel_cross_entropy(z, targets, ctx.group_name, VOCAB)

    def default(z: torch.Tensor) -> torch.Tensor:
        return tnn.vocab_parallel_cross_entropy(z, targets, None, VOCAB)

    results = []
    for f in (run, *(torch.compile(f, fullgraph=True, backend="aot_eager") for f in (run, default))):
        z = logits.clone().requires_grad_()
        loss = f(z)
        loss.backward()
        results.append((loss.detach(), z.grad))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b)


def test_loss_compiles_to_one_graph(ranks: RankPool) -> None:
    ranks.run(loss_compiled)
