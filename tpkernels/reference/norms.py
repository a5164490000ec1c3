"""RMSNorm, float64. Under sequence parallelism apply it to each rank's shard and sum the weight gradients."""

from __future__ import annotations

from tpkernels.reference._array import Array, as_f64, flatten_rows, get_array_module


def rms_norm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim: x [..., H], weight [H] -> [..., H]."""
    x = as_f64(x)
    xp = get_array_module(x)
    return x / xp.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * as_f64(weight)


def rms_norm_backward(dy: Array, x: Array, weight: Array, eps: float = 1e-6) -> tuple[Array, Array]:
    """(dx [..., H], dweight [H]) for dy [..., H].

    With r = 1 / sqrt(mean(x^2) + eps) and g = dy * weight:  dx = r * g - r^3 * x * mean(g * x),  dweight = rows of
    dy * x * r summed.
    """
    dy, x, weight = as_f64(dy), as_f64(x), as_f64(weight)
    xp = get_array_module(x)
    r = 1.0 / xp.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    g = dy * weight
    dx = r * g - r**3 * x * (g * x).mean(axis=-1, keepdims=True)
    return dx, flatten_rows(dy * x * r).sum(axis=0)
