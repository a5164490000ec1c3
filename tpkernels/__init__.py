"""Tensor-parallel kernels for PyTorch: products fused with the collectives around them.

>>> import tpkernels as tpk
>>> y = tpk.all_gather_matmul(x_shard, weight.t(), group)  # doctest: +SKIP
>>> tpk.last_path()  # doctest: +SKIP

Operations are documented in :mod:`tpkernels.ops.api`, layers in :mod:`tpkernels.nn`, errors in
:mod:`tpkernels.errors`.
"""

from tpkernels import errors, fp8
from tpkernels._extensions import status
from tpkernels._planning import build, plan
from tpkernels._version import __version__
from tpkernels.comm.calibrate import calibrate
from tpkernels.comm.choice import Machine
from tpkernels.comm.faults import synchronize
from tpkernels.comm.reserve import reserve
from tpkernels.fp8 import Fp8Recipe, quantize, scaled_matmul
from tpkernels.integrations.async_tp import enable_async_tp
from tpkernels.ops import regions
from tpkernels.ops._groups import shard_sizes
from tpkernels.ops._paths import PathLog, PathRecord, last_path, record_paths
from tpkernels.ops.api import (
    all_gather_matmul,
    matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    matmul_replicated,
)
from tpkernels.ops.explain import Explanation, explain
from tpkernels.ops.grouped import grouped_matmul
from tpkernels.tune.mode import autotune

__all__ = [
    "Explanation",
    "Fp8Recipe",
    "Machine",
    "PathLog",
    "PathRecord",
    "__version__",
    "all_gather_matmul",
    "autotune",
    "build",
    "calibrate",
    "enable_async_tp",
    "errors",
    "explain",
    "fp8",
    "grouped_matmul",
    "last_path",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "matmul_replicated",
    "plan",
    "quantize",
    "record_paths",
    "regions",
    "reserve",
    "scaled_matmul",
    "shard_sizes",
    "status",
    "synchronize",
]
