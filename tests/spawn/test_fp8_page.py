"""The snippets of docs/fp8.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_pages import run_snippet
from pages import snippets


@pytest.mark.parametrize("index", [0, 1])
def test_alone(index: int, tmp_path: Path) -> None:
    printed = run_snippet(snippets("fp8.md")[index], tmp_path)
    assert index == 0 or "scaled_matmul: path blas" in printed


def test_on_two_ranks(tmp_path: Path) -> None:
    (code,) = snippets("fp8.md", "python torchrun")
    assert "scaled_matmul: blas" in run_snippet(code, tmp_path, ranks=2)
