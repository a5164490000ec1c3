"""The Python side of path "fused" among gloo ranks: the ops of ``_C_sm90a`` are played by tests/fused_fakes.py.

The same checks run on real kernels in tests/gpu1/test_fused_one_gpu.py and tests/gpun/test_fused_gpus.py.
"""

from __future__ import annotations

from contextlib import contextmanager

import fused_behaviour
import fused_checks
import fused_gradients
import fused_pairs
import fused_small
import op_checks
import pytest
import torch
from fused_departures import departing
from fused_fakes import on_fakes

from tpkernels.comm import runtime

PATH = "fused"


@pytest.mark.parametrize("world,dtype", [(2, torch.bfloat16), (3, torch.float16)])
@pytest.mark.parametrize(
    "check",
    [
        fused_checks.check_gather,
        fused_checks.check_scatter,
        fused_checks.check_reference,
        fused_gradients.check_gradients,
        fused_pairs.check_pairs,
        fused_small.check_all_reduce,
        fused_small.check_few_rows,
    ],
)
def test_values(ranks, seed, check, world, dtype):
    ranks.run(on_fakes, check, PATH, dtype, seed, world=world, timeout=200)


@pytest.mark.parametrize("uneven", [False, True])
def test_every_argument_of_the_gather(ranks, uneven):
    ranks.run(on_fakes, op_checks.check_all_gather_matmul, torch.bfloat16, uneven, PATH, world=3, timeout=100)


@pytest.mark.parametrize("uneven", [False, True])
def test_sums_scattered_and_for_all(ranks, uneven):
    ranks.run(on_fakes, op_checks.check_reduce, torch.bfloat16, uneven, PATH, world=3, timeout=100)


def check_who_stores(ctx, way, sums, scattered, seed):
    """Values, and whether products store what is summed for all, and what is scattered."""
    stored = runtime.active.stored
    departing(ctx, way, fused_small.check_repeats_by_two_steps, PATH, 4, seed)
    assert set(stored) == {sums}
    stored.clear()
    departing(ctx, way, fused_checks.check_scatter, PATH, torch.bfloat16, seed)
    assert set(stored) == {scattered}


@pytest.mark.parametrize(
    "way,sums,scattered", [("copies", False, False), ("stores", True, True), ("auto", True, False)]
)
def test_departures(ranks, seed, way, sums, scattered):
    ranks.run(on_fakes, check_who_stores, way, sums, scattered, seed, world=3, timeout=200)


def test_shapes_that_change(ranks, seed):
    ranks.run(on_fakes, fused_behaviour.check_repeats, PATH, 40, seed, world=3, timeout=200)
    ranks.run(on_fakes, fused_small.check_repeats_by_two_steps, PATH, 20, seed, world=3, timeout=100)


def test_small_sums(ranks, seed):
    ranks.run(on_fakes, fused_small.check_empty, PATH, world=3)
    ranks.run(on_fakes, fused_small.check_gradients, PATH, world=3)
    ranks.run(on_fakes, fused_small.check_sums_are_in_order, PATH, seed, world=3)
    ranks.run(on_fakes, fused_small.check_repeats, PATH, 30, seed, world=3, timeout=100)
    ranks.run(on_fakes, fused_small.check_first_use_in_a_capture, PATH, _capturing, world=2)


@contextmanager
def _capturing(ctx):
    runtime.active.capture = True
    yield
    runtime.active.capture = False


def test_two_groups(ranks, seed):
    ranks.run(on_fakes, fused_behaviour.check_two_groups, PATH, 20, seed, world=4, timeout=200)


def test_groups_that_come_and_go(ranks, seed):
    ranks.run(on_fakes, fused_behaviour.check_groups_come_and_go, PATH, 1, seed, world=4, timeout=280)


def test_disagreement(ranks):
    ranks.run(on_fakes, fused_behaviour.check_disagreement, PATH, world=3)


def test_compile(ranks):
    ranks.run(on_fakes, fused_gradients.check_compile, PATH, "aot_eager", world=2, timeout=200)
