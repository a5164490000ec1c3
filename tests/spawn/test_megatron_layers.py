"""Megatron-core's layers on our operations: against its own and against dense float64, with its whole contract."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cpu import megatron_on_cpu
from nn_dense import close, part
from torch import Tensor
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.testing import RankContext, RankPool

pytest.importorskip("megatron.core.tensor_parallel", reason="needs megatron-core 0.16 (extra: integrations)")

F64 = torch.float64
WORLDS = [1, 2, 3, 4]
IN, OUT, S, B = 12, 24, 12, 3  # Megatron wants all but the batch to divide by the world


def config(**changes: Any) -> Any:
    from megatron.core.model_parallel_config import ModelParallelConfig

    options = {"use_cpu_initialization": True, "params_dtype": F64, "perform_initialization": True}
    return ModelParallelConfig(**{**options, **changes})


def init(weight: Tensor) -> Tensor:
    """The whole weight, the same on every rank: Megatron cuts it on the CPU."""
    return torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(5))


def dense_weight(out: int, inside: int) -> Tensor:
    return init(torch.empty(out, inside)).double().requires_grad_()


def attributes(parameter: Tensor) -> dict[str, Any]:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")
    return {name: getattr(parameter, name, "not there") for name in names}


def pair(kind: str, ctx: RankContext, cfg: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """[ours, Megatron's], of one start."""
    from megatron.core import tensor_parallel as theirs

    from tpkernels.integrations import megatron as ours

    layers = [
        getattr(library, kind)(*args, config=cfg, init_method=init, tp_group=ctx.group, **kwargs)
        for library in (ours, theirs)
    ]
    mine, other = (dict(layer.named_parameters()) for layer in layers)
    assert mine.keys() == other.keys()
    for name, p in mine.items():
        assert torch.equal(p, other[name])
        assert attributes(p) == attributes(other[name]), (kind, name)
        with torch.no_grad():
            if name == "bias":
                p.copy_(torch.arange(p.numel()) / 7 - 0.3)
                other[name].copy_(p)
    assert isinstance(layers[0], type(layers[1]))
    assert repr(layers[0]) == repr(layers[1])
    return layers


def run(layer: Any, x: Tensor, outer: Tensor) -> dict[str, Tensor]:
    """Output with a skipped bias added, and all gradients."""
    x = x.detach().clone().requires_grad_()
    out, bias = layer(x)
    assert (bias is None) == (layer.bias is None or not layer.skip_bias_add)
    result = {"output": out}
    (out if bias is None else out + bias).backward(outer)
    result["x"] = x.grad
    return {**result, **{name: p.grad for name, p in layer.named_parameters()}}


def check_column(ctx: RankContext) -> None:
    for sp, bias, skip, gather in product((False, True), repeat=4):
        if sp and ctx.world == 1:
            continue  # Megatron's configuration refuses that
        note = f"sp={sp} bias={bias} skip={skip} gather={gather}"
        cfg = config(sequence_parallel=sp, tensor_model_parallel_size=ctx.world)
        options = {"bias": bias, "skip_bias_add": skip, "gather_output": gather}
        layer, other = pair("ColumnParallelLinear", ctx, cfg, IN, OUT, **options)
        x, weight = torch.randn(S, B, IN, dtype=F64, requires_grad=True), dense_weight(OUT, IN)
        columns = tpk.shard_sizes(OUT, ctx.world)
        rows = tpk.shard_sizes(S, ctx.world)
        dense_bias = (
            torch.cat([torch.arange(n) / 7 - 0.3 for n in columns]).to(F64) if bias else torch.zeros(OUT)
        )
        y = F.linear(x, weight, dense_bias.to(F64))
        outer = torch.randn_like(y)
        y.backward(outer)
        mine = part(x, 0, rows, ctx.rank) if layer.sequence_parallel else x
        my_outer = outer if gather else part(outer, -1, columns, ctx.rank)
        if gather and skip and bias:
            continue  # a whole output and a part of a bias: nothing to add
        got = run(layer, mine, my_outer)
        theirs = run(other, mine, my_outer)
        for name, value in got.items():
            close(value, theirs[name], f"column {note}: {name}")
        close(got["weight"], part(weight.grad, 0, columns, ctx.rank), f"column {note}: dense weight")
        close(got["x"], part(x.grad, 0, rows, ctx.rank) if layer.sequence_parallel else x.grad, note)


def check_row(ctx: RankContext) -> None:
    for sp, bias, skip, parallel in product((False, True), repeat=4):
        if sp and (ctx.world == 1 or not parallel):
            continue
        note = f"sp={sp} bias={bias} skip={skip} parallel={parallel}"
        cfg = config(sequence_parallel=sp, tensor_model_parallel_size=ctx.world)
        options = {"bias": bias, "skip_bias_add": skip, "input_is_parallel": parallel}
        layer, other = pair("RowParallelLinear", ctx, cfg, IN, OUT, **options)
        x, weight = torch.randn(S, B, IN, dtype=F64, requires_grad=True), dense_weight(OUT, IN)
        y = F.linear(x, weight)
        outer = torch.randn_like(y)
        y.backward(outer)
        columns, rows = tpk.shard_sizes(IN, ctx.world), tpk.shard_sizes(S, ctx.world)
        mine = part(x, -1, columns, ctx.rank) if parallel else x
        my_outer = part(outer, 0, rows, ctx.rank) if sp else outer
        got, theirs = run(layer, mine, my_outer), run(other, mine, my_outer)
        for name, value in got.items():
            close(value, theirs[name], f"row {note}: {name}")
        close(got["weight"], part(weight.grad, 1, columns, ctx.rank), f"row {note}: dense weight")


def check_embedding(ctx: RankContext) -> None:
    for scatter in (False, True):
        layer, other = pair(
            "VocabParallelEmbedding", ctx, config(), OUT, 5, reduce_scatter_embeddings=scatter
        )
        ids = torch.randint(OUT, (B, S))
        weight = dense_weight(OUT, 5)
        y = F.embedding(ids, weight)
        outer = torch.randn_like(y)
        y.backward(outer)
        if scatter:
            y, outer = (
                part(t.transpose(0, 1), 0, tpk.shard_sizes(S, ctx.world), ctx.rank) for t in (y, outer)
            )
        for module in (layer, other):
            out = module(ids)
            close(out, y, f"embedding {scatter}")
            out.backward(outer)
        close(layer.weight.grad, part(weight.grad, 0, tpk.shard_sizes(OUT, ctx.world), ctx.rank), "weight")
        close(layer.weight.grad, other.weight.grad, "Megatron's weight")


def check_loss(ctx: RankContext) -> None:
    """Smoothed over the whole vocabulary; Megatron's own is right without smoothing, or on one rank."""
    from tpkernels.integrations import megatron as ours

    logits = (3 * torch.randn(S, B, OUT, dtype=F64)).requires_grad_()
    target = torch.randint(OUT, (S, B))
    target[0, 1] = -100
    outer = torch.randn(S, B, dtype=F64)
    sizes = tpk.shard_sizes(OUT, ctx.world)
    for smoothing in (0.0, 0.1, 0.7):
        logits.grad = None
        log_p = logits.log_softmax(-1)
        # the definition: 1 - a for the target, a / (K - 1) for each of the others
        share = torch.full_like(log_p, smoothing / (OUT - 1)).scatter_(
            -1, target.clamp(min=0).unsqueeze(-1), 1 - smoothing
        )
        expected = -(share * log_p).sum(-1) * (target != -100)
        expected.backward(outer)
        mine = part(logits.detach(), -1, sizes, ctx.rank).clone().requires_grad_()
        before = mine.detach().clone()
        loss = ours.vocab_parallel_cross_entropy(mine, target, smoothing, tp_group=ctx.group)
        close(loss, expected, f"loss, smoothing {smoothing}")
        loss.backward(outer)
        close(mine.grad, part(logits.grad, -1, sizes, ctx.rank), f"gradient, smoothing {smoothing}")
        assert torch.equal(mine, before)
    with pytest.raises(ArgumentError, match=r"label_smoothing: it must be in \[0, 1\), but it is 1.0"):
        ours.vocab_parallel_cross_entropy(mine, target, 1.0, tp_group=ctx.group)


def check_main_grad(ctx: RankContext) -> None:
    """Two microbatches add up in float32 main_grad, without APEX; a given weight has its own; missing is a sentence."""
    from tpkernels.integrations import megatron as ours

    for sp in (False, True)[: ctx.world]:
        cfg = config(
            gradient_accumulation_fusion=True,
            params_dtype=torch.bfloat16,
            sequence_parallel=sp,
            tensor_model_parallel_size=ctx.world,
        )
        common = {"config": cfg, "init_method": init, "tp_group": ctx.group, "bias": False}
        column = ours.ColumnParallelLinear(IN, OUT, **common)
        row = ours.RowParallelLinear(OUT, IN, input_is_parallel=True, skip_bias_add=True, **common)
        assert column.gradient_accumulation_fusion
        assert column.config is cfg
        sp = column.sequence_parallel
        x = torch.randn(S // (ctx.world if sp else 1), B, IN).bfloat16()
        if not sp:
            x = tpk.regions.all_reduce(x, ctx.group)  # equal on every rank
        with pytest.raises(ArgumentError, match=r"main_grad: its gradient was asked .* is missing; set"):
            column(x)
        with torch.no_grad():
            assert column(x)[0].dtype == torch.bfloat16  # no gradient, no main_grad
        for layer in (column, row):
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        for _ in range(2):
            y, _ = row(column(x)[0])
            y.float().square().sum().backward()
        assert column.weight.grad is None and row.weight.grad is None
        once = [layer.weight.main_grad.clone() for layer in (column, row)]
        for layer in (column, row):
            layer.gradient_accumulation_fusion = False
        y, _ = row(column(x)[0])
        y.float().square().sum().backward()
        for got, layer in zip(once, (column, row), strict=True):
            torch.testing.assert_close(got, 2 * layer.weight.grad.float(), rtol=2e-2, atol=2e-2)


def check_delayed(ctx: RankContext) -> None:
    """The layers that Megatron names leave their weight gradients to backward_dw(), the oldest first; others do not."""
    from tpkernels.integrations import megatron as ours

    for sp, fuse in product((False, True)[: ctx.world], (False, True)):
        changes = {"sequence_parallel": sp, "gradient_accumulation_fusion": fuse}
        cfg = config(delay_wgrad_compute=True, tensor_model_parallel_size=ctx.world, **changes)
        common = {"config": cfg, "init_method": init, "tp_group": ctx.group, "bias": True}
        row = {"input_is_parallel": True, "skip_bias_add": False}
        named = {"tp_comm_buffer_name": "fc"}
        layers = [
            ours.ColumnParallelLinear(IN, OUT, **named, **common),
            ours.RowParallelLinear(OUT, IN, **row, **named, **common),
        ]
        at_once = [
            ours.ColumnParallelLinear(IN, OUT, **common),
            ours.RowParallelLinear(OUT, IN, **row, **common),
        ]
        for p in (p for layer in (*layers, *at_once) for p in layer.parameters()):
            p.main_grad = torch.zeros_like(p)
        x = torch.randn(S, B, IN, dtype=F64)
        mine = part(x, 0, tpk.shard_sizes(S, ctx.world), ctx.rank) if sp else x
        inputs = []
        for column, row_layer in (layers, at_once):
            a = mine.clone().requires_grad_()
            for scale in (1.0, 3.0):
                (row_layer(column(a * scale)[0])[0]).square().sum().backward()
            inputs.append(a.grad)
        close(*inputs, "x")
        for late, now in zip(layers, at_once, strict=True):
            where = "main_grad" if fuse else "grad"
            got = getattr(late.weight, where)
            assert got is None or not got.any()
            close(late.bias.grad, now.bias.grad, "bias")
            late.backward_dw()
            late.backward_dw()
            late.backward_dw()  # nothing left: nothing to do
            close(getattr(late.weight, where), getattr(now.weight, where), f"sp={sp} fuse={fuse}")


def check_contract(ctx: RankContext) -> None:
    """sharded_state_dict, extra state, a weight from outside, runtime_gather_output, what is left to Megatron."""
    from tpkernels.integrations import megatron as ours

    cfg = config(tensor_model_parallel_size=ctx.world)
    layer, other = pair("ColumnParallelLinear", ctx, cfg, IN, OUT)
    row, other_row = pair(
        "RowParallelLinear", ctx, cfg, IN, OUT, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    embedding, other_embedding = pair("VocabParallelEmbedding", ctx, cfg, OUT, IN)
    for a, b in ((layer, other), (row, other_row), (embedding, other_embedding)):
        metadata = {"dp_cp_group": SimpleNamespace(rank=lambda: 0, size=lambda: 1)}
        x, y = (m.sharded_state_dict("decoder.", ((0, 1, 2),), metadata) for m in (a, b))
        assert x.keys() == y.keys()
        for key in x:
            for field in ("key", "global_shape", "global_offset", "axis_fragmentations", "replica_id"):
                assert getattr(x[key], field, None) == getattr(y[key], field, None), (key, field)
        assert a.state_dict().keys() == b.state_dict().keys()
        b.load_state_dict({**a.state_dict()})
        a.load_state_dict({k: v for k, v in b.state_dict().items() if "extra" not in k})
    assert layer.get_extra_state() is None
    layer.set_extra_state(None)
    layer.backward_dw()
    row.backward_dw()

    head = ours.ColumnParallelLinear(
        IN,
        OUT,
        config=cfg,
        init_method=init,
        bias=False,
        tp_group=ctx.group,
        skip_weight_param_allocation=True,
    )
    x = torch.randn(S, B, IN, dtype=F64)
    weight = embedding.weight
    close(head(x, weight)[0], x @ weight.t(), "tied")
    whole, _ = head(x, weight, runtime_gather_output=True)
    close(whole, x @ dense_weight(OUT, IN).t(), "gathered")
    with pytest.raises(ArgumentError, match=r"skip_weight_param_allocation needs the weight \[\d+, 12\]"):
        head(x)
    with pytest.raises(ShapeError, match=r"weight: expected shape \[\d+, 12\], got \[12, \d+\]"):
        head(x, torch.randn(IN, 30 // ctx.world, dtype=F64))

    loose, theirs = pair("ColumnParallelLinear", ctx, cfg, IN, OUT, bias=False, disable_grad_reduce=True)
    outer = torch.randn(S, B, OUT // ctx.world, dtype=F64)
    a, b = run(loose, x, outer), run(theirs, x, outer)
    close(a["x"], b["x"], "disable_grad_reduce")


def check_bad(ctx: RankContext) -> None:
    from tpkernels.integrations import megatron as ours

    cfg = config(sequence_parallel=True, tensor_model_parallel_size=ctx.world)
    common = {"config": cfg, "init_method": init, "tp_group": ctx.group}
    with pytest.raises(ArgumentError, match=r"output_size is 25 and there are 2 ranks"):
        ours.ColumnParallelLinear(12, 25, **common)
    row = {"bias": True, "skip_bias_add": False}
    with pytest.raises(ArgumentError, match=r"input_size is 25 and there are 2 ranks"):
        ours.RowParallelLinear(25, 12, input_is_parallel=True, **row, **common)
    with pytest.raises(ArgumentError, match=r"input_is_parallel: it must be True"):
        ours.RowParallelLinear(12, 12, input_is_parallel=False, **row, **common)
    with pytest.raises(ArgumentError, match=r"num_embeddings is 29 and there are 2 ranks"):
        ours.VocabParallelEmbedding(29, 4, **common)
    layer = ours.RowParallelLinear(12, 8, input_is_parallel=True, **row, **common)
    with pytest.raises(ShapeError, match=r"the sequence has 5 and there are 2 ranks"):
        layer(torch.randn(5, 1, 6, dtype=F64))
    with pytest.raises(ShapeError, match=r"7"):
        layer(torch.randn(4, 1, 7, dtype=F64))
    embedding = ours.VocabParallelEmbedding(28, 4, **common)
    with pytest.raises(ArgumentError, match=r"from 0 to 27, but there is 28"):
        embedding(torch.full((1, 4), 28))


def check_left_with_fusion(ctx: RankContext) -> None:
    """Where the product is Megatron's own, main_grad is APEX's to fill: asked for at construction, as Megatron does."""
    from megatron.core.tensor_parallel import layers as theirs

    from tpkernels.integrations import megatron as ours

    if theirs._grad_accum_fusion_available:
        return
    cfg = config(gradient_accumulation_fusion=True, tensor_model_parallel_size=ctx.world)
    common = {"init_method": init, "tp_group": ctx.group}
    ours.ColumnParallelLinear(IN, OUT, config=cfg, **common)
    with pytest.raises(RuntimeError, match="APEX"):
        ours.ColumnParallelLinear(IN, OUT, config=cfg, disable_grad_reduce=True, **common)
    cfg.defer_embedding_wgrad_compute = True
    with pytest.raises(RuntimeError, match="APEX"):
        ours.ColumnParallelLinear(IN, OUT, config=cfg, **common)


def test_left_with_fusion(ranks: RankPool) -> None:
    ranks.run(check_left_with_fusion, world=2)


def on_cpu(ctx: RankContext, check: str) -> None:
    with megatron_on_cpu():
        CHECKS[check](ctx)


CHECKS = {
    f.__name__: f
    for f in (check_column, check_row, check_embedding, check_loss, check_main_grad, check_delayed)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", WORLDS)
def test_layers(ranks: RankPool, world: int, check: str) -> None:
    ranks.run(on_cpu, check, world=world)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_contract(ranks: RankPool, world: int) -> None:
    ranks.run(check_contract, world=world)


def test_bad_input(ranks: RankPool) -> None:
    ranks.run(check_bad, world=2)
