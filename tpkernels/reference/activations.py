"""Activations and their derivatives, elementwise, any shape -> the same shape, float64."""

from __future__ import annotations

import math

from tpkernels.reference._array import Array, as_f64, erf, get_array_module

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")

_TANH_SCALE = math.sqrt(2.0 / math.pi)
_TANH_CUBE = 0.044715


def _unknown(name: str) -> ValueError:
    return ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    xp = get_array_module(x)
    return 0.5 * (1.0 + xp.tanh(0.5 * x))


def activation(x: Array, name: str | None) -> Array:
    """Apply "none", "relu", "silu", "gelu" (by erf) or "gelu_tanh"; None is "none". ValueError for other names."""
    x = as_f64(x)
    xp = get_array_module(x)
    if name is None or name == "none":
        return x
    if name == "relu":
        return xp.maximum(x, 0.0)
    if name == "silu":
        return x * sigmoid(x)
    if name == "gelu":
        return 0.5 * x * (1.0 + erf(x / math.sqrt(2.0)))
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + xp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x**3)))
    raise _unknown(name)


def activation_backward(dy: Array, x: Array, name: str | None) -> Array:
    """Gradient of the activation's input: dy * f'(x), for x the pre-activation. relu'(0) = 0, as in torch."""
    dy, x = as_f64(dy), as_f64(x)
    xp = get_array_module(x)
    if name is None or name == "none":
        return dy
    if name == "relu":
        return dy * (x > 0.0)
    if name == "silu":
        s = sigmoid(x)
        return dy * s * (1.0 + x * (1.0 - s))
    if name == "gelu":
        density = xp.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)
        return dy * (0.5 * (1.0 + erf(x / math.sqrt(2.0))) + x * density)
    if name == "gelu_tanh":
        t = xp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x**3))
        inner = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBE * x**2)
        return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t**2) * inner)
    raise _unknown(name)
