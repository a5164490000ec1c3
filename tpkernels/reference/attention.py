"""Rotary embedding and softmax attention with grouped key/value heads, unsharded, float64."""

from __future__ import annotations

import math
from typing import NamedTuple

from tpkernels.reference._array import Array, as_f64, flatten_rows, get_array_module


class AttentionGrads(NamedTuple):
    """Gradients of :func:`attention`."""

    q: Array
    k: Array
    v: Array


class AttentionLayerGrads(NamedTuple):
    """Gradients of :func:`attention_layer`."""

    x: Array
    wq: Array
    wk: Array
    wv: Array
    wo: Array


def rotary_angles(positions: Array, head_dim: int, base: float = 10000.0) -> Array:
    """positions [S] -> angles [S, head_dim / 2]: position * base^(-2i / head_dim). head_dim must be even."""
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embedding, got {head_dim}")
    xp = get_array_module(positions)
    frequencies = base ** (-xp.arange(0, head_dim, 2, dtype=xp.float64) / head_dim)
    return as_f64(positions)[:, None] * frequencies


def rotary(x: Array, angles: Array) -> Array:
    """Rotate pairs (i, i + D/2), the half-rotation convention: x [..., S, D], angles [S, D/2] -> [..., S, D]."""
    x = as_f64(x)
    xp = get_array_module(x)
    cos, sin = xp.cos(angles), xp.sin(angles)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotary_backward(dy: Array, angles: Array) -> Array:
    """Gradient of :func:`rotary`'s x: the rotation back."""
    return rotary(dy, -angles)


def _probabilities(q: Array, k: Array, causal: bool, scale: float) -> Array:
    xp = get_array_module(q)
    scores = scale * (q @ k.swapaxes(-1, -2))
    if causal:
        sq, sk = scores.shape[-2:]
        scores = xp.where(xp.arange(sk)[None, :] > xp.arange(sq)[:, None], -xp.inf, scores)
    scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def _repeat(x: Array, heads: int) -> Array:
    """[B, Hkv, S, D] -> [B, heads, S, D]: each key/value head serves heads / Hkv neighbouring query heads."""
    if heads % x.shape[1]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {heads} and {x.shape[1]}")
    return as_f64(x).repeat(heads // x.shape[1], axis=1)


def attention(q: Array, k: Array, v: Array, *, causal: bool = True, scale: float | None = None) -> Array:
    """softmax(scale * q @ k.T) @ v by heads: q [B, H, S, D], k and v [B, Hkv, Sk, D] -> [B, H, S, D].

    Args:
        causal: query i sees keys 0..i.
        scale: None: 1 / sqrt(D).
    """
    q = as_f64(q)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _probabilities(q, _repeat(k, q.shape[1]), causal, scale) @ _repeat(v, q.shape[1])


def attention_backward(
    do: Array, q: Array, k: Array, v: Array, *, causal: bool = True, scale: float | None = None
) -> AttentionGrads:
    """Gradients of :func:`attention` for do [B, H, S, D].

    With P the probabilities:  dv = P.T @ do,  dP = do @ v.T,  dS = P * (dP - rowsum(P * dP)),  dq = scale * dS @ k,
    dk = scale * dS.T @ q;  dk and dv are then summed over the query heads that share a key/value head.
    """
    do, q = as_f64(do), as_f64(q)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads, kv_heads = q.shape[1], k.shape[1]
    kr, vr = _repeat(k, heads), _repeat(v, heads)
    p = _probabilities(q, kr, causal, scale)
    dp = do @ vr.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    dk, dv = scale * (ds.swapaxes(-1, -2) @ q), p.swapaxes(-1, -2) @ do

    def shared(x: Array) -> Array:
        batch, _, length, dim = x.shape
        return x.reshape(batch, kv_heads, heads // kv_heads, length, dim).sum(axis=2)

    return AttentionGrads(scale * (ds @ kr), shared(dk), shared(dv))


def _to_heads(x: Array, heads: int) -> Array:
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def _from_heads(x: Array) -> Array:
    batch, heads, length, dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, heads * dim)


def _layer_heads(
    x: Array, wq: Array, wk: Array, wv: Array, heads: int, kv_heads: int, rotary_base: float | None
) -> tuple[Array, Array, Array, Array | None]:
    q, k, v = _to_heads(x @ wq, heads), _to_heads(x @ wk, kv_heads), _to_heads(x @ wv, kv_heads)
    if rotary_base is None:
        return q, k, v, None
    positions = get_array_module(x).arange(x.shape[1])
    angles = rotary_angles(positions, q.shape[-1], rotary_base)
    return rotary(q, angles), rotary(k, angles), v, angles


def attention_layer(
    x: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    *,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = True,
    rotary_base: float | None = 10000.0,
) -> Array:
    """Self-attention block without biases: x [B, S, E] -> [B, S, E].

    wq [E, heads * D], wk and wv [E, kv_heads * D], wo [heads * D, E]. rotary_base None: no rotary embedding; otherwise
    positions are 0..S-1.
    """
    x, wq, wk, wv, wo = (as_f64(t) for t in (x, wq, wk, wv, wo))
    q, k, v, _ = _layer_heads(x, wq, wk, wv, heads, kv_heads or heads, rotary_base)
    return _from_heads(attention(q, k, v, causal=causal)) @ wo


def attention_layer_backward(
    dy: Array,
    x: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    *,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = True,
    rotary_base: float | None = 10000.0,
) -> AttentionLayerGrads:
    """Gradients of :func:`attention_layer` for dy [B, S, E]."""
    dy, x, wq, wk, wv, wo = (as_f64(t) for t in (dy, x, wq, wk, wv, wo))
    q, k, v, angles = _layer_heads(x, wq, wk, wv, heads, kv_heads or heads, rotary_base)
    context = _from_heads(attention(q, k, v, causal=causal))
    grads = attention_backward(_to_heads(dy @ wo.T, heads), q, k, v, causal=causal)
    dq, dk = grads.q, grads.k
    if angles is not None:
        dq, dk = rotary_backward(dq, angles), rotary_backward(dk, angles)
    dq, dk, dv = _from_heads(dq), _from_heads(dk), _from_heads(grads.v)
    rows = flatten_rows(x).T
    return AttentionLayerGrads(
        x=dq @ wq.T + dk @ wk.T + dv @ wv.T,
        wq=rows @ flatten_rows(dq),
        wk=rows @ flatten_rows(dk),
        wv=rows @ flatten_rows(dv),
        wo=flatten_rows(context).T @ flatten_rows(dy),
    )
