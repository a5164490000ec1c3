"""One gather for the column-parallel layers that share the input of their parent: q, k and v; gate and up.

The first of the layers that is called computes all of them in one operation, and the others find their output waiting.
An output waits for the same tensor, unchanged, under the same grad and autocast mode, and within one forward pass of
the parent; otherwise its layer computes it alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from tpkernels.errors import ArgumentError
from tpkernels.integrations.torch._checks import check_layout, check_mesh, check_module
from tpkernels.integrations.torch._linear import ColwiseLinear, columns


class GatherOnce(ParallelStyle):
    """For the parent of column-parallel layers that share its first argument: gathers it once, in their product.

    It stands where a plan for torch has ``PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=
    (Replicate(),))``: a plain tensor becomes a DTensor, so that the parent sees the shape of the whole sequence, but
    nothing travels before the products do::

        "attention": GatherOnce("wq", "wk", "wv", input_layouts=Shard(1)),
        "attention.wq": Colwise(), "attention.wk": Colwise(), "attention.wv": Colwise(),

    Args:
        layers: names of the layers within the parent, two or more, each with an entry ``Colwise`` of its own.
        input_layouts: how the parent's first argument lies if it is a plain tensor; default Shard(1).
    Raises:
        ArgumentError: a layout that cannot be, fewer than two layers. When applied: for a name that is not there;
            GroupError for a mesh of several dimensions; DTypeError for a layer that is no ``nn.Linear``.
            In the first forward pass: ArgumentError for a layer that has no ``Colwise`` entry.
    """

    def __init__(self, *layers: str, input_layouts: Placement | None = None) -> None:
        super().__init__()
        if len(layers) < 2 or len(set(layers)) < len(layers):
            raise ArgumentError(
                f"layers: GatherOnce needs two or more different names, but got {len(layers)}: {list(layers)}."
            )
        check_layout("GatherOnce", "input_layouts", input_layouts, (Replicate, Shard))
        self.layers = layers
        self.input_layouts = input_layouts or Shard(1)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh("GatherOnce", device_mesh)
        found = []
        for name in self.layers:
            try:
                layer = module.get_submodule(name)
            except AttributeError as error:
                raise ArgumentError(
                    f"layers: {type(module).__name__} has no {name!r}; GatherOnce takes names of layers within it, "
                    f"such as {[child for child, _ in module.named_children()]}."
                ) from error
            check_module("GatherOnce", layer, (nn.Linear,))
            found.append(layer)
        shared = Shared(self.layers, found)
        for layer in found:
            vars(layer)["tpk_shared"] = shared
        layout = self.input_layouts

        def begin(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not args:
                raise ArgumentError(
                    f"input: GatherOnce shares the first positional argument of {type(module).__name__}, but it was "
                    "called with none; pass the input by position."
                )
            x, *rest = args
            if isinstance(x, Tensor) and not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [layout], run_check=False)
            elif isinstance(x, DTensor) and x.placements == (Replicate(),):
                x = x.redistribute(
                    placements=[Replicate()]
                )  # sums the layers' gradients over the ranks, once
            shared.begin(x)
            return (x, *rest)

        def end(*_: Any) -> None:
            shared.end()

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
        return module

    def __repr__(self) -> str:
        return f"GatherOnce({', '.join(map(repr, self.layers))}, input_layouts={self.input_layouts})"


class Shared:
    """The layers that share an input, and the outputs that wait for them."""

    def __init__(self, names: tuple[str, ...], layers: list[nn.Module]) -> None:
        self.names = names
        self.layers = layers
        self.active = False
        self.input: Tensor | None = None
        self.state: object = None
        self.waiting: list[Tensor | None] = []

    def begin(self, x: Tensor) -> None:
        self.active, self.input, self.state, self.waiting = True, x, None, []

    def end(self) -> None:
        self.active, self.input, self.state, self.waiting = False, None, None, []

    def output_of(self, layer: ColwiseLinear, x: Tensor) -> Tensor:
        """The layer's output for ``x``, with those of the others if it is their common input."""
        if x is not self.input:
            return columns([layer], x)[0]
        index = next(i for i, other in enumerate(self.layers) if other is layer)
        state = _state(x)
        if not self.waiting or self.state != state or self.waiting[index] is None:
            self.waiting, self.state = list(columns(self._checked(layer), x)), state
        out = cast(Tensor, self.waiting[index])
        self.waiting[index] = None
        return out

    def _checked(self, first: ColwiseLinear) -> list[ColwiseLinear]:
        for name, layer in zip(self.names, self.layers, strict=True):
            if not isinstance(layer, ColwiseLinear) or layer.tpk_layouts.group != first.tpk_layouts.group:
                raise ArgumentError(
                    f"layers: GatherOnce shares an input among {', '.join(self.names)}, but {name!r} is not "
                    "parallelized by Colwise on the same mesh; give each an entry Colwise() in the plan."
                )
        return cast(list[ColwiseLinear], self.layers)


def _state(x: Tensor) -> tuple[object, ...]:
    """What an output depends on besides the tensor object."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    version = 0 if torch.compiler.is_compiling() or x.is_inference() else x._version
    return torch.is_grad_enabled(), autocast, version
