"""A GPTModel of megatron-core on our layers, two ranks: loss and gradients of the same model on one, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_cpu import megatron_on_cpu
from torch import Tensor, nn
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels.errors import ArgumentError
from tpkernels.testing import RankContext, RankPool

pytest.importorskip("megatron.core.tensor_parallel", reason="needs megatron-core 0.16 (extra: integrations)")

LAYERS, WIDTH, VOCAB, S, B = 2, 16, 28, 6, 3
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": ({"ffn_hidden_size": 20}, {"share_embeddings_and_output_weights": False}),
    "llama": (
        {
            "ffn_hidden_size": 12,
            "num_query_groups": 2,
            "gated_linear_unit": True,
            "activation_func": nn.functional.silu,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
        },
        {"share_embeddings_and_output_weights": True, "position_embedding_type": "rope"},
    ),
}


class Norm:
    """Megatron's norms with sequence parallelism are TransformerEngine's and APEX's; here torch's, marked alike."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for p in norm.parameters():
            p.sequence_parallel = config.sequence_parallel
        return norm


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """A pool of the job's own size: Megatron's groups are made of the default group."""
    with RankPool(2) as pool:
        yield pool


def build(kind: str, world: int, sp: bool, library: str, fuse: bool) -> nn.Module:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tpkernels.integrations import megatron as ours

    tensor_parallel.random.initialize_rng_tracker(
        inference_rng_tracker=True, force_reset=True
    )  # no CUDA states
    sizes, options = KINDS[kind]
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=fuse,
        sequence_parallel=sp,
        tensor_model_parallel_size=world,
        **sizes,
    )

    def model() -> nn.Module:
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        if library == "layer_spec":
            spec = ours.layer_spec(spec)
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        block = TransformerBlockSubmodules(layer_specs=[spec] * LAYERS, layer_norm=Norm)
        return GPTModel(config, block, VOCAB, S, **options)

    torch.manual_seed(3)
    if library == "enable":
        with ours.enable():
            out = model()
    else:
        out = model()
    out.double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, p in sorted(
            out.named_parameters()
        ):  # biases and norms away from 0 and 1, equally for every world
            if p.dim() == 1:
                whole = torch.randn(p.numel() * (world if cut(p) else 1), generator=generator)
                p.add_(
                    whole.chunk(world)[parallel_state.get_tensor_model_parallel_rank()] if cut(p) else whole
                )
    return out


def cut(p: Any) -> bool:
    return bool(getattr(p, "tensor_model_parallel", False))


def step(ctx: RankContext, kind: str, sp: bool, library: str, seed: int, fuse: bool = False) -> Any:
    """Loss [B, S]; this rank's gradient of every parameter, and where it is cut; the operations of the forward pass."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ctx.world)
    with megatron_on_cpu():
        model = build(kind, ctx.world, sp, library, fuse)
        if fuse:
            for p in model.parameters():
                p.main_grad = torch.zeros_like(p)
                p.grad_added_to_main_grad = False  # as Megatron's DistributedDataParallel does
        ids, labels = torch.randint(VOCAB, (2, B, S), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(S).expand(B, S)
        with tpk.record_paths() as paths, loss_of(library):
            loss = model(ids, positions, mask, labels=labels)
        loss.mean().backward()
        grads = {}
        for name, p in model.named_parameters():
            grad = p.grad
            if fuse:  # what its hook does with a gradient
                alone = not p.grad_added_to_main_grad or getattr(p, "zero_out_wgrad", False)
                grad = p.main_grad + grad if alone else p.main_grad
            if getattr(p, "sequence_parallel", False):
                dist.all_reduce(grad)  # Megatron's finalize_model_grads
            grads[name] = (grad, p.partition_dim if cut(p) else None)
        return loss, grads, {op for op, _ in paths.counts}


def loss_of(library: str) -> AbstractContextManager[Any]:
    """Ours, torch's on one rank, or Megatron's, which is float32 whatever the logits are."""
    from megatron.core import tensor_parallel

    from tpkernels.integrations import megatron as ours

    if library == "dense":
        return mock.patch.object(
            tensor_parallel,
            "vocab_parallel_cross_entropy",
            lambda logits, labels: F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none"),
        )
    return ours.enable() if library == "enable" else nullcontext()


def compare(ranks: list[Any], dense: Any, note: str) -> None:
    exact = "enable" in note
    near = {"rtol": 1e-9, "atol": 1e-11} if exact else {"rtol": 2e-6, "atol": 2e-7}
    for rank, (loss, _, _) in enumerate(ranks):
        torch.testing.assert_close(loss.double(), dense[0], **near, msg=lambda m, r=rank: f"{note} {r}: {m}")
    assert ranks[0][1].keys() == dense[1].keys()
    for name, (grad, dim) in ranks[0][1].items():
        whole: Tensor = grad if dim is None else torch.cat([r[1][name][0] for r in ranks], dim)
        expected = dense[1][name][0]
        if "linear_fc1" in name and "llama" in note:  # gate and up lie above each other on each rank
            halves = [r[1][name][0].chunk(2) for r in ranks]
            whole = torch.cat([torch.cat(half) for half in zip(*halves, strict=True)])
        torch.testing.assert_close(whole, expected, **near, msg=lambda m, n=name: f"{note}: {n}: {m}")


SP_OPS = {"all_gather_matmul", "matmul_reduce_scatter"}
TP_OPS = {"matmul_replicated", "matmul_all_reduce"}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_one_rank(one_rank: RankPool, two_ranks: RankPool, kind: str, seed: int) -> None:
    (dense,) = one_rank.run(step, kind, False, "dense", seed)
    assert not dense[2]
    for sp in (False, True):
        note = f"{kind} sp={sp}"
        compare(two_ranks.run(step, kind, sp, "theirs", seed), dense, f"{note}, Megatron's own")
        for library in ("layer_spec", "enable"):
            ranks = two_ranks.run(step, kind, sp, library, seed)
            compare(ranks, dense, f"{note} {library}")
            assert (SP_OPS if sp else TP_OPS) <= ranks[0][2], ranks[0][2]
            assert ("all_gather" in ranks[0][2]) == (library == "enable"), "the loss gathers its terms"
    ranks = two_ranks.run(step, kind, True, "enable", seed, True)
    compare(ranks, dense, f"{kind} enable, main_grad")


def test_specs() -> None:
    from megatron.core import tensor_parallel
    from megatron.core.models import backends
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_mlp_module_spec_for_backend,
    )

    from tpkernels.integrations import megatron as ours

    before = get_gpt_layer_local_spec()
    spec = ours.layer_spec(before)
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    assert attention.linear_qkv is ours.ColumnParallelLinear
    assert attention.linear_proj is ours.RowParallelLinear
    assert mlp.linear_fc1 is ours.ColumnParallelLinear
    assert mlp.linear_fc2 is ours.RowParallelLinear
    assert attention.core_attention is before.submodules.self_attention.submodules.core_attention
    assert before.submodules.mlp.submodules.linear_fc1 is tensor_parallel.ColumnParallelLinear
    mlp = get_mlp_module_spec_for_backend(backend=ours.SpecProvider()).submodules
    assert (mlp.linear_fc1, mlp.linear_fc2) == (ours.ColumnParallelLinear, ours.RowParallelLinear)

    names = (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "vocab_parallel_cross_entropy",
    )
    theirs = {name: getattr(tensor_parallel, name) for name in names}
    with ours.enable():
        assert all(getattr(tensor_parallel, name) is getattr(ours, name) for name in names)
        spec = get_gpt_layer_local_spec()
        assert spec.submodules.mlp.submodules.linear_fc2 is ours.RowParallelLinear
    assert all(getattr(tensor_parallel, name) is theirs[name] for name in names)
    assert backends.RowParallelLinear is theirs["RowParallelLinear"]

    engine = type(
        "TELayerNormColumnParallelLinear", (), {"__module__": "megatron.core.extensions.transformer_engine"}
    )
    before.submodules.self_attention.submodules.linear_qkv = engine
    with pytest.raises(
        ArgumentError, match=r"TELayerNormColumnParallelLinear is a layer of TransformerEngine"
    ):
        ours.layer_spec(before)
