"""The reference against torch (float64 autograd, torch's own ops only) and against itself by finite differences."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_checks import TORCH_ACTIVATIONS, Rng, against_torch, finite_difference, flat, same

import tpkernels.reference as ref


def test_import_without_torch() -> None:
    """The reference's own files import no torch (the package above them may)."""
    code = (
        "import sys, types; p = types.ModuleType('tpkernels'); p.__path__ = [sys.argv[1]]\n"
        "sys.modules['tpkernels'] = p\n"
        "import tpkernels.reference; assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    )
    folder = ref.__file__.rsplit("/", 2)[0]
    subprocess.run([sys.executable, "-c", code, folder], check=True)


def test_rounding_matches_torch(rng: Rng) -> None:
    x = rng.standard_normal(4000) * 10.0 ** rng.uniform(-45, 39, 4000)
    x = np.concatenate(
        [x, [0.0, -0.0, 65504.0, 65519.9, 65520.0, 3.39e38, 3.4e38, 2.0**-150, 2.0**-25, 1.0 + 2.0**-8]]
    )
    x = (
        torch.from_numpy(x).float().double().numpy()
    )  # Through float32 first: torch rounds float64 to bf16 by way of it.
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        np.testing.assert_array_equal(ref.round_to(x, name), torch.from_numpy(x).to(dtype).double().numpy())
    assert ref.round_to(x, None) is x
    with pytest.raises(ValueError, match="dtype must be one of"):
        ref.round_to(x, "float8")


@pytest.mark.parametrize("name", ref.ACTIVATIONS)
def test_activations(rng: Rng, name: str) -> None:
    x = np.concatenate([rng.standard_normal(50) * 4, [0.0, 40.0, -40.0]])
    against_torch(
        rng,
        [x],
        lambda x: ref.activation(x, name),
        lambda dy, x: ref.activation_backward(dy, x, name),
        TORCH_ACTIVATIONS[name],
    )


def test_unknown_names() -> None:
    for call in (
        lambda: ref.activation(np.ones(2), "elu"),
        lambda: ref.activation_backward(1, np.ones(2), "elu"),
    ):
        with pytest.raises(ValueError, match="activation must be one of none, relu"):
            call()
    with pytest.raises(ValueError, match="op must be"):
        ref.all_reduce([np.ones(1)], "min")
    with pytest.raises(ValueError, match="gather_dim must not be the last dim"):
        ref.all_gather_matmul([np.ones((2, 3))], [np.ones((3, 1))], gather_dim=-1)


@pytest.mark.parametrize("lead", [(5,), (2, 3), (), (0,)])
@pytest.mark.parametrize("name", ["none", "gelu"])
@pytest.mark.parametrize("extras", [False, True])
def test_matmul(rng: Rng, lead: tuple[int, ...], name: str, extras: bool) -> None:
    a, b = rng.standard_normal((*lead, 4)), rng.standard_normal((4, 3))
    inputs = [a, b] + ([rng.standard_normal(3), rng.standard_normal((*lead, 3))] if extras else [])

    def expected(a: Any, b: Any, bias: Any = 0.0, residual: Any = 0.0) -> Any:
        return TORCH_ACTIVATIONS[name](a @ b + bias) + residual

    against_torch(
        rng,
        inputs,
        lambda a, b, bias=None, residual=None: ref.matmul(a, b, bias, name, residual),
        lambda dy, a, b, bias=None, residual=None: ref.matmul_backward(dy, a, b, bias, name, residual),
        expected,
    )
    if lead:
        out, preact = ref.matmul(a, b, activation="gelu", return_preact=True)
        same(preact, a @ b)
        same(out, ref.activation(a @ b, "gelu"))


@pytest.mark.parametrize("name", ["none", "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "shapes", [((2, 5, 4), (4, 3)), ((3, 1, 5, 4), (2, 4, 3)), ((5, 4), (2, 4, 3)), ((0, 4), (4, 3))]
)
def test_gated_matmul(rng: Rng, shapes: tuple[tuple[int, ...], tuple[int, ...]], name: str) -> None:
    a, b, gate = (rng.standard_normal(shape) for shape in (*shapes, shapes[1]))
    residual = rng.standard_normal((a @ b).shape)

    def backward(dy: Any, a: Any, b: Any, gate: Any, residual: Any) -> Any:
        grads = ref.matmul_backward(dy, a, b, None, name, residual, gate=gate, alpha=0.7)
        return grads.a, grads.b, grads.gate, grads.residual

    against_torch(
        rng,
        [a, b, gate, residual],
        lambda a, b, gate, residual: ref.matmul(a, b, None, name, residual, gate=gate, alpha=0.7),
        backward,
        lambda a, b, gate, residual: TORCH_ACTIVATIONS[name](0.7 * a @ gate) * (0.7 * a @ b) + residual,
    )
    bias = rng.standard_normal(3)
    against_torch(
        rng,
        [a, b, bias],
        lambda a, b, bias: ref.matmul(a, b, bias, name, alpha=-2.0),
        lambda dy, a, b, bias: ref.matmul_backward(dy, a, b, bias, name, alpha=-2.0)[:3],
        lambda a, b, bias: TORCH_ACTIVATIONS[name](-2.0 * a @ b + bias),
    )
    with pytest.raises(ValueError, match="bias must be None where there is a gate"):
        ref.matmul(a, b, bias, gate=gate)


def test_shard_sizes_are_those_of_chunk() -> None:
    for total in range(20):
        for world in range(1, 9):
            sizes = ref.shard_sizes(total, world)
            chunks = [len(c) for c in torch.arange(total).chunk(world)] if total else []
            assert sizes == chunks + [0] * (world - len(chunks))
    with pytest.raises(ValueError, match="sizes must be 2 numbers that sum to 5"):
        ref.split(np.ones(5), 0, 2, [2, 2])


@pytest.mark.parametrize(("shape", "dim"), [((7, 3), 0), ((7, 3), -1), ((2, 5, 3), 1), ((2, 5, 3), -2)])
@pytest.mark.parametrize("world", [1, 3])
def test_collectives(rng: Rng, shape: tuple[int, ...], dim: int, world: int) -> None:
    sizes = [shape[dim]] if world == 1 else [1, 0, shape[dim] - 1]
    full = rng.standard_normal(shape)
    shards = ref.split(full, dim, world, sizes)
    xs = [rng.standard_normal(shape) for _ in range(world)]
    against_torch(
        rng,
        [full],
        lambda x: ref.split(x, dim, world, sizes),
        lambda dys, x: ref.split_backward(dys, dim),
        lambda x: list(x.split(sizes, dim)),
    )
    against_torch(
        rng,
        [shards],
        lambda xs: [ref.all_gather(xs, dim)] * world,
        lambda dys, xs: ref.all_gather_backward(dys, dim, sizes),
        lambda xs: [torch.cat(xs, dim)] * world,
    )
    against_torch(  # Every rank does the same with the gathered array: it counts once, its gradient is complete.
        rng,
        [shards],
        lambda xs: ref.all_gather(xs, dim),
        lambda dy, xs: ref.all_gather_backward([dy] * world, dim, sizes, replicated_grad=True),
        lambda xs: torch.cat(xs, dim),
    )
    against_torch(
        rng,
        [xs],
        lambda xs: ref.reduce_scatter(xs, dim, sizes),
        lambda dys, xs: ref.reduce_scatter_backward(dys, dim),
        lambda xs: list(sum(xs).split(sizes, dim)),
    )
    against_torch(
        rng, [xs], ref.all_reduce, lambda dy, xs: ref.all_reduce_backward(dy, world), lambda xs: sum(xs)
    )
    against_torch(
        rng,
        [full],
        lambda x: ref.copy_to_group(x, world),
        lambda dys, x: ref.copy_to_group_backward(dys),
        lambda x: [x] * world,
    )
    same(ref.all_reduce(xs, "max"), np.stack(xs).max(axis=0))


GATHERS = [
    ((4, 5), 0, [4]),
    ((6, 5), 0, [3, 0, 3]),
    ((2, 7, 5), 1, [1, 4, 2]),
    ((2, 7, 5), -2, [3, 4]),
    ((3, 2, 5), 0, [1, 2]),
]


@pytest.mark.parametrize(("shape", "dim", "sizes"), GATHERS)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_all_gather_matmul(
    rng: Rng, shape: tuple[int, ...], dim: int, sizes: list[int], several: bool, biased: bool
) -> None:
    world = len(sizes)
    shards = ref.split(rng.standard_normal(shape), dim, world, sizes)
    widths = [[r, 2] if several else [r + 1] for r in range(world)]
    bs: Any = [[rng.standard_normal((5, n)) for n in ns] for ns in widths]
    biases: Any = [[rng.standard_normal(n) for n in ns] for ns in widths]
    if not several:
        bs, biases = [b[0] for b in bs], [b[0] for b in biases]
    options = {"gather_dim": dim, "activation": "silu"}

    def expected(shards: Any, bs: Any, biases: Any = None) -> Any:
        full = torch.cat(shards, dim)
        pairs = zip(flat(bs), flat(biases) or [0.0] * 99, strict=False)
        return [F.silu(full @ b + bias) for b, bias in pairs]

    against_torch(
        rng,
        [shards, bs] + ([biases] if biased else []),
        lambda a, b, bias=None: ref.all_gather_matmul(a, b, biases=bias, **options),
        lambda dys, a, b, bias=None: ref.all_gather_matmul_backward(dys, a, b, biases=bias, **options),
        expected,
    )


def test_matmul_replicated(rng: Rng) -> None:
    a, bs = rng.standard_normal((2, 3, 4)), [rng.standard_normal((4, n)) for n in (2, 0, 3)]
    biases = [rng.standard_normal(n) for n in (2, 0, 3)]
    against_torch(
        rng,
        [a, bs, biases],
        lambda a, b, bias: ref.matmul_replicated(a, b, bias, "gelu_tanh"),
        lambda dys, a, b, bias: ref.matmul_replicated_backward(dys, a, b, bias, "gelu_tanh"),
        lambda a, bs, biases: [
            F.gelu(a @ b + c, approximate="tanh") for b, c in zip(bs, biases, strict=True)
        ],
    )


SCATTERS = [
    ((5, 4), 0, None),
    ((7, 3), 0, [0, 5, 2]),
    ((2, 7, 3), 1, [1, 2, 4]),
    ((2, 7, 3), -2, None),
    ((5, 6), -1, [1, 2, 3]),
]


@pytest.mark.parametrize(("shape", "dim", "sizes"), SCATTERS)
@pytest.mark.parametrize("extras", [False, True])
def test_matmul_reduce_scatter(
    rng: Rng, shape: tuple[int, ...], dim: int, sizes: list[int] | None, extras: bool
) -> None:
    ks = [2, 0, 3]
    as_ = [rng.standard_normal((*shape[:-1], k)) for k in ks]
    bs = [rng.standard_normal((k, shape[-1])) for k in ks]
    inputs: list[Any] = [as_, bs]
    if extras:
        inputs += [rng.standard_normal(shape[-1]), ref.split(rng.standard_normal(shape), dim, 3, sizes)]

    def expected(as_: Any, bs: Any, bias: Any = 0.0, residuals: Any = (0.0, 0.0, 0.0)) -> Any:
        total = sum(a @ b for a, b in zip(as_, bs, strict=True)) + bias
        pieces = total.split(sizes or ref.shard_sizes(shape[dim], 3), dim)
        return [x + r for x, r in zip(pieces, residuals, strict=True)]

    against_torch(
        rng,
        inputs,
        lambda a, b, bias=None, res=None: ref.matmul_reduce_scatter(
            a, b, scatter_dim=dim, sizes=sizes, bias=bias, residuals=res
        ),
        lambda dys, a, b, bias=None, res=None: ref.matmul_reduce_scatter_backward(
            dys, a, b, scatter_dim=dim, bias=bias, residuals=res
        ),
        expected,
    )


def test_matmul_all_reduce(rng: Rng) -> None:
    as_ = [rng.standard_normal((2, 3, k)) for k in (2, 0, 3)]
    bs = [rng.standard_normal((k, 4)) for k in (2, 0, 3)]
    against_torch(
        rng,
        [as_, bs, rng.standard_normal(4), rng.standard_normal((2, 3, 4))],
        ref.matmul_all_reduce,
        ref.matmul_all_reduce_backward,
        lambda as_, bs, bias, res: sum(a @ b for a, b in zip(as_, bs, strict=True)) + bias + res,
    )


def test_rounding_model(rng: Rng) -> None:
    """Rounded partials, float32 sums in rank order, one last rounding: bit for bit what torch computes that way."""
    as_ = [np.round(rng.standard_normal((9, 4)) * 64) / 64 for _ in range(3)]
    bs = [np.round(rng.standard_normal((4, 5)) * 64) / 64 for _ in range(3)]
    residual = ref.round_to(rng.standard_normal((9, 5)), "bfloat16")
    total = torch.zeros(9, 5)
    for a, b in zip(as_, bs, strict=True):
        total += torch.from_numpy(a @ b).float().bfloat16().float()  # The product is exact in float32.
    expected = (total + torch.from_numpy(residual).float()).bfloat16().double().numpy()
    np.testing.assert_array_equal(
        ref.matmul_all_reduce(as_, bs, residual=residual, rounding="bfloat16"), expected
    )
    pieces = ref.matmul_reduce_scatter(as_, bs, residuals=ref.split(residual, 0, 3), rounding="bfloat16")
    np.testing.assert_array_equal(np.concatenate(pieces), expected)


def test_gradients_by_finite_differences(rng: Rng) -> None:
    """A second witness beside torch for the distributed products (three ranks, uneven, several weights)."""
    a = [rng.standard_normal((m, 4)) for m in (2, 0, 3)]
    b = [rng.standard_normal((4, n)) for n in (1, 2, 3)]
    dys = [rng.standard_normal((5, n)) for n in (1, 2, 3)]
    grads = ref.all_gather_matmul_backward(dys, a, b, activation="gelu")
    finite_difference(
        rng, a + b, lambda *v: ref.all_gather_matmul(v[:3], v[3:], activation="gelu"), grads.a + grads.b, dys
    )
    a = [rng.standard_normal((5, k)) for k in (1, 2, 3)]
    b = [rng.standard_normal((k, 4)) for k in (1, 2, 3)]
    dys = [rng.standard_normal((m, 4)) for m in (2, 2, 1)]
    bias = rng.standard_normal(4)
    grads = ref.matmul_reduce_scatter_backward(dys, a, b, bias=bias)
    finite_difference(
        rng,
        [*a, *b, bias],
        lambda *v: ref.matmul_reduce_scatter(v[:3], v[3:6], bias=v[6]),
        [*grads.a, *grads.b, grads.bias],
        dys,
    )


def test_erf(rng: Rng) -> None:
    x = rng.standard_normal((3, 4))
    assert ref.erf(x)[1, 2] == math.erf(x[1, 2])
    assert ref.erf(x.T).shape == (4, 3)
    assert ref.get_array_module(x, 1.0) is np


@pytest.mark.gpu1
def test_cupy_gives_what_numpy_gives(rng: Rng) -> None:
    cupy = pytest.importorskip("cupy")

    def to_gpu(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [to_gpu(item) for item in value]
        return cupy.asarray(value) if isinstance(value, np.ndarray) else value

    def both(fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        on_gpu = flat(fn(*to_gpu(args), **{key: to_gpu(value) for key, value in options.items()}))
        assert all(isinstance(x, cupy.ndarray) for x in on_gpu)
        same([cupy.asnumpy(x) for x in on_gpu], fn(*args, **options))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    for name in ref.ACTIVATIONS:
        both(ref.activation, normal(50), name)
        both(ref.activation_backward, normal(50), normal(50), name)
    for name in ("bfloat16", "float16", "float32"):
        both(ref.round_to, normal(500) * 10.0 ** rng.uniform(-45, 39, 500), name)
    a, b, dys = (
        [normal(2, 4), normal(0, 4), normal(3, 4)],
        [normal(4, n) for n in (1, 2, 3)],
        [normal(5, n) for n in (1, 2, 3)],
    )
    both(ref.all_gather_matmul, a, b, activation="gelu")
    both(ref.all_gather_matmul_backward, dys, a, b, activation="gelu")
    a, b, dys = (
        [normal(5, k) for k in (1, 0, 3)],
        [normal(k, 4) for k in (1, 0, 3)],
        [normal(m, 4) for m in (2, 2, 1)],
    )
    both(ref.matmul_reduce_scatter, a, b, bias=normal(4), residuals=dys, rounding="bfloat16")
    both(ref.matmul_reduce_scatter_backward, dys, a, b, bias=normal(4))
    both(ref.rms_norm_backward, normal(3, 8), normal(3, 8), normal(8))
    both(ref.gated_mlp_backward, normal(3, 4), normal(3, 4), normal(4, 6), normal(4, 6), normal(6, 4))
    layer = [normal(2, 5, 6), normal(2, 5, 6), normal(6, 16), normal(6, 8), normal(6, 8), normal(16, 6)]
    both(ref.attention_layer_backward, *layer, heads=4, kv_heads=2)
    ids, tables = rng.integers(0, 11, (3, 4)), [normal(4, 5), normal(0, 5), normal(7, 5)]
    both(ref.vocab_parallel_embedding, ids, tables)
    both(ref.vocab_parallel_embedding_backward, normal(3, 4, 5), ids, tables)
    logits = [normal(3, 4, 4), normal(3, 4, 0), normal(3, 4, 7)]
    both(ref.vocab_parallel_cross_entropy, logits, ids, label_smoothing=0.1)
    both(ref.vocab_parallel_cross_entropy_backward, normal(3, 4), logits, ids)
