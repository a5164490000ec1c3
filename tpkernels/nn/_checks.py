"""Checks of tensor contents, where they are cheap or asked for."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, DTypeError

__all__ = ["check_indices"]


def check_indices(indices: Tensor, count: int, argument: str, ignore: int | None = None) -> None:
    """ArgumentError where ``indices`` is not in [0, count) nor ``ignore``; DTypeError unless int64 or int32.

    Values are looked at on the CPU always, on a GPU only under ``TPK_CHECK=1``, since it waits for the
    device; never in a compiled graph, nor of a tensor without values.
    """
    if indices.dtype not in (torch.int64, torch.int32):
        raise DTypeError(f"{argument}: indices must be int64 or int32, but they are {indices.dtype}.")
    if torch.compiler.is_compiling() or indices.is_meta or indices.numel() == 0:
        return
    if indices.device.type != "cpu" and os.environ.get("TPK_CHECK", "0") in ("", "0"):
        return
    if type(indices) is not Tensor:  # a fake or traced tensor has no values
        return
    bad = (indices < 0) | (indices >= count)
    if ignore is not None:
        bad &= indices != ignore
    if bool(bad.any()):
        value = int(indices[bad][0])
        extra = "" if ignore is None else f" or ignore_index {ignore}"
        raise ArgumentError(
            f"{argument}: every index must be from 0 to {count - 1}{extra}, but there is {value}."
        )
