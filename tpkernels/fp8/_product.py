"""The local product of FP8 operands: what it takes, who multiplies, and how.

=======  ======  ==========================================================================================
path     device  what it is
=======  ======  ==========================================================================================
streamk  cuda    our Stream-K kernel for Hopper
cublas   cuda    torch._scaled_mm, or, for layouts that it does not take, torch's product of converted operands
blas     cpu     torch's product of converted operands
=======  ======  ==========================================================================================

Converted operands: FP8 values are exact in bfloat16 and float32; scales that do not change along K are multiplied in
behind the product, others before it. Sums are float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tpkernels import _extensions
from tpkernels.errors import ArgumentError, BackendError, DeviceError, DTypeError, ShapeError
from tpkernels.fp8._quantize import BLOCK, DTYPES, spread
from tpkernels.ops import _checks, _gemm, _nvtx
from tpkernels.ops._paths import FUSED, Choice, Request
from tpkernels.tune import mode

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16  # of K, and for torch._scaled_mm of N: rows of 16 bytes; of scales for cuBLAS
LIBRARY = "cublas"  # where there is a choice
ROWS = (
    16  # blockwise products of multiples of them are what torch._scaled_mm was seen to take; of 1 and 129 not
)


class Layout(NamedTuple):
    """What the choice of a path looks at. Scalings: "tensorwise", "rowwise", "1x128", "128x128", of a and of b.t()."""

    a_dtype: torch.dtype
    b_dtype: torch.dtype
    a_scaling: str
    b_scaling: str
    k: int
    n: int
    out_dtype: torch.dtype
    fast_accumulation: bool
    m: int = ROWS


def blocks(k: int) -> int:
    """How many of 128 there are in ``k``, a part of one included."""
    return (k + BLOCK - 1) // BLOCK


def check(a_name: str, a: Tensor, scale_a: Tensor, b_name: str, b: Tensor, scale_b: Tensor) -> None:
    """a [..., K] by b [K, N] with their scales."""
    for name, x in ((a_name, a), (b_name, b)):
        if x.dtype not in DTYPES:
            raise DTypeError(
                f"{name}: expected float8_e4m3fn or float8_e5m2, got {_short(x.dtype)}; tpk.quantize makes it."
            )
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise ShapeError(
            f"{a_name}, {b_name}: expected [..., K] and [K, N], got {list(a.shape)} and {list(b.shape)}; a weight that "
            "was quantised as [N, K] is passed as its .t()."
        )
    for name, x in ((b_name, b), (f"scale of {a_name}", scale_a), (f"scale of {b_name}", scale_b)):
        if x.device != a.device:
            raise DeviceError(f"{name}: expected device {a.device} as in {a_name}, got {x.device}; move it.")
    for name, x in ((a_name, scale_a), (b_name, scale_b)):
        if x.dtype != torch.float32:
            raise DTypeError(f"{name}: expected scales in float32, got {_short(x.dtype)}.")
    k, n = b.shape
    if scale_a.numel() != 1 and list(scale_a.shape) not in ([*a.shape[:-1], 1], [*a.shape[:-1], blocks(k)]):
        raise ShapeError(
            f"{a_name}: expected scales of one element, [..., 1] or [..., {blocks(k)}] (K / 128) for data "
            f"{list(a.shape)}, got {list(scale_a.shape)}."
        )
    if scale_b.numel() != 1 and list(scale_b.shape) not in ([1, n], [blocks(k), n], [blocks(k), blocks(n)]):
        raise ShapeError(
            f"{b_name}: expected scales of one element, [1, {n}], [{blocks(k)}, {n}] or [{blocks(k)}, {blocks(n)}] "
            f"for data {list(b.shape)}, got {list(scale_b.shape)}."
        )


def check_rest(bias: Tensor | None, b: Tensor, out_dtype: torch.dtype, bias_name: str = "bias") -> None:
    """Bias [N] of any floating dtype; the output's dtype."""
    if out_dtype not in OUT_DTYPES:
        raise DTypeError(f"out_dtype: expected bfloat16, float16 or float32, got {_short(out_dtype)}.")
    if bias is None:
        return
    _checks.check_operand(bias_name, bias, min_dim=1)
    if bias.dim() != 1 or bias.shape[0] != b.shape[1]:
        raise ShapeError(
            f"{bias_name}: expected shape [{b.shape[1]}] (one value per output column), got {list(bias.shape)}."
        )
    if bias.device != b.device:
        raise DeviceError(f"{bias_name}: expected device {b.device} as in b, got {bias.device}; move it.")


def layout_of(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, fast: bool
) -> Layout:
    """Of checked operands; where K is one block, "rowwise" stands for "1x128" too."""
    k, n = b.shape
    of_a = "tensorwise" if scale_a.numel() == 1 else "rowwise" if scale_a.shape[-1] == 1 else "1x128"
    if scale_b.numel() == 1:
        of_b = "tensorwise"
    elif scale_b.shape[1] == n:
        of_b = "rowwise" if scale_b.shape[0] == 1 else "1x128"
    else:
        of_b = "128x128"
    return Layout(a.dtype, b.dtype, of_a, of_b, k, n, out_dtype, fast, math.prod(a.shape[:-1]))


def choose(request: Request, device: torch.device, layout: Layout) -> Choice:
    """Who multiplies. Raises BackendError for "streamk" where our kernel cannot run."""
    if request.transport == FUSED:
        raise ArgumentError(
            f"{request.source}: 'fused' has no FP8 kernel yet; take 'auto', 'streamk' or 'cublas'."
        )
    if device.type == "meta":
        return Choice(request.gemm or "streamk", "meta tensors: nothing runs")
    if request.gemm == "streamk":
        missing = streamk_missing(device)
        if missing is None:
            return Choice("streamk", "asked for")
        if request.named:
            raise BackendError(f"{request.source}: 'streamk' was asked for, but {missing}; use 'auto'.")
    if device.type == "cpu":
        return Choice("blas", "operands converted to float32")
    unfit = library_missing(layout, torch.cuda.get_device_capability(device), cuda_version())
    if unfit is None:
        why = (
            "asked for"
            if request.gemm == "cublas"
            else "torch._scaled_mm is the default; path='streamk' takes our kernel"
        )
        return Choice("cublas", why, open=request.gemm is None and streamk_missing(device) is None)
    if request.gemm is None and streamk_missing(device) is None:
        return Choice("streamk", unfit, open=True)
    return Choice("cublas", f"operands converted: {unfit}")


def streamk_missing(device: torch.device) -> str | None:
    """Why our kernel cannot run here, or None."""
    if device.type != "cuda":
        return f"the {device.type} Stream-K kernel takes no FP8"
    if not hasattr(torch.ops.tpkernels, "scaled_gemm"):
        return "this build has no FP8 kernel"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its FP8 kernel is for Hopper GPUs (compute capability 9.0)"
    return _extensions.why_not("_C_sm90a") or None


def library_missing(
    layout: Layout, capability: tuple[int, int], cuda: tuple[int, int] | None = None
) -> str | None:
    """Why torch._scaled_mm does not take a product, K and N padded, or None. Pure."""
    a, b = layout.a_scaling, layout.b_scaling
    if capability < (8, 9):
        return "torch._scaled_mm needs compute capability 8.9"
    if layout.a_dtype == layout.b_dtype == torch.float8_e5m2:
        return "torch._scaled_mm does not multiply e5m2 by e5m2"
    if "128x128" in (a, b) or "1x128" in (a, b):
        if (a, b) not in (("1x128", "128x128"), ("1x128", "1x128")):
            return f"torch._scaled_mm does not take {a} by {b}"
        if capability != (9, 0) or (cuda is not None and cuda < (12, 9)):
            return "torch._scaled_mm takes blockwise scales on compute capability 9.0 with CUDA 12.9 alone"
        if layout.fast_accumulation:
            return "torch._scaled_mm has no fast accumulation with blockwise scales"
        if layout.k % BLOCK or (b == "128x128" and layout.k % (4 * BLOCK)):
            return "torch._scaled_mm takes blockwise scales in rows of 16 bytes alone"
        if layout.m % ROWS:
            return f"torch._scaled_mm takes blockwise scales of a multiple of {ROWS} rows alone"
        if layout.out_dtype == torch.float16:
            return "torch._scaled_mm has no float16 output with blockwise scales"
    return None


def cuda_version() -> tuple[int, int] | None:
    """Of torch's CUDA."""
    version = torch.version.cuda
    return None if version is None else tuple(int(part) for part in version.split(".")[:2])  # type: ignore[return-value]


def settle(
    choice: Choice,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Choice:
    """``choice``, or what tuning has in its place."""
    if not (choice.open and mode.active()):
        return choice
    from tpkernels.tune import local, scaled

    call = scaled.ScaledCall(a, b, scale_a, scale_b, bias, out_dtype, fast_accumulation)
    return local.tuned(choice, call, LIBRARY)


def run(
    choice: Choice,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """a [..., K] by b [K, N], checked. Returns a new tensor [..., N]."""
    shape = [*a.shape[:-1], b.shape[1]]
    rows = math.prod(a.shape[:-1])
    a = a.reshape(rows, a.shape[-1])
    if scale_a.numel() != 1:
        scale_a = scale_a.reshape(rows, scale_a.shape[-1])
    layout = layout_of(a, b, scale_a, scale_b, out_dtype, fast_accumulation)
    with _nvtx.phase("product", choice.gemm):
        if min(rows, *b.shape) == 0:
            out = a.new_zeros(rows, b.shape[1], dtype=out_dtype)
            return (out if bias is None else out + bias.to(out_dtype)).view(shape)
        if choice.gemm == "streamk":
            a, b = _padded(a), _padded(b.t()).t()
            out = a.new_empty(rows, b.shape[1], dtype=out_dtype)
            promoted = "128" in layout.a_scaling + layout.b_scaling  # where scales change along K, sums are
            addend = bias.to(torch.float32) if bias is not None and bias.dtype == torch.float64 else bias
            fast = fast_accumulation and not promoted
            plan = _gemm.arguments(choice.plan)
            torch.ops.tpkernels.scaled_gemm(a, b, scale_a, scale_b, addend, out, fast, **plan)
        elif (
            choice.gemm == "cublas"
            and library_missing(layout, torch.cuda.get_device_capability(a.device), cuda_version()) is None
        ):
            out = _scaled_mm(layout, a, b, scale_a, scale_b, bias)
        else:
            out = _converted(a, b, scale_a, scale_b, bias, out_dtype)
    return out.view(shape)


def _padded(x: Tensor) -> Tensor:
    """x [rows, K] as TMA and cuBLAS load it: zeros up to a multiple of 16, rows of 16 bytes, K contiguous."""
    behind = -x.shape[1] % ALIGNMENT
    if behind:
        return F.pad(x.view(torch.uint8), (0, behind)).view(x.dtype)
    return x if is_loadable(x) else x.clone(memory_format=torch.contiguous_format)


def is_loadable(x: Tensor) -> bool:
    """Whether TMA and cuBLAS load x [rows, K] as it is; addresses of meta tensors count as aligned."""
    rows = x.shape[1] % ALIGNMENT == 0 and x.stride(0) % ALIGNMENT == 0 and x.stride(0) >= x.shape[1]
    return rows and x.stride(1) == 1 and (x.is_meta or x.data_ptr() % ALIGNMENT == 0)


def _scaled_mm(
    layout: Layout, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None
) -> Tensor:
    """torch's own kernel, N padded. It adds a bias of the output's dtype before it rounds, to float32 none."""
    n, out_dtype = b.shape[1], layout.out_dtype
    behind = -n % ALIGNMENT
    right = _padded(b.t())
    if behind:  # rows of zeros
        right = F.pad(right.view(torch.uint8), (0, 0, 0, behind)).view(right.dtype)
    apart = "rowwise" in (layout.a_scaling, layout.b_scaling) and not (
        out_dtype == torch.bfloat16
        and layout.b_dtype == torch.float8_e4m3fn  # what all its rowwise kernels take
    )
    wide = apart or out_dtype == torch.float32
    inside = None if bias is None or wide else F.pad(bias.to(out_dtype), (0, behind))
    one = scale_a.new_ones(1)
    out = torch._scaled_mm(
        _padded(a),
        right.t(),
        *((one, one) if apart else _library_scales(layout, scale_a, scale_b, a.shape[0], behind)),
        bias=inside,
        out_dtype=torch.float32 if wide else out_dtype,
        use_fast_accum=layout.fast_accumulation,
    )
    out = out[:, :n]
    if apart:
        out = out * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    if wide and bias is not None:
        out = out + bias
    return out.to(out_dtype).contiguous()


def _library_scales(
    layout: Layout, scale_a: Tensor, scale_b: Tensor, rows: int, behind: int
) -> tuple[Tensor, Tensor]:
    """The scales as torch._scaled_mm wants them to lie, for ``behind`` more columns."""
    n = layout.n + behind
    if layout.a_scaling == "1x128":  # those of one block of K lie together
        scale_a = scale_a.t().contiguous().t()
        if layout.b_scaling == "1x128":
            return scale_a, F.pad(scale_b, (0, behind), value=1.0).contiguous()
        return scale_a, F.pad(scale_b, (0, blocks(n) - blocks(layout.n)), value=1.0).t().contiguous().t()
    if layout.a_scaling == layout.b_scaling == "tensorwise":
        return _aligned(scale_a), _aligned(scale_b)
    scale_b = F.pad(scale_b.reshape(1, -1).expand(1, layout.n), (0, behind), value=1.0)
    return scale_a.reshape(-1, 1).expand(rows, 1).contiguous(), scale_b.contiguous()


def _aligned(scale: Tensor) -> Tensor:
    """Where cuBLAS reads it: one of several scales that were made together lies anywhere."""
    return scale if scale.data_ptr() % ALIGNMENT == 0 else scale.clone()


def _converted(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Sums in float32 of exact products."""
    along_k = (scale_a.numel() != 1 and scale_a.shape[1] != 1) or (
        scale_b.numel() != 1 and scale_b.shape[0] != 1
    )
    if along_k:
        left = a.to(torch.float32) * spread(scale_a, a.shape)
        wide = left @ (b.to(torch.float32) * spread(scale_b, b.shape))
    else:
        if a.is_cuda:
            wide = torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)
        else:
            wide = a.to(torch.float32) @ b.to(torch.float32)
        wide = wide * scale_a.reshape(-1, 1) * spread(scale_b, wide.shape)
    if bias is not None:
        wide = wide + bias
    return wide.to(out_dtype)


def describe(a: Tensor, b: Tensor, layout: Layout) -> str:
    """Sizes, formats and scales of a product, for a path record."""
    rows = math.prod(a.shape[:-1])
    formats = f"{_short(a.dtype)} x {_short(b.dtype)}"
    return f"M={rows} N={b.shape[1]} K={b.shape[0]} {formats}, scales {layout.a_scaling} x {layout.b_scaling}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
