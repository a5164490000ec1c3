"""Tensor-parallel layers: torch.nn's Linear, Embedding and so on with weights cut over a process group.

    column-parallel and row-parallel linear layers, MLP, attention, RMSNorm, embedding, cross-entropy, a
    transformer block; starting values that do not depend on the world (``init``, ``init_weights_``);
    unsharded state dicts (``full_state_dict``, ``load_full_state_dict``) and gradient clipping
    (``clip_grad_norm_``).

After ``loss.backward()`` every gradient is complete: sharded parameters have their shard's, replicated ones
the whole, equal on every rank. Nothing is left for the trainer to reduce within the tensor-parallel group. That of a
linear layer's weight is in ``weight.main_grad``, in float32, where the weight has such an attribute (``linear``).
"""

from __future__ import annotations

from tpkernels.nn import init
from tpkernels.nn.attention import ParallelAttention
from tpkernels.nn.block import ParallelTransformerBlock
from tpkernels.nn.embedding import VocabParallelEmbedding
from tpkernels.nn.grad_norm import clip_grad_norm_, grad_norm
from tpkernels.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from tpkernels.nn.linears import ColumnParallelLinears
from tpkernels.nn.loss import vocab_parallel_cross_entropy
from tpkernels.nn.mlp import ParallelMLP
from tpkernels.nn.norm import RMSNorm
from tpkernels.nn.rotary import apply_rotary, rotary_tables
from tpkernels.nn.sharding import ParallelModule, Placement, Replicated, Shard, placement_of
from tpkernels.nn.state import full_state_dict, full_tensors, load_full_state_dict
from tpkernels.nn.weights import init_parameter_, init_weights_

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinears",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelModule",
    "ParallelTransformerBlock",
    "Placement",
    "RMSNorm",
    "Replicated",
    "RowParallelLinear",
    "Shard",
    "VocabParallelEmbedding",
    "apply_rotary",
    "clip_grad_norm_",
    "column_parallel",
    "full_state_dict",
    "full_tensors",
    "grad_norm",
    "init",
    "init_parameter_",
    "init_weights_",
    "load_full_state_dict",
    "placement_of",
    "rotary_tables",
    "vocab_parallel_cross_entropy",
]
