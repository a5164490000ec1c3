"""From the options of ``tpk tune`` and ``tpk explain`` to a product: plain, in groups, or of FP8."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.fp8 import _product
from tpkernels.fp8._quantize import Quantized, quantize
from tpkernels.fp8.recipe import RECIPES, Fp8Recipe
from tpkernels.ops import _checks, _gemm, _paths
from tpkernels.ops._paths import Choice
from tpkernels.tune.calls import AnyCall, Call
from tpkernels.tune.grouped import GroupedCall
from tpkernels.tune.scaled import ScaledCall
from tpkernels.tune.shapes import Shape

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _checks.DTYPES} | {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# Which dimension of a and of b lies contiguous, in y = x w^T, dx = dy w and dw = dy^T x of a linear layer.
LAYOUTS = {"forward": ("k", "k"), "dgrad": ("k", "o"), "wgrad": ("o", "o")}
EPILOGUES = ("bias", "activation", "residual", "gate", "into")
_OF_GROUPS = {"bias", "activation", "gate"}
_OF_FP8 = {"bias"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that say what follows a product, how its operands lie, and of which kind it is."""
    parser.add_argument(
        "--dtype", help="of the operands: bf16, fp16, fp32, fp64 (bf16 on a GPU, fp32 on the CPU)"
    )
    parser.add_argument(
        "--layout", default="forward", help=f"products of a linear layer: {', '.join(LAYOUTS)} (forward)"
    )
    parser.add_argument(
        "--epilogue",
        default="",
        help=f"what follows the product, joined by +: {', '.join(EPILOGUES)} (an fp32 tensor that it is added to)",
    )
    parser.add_argument(
        "--groups",
        help="grouped products: how many groups share the M rows, or the rows of each, such as 300,0,212",
    )
    parser.add_argument("--fp8", metavar="RECIPE", help=f"FP8 products: {', '.join(RECIPES)}")
    parser.add_argument(
        "--fast-accumulation", action="store_true", help="with --fp8: sums are not promoted to float32"
    )


def dtype_of(given: argparse.Namespace, device: torch.device) -> torch.dtype:
    """Of operands; with --fp8 of the result.

    Raises:
        ArgumentError: an option that makes no sense, or not with the others.
    """
    name = given.dtype or ("bf16" if device.type == "cuda" else "fp32")
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ArgumentError(f"--dtype: expected one of {', '.join(DTYPES)}, got {name!r}.")
    return dtype


def default_of(given: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Choice:
    """The library, or why there is nothing else."""
    if given.fp8 is None:
        return _paths.choose_gemm(_paths.Request(None, None), device.type, dtype)
    missing = _product.streamk_missing(device)
    library = _product.LIBRARY if device.type == "cuda" else "blas"
    return Choice(library, missing or "", open=missing is None)


def call_of(shape: Shape, given: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> AnyCall:
    """A product of a shape with random operands; on the meta device without values.

    Raises:
        ArgumentError: an option that makes no sense, or not with the others.
    """
    follows = _checked(given)
    if given.fp8 is not None:
        return _scaled(shape, given, dtype, follows, device)
    if given.groups is not None:
        return _grouped_call(shape, given, dtype, follows, device)
    m, n, k = shape[:3]
    a_lies, b_lies = LAYOUTS[given.layout]
    weights = [
        _matrix([k, n], dtype, device, by_columns=b_lies == "k") for _ in range(1 + ("gate" in follows))
    ]
    epilogue = _gemm.Epilogue(
        gate=weights[1] if "gate" in follows else None,
        bias=_matrix([n], dtype, device) if "bias" in follows else None,
        residual=_matrix([m, n], dtype, device) if "residual" in follows else None,
        activation="silu" if "activation" in follows else "none",
    )
    into = torch.zeros(m, n, dtype=torch.float32, device=device) if "into" in follows else None
    a = _matrix([m, k], dtype, device, by_columns=a_lies == "o")
    return Call(a, weights[0], epilogue, dtype if into is None else into.dtype, into=into)


def as_called(call: AnyCall, given: argparse.Namespace) -> tuple[str, list[Any], dict[str, Any]]:
    """The public function that makes it: its name, arguments, and options by name."""
    if isinstance(call, ScaledCall):
        recipe = Fp8Recipe(given.fp8)
        pairs = [(call.a, call.scale_a), (call.b, call.scale_b)]
        a, b = (Quantized(data, scale, recipe.operand_scaling) for data, scale in pairs)
        options: dict[str, Any] = {"bias": call.bias, "out_dtype": call.out_dtype}
        options["fast_accumulation"] = call.fast_accumulation or None
        arguments: list[Any] = [a, b]
        return "scaled_matmul", arguments, {name: x for name, x in options.items() if x is not None}
    assert isinstance(call, (Call, GroupedCall))
    e = call.epilogue
    options = {"gate": e.gate, "bias": e.bias, "residual": e.residual}
    options["activation"] = None if e.activation == "none" else e.activation
    op, arguments = "grouped_matmul", [call.a, call.b]
    if isinstance(call, GroupedCall):
        arguments.append(call.sizes)
    else:
        op, options["accumulate_into"] = "matmul", call.into
    return op, arguments, {name: x for name, x in options.items() if x is not None}


def _checked(given: argparse.Namespace) -> set[str]:
    """What follows the product."""
    if given.layout not in LAYOUTS:
        raise ArgumentError(f"--layout: expected one of {', '.join(LAYOUTS)}, got {given.layout!r}.")
    follows = set(filter(None, given.epilogue.split("+")))
    if not follows <= set(EPILOGUES):
        raise ArgumentError(
            f"--epilogue: expected names of {', '.join(EPILOGUES)} joined by +, got {given.epilogue!r}."
        )
    if ("into" in follows and len(follows) > 1) or {"gate", "bias"} <= follows:
        raise ArgumentError(
            f"--epilogue: into goes with nothing else, and gate not with bias; got {given.epilogue!r}."
        )
    if given.fp8 is not None and given.groups is not None:
        raise ArgumentError("--fp8 and --groups: expected one of them, got both; there are no groups of FP8.")
    if given.fast_accumulation and given.fp8 is None:
        raise ArgumentError("--fast-accumulation: it goes with --fp8.")
    for option, allowed in (("--groups", _OF_GROUPS), ("--fp8", _OF_FP8)):
        if getattr(given, option[2:]) is not None and not follows <= allowed:
            raise ArgumentError(
                f"--epilogue: expected names of {', '.join(sorted(allowed))} with {option}, got {given.epilogue!r}."
            )
    return follows


def _grouped_call(
    shape: Shape, given: argparse.Namespace, dtype: torch.dtype, follows: set[str], device: torch.device
) -> GroupedCall:
    if given.layout == "wgrad":
        raise ArgumentError(
            "--layout: expected forward or dgrad with --groups, got 'wgrad', which is a product for each group."
        )
    m, n, k = shape[:3]
    sizes = group_sizes(given.groups, m)
    by_columns = LAYOUTS[given.layout][1] == "k"
    b, gate = (_matrix([len(sizes), k, n], dtype, device, by_columns=by_columns) for _ in range(2))
    epilogue = _gemm.Epilogue(
        gate=gate if "gate" in follows else None,
        bias=_matrix([len(sizes), n], dtype, device) if "bias" in follows else None,
        activation="silu" if "activation" in follows else "none",
    )
    return GroupedCall(_matrix([m, k], dtype, device), b, epilogue, sizes, dtype)


def group_sizes(text: str, rows: int) -> list[int]:
    """``8``: as many rows each, or one more; ``300,0,212``: these, which add up to ``rows``."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0 or (len(numbers) == 1 and not 1 <= numbers[0] <= 1 << 16):
        raise ArgumentError(
            f"--groups: expected a number, or numbers of rows, such as 8 or 300,0,212, got {text!r}."
        )
    if len(numbers) == 1:
        groups = numbers[0]
        return [rows // groups + (g < rows % groups) for g in range(groups)]
    if sum(numbers) != rows:
        raise ArgumentError(
            f"--groups: expected numbers that add up to M = {rows}, got {text!r}, {sum(numbers)} in all."
        )
    return numbers


def _scaled(
    shape: Shape, given: argparse.Namespace, dtype: torch.dtype, follows: set[str], device: torch.device
) -> ScaledCall:
    if given.fp8 not in RECIPES:
        raise ArgumentError(f"--fp8: expected one of {', '.join(RECIPES)}, got {given.fp8!r}.")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError("--dtype: expected bf16, fp16 or fp32 with --fp8, of the result.")
    recipe = Fp8Recipe(given.fp8, fast_accumulation=given.fast_accumulation)
    m, n, k = shape[:3]
    # Transposed copies are quantised along K too: it is contiguous in all three products.
    left = recipe.forward_dtype if given.layout == "forward" else recipe.grad_dtype
    right = recipe.operand_scaling if given.layout == "wgrad" else recipe.weight_scaling
    a = quantized(m, k, recipe.operand_scaling, left, device)
    b = quantized(n, k, right, recipe.forward_dtype, device).t()
    bias = _matrix([n], dtype, device) if "bias" in follows else None
    return ScaledCall(a.data, b.data, a.scale, b.scale, bias, dtype, recipe.fast_accumulation)


def quantized(rows: int, k: int, scaling: str, dtype: torch.dtype, device: torch.device) -> Quantized:
    """Random values [rows, K]."""
    return quantize(_matrix([rows, k], torch.float32, device), scaling, dtype)


def _matrix(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, *, by_columns: bool = False
) -> Tensor:
    size = [*size[:-2], size[-1], size[-2]] if by_columns else list(size)
    made = torch.empty(size, dtype=dtype, device=device)
    if device.type != "meta":
        made.normal_()
    return made.mT if by_columns else made
