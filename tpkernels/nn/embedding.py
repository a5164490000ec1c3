"""Embedding whose vocabulary is cut over a process group.

Every rank looks up the ids in its rows [start, start + size) and contributes zeros for the others; the sum
over the group, in which one term is not zero, is exact in any type. Under sequence parallelism the sum is a
reduce-scatter: every rank receives the vectors of its part of the sequence. The vocabulary need not divide by
the world (no padding rows, so a checkpoint has the true size), and a rank may have no rows at all. Its
gradient is dense, as is ``nn.Embedding``'s by default.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import tpkernels as tpk
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.nn._checks import check_counts_from_front, check_indices
from tpkernels.nn.sharding import GroupLike, ParallelModule
from tpkernels.nn.weights import init_parameter_

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(ParallelModule):
    """Vectors of token ids; ``weight`` is this rank's rows, [vocab_sizes[rank], embedding_dim].

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: elements of a vector.
        sequence_parallel, sequence_dim: return this rank's part of the sequence, as ``RowParallelLinear``
            does.
        group, seed, init_std, name, dtype, device: as in ``ColumnParallelLinear``; without init_std standard
            normal.
    Shape:
        ids: any shape, int64 or int32, equal on every rank -> [*ids.shape, embedding_dim], under
            sequence_parallel with this rank's part of dimension ``sequence_dim``.
    Raises:
        ArgumentError: an id out of range (on the CPU; on a GPU under ``TPK_CHECK=1``), a size that does not
            fit.
        DTypeError: ids that are not integers.
    """

    weight: torch.nn.Parameter
    is_embedding = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        seed: int = 0,
        init_std: float | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group)
        for argument, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if value < 1:
                raise ArgumentError(f"{argument}: an embedding needs at least 1, but it is {value}.")
        check_counts_from_front(sequence_dim)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.seed = seed
        self.init_std = init_std
        self.name = name
        placement = self._even(num_embeddings, 0)
        self.vocab_sizes = placement.sizes
        self.vocab_start = placement.start
        self._add_parameter("weight", (num_embeddings, embedding_dim), placement, dtype, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight again from (seed, name)."""
        full_name = f"{self.name}.weight" if self.name else "weight"
        init_parameter_(self.weight, seed=self.seed, name=full_name, std=self.init_std, embedding=True)

    def forward(self, ids: Tensor, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """See the class; ``shard_sizes``: sequence rows that every rank gets, None: ``tpk.shard_sizes``."""

        def check() -> None:
            check_indices(ids, self.num_embeddings, "ids")
            if shard_sizes is not None and not self.sequence_parallel:
                raise ArgumentError(
                    "shard_sizes: the embedding was made without sequence_parallel, so its output is not cut along "
                    f"the sequence; leave shard_sizes out (it is {list(shard_sizes)})."
                )
            if self.sequence_parallel and self.sequence_dim >= ids.dim():
                raise ShapeError(
                    f"ids: the embedding runs sequence-parallel along dimension {self.sequence_dim}, so ids must "
                    f"have more than {self.sequence_dim} dimensions, but their shape is {list(ids.shape)}."
                )

        self._agree(ids, check)
        rows = self.vocab_sizes[self.rank]
        if rows > 0:
            local = ids - self.vocab_start
            mine = (local >= 0) & (local < rows)
            x = F.embedding(torch.where(mine, local, 0), self.weight)
            x = torch.where(mine.unsqueeze(-1), x, 0.0)
        else:  # no rows: zeros that still depend on the weight, so that it gets its (empty) gradient
            x = self.weight.sum(0).expand(*ids.shape, self.embedding_dim)
        if not self.sequence_parallel:
            return tpk.regions.all_reduce(x, self.group_name)
        sizes = None if shard_sizes is None else list(shard_sizes)
        return tpk.regions.reduce_scatter(x, self.sequence_dim, self.group_name, shard_sizes=sizes)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, local weight={list(self.weight.shape)}, "
            f"sequence_parallel={self.sequence_parallel}, {self._group_repr()}"
        )
