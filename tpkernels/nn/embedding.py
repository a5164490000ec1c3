"""Embedding whose vocabulary is cut over a process group.

Every rank looks up the ids in its rows [start, start + size) and contributes zeros for the others; the sum
over the group, in which one term is not zero, is exact in any type. Under sequence parallelism the sum is a
reduce-scatter: every rank receives the vectors of its part of the sequence. The vocabulary need not divide by
the world (no padding rows, so a checkpoint has the true size), and a rank may have no rows at all. Its
gradient is dense, as is ``nn.Embedding``'s by default.

Tied embeddings: ``embedding.logits(x)`` is the output projection with the same rows, cut as a ``ColumnParallelLinear``
head cuts them; ``weight`` gets the sum of both gradients, and a state dict has it once. ``head.weight =
embedding.weight`` does the same under two names, as in plain torch.
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

__all__ = ["PositionEmbedding", "VocabParallelEmbedding", "lookup"]


def lookup(ids: Tensor, weight: Tensor, start: int, padding_idx: int | None = None) -> Tensor:
    """This rank's term of the sum over the group: vectors of ids in ``weight``'s rows, zeros for all others.

    Args:
        ids: [...], of the whole vocabulary. weight: [rows, dim], rows ``start`` to ``start + rows``; perhaps none.
        padding_idx: an id whose vector gets no gradient, as in ``F.embedding``.
    Returns:
        [..., dim].
    """
    rows = weight.shape[0]
    if rows == 0:  # zeros that still depend on the weight, so that it gets its (empty) gradient
        return weight.sum(0).expand(*ids.shape, weight.shape[1])
    local = ids - start
    mine = (local >= 0) & (local < rows)
    padding = None if padding_idx is None or not 0 <= padding_idx - start < rows else padding_idx - start
    x = F.embedding(torch.where(mine, local, 0), weight, padding)
    return torch.where(mine.unsqueeze(-1), x, 0.0)


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
            self._check_sizes(shard_sizes)
            if self.sequence_parallel and self.sequence_dim >= ids.dim():
                raise ShapeError(
                    f"ids: the embedding runs sequence-parallel along dimension {self.sequence_dim}, so ids must "
                    f"have more than {self.sequence_dim} dimensions, but their shape is {list(ids.shape)}."
                )

        self._agree(ids, check)
        x = lookup(ids, self.weight, self.vocab_start)
        if not self.sequence_parallel:
            return tpk.regions.all_reduce(x, self.group_name)
        sizes = None if shard_sizes is None else list(shard_sizes)
        return tpk.regions.reduce_scatter(x, self.sequence_dim, self.group_name, shard_sizes=sizes)

    def logits(self, x: Tensor, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """x times the embedding's rows: the output projection of a model with tied embeddings.

        Args:
            x: [..., embedding_dim], under sequence_parallel this rank's part of dimension ``sequence_dim``.
            shard_sizes: sequence rows of every rank where they are not equal.
        Returns:
            [..., vocab_sizes[rank]], all of the sequence; what ``vocab_parallel_cross_entropy`` takes. The weight's
            gradient goes to ``weight.grad``, to that of the vectors.
        """

        def check() -> None:
            self._check_last_dim(x, self.embedding_dim, "embedding_dim")
            self._check_sizes(shard_sizes)
            if self.sequence_parallel:
                self._check_sequence_dim(x, self.sequence_dim)

        self._agree(x, check)
        weights = [self.weight.t()]
        out: list[Tensor]
        if not self.sequence_parallel:
            out = tpk.matmul_replicated(x, weights, self.group_name, path=self.path)
        else:
            sizes = None if shard_sizes is None else list(shard_sizes)
            out = tpk.all_gather_matmul(
                x, weights, self.group_name, gather_dim=self.sequence_dim, shard_sizes=sizes, path=self.path
            )
        return out[0]

    def _check_sizes(self, shard_sizes: Sequence[int] | None) -> None:
        if shard_sizes is not None and not self.sequence_parallel:
            raise ArgumentError(
                "shard_sizes: the embedding was made without sequence_parallel, so its output is not cut along "
                f"the sequence; leave shard_sizes out (it is {list(shard_sizes)})."
            )

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, local weight={list(self.weight.shape)}, "
            f"sequence_parallel={self.sequence_parallel}, {self._group_repr()}"
        )


class PositionEmbedding(ParallelModule):
    """Learned vectors of positions, whole on every rank; what GPT adds to the vectors of tokens.

        x = embed(ids, sizes) + positions(ids, sizes)

    Args:
        length: positions that there are.
        embedding_dim: elements of a vector.
        The others: as in ``VocabParallelEmbedding``, whose ``sequence_dim`` also says here where positions run, with
            and without sequence_parallel.
    Shape:
        ids: those of the embedding, for their shape alone -> [S, 1, embedding_dim] (sequence_dim 0) or
            [1, S, embedding_dim] (sequence_dim 1), under sequence_parallel this rank's part of the sequence.
    Raises:
        ArgumentError: more positions than ``length``.
    """

    weight: torch.nn.Parameter
    is_embedding = True

    def __init__(
        self,
        length: int,
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
        for argument, value in (("length", length), ("embedding_dim", embedding_dim)):
            if value < 1:
                raise ArgumentError(f"{argument}: positions need at least 1, but it is {value}.")
        check_counts_from_front(sequence_dim)
        self.length = length
        self.embedding_dim = embedding_dim
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.seed = seed
        self.init_std = init_std
        self.name = name
        self._add_parameter("weight", (length, embedding_dim), self._replicated(), dtype, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight again from (seed, name)."""
        full_name = f"{self.name}.weight" if self.name else "weight"
        init_parameter_(self.weight, seed=self.seed, name=full_name, std=self.init_std, embedding=True)

    def forward(self, ids: Tensor, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """See the class; ``shard_sizes``: as in ``VocabParallelEmbedding.forward``."""
        sizes: list[int] = []

        def check() -> None:
            if self.sequence_dim >= ids.dim():
                raise ShapeError(
                    f"ids: positions run along dimension {self.sequence_dim}, so ids must have more than "
                    f"{self.sequence_dim} dimensions, but their shape is {list(ids.shape)}."
                )
            total = ids.shape[self.sequence_dim]
            if total > self.length:
                raise ArgumentError(
                    f"ids: there are {self.length} positions, but the sequence has {total}; make the embedding with "
                    f"length={total} or more."
                )
            sizes.extend(tpk.shard_sizes(total, self.world) if shard_sizes is None else shard_sizes)
            if self.sequence_parallel and (len(sizes) != self.world or sum(sizes) != total):
                raise ArgumentError(
                    f"shard_sizes: they must be {self.world} sizes that sum to the {total} rows of ids, but they "
                    f"are {sizes}."
                )

        self._agree(ids, check)
        if self.sequence_parallel:
            weight = tpk.regions.copy_to_group(self.weight, self.group_name)
            mine = weight.narrow(0, sum(sizes[: self.rank]), sizes[self.rank])
        else:
            mine = self.weight.narrow(0, 0, ids.shape[self.sequence_dim])
        shape = [1] * ids.dim()
        shape[self.sequence_dim] = mine.shape[0]
        return mine.view(*shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.length}, {self.embedding_dim}, sequence_parallel={self.sequence_parallel}, {self._group_repr()}"
