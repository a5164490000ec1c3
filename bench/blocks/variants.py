"""The implementations that the layer and train suites compare, by name, and how each is built."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..suite import Options, Skip, Variant
from .grid_names import grid_variants
from .shapes import Layer, Size

if TYPE_CHECKING:
    import torch

    from ..context import Context
    from .implementation import Implementation

__all__ = ["COMPILED", "FUSING", "baseline", "build", "variants"]

COMPILED = ("torch-tp-compiled", "torch-tp-async", "ours-styles-compiled", "ours-async-tp")

_COMPILE_SECONDS = 600.0
_TORCH_MODES = {"torch-tp": "eager", "torch-tp-compiled": "compiled", "torch-tp-async": "async"}
_STYLE_MODES = {"ours-styles": "eager", "ours-styles-compiled": "compiled"}
_KEPT = "ours:keep_gathered"
_ASYNC = "ours-async-tp"
FUSING = ("torch-tp-async", _ASYNC)  # which count what they fused

_open = ExitStack()


def baseline(options: Options) -> str:
    """Collective and product in sequence."""
    return "gloo+blas" if options.device == "cpu" else "nccl+cublas"


def variants(options: Options, *, layers: bool = True) -> tuple[Variant, ...]:
    """Baseline, other peers, ours; ``layers``: of the layer suite."""
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
        *(
            [
                Variant(
                    _KEPT, "ours", "tpkernels.nn with gathered inputs kept for backward, as torch keeps them"
                )
            ]
            if layers
            else []
        ),
        Variant(
            "ours-styles", "ours", "parallelize_module with tpkernels.integrations.torch's styles, eager"
        ),
        Variant("ours-styles-compiled", "ours", "the same under torch.compile", time_limit=_COMPILE_SECONDS),
        Variant(
            _ASYNC,
            "ours",
            "the program of torch-tp-async within tpkernels.integrations.torch.enable_async_tp()",
            isolated=True,
            time_limit=_COMPILE_SECONDS,
        ),
        *(
            Variant(
                one.variant,
                "ours",
                f"tpkernels.nn.grids, {one.method.replace('_', '-')} on {one.grid} ranks, path={one.path!r}",
            )
            for one in (grid_variants(options.world) if layers else ())
        ),
    )


def _stay_in_async_tp() -> None:
    """For the life of this process, which runs no other variant on torch's fused operations."""
    from tpkernels.integrations.torch import enable_async_tp

    _open.close()
    _open.enter_context(enable_async_tp())


def build(what: Layer | Size, variant: str, context: Context, dtype: torch.dtype) -> Implementation:
    """A layer or a language model, its weights not drawn yet; all ranks call it together.

    Raises:
        Skip: async tensor parallelism on the CPU.
    """
    from . import manual, ours, torch_tp

    if variant in _TORCH_MODES or variant in _STYLE_MODES or variant == _ASYNC:
        styles = torch_tp.Styles.ours() if variant in _STYLE_MODES else torch_tp.Styles()
        mode = {**_TORCH_MODES, **_STYLE_MODES, _ASYNC: "async"}[variant]
        if variant == _ASYNC:
            _stay_in_async_tp()
        elif mode == "async" and not context.cuda:
            raise Skip("torch's async tensor parallelism needs CUDA: its fused products have no CPU kernels")
        if isinstance(what, Layer):
            return torch_tp.layer(what, context, dtype, mode=mode, styles=styles)
        return torch_tp.language_model(what, context, dtype, mode=mode, styles=styles)
    on_grid = {one.variant: one for one in grid_variants(context.world)}.get(variant)
    if on_grid is not None and isinstance(what, Layer):
        from . import on_grids

        return on_grids.layer(what, on_grid, context, dtype)
    if variant.startswith("ours"):
        kept = variant == _KEPT
        path = "auto" if kept else variant.partition(":")[2] or "auto"
        if isinstance(what, Layer):
            return ours.layer(what, context, dtype, path=path, keep_gathered=kept)
        return ours.language_model(what, context, dtype, path=path)
    overlap = variant.endswith("-async")
    if isinstance(what, Layer):
        return manual.layer(what, context, dtype, overlap=overlap)
    return manual.language_model(what, context, dtype, overlap=overlap)
