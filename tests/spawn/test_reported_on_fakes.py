"""Reports of users of other libraries, tried on gloo ranks: the checks are in tests/reported_checks.py.

Path "fused" is played by tests/fused_fakes.py; on GPUs the same checks run in tests/gpun/test_reported.py.
"""

from __future__ import annotations

import math

import fused_checks
import pytest
import reported_checks
from auto_fakes import few_rows_on_gloo, machine_of
from few_rows import overlaps
from fused_fakes import on_fakes
from fused_small import forced
from op_checks import on_device

import tpkernels as tpk
from tpkernels.comm import runtime

PLAIN = "gloo+blas"


@overlaps()
def _of_many_rows(ctx, check, *args):
    """As if those of the check were many."""
    check(ctx, *args)


@pytest.mark.parametrize("world", [2, 4])
def test_lengths_that_change(ranks, seed, world):
    ranks.run(on_device, reported_checks.check_lengths, PLAIN, 150, seed, world=world, timeout=100)
    ranks.run(on_fakes, reported_checks.check_lengths, "fused", 60, seed, world=world, timeout=100)


@pytest.mark.parametrize("world", [2, 3])
def test_every_dimension(ranks, seed, world):
    ranks.run(on_device, reported_checks.check_dimensions, PLAIN, seed, world=world)
    ranks.run(on_fakes, reported_checks.check_dimensions, "fused", seed, world=world)


def test_layers_of_models(ranks, seed):
    check = reported_checks.check_layers_of_models
    ranks.run(on_device, check, PLAIN, 12, seed, 64, world=3, timeout=100)
    ranks.run(on_fakes, check, "fused", 8, seed, 64, world=4, timeout=100)
    ranks.run(on_fakes, _of_many_rows, check, "fused", 8, seed, 64, world=3, timeout=100)


def test_a_rank_late_with_its_memory(ranks, seed):
    check = reported_checks.check_a_rank_late_with_its_memory
    ranks.run(on_fakes, check, "fused", 0.2, seed, world=3)


def _sums_by_two_steps(ctx, seed):
    with forced(None):
        reported_checks.check_huge_sum(ctx, "fused", seed, 2**17)


def test_sums_in_parts(ranks, seed):
    ranks.run(on_device, reported_checks.check_huge_sum, PLAIN, seed, 2**17, world=3)
    ranks.run(on_fakes, _sums_by_two_steps, seed, world=3)


def test_rows_in_parts(ranks, seed):
    ranks.run(on_fakes, fused_checks.check_huge, "fused", seed, 2**17, world=3)


def test_training(ranks, seed):
    """Few rows: sums are those of the other paths to the bit. Many: the owner's partial is not rounded."""
    check = reported_checks.check_training
    ranks.run(on_fakes, check, "fused", PLAIN, 12, seed, True, world=3)
    ranks.run(on_fakes, _of_many_rows, check, "fused", PLAIN, 12, seed, False, world=3)


def _not_slower(ctx):
    tpk.calibrate(ctx.group, machine=machine_of(ctx))
    reported_checks.check_not_slower(ctx, PLAIN, 8, 64, math.inf)
    assert tpk.last_path().op == "matmul_reduce_scatter"


def test_times_are_compared(ranks):
    """No more: what fakes take says nothing."""
    ranks.run(few_rows_on_gloo, _not_slower, world=2)


def _layers(ctx):
    def allocated(times):
        reported_checks.check_layers_come_and_go(ctx, "fused", times)
        return sum(line.startswith("allocate") for line in runtime.active.log)

    assert allocated(1) == allocated(5) > 0, "shared memory belongs to the group, not to a layer"


def test_layers_come_and_go(ranks):
    ranks.run(on_fakes, _layers, world=2)
