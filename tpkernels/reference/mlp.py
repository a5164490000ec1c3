"""Two-layer and gated (SwiGLU) MLPs, unsharded, float64. Weights are [in, out]: pass ``weight.T``."""

from __future__ import annotations

from typing import NamedTuple

from tpkernels.reference._array import Array, as_f64, flatten_rows
from tpkernels.reference.activations import activation as apply_activation
from tpkernels.reference.activations import activation_backward
from tpkernels.reference.products import matmul, matmul_backward


class MlpGrads(NamedTuple):
    """Gradients of :func:`mlp`; the biases' are None where none were given."""

    x: Array
    w1: Array
    w2: Array
    b1: Array | None
    b2: Array | None


class GatedMlpGrads(NamedTuple):
    """Gradients of :func:`gated_mlp`."""

    x: Array
    gate: Array
    up: Array
    down: Array


def mlp(
    x: Array, w1: Array, w2: Array, b1: Array | None = None, b2: Array | None = None, activation: str = "gelu"
) -> Array:
    """activation(x @ w1 + b1) @ w2 + b2: x [..., H], w1 [H, F], w2 [F, H], b1 [F], b2 [H] -> [..., H]."""
    return matmul(matmul(x, w1, b1, activation), w2, b2)


def mlp_backward(
    dy: Array,
    x: Array,
    w1: Array,
    w2: Array,
    b1: Array | None = None,
    b2: Array | None = None,
    activation: str = "gelu",
) -> MlpGrads:
    """Gradients of :func:`mlp` for dy [..., H]."""
    second = matmul_backward(dy, matmul(x, w1, b1, activation), w2, b2)
    first = matmul_backward(second.a, x, w1, b1, activation)
    return MlpGrads(first.a, first.b, second.b, first.bias, second.bias)


def gated_mlp(x: Array, gate: Array, up: Array, down: Array, activation: str = "silu") -> Array:
    """(activation(x @ gate) * (x @ up)) @ down: x [..., H], gate, up [H, F], down [F, H] -> [..., H]; silu: SwiGLU."""
    x = as_f64(x)
    return (apply_activation(x @ as_f64(gate), activation) * (x @ as_f64(up))) @ as_f64(down)


def gated_mlp_backward(
    dy: Array, x: Array, gate: Array, up: Array, down: Array, activation: str = "silu"
) -> GatedMlpGrads:
    """Gradients of :func:`gated_mlp` for dy [..., H].

    With p = x @ gate, u = x @ up, h = f(p) * u:  dh = dy @ down.T,  dp = dh * u * f'(p),  du = dh * f(p).
    """
    dy, x, gate, up, down = (as_f64(v) for v in (dy, x, gate, up, down))
    p, u = x @ gate, x @ up
    act = apply_activation(p, activation)
    dh = dy @ down.T
    dp, du = activation_backward(dh * u, p, activation), dh * act
    rows = flatten_rows(x).T
    return GatedMlpGrads(
        x=dp @ gate.T + du @ up.T,
        gate=rows @ flatten_rows(dp),
        up=rows @ flatten_rows(du),
        down=flatten_rows(act * u).T @ flatten_rows(dy),
    )
