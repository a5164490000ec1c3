"""Each style that we take over from transformers, on layers alone: every alias, odd sizes, worlds 1 to 4; enable()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nn_dense import close
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.testing import RankContext, RankPool

pytest.importorskip(
    "transformers", minversion="5.22", reason="needs transformers 5.22 or newer (extra: integrations)"
)

F64 = torch.float64


class Net(nn.Module):
    """Embedding, a layer, another, a head."""

    def __init__(self, inner: int, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.embed = nn.Embedding(11, 6, padding_idx=7)
        self.first = nn.Linear(6, 2 * inner if packed else inner)
        self.second = nn.Linear(inner, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        if self.packed:
            gate, up = x.chunk(2, -1)
            x = torch.nn.functional.silu(gate) * up
        return self.head(self.second(x))


def parallel(net: nn.Module, ctx: RankContext, plan: dict[str, str]) -> nn.Module:
    """``net`` with the plan applied as transformers does it, and its own weights."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor
    from transformers.distributed import tensor_parallel as theirs

    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    rules = {f"{module}.{p}": style for module, style in plan.items() for p in ("weight", "bias")}
    rules.pop("embed.bias", None)
    whole = copy.deepcopy(net.state_dict())
    out: nn.Module = theirs.apply_tensor_parallelism(copy.deepcopy(net), mesh, {**rules, **plan})
    with torch.no_grad():
        for name, p in out.named_parameters():  # what loading a checkpoint does
            p.copy_(distribute_tensor(whole[name], mesh, p.placements))
    return out


def plan_of(column: str, row: str, head: str, embed: str = "embedding_rowwise") -> dict[str, str]:
    return {"embed": embed, "first": column, "second": row, "head": head}


PLANS = {
    "names of 5.24": (plan_of("colwise", "rowwise", "colwise_gather_output"), False),
    "older names": (plan_of("colwise", "rowwise_allreduce", "colwise_rep"), False),
    "names between": (plan_of("colwise", "rowwise", "colwise_allgather"), False),
    "whole between": (plan_of("colwise_rep", "rowwise_rep", "colwise_rep"), False),
    "split input": (plan_of("colwise_gather_output", "rowwise_split_input", "colwise_rep"), False),
    "packed": (plan_of("packed_colwise", "rowwise", "colwise_rep"), True),
}


def check_plan(ctx: RankContext, name: str, seed: int) -> None:
    from tpkernels.integrations import transformers as ours

    torch.manual_seed(seed)
    plan, packed = PLANS[name]
    net = Net(12 if packed else 10, packed).to(F64)  # 10 of 4 ranks: 3, 3, 3, 1; 11 tokens: 3, 3, 3, 2
    ids = torch.randint(11, (3, 5))
    ids[0] = 7
    handle = ours.enable()
    net_of_ranks = parallel(net, ctx, plan)
    handle.disable()
    outer = torch.randn(3, 5, 11, dtype=F64)
    (net(ids) * outer).sum().backward()
    with tpk.record_paths() as paths:
        out = net_of_ranks(ids)
    close(out, net(ids), name)
    ops = {op for op, _ in paths.counts}
    assert {"matmul_replicated", "matmul_all_reduce", "all_reduce"} <= ops, ops
    (out * outer).sum().backward()
    for key, p in net_of_ranks.named_parameters():
        expected: Any = dict(net.named_parameters())[key].grad
        got: Any = p.grad
        close(
            packed_whole(got) if "first" in key and packed else got.full_tensor(), expected, f"{name}: {key}"
        )


def packed_whole(grad: Any) -> Tensor:
    """What ranks hold of [gate; up], put together here: torch's own full_tensor() is not asked."""
    mine = grad.to_local()
    gate, up = mine.chunk(2, 0)
    group = grad.device_mesh.get_group()
    return torch.cat([tpk.regions.all_gather(t.contiguous(), 0, group) for t in (gate, up)])


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_plan(ranks: RankPool, world: int, name: str, seed: int) -> None:
    ranks.run(check_plan, name, seed, world=world)


def check_packed_uneven(ctx: RankContext) -> None:
    from tpkernels.integrations import transformers as ours

    plan, packed = PLANS["packed"]
    with ours.enable(), pytest.raises(ShapeError, match=r"multiple of 2 x 3 ranks, but it is 20"):
        parallel(Net(10, packed), ctx, plan)


def test_packed_uneven(ranks: RankPool) -> None:
    ranks.run(check_packed_uneven, world=3)


def check_other_modules(ctx: RankContext) -> None:
    """A module that is no plain nn.Linear runs as transformers has it."""
    from tpkernels.integrations import transformers as ours

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    net = Net(10, False).to(F64)
    net.second.__class__ = Scaled
    with ours.enable():
        other = parallel(net, ctx, PLANS["names of 5.24"][0])
    ids = torch.randint(11, (3, 5))
    with tpk.record_paths() as paths:
        close(other(ids), net(ids), "scaled")
    assert "matmul_all_reduce" not in {op for op, _ in paths.counts}
    with pytest.raises(ArgumentError, match=r"input_ids: every index must be from 0 to 10, but there is 11"):
        other(torch.full((1, 2), 11))


def test_other_modules(ranks: RankPool) -> None:
    ranks.run(check_other_modules, world=2)


def test_enable_and_disable() -> None:
    from transformers.distributed import mixin
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES as REGISTRY

    from tpkernels.integrations import transformers as ours

    before, apply = dict(REGISTRY), mixin.apply_tensor_parallelism
    with ours.enable():
        assert all(REGISTRY[name] is not before.get(name) for name in ours.STYLES)
        assert all(REGISTRY[name] is before[name] for name in ours.LEFT if name in before)
    assert dict(REGISTRY) == before
    assert mixin.apply_tensor_parallelism is apply
    first = ours.enable("rowwise")  # one name may be a string
    assert REGISTRY["rowwise"] is not before["rowwise"]
    assert REGISTRY["colwise"] is before["colwise"]
    second = ours.enable()
    first.disable()
    second.disable()
    second.disable()
    assert dict(REGISTRY) == before
    assert set(before) <= {*ours.STYLES, *ours.LEFT}, "a style of this release that no table of ours has"
    assert set(ours.STYLES.values()) <= set(before)


def test_unknown_names() -> None:
    from tpkernels.integrations import transformers as ours

    with pytest.raises(
        ArgumentError, match=r"styles: 'colwize' is unknown; expected some of colwise, .*rowwise"
    ):
        ours.enable(["colwise", "colwize"])
    with pytest.raises(ArgumentError, match=r"'sequence_parallel' is left to transformers \(it is for norms"):
        ours.enable(["sequence_parallel"])
