"""Checks of tensor contents, where they are cheap or asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from zlib import crc32

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tpkernels.errors import ArgumentError, DTypeError
from tpkernels.ops import _agreement
from tpkernels.ops._groups import resolve

__all__ = ["agreed", "check_counts_from_front", "check_indices", "digest"]


def check_counts_from_front(sequence_dim: int) -> None:
    """ArgumentError for a negative ``sequence_dim``: x has a feature dimension that ids do not have."""
    if sequence_dim < 0:
        raise ArgumentError(
            f"sequence_dim: it counts from the front and must be 0 or more, but it is {sequence_dim}; "
            "take 0 for [sequence, batch, features] and 1 for [batch, sequence, features]."
        )


def agreed(
    where: str,
    group_name: str,
    sample: Tensor,
    check: Callable[[], None],
    facts: Callable[[], Mapping[str, object]] = dict,
) -> None:
    """Runs ``check``; under ``TPK_CHECK=1`` what it raises on one rank becomes an error on every rank.

    A layer that raises before its operation would otherwise leave the other ranks in that operation for ever.
    ``facts`` must be equal on all ranks, and are looked at under ``TPK_CHECK=1`` only. In a compiled graph, and of
    tensors without values, ``check`` is all that happens. Give the group's name, and ``sample`` for its device.
    """
    if torch.compiler.is_compiling() or not _agreement.enabled():
        check()
        return
    if sample.is_meta or isinstance(sample, FakeTensor):
        check()
        return

    def validate() -> bool:
        check()
        return True

    _agreement.validated(where, resolve(group_name), sample, validate, lambda _: facts())


def digest(indices: Tensor) -> int:
    """A checksum of integers, whatever their type; waits for the device."""
    return crc32(indices.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())


def check_indices(indices: Tensor, count: int, argument: str, ignore: int | None = None) -> None:
    """ArgumentError where ``indices`` is not in [0, count) nor ``ignore``; DTypeError unless int64 or int32.

    Values are looked at on the CPU always, on a GPU only under ``TPK_CHECK=1``, since it waits for the
    device; never in a compiled graph, nor of a tensor without values.
    """
    if indices.dtype not in (torch.int64, torch.int32):
        raise DTypeError(f"{argument}: indices must be int64 or int32, but they are {indices.dtype}.")
    if torch.compiler.is_compiling() or indices.is_meta or indices.numel() == 0:
        return
    if indices.device.type != "cpu" and (not _agreement.enabled() or _agreement._capturing(indices)):
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
