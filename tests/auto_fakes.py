"""Path "auto" among gloo ranks that play path "fused": constants, and helpers of the tests in tests/spawn."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

import torch
from few_rows import overlaps
from fused_behaviour import unchecked
from fused_fakes import FakeRuntime, forget
from op_checks import on_device

import tpkernels as tpk
from tpkernels.comm import choice, runtime
from tpkernels.comm import ranks as ranks_module
from tpkernels.comm.choice import Machine, Overlap
from tpkernels.ops import _groups

BF16, F32 = torch.bfloat16, torch.float32
OPS = (tpk.all_gather_matmul, tpk.matmul_reduce_scatter, tpk.matmul_all_reduce)


def machine_of(ctx, us=5.0, **changes) -> Machine:
    """Where a fused call takes ``us`` beside its product, and any other collective 100."""
    made = Machine(
        "NVIDIA H200",
        ctx.world,
        tflops=1.0,
        memory_gbps=1000.0,
        launch_us=10.0,
        apart=dict.fromkeys(choice.OPS, ((1e6, 100.0),)),
        fused=dict.fromkeys(choice.OPS, Overlap(1e3, 0.0, us, 0.0)),
    )
    # Far below 1e6 bytes times are told in proportion.
    return replace(made, apart=dict.fromkeys(choice.OPS, ((1.0, 100.0),)), **changes)


@overlaps()
def on_gloo(ctx, check, *args):
    """As fused_fakes.on_fakes, but path "auto" chooses. Few rows overlap too."""
    few_rows_on_gloo(ctx, check, *args)


def few_rows_on_gloo(ctx, check, *args):
    """As on_gloo, but few rows have a kernel of their own."""
    fake, real = FakeRuntime(ctx.rank), runtime.active
    fake.compared_with = ("gloo",)
    runtime.active = fake
    forget()
    try:
        on_device(ctx, check, *args)
    finally:
        runtime.active = real
        forget()
        os.environ.pop("TPK_PATH", None)


@contextmanager
def capturing():
    with unchecked():  # the comparison of arguments looks for a capture itself
        runtime.active.capture = True
        yield
        runtime.active.capture = False


def operands(ctx, op, m=6, n=8, k=8):
    rows = m if op is tpk.all_gather_matmul else m * ctx.world
    return torch.ones(rows, k, dtype=BF16), torch.ones(k, n, dtype=BF16)


def same_everywhere(ctx, value):
    everyone = ranks_module.exchange(members(ctx), value)
    assert all(one == value for one in everyone), everyone
    return value


def members(ctx):
    return _groups.resolve(ctx.group_name)
