"""The passes of linear layers on a grid: by a method's programs, message by message, or by one launch each.

Both take blocks at home and give what the autograd function (``_function``) needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from tpkernels.grids import one_launch
from tpkernels.grids.execute import move, run
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.grids.method import Method, Pass, Sizes
from tpkernels.grids.program import Program, backward, forward
from tpkernels.grids.stationary import stationary
from tpkernels.nn.grids._distribution import Distribution
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._main_grad import Sink

__all__ = ["Call", "run_backward", "run_forward"]


@dataclass(frozen=True)
class Call:
    """What a call of layers needs besides tensors. ``sinks``: where weights' gradients go, None: to autograd.

    ``features``: output features of each layer. ``fused``: passes are one launch each.
    """

    method: Method
    grid: ProcessGrid
    sizes: Sizes
    features: tuple[int, ...]
    keep: bool
    path: str
    fused: bool
    what: str
    sinks: tuple[Sink | None, ...]

    @property
    def local(self) -> list[int]:
        """Output features of each layer on this rank."""
        columns = self.method.home("Y").block(self.grid.position).columns
        return [columns.length(features) for features in self.features]

    @property
    def launches(self) -> Method | None:
        """The method whose passes are one launch each; None: they are programs. Alike on all ranks."""
        still = stationary(self.method) if self.fused and min(self.sizes) > 0 else None
        return still if still is not None and still.steps > 1 else None  # of one step nothing travels

    def distribution(self, number: int) -> Distribution:
        """How a layer's output lies."""
        return Distribution(self.method.home("Y"), self.grid, self.features[number], "out_features")


def run_forward(
    call: Call, x: Tensor, w: Tensor, bias: Tensor | None, *, exact: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Y, and X and W as the backward pass takes them; W None: as it is at home.

    ``bias``: of the one layer that there is, at rest. ``exact``: Y is in the type of accumulators, as more will be
    added to it; else it may be in x's type.
    """
    what = f"{call.what}, forward"
    if (still := call.launches) is not None:
        brought = None if bias is None else call.distribution(0).bring(bias.unsqueeze(0))[0]
        y = one_launch.multiply(
            still,
            Pass.FORWARD,
            x,
            w,
            call.grid,
            bias=brought,
            out_dtype=accumulate_dtype(x.dtype) if exact else x.dtype,
            what=what,
        )
        return y, x, None
    given = {"X": x, "W": w} | ({} if bias is None else {"B": bias.unsqueeze(0)})
    program = _forward(call.method, bias is not None, call.keep)
    made = run(program, given, call.sizes, call.grid, {"Y": x.dtype}, path=call.path, what=what)
    y = made["Y"] if bias is None else made["Y"] + made["B"]
    return y, made.get("X", x), made.get("W")


def run_backward(
    call: Call,
    given: Mapping[str, Tensor],
    wanted: tuple[bool, bool, bool],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """dX, dW and dB, those that are wanted, of dY, and of X and W where they are needed. ``dtypes``: as they travel."""
    what = f"{call.what}, backward"
    if (still := call.launches) is None:
        program = _backward(call.method, call.keep, wanted)
        return run(program, given, call.sizes, call.grid, dtypes, path=call.path, what=what)
    made: dict[str, Tensor] = {}
    dy = given["dY"]
    if wanted[0]:
        dtype = dtypes["dX"]
        made["dX"] = one_launch.multiply(
            still, Pass.INPUT_GRAD, dy, given["W"], call.grid, out_dtype=dtype, what=what
        )
    if wanted[1]:
        layouts = (*still.sums.get("dW", ()), still.home("dW"))  # replicas: sums go on from the first
        dtype = dtypes["dW"] if len(layouts) == 1 else accumulate_dtype(dy.dtype)
        dw = one_launch.multiply(
            still, Pass.WEIGHT_GRAD, dy, given["X"], call.grid, out_dtype=dtype, what=what
        )
        like = dy.new_empty(0, dtype=dtypes["dW"])
        for source, target in pairwise(layouts):
            moved = move(dw, source, target, call.sizes.of("dW"), call.grid, like, what)
            assert moved is not None
            dw = moved
        made["dW"] = dw
    if wanted[2]:
        own = dy.sum(0, keepdim=True, dtype=accumulate_dtype(dy.dtype))
        made["dB"] = call.distribution(0).send_home(own, dy.new_empty(0, dtype=dtypes["dB"]))
    return made


@lru_cache(maxsize=256)
def _forward(method: Method, bias: bool, keep: bool) -> Program:
    return forward(method, bias=bias, keep=keep)


@lru_cache(maxsize=1024)
def _backward(method: Method, keep: bool, wanted: tuple[bool, bool, bool]) -> Program:
    """``wanted``: gradients of input, weight and bias."""
    outputs = _forward(method, False, keep).outputs
    held = {operand: outputs[operand].layout for operand in ("X", "W") if operand in outputs}
    return backward(method, input_grad=wanted[0], weight_grad=wanted[1], bias_grad=wanted[2], held=held)
