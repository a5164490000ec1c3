"""LoRA on models: training beside the unsharded one, merging, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_dense import VOCAB, DenseLM, ParallelLM, close
from nn_lora import (
    ALPHA,
    F64,
    RANK,
    WORLDS,
    DenseLoRA,
    assert_equal_on_ranks,
    make,
    travelled,
)
from torch import nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool


def with_factors(dense: nn.Module, names: set[str]) -> nn.Module:
    """Puts DenseLoRA in the place of linear layers of these names, with their weights."""
    for module in list(dense.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                made = DenseLoRA(child.in_features, child.out_features, child.bias is not None)
                made.load_state_dict(child.state_dict(), strict=False)
                setattr(module, name, made)
    return dense


def check_model(ctx: RankContext, sp: bool) -> None:
    """Five steps of a whole model's factors as the unsharded model makes them; the factors stay equal on all ranks."""
    targets = {"q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}
    dense = with_factors(tnn.init_weights_(DenseLM(bias=True), seed=3), targets)
    model = ParallelLM(ctx.group_name, bias=True, sequence_parallel=sp)
    tnn.init_weights_(model, seed=3)
    tnn.add_lora_(model, RANK, alpha=ALPHA, targets=sorted(targets), seed=3)
    tnn.init_weights_(dense, seed=3)
    state = tnn.full_state_dict(model)
    assert state.keys() == dense.state_dict().keys()
    for name, value in dense.state_dict().items():
        assert torch.equal(state[name], value), name
    adapter = tnn.lora_state_dict(model)
    assert adapter.keys() == {n for n in state if n.endswith(("lora_A", "lora_B"))}
    for name, p in dense.named_parameters():
        p.requires_grad_("lora_" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = [
        torch.optim.AdamW([p for p in some.parameters() if p.requires_grad], lr=0.01)
        for some in (model, dense)
    ]
    sizes = tpk.shard_sizes(6, ctx.world) if sp else None
    for _ in range(5):
        ids, labels = torch.randint(0, VOCAB, (2, 2, 6)).unbind()
        loss = F.cross_entropy(dense(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        tnn.vocab_parallel_cross_entropy(model(ids, sizes), labels.t(), ctx.group_name, VOCAB).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in dense.parameters() if p.requires_grad], 0.1)
        torch.testing.assert_close(tnn.clip_grad_norm_(trained, 0.1), norm, rtol=1e-9, atol=0)
        assert_equal_on_ranks(ctx, model, "model")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = tnn.full_state_dict(model)
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert (full["blocks.0.attention.q_proj.lora_B"] != 0).any()
    merged = tnn.merge_lora_(copy.deepcopy(model))
    ids = torch.randint(0, VOCAB, (2, 6))
    with torch.no_grad():
        close(merged(ids, sizes), model(ids, sizes), "merged")
    plain = tnn.remove_lora_(merged)
    fresh = ParallelLM(ctx.group_name, bias=True, sequence_parallel=sp)
    tnn.load_full_state_dict(fresh, tnn.full_state_dict(plain))
    with torch.no_grad():
        close(fresh(ids, sizes), model(ids, sizes), "removed")
    other = ParallelLM(ctx.group_name, bias=True, sequence_parallel=sp)
    tnn.init_weights_(other, seed=3)
    tnn.add_lora_(other, RANK, alpha=ALPHA, targets=sorted(targets))
    tnn.load_lora_state_dict(other, tnn.lora_state_dict(model))
    with torch.no_grad():
        assert torch.equal(other(ids, sizes), model(ids, sizes))


def check_merge(ctx: RankContext) -> None:
    for kind in ("column", "row"):
        for dtype, tolerance in ((F64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
            layer, _ = make(ctx, kind, dtype=dtype)
            before = layer.weight.clone()
            x = torch.randn(4, layer.weight.shape[1]).to(dtype)
            with torch.no_grad():
                apart = layer(x)
                with (
                    tpk.record_paths() as log,
                    torch.autocast("cpu", torch.bfloat16),
                ):  # must not round the weight
                    tnn.merge_lora_(layer)
                assert not travelled(log)
                torch.testing.assert_close(layer(x), apart, rtol=5 * tolerance, atol=20 * tolerance)
                assert layer.lora.merged
                with tpk.record_paths() as log:
                    layer(x)
                assert sum(log.counts.values()) == 1
            assert not torch.equal(layer.weight, before) or not before.numel()
            with pytest.raises(tpk.errors.ArgumentError, match="are merged already"):
                tnn.merge_lora_(layer)
            with pytest.raises(
                tpk.errors.ArgumentError, match=r"merged into its weight and would get no gradient"
            ):
                layer(x)
            with pytest.raises(tpk.errors.ArgumentError, match=r"merged into its weight; call unmerge"):
                tnn.load_lora_state_dict(layer, {})
            layer.eval()(x)
            tnn.unmerge_lora_(layer.train())
            torch.testing.assert_close(layer.weight, before, rtol=tolerance, atol=4 * tolerance)
            with pytest.raises(tpk.errors.ArgumentError, match="are not merged"):
                tnn.unmerge_lora_(layer)
            assert not layer.weight.requires_grad
            assert layer(x).requires_grad


def check_refusals(ctx: RankContext) -> None:
    layers = tnn.ColumnParallelLinears(6, {"q": 9, "k": 5}, group=ctx.group)
    model = nn.ModuleDict({"qkv": layers, "norm": nn.LayerNorm(6)})
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: tnn.add_lora_(model, 0), r"rank: it must be an integer of 1 or more, but it is 0"),
        (lambda: tnn.add_lora_(model, 2.5), r"rank: .* 2\.5"),
        (lambda: tnn.add_lora_(model, 2, alpha=float("nan")), r"alpha: it must be a finite number"),
        (lambda: tnn.add_lora_(model, 2, dropout=1.0), r"dropout: .* from 0 to below 1, but it is 1\.0"),
        (lambda: tnn.add_lora_(nn.Linear(3, 3), 2), r"module: LoRA takes Column.* and Linear has none"),
        (
            lambda: tnn.add_lora_(model, 2, targets=["q", "v"]),
            r"targets: 'v' is the name of no linear layer of ModuleDict, which has 'qkv.q', 'qkv.k'",
        ),
        (lambda: tnn.merge_lora_(model), r"no layer of ModuleDict has LoRA factors; call add_lora_"),
        (lambda: tnn.lora_state_dict(model), r"has LoRA factors"),
    ]
    for action, pattern in cases:
        with pytest.raises(tpk.errors.ArgumentError, match=pattern):
            action()
    assert all(p.requires_grad for p in model.parameters())
    tnn.add_lora_(model, 2, targets="q")
    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora" not in n)
    with pytest.raises(tpk.errors.ArgumentError, match=r"module: qkv.q has LoRA factors already"):
        tnn.add_lora_(model, 2)
    assert layers["k"].lora is None
    state = tnn.lora_state_dict(model)
    assert list(state) == ["qkv.q.lora_A", "qkv.q.lora_B"]
    other = {"qkv.q.lora_A": torch.zeros(3, 6), "qkv.q.lora_B": torch.zeros(9, 3)}
    with pytest.raises(
        tpk.errors.ArgumentError, match=r"'qkv.q.lora_A' must have the unsharded shape \[2, 6\]"
    ):
        tnn.load_lora_state_dict(model, other)
    with pytest.raises(
        tpk.errors.ArgumentError, match=r"\['qkv.q.lora_B'\] are missing and \['x'\] are unknown"
    ):
        tnn.load_lora_state_dict(model, {"qkv.q.lora_A": state["qkv.q.lora_A"], "x": state["qkv.q.lora_B"]})


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_model(ranks: RankPool, world: int, sp: bool) -> None:
    ranks.run(check_model, sp, world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_merged(ranks: RankPool, world: int) -> None:
    ranks.run(check_merge, world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_refusals(ranks: RankPool, world: int) -> None:
    ranks.run(check_refusals, world=world)
