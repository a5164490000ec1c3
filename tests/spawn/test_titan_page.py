"""The page for users of torchtitan runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_pages import run_snippet, snippets, table_rows

pytest.importorskip(
    "torchtitan.models.common.dist_gemm", reason="needs torchtitan 0.3 or newer (docs/torchtitan.md)"
)


def test_the_snippets_run(tmp_path: Path) -> None:
    first, second = snippets("torchtitan.md")
    # It makes meshes for CUDA where there is no device.
    cpu = 'from torchtitan.distributed import parallel_dims\n\nparallel_dims.device_type = "cpu"\n'
    out = run_snippet(cpu + first, tmp_path, ranks=2)
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert f"{op}: gloo" in out, out
    run_snippet(second, tmp_path)


def test_the_table_names_what_is_replaced() -> None:
    from tpkernels.integrations import titan

    told = {theirs.split("`")[1] for theirs, _ in table_rows("torchtitan.md")}
    assert told | {"enable"} == set(titan.__all__)
