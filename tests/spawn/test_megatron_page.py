"""The pages for users of Megatron-core and of TransformerEngine run as they stand."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from integration_pages import run_snippet, snippets, table_rows

import tpkernels as tpk
from tpkernels import nn as tnn
from tpkernels.nn._linear import ParallelLinear


def test_the_page_of_megatron(tmp_path: Path) -> None:
    pytest.importorskip(
        "megatron.core.tensor_parallel", reason="needs megatron-core 0.16 (extra: integrations)"
    )
    first, second = snippets("megatron.md")
    # Megatron's attention makes its buffers there.
    cpu = 'import torch\n\ntorch.cuda.current_device = lambda: torch.device("cpu")\n'
    out = run_snippet(cpu + first, tmp_path, ranks=2)
    for op in ("matmul_replicated", "matmul_all_reduce", "all_gather"):  # the last one is the loss's
        assert f"{op}: " in out, out
    run_snippet(second, tmp_path)


def test_the_page_of_transformer_engine(tmp_path: Path) -> None:
    (only,) = snippets("transformer-engine.md")
    run_snippet(only, tmp_path, ranks=2)


def test_what_the_flags_become_exists() -> None:
    arguments: set[str] = set()
    for made in (ParallelLinear, tnn.ColumnParallelLinear, tnn.RowParallelLinear):
        arguments |= set(inspect.signature(made.__init__).parameters)
    rows = table_rows("transformer-engine.md")
    assert len(rows) > 20
    for _, ours, why in rows:
        for name in re.findall(r"`(\w+)=?(?:\(\))?`", ours):
            found = name in arguments or hasattr(tnn, name) or hasattr(tnn.RowParallelLinear, name)
            assert found, f"tpkernels.nn has no {name}"
        for name in re.findall(r"`tpk\.(\w+)`", why):
            assert hasattr(tpk, name), name
