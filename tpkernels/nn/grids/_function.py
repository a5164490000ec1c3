"""The autograd function of linear layers on a grid: it runs the programs of a method, and keeps what backward
needs."""

from __future__ import annotations

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
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._main_grad import Sink, Target, targets

__all__ = ["Call", "grid_linear"]


@dataclass(frozen=True)
class Call:
    """What a call of a layer needs besides tensors. ``sink``: where the weight's gradient goes, None: to
    autograd."""

    method: Method
    grid: ProcessGrid
    sizes: Sizes
    keep: bool
    path: str
    what: str
    sink: Sink | None


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
def grid_linear(x: Tensor, weight_t: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """This rank's block of Y. ``x`` [..., k], ``weight_t`` the [k, n] view of the weight's block, ``bias`` a
    slice."""
    y: Tensor = _GridLinear.apply(x, weight_t, bias, call)
    return y


class _GridLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        given = {"X": x.reshape(-1, x.shape[-1]), "W": weight_t.t()}
        if bias is not None:
            given["B"] = bias.unsqueeze(0)
        program = _forward(call.method, bias is not None, call.keep)
        made = run(
            program,
            given,
            call.sizes,
            call.grid,
            {"Y": x.dtype},
            path=call.path,
            what=f"{call.what}, forward",
        )
        y = made["Y"]
        if bias is not None:
            y = y + made["B"]
        ctx.call, ctx.shape, ctx.bias = call, x.shape, None if bias is None else bias.dtype
        ctx.target = None if call.sink is None else targets([weight_t], [call.sink])[0]
        # What a frozen weight's, or a frozen input's, gradient would have needed is not kept.
        keep_x = made.get("X", given["X"]) if ctx.needs_input_grad[1] else None
        keep_w = made.get("W", given["W"]) if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(keep_x, keep_w)
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        if (
            torch.is_grad_enabled()
        ):  # torch's once_differentiable lets dy without gradient pass, and x's is lost
            raise ArgumentError(
                f"create_graph: gradients of {call.what} cannot be differentiated again, but create_graph is true; use "
                "ColumnParallelLinear and RowParallelLinear for that."
            )
        target: Target | None = ctx.target
        x, w = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[:3])
        if wanted[1] and target is not None and not target.wanted():
            wanted = wanted[0], False, wanted[2]
        given = {"dY": dy.reshape(-1, dy.shape[-1])}
        given |= {name: t for name, t in (("X", x), ("W", w)) if t is not None}
        weight_dtype = accumulate_dtype(dy.dtype) if target is not None else dy.dtype
        dtypes = {"dX": dy.dtype, "dW": weight_dtype, "dB": ctx.bias or dy.dtype}
        program = _backward(call.method, call.keep, wanted)
        made = run(
            program, given, call.sizes, call.grid, dtypes, path=call.path, what=f"{call.what}, backward"
        )
        dx = made["dX"].to(dy.dtype).view(ctx.shape) if wanted[0] else None
        db = made["dB"][0].to(dtypes["dB"]) if wanted[2] else None
        dw = None
        if wanted[1]:
            dw = made["dW"].t()
            if target is not None:
                target.into().add_(dw)
                dw = target.added(dy)
            else:
                dw = dw.to(dy.dtype)
        return dx, dw, db, None
