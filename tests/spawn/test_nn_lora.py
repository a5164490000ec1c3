"""LoRA on column- and row-parallel layers against the unsharded sum in float64, on 1 to 4 ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_dense import VOCAB, DenseLM, ParallelLM, assert_grads, close, layouts, part, shard_of
from torch import Tensor, nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.testing import RankContext, RankPool

WORLDS = (1, 2, 3, 4)
F64 = torch.float64
INSIDE, OUTSIDE, RANK, ALPHA = 10, 7, 3, 4.5


class DenseLoRA(nn.Module):
    """nn.Linear with the factors, under the names that our layers give them."""

    def __init__(self, inside: int, outside: int, bias: bool, rank: int = RANK, alpha: float = ALPHA) -> None:
        super().__init__()
        kinds: dict[str, Any] = {"dtype": F64}
        self.weight = nn.Parameter(torch.empty(outside, inside, **kinds))
        self.bias = nn.Parameter(torch.empty(outside, **kinds)) if bias else None
        self.lora_A = nn.Parameter(torch.empty(rank, inside, **kinds))
        self.lora_B = nn.Parameter(torch.empty(outside, rank, **kinds))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.scale * self.lora_B @ self.lora_A, self.bias)


def set_alike(layer: nn.Module, dense: nn.Module) -> None:
    """Random values in both, the same on every rank: ranks draw alike."""
    with torch.no_grad():
        for p in dense.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    tnn.load_full_state_dict(layer, dense.state_dict())


def make(
    ctx: RankContext, kind: str, *, freeze: bool = True, dtype: torch.dtype = F64, **options: Any
) -> tuple[Any, DenseLoRA]:
    of = tnn.ColumnParallelLinear if kind == "column" else tnn.RowParallelLinear
    layer = of(INSIDE, OUTSIDE, group=ctx.group, dtype=dtype, name="layer", **options)
    assert tnn.add_lora_(layer, RANK, alpha=ALPHA, freeze=freeze) is layer
    dense = DenseLoRA(INSIDE, OUTSIDE, options.get("bias", True))
    set_alike(layer, dense)
    for name, p in layer.named_parameters():
        assert p.requires_grad == (not freeze or name.startswith("lora_"))
        dense.get_parameter(name).requires_grad_(p.requires_grad)
    return layer, dense


def assert_equal_on_ranks(ctx: RankContext, module: nn.Module, note: str) -> None:
    """What is replicated has the same gradient on every rank, bit for bit."""
    for name, p in module.named_parameters():
        if p.grad is not None and isinstance(tnn.placement_of(p), tnn.Replicated):
            every = tpk.regions.all_gather(p.grad[None], 0, ctx.group)
            assert (every == every[0]).all(), f"{note}: {name} differs between ranks"


def check_layers(ctx: RankContext) -> None:
    for shape, dim, sizes in layouts(ctx.world):
        rows = sizes or tpk.shard_sizes(shape[dim], ctx.world)
        cases = [
            (k, sp, b, f)
            for k in ("column", "row")
            for sp in (False, True)
            for b in (False, True)
            for f in (False, True)
        ]
        for kind, sp, bias, freeze in cases:
            note = f"{kind} {shape} dim={dim} {sizes} sp={sp} bias={bias} freeze={freeze}"
            layer, dense = make(ctx, kind, freeze=freeze, bias=bias, sequence_parallel=sp, sequence_dim=dim)
            x = torch.randn(*shape, INSIDE, dtype=F64, requires_grad=True)
            y = dense(x)
            weight = torch.randn_like(y)
            y.backward(weight)

            def own_rows(t: Tensor, sp: bool = sp, dim: int = dim, rows: list[int] = rows) -> Tensor:
                return part(t, dim, rows, ctx.rank) if sp else t

            def features(t: Tensor, sizes: tuple[int, ...]) -> Tensor:
                return part(t, -1, list(sizes), ctx.rank)

            if kind == "column":
                give, get = own_rows, lambda t, s=layer.out_sizes: features(t, s)
            else:
                give, get = (lambda t, s=layer.in_sizes: features(t, s)), own_rows
            mine = give(x.detach()).clone().requires_grad_()
            out = layer(mine, shard_sizes=sizes if sp else None)
            close(out, get(y.detach()), note)
            out.backward(get(weight))
            close(mine.grad, give(x.grad), f"{note}: x")
            for name, p in layer.named_parameters():
                expected = dense.get_parameter(name).grad
                assert (p.grad is None) == (expected is None), f"{note}: {name}"
                if expected is not None:
                    close(p.grad, shard_of(p, expected), f"{note}: {name}")
            assert_equal_on_ranks(ctx, layer, note)


def check_dtypes(ctx: RankContext) -> None:
    """Lower types follow float64 within their rounding."""
    for dtype, tolerance in ((torch.bfloat16, 0.03), (torch.float16, 0.004), (torch.float32, 2e-6)):
        for kind in ("column", "row"):
            for sp in (False, True):
                layer, _ = make(ctx, kind, dtype=dtype, sequence_parallel=sp)
                fine, _ = make(ctx, kind, sequence_parallel=sp)
                state = {k: v.double() for k, v in tnn.full_state_dict(layer).items()}
                tnn.load_full_state_dict(fine, state)
                width = fine.weight.shape[1]
                shape = (3, 5, width) if kind == "column" and sp else (3 * ctx.world, 5, width)
                torch.manual_seed(ctx.rank if sp or kind == "row" else 0)
                x = torch.randn(shape).to(dtype)
                for some in (layer, fine):
                    xi = x.to(some.weight.dtype, copy=True).requires_grad_()
                    y = some(xi)
                    assert y.dtype == some.weight.dtype
                    y.square().mean().backward()
                    some.made = [y, xi.grad, some.lora_A.grad, some.lora_B.grad]
                for a, b in zip(layer.made, fine.made, strict=True):
                    assert a.dtype == dtype
                    error = (a.double() - b).norm() / b.norm().clamp_min(1e-30)
                    assert error < tolerance, f"{kind} {dtype} sp={sp}: {error:.3g}"
                torch.manual_seed(0)


def check_start(ctx: RankContext) -> None:
    """A as the whole tensor has it, whatever the world, B zero: the layer begins as it was without."""
    bound = 1 / INSIDE**0.5
    whole = tnn.init.uniform_(
        torch.empty(RANK, INSIDE, dtype=F64), seed=7, name="layer.lora_A", low=-bound, high=bound
    )
    for kind in (tnn.ColumnParallelLinear, tnn.RowParallelLinear):
        layer = kind(INSIDE, OUTSIDE, group=ctx.group, dtype=F64, name="layer", seed=7)
        x = torch.randn(4, layer.weight.shape[1], dtype=F64)
        before = layer(x)
        tnn.add_lora_(layer, RANK)
        assert torch.equal(layer.lora_A, shard_of(layer.lora_A, whole))
        assert not layer.lora_B.any()
        assert layer.lora.scale == 1
        close(layer(x), before, "at the start")
        assert f"rank={RANK}, alpha={float(RANK)}" in repr(layer)
    model = nn.ModuleDict(
        {"layer": tnn.RowParallelLinear(INSIDE, OUTSIDE, group=ctx.group, dtype=F64, name="x")}
    )
    tnn.add_lora_(model, RANK, seed=7)  # named by where it is
    assert torch.equal(model["layer"].lora_A, shard_of(model["layer"].lora_A, whole))


def travelled(log: tpk.PathLog) -> dict[str, int]:
    """Calls that move something, by op; two names are products with a gather or a reduction in them."""
    local = ("matmul", "matmul_accumulate", "matmul_replicated")
    counts: dict[str, int] = {}
    for (op, _), n in log.counts.items():
        if op not in local:
            counts[op] = counts.get(op, 0) + n
    return counts


def check_collectives(ctx: RankContext) -> None:
    """As the table in ``tpkernels.nn.lora`` has it; with three layers on one gather no more than with one."""
    more = {
        ("column", False): ({}, {"all_reduce": 1}),
        ("column", True): ({"all_gather": 1}, {"reduce_scatter": 1, "all_reduce": 1}),
        ("row", False): ({}, {"all_reduce": 1}),
        ("row", True): ({}, {"all_reduce": 1}),
    }
    for (kind, sp), (forward, backward) in more.items():
        for together in (False, True) if kind == "column" else (False,):
            options: dict[str, Any] = {"group": ctx.group, "dtype": F64, "sequence_parallel": sp}
            if together:
                layer: Any = tnn.ColumnParallelLinears(INSIDE, {"q": 9, "k": 5, "v": 5}, **options)
            else:
                of = tnn.ColumnParallelLinear if kind == "column" else tnn.RowParallelLinear
                layer = of(INSIDE, OUTSIDE, **options)
            layer.requires_grad_(False)
            found = []
            for adapted in (False, True):
                if adapted:
                    tnn.add_lora_(layer, RANK)
                width = next(p for p in layer.parameters() if p.dim() == 2).shape[1]
                x = torch.randn(2 * ctx.world, width, dtype=F64, requires_grad=True)
                with tpk.record_paths() as first:
                    y = layer(x)
                with tpk.record_paths() as second:
                    sum(o.sum() for o in (y if together else [y])).backward()
                found.append((travelled(first), travelled(second)))
            for plain, with_lora, extra in zip(*found, (forward, backward), strict=True):
                merged = {op: plain.get(op, 0) + extra.get(op, 0) for op in plain.keys() | extra.keys()}
                assert with_lora == merged, f"{kind} sp={sp} together={together}: {plain} {with_lora}"


def check_together(ctx: RankContext) -> None:
    """Layers on one gather, of which some have factors, of different ranks; activations; gathered outputs; no bias."""
    for sp in (False, True):
        for options in ({}, {"activation": "gelu_tanh"}, {"gather_output": True}, {"skip_bias_add": True}):
            layers = tnn.ColumnParallelLinears(
                6, {"q": 9, "k": 5, "v": 4}, group=ctx.group, dtype=F64, sequence_parallel=sp, **options
            )
            tnn.add_lora_(layers["q"], 2, alpha=3, freeze=False)
            tnn.add_lora_(layers, 4, targets=["v"], freeze=False)
            dense = nn.ModuleDict(
                {
                    "q": DenseLoRA(6, 9, True, 2, 3),
                    "k": nn.Linear(6, 5, dtype=F64),
                    "v": DenseLoRA(6, 4, True, 4, 4),
                }
            )
            set_alike(layers, dense)
            x = torch.randn(2 * ctx.world, 6, dtype=F64, requires_grad=True)
            mine = (part(x, 0, [2] * ctx.world, ctx.rank) if sp else x).detach().clone().requires_grad_()
            outs = layers(mine)
            if "skip_bias_add" in options:
                outs = [y + bias for y, bias in outs]
            loss = 0
            for key, out in zip(layers, outs, strict=True):
                y = dense[key](x)
                y = F.gelu(y, approximate="tanh") if "activation" in options else y
                columns = list(layers[key].out_sizes)
                close(
                    out,
                    y if "gather_output" in options else part(y, -1, columns, ctx.rank),
                    f"{key} {sp} {options}",
                )
                loss = loss + y.square().sum()
            loss.backward()
            sum(out.square().sum() for out in outs).backward()
            close(
                mine.grad, part(x.grad, 0, [2] * ctx.world, ctx.rank) if sp else x.grad, f"{sp} {options}: x"
            )
            assert_grads(layers, dense, f"{sp} {options}")


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


def check_dropout(ctx: RankContext) -> None:
    """Off in eval; on, the factors see the masked input alone, and whole factors get one gradient everywhere."""
    for kind in ("column", "row"):
        for sp in (False, True):
            layer, _ = make(ctx, kind, sequence_parallel=sp)
            tnn.remove_lora_(layer)
            tnn.add_lora_(layer, RANK, alpha=ALPHA, dropout=0.4)
            with torch.no_grad():
                layer.lora_B.copy_(shard_of(layer.lora_B, torch.randn(OUTSIDE, RANK, dtype=F64)))
            replicated = kind == "column" and not sp
            torch.manual_seed(5 if replicated else 5 + ctx.rank)
            x = torch.randn(4 if kind == "column" else 4 * ctx.world, layer.weight.shape[1], dtype=F64)
            with torch.no_grad():
                layer.eval()
                assert torch.equal(layer(x), layer(x))
                layer.train()
                state = torch.get_rng_state()
                out = layer(x)
                torch.set_rng_state(state)
                masked = F.dropout(x, 0.4)
                torch.set_rng_state(state)
                layer.lora_B.neg_()
                base = (out + layer(x)) / 2
                layer.lora_B.neg_()
                inner = masked @ layer.lora_A.t() * layer.lora.scale
                if kind == "row":
                    low = inner @ layer.lora_B.t()
                    low = (
                        tpk.regions.reduce_scatter(low, 0, ctx.group)
                        if sp
                        else tpk.regions.all_reduce(low, ctx.group)
                    )
                else:
                    inner = tpk.regions.all_gather(inner, 0, ctx.group) if sp else inner
                    low = inner @ layer.lora_B.t()
                close(out - base, low, f"{kind} sp={sp}")
            layer(x).square().sum().backward()
            assert_equal_on_ranks(ctx, layer, f"dropout {kind} sp={sp}")


def check_held(ctx: RankContext) -> None:
    """With a frozen base autograd holds the input once, and the narrow product."""
    from test_nn_linear_options import Held

    wide = 1000
    for sp in (False, True):
        layer = tnn.ColumnParallelLinear(wide, OUTSIDE, group=ctx.group, dtype=F64, sequence_parallel=sp)
        tnn.add_lora_(layer, RANK)
        x = torch.randn(5, wide, dtype=F64)
        with Held(layer) as held:
            y = layer(x)
        rows = 5 * ctx.world if sp else 5
        factor = RANK * wide * 8  # A as all ranks' rows share it
        assert held.bytes == x.numel() * 8 + rows * RANK * 8 + factor, f"sp={sp}: {held.bytes}"
        y.sum().backward()
        assert layer.lora_A.grad is not None


def check_autocast_and_recompute(ctx: RankContext) -> None:
    from torch.utils.checkpoint import checkpoint

    for kind in ("column", "row"):
        for sp in (False, True):
            layer, _ = make(ctx, kind, dtype=torch.float32, sequence_parallel=sp)
            x = torch.randn(2 * ctx.world, layer.weight.shape[1])
            results = []
            for recompute in (False, True):
                layer.zero_grad()
                xi = x.clone().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16):
                    y = checkpoint(layer, xi, use_reentrant=False) if recompute else layer(xi)
                assert y.dtype == torch.bfloat16
                y.float().square().sum().backward()
                assert layer.lora_A.grad.dtype == torch.float32
                results.append([y, xi.grad, layer.lora_A.grad, layer.lora_B.grad])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b)


def check_compiled(ctx: RankContext) -> None:
    """One graph, the same gradients."""
    for kind in ("column", "row"):
        for sp in (False, True):
            layer, _ = make(ctx, kind, sequence_parallel=sp)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            x = torch.randn(2 * ctx.world, layer.weight.shape[1], dtype=F64)
            results = []
            for some in (layer, compiled):
                layer.zero_grad()
                xi = x.clone().requires_grad_()
                y = some(xi)
                y.square().sum().backward()
                results.append([y, xi.grad, layer.lora_A.grad, layer.lora_B.grad])
            for a, b in zip(*results, strict=True):
                close(b, a, f"{kind} sp={sp}")


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


CHECKS = {
    f.__name__: f
    for f in (
        check_layers,
        check_dtypes,
        check_start,
        check_collectives,
        check_together,
        check_merge,
        check_dropout,
        check_held,
        check_autocast_and_recompute,
        check_refusals,
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", WORLDS)
def test_lora(ranks: RankPool, world: int, check: str) -> None:
    ranks.run(CHECKS[check], world=world)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_model(ranks: RankPool, world: int, sp: bool) -> None:
    ranks.run(check_model, sp, world=world)


def test_compiled(ranks: RankPool) -> None:
    ranks.run(check_compiled, world=2)
