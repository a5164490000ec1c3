"""What the GPU kernels do once per tile: bias, activation, pre-activation, gate, residual, alpha, old output.

To the bit where integers stay integers; within rounding elsewhere. Tiles of both kernels go through the same tests.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from gemm_checks import OUT_LAYOUTS, Failures, Product, activate, embed, gemm, integers, output, randn
from streamk_cases import (
    ACTIVATIONS,
    ANY_TILE,
    DTYPES,
    FAST,
    GATED_TILES,
    LAYOUTS,
    OUT_DTYPES,
    PLANS,
    SLOW,
    SPLIT_PLANS,
    TILES,
    hopper_only,
    is_hopper,
    variants,
)

pytestmark = pytest.mark.gpu1
Tensor = torch.Tensor
GATE_TILES = [*(pytest.param(tile, marks=hopper_only) for tile in GATED_TILES), *TILES, ""]


def bias_of(n: int, dtype: torch.dtype, stride: int, generator: torch.Generator) -> Tensor:
    values = integers(n, max(1, stride), dtype=dtype, generator=generator, most=9)[:, 0]
    return values if stride else values[:1].expand(n)


def residual_of(
    shape: tuple[int, int, int], dtype: torch.dtype, layout: str, generator: torch.Generator
) -> Tensor:
    """In the layouts of embed(), or broadcast along one dimension."""
    batch, m, n = shape
    values = integers(batch, m, n, dtype=dtype, generator=generator, most=9)
    if layout == "one_row":
        return embed(values[:, :1], "rows").expand(shape)
    if layout == "one_column":
        return embed(values[:, :, :1], "rows").expand(shape)
    if layout == "one_batch":
        return embed(values[:1], "rows").expand(shape)
    return embed(values, layout)


RESIDUALS = [*FAST, *SLOW, "one_row", "one_column", "one_batch"]


@pytest.mark.parametrize("out_layout", OUT_LAYOUTS)
@pytest.mark.parametrize("tile", ANY_TILE)
def test_each_feature_into_each_layout(tile: str, out_layout: str, generator: torch.Generator) -> None:
    """One at a time and all together, whole tiles and cut ones, ragged and smooth widths."""
    features: dict[str, dict[str, Any]] = {
        "nothing": {},
        "alpha": {"alpha": -0.5},
        "bias": {"bias": True},
        "relu": {"activation": "relu"},
        "preact": {"preact": True},
        "residual": {"residual": True},
        "accumulate": {"accumulate": True},
        "preact of bias, relu": {"bias": True, "preact": True, "activation": "relu"},
        "residual and accumulate": {"residual": True, "accumulate": True, "alpha": 2.0},
        "all": {"alpha": 0.5, "bias": True, "preact": True, "activation": "relu", "residual": True}
        | {"accumulate": True},
    }
    names, preacts = itertools.cycle(variants(tile)), itertools.cycle(OUT_LAYOUTS)
    kinds = itertools.cycle(OUT_DTYPES)
    with Failures() as failures:
        for (batch, m, n, k), (what, f) in itertools.product(
            [(1, 280, 392, 1000), (2, 150, 203, 584), (1, 257, 70, 96)], features.items()
        ):
            dtype = DTYPES[n % 2]
            product = Product(
                embed(integers(batch, m, k, dtype=dtype, generator=generator), "rows"),
                embed(integers(batch, k, n, dtype=dtype, generator=generator), FAST[m % 2]),
                bias=bias_of(n, next(kinds), 1, generator) if f.get("bias") else None,
                residual=residual_of((batch, m, n), next(kinds), "rows", generator)
                if f.get("residual")
                else None,
                activation=f.get("activation", "none"),
                alpha=f.get("alpha", 1.0),
            )
            for out_dtype, plan in itertools.product(OUT_DTYPES, PLANS[:3]):
                name, preact = next(names), next(preacts)
                old = integers(batch, m, n, dtype=out_dtype, generator=generator)
                with failures.case(f"{what}, {name} {(batch, m, n, k)} {dtype} to {out_dtype} {plan}"):
                    product.run(
                        out_dtype,
                        out_layout,
                        old=old if f.get("accumulate") else None,
                        preact_layout=preact if f.get("preact") else "",
                        tile=name,
                        **plan,
                    )


@pytest.mark.parametrize("tile", ANY_TILE)
def test_combinations(tile: str, seed: int, generator: torch.Generator) -> None:
    """Drawn at random: shapes, layouts, types, strides, features, plans."""
    pick = random.Random(seed)
    with Failures() as failures:
        for _ in range(200):
            batch, k = pick.choice([1, 1, 2, 3]), pick.choice([1, 64, 96, 200, 584, 1000, 2048])
            m, n = (pick.choice([1, 8, 33, 64, 127, 130, 256, 264, 300]) for _ in range(2))
            dtype, out_dtype, name = pick.choice(DTYPES), pick.choice(OUT_DTYPES), pick.choice(variants(tile))
            layout_a, layout_b = pick.choice(LAYOUTS)
            bias, residual = pick.random() < 0.5, pick.choice([None, *RESIDUALS])
            residual_dtype, bias_dtype = pick.choice(OUT_DTYPES), pick.choice(OUT_DTYPES)
            out_layout, preact = pick.choice(list(OUT_LAYOUTS)), pick.choice(["", *OUT_LAYOUTS])
            accumulate, alpha = pick.random() < 0.4, pick.choice([1.0, 1.0, -1.0, 0.5, 0.0])
            activation, plan = pick.choice(["none", "relu"]), pick.choice(PLANS)
            product = Product(
                embed(integers(batch, m, k, dtype=dtype, generator=generator), layout_a),
                embed(integers(batch, k, n, dtype=dtype, generator=generator), layout_b),
                bias=bias_of(n, bias_dtype, pick.choice([0, 1, 3]), generator) if bias else None,
                residual=residual_of((batch, m, n), residual_dtype, residual, generator)
                if residual
                else None,
                activation=activation,
                alpha=alpha,
            )
            old = integers(batch, m, n, dtype=out_dtype, generator=generator) if accumulate else None
            what = (
                f"{name} {(batch, m, n, k)} {layout_a} x {layout_b} {dtype} to {out_dtype} {out_layout} {plan}, "
                f"bias {bias_dtype if bias else None}, residual {residual} {residual_dtype}, preact {preact!r}, "
                f"{activation}, alpha {alpha}, accumulate {accumulate}"
            )
            with failures.case(what):
                product.run(out_dtype, out_layout, old=old, preact_layout=preact, tile=name, **plan)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_biases_and_residuals_of_any_dtype_and_stride(tile: str, generator: torch.Generator) -> None:
    names = itertools.cycle(variants(tile))
    with Failures() as failures:
        for n, kind in itertools.product((1, 3, 64, 130, 392), OUT_DTYPES):
            a = embed(integers(2, 130, 520, dtype=torch.bfloat16, generator=generator), "rows")
            b = embed(integers(2, 520, n, dtype=torch.bfloat16, generator=generator), "rows")
            for stride, plan in itertools.product((0, 1, 3), PLANS[:2]):
                name = next(names)
                with failures.case(f"bias {kind}, stride {stride}, N = {n}, {name} {plan}"):
                    bias = bias_of(n, kind, stride, generator)
                    Product(a, b, bias=bias).run(torch.float32, tile=name, **plan)
            for layout, plan in itertools.product(RESIDUALS, PLANS[:2]):
                name = next(names)
                with failures.case(f"residual {kind} {layout}, N = {n}, {name} {plan}"):
                    residual = residual_of((2, 130, n), kind, layout, generator)
                    Product(a, b, residual=residual).run(torch.bfloat16, tile=name, **plan)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_activations(tile: str, generator: torch.Generator) -> None:
    m, n, k = 150, 280, 1032
    names = itertools.cycle(variants(tile))
    with Failures() as failures:
        for dtype, activation, layout in itertools.product(DTYPES, ACTIVATIONS, ["rows", "rows_odd"]):
            a = embed(randn(1, m, k, dtype=dtype, generator=generator) / 16, "rows")
            b = embed(randn(1, k, n, dtype=dtype, generator=generator), "cols")
            bias = randn(n, dtype=torch.float32, generator=generator)
            product = Product(a, b, bias=bias, activation=activation, alpha=0.75)
            for out_dtype, plan in itertools.product(OUT_DTYPES, PLANS[:3]):
                name = next(names)
                with failures.case(f"{activation} {name} {dtype} to {out_dtype} {layout} {plan}"):
                    product.run(out_dtype, layout, preact_layout="rows", exact=False, tile=name, **plan)


@pytest.mark.parametrize("tile", ANY_TILE)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_over_their_range(activation: str, tile: str) -> None:
    """K = 1: the pre-activation is the value itself. Large ones, tiny ones, NaN and infinity."""
    special = [0.0, -0.0, 3e38, -3e38, 1e20, -1e20, 88.0, -88.0, -87.0, 1e-30, -1e-30, math.inf, math.nan]
    values = torch.tensor(torch.linspace(-30, 30, 1987).tolist() + special, device="cuda").bfloat16()
    a, b = values.reshape(1, -1, 1), torch.ones(1, 1, 8, dtype=torch.bfloat16, device="cuda")
    a = embed(a, "rows")
    want = activate(values.double(), activation).reshape(1, -1, 1).expand(1, -1, 8)
    with Failures() as failures:
        for name in variants(tile):
            with failures.case(name):
                out = output((1, len(values), 8), torch.float32)
                gemm(a, b, out.tensor, activation=activation, tile=name)
                assert torch.equal(out.tensor.isnan(), want.isnan())
                finite = want.isfinite()
                got = out.tensor.double()
                assert torch.equal(got[want.isinf()], want[want.isinf()])
                error = (got - want)[finite].abs()
                allowed = 4e-6 * want[finite].abs() + 2e-6  # erf is good to 1.5e-7, times the value
                worst = int((error / allowed).argmax())
                assert bool((error <= allowed).all()), (
                    f"at {float(values.reshape(-1, 1).expand(-1, 8)[finite[0]][worst])}: "
                    f"got {float(got[finite][worst])}, expected {float(want[finite][worst])}"
                )


@pytest.mark.parametrize("tile", GATE_TILES)
def test_gates_to_the_bit(tile: str, generator: torch.Generator) -> None:
    """Two products, one output: whole and cut tiles, all layouts, with all that may be added."""
    kinds = itertools.cycle(OUT_DTYPES)
    with Failures() as failures:
        for (batch, m, n, k), (layout_a, layout_b), activation in itertools.product(
            [(1, 150, 264, 520), (2, 65, 40, 584), (1, 300, 129, 64)], LAYOUTS, ["none", "relu"]
        ):
            dtype, kind = DTYPES[m % 2], next(kinds)
            make: dict[str, Any] = {"dtype": dtype, "generator": generator, "most": 1}
            a = embed(integers(batch, m, k, **make), layout_a)
            b, gate = (embed(integers(batch, k, n, **make), layout_b) for _ in range(2))
            shape = (batch, m, n)
            plain = Product(a, b, gate=gate, activation=activation)
            more = Product(
                a, b, gate=gate, activation=activation, alpha=0.5,
                residual=residual_of(shape, kind, RESIDUALS[(m + n + k) % len(RESIDUALS)], generator),
            )  # fmt: skip
            for name, plan in itertools.product(variants(tile, gated=True), PLANS[:4]):
                out_dtype = next(kinds)
                old = integers(*shape, dtype=out_dtype, generator=generator)
                with failures.case(
                    f"{name} {shape} K = {k} {layout_a} x {layout_b} {dtype} to {out_dtype} {plan}"
                ):
                    plain.run(out_dtype, tile=name, **plan)
                    more.run(out_dtype, "rows_odd", old=old, tile=name, **plan)


@pytest.mark.parametrize("tile", GATE_TILES)
def test_gates_with_activations(tile: str, generator: torch.Generator) -> None:
    with Failures() as failures:
        for dtype, activation in itertools.product(DTYPES, ["silu", "gelu", "gelu_tanh"]):
            m, n, k = 200, 328, 1032
            a = embed(randn(1, m, k, dtype=dtype, generator=generator) / math.sqrt(k), "rows")
            b, gate = (embed(randn(1, k, n, dtype=dtype, generator=generator), "cols") for _ in range(2))
            residual = randn(1, m, n, dtype=dtype, generator=generator)
            product = Product(a, b, gate=gate, activation=activation, residual=residual)
            for name, plan, out_dtype in itertools.product(variants(tile, gated=True), PLANS[:3], OUT_DTYPES):
                with failures.case(f"{activation} {name} {dtype} to {out_dtype} {plan}"):
                    product.run(out_dtype, exact=False, tile=name, **plan)


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_gates_that_lie_otherwise_than_b(activation: str, generator: torch.Generator) -> None:
    """Another layout, broadcast where b is not: no error, unless a Hopper tile is named."""
    make: dict[str, Any] = {"dtype": torch.bfloat16, "generator": generator, "most": 1}
    a = embed(integers(2, 150, 200, **make), "rows")
    b, gate = integers(2, 200, 136, **make), integers(2, 200, 136, **make)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    with Failures() as failures:
        for layout_b, layout_gate, one in itertools.product(
            [*FAST, "rows_odd"], [*FAST, "cols_odd"], ["", "b", "gate"]
        ):
            b_view, gate_view = embed(b, layout_b), embed(gate, layout_gate)
            b_view = b_view[:1].expand(2, 200, 136) if one == "b" else b_view
            gate_view = gate_view[:1].expand(2, 200, 136) if one == "gate" else gate_view
            what = f"b {layout_b}, gate {layout_gate}, one {one or 'of neither'}"
            with failures.case(what):
                Product(a, b_view, gate=gate_view, activation=activation).run(torch.float32)
            if hopper and layout_b in FAST and (layout_b != layout_gate or one):
                out = output((2, 150, 136), torch.float32).tensor
                with failures.case(what), pytest.raises(RuntimeError, match=r"gate .*(lie in memory|by TMA)"):
                    gemm(a, b_view, out, gate=gate_view, tile="128x256x64")
        both = Product(a, b[:1].expand(2, 200, 136), gate=gate[:1].expand(2, 200, 136), activation=activation)
        for name in variants("128x256x64") if hopper else [""]:
            with failures.case(f"one of both, {name}"):
                both.run(torch.float32, tile=name)


@pytest.mark.parametrize("tile", ANY_TILE)
def test_residual_may_be_the_output_itself(tile: str, generator: torch.Generator) -> None:
    """Also where the old output is added besides: it counts twice then."""
    m, n, k = 300, 392, 1000
    a = integers(1, m, k, dtype=torch.bfloat16, generator=generator)
    b = integers(1, k, n, dtype=torch.bfloat16, generator=generator)
    gates = [None] if is_hopper(tile) and tile not in GATED_TILES else [None, b.neg()]
    with Failures() as failures:
        for name, plan, kind, layout, accumulate, gate in itertools.product(
            variants(tile), PLANS[:2], OUT_DTYPES, OUT_LAYOUTS, [False, True], gates
        ):
            if gate is not None and name not in variants(tile, gated=True):
                continue
            old = integers(1, m, n, dtype=kind, generator=generator)
            out = output((1, m, n), kind, layout)
            out.tensor.copy_(old)
            what = f"{name} {plan} {kind} {layout} accumulate={accumulate} gate={gate is not None}"
            with failures.case(what):
                gemm(
                    a, b, out.tensor, residual=out.tensor, activation="relu", accumulate=accumulate,
                    gate=gate, tile=name, **plan,
                )  # fmt: skip
                value = Product(a, b, gate=gate, activation="relu").value
                want = (value + old.double() * (2 if accumulate else 1)).to(kind)
                assert torch.equal(out.tensor, want)
                out.check("out")


@pytest.mark.parametrize("tile", ANY_TILE)
def test_a_result_is_rounded_once(tile: str) -> None:
    """1 + 2^-9 + 2^-9 + 2^-8 = 1 + 2^-7: rounded to bfloat16 after any of the steps, it would be 1."""
    a = torch.ones(1, 130, 1024, dtype=torch.bfloat16, device="cuda")
    b = torch.full((1, 1024, 136), 2.0**-10, dtype=torch.bfloat16, device="cuda")
    bias = torch.full((136,), 2.0**-9, dtype=torch.bfloat16, device="cuda")
    residual = torch.full((1, 130, 136), 2.0**-9, dtype=torch.bfloat16, device="cuda")
    old = torch.full((1, 130, 136), 2.0**-8, dtype=torch.bfloat16, device="cuda")
    for name, plan in itertools.product(variants(tile), [PLANS[0], *SPLIT_PLANS]):
        out = Product(a, b, bias=bias, residual=residual).run(torch.bfloat16, old=old, tile=name, **plan)
        assert float(out[0, 0, 0]) == 1.0078125, (name, plan)
