"""Tensor-parallel layers: torch.nn's Linear, Embedding and so on with weights cut over a process group.

    column-parallel and row-parallel linear layers, MLP, attention, RMSNorm, LayerNorm, embeddings, cross-entropy,
    a transformer block in the styles of Llama and GPT, with recomputation; starting values and dropout that do not
    depend on the world (``init``, ``init_weights_``, ``dropout``); unsharded state dicts (``full_state_dict``,
    ``load_full_state_dict``), from and to packed checkpoints (``split_packed``, ``pack``), and gradient clipping
    (``clip_grad_norm_``); checkpoints through ``torch.distributed.checkpoint`` (``distributed_state_dict``). Linear
    layers and blocks on grids of ranks, 2-D, 2.5-D, 3-D and spatial-temporal: ``grids``.

After ``loss.backward()`` every gradient is complete: sharded parameters have their shard's, replicated ones
the whole, equal on every rank. Nothing is left for the trainer to reduce within the tensor-parallel group. That of a
linear layer's weight is in ``weight.main_grad``, in float32, where the weight has such an attribute, and comes with
``backward_dw()`` where it is delayed (``linear``). Low-rank factors on frozen layers: ``lora``.
"""

from __future__ import annotations

from tpkernels.nn import init
from tpkernels.nn.attention import ParallelAttention
from tpkernels.nn.block import ParallelTransformerBlock
from tpkernels.nn.checkpoint import distributed_state_dict, distributed_tensors
from tpkernels.nn.embedding import PositionEmbedding, VocabParallelEmbedding
from tpkernels.nn.grad_norm import clip_grad_norm_, grad_norm
from tpkernels.nn.grids import Linear2D, Linear2p5D, Linear3D, LinearSpatialTemporal
from tpkernels.nn.linear import ColumnParallelLinear, RowParallelLinear, backward_dw, column_parallel
from tpkernels.nn.linears import ColumnParallelLinears
from tpkernels.nn.lora import (
    LoRA,
    add_lora_,
    load_lora_state_dict,
    lora_state_dict,
    merge_lora_,
    remove_lora_,
    unmerge_lora_,
)
from tpkernels.nn.loss import vocab_parallel_cross_entropy
from tpkernels.nn.masks import Dropout, dropout, keep_mask
from tpkernels.nn.mlp import ParallelMLP
from tpkernels.nn.norm import LayerNorm, RMSNorm
from tpkernels.nn.rotary import apply_rotary, rotary_tables
from tpkernels.nn.sharding import BlockShard, ParallelModule, Placement, Replicated, Shard, placement_of
from tpkernels.nn.shared_columns import SharedColumnParallelLinear
from tpkernels.nn.state import full_state_dict, full_tensors, load_full_state_dict, pack, split_packed
from tpkernels.nn.weights import init_parameter_, init_weights_

__all__ = [
    "BlockShard",
    "ColumnParallelLinear",
    "ColumnParallelLinears",
    "Dropout",
    "LayerNorm",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "LinearSpatialTemporal",
    "LoRA",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelModule",
    "ParallelTransformerBlock",
    "Placement",
    "PositionEmbedding",
    "RMSNorm",
    "Replicated",
    "RowParallelLinear",
    "Shard",
    "SharedColumnParallelLinear",
    "VocabParallelEmbedding",
    "add_lora_",
    "apply_rotary",
    "backward_dw",
    "clip_grad_norm_",
    "column_parallel",
    "distributed_state_dict",
    "distributed_tensors",
    "dropout",
    "full_state_dict",
    "full_tensors",
    "grad_norm",
    "init",
    "init_parameter_",
    "init_weights_",
    "keep_mask",
    "load_full_state_dict",
    "load_lora_state_dict",
    "lora_state_dict",
    "merge_lora_",
    "pack",
    "placement_of",
    "remove_lora_",
    "rotary_tables",
    "split_packed",
    "unmerge_lora_",
    "vocab_parallel_cross_entropy",
]
