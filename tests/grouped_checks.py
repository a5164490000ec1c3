"""One call of tpk.grouped_matmul, forward and backward, against the float64 reference; on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from matmul_checks import exact, spread
from op_checks import close

import tpkernels as tpk
from tpkernels import reference as ref
from tpkernels.testing import assert_close_tiles

Tensor = torch.Tensor

SIZES: list[list[int]] = [[5], [4, 0, 8], [0, 0, 3], [1, 7, 0, 33, 2], [0, 0], [64, 130, 1]]


def check(
    sizes: Sequence[int],
    n: int,
    k: int,
    dtype: torch.dtype,
    rng: np.random.Generator,
    path: str,
    *,
    gated: bool = False,
    bias: bool = False,
    activation: str | None = None,
    save_preact: bool = True,
    transposed: bool = True,
    laid_out: bool = False,
    out_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> None:
    """Values by tiles, gradients by norm. transposed: the weight is stored [groups, N, K]."""

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.tensor(scale * rng.standard_normal(shape)).to(dtype).to(device)
        return (spread(x) if laid_out else x).requires_grad_()

    groups, rows = len(sizes), sum(sizes)
    a = draw(rows, k, scale=1 / math.sqrt(max(1, k)))
    weight = draw(groups, n, k) if transposed else draw(groups, k, n)
    leaves = {"a": a, "b": weight} | ({"bias": draw(groups, n)} if bias else {})
    if gated:
        leaves["gate"] = draw(*weight.shape)
    given_gate = leaves.get("gate")
    out = tpk.grouped_matmul(
        a,
        weight.mT if transposed else weight,
        list(sizes),
        gate=given_gate.mT if given_gate is not None and transposed else given_gate,
        bias=leaves.get("bias"),
        activation=activation,
        save_preact=save_preact,
        out_dtype=out_dtype,
        path=path,
    )
    record = tpk.last_path()
    assert record is not None and record.op == "grouped_matmul" and record.path == path
    assert ("gated" in record.detail) == gated
    wide = out_dtype or dtype
    assert out.shape == (rows, n) and out.dtype == wide

    def as_multiplied(x: Tensor) -> np.ndarray:
        return exact(x).swapaxes(1, 2) if transposed else exact(x)

    given = [exact(a), as_multiplied(weight)]
    biases = exact(leaves["bias"]) if bias else None
    gate = as_multiplied(leaves["gate"]) if gated else None
    positive = {"gate": None if gate is None else np.abs(gate)}
    want = ref.grouped_matmul(*given, sizes, biases, activation, gate=gate)
    size = ref.grouped_matmul(
        *map(np.abs, given), sizes, None if biases is None else np.abs(biases), **positive
    )
    sums = torch.float32 if wide == torch.float64 != dtype else wide
    assert_close_tiles(
        out, torch.from_numpy(want), sums, k=max(1, k), magnitude=torch.from_numpy(size), slack=1.25
    )

    dy = torch.tensor(rng.standard_normal((rows, n))).to(wide).to(device)
    out.backward(dy)
    grads = ref.grouped_matmul_backward(exact(dy), *given, sizes, biases, activation, gate=gate)
    most = ref.grouped_matmul_backward(
        np.abs(exact(dy)), *map(np.abs, given), sizes, None if biases is None else np.abs(biases), **positive
    )
    narrow = max(dtype, wide, key=lambda d: torch.finfo(d).eps)
    for name, leaf in leaves.items():
        expected, scale = (torch.from_numpy(np.array(getattr(x, name))) for x in (grads, most))
        if name in ("b", "gate") and transposed:
            expected, scale = expected.mT, scale.mT
        assert leaf.grad is not None and leaf.grad.dtype == dtype and leaf.grad.shape == leaf.shape
        terms = max(1, n if name == "a" else max(sizes))
        close(leaf.grad.cpu(), expected, narrow, f"gradient of {name}", scale=scale / math.sqrt(terms))
        if name != "a":
            assert all(not leaf.grad[g].any() for g in range(groups) if sizes[g] == 0), "no rows, no gradient"
