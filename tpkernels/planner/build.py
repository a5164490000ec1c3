"""Models built from plans, of the layers that there are.

    linear layers       1-D: ``ColumnParallelLinear`` and ``RowParallelLinear``, on path "fused" where that can be; the
                        others: ``nn.grids.GridLinear``
    norms, embedding    ``nn.RMSNorm`` and ``nn.LayerNorm`` where rows are whole on a rank, else those of ``nn.grids``
    loss                ``nn.grids.cross_entropy``
    between             ``nn.grids.redistribute``, where placements differ

Each layer lies on the ranks of one copy. A hook on its parameters sums gradients over copies, so that they are complete
behind ``backward()``, as everywhere in this library. Names of parameters are those of ``ParallelTransformerBlock``,
values those of the unsharded model of the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tpkernels import nn as tnn
from tpkernels.comm.faults import timeout_s
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.grids import grid_1d
from tpkernels.grids.layout import Layout
from tpkernels.grids.mesh import ProcessGrid
from tpkernels.nn import grids
from tpkernels.nn.attention import for_queries, queries_of
from tpkernels.nn.sharding import placement_of
from tpkernels.ops._groups import Group, GroupLike, group_name_of, resolve
from tpkernels.planner.model import LAYER
from tpkernels.planner.plan import Plan
from tpkernels.planner.problem import input_of, output_of
from tpkernels.planner.strategies import Placement, Strategy, kv_copies

__all__ = ["PlannedModel", "build_model"]


def build_model(
    plan: Plan,
    group: GroupLike = None,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    path: str = "auto",
) -> PlannedModel:
    """See ``tpkernels.build``."""
    info = resolve(group_name_of(group))
    if info.world != plan.world:
        raise ArgumentError(
            f"plan: it is for {plan.world} ranks, but group {info.name!r} has {info.world}; plan for {info.world}, or "
            f"pass a group of {plan.world}."
        )
    plan.check()
    if device is not None and torch.device(device).type == "meta":
        raise ArgumentError("device: a planned model is filled when it is built, but the device is meta.")
    _align_names(info)
    where = torch.device(device or torch.get_default_device())
    ranks = _Ranks(info, timedelta(seconds=timeout_s(info, where)))
    model = PlannedModel(plan, ranks, {"dtype": dtype, "device": device}, path)
    tnn.init_weights_(model, seed=seed)
    return model


@dataclass(frozen=True, eq=False)
class _Site:
    """One copy's ranks, of which this is one, and the ranks that stand where this one does in the other copies."""

    name: str
    rank: int
    others: dist.ProcessGroup | None
    copies: int

    def grid(self, layout: Layout) -> ProcessGrid:
        """The copy's ranks as the layout's grid."""
        return ProcessGrid(layout.grid, self.name, self.rank, tuple(range(layout.grid.world)))

    def sum_gradients(self, module: nn.Module) -> None:
        """Over copies, each time one is made."""
        if self.others is None:
            return
        group = self.others

        def summed(gradient: Tensor) -> Tensor:
            total = gradient.contiguous().clone()
            dist.all_reduce(total, group=group)
            return total

        for parameter in module.parameters():
            parameter.register_hook(summed)


@dataclass(eq=False)
class _Ranks:
    """The group, and the parts of it that strategies need, each made once. Ranks ask for them in the same order."""

    group: Group
    timeout: timedelta
    _sites: dict[int, _Site] = field(default_factory=dict)

    @property
    def grid(self) -> ProcessGrid:
        """All ranks in a row: redistribution looks at layouts alone."""
        world = self.group.world
        return ProcessGrid(grid_1d(world), self.group.name, self.group.rank, tuple(range(world)))

    def site(self, strategy: Strategy) -> _Site:
        """Where this rank stands."""
        size, info = strategy.ranks, self.group
        if size not in self._sites:
            every = dist.get_process_group_ranks(info.process_group)
            copy, rank = divmod(info.rank, size)
            name, others = info.name, None
            if size < info.world:
                inside = [every[at : at + size] for at in range(0, info.world, size)]
                name = _made(inside, copy, self.timeout).group_name
                others = _made([every[at::size] for at in range(size)], rank, self.timeout)
            self._sites[size] = _Site(name, rank, others, strategy.copies)
        return self._sites[size]


def _made(parts: Sequence[Sequence[int]], own: int, timeout: timedelta) -> dist.ProcessGroup:
    """The group of the ranks ``parts[own]``, which this rank is among; all of ``parts`` come here.

    Where they are the whole job every rank makes every group, as torch wants it. Else the others do not know of this.
    """
    if sum(map(len, parts)) == dist.get_world_size():
        made = [dist.new_group(list(part), timeout=timeout) for part in parts][own]
    else:
        made = dist.new_group(list(parts[own]), timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _align_names(info: Group) -> None:
    """Groups that a part of the job makes are named by how many the process has made before; ranks that have made
    different numbers, with others, would wait for one another until the timeout."""
    world = getattr(dist.distributed_c10d, "_world", None)
    count = getattr(world, "group_count", None)
    if world is None or count is None or info.world == dist.get_world_size():
        return
    counts: list[Any] = [None] * info.world
    dist.all_gather_object(counts, count, group=info.process_group)
    world.group_count = max(counts)


class _Moved(nn.Module):
    """A tensor [rows here, features here] from one placement to another."""

    def __init__(self, source: Placement, target: Placement, features: int, rows: int, ranks: _Ranks) -> None:
        super().__init__()
        self.same = source.same(target)
        self.source, self.target = source.full, target.full
        self.shape, self.grid = (rows, features), ranks.grid

    def forward(self, x: Tensor) -> Tensor:
        """To ``target``."""
        if self.same:
            return x
        return grids.redistribute(x, self.source, self.target, self.grid, shape=self.shape)


class _Maker:
    """Layers of a plan."""

    def __init__(self, plan: Plan, ranks: _Ranks, options: dict[str, Any], path: str) -> None:
        self.plan, self.model, self.ranks, self.options, self.path = plan, plan.model, ranks, options, path

    def linears(self, operator: str, names: Sequence[str], strategy: Strategy) -> dict[str, nn.Module]:
        """The operator's layers, by name."""
        linear, site = self.model.linears[operator], self.ranks.site(strategy)
        options: dict[str, Any] = {**self.options, "path": self.path}
        options["bias"] = self.model.style == "gpt" and operator != "head"
        if strategy.copies > 1:
            options["gradient_accumulation_fusion"] = False  # the hook has to see the gradient
        make: Any
        if strategy.method.startswith("1d"):
            options |= {"group": site.name, "sequence_parallel": strategy.method == "1d-sp"}
            make = tnn.RowParallelLinear if linear.back else tnn.ColumnParallelLinear
        else:
            method = strategy.one(linear.back)
            options |= {"method": method, "grid": site.grid(method.home("X"))}
            make = grids.GridLinear
        sizes = dict(zip(names, linear.out_features, strict=True))
        made = {name: make(linear.in_features, size, **options) for name, size in sizes.items()}
        shared = kv_copies(strategy.inner, self.model) if operator == "qkv" else 1
        if shared > 1:
            parts = strategy.ranks // shared
            for name in ("k_proj", "v_proj"):
                made[name] = tnn.SharedColumnParallelLinear(linear.in_features, sizes[name], parts, **options)
        for layer in made.values():
            site.sum_gradients(layer)
        return made

    def norm(self, strategy: Strategy) -> nn.Module:
        """In front of a linear layer of the strategy."""
        site, placement = self.ranks.site(strategy), strategy.outer
        hidden, llama = self.model.hidden, self.model.style == "llama"
        made: nn.Module
        if placement.column_parts == 1:
            kind = tnn.RMSNorm if llama else tnn.LayerNorm
            cut = placement.row_parts > placement.copies
            made = kind(hidden, group=site.name, sequence_parallel=cut, **self.options)
        else:
            on_grid = grids.RMSNorm if llama else grids.LayerNorm
            made = on_grid(hidden, layout=placement.layout, grid=site.grid(placement.layout), **self.options)
        site.sum_gradients(made)
        return made

    def moved(self, source: Placement, target: Placement, features: int) -> _Moved:
        """From one operator to another."""
        return _Moved(source, target, features, self.model.tokens, self.ranks)


def _outputs(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Of layers of one operator on its input, which is brought once for all of them."""
    grid_layers = [layer for layer in layers if isinstance(layer, grids.GridLinear)]
    if grid_layers:
        return grids.shared_input(grid_layers, x)
    columns = [layer for layer in layers if isinstance(layer, tnn.ColumnParallelLinear)]
    if columns:
        return tnn.column_parallel(columns, x)
    return [layer(x) for layer in layers]


class _Block(nn.Module):
    """h = x + attention(norm(x)); y = h + mlp(norm(h)); x [rows here, hidden here] as ``stream`` says, y as the last
    residual sum lies."""

    def __init__(self, maker: _Maker, stream: Placement, choices: dict[str, Strategy]) -> None:
        super().__init__()
        model = maker.model
        into = {name: input_of(name, strategy) for name, strategy in choices.items()}
        behind = {name: output_of(name, strategy) for name, strategy in choices.items()}
        self.model = model
        heads, kv_heads, at = model.heads, model.kv_heads, choices["qkv"]
        # Of each kv head that a rank holds, how many of its q heads use it; None: it holds none that another does.
        shared = kv_copies(at.inner, model) > 1
        rank = maker.ranks.site(at).rank
        self.queries = queries_of(heads, kv_heads, rank, at.ranks) if shared else None
        self.attention_norm = maker.norm(choices["qkv"])
        self.mlp_norm = maker.norm(choices["up"])
        self.up = ["gate_proj", "up_proj"] if model.gated else ["up_proj"]
        self.attention = nn.ModuleDict(
            {
                **maker.linears("qkv", ["q_proj", "k_proj", "v_proj"], choices["qkv"]),
                **maker.linears("out", ["o_proj"], choices["out"]),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                **maker.linears("up", self.up, choices["up"]),
                **maker.linears("down", ["down_proj"], choices["down"]),
            }
        )
        middle, last = into["attention_residual"], into["mlp_residual"]
        kv = model.kv_heads * model.head_dim
        self._ways = [
            maker.moved(stream, into["qkv"], model.hidden),
            maker.moved(behind["qkv"], into["core"], model.width),
            maker.moved(behind["qkv"], into["core"], kv),
            maker.moved(behind["core"], into["out"], model.width),
            maker.moved(behind["out"], middle, model.hidden),
            maker.moved(stream, middle, model.hidden),
            maker.moved(middle, into["up"], model.hidden),
            maker.moved(behind["up"], into["activation"], model.ffn),
            maker.moved(behind["activation"], into["down"], model.ffn),
            maker.moved(behind["down"], last, model.hidden),
            maker.moved(middle, last, model.hidden),
        ]
        self.output = last

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        (to_qkv, to_core, kv_to_core, to_out, to_sum, over, to_up, to_act, to_down, to_last, over_mlp) = (
            self._ways
        )
        q, k, v = _outputs(
            [self.attention[key] for key in ("q_proj", "k_proj", "v_proj")], self.attention_norm(to_qkv(x))
        )
        y = self._core(to_core(q), kv_to_core(k), kv_to_core(v))
        h = over(x) + to_sum(self.attention["o_proj"](to_out(y)))
        inner = [
            to_act(part) for part in _outputs([self.mlp[key] for key in self.up], self.mlp_norm(to_up(h)))
        ]
        act = F.silu(inner[0]) * inner[1] if self.model.gated else F.gelu(inner[0])
        last: Tensor = over_mlp(h) + to_last(self.mlp["down_proj"](to_down(act)))
        return last

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[rows here, width here] each -> as q: rows are whole sequences, columns whole heads."""
        model = self.model
        tables = tnn.rotary_tables(model.sequence, model.head_dim, device=q.device)

        def heads(t: Tensor) -> Tensor:
            return t.view(-1, model.sequence, t.shape[-1] // model.head_dim, model.head_dim).transpose(1, 2)

        q, k, v = tnn.apply_rotary(heads(q), *tables), tnn.apply_rotary(heads(k), *tables), heads(v)
        if self.queries is not None:
            k, v = for_queries(k, self.queries), for_queries(v, self.queries)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(2).flatten(0, 1)


class PlannedModel(nn.Module):
    """A decoder as a plan cuts it: ``model(ids)`` are logits, ``model.loss(ids, targets)`` the mean cross-entropy.

    Gradients are complete behind ``backward()``. ``tnn.full_state_dict`` and ``tnn.load_full_state_dict`` take it;
    gradients are clipped by ``clip_grad_norm_`` of the model itself, since its layers lie on several groups.

    Shape:
        ids, targets: [batch, sequence] of the plan's model, the same on every rank, int64.
        logits: [rows here, vocabulary here], as ``logits_placement`` says.
    Raises:
        ShapeError: ids or targets of another shape.
    """

    def __init__(self, plan: Plan, ranks: _Ranks, options: dict[str, Any], path: str) -> None:
        super().__init__()
        maker = _Maker(plan, ranks, options, path)
        model, first, last = plan.model, plan.choices[0], plan.choices[-1]
        self.plan, self._grid = plan, ranks.grid
        site = ranks.site(first)
        layout = first.outer.layout
        self._copy = ranks.group.rank // first.ranks, first.copies
        self.embed = grids.Embedding(
            model.vocab, model.hidden, layout=layout, grid=site.grid(layout), **options
        )
        site.sum_gradients(self.embed)
        stream = first.outer
        blocks = []
        for number in range(model.layers):
            begin = 1 + number * len(LAYER)
            here = dict(zip(LAYER, plan.choices[begin : begin + len(LAYER)], strict=True))
            blocks.append(_Block(maker, stream, here))
            stream = blocks[-1].output
        self.layers = nn.ModuleList(blocks)
        self._to_head = maker.moved(stream, last.outer, model.hidden)
        self.norm = maker.norm(last)
        self.head = maker.linears("head", ["head"], last)["head"]
        self.logits_placement = last.inner

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        self._check(ids, "ids")
        copy, copies = self._copy
        x = self.embed(ids.chunk(copies)[copy].flatten())
        for block in self.layers:
            x = block(x)
        logits: Tensor = self.head(self.norm(self._to_head(x)))
        return logits

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean over all targets, the same bits on every rank."""
        self._check(targets, "targets")
        layout, vocab = self.logits_placement.full, self.plan.model.vocab
        return grids.cross_entropy(self(ids), targets.flatten(), vocab, layout=layout, grid=self._grid)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales gradients so that their norm, the unsharded model's, is ``max_norm`` at most; returns it before."""
        by_group: dict[str, list[Tensor]] = {}
        for parameter in self.parameters():
            placement = placement_of(parameter)
            assert placement is not None
            by_group.setdefault(placement.group_name, []).append(parameter)
        norms = [tnn.grad_norm(some, group=name) for name, some in by_group.items()]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def _check(self, given: Tensor, name: str) -> None:
        expected = [self.plan.model.batch, self.plan.model.sequence]
        if list(given.shape) != expected:
            raise ShapeError(
                f"{name}: expected {expected}, the batch that was planned for, got {list(given.shape)}; plan for it "
                "(ModelShape.with_batch)."
            )
