"""The layers of ``tpkernels.nn.grids``: rows and features are both cut, so a rank has a block of x, y and every weight.

Judged like the others: for the check, not in the time, blocks are put together, and each rank looks at the rows that
it has in one dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpkernels.errors import TpkError
from tpkernels.grids.execute import record_traffic
from tpkernels.grids.layout import Layout
from tpkernels.grids.redistribute import take_block
from tpkernels.nn import grids
from tpkernels.nn.sharding import BlockShard, placement_of

from ..context import Context
from ..suite import Skip
from .dense import EPS
from .grid_names import GridVariant
from .implementation import Implementation
from .shapes import Layer
from .weights import Part, share

__all__ = ["count_traffic", "layer"]


@dataclass
class _OnGrid(Implementation):
    """``on``: the method and its grid. x is [batch here, sequence, hidden here]."""

    on: grids.GridStrategy = field(kw_only=True)
    context: Context = field(kw_only=True)

    def given(self, whole: Tensor, rank: int, world: int) -> Tensor:
        return take_block(whole.transpose(0, 1), self.on.layout, self.on.grid.position).contiguous()

    def judged(
        self, y: Tensor, dx: Tensor, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        rank, world = self.context.rank, self.context.world
        of_tokens = [
            Implementation.given(self, self._whole(t, self.on.layout).transpose(0, 1), rank, world)
            for t in (y, dx)
        ]
        parameters = list(self.module.parameters())
        found = {}
        for part in self.parts:
            placement = placement_of(parameters[part.index])
            assert isinstance(placement, BlockShard)
            whole = self._whole(torch.atleast_2d(gradients[part.index]), placement.layout)
            found[part.name] = whole.view(part.shape)[share(part.name, part.shape, rank, world)]
        return of_tokens[0], of_tokens[1], found

    def _whole(self, block: Tensor, layout: Layout) -> Tensor:
        """The tensor [rows, ..., columns] of which every rank has the block of ``layout``; all ranks call it."""
        every = [torch.empty_like(block) for _ in range(self.context.world)]
        dist.all_gather(every, block.contiguous(), group=self.context.group)
        spans = [layout.block(p) for p in range(self.context.world)]
        size = [*block.shape]
        size[0], size[-1] = size[0] * spans[0].rows.parts, size[-1] * spans[0].columns.parts
        whole = block.new_empty(size)
        for span, part in zip(spans, every, strict=True):
            (a, b), (c, d) = span.rows.elements(size[0]), span.columns.elements(size[-1])
            whole[a:b, ..., c:d] = part
        return whole


def layer(shape: Layer, variant: GridVariant, context: Context, dtype: torch.dtype) -> Implementation:
    """A layer of the layer suite on a grid.

    Raises:
        Skip: the grid does not cut the sizes evenly.
    """
    model, tokens = shape.model, shape.tokens
    if variant.path == "fused" and not context.cuda:
        raise Skip("path 'fused' is made of CUDA kernels")
    if shape.has_attention and model.heads * model.head_dim != model.hidden:
        raise Skip("attention on grids has heads of hidden / heads elements")
    try:
        on = grids.GridStrategy(variant.method, group=context.group, depth=variant.depth)
        module = _module(shape, on, {"dtype": dtype, "device": context.device, "path": variant.path})
    except TpkError as error:
        raise Skip(str(error)) from error
    parts = on.layout.block(0).rows.parts
    if tokens.batch % parts:
        raise Skip(
            f"a grid of {variant.grid} cuts the sequences in {parts} parts, but there are {tokens.batch}"
        )
    return _OnGrid(module, module, _parts(module, shape), on=on, context=context)


def _module(shape: Layer, on: grids.GridStrategy, options: dict[str, Any]) -> nn.Module:
    model = shape.model
    activation = "swiglu" if model.gated else "gelu_tanh"
    if shape.part == "mlp":
        return grids.MLP(model.hidden, model.ffn, on=on, activation=activation, bias=model.biases, **options)
    if shape.part == "attention":
        return grids.Attention(model.hidden, model.heads, model.kv_heads, on=on, bias=model.biases, **options)
    return grids.TransformerBlock(
        model.hidden,
        model.ffn,
        model.heads,
        model.kv_heads,
        on=on,
        norm="layer" if model.biases else "rms",
        eps=EPS,
        activation=activation,
        bias=model.biases,
        **options,
    )


def _parts(module: nn.Module, shape: Layer) -> list[Part]:
    parts = []
    for index, (name, parameter) in enumerate(module.named_parameters()):
        placement = placement_of(parameter)
        assert isinstance(placement, BlockShard)
        where = tuple(slice(begin, end) for begin, end in placement.ranges)
        parts.append(Part(name, shape.weights[name], where, index, 0, parameter.shape[0]))
    return parts


def count_traffic(implementation: Implementation, call: Callable[[], object]) -> None:
    """Says in the row what this rank sends and receives in a call, and the most that buffers of its own hold."""
    if isinstance(implementation, _OnGrid):
        with record_traffic() as moved:
            call()
        implementation.extra |= {
            "sent_bytes": moved.sent_bytes,
            "received_bytes": moved.received_bytes,
            "buffer_elements": moved.peak_elements,
        }
