"""Arrays of other libraries as torch tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from tpkernels.errors import ArgumentError, DTypeError


def tensor(name: str, value: Any) -> Tensor:
    """A dense torch tensor: itself, or a view of any array that speaks DLPack (CuPy, NumPy, JAX)."""
    if not isinstance(value, Tensor):
        if not hasattr(value, "__dlpack__"):
            raise DTypeError(
                f"{name}: expected a torch.Tensor or an array with DLPack support, got {type(value).__name__}."
            )
        strides = getattr(value, "strides", None)
        try:
            if isinstance(strides, tuple) and any(stride < 0 for stride in strides):
                raise BufferError("it has negative strides")  # torch 2.11 would abort the process
            value = torch.utils.dlpack.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:  # negative strides, byte order, objects
            raise DTypeError(
                f"{name}: the {type(value).__name__} cannot be shared through DLPack "
                f"({str(error).splitlines()[0]}); pass a contiguous copy in native byte order."
            ) from error
    out: Tensor = value
    if out.layout != torch.strided:
        raise ArgumentError(
            f"{name}: expected a dense (strided) tensor, got layout {out.layout}; call .to_dense()."
        )
    return out
