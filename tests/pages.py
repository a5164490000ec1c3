"""Snippets of the documentation's pages, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def snippets(page: str, kind: str = "python") -> list[str]:
    """Code of the page's blocks that begin with ```kind, in order; "": output. Skips where there are no pages."""
    if not (DOCS / page).exists():
        pytest.skip(f"docs/{page} is not beside the tests")
    blocks = re.findall(r"^```(.*?)\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    found = [text for of, text in blocks if of == kind]
    assert found, f"docs/{page} has no block of {kind}"
    return found
