"""Which path an operation takes: how it is asked for, how it is chosen, and what really ran.

A path is ``transport+gemm``. ``transport`` carries data between ranks ("nccl", "gloo"; "none" for a local
product; "fused" for rows that travel while "streamk" multiplies, see :mod:`tpkernels.comm`), ``gemm`` multiplies.
For few rows "fused" is a kernel beside the product, which is made as on path "auto".

========  ======  =====================================================================
gemm      device  what it is
========  ======  =====================================================================
streamk   both    our Stream-K kernel (CUDA), or its executor on CPU threads
cublas    cuda    torch's own product
blas      cpu     torch's own product
========  ======  =====================================================================
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tpkernels import _extensions
from tpkernels.comm import auto, conditions, runtime
from tpkernels.comm.auto import Asked
from tpkernels.errors import ArgumentError, BackendError
from tpkernels.ops._groups import Group

GEMMS = {"cuda": ("streamk", "cublas"), "cpu": ("streamk", "blas"), "meta": ("streamk", "cublas", "blas")}
FUSED = "fused"
TRANSPORTS = ("nccl", "gloo", "mpi", "ucc", "fake", FUSED)
STREAMK_DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}


class Request(NamedTuple):
    """A parsed ``path`` argument; ``None`` leaves the choice open. ``source`` is what errors name.

    ``named``: whether the product was, or follows from the transport.
    """

    transport: str | None
    gemm: str | None
    source: str = "path"
    named: bool = True

    @property
    def open(self) -> bool:
        """Whether all is left open: then an operation may be fused where that should pay."""
        return self.transport is None and self.gemm is None


class PlanArguments(NamedTuple):
    """What the Stream-K kernel is told; as it stands, it chooses by its cost model."""

    schedule: str = "auto"
    splits: int = 1
    tile: str = ""


class Choice(NamedTuple):
    """The local product's path and the reason for it. ``open``: tuning may replace it (:mod:`tpkernels.tune`)."""

    gemm: str
    why: str
    open: bool = False
    plan: PlanArguments = PlanArguments()


@dataclass(frozen=True)
class PathRecord:
    """What one call really ran.

    Attributes:
        op: operation, such as ``"all_gather_matmul"``.
        transport: what carried data between ranks; ``"none"`` where nothing travelled.
        gemm: ``"streamk"``, ``"cublas"`` or ``"blas"``; ``"none"`` for a pure collective.
        detail: sizes of the product on this rank.
        why: reason for the choice.
    """

    op: str
    transport: str
    gemm: str
    detail: str = ""
    why: str = ""

    @property
    def path(self) -> str:
        """The path in the form that the ``path`` argument takes, such as ``"nccl+streamk"``.

        But ``"fused+cublas"`` (few rows: a kernel beside cuBLAS) is asked for as ``"fused"``.
        """
        parts = [part for part in (self.transport, self.gemm) if part != "none"]
        return "+".join(parts) or "none"

    def __str__(self) -> str:
        return f"{self.op}: {self.path} ({self.detail}; {self.why})"


@dataclass
class PathLog:
    """Every call made while the log was open, counted by (operation, path)."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    last: PathRecord | None = None

    def add(self, record: PathRecord) -> None:
        key = (record.op, record.path)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.last = record

    def __str__(self) -> str:
        return "\n".join(f"{op}: {path} x {n}" for (op, path), n in sorted(self.counts.items()))


_last: PathRecord | None = None
_logs: list[PathLog] = []


def last_path() -> PathRecord | None:
    """What the most recent tpkernels call of this process ran (backward passes included), or None."""
    return _last


@contextmanager
def record_paths() -> Iterator[PathLog]:
    """Count the paths of all calls inside the ``with`` block, forward and backward."""
    log = PathLog()
    _logs.append(log)
    try:
        yield log
    finally:
        # By identity: two logs with equal contents compare equal.
        _logs[:] = [other for other in _logs if other is not log]


def record(op: str, transport: str, gemm: str, detail: str = "", why: str = "") -> None:
    """Note what ran; called by every implementation."""
    global _last
    _last = PathRecord(op, transport, gemm, detail, why)
    for log in _logs:
        log.add(_last)


def environment(path: str) -> str:
    """TPK_PATH where it replaces a ``path`` argument; else ""."""
    return os.environ.get("TPK_PATH", "") if path == "auto" else ""


def parse(path: str, device_type: str, *, distributed: bool) -> Request:
    """Parse a ``path`` argument; ``"auto"`` is replaced by the environment variable TPK_PATH where set."""
    return _parse(path, environment(path), device_type, distributed)


@functools.lru_cache(256)
def _parse(path: str, replaced_by: str, device_type: str, distributed: bool) -> Request:
    name = "path"
    if path == "auto":
        path = replaced_by or "auto"
        name = "TPK_PATH"
        if path == "auto":
            return Request(None, None)
    transport: str | None = None
    gemm: str | None = None
    for part in path.split("+"):
        if part in TRANSPORTS and transport is None:
            transport = part
        elif part in GEMMS.get(device_type, ()) and gemm is None:
            gemm = part
        else:
            allowed = ["auto", *GEMMS.get(device_type, ()), "<transport>", "<transport>+<gemm>"]
            raise ArgumentError(
                f"{name}: {path!r} is not a path on {device_type}; expected one of {', '.join(allowed)}, where a "
                f"transport is one of {', '.join(TRANSPORTS)}."
            )
    if transport == FUSED and gemm not in (None, "streamk"):
        raise ArgumentError(
            f"{name}: 'fused' is one kernel, 'fused+streamk', and cannot multiply by {gemm!r}."
        )
    if not distributed:
        # TPK_PATH=nccl+cublas means cublas for a local product; a transport alone means our own kernel.
        transport = None
    return Request(transport, gemm or "streamk", name, gemm is not None)


def choose_transport(
    request: Request,
    transport: str,
    group_name: str,
    world: int,
    device_type: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    rows: int,
) -> str:
    """What carries data for an operation that can be fused; ``transport`` is what the group has.

    ``rows``: of all ranks and leading dimensions together. While a graph is traced they may be a symbol, which nobody
    compares.

    Whether the ranks can reach each other is found out later (:mod:`tpkernels.comm.ranks`), as they have to be asked.
    """
    if request.transport != FUSED:
        check_transport(request, transport, group_name)
        return transport
    if world == 1:
        return transport  # carries nothing
    if device_type != "meta":
        missing = conditions.call_missing(
            device_type,
            dtype,
            out_dtype,
            world,
            runtime.active.device_types,
            rows=rows if isinstance(rows, int) else 0,
        )
        if missing is not None:
            raise BackendError(f"{request.source}: 'fused' was asked for, but {missing}; use 'auto'.")
    return FUSED


def choose_fused(
    asked: Asked, rows: Sequence[int], group: Group, device: torch.device, transport: str, choice: Choice
) -> tuple[str, Choice]:
    """Transport and product of a call that is fused where that should pay; the same on every rank.

    All ranks have to come here, as :func:`tpkernels.comm.auto.decide` says.
    """
    decision = auto.decide(asked, rows, group, device, transport, choice.gemm)
    if decision is None:
        return transport, choice
    if decision.fused:
        return FUSED, Choice("streamk", decision.why)
    return transport, choice._replace(why=decision.why)


def check_transport(request: Request, transport: str, group_name: str) -> None:
    """A transport that was asked for must be the one that the group has."""
    if request.transport is not None and transport not in (request.transport, "none"):
        raise ArgumentError(
            f"{request.source}: {request.transport!r} was asked for, but group {group_name!r} carries these tensors "
            f"by {transport!r}; use 'auto', or create the group with backend={request.transport!r}."
        )


def choose_gemm(request: Request, device_type: str, dtype: torch.dtype) -> Choice:
    """Decide who multiplies. Pure, apart from asking which extensions are loaded."""
    if device_type == "meta":
        return Choice(request.gemm or "streamk", "meta tensors: nothing runs")
    missing = streamk_missing(device_type, dtype)
    if request.gemm == "streamk":
        if missing is not None:
            raise BackendError(f"{request.source}: 'streamk' was asked for, but {missing}; use 'auto'.")
        return Choice("streamk", "asked for")
    if request.gemm is not None:
        return Choice(request.gemm, "asked for")
    library = library_of(device_type)
    if missing is not None:
        return Choice(library, missing)
    if device_type == "cuda":
        return Choice(library, f"{library} is the default; path='streamk' takes our kernel", open=True)
    return Choice(library, f"{library} is faster here than the portable Stream-K kernel", open=True)


def library_of(device_type: str) -> str:
    """The path of torch's own products."""
    return "cublas" if device_type == "cuda" else "blas"


def choose_beside(request: Request, device_type: str, dtype: torch.dtype) -> Choice:
    """Who multiplies beside the kernel of a small call on path "fused": unless named, as on path "auto"."""
    return choose_gemm(request if request.named else Request(None, None), device_type, dtype)


def beside(choice: Choice, product: Choice | None, is_open: bool) -> Choice:
    """The product of a small call: that of :func:`choose_beside`; path "auto" tells why it is fused."""
    return choice if product is None else product._replace(why=choice.why if is_open else product.why)


def streamk_missing(device_type: str, dtype: torch.dtype) -> str | None:
    """Why our kernel cannot run here, or None if it can."""
    allowed = STREAMK_DTYPES.get(device_type, ())
    if dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        return f"the {device_type} Stream-K kernel takes {names or 'nothing'}, not {str(dtype).removeprefix('torch.')}"
    if device_type == "cuda":
        return _extensions.why_not("_C_sm80") or None
    return None
