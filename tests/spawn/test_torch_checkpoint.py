"""Checkpoints of models with our styles: saved with one number of ranks, loaded with another, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch_plans import dense_llama, full, loss_of, mesh_of, parallelized, tokens

from tpkernels.testing import RankContext, RankPool

SIZES = (1, 2, 4)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def trained(ctx: RankContext, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two steps from the seed, by this many ranks."""
    model = parallelized(dense_llama(seed, layers=1), mesh_of(ctx), gather_once=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *tokens(seed + step, 2, 4)).backward()
        optimizer.step()
    return model, optimizer


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: full(value).clone() for name, value in state.items()}


def save(ctx: RankContext, seed: int, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = trained(ctx, seed)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    weights, moments = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": moments},
        checkpoint_id=folder,
        process_group=ctx.group,
        no_dist=ctx.world == 1,
    )
    out = whole(model.state_dict())
    gathered = get_model_state_dict(model, options=FULL)
    if ctx.rank == 0:
        assert gathered.keys() == out.keys()
        assert all(torch.equal(gathered[name], value) for name, value in out.items())
    return out


def load(ctx: RankContext, seed: int, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after loading, and the losses of two more steps."""
    model, optimizer = trained(ctx, seed + 1)
    weights, moments = get_state_dict(model, optimizer)
    dcp.load(
        {"model": weights, "optimizer": moments},
        checkpoint_id=folder,
        process_group=ctx.group,
        no_dist=ctx.world == 1,
    )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    got, losses = whole(model.state_dict()), []
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, *tokens(seed + step, 2, 4))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return got, losses


@pytest.mark.parametrize("saved_by", SIZES)
def test_saved_by_some_ranks_and_loaded_by_others(
    ranks: RankPool, tmp_path: Path, seed: int, saved_by: int
) -> None:
    expected = ranks.run(save, seed, str(tmp_path), world=saved_by)[0]
    assert expected.keys() == dense_llama(0, layers=1).state_dict().keys()
    runs = []
    for size in SIZES:
        for got, losses in ranks.run(load, seed, str(tmp_path), world=size):
            assert got.keys() == expected.keys()
            for name, value in got.items():
                assert torch.equal(value, expected[name]), (size, name)
            runs.append(losses)
    torch.testing.assert_close(torch.tensor(runs), torch.tensor(runs[0]).expand(len(runs), -1))


def of_torchs_styles(ctx: RankContext, seed: int, folder: str, ours: bool) -> None:
    """A checkpoint of one kind of styles, loaded with the other."""
    mesh = mesh_of(ctx)
    saved = parallelized(dense_llama(seed, layers=1), mesh, ours=ours)
    loaded = parallelized(dense_llama(seed + 1, layers=1), mesh, ours=not ours)
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder, process_group=ctx.group)
    state = get_model_state_dict(loaded)
    dcp.load({"model": state}, checkpoint_id=folder, process_group=ctx.group)
    set_model_state_dict(loaded, state)
    got, expected = whole(loaded.state_dict()), dense_llama(seed, layers=1).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("ours", [True, False])
def test_checkpoints_of_torchs_styles_are_ours(
    ranks: RankPool, tmp_path: Path, seed: int, ours: bool
) -> None:
    ranks.run(of_torchs_styles, seed, str(tmp_path), ours, world=2)


def from_one_rank(ctx: RankContext, seed: int) -> None:
    """A whole state dict that rank 0 alone has, and one that only rank 0 asks for."""
    mesh = mesh_of(ctx)
    dense = dense_llama(seed, layers=1)
    model = parallelized(dense_llama(seed + 1, layers=1), mesh)
    state = dense.state_dict() if ctx.rank == 0 else {}
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for name, value in whole(model.state_dict()).items():
        assert torch.equal(value, dense.state_dict()[name]), name
    if ctx.rank == 0:  # nobody else takes part: nothing may be sent
        assert model.state_dict().keys() == dense.state_dict().keys()
        assert all(isinstance(value, DTensor) for value in get_model_state_dict(model).values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, *tokens(seed, 2, 4)).backward()
    optimizer.step()
    if ctx.rank == 0:
        assert optimizer.state_dict()["state"]
    assert get_optimizer_state_dict(model, optimizer)["state"]


def test_a_state_dict_of_rank_0_alone(ranks: RankPool, seed: int) -> None:
    ranks.run(from_one_rank, seed, world=ranks.size, timeout=60)  # torch broadcasts over all ranks


def misfits(ctx: RankContext, seed: int, folder: str) -> None:
    save(ctx, seed, folder)
    mesh = mesh_of(ctx)
    wider = parallelized(dense_llama(seed, layers=1, inner=48), mesh)
    with pytest.raises(CheckpointException, match=r"(?s)feed_forward.*(36|48)") as error:
        dcp.load({"model": get_model_state_dict(wider)}, checkpoint_id=folder, process_group=ctx.group)
    assert "Size mismatch" in str(error.value), error.value
    deeper = parallelized(dense_llama(seed, layers=2), mesh)
    with pytest.raises(CheckpointException, match=r"(?s)layers\.1\."):
        dcp.load({"model": get_model_state_dict(deeper)}, checkpoint_id=folder, process_group=ctx.group)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.feed_forward\.w1"):
        wider.load_state_dict(parallelized(dense_llama(seed, layers=1), mesh).state_dict())


def test_a_checkpoint_that_does_not_fit(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    ranks.run(misfits, seed, str(tmp_path), world=2, timeout=60)
