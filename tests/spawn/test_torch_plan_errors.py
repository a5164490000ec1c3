"""Plans that cannot be, and what GatherOnce and the exchanged layers do at the edges."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from fused_checks import count_groups_alike
from nn_dense import close
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch_plans import F64, Attention, FeedForward, fresh, full, given, grads_of, mesh_of

import tpkernels as tpk
from tpkernels.errors import ArgumentError, DTypeError, GroupError, ShapeError, TpkError
from tpkernels.integrations.torch import Colwise, GatherOnce, Rowwise, SequenceParallel
from tpkernels.integrations.torch._linear import ColwiseLinear
from tpkernels.testing import RankContext, RankPool


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Colwise(input_layouts=(Shard(1),)),
            r"input_layouts: Colwise takes one of .*\(Shard\(dim=1\),\)",
        ),
        (lambda: Colwise(output_layouts=Partial()), "output_layouts: Colwise takes one of .* Partial"),
        (lambda: Rowwise(input_layouts="Shard(1)"), "input_layouts: Rowwise .*'Shard"),
        (lambda: Rowwise(output_layouts=1), "output_layouts: Rowwise .* it is 1"),
        (lambda: SequenceParallel(sequence_dim=-1), "sequence_dim: .* it is -1"),
        (lambda: GatherOnce("wq"), "two or more different names, but got 1"),
        (lambda: GatherOnce("wq", "wq"), "two or more different names, but got 2"),
        (lambda: GatherOnce("wq", "wk", input_layouts=Partial()), "input_layouts: GatherOnce"),
    ],
)
def test_arguments_that_cannot_be(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def fails(words: str, kind: type[TpkError], module: nn.Module, mesh: DeviceMesh, plan: object) -> None:
    with pytest.raises(kind, match=words):
        parallelize_module(module, mesh, plan)


def refused(ctx: RankContext) -> None:
    mesh = mesh_of(ctx)
    count_groups_alike(ctx)
    two = init_device_mesh("cpu", (1, ctx.world), mesh_dim_names=("dp", "tp"))
    for style in (Colwise(), Rowwise(), SequenceParallel(), GatherOnce("wq", "wk")):
        words = rf"1 dimension, but this one has 2 \(1 x {ctx.world}, dp, tp\); .*mesh\['tp'\]"
        fails(words, GroupError, nn.Linear(4, 4), two, style)
    fails("names a FeedForward, which has 3 such modules", DTypeError, FeedForward(4, 8), mesh, Colwise())
    fails("nn.Linear or nn.Embedding", DTypeError, nn.LayerNorm(4), mesh, Rowwise())
    fails("no 'w9'", ArgumentError, FeedForward(4, 8), mesh, GatherOnce("w1", "w9"))
    fails(
        "GatherOnce is for nn.Linear",
        DTypeError,
        nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
        mesh,
        GatherOnce("0", "1"),
    )
    done = parallelize_module(nn.Linear(6, 4), mesh, Colwise())
    fails("a layer of 4 x 6 that Colwise has parallelized already", ArgumentError, done, mesh, Rowwise())

    x = torch.randn(2, 3, 6)
    bad = parallelize_module(nn.Linear(6, 4), mesh, Colwise(input_layouts=Shard(3)))
    with pytest.raises(ArgumentError, match=r"input_layouts: Shard\(3\) .* it has 3, so -3 to 2"):
        bad(x)
    bad = parallelize_module(nn.Linear(6, 4), mesh, Rowwise(output_layouts=Shard(4)))
    with pytest.raises(ArgumentError, match=r"output_layouts: Shard\(4\)"):
        bad(given(x, Shard(2), mesh, True))
    bad = parallelize_module(nn.Linear(6, 4), mesh, Colwise(output_layouts=Shard(-4)))
    with pytest.raises(ArgumentError, match=r"output_layouts: Shard\(-4\)"):
        bad(x)
    bad = parallelize_module(nn.Linear(6, 4), mesh, Rowwise(input_layouts=Shard(3)))
    with pytest.raises(ArgumentError, match=r"input_layouts: Shard\(3\)"):
        bad(x)
    bad = parallelize_module(nn.Linear(6, 4), mesh, Rowwise())
    with pytest.raises(ShapeError, match=r"(?s)(?=.*\b6\b)(?=.*\b3\b)"):  # the whole of the input, not a part
        bad(x)
    with pytest.raises(ArgumentError, match="the input is a DTensor on"):
        done(distribute_tensor(x, two, [Replicate(), Replicate()]))
    ff = FeedForward(6, 4)
    parallelize_module(ff, mesh, {"": GatherOnce("w1", "w3"), "w1": Colwise(), "w2": Rowwise()})
    with pytest.raises(ArgumentError, match="'w3' is not parallelized by Colwise"):
        ff(x)
    with pytest.raises(ArgumentError, match="called with none; pass the input by position"):
        ff(x=x)
    done.weight = nn.Parameter(done.weight.to_local())
    with pytest.raises(ArgumentError, match="a DTensor of 4 x 6, but now it is a Parameter of 2 x 6"):
        done(x)


def test_what_cannot_be_parallelized_is_refused_alike_on_every_rank(ranks: RankPool) -> None:
    ranks.run(refused, world=2)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Plain(nn.Linear):
    """A class without a forward of its own."""


def own_classes(ctx: RankContext) -> None:
    mesh = mesh_of(ctx)
    x = torch.randn(4, 6, dtype=F64)
    scaled = Scaled(6, 8, dtype=F64)
    with pytest.warns(UserWarning, match="Scaled has a forward of its own, so it runs on torch's operations"):
        ours = parallelize_module(fresh(scaled), mesh, Colwise(use_local_output=False))
    close(ours(x).full_tensor(), scaled(x), "a forward of its own")
    named = Plain(6, 8, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = parallelize_module(fresh(named), mesh, Colwise(use_local_output=False))
    assert isinstance(ours, Plain)
    assert isinstance(ours, ColwiseLinear)
    close(ours(x).full_tensor(), named(x), "a name of its own")

    dense = nn.Linear(6, 8, dtype=F64)
    ours = parallelize_module(fresh(dense), mesh, Colwise(output_layouts=Replicate()))
    assert "in_features=6, out_features=8" in repr(ours)
    close(copy.deepcopy(ours)(x), dense(x), "a copy")
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    ours.register_forward_hook(lambda module, args, out: out + 1)
    close(ours(x), dense(x) + 1, "hooks")
    with torch.autocast("cpu", torch.bfloat16):
        half = parallelize_module(nn.Linear(6, 8), mesh, Colwise())(x.float())
    assert half.dtype == torch.bfloat16


def test_classes_copies_hooks_and_autocast(ranks: RankPool) -> None:
    ranks.run(own_classes, world=2)


class Unusual(nn.Module):
    """Calls its layers twice, on another tensor, after a change in place, and not all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 4, dtype=F64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.a(x) + self.b(x * 2)
        with torch.no_grad():
            z = self.b(x)
        if torch.is_grad_enabled():
            return y + z
        x.mul_(3)
        return y + z + self.b(x)


def unusual(ctx: RankContext) -> None:
    mesh = mesh_of(ctx)
    dense = Unusual()
    x = torch.randn(2, 2 * ctx.world, 6, dtype=F64)
    expected = dense(x)
    expected.square().sum().backward()
    with torch.no_grad():
        changed = dense(x.clone())
    plan = {"": GatherOnce("a", "b", "c"), **{name: Colwise(use_local_output=False) for name in "abc"}}
    ours = parallelize_module(fresh(dense), mesh, plan)
    for layout in (Shard(1), Shard(0), Replicate()):
        ours.zero_grad(set_to_none=True)
        out = ours(distribute_tensor(x.clone(), mesh, [layout]))
        close(out.full_tensor(), expected, f"{layout}")
        out.square().sum().backward()
        for name in ("a", "b"):
            close(full(ours.get_submodule(name).weight.grad), dense.get_submodule(name).weight.grad, name)
        assert ours.a.tpk_shared.waiting == []
        assert ours.a.tpk_shared.input is None
        with torch.no_grad():
            close(ours(distribute_tensor(x.clone(), mesh, [layout])).full_tensor(), changed, "changed")
    with pytest.raises(ShapeError, match="expected 5 rows"):
        ours(distribute_tensor(torch.randn(2, 4, 5, dtype=F64), mesh, [Replicate()]))
    assert ours.a.tpk_shared.input is None
    close(full(ours.a(distribute_tensor(x, mesh, [Shard(1)]))), dense.a(x), "outside the parent")
    close(full(copy.deepcopy(ours)(distribute_tensor(x.clone(), mesh, [Shard(1)]))), expected, "a copy")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gather_once_where_layers_are_called_otherwise(ranks: RankPool, world: int) -> None:
    ranks.run(unusual, world=world)


def one_gather(ctx: RankContext) -> None:
    mesh = mesh_of(ctx)
    model = parallelize_module(
        Attention(24, 12, 4),
        mesh,
        {
            "": GatherOnce("wq", "wk", "wv"),
            "w[qkv]": Colwise(),
            "wo": Rowwise(output_layouts=Shard(1)),
        },
    )
    assert "'wq', 'wk', 'wv'" in repr(GatherOnce("wq", "wk", "wv"))
    with tpk.record_paths() as log:
        model(torch.randn(2, 3, 24, requires_grad=True)).sum().backward()
    counts = {op: sum(n for (name, _), n in log.counts.items() if name == op) for op, _ in log.counts}
    assert counts["all_gather_matmul"] == 2, log  # forward of q, k, v; backward of wo
    assert counts["matmul_reduce_scatter"] == 2, log
    assert grads_of(model).keys() == {f"w{c}.weight" for c in "qkvo"}
    assert isinstance(model.wq.weight, DTensor)


def test_one_gather_for_all(ranks: RankPool) -> None:
    ranks.run(one_gather, world=2)
