"""Where path "fused" can run. Pure: from facts to a reason why not, in words that follow "but", or None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

MAX_RANKS = 16  # words of a page, csrc/host/protocol.hpp
# Of all ranks in a call: csrc/ops/fused_group.hpp counts rows and tiles in 32 bits.
MOST_ROWS = 2**31 - 2048 - 1
DTYPES = (torch.bfloat16, torch.float16)
OUT_DTYPES = (*DTYPES, torch.float32)
CAPABILITY = (9, 0)
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own name


def may_share(environ: Mapping[str, str]) -> bool:
    """Whether ranks may share a GPU."""
    return environ.get(OVERLAP, "0") == "1"


class RankFacts(NamedTuple):
    """What a rank tells the others.

    Attributes:
        host: what names the machine.
        device: what names the GPU, on every rank alike.
        reaches: whether that GPU can write to another one's memory, for those that this process sees.
        missing: why this rank cannot take part; empty if it can.
        overlap: whether it may share its GPU with another rank.
        carrier: what it uses to carry rows, and of which allocator its memory is.
        tunes: whether it looks for tuned plans.
    """

    host: str
    device: str
    reaches: Mapping[str, bool]
    missing: str = ""
    overlap: bool = False
    carrier: str = ""
    tunes: bool = False


def call_missing(
    device_type: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    world: int,
    device_types: Sequence[str] = ("cuda",),
    *,
    rows: int = 0,
) -> str | None:
    """What a call itself shows, the same on every rank: no communication is needed to know it.

    ``rows``: of all ranks and leading dimensions together; 0: not known.
    """
    if device_type not in device_types:
        return f"it is made of CUDA kernels, and the tensors are on {device_type}"
    if dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {_short(dtype)}"
    if out_dtype not in OUT_DTYPES:
        return f"its results are bfloat16, float16 or float32, not {_short(out_dtype)}"
    if world > MAX_RANKS:
        return f"a group may have {MAX_RANKS} ranks, not {world}"
    if rows > MOST_ROWS:
        return f"M, rows of all ranks together, may be {MOST_ROWS:,} at most, not {rows:,}"
    return None


def machine_missing(
    capability: tuple[int, int], not_loaded: str, environment: Mapping[str, str]
) -> str | None:
    """What this rank's process shows. ``not_loaded``: why the Hopper kernels are not loaded, empty if they are."""
    if capability != CAPABILITY:
        return f"it needs compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    if not_loaded:
        return f"_C_sm90a is not loaded, {not_loaded}"
    return _serialized(environment)


def ranks_missing(ranks: Sequence[RankFacts]) -> str | None:
    """What all ranks together show; every rank comes to the same sentence."""
    for rank, facts in enumerate(ranks):
        if facts.missing:
            return f"rank {rank} cannot: {facts.missing}"
    for rank, facts in enumerate(ranks):
        if facts.carrier != ranks[0].carrier:
            return (
                f"its ranks were told differently how to carry rows: {ranks[0].carrier} on rank 0, {facts.carrier} on "
                f"rank {rank}"
            )
    for rank, facts in enumerate(ranks):
        if facts.tunes != ranks[0].tunes:
            first, this = ("is" if some.tunes else "is not" for some in (ranks[0], facts))
            return f"TPK_AUTOTUNE {first} set on rank 0, and {this} on rank {rank}"
    for rank, facts in enumerate(ranks):
        if facts.host != ranks[0].host:
            return f"its ranks are on several hosts (rank 0 on {ranks[0].host}, rank {rank} on {facts.host})"
    for rank, facts in enumerate(ranks):
        for other in range(rank):
            if facts.device == ranks[other].device and not (facts.overlap and ranks[other].overlap):
                return (
                    f"ranks {other} and {rank} share the GPU {facts.device}, which is slow and meant for tests "
                    f"({OVERLAP}=1 on every rank allows it)"
                )
            # A GPU that a process does not see is not in its table: mapping the memory will tell.
            if not (
                facts.reaches.get(ranks[other].device, True) and ranks[other].reaches.get(facts.device, True)
            ):
                return f"the GPUs of ranks {other} and {rank} have no peer access to each other"
    return None


def _serialized(environment: Mapping[str, str]) -> str | None:
    """Whether kernels run one at a time, or many times over, so that one cannot wait for another rank's."""
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return (
            "under CUDA_LAUNCH_BLOCKING the host waits for kernels that wait for what it would enqueue next"
        )
    tool = "compute-sanitizer and Nsight Compute run kernels one at a time, but these wait for each other"
    for name, value in environment.items():
        if name.startswith("NV_SANITIZER") or (name == "LD_PRELOAD" and "TreeLauncher" in value):
            return f"{tool} ({name} is set)"
        # Nsight Systems injects itself in the same way, and leaves kernels alone.
        harmless = not value or "nsight-systems" in value.lower() or "ToolsInjection" in value
        if name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH") and not harmless:
            return f"{tool} ({name} is set)"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
