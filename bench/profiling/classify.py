"""What a GPU activity is for, told from its name.

As in Holistic Trace Analysis, whatever neither communicates nor copies computes: not only matrix products,
but also the elementwise kernels beside them. A kernel that multiplies and communicates at once counts as
compute: what it sends is hidden.
"""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["CATEGORIES", "Category", "cpu_activity", "is_pause", "kernel", "memcpy"]

Category = Literal["compute", "communication", "copy", "other"]
CATEGORIES: tuple[Category, ...] = ("compute", "communication", "copy", "other")

_PRODUCT = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|wgmma|streamk|stream_k|matmul|splitk|fmha|flash|attention", re.I
)
_COMMUNICATION = re.compile(
    r"nccl|nvshmem|symm_?mem|multimem|userbuffers"
    r"|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|broadcast_?kernel|send_?recv|(one|two)_?shot"
    r"|\bbarrier_kernel|(put|wait)_signal|stream_write_value|push_kernel|pull_kernel|flag_kernel",
    re.I,
)
_COPY = re.compile(r"memcpy|direct_copy_kernel|CatArrayBatchedCopy", re.I)
_OTHER = re.compile(r"memset|FillFunctor|spin_kernel|CUDA graph", re.I)

# Of torch.cuda._sleep: "at::cuda::(anonymous namespace)::spin_kernel(long)"; nsys writes "<unnamed>".
_PAUSE = re.compile(r"\bspin_kernel\b")

_CPU_PRODUCTS = {
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::dot",
    "aten::mv",
    "tpkernels::streamk_gemm",
}


def kernel(name: str) -> Category:
    """Category of a kernel by its (demangled) name.

    >>> kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'communication'
    >>> kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT")
    'compute'
    """
    if _PRODUCT.search(name) and not re.search(r"nccl|nvshmem", name, re.I):
        return "compute"
    if _COMMUNICATION.search(name):
        return "communication"
    if _COPY.search(name):
        return "copy"
    return "other" if _OTHER.search(name) else "compute"


def is_pause(name: str) -> bool:
    """Whether a kernel is that of torch.cuda._sleep, by its name."""
    return bool(_PAUSE.search(name))


def memcpy(name: str, *, between_devices: bool = False) -> Category:
    """Category of a copy or fill by a copy engine: one between devices communicates."""
    if between_devices or "ptop" in name.lower() or "peer" in name.lower():
        return "communication"
    return "other" if "memset" in name.lower() else "copy"


def cpu_activity(name: str) -> Category | None:
    """Category of an event on a CPU without GPU, None for those that only contain others.

    Products are counted by the op that multiplies, communication by the transfer on the thread of the
    backend.
    """
    if name in _CPU_PRODUCTS:
        return "compute"
    if name.startswith(("gloo:", "mpi:", "ucc:")):
        return "communication"
    return "copy" if name == "aten::copy_" else None
