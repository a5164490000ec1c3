"""One call of tpk.matmul with all that may follow a product, forward and backward, against the float64 reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from op_checks import close

import tpkernels as tpk
from tpkernels import reference as ref
from tpkernels.ops._activation import ACTIVATIONS
from tpkernels.testing import assert_close_tiles

Tensor = torch.Tensor


@dataclass
class Case:
    """What is multiplied and what follows; ``laid_out`` spreads every argument in memory."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    dtype: torch.dtype
    gated: bool = False
    bias: bool = False
    residual: torch.dtype | None = None
    alpha: float = 1.0
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    save_preact: bool = True
    laid_out: bool = False

    @property
    def out_shape(self) -> tuple[int, ...]:
        batch = self.a[:-2] if len(self.b) == 2 else np.broadcast_shapes(self.a[:-2], self.b[:-2])
        return (*batch, self.a[-2], self.b[-1])


def varied_cases(
    shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], dtype: torch.dtype, gated: bool, laid_out: bool
) -> Iterator[Case]:
    """Every shape with and without alpha and bias; residuals, activations and save_preact in turn."""
    kinds = itertools.cycle([None, dtype, torch.float32, torch.float64, torch.bfloat16])
    options = itertools.cycle(itertools.product(ACTIVATIONS, [True, False]))
    for (a, b), alpha in itertools.product(shapes, [1.0, -0.5]):
        activation, save_preact = next(options)
        yield Case(
            a, b, dtype, gated=gated, bias=not gated and alpha != 1.0, residual=next(kinds), alpha=alpha,
            activation=activation, save_preact=save_preact, laid_out=laid_out,
        )  # fmt: skip


def spread(x: Tensor) -> Tensor:
    """The same values with the last two dimensions swapped in memory, every second element of a buffer of NaN."""
    swapped = x.mT
    buffer = torch.full(
        (*swapped.shape[:-1], 2 * swapped.shape[-1] + 3), math.nan, dtype=x.dtype, device=x.device
    )
    view = buffer[..., 3::2]
    view.copy_(swapped)
    return view.mT


def arguments(case: Case, rng: np.random.Generator, device: str) -> dict[str, Tensor]:
    """Leaves that require gradients, by the name of the argument."""

    def draw(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        x = torch.tensor(scale * rng.standard_normal(shape)).to(dtype).to(device)
        return (spread(x) if case.laid_out and len(shape) > 1 else x).requires_grad_()

    # Products of about 1, as behind a norm: activations are neither linear nor saturated everywhere.
    found = {"a": draw(case.a, case.dtype, 1 / math.sqrt(max(1, case.a[-1]))), "b": draw(case.b, case.dtype)}
    if case.gated:
        found["gate"] = draw(case.b, case.dtype)
    if case.bias:
        found["bias"] = draw(case.b[-1:], case.dtype)
    if case.residual is not None:
        found["residual"] = draw(case.out_shape, case.residual)
    return found


def exact(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


def sizes(case: Case, given: dict[str, np.ndarray]) -> np.ndarray:
    """What the terms of a result amount to without cancellation: errors of the sums are relative to it."""
    up = abs(case.alpha) * (np.abs(given["a"]) @ np.abs(given["b"]))
    if case.gated:
        up = (up + 1) * (abs(case.alpha) * (np.abs(given["a"]) @ np.abs(given["gate"])) + 1)
    for name in ("bias", "residual"):
        up = up + np.abs(given[name]) if name in given else up
    return up


def check(case: Case, rng: np.random.Generator, path: str, device: str = "cpu") -> None:
    """Values by tiles, gradients of every argument by norm."""
    leaves = arguments(case, rng, device)
    options: dict[str, Any] = {"alpha": case.alpha, "activation": case.activation}
    out = tpk.matmul(**leaves, **options, out_dtype=case.out_dtype, save_preact=case.save_preact, path=path)
    record = tpk.last_path()
    assert record is not None and record.path == path and record.detail.endswith("gated") == case.gated
    dtype = case.out_dtype or case.dtype
    assert out.dtype == dtype and out.shape == case.out_shape

    given = {name: exact(x) for name, x in leaves.items()}
    want = ref.matmul(**given, **options)
    k, size = max(1, 2 * case.a[-1]), sizes(case, given)
    sums = torch.float32 if dtype == torch.float64 != case.dtype else dtype
    assert_close_tiles(out, torch.from_numpy(want), sums, k=k, magnitude=torch.from_numpy(size), slack=1.25)

    dy = torch.tensor(rng.standard_normal(case.out_shape)).to(dtype).to(device)
    out.backward(dy)
    grads = ref.matmul_backward(exact(dy), **given, **options)
    # Of absolute values, a sum of as many terms as a gradient has.
    most = ref.matmul_backward(
        np.abs(exact(dy)), **{name: np.abs(x) for name, x in given.items()}, alpha=abs(case.alpha)
    )
    terms = {"a": case.b[-1], "residual": 1}
    narrow = max(case.dtype, dtype, key=lambda d: torch.finfo(d).eps)
    for name, leaf in leaves.items():
        expected, scale = (torch.from_numpy(np.array(getattr(x, name))) for x in (grads, most))
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
        rows = terms.get(name, max(1, math.prod(case.out_shape[:-1])))
        worst = max(narrow, leaf.dtype, key=lambda d: torch.finfo(d).eps)
        close(leaf.grad.cpu(), expected, worst, f"gradient of {name}", scale=scale / math.sqrt(max(1, rows)))
