"""Five to eight ranks, also odd numbers of them, on gloo; path "fused" is played by tests/fused_fakes.py.

Few GPU hosts have them all: what depends on the number of ranks alone is tried here.
"""

from __future__ import annotations

from collections.abc import Iterator

import fused_behaviour
import fused_checks
import fused_gradients
import fused_pairs
import fused_small
import op_checks
import pytest
import reported_checks
import torch
from fused_fakes import on_fakes
from op_checks import F64, on_device

from tpkernels.testing import RankPool

BF16, F16 = torch.bfloat16, torch.float16
FUSED, PLAIN = "fused", "gloo+blas"
WORLDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8, "gloo", timeout=100.0) as pool:
        yield pool


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "check", [fused_checks.check_gather, fused_checks.check_scatter, fused_small.check_all_reduce]
)
def test_values(eight_ranks, seed, check, world):
    """Layouts, 3-D operands, uneven and empty shards, fewer rows than ranks, none."""
    eight_ranks.run(on_fakes, check, FUSED, (BF16, F16)[world % 2], seed, world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_lengths_and_dimensions(eight_ranks, seed, world):
    for run, path in ((on_device, PLAIN), (on_fakes, FUSED)):
        eight_ranks.run(run, reported_checks.check_lengths, path, 40, seed, world=world)
        eight_ranks.run(run, reported_checks.check_dimensions, path, seed, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("uneven", [False, True])
def test_every_option_with_gradients(eight_ranks, uneven, world):
    for check in (op_checks.check_all_gather_matmul, op_checks.check_reduce):
        eight_ranks.run(on_device, check, F64, uneven, "auto", world=world)
        eight_ranks.run(on_fakes, check, BF16, uneven, FUSED, world=world)
    eight_ranks.run(on_device, op_checks.check_empty, world=world)


def _few_rows(ctx, dtype, seed):
    for check in (fused_checks.check_gather, fused_checks.check_scatter):
        check.__wrapped__(ctx, FUSED, dtype, seed)  # without overlaps()
    fused_small.check_sums_are_in_order(ctx, FUSED, seed)


@pytest.mark.parametrize("world, dtype", [(5, F16), (7, BF16)])
def test_few_rows(eight_ranks, seed, world, dtype):
    eight_ranks.run(on_fakes, _few_rows, dtype, seed, world=world)


def test_gradients_and_pairs(eight_ranks, seed):
    eight_ranks.run(on_fakes, fused_gradients.check_gradients, FUSED, F16, seed, world=5)
    eight_ranks.run(on_fakes, fused_pairs.check_pairs, FUSED, BF16, seed, world=7)


def test_repeats(eight_ranks, seed):
    eight_ranks.run(on_fakes, fused_behaviour.check_repeats, FUSED, 20, seed, world=7)
    eight_ranks.run(on_fakes, fused_small.check_repeats_by_two_steps, FUSED, 20, seed, world=6)


@pytest.mark.parametrize("world", [6, 8])
def test_a_grid_of_groups(eight_ranks, seed, world):
    """2 x 3 and 2 x 4."""
    eight_ranks.run(on_fakes, fused_behaviour.check_two_groups, FUSED, 16, seed, world=world)
