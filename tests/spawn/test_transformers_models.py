"""Models of transformers, loaded with its tensor-parallel plans, on our operations: equal to the dense model.

transformers' norms and rotary tables are float32 whatever the model's dtype, hence tolerances of float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkernels as tpk
from tpkernels.testing import RankContext, RankPool

pytest.importorskip(
    "transformers", minversion="5.22", reason="needs transformers 5.22 or newer (extra: integrations)"
)

VOCAB, WIDTH = 29, 32  # a vocabulary that no world but 1 divides

# Sizes of one small model of each kind of plan; what is not given is the family's default.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"pad_token_id": 17, "tie_word_embeddings": False}),
    "llama-tied-gqa": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "mlp_bias": True}),
    "qwen2-bias": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3-qk-norm": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "phi3-packed": ("Phi3", {"intermediate_size": 36, "pad_token_id": 0, "tie_word_embeddings": False}),
}
PAIRS = 2  # ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """A pool of the plan's own size: transformers makes its mesh of the default group."""
    with RankPool(PAIRS, "gloo", env={"CUDA_VISIBLE_DEVICES": ""}) as pool:
        yield pool


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each family, random weights, float64."""
    import transformers

    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(int(torch.randint(2**31, ()).item()))
    for name, (family, sizes) in FAMILIES.items():
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **sizes})
        model = getattr(transformers, f"{family}ForCausalLM")(config).double()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 1:  # biases and norms away from 0 and 1, so that they matter
                    p.add_(torch.randn_like(p) / 4)
        model.save_pretrained(root / name)
    return root


def load(folder: str, tp: int | None) -> Any:
    import transformers

    where = (
        {} if tp is None else {"distributed_config": transformers.distributed.DistributedConfig(tp_size=tp)}
    )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **where)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: Any, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Logits, loss and every gradient, whole; and our operations in the forward pass."""
    with tpk.record_paths() as paths:
        out = model(input_ids=ids, labels=ids)
    ran = Counter({op: n for (op, _), n in paths.counts.items()})
    out.loss.backward()
    result = {"logits": out.logits.detach(), "loss": out.loss.detach()}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        result[f"gradient of {name}"] = whole(p.grad)
    return result, ran


def check_equal(ctx: RankContext, folder: str, seed: int) -> None:
    from tpkernels.integrations import transformers as ours

    ids = torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(seed))
    ids[1, 2] = 17  # Llama's padding here, whose vector has no gradient
    dense, _ = step(load(folder, None), ids)
    with ours.enable():
        model = load(folder, ctx.world)
    actual, ran = step(model, ids)
    assert actual.keys() == dense.keys()
    for what, expected in dense.items():
        torch.testing.assert_close(
            actual[what], expected, rtol=2e-5, atol=2e-6, msg=lambda m, w=what: f"{folder}: {w}: {m}"
        )
    layers = COMMON["num_hidden_layers"]
    column = 2 if "phi3" in folder else 5  # qkv and gate_up, or q, k, v, gate and up
    assert ran["matmul_replicated"] == column * layers + 1, ran  # and the head
    assert ran["matmul_all_reduce"] == 2 * layers, ran
    assert ran["all_reduce"] == 1, ran  # the embedding

    plain = load(folder, ctx.world)  # enable() was taken back
    theirs, ran = step(plain, ids)
    assert not ran, ran
    torch.testing.assert_close(theirs["logits"], dense["logits"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_dense(two_ranks: RankPool, saved: Path, family: str, seed: int) -> None:
    two_ranks.run(check_equal, str(saved / family), seed, timeout=120)


def check_saved(ctx: RankContext, folder: str, copy: str, seed: int) -> None:
    """A trained parallel model is saved, and loaded dense; without gradients, and generating, it is the dense one."""
    from tpkernels.integrations import transformers as ours

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2, 5), generator=generator)
    with ours.enable():
        model = load(folder, ctx.world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, ids)
    optimizer.step()
    model.save_pretrained(copy)
    ctx.barrier()
    dense = load(copy, None)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=2e-5, atol=2e-6)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), dense.generate(ids, **options))
    reference = load(folder, None)  # the step was the dense model's too
    step(reference, ids)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for (name, p), q in zip(dense.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_saved_and_loaded(two_ranks: RankPool, saved: Path, tmp_path: Path, seed: int) -> None:
    two_ranks.run(check_saved, str(saved / "llama-tied-gqa"), str(tmp_path / "copy"), seed, timeout=120)


def check_heads(ctx: RankContext, folder: str) -> None:
    import transformers

    from tpkernels.errors import ArgumentError
    from tpkernels.integrations import transformers as ours

    config = transformers.LlamaConfig(**{**COMMON, "num_attention_heads": 8, "num_key_value_heads": 1})
    if ctx.rank == 0:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    ctx.barrier()
    with ours.enable(), pytest.raises(ArgumentError, match=r"num_key_value_heads is 1 and there are 2 ranks"):
        load(folder, ctx.world)


def test_a_head_is_never_cut(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(check_heads, str(tmp_path), timeout=120)
