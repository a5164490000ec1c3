"""The implementations that the layer and train suites compare, by name, and how each is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..suite import Options, Skip, Variant
from .shapes import Layer, Size

if TYPE_CHECKING:
    import torch

    from ..context import Context
    from .implementation import Implementation

__all__ = ["COMPILED", "baseline", "build", "variants"]

COMPILED = ("torch-tp-compiled", "torch-tp-async")

_COMPILE_SECONDS = 600.0
_TORCH_MODES = {"torch-tp": "eager", "torch-tp-compiled": "compiled", "torch-tp-async": "async"}


def baseline(options: Options) -> str:
    """Collective and product in sequence."""
    return "gloo+blas" if options.device == "cpu" else "nccl+cublas"


def variants(options: Options) -> tuple[Variant, ...]:
    """Baseline, other peers, ours."""
    base = baseline(options)
    streamk = f"{base.partition('+')[0]}+streamk"
    return (
        Variant(
            base,
            "peer",
            "by hand as in Megatron-LM: collectives, F.linear, sequence parallel; nothing overlapped",
        ),
        Variant(
            f"{base}-async",
            "peer",
            "the same with Megatron-LM's overlap of collectives and products in backward",
        ),
        Variant("torch-tp", "peer", "torch's parallelize_module with sequence parallelism, eager"),
        Variant("torch-tp-compiled", "peer", "the same under torch.compile", time_limit=_COMPILE_SECONDS),
        Variant(
            "torch-tp-async",
            "peer",
            "the same with async tensor parallelism (symmetric memory)",
            time_limit=_COMPILE_SECONDS,
        ),
        Variant("ours", "ours", "tpkernels.nn"),
        Variant(f"ours:{streamk}", "ours", f"tpkernels.nn with path={streamk!r}"),
    )


def build(what: Layer | Size, variant: str, context: Context, dtype: torch.dtype) -> Implementation:
    """A layer or a language model, its weights not drawn yet; all ranks call it together.

    Raises:
        Skip: async tensor parallelism on the CPU.
    """
    from . import manual, ours, torch_tp

    if variant in _TORCH_MODES:
        mode = _TORCH_MODES[variant]
        if mode == "async" and not context.cuda:
            raise Skip("torch's async tensor parallelism needs CUDA: its fused products have no CPU kernels")
        if isinstance(what, Layer):
            return torch_tp.layer(what, context, dtype, mode=mode)
        return torch_tp.language_model(what, context, dtype, mode=mode)
    if variant.startswith("ours"):
        path = variant.partition(":")[2] or "auto"
        if isinstance(what, Layer):
            return ours.layer(what, context, dtype, path=path)
        return ours.language_model(what, context, dtype, path=path)
    overlap = variant.endswith("-async")
    if isinstance(what, Layer):
        return manual.layer(what, context, dtype, overlap=overlap)
    return manual.language_model(what, context, dtype, overlap=overlap)
