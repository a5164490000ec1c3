"""A GPT-style model (LayerNorm, biases, learned positions, tied embeddings, dropout) against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from nn_dense import VOCAB, WIDTH, assert_grads, perturb, shard_of
from nn_gpt import HEADS, LENGTH, DenseGPT, ParallelGPT
from torch import nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)


def pair(ctx: RankContext, seed: int, **kinds: object) -> tuple[ParallelGPT, DenseGPT]:
    shape = {k: v for k, v in kinds.items() if k in ("kv_heads", "p", "attention_p", "layers")}
    dense = tnn.init_weights_(DenseGPT(**shape), seed=seed, std=0.3)
    model = tnn.init_weights_(ParallelGPT(ctx.group_name, **kinds), seed=seed, std=0.3)
    full = dict(dense.named_parameters())
    assert dict(model.named_parameters()).keys() == full.keys()
    for name, p in model.named_parameters():
        assert torch.equal(p, shard_of(p, full[name])), f"start of {name}"
    perturb(dense, 5)
    perturb(model, 5)
    return model.to(ctx.device), dense.to(ctx.device)


def batch(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(0, VOCAB, (2, 2, length), generator=draw)
    targets[:, 1] = -100
    return ids, targets


def loss_of(
    model: ParallelGPT,
    ids: torch.Tensor,
    targets: torch.Tensor,
    sizes: list[int] | None,
    group: str,
    step: int,
) -> torch.Tensor:
    logits = model(ids, sizes, step)
    targets = targets.t() if model.sequence_dim == 0 else targets
    return tnn.vocab_parallel_cross_entropy(logits, targets, group, VOCAB, label_smoothing=0.1)


def dense_loss(model: DenseGPT, ids: torch.Tensor, targets: torch.Tensor, step: int) -> torch.Tensor:
    return F.cross_entropy(model(ids, step).flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def cases(world: int) -> list[dict[str, object]]:
    uneven = [5, 0, 3, 1][:world]
    dropped = {"p": 0.3, "attention_p": 0.2}
    return [
        {"length": 7, "sequence_dim": 1},
        {"length": 7, "sequence_dim": 0, **dropped},
        {"length": 2 * world, "sequence_parallel": True, "sequence_dim": 0, **dropped},
        {"length": sum(uneven), "sizes": uneven, "sequence_parallel": True, "sequence_dim": 1, **dropped},
        {
            "length": 4 * world,
            "sequence_parallel": True,
            "sequence_dim": 1,
            "kv_heads": 1,
            "attention_p": 0.5,
        },
        {"length": 9, "sizes": tpk.shard_sizes(9, world), "sequence_parallel": True, "kv_heads": 1, "p": 0.1},
    ]


def compare(ctx: RankContext, seed: int) -> list[torch.Tensor]:
    kept = []
    for case in cases(ctx.world):
        note = str(case)
        length, sizes = case.pop("length"), case.pop("sizes", None)
        model, dense = pair(ctx, seed, **case)
        ids, targets = (t.to(ctx.device) for t in batch(length, seed))
        for step in (0, 3):
            model.zero_grad(set_to_none=True)
            dense.zero_grad(set_to_none=True)
            expected = dense_loss(dense, ids, targets, step)
            expected.backward()
            loss = loss_of(model, ids, targets, sizes, ctx.group_name, step)
            loss.backward()
            torch.testing.assert_close(
                loss, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=note: f"{n}: {m}"
            )
            assert_grads(model, dense, note)
            replicated = [
                p.grad for p in model.parameters() if isinstance(tnn.placement_of(p), tnn.Replicated)
            ]
            kept += [loss.detach(), *replicated]
        model.eval()
        dense.eval()
        with torch.no_grad():
            torch.testing.assert_close(
                loss_of(model, ids, targets, sizes, ctx.group_name, 0),
                dense_loss(dense, ids, targets, 0),
                rtol=1e-10,
                atol=1e-12,
            )
    return kept


def assert_ranks_agree(results: list[list[torch.Tensor]]) -> None:
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("world", WORLDS)
def test_model_equals_the_unsharded_one(ranks: RankPool, world: int, seed: int) -> None:
    assert_ranks_agree(ranks.run(compare, seed, world=world))


@pytest.mark.gpun
def test_model_equals_the_unsharded_one_on_gpus(gpu_ranks: RankPool, seed: int) -> None:
    for world in (w for w in WORLDS if w <= gpu_ranks.size):
        assert_ranks_agree(gpu_ranks.run(compare, seed, world=world))


def train(ctx: RankContext, seed: int) -> None:
    model, dense = pair(
        ctx, seed, p=0.1, attention_p=0.1, layers=1, kv_heads=1, sequence_parallel=True, recompute="selective"
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, dense)]
    first = last = 0.0
    for step in range(50):
        ids, _ = batch(4 * ctx.world, seed)  # the same text again and again: it is to be learned
        targets = ids.roll(-1, 1)
        losses = []
        for m, optimizer in zip((model, dense), optimizers, strict=True):
            optimizer.zero_grad()
            if m is model:
                loss = loss_of(model, ids, targets, None, ctx.group_name, step)
                loss.backward()
                norm = tnn.clip_grad_norm_(model.parameters(), 1.0)
            else:
                loss = dense_loss(dense, ids, targets, step)
                loss.backward()
                expected_norm = torch.nn.utils.clip_grad_norm_(dense.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-7), f"step {step}"
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
        first, last = first or losses[0], losses[0]
    assert last < 0.6 * first
    full = dict(dense.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p, shard_of(p, full[name]), rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_fifty_steps_equal_those_of_the_unsharded_model(ranks: RankPool, seed: int) -> None:
    ranks.run(train, seed, world=2, timeout=120)


class TiedByName(nn.Module):
    """As plain torch ties: one parameter under two names."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.embed = tnn.VocabParallelEmbedding(VOCAB, WIDTH, group=group, dtype=torch.float64)
        self.head = tnn.ColumnParallelLinear(WIDTH, VOCAB, group=group, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight


def on_meta(ctx: RankContext, seed: int) -> None:
    """Built without memory, filled afterwards: the values of a model that was built with it."""
    kinds = {"kv_heads": 1, "p": 0.1, "sequence_parallel": True}
    model = tnn.init_weights_(ParallelGPT(ctx.group_name, **kinds), seed=seed)
    with torch.device("meta"):
        empty = ParallelGPT(ctx.group_name, **kinds)
    assert all(p.is_meta for p in empty.parameters())
    filled = tnn.init_weights_(empty.to_empty(device="cpu"), seed=seed)
    for (name, p), (other, q) in zip(model.named_parameters(), filled.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p, q), name
        assert tnn.placement_of(p) == tnn.placement_of(q)
    ids = torch.arange(4 * ctx.world).view(2, -1)
    assert torch.equal(model(ids, step=1), filled(ids, step=1))


@pytest.mark.parametrize("world", [1, 2])
def test_meta_device(ranks: RankPool, world: int, seed: int) -> None:
    ranks.run(on_meta, seed, world=world)


def tied(ctx: RankContext, seed: int) -> None:
    ids = torch.randint(0, VOCAB, (3, 4))
    dense = tnn.init_weights_(nn.Embedding(VOCAB, WIDTH, dtype=torch.float64), seed=seed, prefix="embed")
    expected = (dense(ids).sin() @ dense.weight.t()).square().sum()
    expected.backward()
    model = tnn.init_weights_(TiedByName(ctx.group_name), seed=seed)
    for logits in (model.head, model.embed.logits):
        model.zero_grad(set_to_none=True)
        total = tpk.regions.all_reduce(logits(model.embed(ids).sin()).square().sum(), ctx.group_name)
        total.backward()
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(model.embed.weight.grad, shard_of(model.embed.weight, dense.weight.grad))
        assert model.head.weight is model.embed.weight
    with tpk.record_paths() as log:
        state = tnn.full_state_dict(model)
    assert state.keys() == {"embed.weight", "head.weight"}
    assert state["embed.weight"] is state["head.weight"]
    assert torch.equal(state["embed.weight"], dense.weight)
    assert sum(log.counts.values()) == 1  # gathered once
    one_name = tnn.full_state_dict(ParallelGPT(ctx.group_name))
    assert [name for name, t in one_name.items() if t.shape[0] == VOCAB] == ["embed.weight"]
    norm = tnn.grad_norm(model.parameters())
    torch.testing.assert_close(norm, dense.weight.grad.norm())
    other = tnn.init_weights_(TiedByName(ctx.group_name), seed=seed + 1)
    tnn.load_full_state_dict(other, state)
    assert torch.equal(other.head.weight, model.head.weight)
    with pytest.raises(tpk.errors.ArgumentError, match=r"x: .* must be 24 \(embedding_dim\)"):
        model.embed.logits(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(tpk.errors.ArgumentError, match=r"shard_sizes: the embedding was made without"):
        model.embed.logits(torch.zeros(2, WIDTH, dtype=torch.float64), [2] * ctx.world)


@pytest.mark.parametrize("world", WORLDS)
def test_tied_embeddings(ranks: RankPool, world: int, seed: int) -> None:
    ranks.run(tied, seed, world=world)


def compiled(ctx: RankContext) -> None:
    """One graph, with dropout, shared kv heads and the core recomputed; a new step is no new graph."""
    for sp in (True, False):
        model = ParallelGPT(
            ctx.group_name,
            kv_heads=1,
            p=0.2,
            attention_p=0.2,
            layers=1,
            sequence_parallel=sp,
            recompute="selective" if sp else "none",
        )
        block = model.blocks[0]
        perturb(block, 5)
        torch.compiler.reset()
        graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast = torch.compile(block, fullgraph=True, backend=graphs)
        x = torch.randn(4, 2, WIDTH, dtype=torch.float64)
        for number in (3, 4, 5):
            step = torch.tensor(number)
            outs = []
            for run in (block, fast):
                block.zero_grad(set_to_none=True)
                xi = x.clone().requires_grad_()
                y = run(xi, step=step)
                y.square().sum().backward()
                outs.append([y.detach(), xi.grad, *(p.grad for p in block.parameters())])
            for eager, graph in zip(*outs, strict=True):
                torch.testing.assert_close(graph, eager, rtol=1e-9, atol=1e-9)
        assert graphs.frame_count == 1


def test_block_compiles_to_one_graph(ranks: RankPool) -> None:
    ranks.run(compiled, world=2, timeout=120)


def ops_of(log: tpk.PathLog) -> dict[str, int]:
    total: dict[str, int] = {}
    for (op, *_), count in log.counts.items():
        total[op] = total.get(op, 0) + count
    return total


def collectives(ctx: RankContext) -> list[dict[str, int]]:
    counts = []
    for sp, p in ((True, 0.0), (True, 0.1), (False, 0.1)):
        block = ParallelGPT(ctx.group_name, p=p, attention_p=p, layers=1, sequence_parallel=sp).blocks[0]
        x = torch.randn(2 if sp else 4, 2, WIDTH, dtype=torch.float64, requires_grad=True)
        for p_ in block.parameters():
            p_.requires_grad_(True)
        with tpk.record_paths() as forward:
            y = block(x, step=1)
        with tpk.record_paths() as backward:
            y.sum().backward()
        counts += [ops_of(forward), ops_of(backward)]
    return counts


def test_number_of_collectives(ranks: RankPool) -> None:
    """Of one block. Dropout adds none, and one all-reduce serves weight and bias of a LayerNorm."""
    sp_forward, sp_backward, drop_forward, drop_backward, forward, backward = ranks.run(collectives, world=2)[
        0
    ]
    assert sp_forward == drop_forward == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
    assert sp_backward == drop_backward
    assert sp_backward["all_reduce"] == 2
    assert forward == {"matmul_replicated": 2, "matmul_all_reduce": 2}
    assert backward["matmul_all_reduce"] == 2
    assert "all_reduce" not in backward


def refused(ctx: RankContext) -> None:
    kinds = {"group": ctx.group_name}

    def block(**more: object) -> tnn.ParallelTransformerBlock:
        return tnn.ParallelTransformerBlock(WIDTH, 8, HEADS, **kinds, **more)

    positions = tnn.PositionEmbedding(LENGTH, 4, **kinds)
    cut = tnn.PositionEmbedding(LENGTH, 4, sequence_parallel=True, **kinds)
    for action, pattern in (
        (lambda: block(norm="batch"), r"norm: it must be one of 'rms', 'layer', but it is 'batch'"),
        (lambda: block(recompute="some"), r"recompute: it must be one of 'none', 'selective', 'full'"),
        (lambda: block(dropout=0.1), r"name: dropout needs one"),
        (lambda: block(dropout=1.0, name="b"), r"dropout: .* below 1, but it is 1.0"),
        (lambda: block(attention_dropout=-1, name="b"), r"attention_dropout: .* but it is -1"),
        (
            lambda: block(dropout=0.1, name="b")(torch.zeros(2, 2, WIDTH)),
            r"step: dropout in training takes the number of this forward pass.* but it is None",
        ),
        (
            lambda: block(attention_dropout=0.1, name="b")(torch.zeros(2, 2, WIDTH), step=1.5),
            r"step: .* but it is 1.5",
        ),
        (lambda: positions(torch.zeros(17, 2)), r"ids: there are 16 positions, but the sequence has 17"),
        (lambda: positions(torch.tensor(1)), r"ids: positions run along dimension 0"),
        (
            lambda: cut(torch.zeros(8, 2), [3] * ctx.world),
            r"shard_sizes: they must be 2 sizes that sum to the 8",
        ),
        (lambda: tnn.PositionEmbedding(0, 4, **kinds), r"length: positions need at least 1, but it is 0"),
    ):
        with pytest.raises(tpk.errors.ArgumentError, match=pattern):
            action()
    assert block(dropout=0.5, name="b").eval()(torch.zeros(2, 2, WIDTH)).shape == (2, 2, WIDTH)


def test_bad_input(ranks: RankPool) -> None:
    ranks.run(refused, world=2)
