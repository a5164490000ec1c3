"""nn.Linear with DTensor parameters, multiplied by our operations.

A style exchanges the class of a linear layer for one of these: names, attributes, hooks and ``isinstance`` stay. What
runs follows from the layout of the input (of a DTensor its own, otherwise the style's) and of the output:

====================  =======================  ========================  =======================
class                 input                    output                    operation
====================  =======================  ========================  =======================
ColwiseLinear         rows cut                 any                       all_gather_matmul
ColwiseLinear         replicated tensor        any                       matmul_replicated
ColwiseLinear         other (redistributed)    any                       matmul
RowwiseLinear         any                      replicated                matmul_all_reduce
RowwiseLinear         any                      rows cut                  matmul_reduce_scatter
RowwiseLinear         any                      features cut, partial     matmul
====================  =======================  ========================  =======================

A replicated DTensor has a gradient that is left partial, as torch leaves it: where several layers share the input,
their gradients are added first and reduced once. The gathered input is kept for the weight's gradient, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import tpkernels as tpk
from tpkernels.errors import ArgumentError
from tpkernels.integrations.torch._checks import row_dim, shard_dim


class Layouts(NamedTuple):
    """What a style was made with, and the name of the group it was applied to."""

    style: str
    input: Placement
    output: Placement
    use_local_output: bool
    group: str


class TensorParallelLinear(nn.Linear):
    """What both classes share."""

    tpk_layouts: Layouts

    def extra_repr(self) -> str:
        layouts = self.tpk_layouts
        return f"{super().extra_repr()}, input={layouts.input}, output={layouts.output}"


class ColwiseLinear(TensorParallelLinear):
    """The output features are cut: weight ``Shard(0)``, bias ``Shard(0)``."""

    def forward(self, input: Tensor) -> Tensor:
        shared = self.__dict__.get("tpk_shared")
        if shared is not None and shared.active:
            return cast(Tensor, shared.output_of(self, input))
        return columns([self], input)[0]


class RowwiseLinear(TensorParallelLinear):
    """The input features are cut: weight ``Shard(1)``, bias ``Replicate()``."""

    def forward(self, input: Tensor) -> Tensor:
        return _rows(self, input)


def columns(layers: Sequence[ColwiseLinear], x: Tensor) -> list[Tensor]:
    """Outputs of layers that share an input and its layout."""
    layouts, mesh = layers[0].tpk_layouts, _mesh_of(layers[0])
    layout = _layout(x, layouts, mesh)
    dim = row_dim(layout, x.dim(), "input_layouts")
    weights = [_local(layer.weight).t() for layer in layers]
    biases = [None if layer.bias is None else _local(layer.bias) for layer in layers]
    if dim is not None:
        sizes = _row_sizes(x, dim, mesh)
        local = _local(x)
        outs = tpk.all_gather_matmul(
            local,
            weights,
            layouts.group,
            gather_dim=dim,
            shard_sizes=sizes,
            biases=biases,
            keep_gathered=True,
        )
    elif isinstance(layout, Replicate) and not isinstance(x, DTensor) and x.dim() > 1:
        outs = tpk.matmul_replicated(x, weights, layouts.group, biases=biases)
    else:
        whole = _as_dtensor(x, mesh, layout, layers[0].in_features)
        # Of a replicated DTensor nothing moves, but redistribute would reduce its gradient here. As in torch, that is
        # so only where the style was made for another layout.
        if not (isinstance(layout, Replicate) and isinstance(layouts.input, Replicate)):
            whole = whole.redistribute(placements=[Replicate()])
        local = whole.to_local(grad_placements=[Partial()])
        outs = [_product(local, w, b) for w, b in zip(weights, biases, strict=True)]
    return [
        _finished(out, mesh, Shard(out.dim() - 1), layer.tpk_layouts, [*out.shape[:-1], layer.out_features])
        for layer, out in zip(layers, outs, strict=True)
    ]


def _rows(layer: RowwiseLinear, x: Tensor) -> Tensor:
    layouts, mesh = layer.tpk_layouts, _mesh_of(layer)
    layout, features = _layout(x, layouts, mesh), Shard(-1)
    if not _same(layout, features, x.dim()):
        x = _as_dtensor(x, mesh, layout, layer.in_features).redistribute(placements=[features])
    local, weight = _local(x), _local(layer.weight).t()
    bias = None if layer.bias is None else _local(layer.bias)
    dim = row_dim(layouts.output, x.dim(), "output_layouts")
    placement: Placement
    if dim is not None:
        out = tpk.matmul_reduce_scatter(local, weight, layouts.group, scatter_dim=dim, bias=bias)
        placement = Shard(dim)
    elif isinstance(layouts.output, Replicate) and x.dim() > 1:
        out = tpk.matmul_all_reduce(local, weight, layouts.group, bias=bias)
        placement = Replicate()
    else:
        if bias is not None and mesh.get_local_rank() > 0:
            bias = bias - bias.detach()  # nothing, as rank 0 adds it; its gradient is complete on every rank
        out = _product(local, weight, bias)
        placement = Partial()
    return _finished(out, mesh, placement, layouts, [*local.shape[:-1], layer.out_features])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of this rank alone; ``x`` may be one row without a dimension of rows."""
    if x.dim() > 1:
        return tpk.matmul(x, weight, bias=bias)
    return tpk.matmul(x.unsqueeze(0), weight, bias=bias).squeeze(0)


def _mesh_of(layer: TensorParallelLinear) -> DeviceMesh:
    weight = layer.weight
    if isinstance(weight, DTensor):
        return weight.device_mesh
    raise ArgumentError(
        f"weight: {layer.tpk_layouts.style} made it a DTensor of {layer.out_features} x {layer.in_features}, but "
        f"now it is a {type(weight).__name__} of {' x '.join(str(n) for n in weight.shape)}; parallelize "
        "the module after its parameters were replaced, or put a DTensor there."
    )


def _layout(x: Tensor, layouts: Layouts, mesh: DeviceMesh) -> Placement:
    """How ``x`` lies on the ranks; the dimensions that the style names exist."""
    _check_dim(layouts.output, x, "output_layouts")
    if not isinstance(x, DTensor):
        _check_dim(layouts.input, x, "input_layouts")
        return layouts.input
    if x.device_mesh != mesh:
        raise ArgumentError(
            f"input: {layouts.style} works on {mesh}, but the input is a DTensor on {x.device_mesh}; pass a DTensor on "
            "the same mesh, or a plain tensor."
        )
    return x.placements[0]


def _check_dim(layout: Placement, x: Tensor, argument: str) -> None:
    if type(layout) is Shard:
        shard_dim(layout, x.dim(), argument)


def _row_sizes(x: Tensor, dim: int, mesh: DeviceMesh) -> list[int] | None:
    """Rows of every rank; None for equal ones, which is what torch takes those of a plain tensor to be."""
    if not isinstance(x, DTensor) or x.shape[dim] % mesh.size() == 0:
        return None
    return tpk.shard_sizes(x.shape[dim], mesh.size())


def _local(x: Tensor) -> Tensor:
    """What this rank has of ``x``; its gradient lies as ``x`` does."""
    return x.to_local() if isinstance(x, DTensor) else x


def _as_dtensor(x: Tensor, mesh: DeviceMesh, layout: Placement, features: int) -> DTensor:
    """``x`` with all its ``features``; where those are cut, the layer knows how many there are on all ranks."""
    if isinstance(x, DTensor):
        return x
    if not _same(layout, Shard(-1), x.dim()):
        return DTensor.from_local(x, mesh, [layout], run_check=False)
    return _from_local(x, mesh, layout, [*x.shape[:-1], features])


def _from_local(x: Tensor, mesh: DeviceMesh, layout: Placement, shape: Sequence[int]) -> DTensor:
    """The tensor of ``shape`` of which this rank has ``x``; ranks need not have equal parts."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [layout], run_check=False, shape=torch.Size(shape), stride=stride)


def _same(one: Placement, other: Placement, ndim: int) -> bool:
    """Whether two layouts of a tensor are one: Shard(-1) is Shard(ndim - 1)."""
    if type(one) is Shard and type(other) is Shard:
        return shard_dim(one, ndim, "layout") == shard_dim(other, ndim, "layout")
    return one == other


def _finished(
    out: Tensor, mesh: DeviceMesh, placement: Placement, layouts: Layouts, shape: Sequence[int]
) -> Tensor:
    """This rank's part of an output of ``shape``, in the layout and the kind that the style promises."""
    if layouts.use_local_output and _same(placement, layouts.output, out.dim()):
        return out
    return _delivered(_from_local(out, mesh, placement, shape), layouts)


def _delivered(out: DTensor, layouts: Layouts) -> Tensor:
    if not _same(out.placements[0], layouts.output, out.dim()):
        out = out.redistribute(placements=[layouts.output])
    return out.to_local() if layouts.use_local_output else out
