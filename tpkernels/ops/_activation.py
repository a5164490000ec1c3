"""Activations of the epilogue and their derivatives, in differentiable torch operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Names that ``activation`` takes. "gelu" is the exact one (erf), "gelu_tanh" its approximation.
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")


def forward(x: Tensor, activation: str) -> Tensor:
    """Apply an activation elementwise; ``x`` itself is returned for "none"."""
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return x


def backward(grad: Tensor, preact: Tensor, activation: str) -> Tensor:
    """Gradient at the pre-activation; itself differentiable, so double backward works."""
    aten: Any = torch.ops.aten
    out: Tensor = grad
    if activation == "relu":
        out = aten.threshold_backward(grad, preact, 0)
    elif activation == "silu":
        if torch.is_grad_enabled():  # silu_backward has no derivative of its own
            gate = torch.sigmoid(preact)
            return grad * gate * (1 + preact * (1 - gate))
        out = aten.silu_backward(grad, preact)
    elif activation == "gelu":
        out = aten.gelu_backward(grad, preact)
    elif activation == "gelu_tanh":
        out = aten.gelu_backward(grad, preact, approximate="tanh")
    return out
