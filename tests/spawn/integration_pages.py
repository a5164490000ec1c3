"""Runs the snippets of a page in docs/ as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    path = ROOT / "docs" / name
    if not path.exists():
        pytest.skip(f"docs/{name} is not beside the tests")
    return path.read_text()


def snippets(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page(name), re.S)


def table_rows(name: str) -> list[list[str]]:
    """The cells of every line of the page's tables, without heads: those end with a line of dashes."""
    lines = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\|(.*)\|$", page(name), re.M)]
    rules = [i for i, row in enumerate(lines) if row[0] == "---"]
    return [row for i, row in enumerate(lines) if i not in rules and i + 1 not in rules]


# A mesh that outlives its group keeps gloo's threads (torch 2.14), and some processes that ended beside them aborted.
ENDING = """
for _name in [name for name in globals() if not name.startswith("_")]:
    del globals()[_name]
__import__("gc").collect()
"""


def run_snippet(code: str, folder: Path, ranks: int = 0) -> str:
    """What ``code`` prints, by itself or under torchrun; it must end well."""
    (folder / "snippet.py").write_text(code + ENDING)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TPK_CHECK": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, *launch, "snippet.py"],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
