"""Poison: NaN-filled outputs and strided views inside canary buffers, to see what an op leaves out or writes beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_CANARY_BYTE = 0xA5


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill in place with NaN (integers: the largest value; bool: True) and return it."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(math.nan)
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same shape, dtype, device and strides (if dense), filled with NaN."""
    return poison_(torch.empty_like(tensor, requires_grad=False))


@dataclass(frozen=True)
class Canary:
    """``tensor`` is a view into ``buffer`` [bytes, uint8]; bytes where ``owned`` is False are the canary."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    owned: torch.Tensor

    def check(self, name: str = "tensor") -> None:
        """AssertionError if a byte beside the view's elements changed."""
        check_canary(self, name)


def canary_view(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    order: Sequence[int] | None = None,
    pad: int = 7,
    offset: int = 3,
    step: int = 1,
) -> Canary:
    """A NaN-filled strided view of ``shape`` inside a larger buffer whose other bytes are a known pattern.

    Args:
        order: dims from slowest to fastest in memory; None: row major. [1, 0] makes a column-major matrix.
        pad: unused elements after each run of the fastest dim, so that the leading dimension is odd.
        offset: elements before the first one; 3 breaks the 16-byte alignment that vector loads want.
        step: stride of the fastest dim in elements.

    Raises:
        ValueError: order is not a permutation of the dims, or pad, offset, step are out of range.
    """
    dims = list(range(len(shape))) if order is None else [d % len(shape) for d in order]
    if sorted(dims) != list(range(len(shape))):
        raise ValueError(f"order must list each of the {len(shape)} dims once, got {order}")
    if pad < 0 or offset < 0 or step < 1:
        raise ValueError(
            f"pad and offset must be at least 0 and step at least 1, got {pad}, {offset}, {step}"
        )
    strides, pitch = [0] * len(shape), step
    for position, dim in enumerate(reversed(dims)):
        strides[dim] = pitch
        pitch = pitch * max(shape[dim], 1) + (pad if position == 0 else 0)
    itemsize = torch.empty((), dtype=dtype).element_size()
    elements = offset + pitch + max(pad, 16)
    buffer = torch.full((elements * itemsize,), _CANARY_BYTE, dtype=torch.uint8, device=device)
    tensor = poison_(buffer.view(dtype).as_strided(tuple(shape), strides, offset))
    owned = torch.zeros(elements, dtype=torch.bool, device=device)
    owned.as_strided(tuple(shape), strides, offset).fill_(True)
    return Canary(tensor, buffer, owned.repeat_interleave(itemsize))


def canary_copy(
    values: torch.Tensor, *, order: Sequence[int] | None = None, pad: int = 7, offset: int = 3, step: int = 1
) -> Canary:
    """``values`` copied into a canary view of its shape, dtype and device: awkward strides and alignment."""
    canary = canary_view(
        values.shape, values.dtype, values.device, order=order, pad=pad, offset=offset, step=step
    )
    canary.tensor.copy_(values.detach())
    return canary


def check_canary(canary: Canary, name: str = "tensor") -> None:
    """AssertionError naming how many bytes beside the view's elements changed, and where."""
    changed = (canary.buffer != _CANARY_BYTE) & ~canary.owned
    count = int(changed.sum())
    if count == 0:
        return
    size = canary.tensor.element_size()
    first, last = (int(changed.nonzero()[i, 0]) // size - canary.tensor.storage_offset() for i in (0, -1))
    raise AssertionError(
        f"{name} of shape {tuple(canary.tensor.shape)} and strides {canary.tensor.stride()}: {count} bytes beside its "
        f"elements were overwritten, from element offset {first} to {last} counted from its first element"
    )
