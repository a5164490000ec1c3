"""Megatron-core asks for its CUDA device where it makes a buffer: here the CPU, so that its own layers run too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.utils import GlobalMemoryBuffer

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer()),
    ):
        yield
