"""``tpk.calibrate`` among gloo ranks that play path "fused"."""

from __future__ import annotations

from dataclasses import replace

import pytest
from auto_fakes import OPS, capturing, machine_of, on_gloo, operands, same_everywhere
from fused_fakes import forget
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.comm import auto, calibrate, choice, machines, runtime, workspace
from tpkernels.comm.choice import Machine


def _calibrated(ctx):
    """Measures the calls themselves, and gives every rank the same."""
    small = {op: tuple((m, 16, 8) for m in (4, 32, 64)) for op in choice.OPS}
    usual, calibrate.SHAPES = calibrate.SHAPES, small
    runtime.active.name = "new"
    try:
        made = tpk.calibrate(ctx.group)
    finally:
        calibrate.SHAPES = usual
    assert same_everywhere(ctx, made.to_json()) and (made.card, made.world) == ("new", ctx.world)
    assert {op: len(points) for op, points in made.apart.items()} == dict.fromkeys(choice.OPS, 3)
    assert {"gather", "scatter", "small packets"} <= set(runtime.active.log)
    x, w = operands(ctx, tpk.all_gather_matmul)
    tpk.all_gather_matmul(x, w, ctx.group)
    assert "us predicted" in tpk.last_path().why
    # Kept for groups to come, and by hand.
    assert auto.constants("new", ctx.world) == made
    forget()
    again = tpk.calibrate(ctx.group, machine=Machine.from_json(made.to_json()))
    assert again == made and auto.constants("new", ctx.world) == made


def test_calibrate(ranks):
    ranks.run(on_gloo, _calibrated, world=2, timeout=100)


def _refused(ctx):
    errors, mine = tpk.errors, machine_of(ctx)
    for given, words in (
        ("x", ["machine", "'x'"]),
        (replace(mine, world=7), ["machine", "2 ranks on NVIDIA H200", "7"]),
        (replace(mine, card="other"), ["machine", "NVIDIA H200", "other"]),
        (mine if ctx.rank == 0 else None, ["machine", "some ranks"]),
    ):
        expect(errors.ArgumentError, words, lambda given=given: tpk.calibrate(ctx.group, machine=given))
    runtime.active.compared_with = ("nccl",)
    expect(errors.BackendError, ["calibrate", "nccl", "gloo"], lambda: tpk.calibrate(ctx.group))
    runtime.active.compared_with = ("gloo",)
    with capturing():
        expect(errors.BackendError, ["calibrate", "captured"], lambda: tpk.calibrate(ctx.group))
    forget()
    runtime.active.missing = "it is too old" if ctx.rank == 1 else ""
    expect(errors.BackendError, ["rank 1 cannot: it is too old"], lambda: tpk.calibrate(ctx.group))
    assert not auto._calibrated and not workspace._spaces


def test_calibrate_refused(ranks):
    ranks.run(on_gloo, _refused, world=2)


def _single(ctx):
    expect(tpk.errors.ArgumentError, ["2 ranks", "1"], lambda: tpk.calibrate(ctx.group))


def test_calibrate_of_one_rank(ranks):
    ranks.run(on_gloo, _single, world=1)


def test_every_card_of_the_table_has_a_machine():
    assert {machine.card for machine in machines.MACHINES} >= {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_shapes_of_calibration(op):
    """Each has products that hide their copies and such that do not; sums, too, some that are small."""
    machine = machines.find("NVIDIA H200", 4)
    hides = set()
    for m, n, k in calibrate.SHAPES[op.__name__]:
        call = choice.Call(op.__name__, (m // 4,) * 4, n, k)
        copies = choice.travelling(call) / machine.fused[call.op].gbps * 1e-3
        hides.add(choice.product_us(call, machine) > copies)
    assert hides == {True, False}
