"""``ParallelStyle``s with the names and arguments of torch's, on our operations.

They are torch's own classes with another forward pass: parameters become the same DTensors, under the same names.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel
from torch.distributed.tensor.placement_types import Placement

from tpkernels.errors import ArgumentError
from tpkernels.integrations.torch._checks import check_layout, check_mesh, check_module, check_sequence_dim
from tpkernels.integrations.torch._linear import ColwiseLinear, Layouts, RowwiseLinear, TensorParallelLinear
from tpkernels.ops._groups import group_name_of

_TAKEN = (nn.Linear, nn.Embedding)
# Optimizers of such a torch take partial gradients for whole ones.
_STEPS_ON_PARTS = torch.__version__ < "2.14"


class Colwise(ColwiseParallel):
    """``ColwiseParallel``: the output features of an ``nn.Linear`` cut over the mesh, or those of an ``nn.Embedding``.

    Args:
        input_layouts: how a plain input tensor lies: Replicate() (default), ``Shard(dim)`` of rows, which are then
            gathered in the product, Shard(-1), or Partial(). A DTensor says itself how it lies. Every rank has as
            many rows of a plain tensor; pass a DTensor where they are not equal.
        output_layouts: how the output shall lie; default Shard(-1).
        use_local_output: give this rank's tensor (default), or a DTensor.
    Raises:
        ArgumentError: a layout that cannot be. When applied: GroupError for a mesh of several dimensions, DTypeError
            for any other module.

    An ``nn.Embedding``, and a subclass of ``nn.Linear`` with a forward of its own (with a warning), run on torch's
    operations, as under ``ColwiseParallel``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        check_layout("Colwise", "input_layouts", input_layouts, (Replicate, Shard, Partial))
        check_layout("Colwise", "output_layouts", output_layouts, (Replicate, Shard))
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not _check_and_tell(self, module, device_mesh):
            return super()._apply(module, device_mesh)
        return _exchanged(self, module, device_mesh, ColwiseLinear)


class Rowwise(RowwiseParallel):
    """``RowwiseParallel``: the input features of an ``nn.Linear`` cut over the mesh, or rows of an ``nn.Embedding``.

    Args:
        input_layouts: how a plain input tensor lies; default Shard(-1).
        output_layouts: Replicate() (default), or ``Shard(dim)`` of rows, which are then scattered in the product.
            Rows need not divide by the ranks. Shard(-1) is reduced by torch, Partial() not at all.
        use_local_output: give this rank's tensor (default), or a DTensor.
    Raises:
        As ``Colwise``, which also tells what runs on torch's operations.

    The bias is added once, after the sum, and its gradient is complete on every rank.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        check_layout("Rowwise", "input_layouts", input_layouts, (Replicate, Shard, Partial))
        check_layout("Rowwise", "output_layouts", output_layouts, (Replicate, Shard, Partial))
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not _check_and_tell(self, module, device_mesh):
            return super()._apply(module, device_mesh)
        return _exchanged(self, module, device_mesh, RowwiseLinear)


class SequenceParallel(TorchSequenceParallel):
    """torch's ``SequenceParallel`` (norms, dropout: the sequence is cut, parameters are on every rank).

    Unlike torch's it broadcasts the parameters from ``src_data_rank``, as the other styles do: weights that are
    not all ones are equal on every rank then. ``parallelize_module(..., src_data_rank=None)`` leaves that out.

    Args:
        sequence_dim: the dimension that is cut; default 1, for [batch, sequence, features].
        use_local_output: give this rank's tensor instead of a DTensor (default).
        whole_gradients: sum the gradients of the parameters over the ranks in ``backward()``, one small all-reduce for
            each. Without, each rank has the part of its own rows, a DTensor with ``Partial()``, whose sum is left to
            the optimizer: torch 2.14's makes it, those before step on the part as if it were whole. None (default):
            where the optimizer does not.
    Raises:
        ArgumentError: no such dimension. When applied: GroupError for a mesh of several dimensions.
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = False,
        whole_gradients: bool | None = None,
    ) -> None:
        check_sequence_dim(sequence_dim)
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)
        self.whole_gradients = _STEPS_ON_PARTS if whole_gradients is None else whole_gradients

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        if self.whole_gradients:
            _sum_gradients(module)
            module.register_forward_pre_hook(_sum_gradients)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh("SequenceParallel", device_mesh)
        return super()._apply(module, device_mesh)


def _sum_gradients(module: nn.Module, _: Any = None) -> None:
    """Gradients of the module's own parameters become whole where they are made.

    Before every forward pass: a copy's parameters have no hooks, and those that come from the meta device keep the
    list of theirs, but are other tensors underneath, which know of none.
    """
    if torch.compiler.is_compiling():
        return
    for parameter in module.parameters(recurse=False):
        hooks: Any = parameter._backward_hooks or {}
        known = _whole in hooks.values() and vars(parameter).get("tpk_whole", False)
        if parameter.requires_grad and not known:
            parameter._backward_hooks = None
            for hook in (*(h for h in hooks.values() if h is not _whole), _whole):
                parameter.register_hook(hook)
            vars(parameter)["tpk_whole"] = True


def _whole(grad: Tensor) -> Tensor:
    if not isinstance(grad, DTensor) or not any(p.is_partial() for p in grad.placements):
        return grad
    return grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])


def _check_and_tell(style: Colwise | Rowwise, module: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether our operations can stand for the module's forward pass."""
    name = type(style).__name__
    check_mesh(name, mesh)
    check_module(name, module, _TAKEN)
    if isinstance(module, TensorParallelLinear):
        raise ArgumentError(
            f"parallelize_plan: {name} came to a layer of {module.out_features} x {module.in_features} that "
            f"{module.tpk_layouts.style} has parallelized already; name each layer in one entry."
        )
    if not isinstance(module, nn.Linear):
        return False
    if type(module).forward is not nn.Linear.forward or "forward" in module.__dict__:
        warnings.warn(
            f"{name}: {type(module).__name__} has a forward of its own, so it runs on torch's operations.",
            stacklevel=2,
        )
        return False
    return True


def _exchanged(
    style: Colwise | Rowwise, module: nn.Module, mesh: DeviceMesh, kind: type[TensorParallelLinear]
) -> nn.Module:
    """``module`` with DTensor parameters and the forward pass of ``kind``."""
    distribute_module(module, mesh, style._partition_linear_fn)
    own = type(module)
    # ``kind`` itself for nn.Linear, so that modules can be pickled; otherwise a class that is also the module's own.
    module.__class__ = kind if own is nn.Linear else type(kind.__name__, (kind, own), {})
    vars(module)["tpk_layouts"] = Layouts(
        type(style).__name__,
        style.input_layouts[0],
        style.output_layouts[0],
        style.use_local_output,
        group_name_of(mesh),
    )
    return module
