"""The tensor-parallel model: ``tpkernels.nn`` layers under the names of ``dense.DenseModel``.

Activations are [seq, batch, width], so that the sequence is the first dimension and cutting it moves no data. With
sequence parallelism a rank holds its rows of the sequence between the layers; the sequence need not divide by the
number of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.nn import (
    ColumnParallelLinear,
    ParallelTransformerBlock,
    RMSNorm,
    VocabParallelEmbedding,
    placement_of,
    rotary_tables,
    vocab_parallel_cross_entropy,
)

from .dense import ModelConfig

__all__ = ["ParallelModel", "count_parameters", "explain_first_product"]


class ParallelModel(nn.Module):
    """Token ids [batch, seq], equal on every rank of the default group, to logits or to the loss.

    ``recipe``: of FP8, for the blocks; the head stays in high precision, as is usual.
    Raises tpkernels.errors.ArgumentError where heads or kv heads do not divide by the number of ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        sequence_parallel: bool,
        path: str,
        device: torch.device,
        recipe: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.sequence_parallel = sequence_parallel
        self.world = dist.get_world_size()
        dtype = config.torch_dtype
        self.embed = VocabParallelEmbedding(
            config.vocab, config.width, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            ParallelTransformerBlock(
                config.width,
                config.ffn,
                config.heads,
                config.kv_heads,
                activation="swiglu",
                eps=config.norm_eps,
                rotary_base=config.rope_base,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
                path=path,
                recipe=recipe,
            )
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(
            config.width, eps=config.norm_eps, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )
        self.head = ColumnParallelLinear(
            config.width,
            config.vocab,
            bias=False,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
            path=path,
        )

    def _local_logits(self, tokens: Tensor) -> Tensor:
        """[seq, batch, this rank's vocabulary]."""
        config = self.config
        seq = tokens.shape[1]
        sizes = tpk.shard_sizes(seq, self.world) if self.sequence_parallel else None
        rotary = rotary_tables(seq, config.head_dim, base=config.rope_base, device=tokens.device)
        x = self.embed(tokens.t(), shard_sizes=sizes)
        for layer in self.layers:
            x = layer(x, shard_sizes=sizes, rotary=rotary)
        logits: Tensor = self.head(self.norm(x), shard_sizes=sizes)
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, seq, vocab], the same on every rank; for sampling."""
        gathered = tpk.regions.all_gather(
            self._local_logits(tokens), -1, shard_sizes=list(self.head.out_sizes), replicated_grad=True
        )
        return gathered.transpose(0, 1)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, the same bits on every rank; logits are never gathered."""
        return vocab_parallel_cross_entropy(self._local_logits(tokens), targets.t(), None, self.config.vocab)


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, each counted once over the group."""
    total = 0
    for parameter in model.parameters():
        placement = placement_of(parameter)
        shape = parameter.shape if placement is None else placement.global_shape(parameter.shape)
        total += torch.Size(shape).numel()
    return total


def explain_first_product(model: ParallelModel, batch: int, seq: int) -> str:
    """What ``tpkernels.explain`` says of the first product of the first layer, the query projection."""
    query = model.layers[0].get_submodule("attention.q_proj")
    weight = query.get_parameter("weight").detach().t()
    if not model.sequence_parallel:
        x = weight.new_empty(seq, batch, weight.shape[0])
        return str(tpk.explain("matmul_replicated", x, [weight], None, path=str(query.path)))
    sizes = tpk.shard_sizes(seq, model.world)
    x = weight.new_empty(sizes[dist.get_rank()], batch, weight.shape[0])
    return str(tpk.explain("all_gather_matmul", x, [weight], None, path=str(query.path), shard_sizes=sizes))
