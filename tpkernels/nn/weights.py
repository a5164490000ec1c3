"""Starting values of whole models, equal for every tensor-parallel size and for the unsharded model.

Rules, the same for our layers and for torch's: ``bias`` is zero, a 1-D ``weight`` (a norm) is one, any other
``weight`` is normal with standard deviation ``std``; without ``std`` an embedding is standard normal and
everything else uniform within 1 / sqrt(fan_in), as torch starts ``nn.Embedding`` and ``nn.Linear``. The fan
is that of the global tensor. ``lora_A`` is uniform whatever ``std`` is, ``lora_B`` zero. Parameters under other names
are left alone.

The random stream of a parameter is named by its qualified name in the model. A layer that is built on its own
draws under the ``name`` given to its constructor; layers of one shape, seed and name start equal, so name
them, or call ``init_weights_`` on the finished model, which does it for all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tpkernels.nn.init import normal_, uniform_
from tpkernels.nn.sharding import placement_of

__all__ = ["init_parameter_", "init_weights_"]


@torch.no_grad()
def init_parameter_(
    parameter: Tensor, *, seed: int, name: str, std: float | None = None, embedding: bool = False
) -> Tensor:
    """Fills one parameter, sharded or not, by the rules above; ``name`` is the qualified one, "head.weight"."""
    if parameter.is_meta:
        return parameter
    kind = name.rpartition(".")[2]
    if kind in ("bias", "lora_B"):
        return parameter.zero_()
    if parameter.dim() < 2:
        return parameter.fill_(1.0)
    placement = placement_of(parameter)
    shape = tuple(parameter.shape) if placement is None else placement.global_shape(parameter.shape)
    offset = None if placement is None else placement.offset(parameter.dim())
    if kind == "lora_A" or (std is None and not embedding):
        bound = 1.0 / math.sqrt(max(1, math.prod(shape[1:])))
        return uniform_(
            parameter, seed=seed, name=name, low=-bound, high=bound, global_shape=shape, offset=offset
        )
    scale = 1.0 if std is None else std
    return normal_(parameter, seed=seed, name=name, std=scale, global_shape=shape, offset=offset)


def init_weights_(module: nn.Module, *, seed: int, std: float | None = None, prefix: str = "") -> nn.Module:
    """Fills every ``weight`` and ``bias`` below ``module`` in place and returns it.

    Args:
        module: any model, of plain torch layers, of ours, or of both. With equal parameter names a sharded
            and an unsharded model get the same values bit for bit.
        seed: any integer.
        std: standard deviation of all weights with two or more dimensions; None: see above.
        prefix: put before the names, for a part of a larger model, e.g. ``"layers.3"``.
    """
    seen: set[int] = set()
    for path, child in module.named_modules(prefix=prefix):
        embedding = isinstance(child, nn.Embedding) or getattr(child, "is_embedding", False)
        for name, parameter in child.named_parameters(recurse=False):
            if name not in ("weight", "bias", "lora_A", "lora_B") or id(parameter) in seen:
                continue
            seen.add(id(parameter))  # a tied weight is drawn once, under its first name
            full_name = f"{path}.{name}" if path else name
            init_parameter_(parameter, seed=seed, name=full_name, std=std, embedding=embedding)
    return module
