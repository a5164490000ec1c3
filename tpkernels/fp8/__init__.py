"""FP8: quantisation, products of quantised operands, and the operations of linear layers by a recipe.

    tpk.quantize, tpk.scaled_matmul        by hand
    tpk.fp8.quantize_both                  x and x^T, from one read
    tpk.fp8.matmul, all_gather_matmul, matmul_replicated, matmul_reduce_scatter, matmul_all_reduce
                                           high precision in and out, FP8 inside, forward and backward
    tpk.Fp8Recipe                          how; ``recipe=`` of the layers in tpkernels.nn

docs/fp8.md tells how to use it and what it costs.
"""

from tpkernels.fp8._quantize import Quantized, quantize, quantize_both
from tpkernels.fp8.api import (
    all_gather_matmul,
    matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    matmul_replicated,
    scaled_matmul,
)
from tpkernels.fp8.recipe import Fp8Recipe

__all__ = [
    "Fp8Recipe",
    "Quantized",
    "all_gather_matmul",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "matmul_replicated",
    "quantize",
    "quantize_both",
    "scaled_matmul",
]
