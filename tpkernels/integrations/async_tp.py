"""torch's async tensor parallelism on our operations.

Under ``torch._inductor.config._micro_pipeline_tp = True`` inductor replaces products beside a collective by
``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``. Compiled code calls those through
the dispatcher, so it is there that :func:`enable_async_tp` puts ours in their place, for CUDA and for the CPU, where
torch has none: programs need not be compiled again, neither on entering the context nor on leaving it.

The layout in memory of what torch's return is part of compiled programs, and is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.ops import _paths, api, regions
from tpkernels.ops._groups import resolve

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
_KEYS = ("CPU", "CUDA")


@dataclass
class AsyncTP:
    """What ran in place of torch's operations while the context was open.

    Attributes:
        counts: calls by (torch's operation, the path of ours that ran), such as
            ``("fused_all_gather_matmul", "fused+streamk")``.
    """

    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def calls(self, op: str) -> int:
        """Calls of ``"fused_all_gather_matmul"`` or ``"fused_matmul_reduce_scatter"``."""
        return sum(n for (name, _), n in self.counts.items() if name == op)

    def __repr__(self) -> str:
        lines = []
        for op in (GATHER, SCATTER):
            paths = ", ".join(
                f"{path} x {n}" for (name, path), n in sorted(self.counts.items()) if name == op
            )
            lines.append(f"symm_mem.{op}: {self.calls(op)} calls{f' ({paths})' if paths else ''}")
        return "\n".join(lines)


_lock = threading.Lock()
_open: list[AsyncTP] = []
_library: torch.library.Library | None = None


@contextmanager
def enable_async_tp() -> Iterator[AsyncTP]:
    """Inside the ``with`` block torch's fused ``symm_mem`` operations run on ours::

        torch._inductor.config._micro_pipeline_tp = True
        step = torch.compile(model)
        with tpk.enable_async_tp() as ran:
            step(x).sum().backward()
        print(ran)

    ``fused_all_gather_matmul`` runs :func:`tpkernels.all_gather_matmul` and ``fused_matmul_reduce_scatter`` runs
    :func:`tpkernels.matmul_reduce_scatter`, by the path that ``auto`` or TPK_PATH takes. Where the last dimension is
    gathered or scattered, a product and a plain collective of ours run. The operations on scaled float8 stay torch's.
    All ranks of a group have to be inside alike. Contexts may be nested; each counts what runs while it is open. It
    holds for the whole process, and is undone on leaving, also by an exception.

    Yields:
        AsyncTP: what ran, counted; print it.
    Raises:
        In the operations: ArgumentError for a reduce_op other than sum and avg, ShapeError for rows that the ranks do
        not divide, and the errors of :mod:`tpkernels.ops.api`.
    """
    report = AsyncTP()
    with _lock:
        _install()
        _open.append(report)
    try:
        yield report
    finally:
        with _lock:
            # By identity: two reports with equal counts compare equal.
            _open[:] = [other for other in _open if other is not report]
            _uninstall_if_unused()


def _install() -> None:
    global _library
    if _library is not None:
        return
    import torch.distributed._symmetric_memory  # defines the operations

    library = torch.library.Library("symm_mem", "IMPL")
    try:
        for key in _KEYS:
            # torch registers its own for CUDA in Python; torch 2.11 asks for leave.
            library.impl(GATHER, _all_gather_matmul, key, allow_override=True)
            library.impl(SCATTER, _matmul_reduce_scatter, key, allow_override=True)
    except BaseException:
        library._destroy()
        raise
    _library = library


def _uninstall_if_unused() -> None:
    global _library
    if _library is not None and not _open:
        _library._destroy()  # what was there before is there again
        _library = None


def _note(op: str) -> None:
    ran = _paths.last_path()
    with _lock:
        for report in _open:
            key = (op, ran.path if ran is not None else "none")
            report.counts[key] = report.counts.get(key, 0) + 1


def _all_gather_matmul(
    A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """``symm_mem::fused_all_gather_matmul``: the gathered A (or None), and its products with every B."""
    dim = _dim("gather_dim", gather_dim, A_shard)
    if dim == A_shard.dim() - 1:
        gathered = regions.all_gather(A_shard, dim, group_name)
        outs = [api.matmul(gathered, b) for b in Bs]
    else:
        # As torch's: contiguous with the gathered dimension first.
        first = A_shard.movedim(dim, 0)
        outs, gathered = api.all_gather_matmul(first, list(Bs), group_name, return_gathered=True)
        outs, gathered = [out.movedim(0, dim) for out in outs], gathered.movedim(0, dim)
        if resolve(group_name).world == 1:  # where torch's is
            gathered = gathered.contiguous()
    _note(GATHER)
    return (gathered if return_A else None), outs


def _matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """``symm_mem::fused_matmul_reduce_scatter``: this rank's part of the sum, or the mean, of A @ B over the ranks."""
    dim, world = _dim("scatter_dim", scatter_dim, A), resolve(group_name).world
    if reduce_op not in ("sum", "avg"):
        raise ArgumentError(
            f"reduce_op: fused_matmul_reduce_scatter takes 'sum' or 'avg', but it is {reduce_op!r}; multiply, and call "
            "torch's reduce_scatter, for another."
        )
    total = B.shape[-1] if dim == A.dim() - 1 else A.shape[dim]
    if total % world:
        raise ShapeError(
            f"scatter_dim: {world} ranks get equal parts of dimension {dim} of the product, but it has {total}; "
            "tpkernels.matmul_reduce_scatter takes any size."
        )
    if dim == A.dim() - 1:
        out = regions.reduce_scatter(api.matmul(A, B), dim, group_name)
    else:
        out = api.matmul_reduce_scatter(A, B, group_name, scatter_dim=dim)
    _note(SCATTER)
    return out / world if reduce_op == "avg" else out


def _dim(name: str, dim: int, x: Tensor) -> int:
    if x.dim() < 2 or not -x.dim() <= dim < x.dim():
        raise ArgumentError(
            f"{name}: A needs 2 or more dimensions, of which {name} is one, but A has shape {list(x.shape)} and {name} "
            f"is {dim}."
        )
    return dim % x.dim()
