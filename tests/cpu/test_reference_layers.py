"""The reference's layers (norm, MLP, attention, embedding, loss) against torch's own ops in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_checks import TORCH_ACTIVATIONS, Rng, against_torch, finite_difference, same

import tpkernels.reference as ref


def test_rms_norm(rng: Rng) -> None:
    x, w = rng.standard_normal((2, 3, 8)), rng.standard_normal(8)
    against_torch(
        rng,
        [x, w],
        lambda x, w: ref.rms_norm(x, w, 1e-3),
        lambda dy, x, w: ref.rms_norm_backward(dy, x, w, 1e-3),
        lambda x, w: F.rms_norm(x, (8,), w, 1e-3),
    )


@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_mlp(rng: Rng, name: str) -> None:
    x, w1, w2 = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 6)), rng.standard_normal((6, 4))
    against_torch(
        rng,
        [x, w1, w2, rng.standard_normal(6), rng.standard_normal(4)],
        lambda *v: ref.mlp(*v, activation=name),
        lambda dy, *v: ref.mlp_backward(dy, *v, activation=name),
        lambda x, w1, w2, b1, b2: TORCH_ACTIVATIONS[name](x @ w1 + b1) @ w2 + b2,
    )


def test_gated_mlp(rng: Rng) -> None:
    x, gate, up, down = (rng.standard_normal(s) for s in ((2, 3, 4), (4, 6), (4, 6), (6, 4)))
    against_torch(
        rng,
        [x, gate, up, down],
        ref.gated_mlp,
        ref.gated_mlp_backward,
        lambda x, gate, up, down: (F.silu(x @ gate) * (x @ up)) @ down,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(rng: Rng, causal: bool, kv_heads: int) -> None:
    q = rng.standard_normal((2, 4, 5, 6))
    k, v = rng.standard_normal((2, kv_heads, 5, 6)), rng.standard_normal((2, kv_heads, 5, 6))
    against_torch(
        rng,
        [q, k, v],
        lambda *t: ref.attention(*t, causal=causal),
        lambda do, *t: ref.attention_backward(do, *t, causal=causal),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
    )


def test_rotary(rng: Rng) -> None:
    """Rotation keeps lengths, and scores depend only on the distance; the gradient is the transposed rotation."""
    angles = ref.rotary_angles(np.arange(7), 8)
    assert angles.shape == (7, 4)
    assert angles[3, 1] == pytest.approx(3 * 10000.0 ** (-2 / 8))
    x = rng.standard_normal((2, 7, 8))
    y = ref.rotary(x, angles)
    same(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1))
    same(y[:, 0], x[:, 0])
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    same(y, np.concatenate([turned.real, turned.imag], axis=-1))
    dy = rng.standard_normal(x.shape)
    finite_difference(rng, [x], lambda x: ref.rotary(x, angles), [ref.rotary_backward(dy, angles)], dy)
    with pytest.raises(ValueError, match="head_dim must be even"):
        ref.rotary_angles(np.arange(3), 5)


@pytest.mark.parametrize("base", [None, 100.0])
def test_attention_layer(rng: Rng, base: float | None) -> None:
    shapes = ((2, 5, 6), (6, 16), (6, 8), (6, 8), (16, 6))
    inputs = [rng.standard_normal(s) for s in shapes]
    options = {"heads": 4, "kv_heads": 2, "rotary_base": base}
    dy = rng.standard_normal((2, 5, 6))
    grads = ref.attention_layer_backward(dy, *inputs, **options)
    finite_difference(rng, inputs, lambda *v: ref.attention_layer(*v, **options), grads, dy)


@pytest.mark.parametrize("sizes", [[11], [4, 0, 7], [4, 4, 3]])
def test_embedding(rng: Rng, sizes: list[int]) -> None:
    ids = rng.integers(0, 11, (3, 4))
    shards = ref.split(rng.standard_normal((11, 5)), 0, len(sizes), sizes)
    against_torch(
        rng,
        [shards],
        lambda w: ref.vocab_parallel_embedding(ids, w),
        lambda dy, w: ref.vocab_parallel_embedding_backward(dy, ids, w),
        lambda w: F.embedding(torch.from_numpy(ids), torch.cat(w)),
    )
    whole = np.concatenate(shards)
    dy = rng.standard_normal((3, 4, 5))
    same(ref.embedding(ids, whole), whole[ids])
    same(
        ref.embedding_backward(dy, ids, whole),
        np.concatenate(ref.vocab_parallel_embedding_backward(dy, ids, shards)),
    )


@pytest.mark.parametrize("sizes", [[11], [4, 0, 7], [4, 4, 3]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(rng: Rng, sizes: list[int], smoothing: float) -> None:
    targets = rng.integers(0, 11, (3, 4))
    targets[1, 2] = -100
    logits = 30 * rng.standard_normal((3, 4, 11)) + 500
    shards = ref.split(logits, -1, len(sizes), sizes)

    def expected(shards: Any) -> Any:
        flat_logits = torch.cat(shards, -1).reshape(12, 11)
        index = torch.from_numpy(targets.reshape(12))
        return F.cross_entropy(flat_logits, index, reduction="none", label_smoothing=smoothing).reshape(3, 4)

    options = {"label_smoothing": smoothing}
    against_torch(
        rng,
        [shards],
        lambda x: ref.vocab_parallel_cross_entropy(x, targets, **options),
        lambda dy, x: ref.vocab_parallel_cross_entropy_backward(dy, x, targets, **options),
        expected,
    )
    against_torch(
        rng,
        [logits],
        lambda x: ref.cross_entropy(x, targets, **options),
        lambda dy, x: ref.cross_entropy_backward(dy, x, targets, **options),
        lambda x: expected([x]),
    )
