"""Unsharded state dicts: what plain PyTorch saves and loads, whatever the world.

Names equal those of the plain model. ``full_state_dict`` is a collective of the whole group;
``load_full_state_dict`` is not, every rank cuts its own part out of the same dictionary. Both read
``tpk_shard``; tensors without it (replicated ones, buffers) are copied as they are. One parameter at a time
is gathered, so on a GPU with ``device="cpu"`` the extra memory is that of the largest one.

Layers of this package are never packed. Checkpoints that are, [q; k; v] or [gate; up] in one weight, are taken apart
before they are loaded, and put together after they were gathered: cutting a packed weight by rows would give a rank
rows of the wrong parts, which nothing notices.

    parts = {"qkv_proj": {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024},
             "gate_up_proj": {"gate_proj": 11008, "up_proj": 11008}}
    load_full_state_dict(model, split_packed(torch.load(file), parts))
    torch.save(pack(full_state_dict(model), parts), file)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.errors import ArgumentError
from tpkernels.grids.layout import whole
from tpkernels.grids.redistribute import redistribute
from tpkernels.nn.sharding import BlockShard, Placement, Shard, placement_of

__all__ = ["full_state_dict", "full_tensors", "load_full_state_dict", "pack", "split_packed"]


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
        New tensors under the names of ``module.state_dict()``, with the global shapes; names of one parameter (tied
        weights) share one tensor.
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
    done: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for name, parameter in like.items():
        part = tensors[name]
        key = id(part), id(parameter)
        if key not in done:  # a tied weight is gathered once and stays one tensor, as in a plain model
            full = _gathered(part.detach(), placement_of(parameter))
            if keep:
                full = full.clone() if device is None else full.to(device=device, copy=True)
            done[key] = full, part  # part is held, so that no other gets its id
        if keep:
            result[name] = done[key][0]
    return result


def _gathered(own: Tensor, placement: Placement | None) -> Tensor:
    if isinstance(placement, BlockShard):
        return _gathered_blocks(own, placement)
    if not isinstance(placement, Shard):
        return own
    sizes = [size if copy == 0 else 0 for size in placement.sizes for copy in range(placement.copies)]
    sent = own.narrow(
        placement.dim, 0, sizes[placement.rank]
    )  # of ranks that hold one part, the first sends it
    return tpk.regions.all_gather(sent, placement.dim, placement.group_name, shard_sizes=sizes)


def _gathered_blocks(own: Tensor, placement: BlockShard) -> Tensor:
    matrix, shape = own if own.dim() == 2 else own.unsqueeze(0), placement.shape
    rows = 1 if len(shape) == 1 else shape[0]
    everywhere = whole(placement.layout.grid)
    full = redistribute(matrix, placement.layout, everywhere, placement.grid, shape=(rows, shape[-1]))
    return full.view(shape)


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


Parts = Mapping[str, Mapping[str, int]]


def split_packed(state: Mapping[str, Tensor], parts: Parts, *, groups: int = 1) -> dict[str, Tensor]:
    """``state`` with every packed weight and bias taken apart.

    Args:
        state: unsharded tensors by name.
        parts: for each packed layer, by the last parts of its name (such as "qkv_proj" or "mlp.gate_up_proj"), its
            layers and their output features, in the order in which they lie. With grouped queries that is q: heads *
            head_dim, k and v: kv_heads * head_dim.
        groups: 1 where each layer's rows lie together, [q; k; v]. Where the rows of every kv head and its queries
            do, [q_0; k_0; v_0; q_1; ...], as in Megatron-LM and GPT-NeoX: the number of kv heads.
    Returns:
        A new dictionary with views of the tensors; entries that are not packed are passed on.
    Raises:
        ArgumentError: rows that are not the sum of the parts, parts that do not divide by ``groups``, a name in
            ``parts`` that no entry has.
    """
    result: dict[str, Tensor] = {}
    seen: set[str] = set()
    for name, tensor in state.items():
        packed = _part_of_name(name, parts)
        if packed is None:
            result[name] = tensor
            continue
        seen.add(packed)
        sizes = _rows(packed, parts, groups)
        total = groups * sum(sizes)
        if tensor.dim() < 1 or tensor.shape[0] != total:
            raise ArgumentError(
                f"state: {name!r} must have {total} rows, those of {', '.join(parts[packed])} together, but its shape "
                f"is {list(tensor.shape)}."
            )
        pieces = tensor.unflatten(0, (groups, sum(sizes))).split(sizes, dim=1)
        for own, piece in zip(parts[packed], pieces, strict=True):
            result[_renamed(name, packed, own)] = piece.flatten(0, 1)
    _check_all_seen(seen, parts, "state")
    return result


def pack(state: Mapping[str, Tensor], parts: Parts, *, groups: int = 1) -> dict[str, Tensor]:
    """What ``split_packed`` takes apart, put together again; the same arguments.

    Raises:
        ArgumentError: a layer of a packed one is missing or has other rows, or as in ``split_packed``.
    """
    result: dict[str, Tensor] = {}
    seen: set[str] = set()
    owner = {own: packed for packed, owns in parts.items() for own in _siblings(packed, owns)}
    for name, tensor in state.items():
        own = _part_of_name(name, owner)
        if own is None:
            result[name] = tensor
            continue
        packed = owner[own]
        target = _renamed(name, own, packed.rpartition(".")[2])
        if target in result:
            continue
        seen.add(packed)
        sizes = _rows(packed, parts, groups)
        pieces = []
        for other, rows in zip(_siblings(packed, parts[packed]), sizes, strict=True):
            key = _renamed(name, own, other.rpartition(".")[2])
            if key not in state or state[key].dim() < 1 or state[key].shape[0] != groups * rows:
                what = f"its shape is {list(state[key].shape)}" if key in state else "it is missing"
                raise ArgumentError(f"state: {key!r} must be there with {groups * rows} rows, but {what}.")
            pieces.append(state[key].unflatten(0, (groups, rows)))
        result[target] = torch.cat(pieces, dim=1).flatten(0, 1)
    _check_all_seen(seen, parts, "state")
    return result


def _siblings(packed: str, owns: Iterable[str]) -> list[str]:
    """Names of the layers of a packed one, with what is in front of it."""
    before = packed.rpartition(".")[0]
    return [f"{before}.{own}" if before else own for own in owns]


def _part_of_name(name: str, layers: Iterable[str]) -> str | None:
    """Which of ``layers`` the parameter ``name`` belongs to: "qkv_proj" for "blocks.0.qkv_proj.weight"."""
    module = name.rpartition(".")[0]
    return next((layer for layer in layers if module == layer or module.endswith("." + layer)), None)


def _renamed(name: str, layer: str, other: str) -> str:
    """``name`` with the last part of ``layer`` replaced: ("a.qkv.weight", "a.qkv", "q") -> "a.q.weight"."""
    module, _, kind = name.rpartition(".")
    return f"{module.removesuffix(layer.rpartition('.')[2])}{other}.{kind}"


def _rows(packed: str, parts: Parts, groups: int) -> list[int]:
    sizes = parts[packed]
    if groups < 1 or any(size < 0 or size % groups for size in sizes.values()):
        raise ArgumentError(
            f"groups: it must divide the rows of every part of {packed!r}, {dict(sizes)}, but it is {groups}."
        )
    return [size // groups for size in sizes.values()]


def _check_all_seen(seen: set[str], parts: Parts, argument: str) -> None:
    missing = sorted(parts.keys() - seen)
    if missing:
        raise ArgumentError(
            f"{argument}: no entry belongs to {missing[0]!r} of parts; its names are to end in "
            f'"{missing[0]}.weight" or the like.'
        )
