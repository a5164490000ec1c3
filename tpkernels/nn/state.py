"""Unsharded state dicts: what plain PyTorch saves and loads, whatever the world.

Names equal those of the plain model. ``full_state_dict`` is a collective of the whole group;
``load_full_state_dict`` is not, every rank cuts its own part out of the same dictionary. Both read
``tpk_shard``; tensors without it (replicated ones, buffers) are copied as they are. One parameter at a time
is gathered, so on a GPU with ``device="cpu"`` the extra memory is that of the largest one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.errors import ArgumentError
from tpkernels.nn.sharding import Shard, placement_of

__all__ = ["full_state_dict", "full_tensors", "load_full_state_dict"]


@torch.no_grad()
def full_state_dict(
    module: nn.Module, *, device: torch.device | str | None = None, keep: bool = True
) -> dict[str, Tensor]:
    """Gathers every shard; call it on all ranks of the group.

    Args:
        module: any module that holds layers of this package.
        device: where the result lies; None: where the parameter lies.
        keep: pass False on ranks that do not need the result: they take part and return an empty dictionary.
    Returns:
        New tensors under the names of ``module.state_dict()``, with the global shapes.
    """
    own = module.state_dict(keep_vars=True)
    return full_tensors(own, own, device=device, keep=keep)


@torch.no_grad()
def full_tensors(
    tensors: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    *,
    device: torch.device | str | None = None,
    keep: bool = True,
) -> dict[str, Tensor]:
    """``full_state_dict`` of any tensors that lie as parameters do, such as gradients or moments.

    Args:
        tensors: this rank's parts by name.
        like: parameters of the same names, whose placements hold for ``tensors`` too.
        device, keep: as in ``full_state_dict``.
    """
    result: dict[str, Tensor] = {}
    for name, parameter in like.items():
        placement = placement_of(parameter)
        full = tensors[name].detach()
        if isinstance(placement, Shard):
            full = tpk.regions.all_gather(
                full, placement.dim, placement.group_name, shard_sizes=list(placement.sizes)
            )
        if keep:
            result[name] = full.to(device=device, copy=True) if device is not None else full.clone()
    return result


def _check_entry(name: str, own: Tensor, given: object) -> None:
    """ArgumentError where ``given`` cannot be copied into ``own``, shapes apart."""
    if not isinstance(own, Tensor):
        raise ArgumentError(
            f"module: its state must consist of tensors, but {name!r} is of type {type(own).__name__}; load it "
            "by itself, and the others with strict=False."
        )
    if own.is_meta:
        raise ArgumentError(
            f"module: {name!r} is on the meta device and can hold no values; call "
            'module.to_empty(device="cpu") (or "cuda") first.'
        )
    if not isinstance(given, Tensor):
        raise ArgumentError(f"state: {name!r} must be a tensor, but it is of type {type(given).__name__}.")
    if given.is_meta:
        raise ArgumentError(f"state: {name!r} must have values, but it is on the meta device.")
    if given.layout != torch.strided:
        raise ArgumentError(f"state: {name!r} must be a dense tensor, but its layout is {given.layout}.")


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Copies this rank's part of every tensor of ``state`` into ``module``; no communication.

    Args:
        state: unsharded tensors by name, on any device and of any floating-point type.
        strict: names must be the same on both sides.
    Raises:
        ArgumentError: names or global shapes that do not fit, an entry that is no dense tensor with values, a
            module on the meta device; nothing has been written then.
    """
    own = module.state_dict(keep_vars=True)
    if strict and own.keys() != state.keys():
        missing = sorted(own.keys() - state.keys())
        unknown = sorted(state.keys() - own.keys())
        raise ArgumentError(
            f"state: it must have the names of the module, but {missing or 'none'} are missing and "
            f"{unknown or 'none'} are unknown; pass strict=False to load what fits."
        )
    names = [name for name in own if name in state]
    for name in names:
        placement = placement_of(own[name])
        _check_entry(name, own[name], state[name])
        local = tuple(own[name].shape)
        expected = local if placement is None else placement.global_shape(local)
        if tuple(state[name].shape) != expected:
            raise ArgumentError(
                f"state: {name!r} must have the unsharded shape {list(expected)}, "
                f"but it has {list(state[name].shape)}."
            )
    for name in names:
        placement = placement_of(own[name])
        full = state[name]
        own[name].copy_(full if placement is None else placement.take(full))
