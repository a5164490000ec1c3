"""Embedding on a grid: the table is cut over all ranks, its vectors' elements as features are, its ids among the
others.

For each part of the rows in turn, every rank looks up the ids that it has rows of the table for, with zeros for the
rest, and sends that to the rank that has those rows; there one addend is not zero, so the sum is exact. The
gradient takes the same way back. So no rank ever has more than one part of the vectors, or of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.grids.execute import move
from tpkernels.grids.features import Lookup, ids_home, lookup
from tpkernels.grids.layout import Layout
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.grids.redistribute import would_fit
from tpkernels.nn._checks import agreed, check_indices, digest
from tpkernels.nn.grids._distribution import Distribution
from tpkernels.nn.sharding import BlockShard, ParallelModule
from tpkernels.nn.weights import init_parameter_
from tpkernels.ops._collectives import accumulate_dtype

__all__ = ["Embedding"]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: Embedding) -> Tensor:
        shape = ids.numel(), layer.embedding_dim
        start, stop = layer.ids
        made: Tensor | None = None
        for ways, some in layer.parts(ids):
            local = some - start
            mine = (local >= 0) & (local < stop - start)
            vectors = torch.where(mine.unsqueeze(-1), weight[torch.where(mine, local, 0)], 0.0)
            got = move(
                vectors, ways.partial, ways.owners, shape, layer.distribution.grid, vectors, "embedding"
            )
            made = made if got is None else got
        assert made is not None
        ctx.layer, ctx.dtype = layer, weight.dtype
        ctx.save_for_backward(ids)
        rows = ids.shape[0] * made.shape[0] // max(ids.numel(), 1)
        return made.to(weight.dtype).view(rows, *ids.shape[1:], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ArgumentError(
                "create_graph: gradients of an embedding on a grid cannot be differentiated again, but create_graph is "
                "true."
            )
        layer: Embedding = ctx.layer
        (ids,) = ctx.saved_tensors
        start, stop = layer.ids
        dy = dy.reshape(-1, dy.shape[-1])
        grad = torch.zeros(stop - start, dy.shape[1], dtype=accumulate_dtype(dy.dtype), device=dy.device)
        for ways, some in layer.parts(ids):
            own = dy if ways.owners.blocks[layer.distribution.grid.position] is not None else None
            shape = ids.numel(), layer.embedding_dim
            got = move(
                own, ways.owners, ways.everyone, shape, layer.distribution.grid, dy, "embedding's gradient"
            )
            assert got is not None
            local = some - start
            mine = (local >= 0) & (local < stop - start)
            # Zeros to some row for the ids of others: to leave them out, the host would have to wait for a GPU.
            terms = torch.where(mine.unsqueeze(-1), got, 0.0).to(grad.dtype)
            grad.index_put_((torch.where(mine, local, 0),), terms, accumulate=True)  # in order, on a GPU too
        return None, grad.to(ctx.dtype), None


class Embedding(ParallelModule):
    """Vectors of token ids; ``weight`` [ids here, elements here] is this rank's block of the table.

    Args:
        num_embeddings, embedding_dim: of the whole table. All ranks that share features must get equally many ids.
        layout, grid: how the vectors are to lie: ``input_layout`` and ``process_grid`` of the layer behind.
        seed, init_std, name, dtype, device: as in ``VocabParallelEmbedding``.
    Shape:
        ids: [rows, ...], int64 or int32, the same on every rank -> [rows here, ..., elements here].
    Raises:
        ArgumentError: a size that the grid does not cut evenly, an id out of range (on the CPU; on a GPU under
            ``TPK_CHECK=1``). ShapeError: rows that it does not cut. DTypeError: ids that are no integers.
    """

    weight: torch.nn.Parameter
    is_embedding = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        layout: Layout,
        grid: ProcessGrid,
        seed: int = 0,
        init_std: float | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        distribution = Distribution(layout, grid, embedding_dim, "embedding_dim")
        table = ids_home(layout)
        parts = table.block(grid.position).rows.parts
        if num_embeddings < 1 or num_embeddings % parts:
            raise ArgumentError(
                f"num_embeddings: the vocabulary is cut in {parts} equal parts on a grid of {layout.grid} ranks, "
                f"but it is {num_embeddings}; {would_fit(num_embeddings, parts)} would fit."
            )
        super().__init__(grid.group_name)
        self.distribution, self.table = distribution, table
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.seed, self.init_std, self.name = seed, init_std, name
        shape = num_embeddings, embedding_dim
        self._add_parameter("weight", shape, BlockShard(table, shape, grid), dtype, device)
        self._lookups = [(rows, lookup(layout, rows)) for rows in distribution.row_spans]
        self.reset_parameters()

    @property
    def output_layout(self) -> Layout:
        """Of the vectors."""
        return self.distribution.layout

    @property
    def ids(self) -> tuple[int, int]:
        """First id, and the one behind the last, that this rank has vectors of."""
        return self.table.block(self.distribution.grid.position).rows.elements(self.num_embeddings)

    def parts(self, ids: Tensor) -> Iterator[tuple[Lookup, Tensor]]:
        """Each part of the rows, with its ids [n]."""
        for rows, ways in self._lookups:
            begin, end = rows.elements(ids.shape[0])
            yield ways, ids[begin:end].reshape(-1)

    def reset_parameters(self) -> None:
        """Draws the weight again from (seed, name)."""
        full_name = f"{self.name}.weight" if self.name else "weight"
        init_parameter_(self.weight, seed=self.seed, name=full_name, std=self.init_std, embedding=True)

    def forward(self, ids: Tensor) -> Tensor:
        """See the class."""

        def check() -> None:
            check_indices(ids, self.num_embeddings, "ids")
            if ids.dim() < 1:
                raise ShapeError("ids: expected at least one dimension, [rows, ...], but there is none.")
            self.distribution.take_rows(ids, "ids")

        def facts() -> dict[str, object]:
            asks = self.weight.requires_grad
            return {
                "the shape of ids": list(ids.shape),
                "checksum of ids": digest(ids),
                "requires_grad": asks,
            }

        agreed(type(self).__name__, self.group_name, ids, check, facts)
        y: Tensor = self._looked_up(ids)
        return y

    @torch.compiler.disable(reason="tpkernels' grids send point to point, which no compiled graph can hold")
    def _looked_up(self, ids: Tensor) -> Tensor:
        y: Tensor = _Lookup.apply(ids, self.weight, self)
        return y

    def extra_repr(self) -> str:
        """Sizes."""
        text = f"{self.num_embeddings}, {self.embedding_dim}, local weight={list(self.weight.shape)}"
        return f"{text}, grid={self.distribution.layout.grid}, {self._group_repr()}"
