"""The autograd function of linear layers on a grid: it runs the programs of a method, and keeps what backward needs.

Layers with one input run as one: blocks of their weights, put together, are a block of a weight with all their features
(in another order, which nobody sees), so x moves once for all of them, and dX is summed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.nn.grids._passes import Call, run_backward, run_forward
from tpkernels.ops._collectives import accumulate_dtype
from tpkernels.ops._main_grad import Target, targets

__all__ = ["Call", "grid_linears"]


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
        alone = count == 1  # then its bias travels with the first blocks
        y, x_kept, w_kept = run_forward(
            call,
            x.reshape(-1, x.shape[-1]),
            _joined(weights),
            biases[0] if alone else None,
            exact=not alone and any(bias is not None for bias in biases),
        )
        ys = y.split(call.local, -1)
        ctx.call, ctx.shape, ctx.count = call, x.shape, count
        ctx.biases = [None if bias is None else bias.dtype for bias in biases]
        ctx.targets = [
            None if sink is None else targets([weight], [sink])[0]
            for weight, sink in zip(weights, call.sinks, strict=True)
        ]
        # What a frozen weight's, or a frozen input's, gradient would have needed is not kept.
        keep_x = x_kept if any(ctx.needs_input_grad[3 : 3 + count]) else None
        keep_w = w_kept if ctx.needs_input_grad[0] else None
        kept = weights if ctx.needs_input_grad[0] and keep_w is None else ()
        ctx.save_for_backward(keep_x, keep_w, *kept)
        outputs = []
        for number, (y, bias) in enumerate(zip(ys, biases, strict=True)):
            if bias is not None and not alone:
                y = y + call.distribution(number).bring(bias.unsqueeze(0))
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
        made = run_backward(call, given, wanted, dtypes)
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
