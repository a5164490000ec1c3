"""The autograd function of linear layers on a grid: it runs the programs of a method, and keeps what backward needs.

Layers with one input run as one: blocks of their weights, put together, are a block of a weight with all their features
(in another order, which nobody sees), so x moves once for all of them, and dX is summed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.grids.execute import run
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.grids.method import Method, Sizes
from tpkernels.grids.program import Program, backward, forward
from tpkernels.nn.grids._distribution import Distribution
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._main_grad import Sink, Target, targets

__all__ = ["Call", "grid_linears"]


@dataclass(frozen=True)
class Call:
    """What a call of layers needs besides tensors. ``sinks``: where weights' gradients go, None: to autograd.

    ``features``: output features of each layer.
    """

    method: Method
    grid: ProcessGrid
    sizes: Sizes
    features: tuple[int, ...]
    keep: bool
    path: str
    what: str
    sinks: tuple[Sink | None, ...]

    @property
    def local(self) -> list[int]:
        """Output features of each layer on this rank."""
        columns = self.method.home("Y").block(self.grid.position).columns
        return [columns.length(features) for features in self.features]

    def distribution(self, number: int) -> Distribution:
        """How a layer's output lies."""
        return Distribution(self.method.home("Y"), self.grid, self.features[number], "out_features")


@lru_cache(maxsize=256)
def _forward(method: Method, bias: bool, keep: bool) -> Program:
    return forward(method, bias=bias, keep=keep)


@lru_cache(maxsize=1024)
def _backward(method: Method, keep: bool, wanted: tuple[bool, bool, bool]) -> Program:
    """``wanted``: gradients of input, weight and bias."""
    outputs = _forward(method, False, keep).outputs
    held = {operand: outputs[operand].layout for operand in ("X", "W") if operand in outputs}
    return backward(method, input_grad=wanted[0], weight_grad=wanted[1], bias_grad=wanted[2], held=held)


@torch.compiler.disable(reason="tpkernels' grids send point to point, which no compiled graph can hold")
def grid_linears(
    x: Tensor, weights_t: Sequence[Tensor], biases: Sequence[Tensor | None], call: Call
) -> list[Tensor]:
    """This rank's block of each layer's Y.

    ``x`` [..., k], ``weights_t`` the [k, n] views of the weights' blocks, ``biases`` the parts at rest.
    """
    return list(_GridLinears.apply(x, call, len(weights_t), *weights_t, *biases))


def _joined(weights_t: Sequence[Tensor]) -> Tensor:
    """[n of all, k]; of one layer its weight itself."""
    return weights_t[0].t() if len(weights_t) == 1 else torch.cat([w.t() for w in weights_t])


class _GridLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, count: int, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        given = {"X": x.reshape(-1, x.shape[-1]), "W": _joined(weights)}
        alone = count == 1 and biases[0] is not None  # then its bias travels with the first blocks
        if alone:
            given["B"] = biases[0].unsqueeze(0)
        program = _forward(call.method, alone, call.keep)
        what = f"{call.what}, forward"
        made = run(program, given, call.sizes, call.grid, {"Y": x.dtype}, path=call.path, what=what)
        ys = made["Y"].split(call.local, -1)
        ctx.call, ctx.shape, ctx.count = call, x.shape, count
        ctx.biases = [None if bias is None else bias.dtype for bias in biases]
        ctx.targets = [
            None if sink is None else targets([weight], [sink])[0]
            for weight, sink in zip(weights, call.sinks, strict=True)
        ]
        # What a frozen weight's, or a frozen input's, gradient would have needed is not kept.
        keep_x = made.get("X", given["X"]) if any(ctx.needs_input_grad[3 : 3 + count]) else None
        keep_w = made.get("W") if ctx.needs_input_grad[0] else None
        kept = weights if ctx.needs_input_grad[0] and keep_w is None else ()
        ctx.save_for_backward(keep_x, keep_w, *kept)
        outputs = []
        for number, (y, bias) in enumerate(zip(ys, biases, strict=True)):
            if bias is not None:
                y = y + (made["B"] if alone else call.distribution(number).bring(bias.unsqueeze(0)))
            outputs.append(y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1]))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        if (
            torch.is_grad_enabled()
        ):  # torch's once_differentiable lets dy without gradient pass, and x's is lost
            raise ArgumentError(
                f"create_graph: gradients of {call.what} cannot be differentiated again, but create_graph is true; "
                "use ColumnParallelLinear and RowParallelLinear for that."
            )
        x, w, *weights = ctx.saved_tensors
        w = _joined(weights) if weights else w
        count: int = ctx.count
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        dy = rows[0] if count == 1 else torch.cat(rows, -1)
        asked = list(ctx.needs_input_grad[3 : 3 + count])
        asked = [
            wanted and (target is None or target.wanted())
            for wanted, target in zip(asked, ctx.targets, strict=True)
        ]
        bias_asked = ctx.needs_input_grad[3 + count :]
        wanted = ctx.needs_input_grad[0], any(asked), count == 1 and bias_asked[0]
        given = {"dY": dy} | {name: t for name, t in (("X", x), ("W", w)) if t is not None}
        fused = any(target is not None for target in ctx.targets)
        dtypes = {"dX": dy.dtype, "dW": accumulate_dtype(dy.dtype) if fused else dy.dtype}
        dtypes["dB"] = ctx.biases[0] or dy.dtype
        made = run(
            _backward(call.method, call.keep, wanted),
            given,
            call.sizes,
            call.grid,
            dtypes,
            path=call.path,
            what=f"{call.what}, backward",
        )
        dx = made["dX"].to(dy.dtype).view(ctx.shape) if wanted[0] else None
        dws: list[Tensor | None] = [None] * count
        if any(asked):
            for number, dw in enumerate(made["dW"].split(call.local)):
                if asked[number]:
                    dws[number] = _placed(dw.t(), ctx.targets[number], dy)
        dbs: list[Tensor | None] = [None] * count
        for number, dtype in enumerate(ctx.biases):
            if dtype is not None and bias_asked[number]:
                if count > 1:
                    own = rows[number].sum(0, keepdim=True, dtype=accumulate_dtype(dy.dtype))
                    dbs[number] = call.distribution(number).send_home(own, own.new_empty(0, dtype=dtype))[0]
                else:
                    dbs[number] = made["dB"][0].to(dtype)
        return dx, None, None, *dws, *dbs


def _placed(dw: Tensor, target: Target | None, like: Tensor) -> Tensor | None:
    """The gradient for autograd, or what stands for it where it was added to ``main_grad``."""
    if target is None:
        return dw.to(like.dtype)
    target.into().add_(dw)
    return target.added(like)
