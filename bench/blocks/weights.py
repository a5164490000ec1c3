"""Which part of which dense tensor a parameter holds, and starting values by the dense tensor's name alone.

All implementations of a layer therefore start from the same weights, whatever they pack into one parameter and
however they cut it, and no rank ever holds a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tpkernels.nn import init

__all__ = ["Part", "cut", "draw_", "local", "share"]

# Dense weights [out, in] by how tensor parallelism cuts them.
_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "head", "embed")
_BY_INPUT = ("o_proj", "down_proj")


def cut(name: str) -> int | None:
    """The dimension in which the dense weight or bias ``name`` is cut over the ranks; None: every rank has it all."""
    layer, kind = name.split(".")[-2:]
    if layer in _BY_OUTPUT:
        return 0
    return 1 if layer in _BY_INPUT and kind == "weight" else None


def share(name: str, shape: Sequence[int], rank: int, world: int) -> tuple[slice, ...]:
    """Where rank ``rank``'s equal part of the dense weight lies in it."""
    whole = [slice(0, n) for n in shape]
    dim = cut(name)
    if dim is not None:
        size = shape[dim] // world
        whole[dim] = slice(rank * size, (rank + 1) * size)
    return tuple(whole)


@dataclass(frozen=True)
class Part:
    """Rows ``start:stop`` of a parameter hold ``where`` of the dense tensor ``name`` of shape ``shape``.

    Attributes:
        index: of the parameter, in the order of ``module.parameters()``.
        start, stop: rows of the parameter's local tensor (a packed parameter holds several dense ones).
    """

    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]
    index: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """This part, a view, of the parameter or of its gradient."""
        return local(tensor)[self.start : self.stop]

    def draw_(self, parameter: nn.Parameter, seed: int) -> None:
        """Fill this part with its starting values."""
        draw_(self.of(parameter.data), seed, self.name, self.shape, [s.start for s in self.where])


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor, any other tensor itself; no collective is under way on it afterwards."""
    to_local = getattr(tensor, "to_local", None)
    result: Tensor = tensor if to_local is None else to_local()
    return result.wait() if isinstance(result, AsyncCollectiveTensor) else result


@torch.no_grad()
def draw_(
    tensor: Tensor,
    seed: int,
    name: str,
    shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> Tensor:
    """Fill ``tensor``, the part at ``offset`` of the dense tensor ``name`` of ``shape``.

    Matrices are uniform with variance 1 / (input features), so that activations keep their size. Weights of
    norms are uniform in [0.5, 1.5]: ones would hide a norm that forgets them. Biases are in [-0.5, 0.5].
    """
    shape = tuple(tensor.shape) if shape is None else shape
    if len(shape) == 1:
        low, high = (-0.5, 0.5) if name.endswith(".bias") else (0.5, 1.5)
    else:
        high = math.sqrt(3.0 / shape[1])
        low = -high
    return init.uniform_(tensor, seed=seed, name=name, low=low, high=high, global_shape=shape, offset=offset)
