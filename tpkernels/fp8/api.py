"""Public operations in FP8.

:func:`scaled_matmul` multiplies what :func:`tpkernels.quantize` made. The others take and give high precision, as
those of the same names in :mod:`tpkernels.ops.api` do, and quantise inside, by a recipe, for all three products of a
linear layer::

    y = tpk.fp8.all_gather_matmul(x_shard, weight.t(), group, recipe="blockwise")

- x, weights and biases may differ in dtype (bfloat16, float16, float32): a float32 master weight is quantised as it is,
  and gets a float32 gradient. Results have ``out_dtype``, by default that of x, under autocast that of autocast.
- Gradients cannot be differentiated again.
- ``path``: "auto", a transport, a product ("streamk", "cublas", "blas"), or both; there is no "fused" yet.

Errors are of :mod:`tpkernels.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tpkernels.errors import ArgumentError, DTypeError, ShapeError
from tpkernels.fp8 import _ops as _register  # noqa: F401 - registers the ops
from tpkernels.fp8 import _product
from tpkernels.fp8._linear import Call, column, row
from tpkernels.fp8._quantize import Quantized
from tpkernels.fp8.recipe import Fp8Recipe, RecipeLike, recipe_of
from tpkernels.ops import _agreement, _checks, _groups, _main_grad, _paths
from tpkernels.ops._groups import GroupLike, group_name_of
from tpkernels.tune import mode

_ops = torch.ops.tpkernels


def scaled_matmul(
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = False,
    path: str = "auto",
) -> Tensor:
    """``(a.data * a.scale) @ (b.data * b.scale) + bias``, rounded once::

        y = tpk.scaled_matmul(tpk.quantize(x, "rowwise"), tpk.quantize(weight, "rowwise").t())

    Args:
        a: [..., K], quantised along K.
        b: [K, N], the ``t()`` of a [N, K] that was quantised along K. Scalings of the two may differ.
        bias: [N], any floating dtype.
        out_dtype: bfloat16, float16 or float32.
        fast_accumulation: leave sums in the tensor cores' accumulators, which keep fewer bits than float32, instead of
            promoting them every 128 of K. Means nothing on the CPU.
        path: "auto", "streamk" (our kernel, Hopper), "cublas" (CUDA) or "blas" (CPU). "auto" takes torch._scaled_mm
            where it takes these layouts, else our kernel where that runs, else torch's product of converted operands,
            so that every shape, scaling and device has a result. K and N that are not multiples of 16 are padded.

    Returns:
        [..., N], without gradients.

    Raises:
        DTypeError, ShapeError, DeviceError, ArgumentError; BackendError: the path cannot run here.
    """
    _check_quantized(a, b, out_dtype)
    out: Tensor = _ops.scaled_matmul(
        a.data, b.data, a.scale, b.scale, bias, out_dtype, fast_accumulation, path
    )
    return out


def _check_quantized(a: object, b: object, out_dtype: object) -> None:
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, Quantized):
            raise DTypeError(
                f"{name}: expected what tpkernels.quantize returns, got {type(q).__name__}; for tensors in high "
                "precision there is tpkernels.fp8.matmul."
            )
    if not isinstance(out_dtype, torch.dtype):
        raise DTypeError(f"out_dtype: expected a torch.dtype, got {out_dtype!r}.")


def foresee(
    a: Quantized,
    b: Quantized,
    device: torch.device,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = False,
    path: str = "auto",
) -> tuple[str, str, str]:
    """Path, product and reason of :func:`scaled_matmul` on ``device``, for :func:`tpkernels.explain`."""
    _check_quantized(a, b, out_dtype)
    _product.check("a", a.data, a.scale, "b", b.data, b.scale)
    _product.check_rest(bias, b.data, out_dtype)
    layout = _product.layout_of(a.data, b.data, a.scale, b.scale, out_dtype, fast_accumulation)
    choice = _product.choose(_paths.parse(path, device.type, distributed=False), device, layout)
    if choice.open and mode.active():
        from tpkernels.tune import local, scaled

        call = scaled.ScaledCall(a.data, b.data, a.scale, b.scale, bias, out_dtype, fast_accumulation)
        choice = local.foreseen(choice, call, device)
    return choice.gemm, _product.describe(a.data, b.data, layout), choice.why


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    recipe: RecipeLike,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Tensor:
    """``a @ b + bias`` on this rank alone: a [..., K], b [K, N], bias [N] -> [..., N]."""
    dtype = _out_dtype(a, out_dtype)
    chosen = recipe_of(recipe)
    _check(a, [b], [bias], dtype, path)
    sinks = _main_grad.listed(main_grad_of, [b])
    return _column(chosen, a, [b], [bias], None, False, 0, None, dtype, path, sinks)[0]


def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor | Sequence[Tensor],
    group: GroupLike = None,
    *,
    recipe: RecipeLike,
    gather_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
    keep_gathered: bool = False,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Any:
    """``all_gather(a_shard) @ b + bias`` for one weight or several: what travels is FP8, half the bytes of bfloat16.

    Arguments and result as in :func:`tpkernels.all_gather_matmul`. The gradient of ``a_shard`` is a sum, which travels
    in its dtype; for those of weights the operand is gathered again in FP8, or kept so (``keep_gathered``).
    """
    return _columns("fp8.all_gather_matmul", a_shard, b, group, recipe, True, gather_dim, shard_sizes, biases,
                    out_dtype, keep_gathered, main_grad_of, path)  # fmt: skip


def matmul_replicated(
    a: Tensor,
    b: Tensor | Sequence[Tensor],
    group: GroupLike = None,
    *,
    recipe: RecipeLike,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Any:
    """``a @ b + bias`` where ``a`` is the same on every rank and ``b`` holds this rank's columns.

    As :func:`tpkernels.matmul_replicated`: the gradient of ``a`` is summed over the group, in its dtype.
    """
    return _columns("fp8.matmul_replicated", a, b, group, recipe, False, 0, None, biases,
                    out_dtype, False, main_grad_of, path)  # fmt: skip


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    group: GroupLike = None,
    *,
    recipe: RecipeLike,
    scatter_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Tensor:
    """Sum of every rank's ``a @ b``, of which this rank keeps its rows, ``+ bias + residual``.

    Arguments and result as in :func:`tpkernels.matmul_reduce_scatter`. Sums travel in ``out_dtype``; the gradient of
    the output is gathered in FP8.
    """
    return _row("fp8.matmul_reduce_scatter", a, b, group, recipe, True, scatter_dim, shard_sizes, bias, residual,
                out_dtype, main_grad_of, path)  # fmt: skip


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    group: GroupLike = None,
    *,
    recipe: RecipeLike,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Tensor:
    """Sum of every rank's ``a @ b``, ``+ bias + residual``, on every rank, as :func:`tpkernels.matmul_all_reduce`."""
    return _row("fp8.matmul_all_reduce", a, b, group, recipe, False, 0, None, bias, residual,
                out_dtype, main_grad_of, path)  # fmt: skip


def _columns(
    op: str,
    a: Tensor,
    b: Tensor | Sequence[Tensor],
    group: GroupLike,
    recipe: RecipeLike,
    cut: bool,
    dim: int,
    sizes: Sequence[int] | None,
    biases: Tensor | Sequence[Tensor | None] | None,
    out_dtype: torch.dtype | None,
    keep_gathered: bool,
    main_grad_of: _main_grad.Parameters,
    path: str,
) -> Any:
    several = isinstance(b, (list, tuple))
    bs: list[Any] = list(b) if isinstance(b, (list, tuple)) else [b]
    given: list[Any] = (
        list(biases) if isinstance(biases, (list, tuple)) else [biases] + [None] * (len(bs) - 1)
    )
    name = group_name_of(group)

    def check() -> tuple[Fp8Recipe, torch.dtype, int, Any]:
        dtype = _out_dtype(a, out_dtype)
        _check(a, bs, given, dtype, path)
        if cut:
            d = _checks.check_dim("gather_dim", dim, "a_shard", a)
            if not torch.compiler.is_compiling():  # a graph knows no groups: the operation checks it
                _groups.gather_sizes(a.shape[d], sizes, _groups.resolve(name), "a_shard")
        else:
            d = 0
        return recipe_of(recipe), dtype, d, _main_grad.listed(main_grad_of, bs)

    chosen, dtype, d, sinks = _agreed(op, name, a, check)
    rows = None if sizes is None else list(sizes)
    made = _column(chosen, a, bs, given, name, cut, d, rows, dtype, path, sinks, keep_gathered)
    return made if several else made[0]


def _column(
    recipe: Fp8Recipe,
    a: Tensor,
    bs: list[Tensor],
    biases: list[Tensor | None],
    group: str | None,
    cut: bool,
    dim: int,
    sizes: list[int] | None,
    out_dtype: torch.dtype,
    path: str,
    sinks: Any,
    keep_gathered: bool = False,
) -> list[Tensor]:
    bias_of = tuple(i for i, bias in enumerate(biases) if bias is not None)
    present = [bias for bias in biases if bias is not None]
    nowhere = (None,) * len(bs)
    call = Call(recipe, group, cut, dim, sizes, out_dtype, path, _wanted(bs), nowhere, bias_of, keep_gathered)
    return (
        column(call, a, bs, present)
        if sinks is None
        else _into_main_grad(column, call, sinks, a, bs, present)
    )


def _row(
    op: str,
    a: Tensor,
    b: Tensor,
    group: GroupLike,
    recipe: RecipeLike,
    cut: bool,
    dim: int,
    sizes: Sequence[int] | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    main_grad_of: _main_grad.Parameters,
    path: str,
) -> Tensor:
    name = group_name_of(group)

    def check() -> tuple[Fp8Recipe, torch.dtype, int, Any]:
        dtype = _out_dtype(a, out_dtype, residual)
        _check(a, [b], [bias], dtype, path)
        d = _checks.check_dim("scatter_dim", dim, "a", a) if cut else 0
        if not torch.compiler.is_compiling():  # a graph knows no groups: the operation checks it
            members, shape = _groups.resolve(name), [*a.shape[:-1], b.shape[1]]
            if cut:
                shape[d] = _groups.scatter_sizes(a.shape[d], sizes, members, "a")[members.rank]
            _checks.check_residual(residual, shape, dtype, a)
        return recipe_of(recipe), dtype, d, _main_grad.listed(main_grad_of, [b])

    if residual is not None and _autocast_dtype(a) is not None:
        residual = residual.to(_out_dtype(a, out_dtype, residual))
    chosen, dtype, d, sinks = _agreed(op, name, a, check)
    rows = None if sizes is None else list(sizes)
    call = Call(chosen, name, cut, d, rows, dtype, path, _wanted([b]), (None,))
    operands = (a, [b], bias, residual)
    return row(call, *operands) if sinks is None else _into_main_grad(row, call, sinks, *operands)


def _agreed(op: str, group_name: str, sample: Any, check: Callable[[], Any]) -> Any:
    """``check()``; under TPK_CHECK=1 what it raises on one rank becomes an error on every rank."""
    compiling = torch.compiler.is_compiling() or not isinstance(sample, Tensor)
    if compiling or not _agreement.enabled() or sample.is_meta or isinstance(sample, FakeTensor):
        return check()
    return _agreement.validated(op, _groups.resolve(group_name), sample, check, lambda _: {})


def _check(a: Any, bs: Sequence[Any], biases: Sequence[Any], out_dtype: torch.dtype, path: object) -> None:
    if not isinstance(path, str):
        raise DTypeError(f"path: expected str, got {path!r}.")
    if len(bs) == 0:
        raise ArgumentError("b: expected at least one weight, got an empty list.")
    if len(biases) != len(bs):
        raise ArgumentError(
            f"biases: expected one bias (or None) per weight, {len(bs)} in all, got {len(biases)}."
        )
    _check_wide("a", a, 2)
    for i, (b, bias) in enumerate(zip(bs, biases, strict=True)):
        name = "b" if len(bs) == 1 else f"b[{i}]"
        _check_wide(name, b, 2)
        if b.dim() != 2 or b.shape[0] != a.shape[-1]:
            raise ShapeError(
                f"{name}: expected [K, N] with {a.shape[-1]} rows (K, the last dimension of a {list(a.shape)}), got "
                f"{list(b.shape)}; weights stored [out, in] are passed as weight.t()."
            )
        if b.device != a.device:
            _checks.check_like(name, b.to(a.dtype), "a", a)
        _product.check_rest(bias, b, out_dtype, "bias" if len(bs) == 1 else f"biases[{i}]")


def _check_wide(name: str, x: Any, dims: int) -> None:
    if not isinstance(x, Tensor):
        raise DTypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}.")
    if x.dtype not in _product.OUT_DTYPES:
        raise DTypeError(
            f"{name}: expected bfloat16, float16 or float32, to be quantised here, got "
            f"{str(x.dtype).removeprefix('torch.')}; convert it."
        )
    _checks.check_operand(name, x, dims)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _out_dtype(x: Any, out_dtype: torch.dtype | None, residual: Tensor | None = None) -> torch.dtype:
    if out_dtype is not None:
        if not isinstance(out_dtype, torch.dtype):
            raise DTypeError(f"out_dtype: expected a torch.dtype or None, got {out_dtype!r}.")
        return out_dtype
    if not isinstance(x, Tensor):
        raise DTypeError(f"a: expected a torch.Tensor, got {type(x).__name__}.")
    return _autocast_dtype(x) or x.dtype


def _wanted(bs: Sequence[Tensor]) -> tuple[bool, ...]:
    return tuple(torch.is_grad_enabled() and b.requires_grad for b in bs)


def _into_main_grad(
    function: Callable[..., Any],
    call: Call,
    sinks: Sequence[Any],
    a: Tensor,
    bs: Sequence[Tensor],
    *rest: Any,
) -> Any:
    """``function`` with gradients of weights where ``sinks`` say; see :mod:`tpkernels.ops._main_grad`."""
    if any(isinstance(sink, _main_grad.Delayed) for sink in sinks):
        raise ArgumentError(
            "main_grad_of: weight gradients in FP8 cannot be delayed; give the parameter itself, or None."
        )
    return function(call._replace(targets=tuple(_main_grad.targets(bs, sinks))), a, bs, *rest)
