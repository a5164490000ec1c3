"""Whether gathers and reduce-scatters of few rows take the kernel of their own in a test of path "fused"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tpkernels.comm import small


@contextmanager
def overlaps() -> Iterator[None]:
    """Gathers and reduce-scatters of few rows overlap, as those of many do. Also around a function."""
    usual = dict(small.MOST_BYTES)
    small.MOST_BYTES.update({"all_gather_matmul": 0, "matmul_reduce_scatter": 0})
    try:
        yield
    finally:
        small.MOST_BYTES.update(usual)


def few_rows_overlap() -> bool:
    return small.MOST_BYTES["all_gather_matmul"] == 0


def path_of_few_rows(ctx: Any) -> str:
    """What path "fused" is called there."""
    behind = "cublas" if ctx.device.type == "cuda" else "blas"
    return "fused+streamk" if few_rows_overlap() else f"fused+{behind}"
