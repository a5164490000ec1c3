"""How many GPUs the tests of path "fused" have, a rank on each, and whether these can run it."""

from __future__ import annotations

import pytest
import torch

from tpkernels import _extensions

COUNT = torch.cuda.device_count()
WORLDS = list(range(2, COUNT + 1)) or [2]
ENDS = sorted({2, WORLDS[-1]})


def _why_not(extension: str) -> str:
    if COUNT < 2:
        return ""  # the marker gpun says so
    if any(torch.cuda.get_device_capability(i) != (9, 0) for i in range(COUNT)):
        return "path 'fused' needs compute capability 9.0"
    missing = _extensions.why_not(extension)
    return f"{extension} is not loaded: {missing}" if missing else ""


def hopper_gpus(extension: str = "_C_sm90a") -> list[pytest.MarkDecorator]:
    """Marks of a module's tests; ``extension``: what of tpkernels has to be loaded."""
    reason = _why_not(extension)
    return [pytest.mark.gpun, pytest.mark.skipif(bool(reason), reason=reason or "-")]
