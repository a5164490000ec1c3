"""Registers Python implementations, fakes and gradients for the schemas that ``_C`` defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpkernels import _extensions

_extensions.load_all()
_library = torch.library.Library("tpkernels", "IMPL")


def register(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Give op ``tpkernels::name`` its implementation (CPU and CUDA), its fake and, if it has one, its gradient."""
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"tpkernels::{name}", fake)
    if backward is not None:
        torch.library.register_autograd(f"tpkernels::{name}", backward, setup_context=setup_context)
