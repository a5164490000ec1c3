"""Reports of users of other libraries, tried on gloo ranks: the checks are in tests/reported_checks.py.

Path "fused" is played by tests/fused_fakes.py; on GPUs the same checks run in tests/gpun/test_reported.py.
"""

from __future__ import annotations

import pytest
import reported_checks
from fused_fakes import on_fakes
from op_checks import on_device

from tpkernels.comm import runtime


@pytest.mark.parametrize("world", [2, 4])
def test_lengths_that_change(ranks, seed, world):
    ranks.run(on_device, reported_checks.check_lengths, "gloo+blas", 150, seed, world=world, timeout=100)
    ranks.run(on_fakes, reported_checks.check_lengths, "fused", 60, seed, world=world, timeout=100)


def test_sums_in_parts(ranks, seed):
    ranks.run(on_device, reported_checks.check_huge_sum, "gloo+blas", seed, 2**17, world=3)


def _layers(ctx):
    def allocated(times):
        reported_checks.check_layers_come_and_go(ctx, "fused", times)
        return sum(line.startswith("allocate") for line in runtime.active.log)

    assert allocated(1) == allocated(5) > 0, "shared memory belongs to the group, not to a layer"


def test_layers_come_and_go(ranks):
    ranks.run(on_fakes, _layers, world=2)
