"""Path "fused" with several processes on one GPU, which take turns on it: everything but links and speed.

The checks are in tests/fused_checks.py and the other fused_*.py there. The C++ ops by themselves are tested in
test_fused_kernels.py, several GPUs in tests/gpun/test_fused_gpus.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fused_behaviour
import fused_checks
import fused_gradients
import fused_graphs
import fused_pairs
import fused_small
import pytest
import torch
from fused_checks import FUSED
from fused_departures import departing
from op_checks import check_all_gather_matmul, check_reduce, on_device
from streamk_cases import hopper_only

from tpkernels.comm import departures
from tpkernels.testing import RankPool

sys.path.append(str(Path(__file__).resolve().parents[1] / "spawn"))
import grid_launches

pytestmark = [pytest.mark.gpu1, hopper_only]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = 4.0  # seconds until a stalled rank is reported


@pytest.mark.parametrize("world, dtype", [(2, BF16), (3, F16), (4, BF16)])
@pytest.mark.parametrize(
    "check",
    [
        fused_checks.check_gather,
        fused_checks.check_scatter,
        fused_checks.check_reference,
        fused_pairs.check_pairs,
    ],
)
def test_values(shared_gpu_ranks, seed, check, world, dtype):
    shared_gpu_ranks.run(on_device, check, FUSED, dtype, seed, world=world)


@pytest.mark.parametrize("way", departures.WAYS)
@pytest.mark.parametrize("world, dtype", [(2, BF16), (3, F16)])
def test_departures(shared_gpu_ranks, seed, world, dtype, way):
    check = fused_checks.check_scatter
    shared_gpu_ranks.run(on_device, departing, way, check, FUSED, dtype, seed, world=world)
    shared_gpu_ranks.run(on_device, departing, way, check_reduce, dtype, True, FUSED, world=world)
    shared_gpu_ranks.run(on_device, departing, way, fused_checks.check_large, FUSED, dtype, seed, world=world)


@pytest.mark.parametrize("world", [2, 3])
def test_several_waves_of_tiles(shared_gpu_ranks, seed, world):
    shared_gpu_ranks.run(on_device, fused_checks.check_large, FUSED, BF16, seed, world=world)


@pytest.mark.parametrize("world, dtype", [(2, F16), (3, BF16)])
def test_gradients(shared_gpu_ranks, seed, world, dtype):
    shared_gpu_ranks.run(on_device, fused_gradients.check_gradients, FUSED, dtype, seed, world=world)


@pytest.mark.parametrize("uneven", [False, True])
def test_every_dimension_and_option_with_gradients(shared_gpu_ranks, uneven):
    shared_gpu_ranks.run(on_device, check_all_gather_matmul, BF16, uneven, FUSED, world=3)


@pytest.mark.parametrize("uneven", [False, True])
def test_sums_scattered_and_for_all(shared_gpu_ranks, uneven):
    shared_gpu_ranks.run(on_device, check_reduce, BF16, uneven, FUSED, world=3)


@pytest.mark.parametrize("world, dtype", [(2, BF16), (3, F16), (4, BF16)])
def test_small_sums(shared_gpu_ranks, seed, world, dtype):
    shared_gpu_ranks.run(on_device, fused_small.check_all_reduce, FUSED, dtype, seed, world=world)
    shared_gpu_ranks.run(on_device, fused_small.check_empty, FUSED, world=world)
    shared_gpu_ranks.run(on_device, fused_small.check_gradients, FUSED, world=world)
    shared_gpu_ranks.run(on_device, fused_small.check_few_rows, FUSED, dtype, seed, world=world)
    shared_gpu_ranks.run(on_device, fused_small.check_sums_are_in_order, FUSED, seed, world=world)


def test_small_sums_again_and_again(shared_gpu_ranks, seed):
    shared_gpu_ranks.run(on_device, fused_small.check_repeats, FUSED, 200, seed, world=3)
    shared_gpu_ranks.run(on_device, fused_small.check_graphs, FUSED, 40, seed, world=3)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_repeats(shared_gpu_ranks, seed, world):
    shared_gpu_ranks.run(on_device, fused_behaviour.check_repeats, FUSED, 300, seed, world=world)
    shared_gpu_ranks.run(on_device, fused_small.check_repeats_by_two_steps, FUSED, 100, seed, world=world)


def test_cuda_graphs(shared_gpu_ranks, seed):
    shared_gpu_ranks.run(on_device, fused_graphs.check_graphs, FUSED, 60, seed, world=3)


def test_captures_that_need_memory(shared_gpu_ranks, seed):
    shared_gpu_ranks.run(on_device, fused_graphs.check_capture_needs_memory, FUSED, seed)


def test_reserved_memory(shared_gpu_ranks, seed):
    shared_gpu_ranks.run(on_device, fused_graphs.check_reserve, FUSED, seed)


def test_two_streams(shared_gpu_ranks, seed):
    shared_gpu_ranks.run(on_device, fused_behaviour.check_two_streams, FUSED, 60, seed, world=3)


def test_two_groups(shared_gpu_ranks, seed):
    shared_gpu_ranks.run(on_device, fused_behaviour.check_two_groups, FUSED, 100, seed)


def test_groups_come_and_go(shared_gpu_ranks, seed):
    shared_gpu_ranks.run(on_device, fused_behaviour.check_groups_come_and_go, FUSED, 20, seed)


def test_disagreement(shared_gpu_ranks):
    shared_gpu_ranks.run(on_device, fused_behaviour.check_disagreement, FUSED, world=3)


@pytest.mark.parametrize("dtype, word", [(F32, "float32"), (torch.float64, "float64")])
def test_dtypes_that_are_refused(shared_gpu_ranks, dtype, word):
    shared_gpu_ranks.run(on_device, fused_behaviour.check_refused, dtype, [word], world=2)


def test_compiler(shared_gpu_ranks):
    shared_gpu_ranks.run(on_device, fused_gradients.check_compile, FUSED, "aot_eager", world=2)


def test_blocking_launches_are_refused():
    with RankPool(2, share_gpu=True, env={"CUDA_LAUNCH_BLOCKING": "1"}) as pool:
        pool.run(on_device, fused_behaviour.check_refused, BF16, ["CUDA_LAUNCH_BLOCKING"])


@pytest.mark.parametrize("kind", list(fused_behaviour.STALLS))
def test_a_stalled_rank_is_reported(kind):
    """Without TPK_CHECK, whose collective would wait for that rank first."""
    env = {"TPK_CHECK": "0", "TPK_COMM_TIMEOUT_S": str(LIMIT)}
    with RankPool(3 if kind == "entry" else 2, share_gpu=True, env=env) as pool:
        answers = pool.run(on_device, fused_behaviour.check_stalled, kind)
    fused_behaviour.judge_stalled(kind, answers, LIMIT)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("case", [c for c in grid_launches.FUSED_CASES if c.world == 4], ids=str)
def test_grids(shared_gpu_ranks, seed, case, dtype):
    """Linear layers on 2 x 2 ranks, each pass one launch."""
    shared_gpu_ranks.run(on_device, grid_launches.check_fused, case, seed, dtype, world=4)


def test_grids_in_all_ways(shared_gpu_ranks, seed):
    shared_gpu_ranks.run(on_device, grid_launches.check_fused_ways, grid_launches.CASES[0], seed, world=4)
