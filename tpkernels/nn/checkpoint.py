"""Checkpoints through ``torch.distributed.checkpoint``: saved on any grid or group, loaded on any other, or dense.

    state = tnn.distributed_state_dict(model)
    dcp.save(state, checkpoint_id=folder)                 # every rank writes its blocks, replicas once
    dcp.load(state, checkpoint_id=folder)                 # every rank reads what its blocks need, into the parameters

Names and whole shapes are those of the plain model, which loads the same files into its own ``state_dict()``. Tensors
that lie as parameters do, such as an optimizer's moments, go by ``distributed_tensors``.

Every sharded tensor is handed over as a ``Block``: a tensor of the whole shape without values, that tells the
checkpoint which part of it this rank has, by the protocol that DTensor has for that
(``torch.distributed._checkpointable``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tpkernels.errors import ArgumentError
from tpkernels.nn.sharding import BlockShard, Placement, Replicated, Shard, placement_of

__all__ = ["Block", "distributed_state_dict", "distributed_tensors"]


class Block(torch.Tensor):
    """``local`` at ``offset`` of a tensor of ``shape``, for a checkpoint. No operation can be done with it."""

    local: Tensor
    offset: torch.Size
    counts: bool

    @staticmethod
    def __new__(cls, local: Tensor, shape: torch.Size, offset: torch.Size, counts: bool) -> Block:
        """``counts``: this rank writes the block, others that have it do not."""
        made: Block = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        made.local, made.offset, made.counts = local, offset, counts
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ArgumentError(
            f"{func}: a Block stands for a part of a tensor in a checkpoint and has no values of its own; use its "
            ".local, or tpkernels.nn.full_state_dict for whole tensors."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        shape, local = list(self.shape), list(self.local.shape)
        return f"Block({local} at {list(self.offset)} of {shape}, {self.dtype}, {self.device})"

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        if not self.counts or self.local.numel() == 0:
            return []
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.local), self.shape)
        return [WriteItem(MetadataIndex(fqn, self.offset), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offset, self.local.shape)


def distributed_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The module's state for ``torch.distributed.checkpoint``; its tensors share memory with the module's.

    Args:
        module: any module that holds layers of this package.
    Returns:
        By the names of ``module.state_dict()``: a ``Block`` for each sharded tensor, the tensor itself for others.
    """
    own = module.state_dict(keep_vars=True)
    return distributed_tensors(own, own)


def distributed_tensors(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``distributed_state_dict`` of any tensors that lie as parameters do, such as gradients or moments.

    Args:
        tensors: this rank's parts by name.
        like: parameters of the same names, whose placements hold for ``tensors`` too.
    """
    return {name: _handed(tensor.detach(), placement_of(like[name])) for name, tensor in tensors.items()}


def _handed(tensor: Tensor, placement: Placement | None) -> Tensor:
    if isinstance(placement, (Shard, BlockShard)):
        shape = torch.Size(placement.global_shape(tensor.shape))
        return Block(tensor, shape, torch.Size(placement.offset(tensor.dim())), placement.counts)
    assert placement is None or isinstance(placement, Replicated)
    return tensor
