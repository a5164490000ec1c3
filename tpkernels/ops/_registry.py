"""Registers Python implementations, fakes and gradients for the schemas that ``_C`` defines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tpkernels import _extensions
from tpkernels.ops import _nvtx
from tpkernels.ops._autograd import autograd_kernel

_extensions.load_all()
_library = torch.library.Library("tpkernels", "IMPL")
_implementations: dict[str, dict[str, Callable[..., Any]]] = {}


def register(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Give op ``tpkernels::name`` its implementation (CPU and CUDA), its fake and, if it has one, its gradient.

    ``setup_context`` and ``backward``: see :func:`~tpkernels.ops._autograd.autograd_kernel`.
    """
    wrapped = {key: _wrapped(name, implementation, key.lower()) for key in ("CPU", "CUDA")}
    for key, function in wrapped.items():
        _library.impl(name, function, key)
    _implementations[name] = {key.lower(): function for key, function in wrapped.items()}
    torch.library.register_fake(f"tpkernels::{name}", fake)
    if backward is not None and setup_context is not None:
        kernel = autograd_kernel(name, backward, setup_context, wrapped)
        _library.impl(name, kernel, "Autograd", with_keyset=True)


def below(name: str, device: torch.device) -> Callable[..., Any]:
    """The implementation of op ``tpkernels::name``, for those of others: for them the dispatcher has nothing to do."""
    return _implementations[name][device.type]


def _wrapped(name: str, implementation: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The implementation in its profiler range and without autocast.

    Autocast chose the operands' dtypes before; inside it would round float32 sums to half precision.
    """

    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _nvtx.active() and not torch.is_autocast_enabled(device):
            return implementation(*args, **kwargs)
        with _nvtx.op(name, args):
            if not torch.is_autocast_enabled(device):
                return implementation(*args, **kwargs)
            with torch.autocast(device, enabled=False):
                return implementation(*args, **kwargs)

    return run
