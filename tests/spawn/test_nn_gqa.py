"""Attention with fewer kv heads than ranks, or not, against the unsharded one in float64: values, gradients, state."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from nn_dense import WIDTH, DenseAttention, close, part, perturb, shard_of

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.nn.attention import queries_of
from tpkernels.testing import RankContext, RankPool

F64 = torch.float64
HEADS = 12
CASES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (3, 3), (2, 4)]  # ranks, kv heads
NEITHER_DIVIDES = [(3, 2), (2, 3), (3, 4), (4, 6), (4, 3)]


def pair(
    ctx: RankContext, kv_heads: int, bias: bool, sp: bool, dim: int
) -> tuple[tnn.ParallelAttention, DenseAttention]:
    """Equal from the start, without copying; then with biases that matter."""
    layer = tnn.ParallelAttention(
        WIDTH,
        HEADS,
        kv_heads,
        group=ctx.group_name,
        bias=bias,
        out_bias=bias,
        sequence_parallel=sp,
        sequence_dim=dim,
        seed=7,
        name="a",
        dtype=F64,
    )
    dense = tnn.init_weights_(DenseAttention(HEADS, kv_heads, bias).double(), seed=7, prefix="a")
    full = dict(dense.named_parameters())
    for name, p in layer.named_parameters():
        assert torch.equal(p, shard_of(p, full[name])), f"start of {name}"
    perturb(dense, 3)
    perturb(layer, 3)
    return layer, dense


def check_gqa(ctx: RankContext, kv_heads: int) -> list[torch.Tensor]:
    grads = []
    for bias, sp, dim in ((False, False, 1), (True, False, 0), (True, True, 0), (False, True, 1)):
        note = f"kv_heads={kv_heads} bias={bias} sp={sp} dim={dim}"
        layer, dense = pair(ctx, kv_heads, bias, sp, dim)
        assert layer.local_kv_heads * layer.head_dim == layer.k_proj.weight.shape[0]
        uneven = [3, 0, 2, 1][: ctx.world]
        x = torch.randn(2, sum(uneven), WIDTH, dtype=F64, requires_grad=True)
        y = dense(x)
        coefficient = torch.randn_like(y)
        y.backward(coefficient)

        def mine(t: torch.Tensor, sp: bool = sp, dim: int = dim, sizes: list[int] = uneven) -> torch.Tensor:
            t = t.transpose(0, 1) if dim == 0 else t
            return part(t, dim, sizes, ctx.rank) if sp else t

        xi = mine(x.detach()).clone().requires_grad_()
        out = layer(xi, shard_sizes=uneven if sp else None)
        close(out, mine(y), note)
        out.backward(mine(coefficient))
        close(xi.grad, mine(x.grad), f"{note}: x")
        full = dict(dense.named_parameters())
        assert dict(layer.named_parameters()).keys() == full.keys()
        for name, p in layer.named_parameters():
            close(p.grad, shard_of(p, full[name].grad), f"{note}: {name}")
        for kind in (1.0, 2.0, float("inf")):
            expected = torch.nn.utils.get_total_norm([p.grad for p in dense.parameters()], kind)
            close(tnn.grad_norm(layer.parameters(), norm_type=kind).to(F64), expected.to(F64), note)
        whole = tnn.full_tensors(
            {n: p.grad for n, p in layer.named_parameters()}, dict(layer.named_parameters())
        )
        for name, g in whole.items():
            close(g, full[name].grad, f"{note}: gathered {name}")
        grads.append(layer.k_proj.weight.grad)
        grads.append(layer.v_proj.weight.grad if not bias else layer.v_proj.bias.grad)
    return grads


@pytest.mark.parametrize(("world", "kv_heads"), [*CASES, *NEITHER_DIVIDES])
def test_attention_equals_the_unsharded_one(ranks: RankPool, world: int, kv_heads: int) -> None:
    results = ranks.run(check_gqa, kv_heads, world=world)
    copies = world // math.gcd(world, kv_heads)
    for rank in range(world):  # those that share a head have the same bits
        first = results[rank - rank % copies]
        assert all(torch.equal(a, b) for a, b in zip(results[rank], first, strict=True))


def round_trip(ctx: RankContext, kv_heads: int, state: dict[str, torch.Tensor] | None) -> object:
    layer, dense = pair(ctx, kv_heads, True, False, 0)
    if state is not None:
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
        tnn.load_full_state_dict(layer, state)
    full = tnn.full_state_dict(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        again = tnn.full_state_dict(other)
        assert all(torch.equal(again[k], full[k]) for k in full)
    dense.load_state_dict(full)
    assert full["k_proj.weight"].shape == (kv_heads * layer.head_dim, WIDTH)
    for name, p in layer.named_parameters():
        assert torch.equal(p, shard_of(p, full[name]))
    return full


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_state_is_full_and_survives_any_change_of_world(ranks: RankPool, kv_heads: int) -> None:
    first = state = ranks.run(round_trip, kv_heads, None, world=4)[0]
    for world in (1, 2, 4):
        states = ranks.run(round_trip, kv_heads, state, world=world)
        for other in states:
            assert other.keys() == first.keys()
            assert all(torch.equal(other[k], first[k]) for k in first)
        state = states[-1]


def train(ctx: RankContext, kv_heads: int) -> list[torch.Tensor]:
    """A few steps: the copies of a head do not part, and the weights stay the unsharded layer's."""
    layer, dense = pair(ctx, kv_heads, True, True, 0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (layer, dense)]
    x = torch.randn(2, 2 * ctx.world, WIDTH, dtype=F64)
    mine = part(x.transpose(0, 1), 0, [2] * ctx.world, ctx.rank)
    for _ in range(5):
        for model, optimizer, given in zip((layer, dense), optimizers, (mine, x), strict=True):
            optimizer.zero_grad()
            model(given).square().sum().backward()
            (tnn.clip_grad_norm_ if model is layer else torch.nn.utils.clip_grad_norm_)(
                model.parameters(), 1.0
            )
            optimizer.step()
    full = dict(dense.named_parameters())
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p, shard_of(p, full[name]), rtol=1e-9, atol=1e-10)
    return [layer.k_proj.weight.detach(), layer.v_proj.bias.detach()]


def test_copies_stay_equal_in_training(ranks: RankPool) -> None:
    for kv_heads in (2, 6):
        results = ranks.run(train, kv_heads, world=4)
        for a, b in ((0, 1), (2, 3)):
            assert all(torch.equal(x, y) for x, y in zip(results[a], results[b], strict=True))
        assert not torch.equal(results[0][0], results[2][0])


def every_split(heads: int, kv_heads: int, world: int) -> list[int]:
    """The kv head of every q head, as the ranks have them."""
    held = kv_heads // math.gcd(kv_heads, world)
    copies = world // math.gcd(kv_heads, world)
    out: list[int] = []
    for rank in range(world):
        counts = queries_of(heads, kv_heads, rank, world)
        assert len(counts) == held and sum(counts) == heads // world
        for head, count in enumerate(counts):
            out += [rank // copies * held + head] * count
    return out


def test_every_q_head_has_its_kv_head() -> None:
    for kv_heads in range(1, 13):
        for per in range(1, 7):
            heads = kv_heads * per
            for world in (w for w in range(1, heads + 1) if heads % w == 0):
                expected = [q // per for q in range(heads)]
                assert every_split(heads, kv_heads, world) == expected, (heads, kv_heads, world)


def main_grad(ctx: RankContext) -> None:
    """Two micro-batches into ``main_grad``, which is missing at first; delayed gradients of the others."""
    layer, dense = pair(ctx, 1, True, False, 1)
    inputs = [torch.randn(2, 3, WIDTH, dtype=F64) for _ in range(2)]
    for x in inputs:
        dense(x).square().sum().backward()
    full = {name: p.grad for name, p in dense.named_parameters()}
    for name, p in layer.named_parameters():
        if name.endswith("weight"):
            p.main_grad = torch.zeros_like(p)
    layer.v_proj.weight.grad_added_to_main_grad = False
    for x in inputs:
        layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        close(p.main_grad if name.endswith("weight") else p.grad, shard_of(p, full[name]), name)
    assert layer.k_proj.weight.grad is None
    assert layer.v_proj.weight.grad_added_to_main_grad
    norm = torch.nn.utils.get_total_norm(full.values())
    close(tnn.grad_norm(layer.parameters()), norm, "norm")

    strict = tnn.SharedColumnParallelLinear(4, 6, 1, group=ctx.group_name, gradient_accumulation_fusion=True)
    with pytest.raises(tpk.errors.ArgumentError, match=r"weight.main_grad: .* is missing"):
        strict(torch.randn(2, 4))


@pytest.mark.parametrize("world", [2, 3])
def test_main_grad_of_shared_heads(ranks: RankPool, world: int) -> None:
    ranks.run(main_grad, world=world)


def delayed(ctx: RankContext, kv_heads: int, main: bool, sp: bool) -> list[torch.Tensor]:
    """Two backward passes in flight: weights' gradients come later, summed over the ranks that share a head."""
    layer, dense = pair(ctx, kv_heads, True, sp, 0)
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    for child in linears:
        child.delay_wgrad = True
        if main:
            child.weight.main_grad = torch.zeros_like(child.weight)
    for _ in range(2):
        x = torch.randn(2, 2 * ctx.world, WIDTH, dtype=F64)
        dense(x).square().sum().backward()
        x = x.transpose(0, 1)
        layer(part(x, 0, [2] * ctx.world, ctx.rank) if sp else x).square().sum().backward()
    assert [child.pending_dw for child in linears] == [2] * 4
    assert all(child.weight.grad is None for child in linears)
    with tpk.record_paths() as log:
        tnn.backward_dw(layer)
        tnn.backward_dw(layer)
    shared = math.gcd(kv_heads, ctx.world) < ctx.world
    assert ops_of(log).get("all_reduce", 0) == (4 if shared else 0)
    for name, p in layer.named_parameters():
        got = p.main_grad if main and name.endswith("weight") else p.grad
        close(got, shard_of(p, dense.get_parameter(name).grad), f"delayed {name}")
        if main and name.endswith("weight"):
            assert p.grad is None
    with pytest.raises(tpk.errors.ArgumentError, match=r"Linear 'a\.k_proj' has no weight gradient pending"):
        layer.k_proj.backward_dw()
    return [layer.k_proj.weight.main_grad if main else layer.k_proj.weight.grad]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize(("world", "kv_heads"), [(2, 1), (3, 2), (4, 2)])
def test_delayed_gradients_of_shared_heads(
    ranks: RankPool, world: int, kv_heads: int, main: bool, sp: bool
) -> None:
    results = ranks.run(delayed, kv_heads, main, sp, world=world)
    copies = world // math.gcd(world, kv_heads)
    assert all(torch.equal(r[0], results[i - i % copies][0]) for i, r in enumerate(results))


def core_of(ctx: RankContext, kv_heads: int) -> list[torch.Tensor]:
    """With dropout of the probabilities: the output, and the gradient of v's weight, recomputed or not."""
    x = torch.randn(3, 2, WIDTH, dtype=F64)
    results = []
    for recompute in (False, True):
        layer = tnn.ParallelAttention(
            WIDTH,
            HEADS,
            kv_heads,
            dropout=0.3,
            recompute_core=recompute,
            group=ctx.group_name,
            dtype=F64,
            seed=7,
            name="a",
        )
        y = layer(x, step=1)
        y.square().sum().backward()
        own = dict(layer.named_parameters())
        whole = tnn.full_tensors({n: p.grad for n, p in own.items()}, own)
        results.append([y.detach(), whole["v_proj.weight"]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return results[0]


@pytest.mark.parametrize(("world", "kv_heads"), [(3, 2), (3, 4)])
def test_masks_and_recomputation_of_shared_heads(ranks: RankPool, world: int, kv_heads: int) -> None:
    alone = ranks.run(core_of, kv_heads, world=1)[0]
    for results in ranks.run(core_of, kv_heads, world=world):
        for got, expected in zip(results, alone, strict=True):
            close(got, expected, f"{world} ranks, {kv_heads} kv heads")


def low_rank(ctx: RankContext, kv_heads: int) -> list[torch.Tensor]:
    """LoRA on every projection: the factors of a shared head get the gradients of all ranks that share it."""
    layer, dense = pair(ctx, kv_heads, False, True, 0)
    tnn.add_lora_(layer, 3, alpha=6.0)
    for name, p in layer.named_parameters():
        if "lora" in name:
            placement = tnn.placement_of(p)
            tnn.init.normal_(
                p,
                seed=2,
                name=name,
                std=0.2,
                global_shape=placement.global_shape(p.shape),
                offset=placement.offset(2),
            )
    own = dict(layer.named_parameters())
    full = {n: t.requires_grad_("lora" in n) for n, t in tnn.full_tensors(own, own).items()}
    merged = {
        f"{n}_proj.weight": full[f"{n}_proj.weight"]
        + 2.0 * full[f"{n}_proj.lora_B"] @ full[f"{n}_proj.lora_A"]
        for n in "qkvo"
    }
    x = torch.randn(2, 2 * ctx.world, WIDTH, dtype=F64)
    y = torch.func.functional_call(dense, merged, (x,))
    y.square().sum().backward()
    mine = part(x.transpose(0, 1), 0, [2] * ctx.world, ctx.rank)
    out = layer(mine)
    close(out, part(y.transpose(0, 1), 0, [2] * ctx.world, ctx.rank), "lora")
    out.square().sum().backward()
    for name, p in layer.named_parameters():
        assert (p.grad is None) is ("lora" not in name)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, shard_of(p, full[name].grad), rtol=1e-9, atol=1e-10)
    return [layer.k_proj.lora_B.grad]


@pytest.mark.parametrize(("world", "kv_heads"), [(2, 1), (4, 2)])
def test_lora_on_shared_heads(ranks: RankPool, world: int, kv_heads: int) -> None:
    first, second, *_ = ranks.run(low_rank, kv_heads, world=world)
    assert torch.equal(first[0], second[0])


def collectives(ctx: RankContext) -> None:
    """The sums over copies are one all-reduce for each of the k and v weights, and nothing in the forward pass."""
    counts = []
    for kv_heads in (HEADS, 1):
        layer, _ = pair(ctx, kv_heads, False, True, 0)
        x = torch.randn(2, 2, WIDTH, dtype=F64, requires_grad=True)
        with tpk.record_paths() as forward:
            y = layer(x)
        with tpk.record_paths() as backward:
            y.sum().backward()
        counts.append((ops_of(forward), ops_of(backward)))
    (plain_forward, plain_backward), (shared_forward, shared_backward) = counts
    assert shared_forward == plain_forward == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    assert shared_backward.pop("all_reduce") == 2
    assert shared_backward == plain_backward


def ops_of(log: tpk.PathLog) -> dict[str, int]:
    total: dict[str, int] = {}
    for (op, *_), count in log.counts.items():
        total[op] = total.get(op, 0) + count
    return total


def test_number_of_collectives(ranks: RankPool) -> None:
    ranks.run(collectives, world=2)


def refused(ctx: RankContext) -> None:
    with pytest.raises(
        tpk.errors.ArgumentError,
        match=r"^heads: .*8 heads cannot be shared by 3 ranks; the group may have 1, 2, 4, 8 ranks\.",
    ):
        tnn.ParallelAttention(48, 8, 4, group=ctx.group_name)
    with pytest.raises(
        tpk.errors.ArgumentError, match=r"parts: it must divide the ranks of the group, 3.*is 2"
    ):
        tnn.SharedColumnParallelLinear(8, 4, 2, group=ctx.group_name)
    with pytest.raises(tpk.errors.ArgumentError, match=r"parts: it must divide out_features, 4.*is 3"):
        tnn.SharedColumnParallelLinear(8, 4, 3, group=ctx.group_name)


def test_heads_that_cannot_be_shared_are_named(ranks: RankPool) -> None:
    ranks.run(refused, world=3)
