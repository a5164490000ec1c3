"""torchtitan: the products of its ``tp_gemm_backend="dist_gemm"``, on our operations.

    import tpkernels.integrations.titan as tpk_titan

    tpk_titan.enable()  # before training, in the process of each rank

That backend of torchtitan has sequence parallelism's gathers and reduce-scatters inside of its linear layers, as three
autograd functions over ``torch.ops.symm_mem``, which need CUDA. With ``enable()`` the layers call ours instead:

    AllGatherLinear, AllGatherLinearMulti     all_gather_matmul
    LinearReduceScatter                       matmul_reduce_scatter

Modules and parameters stay torchtitan's. Its default backend keeps products and collectives apart; nothing is replaced
there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import tpkernels as tpk
from tpkernels.integrations._swaps import Swaps

try:
    from torchtitan.models.common import dist_gemm as _theirs
except ImportError as error:
    raise ImportError(
        "tpkernels.integrations.titan needs torchtitan 0.3 or newer, whose layers with fused collectives are in "
        "torchtitan.models.common.dist_gemm; install it as docs/torchtitan.md says."
    ) from error

__all__ = ["AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter", "enable"]


class AllGatherLinear:
    """torchtitan's function of that name."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, bias: Tensor | None, group: Any, group_name: str) -> Tensor:
        """x [rows / world, in] of this rank, weight [out / world, in] -> [rows, out / world]."""
        out: Tensor = tpk.all_gather_matmul(x, weight.t(), group_name, biases=bias)
        return out


class AllGatherLinearMulti:
    """torchtitan's function of that name."""

    @staticmethod
    def apply(x: Tensor, a: Tensor, b: Tensor, group: Any, group_name: str) -> tuple[Tensor, Tensor]:
        """As ``AllGatherLinear``, for two weights that share the gather."""
        first, second = tpk.all_gather_matmul(x, [a.t(), b.t()], group_name)
        return first, second


class LinearReduceScatter:
    """torchtitan's function of that name."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, bias: Tensor | None, group: Any, group_name: str) -> Tensor:
        """x [rows, in / world], weight [out, in / world], bias [out], whole -> [rows / world, out]."""
        return tpk.matmul_reduce_scatter(x, weight.t(), group_name, bias=bias)


def enable() -> Swaps:
    """torchtitan's ``dist_gemm`` layers run on our operations, also those of models that are there already.

    Returns:
        What undoes it: ``.disable()``, or the end of a ``with`` block.
    """
    return Swaps((vars(_theirs), ours.__name__, ours) for ours in _OURS)


_OURS = (AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter)
