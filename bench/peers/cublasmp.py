"""cuBLASMp: all-gather + GEMM, GEMM + reduce-scatter and GEMM + all-reduce by ``cublasMpMatmul``.

cuBLASMp is column-major, so a row-major X [m, k] is its X^T [k, m], and Y = X W^T, with W [n, k] row-major, is its
Y^T = (W^T)^T X^T: operand A is the weight, transposed, operand B is X, not transposed ("TN"). Over W ranks in one row
or one column of processes the three operations differ only in who owns what:

====  ==========================  ==========================  ==============================
      A (weight), global          B (x), global               D (result), global
====  ==========================  ==========================  ==============================
AG    [k, n W] by columns         [k, m] by columns           [n W, m] by rows
RS    [k W, n] by rows            [k W, m] by rows            [n, m] by columns
AR    [k W, n] by rows            [k W, m] by rows            [n, m W]: a copy on every rank
====  ==========================  ==========================  ==============================

Overlap needs the workspace in symmetric memory (NVSHMEM); the gather is fastest if B lies there too, which it does
here. Every algorithm is tried for every case, and the one that is fastest on the slowest rank is measured. A process
may create one handle; it and the grids, which start NVSHMEM, live until the process ends.

A call is launched from the host, in several kernels and copies, and cannot be captured into a CUDA graph: ``us`` is
the time of a call among several enqueued behind a pause.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..suite import Runnable, Skip
from ..suites.overlap_problem import fill_nan
from ..suites.overlap_shapes import AG, AR, RS
from . import cublasmp_api as api
from .cublasmp_api import CublasMpError, Libraries, UniqueId

if TYPE_CHECKING:
    from ..context import Context
    from ..suites.overlap_problem import Problem

__all__ = ["Layout", "Session", "layouts", "prepare"]

_TRIED = ("default", "split_p2p", "no_overlap")  # atomic_p2p: by TPK_CUBLASMP_ALGORITHMS=atomic_p2p,...
_TRIALS = 10
_PAUSE_CYCLES = 5_000_000  # about 3 ms of GPU time, for the host to enqueue the trials


@dataclass(frozen=True)
class Layout:
    """A distributed column-major matrix: global sizes, block sizes, and whether ranks own rows or columns of it.

    In the direction that is not distributed the blocks only tell cuBLASMp where a collective may cut.
    """

    rows: int
    columns: int
    block_rows: int
    block_columns: int
    by_rows: bool

    @property
    def local(self) -> tuple[int, int]:
        """Rows and columns on one rank."""
        return (self.block_rows, self.columns) if self.by_rows else (self.rows, self.block_columns)


def layouts(op: str, m: int, n: int, k: int, world: int) -> tuple[tuple[int, int, int], tuple[Layout, ...]]:
    """Global sizes (m, n, k) of the product in cuBLASMp's terms, and the layouts of A, B and D. Pure.

    Args:
        op: as in the suite.
        m: rows of the whole problem; divides by ``world`` unless all-reduced.
        n, k: columns and depth of one rank's product.
        world: number of ranks.
    """
    if op == AG:
        a = Layout(k, n * world, k, n, by_rows=False)
        b = Layout(k, m, k, m // world, by_rows=False)
        return (n * world, m, k), (a, b, Layout(n * world, m, n, m // world, by_rows=True))
    a = Layout(k * world, n, k, n, by_rows=True)
    if op == RS:
        b = Layout(k * world, m, k, m // world, by_rows=True)
        return (n, m, k * world), (a, b, Layout(n, m, n, m // world, by_rows=False))
    b = Layout(k * world, m, k, m, by_rows=True)
    return (n, m, k * world), (a, b, Layout(n, m * world, n, m, by_rows=False))


class Session:
    """What a process has once: communicator, handle, grids. Creating it is collective."""

    _current: Session | None = None

    def __init__(self, libraries: Libraries, context: Context) -> None:
        self.libraries = libraries
        self.world = context.world
        unique_id = UniqueId()
        if context.rank == 0:
            libraries.nccl("GetUniqueId", ctypes.byref(unique_id))
        mine = ctypes.string_at(ctypes.addressof(unique_id), ctypes.sizeof(unique_id))
        unique_id = UniqueId.from_buffer_copy(context.agree(mine)[0])
        self.comm = libraries.communicator(context.world, unique_id, context.rank)
        # Not the default stream: with it, cuBLASMp's own streams would run one after the other.
        self.stream = torch.cuda.Stream(context.device)
        self.handle = libraries.create("Create", self.stream.cuda_stream, first=True)
        # The first grid starts NVSHMEM.
        self.column = libraries.create("GridCreate", context.world, 1, api.COL_MAJOR, self.comm)
        self.row = libraries.create("GridCreate", 1, context.world, api.ROW_MAJOR, self.comm)

    @classmethod
    def get(cls, context: Context) -> Session:
        """The session of this process."""
        if cls._current is None:
            cls._current = cls(api.load(), context)
        return cls._current

    def descriptor(self, layout: Layout, data_type: int) -> int:
        """A matrix descriptor; the caller destroys it."""
        grid = self.column if layout.by_rows else self.row
        return self.libraries.create(
            "MatrixDescriptorCreate",
            layout.rows,
            layout.columns,
            layout.block_rows,
            layout.block_columns,
            0,
            0,
            layout.local[0],  # leading dimension: dense
            data_type,
            grid,
        )


@dataclass
class _Matmul:
    """One algorithm for one case: descriptors and workspace. Calling it enqueues a product on the session's stream."""

    session: Session
    sizes: tuple[int, int, int]
    matrices: Sequence[int]
    operation: int
    workspace: int = 0
    device_bytes: int = 0
    host: ctypes.Array[Any] = field(default_factory=lambda: (ctypes.c_char * 1)())
    alpha: ctypes.c_float = field(default_factory=lambda: ctypes.c_float(1.0))
    beta: ctypes.c_float = field(default_factory=lambda: ctypes.c_float(0.0))

    def arguments(self, a: int, b: int, d: int) -> tuple[Any, ...]:
        """What cublasMpMatmul and its bufferSize have in common; without C, for beta is 0."""
        matrix_a, matrix_b, matrix_d = self.matrices
        return (
            self.session.handle,
            self.operation,
            *self.sizes,
            ctypes.byref(self.alpha),
            *(a, 1, 1, matrix_a),
            *(b, 1, 1, matrix_b),
            ctypes.byref(self.beta),
            *(None, 1, 1, None),
            *(d, 1, 1, matrix_d),
        )

    def reserve(self, context: Context, a: int, b: int, d: int) -> None:
        """Allocate the workspace. Collective, also where this rank's query fails."""
        device, host, failure = ctypes.c_size_t(), ctypes.c_size_t(), ""
        try:
            self.session.libraries.mp(
                "Matmul_bufferSize", *self.arguments(a, b, d), ctypes.byref(device), ctypes.byref(host)
            )
        except CublasMpError as error:
            failure = str(error)
        _raise_together(context, failure)
        self.device_bytes = max(context.agree(device.value))
        self.host = (ctypes.c_char * max(1, host.value))()
        if self.device_bytes > 0:
            self.workspace = self.session.libraries.malloc(self.device_bytes)

    def __call__(self, a: int, b: int, d: int) -> None:
        self.session.libraries.mp(
            "Matmul",
            *self.arguments(a, b, d),
            self.workspace or None,
            self.device_bytes,
            ctypes.cast(self.host, ctypes.c_void_p),
            ctypes.sizeof(self.host),
        )

    def close(self) -> None:
        """Free the workspace. Collective: nvshmem_free waits for the other ranks."""
        self.session.libraries.mp("MatmulDescriptorDestroy", self.operation)
        if self.workspace:
            self.session.libraries.free(self.workspace)
            self.workspace = 0


def prepare(p: Problem) -> Runnable:
    """Collective.

    Raises:
        Skip: not installed, or no algorithm takes this case.
    """
    data_type = api.DATA_TYPES.get(str(p.dtype).removeprefix("torch."))
    if data_type is None:
        raise Skip(f"cuBLASMp overlaps float16 and bfloat16, not {p.dtype}.")
    session = Session.get(p.context)
    sizes, cuts = layouts(p.op, p.m, p.n, p.k, p.world)
    matrices = [session.descriptor(cut, data_type) for cut in cuts]
    x = [_Symmetric(session, each) for each in p.x] if p.op == AG else []
    inputs = [each.tensor for each in x] if x else p.x
    out = p.outputs()
    pointers = [(w.data_ptr(), b.data_ptr(), d.data_ptr()) for w, b, d in zip(p.w, inputs, out, strict=True)]

    def runner(matmul: _Matmul) -> Callable[[int], None]:
        def launch(i: int) -> None:
            current = torch.cuda.current_stream()
            session.stream.wait_stream(current)
            matmul(*pointers[i % p.copies])
            current.wait_stream(session.stream)

        return launch

    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    best: tuple[str, _Matmul] | None = None
    for name in _algorithms():
        matmul = _Matmul(session, sizes, matrices, _operation(session, p.op, api.ALGORITHMS[name]))
        try:
            matmul.reserve(p.context, *pointers[0])
            times[name] = _trial(p.context, runner(matmul))
        except CublasMpError as error:
            refused[name] = str(error)
        if name in times and times[name] == min(times.values()):
            previous, best = best, (name, matmul)
            if previous is not None:
                previous[1].close()
        else:
            matmul.close()

    def close() -> None:
        p.context.synchronize()
        if best is not None:
            best[1].close()
        for each in x:
            each.close()
        for matrix in matrices:
            session.libraries.mp("MatrixDescriptorDestroy", matrix)

    if best is None:
        close()
        raise Skip(f"cuBLASMp {session.libraries.version} has no algorithm for this case: {refused}.")
    chosen, matmul = best

    return Runnable(
        runner(matmul),
        p.copies,
        check=lambda: p.check(out),
        poison=fill_nan(out),
        graph=False,  # NVSHMEM's host-side calls are not for capture
        extra={
            "version": session.libraries.version,
            "algorithm": chosen,
            "algorithms_us": {name: round(us, 1) for name, us in times.items()},
            "refused": refused,
        },
        close=close,
    )


def _algorithms() -> list[str]:
    named = os.environ.get("TPK_CUBLASMP_ALGORITHMS", "")
    names = [name for name in named.split(",") if name] or list(_TRIED)
    for name in names:
        if name not in api.ALGORITHMS:
            raise Skip(
                f"TPK_CUBLASMP_ALGORITHMS: expected some of {', '.join(api.ALGORITHMS)}, got {name!r}."
            )
    return names


def _operation(session: Session, op: str, algorithm: int) -> int:
    """A matmul descriptor: A transposed, B not, the algorithm, and the all-reduce."""
    operation = session.libraries.create("MatmulDescriptorCreate", api.COMPUTE_32F, first=True)
    attributes = {
        api.ATTRIBUTE_TRANSA: api.OP_T,
        api.ATTRIBUTE_TRANSB: api.OP_N,
        api.ATTRIBUTE_ALGO_TYPE: algorithm,
    }
    if op == AR:
        attributes[api.ATTRIBUTE_EPILOGUE] = api.EPILOGUE_ALLREDUCE
    for attribute, value in attributes.items():
        number = ctypes.c_int(value)
        session.libraries.mp(
            "MatmulDescriptorAttributeSet",
            operation,
            attribute,
            ctypes.byref(number),
            ctypes.sizeof(number),
        )
    return operation


def _trial(context: Context, launch: Callable[[int], None]) -> float:
    """us of a call on the slowest rank, the host ahead. Collective, also where this rank's first call fails."""
    failure = ""
    try:
        launch(0)
        context.synchronize()
    except CublasMpError as error:
        failure = str(error)
    _raise_together(context, failure)
    for i in range(3):
        launch(i)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_PAUSE_CYCLES)
    context.align()
    begin.record()
    for i in range(_TRIALS):
        launch(i)
    end.record()
    context.synchronize()
    return context.slowest([float(begin.elapsed_time(end)) * 1e3 / _TRIALS])[0]


def _raise_together(context: Context, failure: str) -> None:
    """Raise on every rank what went wrong on any."""
    failures = [each for each in context.agree(failure) if each]
    if failures:
        raise CublasMpError(failures[0], 0, f"on {len(failures)} of {context.world} ranks")


class _Symmetric:
    """A copy of a tensor in NVSHMEM's symmetric memory. Collective."""

    def __init__(self, session: Session, source: Tensor) -> None:
        self._session = session
        size = source.numel() * source.element_size()
        self._address = session.libraries.malloc(size)
        memory = _DeviceBytes(self._address, size)
        flat = torch.as_tensor(memory, device=source.device)
        self.tensor = flat.view(source.dtype).view(source.shape)
        self.tensor.copy_(source)

    def close(self) -> None:
        """Collective, as :meth:`_Matmul.close`."""
        self._session.libraries.free(self._address)


class _DeviceBytes:
    """Device memory of another library, as NumPy's array interface describes it to torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
