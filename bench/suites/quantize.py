"""Suite ``quantize``: FP8 data and scales of a matrix, of its transposed, or of both.

A case counts the bytes that have to move: x once (tensorwise twice: the scale depends on all of it), FP8 data and
scales once. ``copy`` moves as many, half of them read, half of them written, which is the ceiling. ``torch`` is the
formula of ``tpkernels/fp8/_formula.py`` op by op, ``torch-compile`` what inductor makes of the same; ``ours`` is
``tpkernels.quantize`` and its like, which on the CPU are the formula too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import check_known
from ..suite import Case, Options, Suite, Variant, Workload

if TYPE_CHECKING:
    from ..context import Context

__all__ = ["SUITE", "QuantizeSuite"]

DTYPES = ("bfloat16", "float16", "float32")
OPS = {
    "quantize": "x in FP8",
    "quantize-transposed": "x^T in FP8",
    "quantize-both": "x and x^T in FP8",
    "requantize": "x^T in FP8, of x in FP8",
}
SCALINGS = ("tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128")
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BLOCK = 128


@dataclass(frozen=True)
class _Shape:
    name: str
    m: int
    k: int


#: Activations of 8,192 tokens, a weight; few tokens; sizes that are multiples of nothing.
SETS = {
    "large": (
        _Shape("square", 8192, 8192),
        _Shape("activations", 8192, 28672),
        _Shape("narrow", 32768, 2048),
    ),
    "small": (_Shape("tokens-128", 128, 8192), _Shape("tokens-1024", 1024, 4096)),
    "odd": (_Shape("odd", 8191, 8191), _Shape("part-blocks", 8200, 8200)),
}
_TINY = (_Shape("tiny", 130, 264),)


class QuantizeSuite(Suite):
    """See the module."""

    name = "quantize"
    what = "quantisation to FP8, GB/s: ours, torch's operations, torch.compile of them, beside a copy"

    def baseline(self, options: Options) -> str:
        return "torch"

    def variants(self, options: Options) -> Sequence[Variant]:
        found = [
            Variant("torch", "peer", "the formula in torch's operations"),
            Variant("ours", "ours", "tpkernels.quantize, quantize_both, Quantized.transposed"),
            Variant("copy", "ceiling", "a copy of as many bytes"),
        ]
        if options.device == "cuda":
            compiled = Variant("torch-compile", "peer", "torch.compile of the formula", time_limit=180.0)
            found.insert(1, compiled)
        return found

    def cases(self, options: Options) -> Sequence[Case]:
        for dtype in options.dtypes:
            check_known("--dtype", dtype, DTYPES)
        for op in options.ops:
            check_known("--op", op, OPS)
        for name in options.sets:
            check_known("--set", name, SETS)
        small = options.small or options.device == "cpu"
        shapes = _TINY if small else [s for name in options.sets or ("large",) for s in SETS[name]]
        return [
            _case(shape, op, scaling, dtype)
            for dtype in options.dtypes or DTYPES[:1]
            for shape in shapes
            for op in options.ops or OPS
            for scaling in SCALINGS
        ]

    def bytes_needed(self, case: Case, options: Options) -> int:
        m, k = int(case.params["m"]), int(case.params["k"])
        return m * k * (2 * _ITEM_BYTES[case.dtype] + 3 * 4)  # the formula in float32, and its check

    def workload(self, case: Case, context: Context) -> Workload:
        from .quantize_workload import QuantizeWorkload

        return QuantizeWorkload(case, context)


def _case(shape: _Shape, op: str, scaling: str, dtype: str) -> Case:
    m, k = shape.m, shape.k
    data = {"quantize": 1, "quantize-transposed": 1, "quantize-both": 2, "requantize": 1}[op]
    reads = 1 if op == "requantize" else _ITEM_BYTES[dtype] * (2 if scaling == "tensorwise" else 1)
    scales = 0 if scaling in ("tensorwise", "blockwise_128x128") else 4 * (m + k)
    if scaling == "blockwise_1x128":
        scales = 4 * m * k // _BLOCK * (2 if op in ("quantize-both", "requantize") else 1)
    return Case(
        f"{shape.name} {op} {scaling}",
        op,
        dtype,
        {"m": m, "k": k, "scaling": scaling},
        shape_set=next((name for name, shapes in SETS.items() if shape in shapes), "tiny"),
        bytes=float(m * k * (reads + data) + scales),
    )


SUITE = QuantizeSuite()
