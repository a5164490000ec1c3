"""Helpers of the reference's tests: comparison with torch's autograd, and finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

Rng = np.random.Generator

TORCH_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def flat(value: Any) -> list[Any]:
    """Arrays or tensors in nested lists, tuples, None, in order."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def leaves(value: Any) -> Any:
    """The same nesting with torch leaves that require gradients."""
    if isinstance(value, (list, tuple)):
        return [leaves(item) for item in value]
    return None if value is None else torch.from_numpy(np.array(value)).requires_grad_()


def same(actual: Any, expected: Any) -> None:
    actual, expected = flat(actual), flat(expected)
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        y = y.detach().numpy() if isinstance(y, torch.Tensor) else y
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


def against_torch(
    rng: Rng,
    inputs: Sequence[Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    torch_forward: Callable[..., Any],
) -> None:
    """Values and gradients: forward(*inputs), backward(dys, *inputs) and torch_forward(*leaves) agree."""
    outs = forward(*inputs)
    torch_inputs = [leaves(value) for value in inputs]
    torch_outs = torch_forward(*torch_inputs)
    same(outs, torch_outs)

    def weights(value: Any) -> Any:
        return [weights(v) for v in value] if isinstance(value, list) else rng.standard_normal(value.shape)

    dys = weights(outs)
    loss = sum(
        (o * torch.from_numpy(np.array(d))).sum() for o, d in zip(flat(torch_outs), flat(dys), strict=True)
    )
    loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in flat(torch_inputs)]
    same(backward(dys, *inputs), grads)


def finite_difference(
    rng: Rng, inputs: Sequence[np.ndarray], fn: Callable[..., Any], grads: Sequence[np.ndarray], dys: Any
) -> None:
    """Random directional derivative of sum <dys, fn(*inputs)> for each input."""

    def loss(values: Sequence[np.ndarray]) -> float:
        return sum(float((o * d).sum()) for o, d in zip(flat(fn(*values)), flat(dys), strict=True))

    eps = 1e-6
    for i, x in enumerate(inputs):
        d = rng.standard_normal(x.shape)
        moved = [[v + s * eps * d if j == i else v for j, v in enumerate(inputs)] for s in (1, -1)]
        numeric = (loss(moved[0]) - loss(moved[1])) / (2 * eps)
        assert float((grads[i] * d).sum()) == pytest.approx(numeric, rel=1e-5, abs=1e-5)
