"""The part of cuBLASMp 0.7 that a matrix product with a collective needs, through ctypes, and the libraries around it.

Signatures and constants are those of ``cublasmp.h`` 0.7.0, ``nccl.h`` 2.28 and ``nvshmem.h`` 3.4. cuBLASMp wants its
dependencies loaded: NCCL, cuBLAS and NVSHMEM come from the wheels that torch installs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from ..suite import Skip

__all__ = [
    "ALGORITHMS",
    "ATTRIBUTE_ALGO_TYPE",
    "ATTRIBUTE_EPILOGUE",
    "ATTRIBUTE_TRANSA",
    "ATTRIBUTE_TRANSB",
    "COL_MAJOR",
    "COMPUTE_32F",
    "DATA_TYPES",
    "EPILOGUE_ALLREDUCE",
    "OP_N",
    "OP_T",
    "ROW_MAJOR",
    "CublasMpError",
    "Libraries",
    "UniqueId",
    "load",
]

# cublasMpGridLayout_t
COL_MAJOR, ROW_MAJOR = 0, 1
# cublasMpMatmulDescriptorAttribute_t
ATTRIBUTE_TRANSA, ATTRIBUTE_TRANSB, ATTRIBUTE_ALGO_TYPE, ATTRIBUTE_EPILOGUE = 0, 1, 3, 5
# cublasMpMatmulEpilogue_t
EPILOGUE_ALLREDUCE = 1
# cublasMpMatmulAlgoType_t. The two multicast ones (2, 4) are left out: NVLink multicast stays off.
ALGORITHMS = {"default": 0, "split_p2p": 1, "atomic_p2p": 3, "no_overlap": 5}
# cublasOperation_t, cublasComputeType_t, cudaDataType_t
OP_N, OP_T = 0, 1
COMPUTE_32F = 68
DATA_TYPES = {"float16": 2, "bfloat16": 14}

_STATUS = {
    1: "NOT_INITIALIZED",
    2: "ALLOCATION_FAILED",
    3: "INVALID_VALUE",
    4: "ARCHITECTURE_MISMATCH",
    5: "EXECUTION_FAILED",
    6: "INTERNAL_ERROR",
    7: "NOT_SUPPORTED",
}
_INSTALL = (
    "cuBLASMp is not installed: pip install 'nvidia-cublasmp-cu13==0.7.*', or set TPK_CUBLASMP to the path of "
    "libcublasmp.so.0."
)


class CublasMpError(RuntimeError):
    """A call of cuBLASMp, NCCL or NVSHMEM that failed. ``status`` is its code."""

    def __init__(self, call: str, status: int, meaning: str) -> None:
        super().__init__(f"{call} failed with status {status} ({meaning}).")
        self.status = status


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = [("internal", c_char * 128)]


# cublasMpMatmul and cublasMpMatmul_bufferSize begin alike: handle, descriptor, m, n, k, alpha, then A, B (with beta
# behind it), C and D as (pointer, first row, first column, descriptor).
_MATRIX = [c_void_p, c_int64, c_int64, c_void_p]
_MATMUL = [
    c_void_p,
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    POINTER(c_float),
    *_MATRIX,
    *_MATRIX,
    POINTER(c_float),
    *_MATRIX,
    *_MATRIX,
]
_CUBLASMP: dict[str, list[Any]] = {
    "cublasMpCreate": [POINTER(c_void_p), c_void_p],
    "cublasMpDestroy": [c_void_p],
    "cublasMpGridCreate": [c_int64, c_int64, c_int, c_void_p, POINTER(c_void_p)],
    "cublasMpGridDestroy": [c_void_p],
    "cublasMpMatrixDescriptorCreate": [*[c_int64] * 7, c_int, c_void_p, POINTER(c_void_p)],
    "cublasMpMatrixDescriptorDestroy": [c_void_p],
    "cublasMpMatmulDescriptorCreate": [POINTER(c_void_p), c_int],
    "cublasMpMatmulDescriptorDestroy": [c_void_p],
    "cublasMpMatmulDescriptorAttributeSet": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasMpMatmul_bufferSize": [*_MATMUL, POINTER(c_size_t), POINTER(c_size_t)],
    "cublasMpMatmul": [*_MATMUL, c_void_p, c_size_t, c_void_p, c_size_t],
}
_NCCL: dict[str, list[Any]] = {
    "ncclGetUniqueId": [POINTER(UniqueId)],
    "ncclCommInitRank": [POINTER(c_void_p), c_int, UniqueId, c_int],
    "ncclCommFinalize": [c_void_p],
    "ncclCommDestroy": [c_void_p],
}


class Libraries:
    """The loaded libraries; every function raises :class:`CublasMpError` unless it succeeds."""

    def __init__(self, cublasmp: ctypes.CDLL, nccl: ctypes.CDLL, nvshmem: ctypes.CDLL, version: str) -> None:
        self.version = version
        self._cublasmp = {name: _function(cublasmp, name, types) for name, types in _CUBLASMP.items()}
        self._nccl = {name: _function(nccl, name, types) for name, types in _NCCL.items()}
        self._malloc = nvshmem.nvshmem_malloc
        self._malloc.argtypes, self._malloc.restype = [c_size_t], c_void_p
        self._free = nvshmem.nvshmem_free
        self._free.argtypes, self._free.restype = [c_void_p], None

    def mp(self, name: str, *arguments: Any) -> None:
        """Call ``cublasMp<name>``."""
        status = self._cublasmp[f"cublasMp{name}"](*arguments)
        if status != 0:
            raise CublasMpError(f"cublasMp{name}", status, _STATUS.get(status, "unknown"))

    def nccl(self, name: str, *arguments: Any) -> None:
        """Call ``nccl<name>``."""
        status = self._nccl[f"nccl{name}"](*arguments)
        if status != 0:
            raise CublasMpError(f"nccl{name}", status, "see NCCL_DEBUG=INFO")

    def create(self, name: str, *arguments: Any, first: bool = False) -> int:
        """A call that returns a handle through its last (or first) argument."""
        handle = c_void_p()
        out = ctypes.byref(handle)
        self.mp(name, *((out, *arguments) if first else (*arguments, out)))
        return _set(handle, f"cublasMp{name}")

    def communicator(self, world: int, unique_id: UniqueId, rank: int) -> int:
        """A NCCL communicator of the current device. Collective."""
        comm = c_void_p()
        self.nccl("CommInitRank", ctypes.byref(comm), world, unique_id, rank)
        return _set(comm, "ncclCommInitRank")

    def malloc(self, size: int) -> int:
        """``size`` bytes of symmetric memory. Collective, the same size on every rank; NVSHMEM must be initialised."""
        address = self._malloc(size)
        if not address:
            raise CublasMpError(
                f"nvshmem_malloc({size})", 0, "no symmetric memory left; see NVSHMEM_SYMMETRIC_SIZE"
            )
        return int(address)

    def free(self, address: int) -> None:
        """Collective."""
        self._free(address)


@cache
def load() -> Libraries:
    """Find and load cuBLASMp and what it depends on.

    Raises:
        Skip: not installed, or another version than 0.7.
    """
    path = _find()
    if path is None:
        raise Skip(_INSTALL)
    # Read when NVSHMEM starts, inside the first cublasMpGridCreate: one host, and no NVLink multicast.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    nccl = _open("nccl/lib/libnccl.so.2")
    for name in ("cu13/lib/libcublasLt.so.13", "cu13/lib/libcublas.so.13"):
        _open(name)
    nvshmem = _open("nvshmem/lib/libnvshmem_host.so.3")
    try:
        cublasmp = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise Skip(f"cuBLASMp cannot be loaded from {path}: {error}") from None
    version = _version(cublasmp)
    if not version.startswith("0.7."):
        raise Skip(
            f"cuBLASMp {version} was found at {path}; this peer is written for 0.7, later versions take their memory "
            "from NCCL."
        )
    return Libraries(cublasmp, nccl, nvshmem, version)


def _version(cublasmp: ctypes.CDLL) -> str:
    value = c_int()
    status = _function(cublasmp, "cublasMpGetVersion", [POINTER(c_int)])(ctypes.byref(value))
    if status != 0:
        raise CublasMpError("cublasMpGetVersion", status, _STATUS.get(status, "unknown"))
    return f"{value.value // 1000}.{value.value // 100 % 10}.{value.value % 100}"


def _find() -> Path | None:
    named = os.environ.get("TPK_CUBLASMP")
    if named:
        if not Path(named).is_file():
            raise Skip(f"TPK_CUBLASMP: expected the path of libcublasmp.so.0, found no file at {named}.")
        return Path(named)
    return next(_installed("cublasmp/cu13/lib/libcublasmp.so.0"), None)


def _installed(relative: str) -> Iterator[Path]:
    """Where the wheels named nvidia-* put a file."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / relative
        if path.is_file():
            yield path


def _open(relative: str) -> ctypes.CDLL:
    """A dependency: from its wheel, else by name from wherever the loader finds it (torch has loaded some already)."""
    path = next(_installed(relative), None)
    name = str(path) if path is not None else relative.rpartition("/")[2]
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise Skip(f"cuBLASMp needs {name}, which cannot be loaded: {error}") from None


def _function(library: ctypes.CDLL, name: str, types: list[Any]) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes, function.restype = types, c_int
    return function  # type: ignore[no-any-return]


def _set(handle: c_void_p, call: str) -> int:
    if handle.value is None:
        raise CublasMpError(call, 0, "it returned no handle")
    return handle.value
