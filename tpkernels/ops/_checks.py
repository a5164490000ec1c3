"""Checks of arguments, shared by implementations and fakes: no operation starts with a bad argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.errors import AliasError, ArgumentError, DeviceError, DTypeError, ShapeError
from tpkernels.ops._activation import ACTIVATIONS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPE_NAMES = "float64, float32, bfloat16 or float16"


def check_operand(name: str, x: Tensor, min_dim: int = 2) -> None:
    """A floating point tensor with at least ``min_dim`` dimensions, on a device that we serve."""
    if x.dtype not in DTYPES:
        raise DTypeError(
            f"{name}: expected dtype {_DTYPE_NAMES}, got {_short(x.dtype)}; convert it, "
            f"for example {name}.to(torch.bfloat16)."
        )
    if x.dim() < min_dim:
        raise ShapeError(f"{name}: expected at least {min_dim} dimensions, got shape {_shape(x)}.")


def check_like(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Same dtype and device as another tensor."""
    if x.dtype != like.dtype:
        raise DTypeError(
            f"{name}: expected dtype {_short(like.dtype)} as in {like_name}, "
            f"got {_short(x.dtype)}; convert one of them."
        )
    if x.device != like.device:
        raise DeviceError(
            f"{name}: expected device {like.device} as in {like_name}, got {x.device}; move one of them."
        )


def check_product(a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    """``a`` [..., M, K] times ``b`` [K, N], or a batched ``b`` [..., K, N] that broadcasts with ``a``."""
    check_operand(a_name, a)
    check_operand(b_name, b)
    check_like(b_name, b, a_name, a)
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"{b_name}: expected {a.shape[-1]} rows (K, the last dimension of {a_name} {_shape(a)}), "
            f"got {b.shape[-2]} in {b_name} {_shape(b)}; weights stored [out, in] are passed as weight.t()."
        )
    if b.dim() > 2:
        try:
            torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError as error:
            raise ShapeError(
                f"{b_name}: batch dimensions {list(b.shape[:-2])} do not broadcast with "
                f"{list(a.shape[:-2])} of {a_name}."
            ) from error


def check_weight(name: str, b: Tensor) -> None:
    """Distributed operations take weights of two dimensions."""
    if b.dim() != 2:
        raise ShapeError(f"{name}: expected 2 dimensions [K, N], got shape {_shape(b)}.")


def check_bias(name: str, bias: Tensor | None, n: int, like_name: str, like: Tensor) -> None:
    if bias is None:
        return
    check_operand(name, bias, min_dim=1)
    check_like(name, bias, like_name, like)
    if bias.dim() != 1 or bias.shape[0] != n:
        raise ShapeError(f"{name}: expected shape [{n}] (one value per output column), got {_shape(bias)}.")


def check_gate(gate: Tensor | None, b: Tensor, bias: Tensor | None, a: Tensor) -> None:
    """A second factor with the shape of ``b``, without a bias."""
    if gate is None:
        return
    check_product("a", a, "gate", gate)
    if gate.shape != b.shape:
        raise ShapeError(f"gate: expected the shape of b, {_shape(b)}, got {_shape(gate)}.")
    if bias is not None:
        raise ArgumentError(
            "bias: expected None where there is a gate, as it is not defined which of the two products it belongs to; "
            "compute the two products apart."
        )


def check_addend(name: str, x: Tensor | None, shape: Sequence[int], like: Tensor) -> None:
    """What is added to an output of that shape: any floating dtype."""
    if x is None:
        return
    check_operand(name, x)
    if list(x.shape) != list(shape):
        raise ShapeError(f"{name}: expected the output's shape {list(shape)}, got {_shape(x)}; expand it.")
    if x.device != like.device:
        raise DeviceError(f"{name}: expected device {like.device} as in a, got {x.device}; move it.")


def check_residual(residual: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> None:
    if residual is None:
        return
    check_operand("residual", residual)
    if list(residual.shape) != list(shape):
        raise ShapeError(
            f"residual: expected the shape of this rank's output, {list(shape)}, got {_shape(residual)}."
        )
    if residual.dtype != dtype:
        raise DTypeError(
            f"residual: expected the output's dtype {_short(dtype)}, got {_short(residual.dtype)}; convert it."
        )
    if residual.device != like.device:
        raise DeviceError(f"residual: expected device {like.device} as in a, got {residual.device}; move it.")


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ArgumentError(
            f"activation: expected one of {', '.join(ACTIVATIONS)} (or None), got {activation!r}."
        )


def check_out_dtype(out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The output's dtype: as asked, or the operands' own."""
    if out_dtype is None:
        return dtype
    if out_dtype not in DTYPES:
        raise DTypeError(f"out_dtype: expected {_DTYPE_NAMES}, got {_short(out_dtype)}.")
    return out_dtype


def check_dim(name: str, dim: int, x_name: str, x: Tensor) -> int:
    """A dimension of the rows of ``x`` (all but the last one), counted from 0."""
    if not -x.dim() <= dim < x.dim():
        raise ArgumentError(
            f"{name}: expected a dimension of {x_name} {_shape(x)}, {-x.dim()} to {x.dim() - 1}, got {dim}."
        )
    dim %= x.dim()
    if dim == x.dim() - 1:
        raise ArgumentError(
            f"{name}: expected a dimension of rows, 0 to {x.dim() - 2}, got {dim}, which is K of {x_name} {_shape(x)}."
        )
    return dim


def check_no_overlap(name: str, written: Tensor, read: Sequence[tuple[str, Tensor]]) -> None:
    """The tensor that is written must share no element with itself or with one that is read."""
    if written.numel() == 0:
        return
    reach = 0
    for stride, size in sorted(
        (st, n) for st, n in zip(written.stride(), written.shape, strict=True) if n > 1
    ):
        if stride <= reach:
            raise AliasError(
                f"{name}: expected a tensor whose elements are all distinct, got a view with shape "
                f"{list(written.shape)} and strides {list(written.stride())}, in which several share memory; "
                "pass a contiguous tensor."
            )
        reach += (size - 1) * stride
    for read_name, x in read:
        if _may_share(written, x):
            raise AliasError(
                f"{name}: it shares memory with {read_name}, which is read while {name} is written; "
                "pass separate memory."
            )


def _may_share(x: Tensor, y: Tensor) -> bool:
    """True unless the two tensors provably have no byte in common. By address: views of one NumPy array that came
    through DLPack have storages of their own."""
    if x.numel() == 0 or y.numel() == 0 or x.device != y.device:
        return False
    if x.data_ptr() + _extent(x) <= y.data_ptr() or y.data_ptr() + _extent(y) <= x.data_ptr():
        return False
    return not _separate_columns(x, y)


def _extent(x: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (int(last) + 1) * x.element_size()


def _separate_columns(x: Tensor, y: Tensor) -> bool:
    """Two blocks of columns of one row-major buffer, such as buffer[:, :k] and buffer[:, k:]."""
    if x.dim() != 2 or y.dim() != 2:
        return False
    pitch = x.stride(0) * x.element_size()
    if pitch <= 0 or pitch != y.stride(0) * y.element_size():
        return False
    x_row, y_row = _extent(x[0]), _extent(y[0])
    behind = (y.data_ptr() - x.data_ptr()) % pitch  # from column 0 of x to column 0 of y
    return max(x_row, y_row) <= pitch and behind >= x_row and behind + y_row <= pitch


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
