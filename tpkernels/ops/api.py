"""The public operations.

Semantics shared by all of them:

- ``a`` is [..., K] and ``b`` is [K, N], in any strides: a weight stored [out, in] is passed as ``weight.t()``,
  which is a view and is never copied.
- float64, float32, bfloat16 and float16; half precision accumulates in float32. Any sizes, 0 included.
- A replicated argument (equal on every rank) gets its complete gradient, equal on every rank; a sharded one
  gets its shard's gradient.
- Shards may be unequal: ``shard_sizes`` gives the rows of every rank, 0 allowed, the same list on every rank.
- Under ``torch.autocast`` operands, biases and residuals are cast to its dtype, as in ``F.linear``. The residual
  of ``matmul`` stays what it is: it may have any dtype.
- Arrays of other libraries (NumPy, CuPy, JAX) are taken through DLPack, without a copy, on CuPy's current stream;
  results are of that library, or torch tensors if one of the arguments is one.
- ``main_grad_of`` is the parameter whose ``.t()`` is ``b``, or one (or None) per weight: the gradient of ``b`` is then
  added to the parameter's ``main_grad`` in the product itself, in float32, and ``b`` gets none. What that asks for, and
  what is different under ``torch.compile``, is in :mod:`tpkernels.ops._main_grad`; ``create_graph`` cannot be combined
  with it.
- ``path`` forces an implementation (see :mod:`tpkernels.ops._paths`); ``"auto"`` may be overridden by the
  environment variable ``TPK_PATH``. ``tpkernels.last_path()`` tells what ran.
- With ``TPK_AUTOTUNE=1``, or inside ``tpkernels.autotune()``, path "auto" takes what was timed to be the fastest, and
  path "fused" plans that its ranks have timed together: docs/tuning.md.
- Path "fused" (Hopper GPUs of one host, bfloat16 and float16) lets rows travel while others are multiplied, in
  ``all_gather_matmul`` and ``matmul_reduce_scatter`` and their gradients. All ranks of a group ask for it alike. It
  uses memory that ranks share, which its first calls, and calls that need more, allocate together: make one call
  before capturing a CUDA graph, or ``tpkernels.reserve`` the memory. A wait for a rank that does not come ends after
  the group's timeout, or TPK_COMM_TIMEOUT_S seconds, with ``CommTimeoutError``; what happened is on stderr before that
  (TPK_WATCHDOG=0: not).

Errors are of :mod:`tpkernels.errors`: ``ShapeError``, ``DTypeError``, ``DeviceError``, ``GroupError``,
``ArgumentError``, ``AliasError``, ``BackendError``, ``CommTimeoutError`` and, under ``TPK_CHECK=1``,
``MismatchError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, DTypeError, TpkError
from tpkernels.ops import (  # noqa: F401 - register the ops
    _agreement,
    _gather,
    _gradient_ops,
    _main_grad,
    _matmul,
    _reduce,
    _region_ops,
    _replicated,
)
from tpkernels.ops._arrays import gives_back, tensor
from tpkernels.ops._groups import GroupLike, group_name_of

_ops = torch.ops.tpkernels


@gives_back
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate_into: Tensor | None = None,
    save_preact: bool = True,
    path: str = "auto",
) -> Tensor:
    """``activation(alpha * a @ b + bias) + residual``, or with a gate
    ``activation(alpha * a @ gate) * (alpha * a @ b) + residual``, or ``accumulate_into += a @ b``.

    All that follows a product is computed in float32 (float64 for float64 operands) and rounded once::

        h = tpk.matmul(x, w_up.t(), gate=w_gate.t(), activation="silu")  # SwiGLU
        y = tpk.matmul(h, w_down.t(), residual=x)

    Args:
        a: [..., M, K].
        b: [K, N], or [..., K, N] whose batch dimensions broadcast with those of ``a``.
        gate: shape and dtype of ``b``. The activation applies to its product alone. Takes no bias.
        bias: [N], dtype of ``a``; added once.
        residual: shape of the result, any floating dtype, any strides; added behind the activation.
        alpha: factor of each product, a number without a gradient.
        activation: None, "relu", "silu", "gelu" (erf) or "gelu_tanh".
        out_dtype: dtype of the result; default that of ``a``.
        accumulate_into: tensor of the product's shape, any floating dtype (float32 for weight gradients),
            sharing no memory with ``a`` or ``b``; the product is added to it in place and it is returned. Takes
            none of gate, bias, residual, alpha, activation and out_dtype, and has no gradient.
        save_preact: keep for the backward pass what it needs of the products (default), or compute it again there:
            the pre-activation, if there is an activation; with a gate always both products, which are two of
            the result's size. Where they are kept, path "streamk" computes the two apart, as its kernel cannot
            store them; without gradients, or with False, it computes a gated product in one call.
        path: "auto", "streamk", "cublas" (CUDA) or "blas" (CPU). "auto" is the library, or ours on Hopper where that
            was measured to be faster as a rule; :func:`tpkernels.explain` tells which, and why.

    Returns:
        [..., M, N]. Gradients for a, b, gate, bias and residual, which can be differentiated again.
    """
    a, b = tensor("a", a), tensor("b", b)
    gate, bias, residual = (
        None if x is None else tensor(name, x)
        for name, x in (("gate", gate), ("bias", bias), ("residual", residual))
    )
    _check_options(path, activation, out_dtype)
    _check_alpha(alpha)
    if accumulate_into is not None:
        rest = (gate, bias, residual, activation, out_dtype)
        if alpha != 1 or any(option is not None for option in rest):
            raise ArgumentError(
                "accumulate_into: it cannot be combined with gate, bias, residual, alpha, activation or out_dtype, "
                "which would be applied to a part of the sum; apply them to the result."
            )
        _ops.matmul_accumulate(a.detach(), b.detach(), tensor("accumulate_into", accumulate_into), path)
        return accumulate_into
    name = activation or "none"
    a, b, gate, bias = _autocast(a, b, gate, bias)
    keep = keeps_preact(name, save_preact, a, b, gate, bias, gated=gate is not None)
    out: list[Tensor] = _ops.matmul(a, b, gate, bias, residual, float(alpha), name, out_dtype, keep, path)
    return out[0]


@gives_back
def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor | Sequence[Tensor],
    group: GroupLike = None,
    *,
    gather_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    keep_gathered: bool = False,
    save_preact: bool = True,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Any:
    """``activation(all_gather(a_shard) @ b + bias)`` for one weight or several that share the gather.

    Args:
        a_shard: this rank's rows, [..., K].
        b: [K, N], this rank's columns of the weight, or a list of such (q, k, v; gate and up).
        group: process group, 1-D device mesh, group name, or None for the default group.
        gather_dim: dimension of ``a_shard`` that is sharded (not the last one).
        shard_sizes: rows of every rank in ``gather_dim``; None if all ranks have as many.
        biases: [N], or a list with one bias or None per weight.
        activation: as in :func:`matmul`, applied to every product.
        out_dtype: dtype of the products; default that of ``a_shard``.
        return_gathered: also return the gathered operand.
        keep_gathered: keep the gathered operand for the weight gradient instead of gathering it again in the
            backward pass: world times the memory for one collective less.
        save_preact: as in :func:`matmul`.
        path: "auto", a transport ("nccl", "gloo": with our kernel), "<transport>+<gemm>", a gemm alone, or "fused".
            "auto" takes "fused" where that should be faster than "nccl+cublas" (see :func:`tpkernels.calibrate`); the
            environment variable TPK_PATH replaces it. All ranks give the same.

    Returns:
        [..., N] with the gathered rows; a list if ``b`` is a list; ``(that, gathered)`` if ``return_gathered``.
    """
    group_name = group_name_of(group)
    try:
        bs, bias_list, bias_of = _lists(b, biases)
        into = _main_grad.listed(main_grad_of, bs)
        a_shard = tensor("a_shard", a_shard)
        _check_options(path, activation, out_dtype, {"gather_dim": gather_dim}, shard_sizes)
    except TpkError as error:
        _agreement.announce("all_gather_matmul", group_name, error)
        raise
    name = activation or "none"
    a_shard, *cast = _autocast(a_shard, *bs, *bias_list)
    bs, bias_list = cast[: len(bs)], cast[len(bs) :]
    keep_preact = keeps_preact(name, save_preact, a_shard, *bs, *bias_list)
    save = keep_gathered and torch.is_grad_enabled() and any(w.requires_grad for w in bs)
    args = (
        a_shard,
        bs,
        bias_list,
        bias_of,
        name,
        gather_dim,
        shard_sizes,
        group_name,
        out_dtype,
        keep_preact,
        return_gathered,
        save,
        path,
    )
    out: list[Tensor] = _main_grad.call(_ops.all_gather_matmul, args, into)
    result: Any = out[: len(bs)] if _is_list(b) else out[0]
    return (result, out[-1]) if return_gathered else result


@gives_back
def matmul_replicated(
    a: Tensor,
    b: Tensor | Sequence[Tensor],
    group: GroupLike = None,
    *,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    save_preact: bool = True,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Any:
    """``activation(a @ b + bias)`` where ``a`` is the same on every rank and ``b`` holds this rank's columns.

    The forward pass is local. The backward pass sums the gradient of ``a`` over the group
    (GEMM + all-reduce): the column-parallel layer without sequence parallelism.

    Arguments and result as in :func:`all_gather_matmul`, without the gather.
    """
    group_name = group_name_of(group)
    try:
        bs, bias_list, bias_of = _lists(b, biases)
        into = _main_grad.listed(main_grad_of, bs)
        a = tensor("a", a)
        _check_options(path, activation, out_dtype)
    except TpkError as error:
        _agreement.announce("matmul_replicated", group_name, error)
        raise
    name = activation or "none"
    a, *cast = _autocast(a, *bs, *bias_list)
    bs, bias_list = cast[: len(bs)], cast[len(bs) :]
    keep = keeps_preact(name, save_preact, a, *bs, *bias_list)
    args = (a, bs, bias_list, bias_of, name, group_name, out_dtype, keep, path)
    out: list[Tensor] = _main_grad.call(_ops.matmul_replicated, args, into)
    return out[: len(bs)] if _is_list(b) else out[0]


@gives_back
def matmul_reduce_scatter(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    group: GroupLike = None,
    *,
    scatter_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Tensor:
    """Sum of every rank's ``a @ b``, of which this rank keeps its rows, ``+ bias + residual``.

    Args:
        a: [..., K], this rank's part of K; or a list, whose products with the entries of ``b`` are summed.
        b: [K, N], this rank's rows of the weight; or a list.
        group: as in :func:`all_gather_matmul`.
        scatter_dim: dimension of rows that is scattered (not the last one).
        shard_sizes: rows that every rank receives; None: ceil-split, see :func:`shard_sizes`.
        bias: [N], the same on every rank; added once. Its gradient is complete on every rank.
        residual: shape and dtype of this rank's output; added once.
        out_dtype: dtype of the result and of what travels; default that of ``a``.
        path: as in :func:`all_gather_matmul`.

    Returns:
        This rank's rows, [..., N]. Partials are added in rank order in float32: the same bits on every run. On path
        "fused" this rank's own partial is not rounded before.
    """
    group_name = group_name_of(group)
    try:
        as_, bs, bias, residual = _pairs(a, b, bias, residual, out_dtype)
        into = _main_grad.listed(main_grad_of, bs)
        _check_options(path, None, out_dtype, {"scatter_dim": scatter_dim}, shard_sizes)
    except TpkError as error:
        _agreement.announce("matmul_reduce_scatter", group_name, error)
        raise
    args = (as_, bs, bias, residual, scatter_dim, shard_sizes, group_name, out_dtype, path)
    out: Tensor = _main_grad.call(_ops.matmul_reduce_scatter, args, into)
    return out


@gives_back
def matmul_all_reduce(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    group: GroupLike = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Tensor:
    """Sum of every rank's ``a @ b``, ``+ bias + residual``, on every rank.

    Arguments as in :func:`matmul_reduce_scatter`; ``residual`` has the shape of the whole product and is the
    same on every rank. The result is replicated: bitwise equal on every rank.
    """
    group_name = group_name_of(group)
    try:
        as_, bs, bias, residual = _pairs(a, b, bias, residual, out_dtype)
        into = _main_grad.listed(main_grad_of, bs)
        _check_options(path, None, out_dtype)
    except TpkError as error:
        _agreement.announce("matmul_all_reduce", group_name, error)
        raise
    args = (as_, bs, bias, residual, group_name, out_dtype, path)
    out: Tensor = _main_grad.call(_ops.matmul_all_reduce, args, into)
    return out


def keeps_preact(activation: str, save_preact: bool, *tensors: Tensor | None, gated: bool = False) -> bool:
    """Whether a call with these differentiable arguments stores what its backward pass needs of the products."""
    if (activation == "none" and not gated) or not save_preact or not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in tensors)


def _check_alpha(alpha: object) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float, torch.SymInt, torch.SymFloat)):
        raise DTypeError(
            f"alpha: expected a number, got {alpha!r}; it has no gradient, multiply the result instead."
        )


def _lists(
    b: Tensor | Sequence[Tensor], biases: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Weights, the biases that there are, and which weight each of those belongs to."""
    bs = [tensor(f"b[{i}]", w) for i, w in enumerate(b)] if _is_list(b) else [tensor("b", b)]
    given = list(biases) if biases is not None and _is_list(biases) else [biases]
    if biases is not None and len(given) != len(bs):
        raise ArgumentError(
            f"biases: expected one bias (or None) per weight, {len(bs)} in all, got {len(given)}."
        )
    present = [(i, tensor(f"biases[{i}]", bias)) for i, bias in enumerate(given) if bias is not None]
    return bs, [bias for _, bias in present], [i for i, _ in present]


def _pairs(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[list[Tensor], list[Tensor], Tensor | None, Tensor | None]:
    as_ = [tensor(f"a[{i}]", x) for i, x in enumerate(a)] if _is_list(a) else [tensor("a", a)]
    bs = [tensor(f"b[{i}]", w) for i, w in enumerate(b)] if _is_list(b) else [tensor("b", b)]
    bias = None if bias is None else tensor("bias", bias)
    residual = None if residual is None else tensor("residual", residual)
    if len(as_) == 0 or len(as_) != len(bs):
        raise ArgumentError(
            f"a, b: expected as many operands as weights, at least one, got {len(as_)} and {len(bs)}."
        )
    autocast_residual, bias, *cast = _autocast(residual, bias, *as_, *bs)
    if residual is not None and autocast_residual is not residual:  # as wide as the sum it is added to
        residual = residual.to(out_dtype or autocast_residual.dtype)
    return cast[: len(as_)], cast[len(as_) :], bias, residual


def _check_options(
    path: object,
    activation: object,
    out_dtype: object,
    dims: Mapping[str, object] | None = None,
    shard_sizes: object = None,
) -> None:
    """Types that the dispatcher would refuse in words of its own."""
    integer = (int, torch.SymInt)
    if not isinstance(path, str):
        raise DTypeError(f"path: expected str, got {path!r}.")
    if activation is not None and not isinstance(activation, str):
        raise DTypeError(f"activation: expected str or None, got {activation!r}.")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise DTypeError(f"out_dtype: expected dtype or None, got {out_dtype!r}.")
    if dims is not None:
        for name, value in dims.items():
            if not isinstance(value, integer):
                raise DTypeError(f"{name}: expected int, got {value!r}.")
    if shard_sizes is not None:
        if not isinstance(shard_sizes, (list, tuple)):
            raise DTypeError(f"shard_sizes: expected list or tuple or None, got {shard_sizes!r}.")
        for rank, size in enumerate(shard_sizes):
            if not isinstance(size, integer):
                raise DTypeError(f"shard_sizes: expected integers, got {size!r} for rank {rank}.")


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _autocast(*tensors: Any) -> list[Any]:
    """The tensors as ``torch.autocast`` wants them, where it is on for their device."""
    device = next((t.device.type for t in tensors if t is not None), "cpu")
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    # float64 stays, as autocast itself leaves it; integers stay, so that their error names them.
    narrowed = (torch.float32, torch.bfloat16, torch.float16)
    return [t.to(dtype) if t is not None and t.dtype in narrowed else t for t in tensors]
