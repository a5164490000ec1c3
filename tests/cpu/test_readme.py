"""The example of the README runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.report.readme import check_readme

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="README.md is not beside the tests")
def test_the_example_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 1, "a second example needs a second test"
    (tmp_path / "example.py").write_text(blocks[0])
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "example.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TPK_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "matmul_reduce_scatter: gloo+" in result.stdout


def test_the_tables_are_what_was_measured():
    assert check_readme(ROOT / "README.md") == []
    assert check_readme(ROOT / "bench/README.md") == []
    assert check_readme(ROOT / "docs/measured.md") == []
    assert check_readme(ROOT / "docs/grouped.md") == []
