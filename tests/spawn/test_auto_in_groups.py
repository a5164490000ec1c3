"""Path "auto" in groups that are a part of the job: ranks as a grid, each in the groups of its row and its column."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

import torch
from auto_fakes import OPS, machine_of, members, on_gloo, operands, same_everywhere
from fused_behaviour import unchecked
from fused_checks import new_group

import tpkernels as tpk
from tpkernels.comm import auto


def _lines(ctx):
    """This rank's views of its row and of its column, of a grid of 2 x 2."""
    views = []
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]):
        group = new_group(ctx, ranks)  # by every rank of the pool, in one order
        if ctx.rank in ranks:
            place = {"rank": ranks.index(ctx.rank), "world": len(ranks)}
            views.append(replace(ctx, group=group, group_name=group.group_name, **place))
    return views


def _every_group_by_itself(ctx):
    """The first rank of each group chooses for it, whatever other groups take, and however late its ranks are."""
    pays = ctx.rank in (0, 3)
    row, column = _lines(ctx)
    groups = {"row": row, "column": column, "all": ctx}
    first_of = {"row": ctx.rank // 2 * 2, "column": ctx.rank % 2, "all": 0}
    for view in groups.values():
        auto._calibrated["NVIDIA H200", view.world] = machine_of(view, us=5.0 if pays else 500.0)
    calls = []
    for name, view in groups.items():
        for op in OPS:
            x, w = operands(view, op)
            x = x * (1 + ctx.rank)  # so that groups have results of their own
            calls.append((name, op, x, w, op(x, w, view.group, path="gloo+blas")))
    together, alone = random.Random(11), random.Random(100 + ctx.rank)
    seen = set()
    with unchecked():
        for i in range(20 * len(calls)):
            name, op, x, w, want = calls[i] if i < len(calls) else together.choice(calls)
            if alone.random() < 0.05:
                time.sleep(0.003)
            view = groups[name]
            assert torch.equal(op(x, w, view.group), want), (name, op.__name__)
            record = tpk.last_path()
            assert record.path.startswith("fused+") == (first_of[name] in (0, 3)), (name, record)
            assert ("rank 0 chose so" in record.why) == (pays != (first_of[name] in (0, 3))), (name, record)
            seen.add((name, record.path.partition("+")[0]))
    for name, view in groups.items():
        same_everywhere(view, sorted(path for which, path in seen if which == name))
    assert len(seen) == len(groups), "a group changed its mind"
    told = tpk.explain("matmul_reduce_scatter", *operands(row, tpk.matmul_reduce_scatter), row.group)
    assert told.path.startswith("fused+") == pays, "explain tells what this rank would choose"


def test_every_group_by_itself(ranks):
    ranks.run(on_gloo, _every_group_by_itself, world=4, timeout=200)


def _nvshmem(ctx):
    """Its memory is allocated by all ranks of the job together: refused in groups of some of them."""
    os.environ["TPK_SYMMETRIC_BACKEND"] = "NVSHMEM"
    try:
        for view, path in ((_lines(ctx)[0], "gloo+blas"), (ctx, "fused+streamk")):
            auto._calibrated["NVIDIA H200", view.world] = machine_of(view)
            x, w = operands(view, tpk.all_gather_matmul)
            tpk.all_gather_matmul(x, w, view.group)
            record = tpk.last_path()
            assert record.path == path, record
            assert ("the group has only some of them" in record.why) == (members(view).world < ctx.world)
    finally:
        del os.environ["TPK_SYMMETRIC_BACKEND"]


def test_nvshmem(ranks):
    ranks.run(on_gloo, _nvshmem, world=4, timeout=100)
