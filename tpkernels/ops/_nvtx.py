"""Named ranges in profiles: one around every op, and inside it one around every phase. On with ``TPK_NVTX=1``.

An op's range tells its operands: ``tpk::all_gather_matmul [4096, 64] x [64, 64] bfloat16``; a phase tells what
carries it out: ``gather nccl``, ``product cublas``, ``sum``. Nsight sees them as NVTX ranges, torch.profiler as
``record_function``. Backward formulas call ops too, so their ranges are of the same kind.

Ranges belong into implementations of ops alone, which torch.compile does not trace: never into fakes, backward
formulas or public functions. Under a CUDA graph they surround the capture; a replay shows kernels without ranges.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_OFF: AbstractContextManager[None] = nullcontext()
_active = os.environ.get("TPK_NVTX", "0") not in ("", "0")  # one global: backward passes run on other threads


def active() -> bool:
    """Whether ranges are emitted: ``TPK_NVTX`` when the package was imported, or :func:`enable`."""
    return _active


@contextmanager
def enable(on: bool = True) -> Iterator[None]:
    """Emit ranges (or none) in every thread of this process inside the ``with`` block."""
    global _active
    before, _active = _active, on
    try:
        yield
    finally:
        _active = before


def op(name: str, args: Sequence[Any]) -> AbstractContextManager[None]:
    """Range around op ``tpkernels::name``, called with ``args``, whose first two are its operands."""
    return _Range(_label(name, args)) if _active else _OFF


def phase(name: str, by: str = "") -> AbstractContextManager[None]:
    """Range around a part of an op: "gather", "product", ...; ``by``: what carries it out ("nccl", "cublas")."""
    return _Range(f"{name} {by}" if by else name) if _active else _OFF


class _Range(AbstractContextManager[None]):
    def __init__(self, name: str) -> None:
        self._name = name
        self._record = torch.profiler.record_function(name)
        self._pushed = False

    def __enter__(self) -> None:
        if _has_nvtx():
            torch.cuda.nvtx.range_push(self._name)
            self._pushed = True
        self._record.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record.__exit__(kind, error, trace)
        if self._pushed:
            torch.cuda.nvtx.range_pop()


@functools.cache
def _has_nvtx() -> bool:
    """A torch without CUDA has the functions, and they raise."""
    try:
        torch.cuda.nvtx.range_push("tpk")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        return False
    return True


def _label(name: str, args: Sequence[Any]) -> str:
    operands = [_tensors(arg) for arg in args[:2]]
    shapes = [" + ".join(str(list(t.shape)) for t in tensors) for tensors in operands if tensors]
    if not shapes:
        return f"tpk::{name}"
    dtype = next(tensors[0].dtype for tensors in operands if tensors)
    return f"tpk::{name} {' x '.join(shapes)} {str(dtype).removeprefix('torch.')}"


def _tensors(arg: object) -> list[Tensor]:
    if isinstance(arg, Tensor):
        return [arg]
    return [t for t in arg if isinstance(t, Tensor)] if isinstance(arg, (list, tuple)) else []
