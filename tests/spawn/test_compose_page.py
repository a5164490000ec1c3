"""The snippet of docs/compose.md; what its table names has tests of its own."""

from __future__ import annotations

import re
from pathlib import Path

from integration_pages import page, run_snippet
from pages import snippets

ROOT = Path(__file__).resolve().parents[2]


def test_the_snippet(tmp_path: Path) -> None:
    (code,) = snippets("compose.md", "python torchrun")
    run_snippet(code, tmp_path, ranks=2)


def test_the_tests_in_the_table_exist() -> None:
    named = set(re.findall(r"`((?:tests|examples)/[\w/.]+)`", page("compose.md")))
    assert named and all((ROOT / name).exists() for name in named), named
