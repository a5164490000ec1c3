"""CUDA kernels of the suites, compiled by NVRTC through CuPy for the GPU at hand, launched on torch's current stream.

Launches can be captured into CUDA graphs. All kernels are loaded before the first launch: one that waits for another
rank while the driver loads the next would wait in vain.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BenchError
from ..suite import Skip

__all__ = [
    "JOB_WORDS",
    "SOURCE",
    "LinkKernels",
    "constants",
    "include_folders",
    "link_kernels",
    "piece_bytes",
]

SOURCE = Path(__file__).with_name("link.cu")
JOB_WORDS = 3  # int64 words of a Job: destination, source, flag (0: none)

_TIMEOUT_NS = 2_000_000_000
_BULK = ("bulk_copy", "bulk_spread")
_LSU = ("lsu_copy", "lsu_spread")
_OTHERS = ("flag_round_trips", "wait_flags")


def include_folders() -> list[Path]:
    """Where the kernels' headers are: this folder, and comm/ in csrc of a checkout or in tpkernels/include."""
    root = Path(__file__).resolve().parents[2]
    for folder in (root / "csrc", root / "include"):
        if (folder / "comm" / "flags.cuh").is_file():
            return [SOURCE.parent, folder]
    raise BenchError(f"{root}: expected csrc/comm or include/comm with flags.cuh in it; reinstall tpkernels.")


@functools.lru_cache
def constants() -> dict[str, int]:
    """The constants at the top of link.cu, "kStages" and so on."""
    found = re.findall(r"^constexpr \w+ (k\w+) = (\d+);", SOURCE.read_text(), re.MULTILINE)
    return {name: int(value) for name, value in found}


def piece_bytes(total: int, sms: int) -> int:
    """Bytes that a bulk kernel moves at a time: at least four pieces an SM, so that they overlap, but no tiny ones."""
    share = total // max(1, 4 * sms)
    return max(2048, min(constants()["kPieceBytes"], share // 1024 * 1024))


class LinkKernels:
    """The kernels of link.cu on one GPU. Pointers are integers, as of ``Tensor.data_ptr``.

    Args:
        index: of the CUDA device, which must be the current one of the process for good.

    Raises:
        Skip: CuPy is missing.
    """

    def __init__(self, index: int) -> None:
        try:
            import cupy
        except ImportError:
            raise Skip("needs CuPy to compile its kernels: pip install cupy-cuda13x") from None
        # CuPy's runtime has a current device of its own, apart from torch's.
        cupy.cuda.Device(index).use()
        folders = include_folders()
        headers = [*sorted(SOURCE.parent.glob("*.cuh")), *sorted((folders[1] / "comm").glob("*.cuh"))]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in headers)).hexdigest()
        # CuPy's cache on disk knows the source, not what it includes.
        code = f"// headers: {digest}\n{SOURCE.read_text()}"
        module = cupy.RawModule(code=code, options=("--std=c++17", *(f"-I{folder}" for folder in folders)))
        k = constants()
        self._stream = _streams(cupy)
        self._shared = k["kStages"] * k["kPieceBytes"]
        self._functions: dict[str, Any] = {}
        for name in (*_BULK, *_LSU, *_OTHERS):
            function = module.get_function(name)
            assert function.num_regs > 0  # asking loads it
            self._functions[name] = function
        self.sms = int(cupy.cuda.Device(index).attributes["MultiProcessorCount"])
        self.has_bulk = int(cupy.cuda.Device(index).compute_capability) >= 90
        if self.has_bulk:
            for name in _BULK:
                self._functions[name].max_dynamic_shared_size_bytes = self._shared

    def bulk(
        self,
        jobs: int,
        count: int,
        nbytes: int,
        *,
        spread: bool,
        sms: int,
        epoch: int,
        finished: int,
        late: int,
    ) -> None:
        """Do ``count`` jobs (a table on the device, JOB_WORDS int64 each) of ``nbytes`` on ``sms`` CTAs by bulk copies.

        ``spread``: all have the first one's source. ``finished``: a uint32 that only launches with these ``sms`` use,
        zero at first. ``late``: a uint32 that counts waits that expired.
        """
        u32, u64 = np.uint32, np.uint64
        piece = piece_bytes(nbytes if spread else nbytes * count, sms)
        args = (u64(jobs), u32(count), u64(nbytes), u32(piece), u32(epoch), u64(finished), u64(late))
        self._launch(_BULK[spread], sms, constants()["kBulkThreads"], args, self._shared)

    def lsu(
        self, jobs: int, count: int, nbytes: int, *, spread: bool, sms: int, epoch: int, finished: int
    ) -> None:
        """The same by loads and stores of threads."""
        args = (np.uint64(jobs), np.uint32(count), np.uint64(nbytes), np.uint32(epoch), np.uint64(finished))
        self._launch(_LSU[spread], sms, constants()["kLsuThreads"], args)

    def round_trips(
        self, mine: int, theirs: int, rounds: int, first_epoch: int, *, leads: bool, late: int
    ) -> None:
        """``rounds`` round trips of a flag between two ranks; both call it, one of them leads."""
        u32, u64 = np.uint32, np.uint64
        args = (
            u64(mine),
            u64(theirs),
            u32(rounds),
            u32(first_epoch),
            u32(leads),
            u64(_TIMEOUT_NS),
            u64(late),
        )
        self._launch("flag_round_trips", 1, 1, args)

    def wait(self, flags: int, count: int, epoch: int, *, late: int) -> None:
        """Hold the stream, bounded, until ``count`` flags have reached ``epoch``."""
        args = (np.uint64(flags), np.uint32(count), np.uint32(epoch), np.uint64(_TIMEOUT_NS), np.uint64(late))
        self._launch("wait_flags", 1, 32, args)

    def _launch(self, name: str, grid: int, block: int, args: tuple[Any, ...], shared: int = 0) -> None:
        with self._stream():
            self._functions[name]((grid,), (block,), args, shared_mem=shared)


@functools.lru_cache
def link_kernels(index: int) -> LinkKernels:
    """The kernels on CUDA device ``index``; compiled once a process."""
    return LinkKernels(index)


def _streams(cupy: Any) -> Any:
    """A function that returns torch's current stream as a context manager for CuPy."""
    import torch

    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        return lambda: cupy.cuda.Stream.from_external(torch.cuda.current_stream())
    return lambda: cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
