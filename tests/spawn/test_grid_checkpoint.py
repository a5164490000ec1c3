"""torch.distributed.checkpoint: saved on one grid, loaded on another, in one dimension and dense, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import nn as tnn
from tpkernels.errors import ArgumentError
from tpkernels.nn import grids
from tpkernels.testing import RankContext, RankPool

HIDDEN, INNER, VOCAB = 16, 48, 32
WAYS = {
    "2d": (4, {"method": "2d"}),
    "2.5d": (8, {"method": "2.5d", "depth": 2}),
    "2.5d, depth fastest": (16, {"method": "2.5d", "depth": 4, "mesh": (2, 2, 4)}),
    "3d": (8, {"method": "3d"}),
    "spatial_temporal": (16, {"method": "spatial_temporal"}),
    "1-D": (3, {}),
}


class Model(nn.ModuleDict):
    """The same names in every way."""

    def __init__(self, embed: nn.Module, norm: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__({"embed": embed, "norm": norm, "up": up, "down": down})


def dense() -> Model:
    return Model(
        nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
    )


def sharded(ctx: RankContext, way: str) -> Model:
    options = {"group": ctx.group, **WAYS[way][1]}
    if mesh := options.pop("mesh", None):
        options["group"] = DeviceMesh("cpu", torch.arange(ctx.world).view(mesh))
    if way == "1-D":
        return Model(
            tnn.VocabParallelEmbedding(VOCAB, HIDDEN, group=ctx.group),
            tnn.LayerNorm(HIDDEN, group=ctx.group),
            tnn.ColumnParallelLinear(HIDDEN, INNER, group=ctx.group),
            tnn.RowParallelLinear(INNER, HIDDEN, group=ctx.group),
        )
    on = grids.GridStrategy(**options)
    where = {"layout": on.layout, "grid": on.grid}
    return Model(
        grids.Embedding(VOCAB, HIDDEN, **where),
        grids.LayerNorm(HIDDEN, **where),
        on.into(HIDDEN, INNER),
        on.back(INNER, HIDDEN),
    )


def values(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn_like(t) for name, t in dense().state_dict().items()}


def save(ctx: RankContext, way: str, seed: int, folder: str) -> None:
    model = sharded(ctx, way)
    tnn.load_full_state_dict(model, values(seed))
    moments = {f"moment.{n}": 2 * p.detach() for n, p in model.named_parameters()}
    like = {f"moment.{n}": p for n, p in model.named_parameters()}
    state = {**tnn.distributed_state_dict(model), **tnn.distributed_tensors(moments, like)}
    dcp.save(state, checkpoint_id=folder, process_group=ctx.group)


def load(ctx: RankContext, way: str, seed: int, folder: str) -> None:
    model = sharded(ctx, way)
    kept = model["up"].weight
    dcp.load(tnn.distributed_state_dict(model), checkpoint_id=folder, process_group=ctx.group)
    assert model["up"].weight is kept
    full = tnn.full_state_dict(model)
    for name, want in values(seed).items():
        assert torch.equal(full[name], want), name


def load_dense(folder: str, seed: int) -> None:
    model, want = dense(), values(seed)
    state: dict[str, Any] = model.state_dict()
    state |= {f"moment.{name}": torch.zeros_like(t) for name, t in want.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name, full in want.items():
        assert torch.equal(model.state_dict()[name], full), name
        assert torch.equal(state[f"moment.{name}"], 2 * full), name


def save_dense(folder: str, seed: int) -> None:
    dcp.save(values(seed), checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("way", WAYS)
def test_between_grids_and_dense(many_ranks: RankPool, tmp_path: Path, seed: int, way: str) -> None:
    many_ranks.run(save, way, seed, str(tmp_path / "a"), world=WAYS[way][0])
    load_dense(str(tmp_path / "a"), seed)
    others = list(WAYS)
    other = others[(others.index(way) + 1) % len(others)]
    many_ranks.run(load, other, seed, str(tmp_path / "a"), world=WAYS[other][0])
    save_dense(str(tmp_path / "b"), seed + 1)
    many_ranks.run(load, way, seed + 1, str(tmp_path / "b"), world=WAYS[way][0])


def load_other(ctx: RankContext, folder: str) -> None:
    layer = grids.Linear2D(HIDDEN, 2 * INNER, group=ctx.group)
    model = nn.ModuleDict({"up": layer})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load(tnn.distributed_state_dict(model), checkpoint_id=folder, process_group=ctx.group)


def test_another_size_is_refused(many_ranks: RankPool, tmp_path: Path, seed: int) -> None:
    save_dense(str(tmp_path), seed)
    many_ranks.run(load_other, str(tmp_path), world=4)


def block_has_no_values(ctx: RankContext) -> None:
    state = tnn.distributed_state_dict(grids.Linear2D(8, 8, group=ctx.group))
    assert state["weight"].shape == (8, 8) and "[4, 4] at" in repr(state["weight"])
    with pytest.raises(ArgumentError, match=r"has no values of its own; use its \.local"):
        state["weight"] + 1
    with pytest.raises(ArgumentError, match="has no values"):
        copy.deepcopy(state["weight"])


def test_a_block_has_no_values(many_ranks: RankPool) -> None:
    many_ranks.run(block_has_no_values, world=4)
