"""streamk_gemm on the CPU with everything its epilogue knows, against float64; what it refuses, in which words.

The order, here and on GPUs: alpha, bias, preact, activation (or activation of the gate's product times the product),
residual, old output, one rounding.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tpkernels  # noqa: F401  (loads the ops)

Tensor = torch.Tensor
OPS = torch.ops.tpkernels
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of the output, relative to the sum of magnitudes.
ROUNDING = {torch.float64: 0.0, torch.float32: 6e-8, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SCHEDULES = ["auto", "data_parallel", "stream_k", "split_k", "hybrid_first", "hybrid_last", "hybrid_aligned"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gemm(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
    """The op with names for its arguments."""
    defaults = {"bias": None, "preact": None, "activation": "none", "accumulate": False}
    OPS.streamk_gemm(a=a, b=b, out=out, **(defaults | options))


def matrices(rng: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Random values whose dimensions lie in memory in any order, padded."""
    order = rng.sample(range(3), 3)
    padded = torch.randn([shape[d] + rng.choice([0, 0, 3]) for d in order], dtype=torch.float64).to(dtype)
    cut = padded[tuple(slice(0, shape[d]) for d in order)]
    return cut.permute([order.index(d) for d in range(3)])


@pytest.mark.parametrize("seed", range(120))
def test_epilogues_against_float64(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, m = rng.choice([1, 1, 2, 3]), rng.choice([0, 1, 5, 33, 130, 300])
    n, k = rng.choice([0, 1, 7, 64, 200, 270]), rng.choice([0, 1, 9, 128, 700])
    dtype, out_dtype = rng.choice(DTYPES), rng.choice(DTYPES)
    a, b = matrices(rng, [batch, m, k], dtype), matrices(rng, [batch, k, n], dtype)
    gate = matrices(rng, [batch, k, n], dtype) if rng.random() < 0.5 else None
    if gate is not None and rng.random() < 0.2:
        gate = gate[:1].expand(batch, k, n)
    bias = torch.randn(n, dtype=rng.choice(DTYPES)) if gate is None and rng.random() < 0.5 else None
    residual = matrices(rng, [batch, m, n], rng.choice(DTYPES)) if rng.random() < 0.6 else None
    if residual is not None and m > 0 and rng.random() < 0.3:
        residual = residual[:, :1].expand(batch, m, n)
    preact = matrices(rng, [batch, m, n], out_dtype) if gate is None and rng.random() < 0.3 else None
    out = matrices(rng, [batch, m, n], out_dtype)
    accumulate, alpha = rng.random() < 0.3, rng.choice([1.0, 1.0, 0.0, -0.3, 2.0])
    old = out.to(torch.float64, copy=True) if accumulate else torch.zeros(batch, m, n, dtype=torch.float64)
    if not accumulate:
        out.fill_(float("nan"))
    activation = rng.choice(list(ACTIVATIONS))
    options = {
        "schedule": rng.choice(SCHEDULES),
        "workers": rng.choice([0, 1, 3, 7]),
        "splits": rng.choice([1, 3]),
    }
    gemm(
        a, b, out, bias=bias, preact=preact, gate=gate, residual=residual, activation=activation,
        accumulate=accumulate, alpha=alpha, **options,
    )  # fmt: skip

    act = ACTIVATIONS[activation]
    z = alpha * (a.double() @ b.double())
    scale = max(1.0, abs(alpha))
    size = scale * (a.double().abs() @ b.double().abs())
    if bias is not None:
        z, size = z + bias.double(), size + bias.double().abs()
    if gate is None:
        want = act(z)
    else:
        want = act(alpha * (a.double() @ gate.double())) * z
        size = (size + 1) * (scale * (a.double().abs() @ gate.double().abs()) + 1)
    for added in [old] if residual is None else [residual.double(), old]:
        want, size = want + added, size + added.abs()
    bound = (ROUNDING[out_dtype] * 1.01 + (1e-13 if dtype == torch.float64 else 1e-6)) * (size + 1e-3)
    assert bool(((out.double() - want).abs() <= bound).all())
    if preact is not None:
        assert bool(((preact.double() - z).abs() <= bound).all())


def test_alpha_applies_to_both_products_of_a_gate() -> None:
    a, b, gate = torch.randn(1, 20, 30), torch.randn(1, 30, 40), torch.randn(1, 30, 40)
    out = torch.empty(1, 20, 40)
    gemm(a, b, out, gate=gate, activation="silu", alpha=0.5)
    assert torch.allclose(out, F.silu(0.5 * (a @ gate)) * (0.5 * (a @ b)), atol=1e-5)


def test_a_gated_product_is_rounded_once() -> None:
    """Its gate stays in fp32: with values that bfloat16 holds, the result is the correctly rounded one."""
    a, b = torch.full((1, 1, 3), 1.0), torch.tensor([[[1.0], [2**-7], [2**-9]]])
    out = torch.empty(1, 1, 1, dtype=torch.bfloat16)
    gemm(a.bfloat16(), b.bfloat16(), out, gate=b.bfloat16())
    exact = float((a.double() @ b.double()) ** 2)
    assert float(out) == float(torch.tensor(exact).bfloat16())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_residual_may_be_the_output_itself(schedule: str) -> None:
    """x += f(a b) in place: the same view of the same memory, whatever its strides."""
    a, b = torch.randn(2, 40, 900), torch.randn(2, 900, 50)
    x = torch.randn(2, 50, 40).mT
    want = x + torch.relu(a @ b)
    gemm(a, b, x, residual=x[:], activation="relu", schedule=schedule, workers=5, splits=3)
    assert torch.allclose(x, want, atol=1e-3)


def test_residual_may_lie_beside_the_output() -> None:
    buffer = torch.randn(1, 6, 40)
    a, b = torch.randn(1, 6, 8), torch.randn(1, 8, 10)
    want = a @ b + buffer[:, :, 10:20]
    gemm(a, b, buffer[:, :, 20:30], residual=buffer[:, :, 10:20])
    assert torch.allclose(buffer[:, :, 20:30], want, atol=1e-5)


def test_nothing_to_multiply() -> None:
    """K = 0: products are zero, what is added is not."""
    residual, out = torch.randn(1, 3, 4), torch.empty(1, 3, 4)
    empty = torch.empty(1, 0, 4)
    gemm(torch.empty(1, 3, 0), empty, out, gate=empty, residual=residual, activation="gelu")
    assert torch.equal(out, residual)
    gemm(torch.empty(1, 3, 0), empty, out, bias=torch.ones(4), residual=residual, alpha=float("inf"))
    assert bool(out.isnan().all())  # inf * 0


def test_not_a_number_gets_through_the_gate() -> None:
    a, b, gate = torch.ones(1, 2, 3), torch.ones(1, 3, 2), torch.ones(1, 3, 2)
    gate[0, 1, 1] = float("nan")
    out = torch.empty(1, 2, 2)
    gemm(a, b, out, gate=gate, activation="relu")
    assert torch.equal(out.isnan(), torch.tensor([[[False, True]] * 2]))


def test_multiprocessors_bound_the_threads_of_plan_and_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPK_NUM_THREADS", "7")
    a, b = torch.randn(1, 100, 3000), torch.randn(1, 3000, 90)

    def run(**options: Any) -> Tensor:
        out = torch.empty(1, 100, 90)
        gemm(a, b, out, schedule="stream_k", tile="64x64x128", **options)
        return out

    all_of_them = run(workers=7)
    assert torch.equal(run(), all_of_them)
    assert torch.equal(run(multiprocessors=3), run(workers=3))
    assert torch.equal(run(multiprocessors=100), all_of_them)
    assert not torch.equal(run(multiprocessors=3), all_of_them)


def good() -> dict[str, Any]:
    return {"a": torch.ones(1, 2, 3), "b": torch.ones(1, 3, 5), "out": torch.full((1, 2, 5), 7.0)}


X = torch.ones(1, 2, 5)
GATE = torch.ones(1, 3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": GATE, "bias": torch.ones(5)}, "bias must be None where there is a gate"),
        ({"gate": GATE, "preact": X.clone()}, "preact must be None where there is a gate"),
        ({"gate": torch.ones(3, 5)}, "gate must have shape [batch, K, N], but it has shape [3, 5]."),
        (
            {"gate": torch.ones(1, 4, 5)},
            "gate must have as many rows as a has columns (K = 3), but it has 4.",
        ),
        ({"gate": torch.ones(2, 3, 5)}, "gate must have the batch size of a, 1, but it has 2: expand it"),
        (
            {"gate": torch.ones(1, 3, 6)},
            "gate must have shape [batch, K, N] = [1, 3, 5], but it has shape [1, 3, 6].",
        ),
        (
            {"gate": GATE.double()},
            "gate must have the dtype of a, Float, but it is Double: convert one of them.",
        ),
        (
            {"residual": torch.ones(2, 5)},
            "residual must have shape [batch, M, N] = [1, 2, 5], but it has shape [2, 5].",
        ),
        (
            {"residual": torch.ones(())},
            "residual must have shape [batch, M, N] = [1, 2, 5], but it has shape [].",
        ),
        (
            {"residual": X.int()},
            "residual must be float64, float32, bfloat16 or float16, but it is Int: convert it.",
        ),
        ({"multiprocessors": -1}, "multiprocessors must be 0 (all) or more, but it is -1."),
    ],
)
def test_wrong_arguments_are_sentences_and_write_nothing(change: dict[str, Any], message: str) -> None:
    arguments = good()
    with pytest.raises(RuntimeError, match=re.escape("streamk_gemm: " + message)):
        gemm(**(arguments | change))
    assert bool((arguments["out"] == 7).all())


def test_memory_that_must_not_be_shared() -> None:
    a, b, buffer = torch.ones(1, 4, 4), torch.ones(1, 4, 4), torch.zeros(1, 6, 8)
    kept = torch.zeros(1, 4, 4)
    out = buffer[:, :4, :4]
    only_itself = "residual must be out itself (the same view) or share no memory with it"
    others = {
        "another row": buffer[:, 1:5, :4],
        "another order": out.mT,
        "another type": buffer.view(torch.bfloat16)[:, :4, :4],
        "expanded": buffer[:, :1, :4].expand(1, 4, 4),
    }
    for what, residual in others.items():
        with pytest.raises(RuntimeError, match=re.escape(only_itself)):
            gemm(a, b, out, residual=residual)
        assert not bool(buffer.any()), what
    with pytest.raises(RuntimeError, match="residual must not share memory with preact"):
        gemm(a, b, out, preact=kept, residual=kept)
    with pytest.raises(RuntimeError, match="gate must not share memory with out"):
        gemm(a, b, out, gate=out)
    with pytest.raises(RuntimeError, match="bias must not share memory with preact"):
        gemm(a, b, out, preact=kept, bias=kept[0, 2])
    gemm(a, b, out, gate=b)  # a factor may be used twice
    assert bool((out == 16).all())


def test_devices_must_be_the_same() -> None:
    """On a machine without a GPU too: the CPU's kernel itself is given a tensor of another device."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name, tensor in {"b": GATE, "out": X, "gate": GATE, "residual": X}.items():
        arguments = good() | {"bias": None, "preact": None, "activation": "none", "accumulate": False}
        with pytest.raises(
            RuntimeError, match=f"{name} must be a CPU tensor like a, but it is on another kind"
        ):
            OPS.streamk_gemm.default.redispatch(keys, **(arguments | {name: tensor.to("meta")}))


@pytest.mark.parametrize("gated", [False, True])
def test_the_op_is_declared_as_it_behaves(gated: bool) -> None:
    """Schema, fake and functionalisation, with the arguments that have defaults."""
    arguments = good() | {"bias": None, "preact": None, "activation": "silu", "accumulate": True}
    arguments |= {"residual": X.clone(), "alpha": 0.5, "gate": GATE.clone() if gated else None}
    torch.library.opcheck(OPS.streamk_gemm.default, (), arguments)
